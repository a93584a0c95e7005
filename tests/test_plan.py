"""Plans: the search against trying everything, the file of machines, the command; predictions of runs."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from run_records import metrics_of, record_of
from texts import write_text
from thinwire.cli.app import app
from thinwire.lab import cuts as cuts_module
from thinwire.lab import speed
from thinwire.lab.config import TrainConfig
from thinwire.lab.machines_file import Entry, MachinesFile, Measured, read_machines
from thinwire.lab.planning import Planner, option
from thinwire.lab.predict import measured_seconds, pipeline_of_step, predict_run
from thinwire.lab.record import KERNEL, BoundaryBytes, StepMetrics, WireCounts
from thinwire.lab.runs import Run
from thinwire.policies.plan import Machine, Option, Way, Ways, Work, foretell, pipeline_of, propose
from thinwire.policies.schedule import step_seconds
from thinwire.recipes import parse_recipe
from thinwire.types import InputError

FP32, BF16 = Option("fp32", 32, 32), Option("bf16", 16, 16)


def everywhere(names: Sequence[str], way: Way) -> dict[tuple[str, str], Way]:
    return dict.fromkeys(permutations(names, 2), way)


def cuts(layers: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(layers,)]
    return [(k, *rest) for k in range(1, layers - parts + 2) for rest in cuts(layers - k, parts - 1)]


def exhaustive(machines: Sequence[Machine], ways: Ways, work: Work, option: Option, schedule: str) -> float:
    bits = [(option.forward, option.backward)] * (len(machines) - 1)
    return min(
        step_seconds(pipeline_of(order, ways, work, cut, bits, schedule))
        for order in permutations(machines)
        for cut in cuts(work.layers, len(machines))
    )


# -- the search ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["eager1f1b", "1f1b", "gpipe"])
def test_the_search_finds_the_best_there_is(schedule: str) -> None:
    rng = random.Random(0)
    for _ in range(12):
        n, layers = rng.choice([2, 3]), rng.choice([5, 9])
        machines = [
            Machine(f"m{i}", rng.uniform(0.005, 0.03), rng.uniform(0, 0.1), rng.uniform(0, 0.005))
            for i in range(n)
        ]
        ways = {
            pair: Way(rng.choice([None, 1e6, 1e7]), rng.choice([0.001, 0.05]))
            for pair in permutations([m.name for m in machines], 2)
        }
        work = Work(layers, rng.choice([4, 8]), 30_000)
        found = propose(machines, ways, work, [BF16], [schedule])[0].seconds
        assert found <= exhaustive(machines, ways, work, BF16, schedule) * 1.01


def test_a_slow_machine_gets_few_layers_and_the_head_goes_where_it_is_cheap() -> None:
    fast, slow = Machine("fast", 0.01, 0.05), Machine("slow", 0.03, 0.15)
    best = propose([slow, fast], everywhere(["slow", "fast"], Way()), Work(16, 8, 1000), [FP32])[0]
    assert best.order == ("slow", "fast")
    shares = dict(zip(best.order, best.cut, strict=True))
    assert sum(best.cut) == 16 and shares["fast"] > 2 * shares["slow"]


def test_a_bad_link_is_kept_out_of_the_pipeline() -> None:
    machines = [Machine(n, 0.02) for n in "abc"]
    ways = everywhere("abc", Way(1e8, 0.001)) | {("a", "b"): Way(1e5, 0.1), ("b", "a"): Way(1e5, 0.1)}
    best = propose(machines, ways, Work(12, 4, 70_000), [FP32])[0]
    assert best.order[1] == "c"


def test_the_most_exact_recipe_that_costs_nothing_is_proposed() -> None:
    machines = [Machine("a", 0.05), Machine("b", 0.05)]
    options = [FP32, BF16, option(parse_recipe("auto")), option(parse_recipe("thinwire"))]
    found = {
        mbit: propose(machines, everywhere("ab", Way(mbit * 125e3, 0.03)), Work(16, 8, 128 * 576), options)
        for mbit in (1000, 2)
    }
    assert found[1000][0].recipe == "fp32"
    (settled,) = (p for p in found[1000] if p.recipe == "auto")
    assert [leg.bits for leg in settled.legs] == [32, 32]  # not what it begins with
    assert found[2][0].recipe == "auto"
    by_name = {p.recipe: p for p in found[2]}
    assert by_name["thinwire"].seconds <= by_name["auto"].seconds < by_name["bf16"].seconds
    assert by_name["bf16"].seconds < by_name["fp32"].seconds
    for p in found[2]:
        assert p.unlimited_s <= p.uncrowded_s <= p.seconds * (1 + 1e-12)  # sums in another order
        assert [(leg.source, leg.target) for leg in p.legs] == [p.order, p.order[::-1]]
    assert by_name["fp32"].legs[0].added > 0.1 > found[1000][0].legs[0].added


def test_the_schedule_of_least_memory_is_taken_where_it_is_as_fast() -> None:
    machines, work = [Machine("a", 0.05), Machine("b", 0.05)], Work(16, 8, 1000)
    near = propose(machines, everywhere("ab", Way(None, 1e-5)), work, [FP32])[0]
    far = propose(machines, everywhere("ab", Way(None, 0.1)), work, [FP32])[0]
    assert (near.schedule, far.schedule) == ("1f1b", "eager1f1b")


@pytest.mark.parametrize(
    ("names", "layers", "missing", "message"),
    [
        ("a", 4, None, "1 machines; a pipeline takes 2 to 4"),
        ("abcde", 9, None, "5 machines; a pipeline takes 2 to 4"),
        ("aba", 4, None, "two machines of one name"),
        ("abc", 2, None, "3 machines for 2 layers"),
        ("abc", 4, ("c", "a"), "no link from c to a"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    names: str, layers: int, missing: tuple[str, str] | None, message: str
) -> None:
    ways = {pair: way for pair, way in everywhere(names, Way(1e6)).items() if pair != missing}
    with pytest.raises(InputError, match=message):
        propose([Machine(n, 0.01) for n in names], ways, Work(layers, 4, 100), [FP32])


def test_a_settled_run_is_foretold_as_it_stands() -> None:
    machines = [Machine("a", 0.01), Machine("b", 0.03)]
    ways, work = everywhere("ab", Way(1e6, 0.01)), Work(12, 4, 30_000)
    found = foretell(machines, ways, work, [FP32, BF16], (4, 8), "eager1f1b")
    assert {(p.order, p.cut, p.schedule) for p in found} == {(("a", "b"), (4, 8), "eager1f1b")}
    for p, sent in zip(found, (BF16, FP32), strict=True):  # the proposed one first
        bits = [(sent.forward, sent.backward)]
        pipeline = pipeline_of(machines, ways, work, (4, 8), bits, "eager1f1b")
        assert (p.recipe, p.seconds) == (sent.name, step_seconds(pipeline))
    for cut in ((12,), (12, 0), (4, 4)):
        with pytest.raises(InputError, match="does not fit 2 machines and 12 layers"):
            foretell(machines, ways, work, [FP32], cut, "gpipe")


def test_embedding_and_head_count_where_they_are() -> None:
    """The first stage has the embedding, the last the head, and each optimiser the matrix it updates."""
    plain = [Machine("a", 0.01, update=0.001), Machine("b", 0.01, update=0.001)]
    whole = [replace(m, head=0.06, embed=0.03, head_update=0.6, embed_update=0.3) for m in plain]
    ways, work, bits = everywhere("ab", Way()), Work(10, 4, 1000), [(32.0, 32.0)]
    before = pipeline_of(plain, ways, work, (6, 4), bits, "gpipe").stages
    after = pipeline_of(whole, ways, work, (6, 4), bits, "gpipe").stages
    more = [(b.forward + b.backward - a.forward - a.backward) for a, b in zip(before, after, strict=True)]
    assert more == pytest.approx([0.03, 0.06])
    assert [s.update for s in after] == pytest.approx([0.306, 0.604])


# -- the file ------------------------------------------------------------------------------------------------

DESK, ATTIC = '[[machine]]\nname = "desk"\n', '[[machine]]\nname = "attic"\nspeed = 0.5\n'
LINK = '[[link]]\nfrom = "desk"\nto = "attic"\nlink = "20mbit,25ms,jitter=50ms"\n'


def written(folder: Path, text: str) -> Path:
    file = folder / "machines.toml"
    file.write_text(text)
    return file


def test_a_file_of_machines_is_read(tmp_path: Path) -> None:
    measured = Measured("gpt2-lab", 256, 0.0125, 0.5, 0.002, embed=0.125)
    back = (
        LINK.replace("desk", "x")
        .replace("attic", "desk")
        .replace('"x"', '"attic"')
        .replace("20mbit", "5mbit")
    )
    text = DESK + 'address = "192.0.2.1"\n' + measured.toml("attic") + "\n" + LINK
    found = read_machines(written(tmp_path, text))
    assert [m.name for m in found.machines] == ["desk", "attic"]
    assert found.machines[0].speed == 1 and found.machines[0].address == "192.0.2.1"
    assert found.machines[1].measured == measured
    more = replace(measured, embed=0.25, lora=8, threads=3)
    assert (
        read_machines(written(tmp_path, more.toml("attic") + "\n" + DESK + LINK)).machines[0].measured == more
    )
    assert found.ways["desk", "attic"] == found.ways["attic", "desk"] == Way(2.5e6, 0.05)
    found = read_machines(written(tmp_path, text + back))
    assert found.ways["attic", "desk"].rate == 625e3 and found.ways["desk", "attic"].rate == 2.5e6
    assert found.ways["desk", "attic"].restarts
    found = read_machines(written(tmp_path, text.replace(LINK, LINK + "restarts = false\n")))
    assert not found.ways["desk", "attic"].restarts


def test_a_line_is_told_with_its_headers(tmp_path: Path) -> None:
    line = LINK.replace("link = ", "line = ")
    found = read_machines(written(tmp_path, DESK + ATTIC + line))
    assert found.ways["desk", "attic"].rate == pytest.approx(2.5e6 * 1448 / 1500)
    assert found.ways["desk", "attic"].delay == 0.05
    free = read_machines(written(tmp_path, DESK + ATTIC + line.replace("20mbit,25ms,jitter=50ms", "none")))
    assert free.ways["desk", "attic"] == Way()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[machine", "not valid TOML"),
        ("", r"has no \[\[machine\]\]"),
        (DESK + ATTIC, r"has no \[\[link\]\]"),
        ("machine = 3", r"no list of tables; write \[\[machine\]\]"),
        (DESK + ATTIC + LINK + "[[linc]]\n", "unknown 'linc'; did you mean link"),
        (DESK + "sped = 2\n" + ATTIC + LINK, "machine 1 of .* has an unknown 'sped'; did you mean speed"),
        ("[[machine]]\nspeed = 1\n" + LINK, "machine 1 of .* has no name"),
        (DESK + DESK + LINK, "two machines named 'desk'"),
        (
            DESK + "speed = 0\n" + ATTIC + LINK,
            "machine 'desk' has speed = 0, which is not a number above zero",
        ),
        (DESK + "speed = nan\n" + ATTIC + LINK, "speed = nan"),
        (DESK + 'speed = "fast"\n' + ATTIC + LINK, "speed = 'fast'"),
        (DESK + "layer = 0.1\n" + ATTIC + LINK, "machine 'desk' has no tokens"),
        (
            DESK + "tokens = 0.5\nlayer = 0.1\nhead = 1\nupdate = 1\n" + ATTIC + LINK,
            "machine 'desk' has tokens = 0.5, which is no whole number",
        ),
        (
            DESK + "tokens = 5\nlayer = 1\nhead = 1\nupdate = 1\nthreads = 2.5\n" + ATTIC + LINK,
            "machine 'desk' has threads = 2.5, which is no whole number",
        ),
        (DESK + "speed = 1\nlayer = 0.1\n" + ATTIC + LINK, "has both speed and layer"),
        (
            DESK + 'model = "m"\ntokens = 1\nlayer = 1\nhead = 1\nupdate = 1\n' + ATTIC + LINK,
            "machine 'desk' says nothing of its embedding, embed; measure it again",
        ),
        (DESK + ATTIC + LINK.replace("attic", "atic"), "names the machine 'atic'; did you mean attic"),
        (DESK + ATTIC + LINK.replace("attic", "desk"), "leads from desk to itself"),
        (DESK + ATTIC + LINK + LINK, "two links from desk to attic"),
        (DESK + ATTIC + LINK.replace("20mbit", "fast"), "cannot read 'fast' in link"),
        (DESK + ATTIC + LINK.replace("20mbit", "0mbit"), "is zero"),
        (DESK + ATTIC + LINK + 'line = "20mbit"\n', "has both link and line"),
        (
            DESK + ATTIC + LINK.replace("20mbit,25ms,jitter=50ms", "trace:lte"),
            r"'trace:lte' is one of an emulated network; a plan takes one rate",
        ),
        (DESK + ATTIC + LINK.replace('"20mbit,25ms,jitter=50ms"', "20"), "link = 20; give it as text"),
        (DESK + ATTIC + LINK + "restarts = 0\n", "link 1 of .* has restarts = 0; give true or false"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as e:
        read_machines(written(tmp_path, text))
    assert "\n" not in str(e.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*; give a readable TOML file"):
        read_machines(tmp_path / "none.toml")


# -- the command ---------------------------------------------------------------------------------------------


def plan(*arguments: str) -> tuple[int, str, str]:
    environment = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "160"}
    result = CliRunner(env=environment).invoke(app, ["plan", *arguments])
    return result.exit_code, result.stdout, result.stderr


GPT2 = ("--model", "gpt2", "--init", "random", "--seq", "32", "--batch", "4", "--microbatches", "4")
MACHINES = "".join(
    Measured("gpt2", 32, s, 5 * s, s / 10, s / 100).toml(name) + "\n"
    for name, s in (("desk", 0.01), ("attic", 0.03))
)


def test_the_command_prints_a_plan_and_how_to_start_it(tmp_path: Path) -> None:
    file = str(written(tmp_path, MACHINES.replace('"desk"', '"desk"\naddress = "192.0.2.7"', 1) + LINK))
    code, out, err = plan(file, *GPT2)
    assert code == 0, err
    assert "memory is not checked" in err
    assert all(name in out for name in ("fp32", "bf16", "auto", "thinwire", "of unlimited"))
    starts = [line for line in out.splitlines() if line.startswith("torchrun")]
    assert len(starts) == 2
    for k, line in enumerate(starts):
        assert f"--node-rank {k} " in line and "--cut " in line and "--init random" in line
    assert "--host 192.0.2.7" in out and "--host ADDRESS_OF_attic" in out


def test_schedules_that_a_run_refuses_are_not_proposed(tmp_path: Path) -> None:
    third = Measured("gpt2", 32, 0.02, 0.1, 0.002, 0.0002).toml("shed") + "\n"
    links = LINK + LINK.replace("attic", "shed") + LINK.replace("desk", "shed")
    file = str(written(tmp_path, MACHINES + third + links))
    few = [*GPT2[:-1], "2"]
    code, out, err = plan(file, *few, "--json")
    assert code == 0, err
    assert {p["schedule"] for p in json.loads(out)} == {"gpipe"}
    code, _, err = plan(file, *few, "--schedule", "1f1b")
    assert code == 2 and "raise --microbatches from 2 to 3" in err and err.count("\n") == 1


def test_a_machine_s_name_is_printed_as_it_is(tmp_path: Path) -> None:
    code, out, err = plan(str(written(tmp_path, (MACHINES + LINK).replace("attic", "a[/x]"))), *GPT2)
    assert code == 0, err
    assert "→ a[/x]" in out or "a[/x] →" in out


def test_the_command_lines_carry_all_that_was_planned_with(tmp_path: Path) -> None:
    lora = MACHINES.replace("update", "lora = 8\nupdate")
    options = (*GPT2, "--lora", "8", "--dtype", "bf16", "--data", "my texts/")
    (tmp_path / "my texts").mkdir()
    write_text(tmp_path / "my texts" / "a.txt")
    file = written(tmp_path, lora.replace('"desk"', '"my desk"') + LINK.replace("desk", "my desk"))
    code, out, err = plan(str(file), *options[:-1], f"{tmp_path}/my texts")
    assert code == 0, err
    starts = [shlex.split(line) for line in out.splitlines() if line.startswith("torchrun")]
    assert len(starts) == 2
    for words in starts:
        given = dict(pairwise(words))
        assert (given["--lora"], given["--dtype"]) == ("8", "bf16")
        assert given["--data"] == f"{tmp_path}/my texts"
    hosts = {words[words.index("--host") + 1] for words in starts}
    assert hosts == {"ADDRESS_OF_my desk", "ADDRESS_OF_attic"}


def test_each_rank_gets_the_threads_it_was_measured_with(tmp_path: Path) -> None:
    measured = Measured("gpt2", 32, 0.01, 0.05, 0.001, 0.0001, threads=3).toml("desk") + "\n"
    code, out, err = plan(str(written(tmp_path, measured + ATTIC + LINK)), *GPT2, "--threads", "1")
    assert code == 0, err
    starts = [shlex.split(line) for line in out.splitlines() if line.startswith("torchrun")]
    given = {words[words.index("--host") + 1]: words[words.index("--threads") + 1] for words in starts}
    assert given == {"ADDRESS_OF_desk": "3", "ADDRESS_OF_attic": "1"}
    code, out, err = plan(str(written(tmp_path, MACHINES + LINK)), *GPT2)
    assert code == 0 and "--threads" not in out, err


@pytest.mark.parametrize("lora", [0, 4])
def test_a_machine_is_measured_as_a_rank_of_the_job_runs(monkeypatch: pytest.MonkeyPatch, lora: int) -> None:
    if lora:
        pytest.importorskip("peft")
    job = TrainConfig(model="gpt2-lab", seq=16, batch=2, microbatches=2, threads=1, lora=lora)
    threads, before = [], torch.get_num_threads()
    timed = cuts_module.median_seconds

    def watched(work: Callable[[], None]) -> float:
        threads.append(torch.get_num_threads())
        return timed(work)

    monkeypatch.setattr(cuts_module, "SPAN", 0.0)
    monkeypatch.setattr(cuts_module, "median_seconds", watched)
    monkeypatch.setattr(speed, "median_seconds", watched)
    planner = Planner(job)
    found = planner.measured()
    assert set(threads) == {1} and torch.get_num_threads() == before
    assert (found.tokens, found.lora, found.threads) == (16, lora, 1)
    assert (found.embed > 0) == (lora == 0)  # adapters leave it frozen
    text = MachinesFile((Entry("a"), Entry("b", 0.5)), everywhere("ab", Way()))
    bare, first = (planner.foretell(text, cut, "gpipe")[0].seconds for cut in ((1, 3), (3, 1)))
    assert first < bare  # b is half as fast


def test_the_optimiser_s_time_goes_by_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(TrainConfig(model="gpt2-lab", seq=16, batch=2, microbatches=2))
    found = Measured("gpt2-lab", 16, 0.01, 0.02, 0.001, embed=0.004)
    a, b = planner._machines(MachinesFile((Entry("a", measured=found), Entry("b", measured=found))))
    layer, matrix = 12 * 256**2 + 13 * 256, 4096 * 256
    assert a.head_update == b.head_update == pytest.approx(0.001 * matrix / layer)
    assert a.embed_update == pytest.approx(0.001 * (matrix + 1024 * 256) / layer)
    assert a.embed == 0.004


def test_the_command_speaks_json(tmp_path: Path) -> None:
    code, out, err = plan(str(written(tmp_path, MACHINES + LINK)), *GPT2, "--json", "--schedule", "gpipe")
    assert code == 0, err
    found = json.loads(out)
    assert {p["schedule"] for p in found} == {"gpipe"}
    assert {p["recipe"] for p in found} == {"fp32", "bf16", "auto", "thinwire"}
    for p in found:
        assert p["tokens_s"] == pytest.approx(128 / p["seconds"]) and sum(p["cut"]) == 12


def test_this_machine_is_measured_and_its_entry_reads_back(tmp_path: Path) -> None:
    small = ("--model", "gpt2-lab", "--seq", "16", "--batch", "2", "--microbatches", "2")
    code, out, err = plan("--measure", *small)
    assert code == 0, err
    file = written(tmp_path, out + ATTIC + LINK.replace("desk", read_name(out)))
    found = read_machines(file).machines[0].measured
    assert found is not None and found.tokens == 16
    assert 0 < found.layer < 60 and 0 < found.head < 60 and 0 < found.update < 60
    code, out, err = plan(str(file), *small)
    assert code == 0, err


def read_name(text: str) -> str:
    return next(line.split('"')[1] for line in text.splitlines() if line.startswith("name"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "plan takes a file of machines, or --measure"),
        (["FILE", "--measure"], "plan takes a file of machines, or --measure"),
        (
            ["FILE", "--model", "gpt2-medium", "--init", "random"],
            "measured with gpt2, the plan is for gpt2-medium",
        ),
        (["FILE", *GPT2, "--lora", "8"], "measured with --lora 0, the plan is for --lora 8"),
        (["FILE", "--microbatches", "0"], "microbatches"),
        (
            ["FILE", "--schedule", "interleaved1f1b"],
            "plan does not foresee --schedule interleaved1f1b; give 1f1b",
        ),
        (["FILE", *GPT2, "--microbatches", "1", "--schedule", "1f1b"], "raise --microbatches from 1 to 2"),
    ],
)
def test_wrong_words_end_in_one_sentence(tmp_path: Path, arguments: list[str], message: str) -> None:
    file = str(written(tmp_path, MACHINES + LINK))
    code, _, err = plan(*[file if a == "FILE" else a for a in arguments])
    assert code == 2 and message in err and err.count("\n") == 1, err


# -- predictions of runs -------------------------------------------------------------------------------------


def run_of(steps: list[StepMetrics], link: str = "10mbit,30ms", stages: int = 2, **config: object) -> Run:
    record = record_of("fp32", steps, (32.0, 32.0), 3.0)
    record.config |= {"stages": stages, "microbatches": 4, "schedule": "gpipe"} | config
    record.link.asked = link
    return Run("fp32", record, steps)


def reported(seconds: float, compute: float, nbytes: int, ranks: int = 2) -> StepMetrics:
    step = metrics_of(1, (32.0, 32.0))[0]
    rank = {"compute_s": compute, "encode_s": 0.0, "decode_s": 0.0, "wait_s": 0.0}
    return replace(step, seconds=seconds, bytes_forward=nbytes, bytes_backward=nbytes, ranks=[rank] * ranks)


def test_a_run_is_predicted_from_its_own_compute_and_bytes() -> None:
    """Two stages, GPipe, hidden: C + 2 (d + x / M)."""
    warm_up, steady = reported(9.0, 9.0, 10**6), reported(1.5, 1.0, 125_000)
    run = run_of([warm_up, steady, replace(steady, seconds=1.7)])
    x = 125_000 / 1.25e6
    assert predict_run(run) == pytest.approx(1.25 + 2 * (0.03 + x / 4))
    assert measured_seconds(run) == pytest.approx(1.6)
    assert predict_run(run_of([warm_up, steady], "none")) == pytest.approx(1.25)


def test_an_emulated_line_carries_what_headers_leave() -> None:
    steps = [reported(1, 1, 125_000)] * 2
    run = run_of(steps, "0=up=8mbit,10ms;1=down=10mbit,queue=90kB,50ms")
    run.record.link.emulation = KERNEL
    pipeline = pipeline_of_step(run.record, steps[1])
    assert pipeline.forward[0].transfer == pytest.approx(125_000 / 4 / (1e6 * 1448 / 1500))
    assert pipeline.backward[0].transfer == 0.0  # neither rank 1's way up nor rank 0's down has a limit
    assert pipeline.forward[0].delay == pipeline.backward[0].delay == pytest.approx(0.03)
    assert pipeline.forward[0].window == 0.0  # no TCP_INFO: nothing is known of pauses
    run.record.wire = [WireCounts(0, 1, 1, congestion="cubic"), WireCounts(1, 0, 1, congestion="bbr")]
    pipeline = pipeline_of_step(run.record, steps[1])
    assert pipeline.forward[0].window == pytest.approx(14_480 / (1e6 * 1448 / 1500))
    assert pipeline.backward[0].window == 0.0
    run.record.link.asked = "trace:lte"
    with pytest.raises(InputError, match="no one rate to predict from"):
        predict_run(run)


def test_boundaries_carry_the_bytes_that_they_carried() -> None:
    run = run_of([reported(1, 1, 400), reported(1, 1, 400, ranks=3)], stages=3)
    run.record.bytes.by_boundary = [
        BoundaryBytes(b, way, n) for b, n in (("0-1", 300), ("1-2", 100)) for way in ("forward", "backward")
    ]
    pipeline = pipeline_of_step(run.record, run.metrics[1])
    assert [h.transfer for h in pipeline.forward] == pytest.approx([300 / 4 / 1.25e6, 100 / 4 / 1.25e6])
    assert [h.delay for h in pipeline.backward] == [0.03, 0.03]


def test_interleaved_stages_share_their_rank_s_seconds() -> None:
    run = run_of([reported(1, 1, 400)] * 2, stages=4, schedule="interleaved1f1b")
    pipeline = pipeline_of_step(run.record, run.metrics[1])
    assert pipeline.ranks == 2 and len(pipeline.stages) == 4
    assert sum(s.forward + s.backward for s in pipeline.stages) * 4 == pytest.approx(2.0)
    assert sum(h.transfer for h in pipeline.forward) == pytest.approx(400 / 4 / 1.25e6)
    assert predict_run(run) > 1.0


def test_a_run_that_says_too_little_is_not_predicted() -> None:
    with pytest.raises(InputError, match="no 2 steps reported by rank"):
        predict_run(run_of(metrics_of(5, (32.0, 32.0))))
    with pytest.raises(InputError, match="no one rate to predict from"):
        predict_run(run_of([reported(1, 1, 400)] * 2, link="trace:lte"))
