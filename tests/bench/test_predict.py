"""The step of a run, predicted from the compute and the bytes of its own record."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.predict import measured_seconds, pipeline_of_step, predict_run
from run_records import metrics_of, record_of

from thinwire.lab.records.runs import Run
from thinwire.lab.records.schema import KERNEL, WireCounts
from thinwire.lab.train.record.schema import BoundaryBytes, StepMetrics
from thinwire.types import InputError


def run_of(steps: list[StepMetrics], link: str = "10mbit,30ms", stages: int = 2, **config: object) -> Run:
    record = record_of("fp32", steps, (32.0, 32.0), 3.0)
    record.config |= {"stages": stages, "microbatches": 4, "schedule": "gpipe"} | config
    record.link.asked = link
    return Run("fp32", record, steps)


def reported(seconds: float, compute: float, nbytes: int, ranks: int = 2) -> StepMetrics:
    step = metrics_of(1, (32.0, 32.0))[0]
    rank = {"compute_s": compute, "encode_s": 0.0, "decode_s": 0.0, "wait_s": 0.0}
    return replace(step, seconds=seconds, bytes={"forward": nbytes, "backward": nbytes}, ranks=[rank] * ranks)


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
    run.record.boundaries = [
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
