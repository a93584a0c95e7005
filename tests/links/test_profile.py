"""Links from text: the emulator's profiles and traces, and what is wrong with bad ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.links.profile import MIN_QUEUE, Profile, one_way, profiles
from thinwire.links.trace import COLUMNS, MAX_BYTES, ConstantRate, Trace, TraceRow, parse_trace, shipped_names
from thinwire.types import InputError

HEADER = ",".join(COLUMNS)
STEP = Trace((TraceRow(0, 1e6, 2e6, 0.01), TraceRow(1, 1e5, 2e5, 0.03, 0.5)), period=2.0, name="step")


@each(
    ("text", "profile"),
    [
        ("none", Profile()),
        ("100mbit,50ms", Profile(125e5, 125e5, 0.05)),
        ("10mbit,30ms,jitter=2ms,loss=0.1%", Profile(1.25e6, 1.25e6, 0.03, 0.002, 0.001)),
        ("up=10mbit,down=50mbit,20ms", Profile(1.25e6, 6.25e6, 0.02)),
        ("up=10mbit", Profile(up=1.25e6)),
        ("1gbit, queue=250kB", Profile(125e6, 125e6, queue=250_000)),
        ("queue=1.5MB,5ms", Profile(delay=0.005, queue=1_500_000)),
        ("queue=900B", Profile(queue=900)),
        ("trace:lte", Profile(trace=Trace.load("lte"))),
        ("trace:lte,delay=5ms", Profile(delay=0.005, trace=Trace.load("lte"))),
        ("trace:lte,0ms,loss=0,up=1mbit", Profile(up=125e3, delay=0.0, loss=0.0, trace=Trace.load("lte"))),
    ],
)
def test_a_profile_reads_and_writes(text: str, profile: Profile) -> None:
    assert Profile.parse(text) == profile
    assert Profile.parse(str(profile)) == profile


@settings(deadline=None)
@given(
    st.tuples(*[st.none() | st.integers(1, 10**7).map(lambda n: n * 125.0)] * 2),
    st.tuples(*[st.integers(0, 10**6)] * 2),
    st.integers(0, 999),
    st.none() | st.integers(1, 10**9),
)
def test_a_profile_s_text_reads_back(
    rates: tuple[float | None, float | None], times: tuple[int, int], loss: int, queue: int | None
) -> None:
    profile = Profile(*rates, times[0] * 1e-6, times[1] * 1e-6, loss / 1000, queue)
    back = Profile.parse(str(profile))
    assert (back.up, back.down, back.queue) == (profile.up, profile.down, profile.queue)
    assert (back.delay, back.jitter, back.loss) == pytest.approx(
        (profile.delay, profile.jitter, profile.loss), abs=1e-12
    )


@each(
    ("text", "part"),
    [
        ("", "''"),
        ("up=0kbit,down=1mbit", "'up=0kbit'"),
        ("up=5ms", "'up=5ms'"),
        ("queue=5ms", "'queue=5ms'"),
        ("queue=0kB", "'queue=0kB'"),
        ("queue=0.5B", "whole number"),
        ("queue=250", "'queue=250'"),
        ("10mbit,up=5mbit", "a rate beside up="),
        ("up=1mbit,up=2mbit", "second up"),
        ("10mbit,trace:lte", "'trace:lte'"),
        ("trace:lte,", "''"),
        ("trace:lte,fast", "'fast'"),
        ("9" * 400 + "mbit", "inf"),
    ],
)
def test_a_bad_profile_names_the_part(text: str, part: str) -> None:
    with pytest.raises(InputError, match="write it like 100mbit") as e:
        Profile.parse(text)
    assert part in str(e.value)
    assert "\n" not in str(e.value)


@each("name", ["", "nowhere", "no/such.csv", "x" * 5000, "a\0b"])
def test_a_missing_trace_names_those_there_are(name: str) -> None:
    with pytest.raises(InputError, match="shipped traces campus-busy, drop, home-uplink, lte, satellite"):
        Profile.parse(f"trace:{name}")


def test_bad_numbers_are_refused_in_the_constructor_too() -> None:
    for bad in (
        {"up": 0.0},
        {"down": -1.0},
        {"delay": math.nan},
        {"jitter": -1.0},
        {"loss": 1.0},
        {"queue": 0},
    ):
        with pytest.raises(InputError):
            Profile(**bad)


def test_profiles_by_rank() -> None:
    slow, fast = Profile.parse("1mbit,40ms"), Profile.parse("100mbit,5ms")
    assert profiles(["100mbit,5ms"], 3) == [fast] * 3
    assert profiles(["1=1mbit,40ms", "100mbit,5ms"], 3) == [fast, slow, fast]
    assert profiles(["0=1mbit,40ms", "1=100mbit,5ms"], 2) == [slow, fast]
    assert profiles([], 2) == [Profile()] * 2
    assert one_way(slow, fast) == pytest.approx(0.0225)


@each(
    ("texts", "words"),
    [
        (["1mbit", "2mbit"], "second one for all ranks"),
        (["0=1mbit", "0=2mbit", "3mbit"], "second one for rank 0"),
        (["2=1mbit", "3mbit"], "rank 2, but ranks are 0 to 1"),
        (["0=1mbit"], "rank 1 has no link"),
        (["0=", "1mbit"], "''"),
        (["-1=1mbit"], "'-1=1mbit'"),
    ],
)
def test_profiles_that_do_not_fit_the_ranks(texts: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        profiles(texts, 2)


def test_the_default_queue_is_a_round_trip_of_the_line() -> None:
    profile = Profile.parse("up=10mbit,down=100mbit,50ms")
    assert profile.limit(profile.uplink) == pytest.approx(125e3)
    assert profile.limit(profile.downlink) == pytest.approx(1.25e6)
    assert Profile.parse("1mbit,1ms").limit(ConstantRate(125e3)) == MIN_QUEUE
    assert Profile.parse("1mbit,1s,queue=5kB").limit(ConstantRate(125e3)) == 5000
    by_trace = Profile(trace=STEP)
    assert by_trace.limit(by_trace.downlink) == MIN_QUEUE  # 1.1 MB/s on average, 20 ms: 44 kB
    assert Profile(trace=STEP, delay=0.5).limit(STEP.down) == pytest.approx(1.1e6)
    assert Profile().limit(Profile().uplink) > 0


# Traces


def test_a_trace_reads_from_text() -> None:
    text = f"# a comment\n\n{HEADER}\n0, 8, 16, 10, 0\n# another\n1,0.8,1.6,30,50\n"
    assert parse_trace(text.encode(), "step") == STEP
    assert parse_trace(b"\xef\xbb\xbfseconds,up_mbit,down_mbit\r\n0,8,16\r\n", "one").at(1e9) == TraceRow(
        0, 1e6, 2e6
    )


def test_an_override_wins_over_the_trace() -> None:
    plain, own = Profile(trace=STEP), Profile(trace=STEP, down=7e6, delay=0.5, loss=0.1)
    assert [plain.delay_at(t) for t in (0, 1, 2, 3.5)] == [0.01, 0.03, 0.01, 0.03]
    assert [plain.loss_at(t) for t in (0, 1)] == [0.0, 0.5]
    assert (own.delay_at(1), own.loss_at(1)) == (0.5, 0.1)
    assert own.uplink == STEP.up
    assert own.downlink == ConstantRate(7e6)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", "has no rows"),
        ("0,10,10,1,0\n0,10,10,1,0", "line 3: the time 0 s is not after 0 s"),
        ("0,10,10,1,0\n2,10,10,1,0\n1,10,10,1,0", "line 4: the time 1 s is not after 2 s"),
        ("1,10,10,1,0", "line 2: the first time is 1 s"),
        ("0,0,10,1,0", "line 2: the up rate is 0 Mbit"),
        ("0,10,-3,1,0", "line 2: the down rate is -3 Mbit"),
        ("0,10,nan,1,0", "line 2: the down rate is nan"),
        ("0,inf,10,1,0", "line 2: the up rate is inf"),
        ("0,10,10,-1,0", "line 2: the delay is -1 ms"),
        ("0,10,10,10001,0", "line 2: the delay is 10001 ms; give 0 to 10000"),
        ("0,10,10,1,100", "line 2: the loss is 100 %"),
        ("nan,10,10,1,0", "line 2: the first time is nan"),
        ("0,10,10,1,0\nnan,10,10,1,0", "line 3: the time nan s"),
        ("0,10,10,1", "line 2: '0,10,10,1' has 4 values; give 5"),
        ("0,ten,10,1,0", "line 2: up_mbit is 'ten'"),
    ],
)
def test_nonsense_in_a_trace_names_file_line_and_value(tmp_path: Path, rows: str, words: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(f"{HEADER}\n{rows}\n")
    with pytest.raises(InputError) as e:
        Profile.parse(f"trace:{file}")
    assert words in str(e.value)
    assert "bad.csv" in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xfe\x00junk", "is no text: byte 0"),
        (b"", "has no rows"),
        (b"# nothing\n", "has no rows"),
        (b"time,rate\n0,1\n", "line 1: the header is 'time,rate'"),
        (b"seconds,up_mbit\n0,1\n", "the header is"),
        (b"#" * (MAX_BYTES + 1), "is above 4 MiB"),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, data: bytes, words: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_bytes(data)
    with pytest.raises(InputError, match=words):
        Trace.load(str(file))


def test_a_trace_checks_its_rows() -> None:
    for rows, period in [
        ((), 1.0),
        ((TraceRow(0, 1, 1),), 0.0),
        ((TraceRow(0, 1, 1),), math.inf),
        ((TraceRow(1, 1, 1),), 2.0),
    ]:
        with pytest.raises(InputError):
            Trace(rows, period)


def test_the_shipped_traces_are_what_the_generator_makes() -> None:
    traces = pytest.importorskip("bench.ground.traces")
    assert shipped_names() == sorted(traces.KINDS)
    for name, kind in traces.KINDS.items():
        assert (traces.FOLDER / f"{name}.csv").read_text() == traces.text(name)
        trace = Trace.load(name)
        assert (len(trace.rows), trace.period) == (kind.rows, kind.rows * kind.step)
        assert 60 <= trace.period <= 120
