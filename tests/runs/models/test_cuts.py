"""Where a model is cut into stages, for equal machines and for unequal ones."""

import dataclasses
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from each import each
from launchers import record, warm
from texts import write_text

from tests.links.test_mesh import _close, _mesh
from thinwire.runs.models.cuts import (
    LayerCosts,
    counted_costs,
    cut_for,
    cut_layers,
    measured_costs,
    stage_costs,
)
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.models.split import build_stage
from thinwire.runs.ranks.world import World
from thinwire.types import InputError
from thinwire.uses.training.run import training_rank
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.training_job import prepare

transformers = pytest.importorskip("transformers")


def tiny():
    return transformers.GPT2Config(
        vocab_size=300, n_embd=32, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )


def test_default_cut_of_smollm2_gives_the_head_its_due():
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    assert [len(part) for part in cut_layers(counted_costs(config), 2)] == [19, 11]


def test_cut_is_the_best_of_all_cuts():
    costs = LayerCosts((3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0), head=6.0)
    best = max(stage_costs(costs, cut_layers(costs, 3)))
    every = [[range(a), range(a, b), range(b, 7)] for a in range(1, 6) for b in range(a + 1, 7)]
    assert best == min(max(stage_costs(costs, cut)) for cut in every)


def test_explicit_cut():
    costs = LayerCosts((1.0,) * 6)
    assert cut_layers(costs, 3, "1,2,3") == [range(1), range(1, 3), range(3, 6)]


@each(
    ("stages", "cuts", "words"),
    [
        (2, "4,3", "2 parts with 7 layers.*2 stages share 6"),
        (3, "3,3", "2 parts.*3 stages"),
        (2, "6,0", "at least one"),
        (2, "half", "19,11"),
        (7, None, "7 stages need 7 layers or more, the model has 6"),
        (0, None, "0 stages"),
    ],
)
def test_cuts_that_do_not_fit_are_refused(stages, cuts, words):
    with pytest.raises(InputError, match=words):
        cut_layers(LayerCosts((1.0,) * 6), stages, cuts)


def test_a_cut_for_another_model_is_refused():
    source = ModelSource("tiny", "gpt2", tiny(), None, None)
    with pytest.raises(InputError, match="model of 4 layers"):
        build_stage(source, [range(3), range(3, 6)], 0)


@pytest.mark.parametrize("lora", [0, 2])
def test_measured_costs_are_times_of_every_layer_and_the_head(lora):
    if lora:
        pytest.importorskip("peft")
    before = torch.get_rng_state()
    said: list[int] = []
    costs = measured_costs(tiny(), batch=2, seq=16, lora=lora, working=lambda: said.append(1))
    assert len(said) == 2  # one kind of layer, and the head
    assert len(costs.layers) == 4 and min(*costs.layers, costs.head) > 0
    assert torch.equal(before, torch.get_rng_state())


def test_each_kind_of_layer_is_timed(monkeypatch):
    config = transformers.Qwen2Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    )
    times = iter([1.0, 2.0, 5.0])
    monkeypatch.setattr("thinwire.runs.models.cuts._time", lambda *a: next(times))
    assert measured_costs(config, batch=1, seq=8) == LayerCosts((1.0, 2.0, 2.0, 1.0), 5.0)


# Unequal machines


def slower(costs, factor):
    return LayerCosts(tuple(factor * c for c in costs.layers), factor * costs.head)


def seconds(machines, cut):
    return max(stage_costs(costs, cut)[k] for k, costs in enumerate(machines))


@each("factors", [(1, 3), (3, 1), (1, 2, 1, 4), (5, 1, 1, 1)])
def test_a_cut_for_unequal_machines_is_the_best_of_all(factors):
    n, stages = 9, len(factors)
    costs = LayerCosts((3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0), head=6.0)
    machines = [slower(costs, f) for f in factors]
    cut = cut_for(machines)
    assert [i for part in cut for i in part] == list(range(n)) and all(cut)
    every = [
        [range(a, b) for a, b in itertools.pairwise((0, *inner, n))]
        for inner in itertools.combinations(range(1, n), stages - 1)
    ]
    assert seconds(machines, cut) == min(seconds(machines, other) for other in every)
    assert sum(len(cut[k]) for k in range(stages) if factors[k] == 1) > sum(
        len(part) for part, f in zip(cut_layers(costs, stages), factors, strict=True) if f == 1
    )


@each("factors", [(1, 1), (2, 1), (4, 1)])
def test_interleaved_stages_are_cut_by_what_their_rank_carries(factors):
    n, stages, ranks = 9, 4, 2
    costs = LayerCosts((3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0), head=6.0)
    machines = [slower(costs, factors[k % ranks]) for k in range(stages)]

    def slowest(cut):
        each = [stage_costs(c, cut)[k] for k, c in enumerate(machines)]
        return max(sum(each[rank::ranks]) for rank in range(ranks))

    cut = cut_for(machines, ranks)
    assert [i for part in cut for i in part] == list(range(n)) and all(cut)
    every = [
        [range(a, b) for a, b in itertools.pairwise((0, *inner, n))]
        for inner in itertools.combinations(range(1, n), stages - 1)
    ]
    assert slowest(cut) == pytest.approx(min(map(slowest, every)))
    assert slowest(cut) < slowest(cut_for(machines))


def test_equal_ranks_share_their_interleaved_stages_evenly():
    even = cut_layers(LayerCosts((0.1,) * 12), 4, ranks=2)
    assert [len(part) for part in even] == [3, 3, 3, 3]
    headed = [len(part) for part in cut_layers(LayerCosts((0.1,) * 12, head=0.2), 4, ranks=2)]
    assert headed[0] + headed[2] == 7 and headed[1] + headed[3] == 5 and headed[3] < headed[1]


def test_where_one_stage_is_the_slowest_anyway_the_others_are_even():
    cut = cut_layers(LayerCosts((1.0,) * 10, head=100.0), 4)
    assert [len(part) for part in cut] == [3, 3, 3, 1]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text.txt", lines=800)


@pytest.fixture
def job(text, tmp_path):
    def make(stages, **options):
        fixed = {"model": "gpt2-lab", "seq": 16, "batch": 4, "eval_samples": 0, "cut": "measured"}
        data = {"data": str(text), "out": str(tmp_path / "out")}
        return prepare(TrainConfig(**fixed, **data, stages=stages, **options))

    return make


def agreed(job, ranks):
    """Let every rank, in a thread of its own, agree on the cut over real links."""
    peers = _mesh(ranks)

    def one(rank):
        threading.current_thread().name = f"rank {rank}"
        return training_rank.agree_cut(job, World(rank, ranks, peers[rank]))

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(one, range(ranks)))
    _close(peers)
    return found


@pytest.mark.parametrize(
    ("stages", "slow", "options"),
    [(2, 0, {}), (2, 1, {}), (4, 2, {}), (4, 1, {"schedule": "interleaved1f1b"})],
)
def test_a_slow_machine_gets_fewer_layers(job, monkeypatch, stages, slow, options):
    """The times of the layers are real; those of one machine are stretched."""
    deep = transformers.GPT2Config(
        vocab_size=300, n_embd=32, n_layer=16, n_head=4, bos_token_id=0, eos_token_id=0
    )
    layers = measured_costs(deep, batch=2, seq=16).layers
    once = LayerCosts(layers, head=2 * layers[0])

    def stretched(*_args, **_options):
        return slower(once, 8.0 if threading.current_thread().name == f"rank {slow}" else 1.0)

    monkeypatch.setattr(training_rank, "measured_costs", stretched)
    wanted = job(stages, microbatches=4, **options)
    ranks = wanted.config.ranks
    found = agreed(wanted, ranks)
    cut = found[0].cut
    assert all(j.cut == cut for j in found)
    assert [i for part in cut for i in part] == list(range(16)) and all(cut)
    here = sum(len(part) for k, part in enumerate(cut) if k % ranks == slow)
    plain = cut_layers(once, stages)
    assert here < sum(len(part) for k, part in enumerate(plain) if k % ranks == slow)
    assert "as measured" in found[0].notes[-1] and f"rank {ranks - 1}" in found[0].notes[-1]


def test_every_rank_times_its_own_machine(job, monkeypatch):
    timed = []

    def spy(*args, **options):
        timed.append(threading.current_thread().name)
        return measured_costs(*args, **options)

    monkeypatch.setattr(training_rank, "measured_costs", spy)
    found = agreed(job(2), 2)
    assert sorted(timed) == ["rank 0", "rank 1"]
    assert found[0].cut == found[1].cut and [i for part in found[0].cut for i in part] == [0, 1, 2, 3]


@pytest.mark.parametrize("sizes", [[1, 3], [3, 1]])
def test_a_resumed_run_keeps_the_cut_of_its_checkpoint(job, monkeypatch, sizes):
    monkeypatch.setattr(training_rank, "measured_costs", None)  # nobody measures
    resumed = job(2, resume=True)
    file = Path(resumed.config.out) / "checkpoints" / "step-00000002" / "rank-0.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"cut": sizes}))
    assert [[len(part) for part in j.cut] for j in agreed(resumed, 2)] == [sizes, sizes]


def test_a_cut_that_is_not_measured_stays(job):
    fixed = job(2)
    fixed = dataclasses.replace(fixed, config=fixed.config.replace(cut="1,3"))
    assert training_rank.agree_cut(fixed, World(0, 1, {})) is fixed


def test_a_run_is_cut_as_measured_and_resumed_as_it_was_cut(text, tmp_path):
    out = tmp_path / "out"
    args = [
        *("train", "--model", "gpt2-lab", "--data", text, "--batch", 4, "--microbatches", 2, "--seq", 16),
        *("--eval-samples", 0, "--threads", 1, "--dtype", "fp32", "--no-tensorboard", "--quiet"),
        *("--cut", "measured", "--checkpoint-every", 2, "--no-save-model", "--out", out),
    ]
    cuts = []
    for more in (("--steps", 2), ("--steps", 4, "--resume")):
        ranks = warm().ranks(tmp_path, *args, *more)
        assert [r.wait() for r in ranks] == [0, 0], ranks[0].err + ranks[1].err
        found = record(out)
        assert found["config"]["cut"] == "measured" and found["status"] == "done"
        cuts += [n.split()[1].rstrip(",") for n in found["notes"] if n.startswith("cut ")]
    assert len(cuts) == 2 and cuts[0] == cuts[1]
    assert record(out)["totals"]["steps"] == 4
