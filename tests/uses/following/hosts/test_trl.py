"""GRPO by TRL itself, whose rollouts are made behind 20 Mbit/s with weights that are followed."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from slow_proxy import SlowProxy

from thinwire.types import InputError
from thinwire.uses.following.hosts.rollout_pool import RolloutPool
from thinwire.uses.following.hosts.rollout_worker import RolloutWorker, transformers_generate
from thinwire.uses.following.hosts.trl_rollouts import TESTED, TrlRollouts
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.run.rollout_recorder import RolloutRecorder
from thinwire.uses.kinds import load_runs

trl = pytest.importorskip("trl", reason="trl is not installed: pip install 'thinwire[rl]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's and transformers' own
EXAMPLE = Path(__file__).parents[4] / "examples/grpo"
SOON, STEPS = 60.0, 3


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> object:
    """Return what the example's trainer and workers share."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    import toy

    return toy


def trained(toy: object, model: torch.nn.Module, rollouts: TrlRollouts, out: Path) -> object:
    from datasets import Dataset

    options = trl.GRPOConfig(
        str(out), per_device_train_batch_size=4, num_generations=4, max_completion_length=4, max_steps=STEPS,
        learning_rate=1e-2, beta=0.0, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data, tokenizer = Dataset.from_dict({"prompt": toy.PROMPTS * 4}), toy.new_tokenizer()
    trainer = trl.GRPOTrainer(
        model, toy.reward, options, train_dataset=data, processing_class=tokenizer, rollout_func=rollouts
    )
    trainer.train()
    return trainer


def test_trl_trains_on_rollouts_of_a_worker_behind_a_slow_line(toy: object, tmp_path: Path) -> None:
    assert trl.__version__.startswith(TESTED)
    model, copy, stop = toy.new_model(), toy.new_model().bfloat16().eval(), threading.Event()
    copy.transformer.wte.weight.data.zero_()  # what it generates with is what comes
    with (
        Publisher(model, dtype="bf16") as publisher,
        RolloutPool(max_age=0, timeout=SOON, record=RolloutRecorder(tmp_path, publisher)) as pool,
        SlowProxy(publisher.port, 2.5e6) as line,
        Follower("127.0.0.1", line.port) as follower,
    ):
        generate = transformers_generate(copy, toy.new_tokenizer().pad_token_id)
        bring_up = lambda: follower.apply_to(copy)  # noqa: E731
        worker = RolloutWorker(follower, bring_up, generate, "127.0.0.1", pool.port, patience=SOON)
        thread = threading.Thread(target=worker.serve, args=(stop,))
        thread.start()
        try:
            trainer = trained(toy, model, TrlRollouts(pool, publisher), tmp_path)
        finally:
            stop.set()
            thread.join(SOON)
        assert trainer.state.global_step == STEPS and [age.version for age in pool.ages] == [1, 2, 3]
        assert all(age.behind == 0 and age.samples == 4 for age in pool.ages)
        follower.wait(publisher.publish().number)
        follower.apply_to(copy)
        assert all(
            torch.equal(x.bfloat16(), y) for x, y in zip(model.parameters(), copy.parameters(), strict=True)
        )
    (run,) = load_runs([tmp_path])
    assert [(batch.step, batch.version) for batch in run.metrics] == [(0, 1), (1, 2), (2, 3)]
    assert run.record.status == "done" and run.record.totals["samples"] == 12


def test_completions_and_their_probabilities_are_those_of_the_model_alone(toy: object) -> None:
    model, tokenizer = toy.new_model().eval(), toy.new_tokenizer()
    prompts = [tokenizer(text)["input_ids"] for text in toy.PROMPTS]
    found = transformers_generate(model, tokenizer.pad_token_id)(
        prompts, {"max_new_tokens": 5, "do_sample": False}
    )
    for prompt, sample in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt + sample.tokens])
        logits = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert sample.tokens == logits.argmax(-1).tolist()
        own = logits.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), own.detach(), atol=1e-4, rtol=1e-4)


def test_a_trainer_of_several_processes_is_refused() -> None:
    trainer = type("Trainer", (), {"accelerator": type("A", (), {"num_processes": 2})()})()
    told = pytest.raises(InputError, match="2 processes train; one pool serves one")
    with RolloutPool(timeout=1.0) as pool, Publisher({"w": torch.zeros(2)}) as publisher, told:
        TrlRollouts(pool, publisher)(["a"], trainer)
