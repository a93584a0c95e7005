"""The Trainer callback: when it publishes, what it tells, and that a Trainer takes it."""

from __future__ import annotations

import builtins
from types import SimpleNamespace

import pytest
import torch

from thinwire.types import InputError, MissingExtra
from thinwire.uses.following.callback import publish_callback
from thinwire.uses.following.pull.store_reader import ShelfReader
from thinwire.uses.following.pull.store_writer import ShelfWriter
from thinwire.uses.following.push.publisher import Publisher


class Recorder:
    def __init__(self):
        self.calls = []

    def publish(self, step=None, **meta):
        self.calls.append((step, meta))

    def flush(self, timeout=0.0):
        self.flushed = timeout

    def close(self):
        self.calls.append("closed")


def begin(callback, main=True, model=None):
    state = SimpleNamespace(global_step=0, is_world_process_zero=main, log_history=[])
    callback.on_train_begin(None, state, None, model=model)


def run(callback, steps, main=True, logs=()):
    state = SimpleNamespace(global_step=0, is_world_process_zero=main, log_history=list(logs))
    for _ in range(steps):
        state.global_step += 1
        callback.on_step_end(None, state, None)
    callback.on_train_end(None, state, None)


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3]), (2, [2]), (3, [3]), (9, [])])
def test_it_publishes_every_so_many_steps_and_at_the_end_of_each_training(every, steps):
    """At the end always: the best model may have been loaded after the last step."""
    pytest.importorskip("transformers")
    publisher = Recorder()
    callback = publish_callback(publisher, every)
    for _ in range(2):
        run(callback, 3)
    assert [step for step, _ in publisher.calls] == 2 * [*steps, 3]


def test_only_the_main_process_publishes():
    pytest.importorskip("transformers")
    publisher = Recorder()
    run(publish_callback(publisher), 3, main=False)
    assert publisher.calls == []


def test_what_makes_a_publisher_is_called_on_the_main_process_for_each_training_and_closed_after_it():
    pytest.importorskip("transformers")
    made = []

    def make():
        made.append(Recorder())
        return made[-1]

    callback = publish_callback(make, every=2)
    begin(callback, main=False)
    run(callback, 2, main=False)
    assert made == []
    for _ in range(2):
        begin(callback)
        run(callback, 2)
    assert [p.calls for p in made] == 2 * [[(2, {}), (2, {}), "closed"]]


def test_a_publisher_that_was_given_stays_open_after_the_training():
    pytest.importorskip("transformers")
    publisher = Recorder()
    callback = publish_callback(publisher)
    begin(callback)
    run(callback, 1)
    assert publisher.calls == 2 * [(1, {})]


def test_the_publisher_of_a_training_that_failed_gives_its_address_to_the_next():
    pytest.importorskip("transformers")
    with Publisher({"w": torch.zeros(2)}) as first:
        port = first.port
    callback = publish_callback(lambda: Publisher({"w": torch.zeros(2)}, port=port))
    begin(callback)
    begin(callback)
    run(callback, 1)
    with Publisher({"w": torch.zeros(2)}, port=port):
        pass


def test_a_publisher_that_does_not_close_well_does_not_fail_the_training():
    pytest.importorskip("transformers")

    class Full(Recorder):
        def close(self):
            raise OSError("no space left")

    callback = publish_callback(Full)
    begin(callback)
    with pytest.warns(UserWarning, match="no space left"):
        run(callback, 1)


@pytest.mark.parametrize("refused", [False, True])
def test_what_was_made_for_a_training_that_failed_can_be_closed(refused):
    pytest.importorskip("transformers")
    made = []

    class Refusing(Recorder):
        def __init__(self):
            super().__init__()
            made.append(self)

        def publish(self, step=None, **meta):
            raise InputError("no version")

    callback = publish_callback(Refusing if refused else lambda: made.append(Recorder()) or made[-1])
    begin(callback)
    if refused:  # what publish raises ends the training
        with pytest.raises(InputError, match="no version"):
            run(callback, 1)
    else:
        callback.close()
    callback.close()
    assert made[-1].calls == ["closed"]


def test_none_will_do_on_every_process_but_the_main_one():
    pytest.importorskip("transformers")
    callback = publish_callback(None)
    begin(callback, main=False)
    run(callback, 2, main=False)
    with pytest.raises(InputError, match="main process has no publisher"):
        begin(callback)


class Anew(torch.nn.Module):
    """Wraps a layer in parameters of its own, of the same memory."""

    def __init__(self, layer):
        super().__init__()
        self.weight = torch.nn.Parameter(layer.weight.detach())


@pytest.mark.parametrize("made", [True, False])
def test_a_publisher_of_a_model_that_is_not_trained_is_refused_as_training_begins(made):
    pytest.importorskip("transformers")
    with Publisher(torch.nn.Linear(2, 2)) as publisher:
        port = publisher.port
        if not made:
            with pytest.raises(InputError, match="Linear shares no parameter with the Sequential that is"):
                begin(publish_callback(publisher), model=torch.nn.Sequential(torch.nn.Linear(2, 2)))
            begin(publish_callback(publisher), main=False, model=torch.nn.Linear(2, 2))
    if made:
        callback = publish_callback(lambda: Publisher(torch.nn.Linear(2, 2), port=port))
        with pytest.raises(InputError, match="shares no parameter"):
            begin(callback, model=torch.nn.Linear(2, 2))
        Publisher({"w": torch.zeros(2)}, port=port).close()  # it was closed again


def test_a_part_of_the_trained_model_a_wrapper_of_it_or_other_tensors_may_be_published(tmp_path):
    pytest.importorskip("transformers")
    layer = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), layer)
    average = torch.nn.Linear(2, 2).state_dict()
    for source, trained in ((layer, model), (model, layer), (Anew(layer), model), (average, model)):
        with Publisher(source) as publisher:
            begin(publish_callback(publisher), model=trained)
    with Publisher(model, names=lambda name: name if name.startswith("1.") else None) as publisher:
        begin(publish_callback(publisher), model=model)
    with Publisher(torch.nn.BatchNorm1d(2, affine=False)) as publisher:  # buffers only
        begin(publish_callback(publisher), model=model)
    with (
        ShelfWriter.of(tmp_path, torch.nn.Linear(2, 2)) as writer,
        pytest.raises(InputError, match="no parameter"),
    ):
        begin(publish_callback(writer), model=model)


def test_the_last_loss_goes_with_the_version():
    pytest.importorskip("transformers")
    publisher = Recorder()
    run(publish_callback(publisher), 1, logs=[{"loss": 2.0}, {"loss": 1.5}, {"eval_loss": 9.0}])
    assert publisher.calls == 2 * [(1, {"loss": 1.5})]


def test_what_it_cannot_do_it_says(monkeypatch):
    with pytest.raises(InputError, match="every=0 steps"):
        publish_callback(Recorder(), 0)
    with pytest.raises(InputError, match="publisher is a str"):
        publish_callback("0.0.0.0:7200")
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"thinwire\[lm\]"):
        publish_callback(Recorder())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_publishes_to_a_shelf_and_a_follower_has_its_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    data = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=5,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
    )
    with ShelfWriter.of(tmp_path / "store", model, dtype=torch.bfloat16) as writer:
        callback = publish_callback(writer, every=2)
        transformers.Trainer(model=model, args=args, train_dataset=data, callbacks=[callback]).train()
        writer.flush()
        with ShelfReader(tmp_path / "store", poll=0.01) as reader:
            version = reader.wait(3)
            follower = transformers.GPT2LMHeadModel(config).bfloat16()
            reader.apply_to(follower)
    assert version.meta["step"] == 5 and version.meta["loss"] > 0
    for name, x in follower.state_dict().items():
        assert torch.equal(x, model.state_dict()[name].bfloat16()), name
