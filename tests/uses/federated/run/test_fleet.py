"""Devices of the virtual clock: files and names, their times, how their turns go, what a policy sees."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.links.profile import Profile
from thinwire.types import InputError
from thinwire.uses.federated.run.fleet import Availability, Fleet, VirtualDevice, load_fleet, parse_fleet

FILE = """
server = "10mbit,20ms"

[[device]]
count = 3
step_seconds = [0.1, 0.4]
link = ["up=20kbit,down=80kbit,80ms", "up=60kbit,down=240kbit,40ms"]
straggle = 0.25
slower = 8
drop_out = 0.1

[[device]]
step_seconds = 1
link = "trace:lte"
available = [[0, 10], [20, 30]]
period = 60

[[device]]
count = 200
step_seconds = 0.5
available = 0.8
"""


def test_a_file_of_devices(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(FILE)
    fleet = load_fleet(str(tmp_path / "mine.toml"))
    first = fleet.devices[:3]
    assert len(fleet) == 204 and fleet.server == Profile.parse("10mbit,20ms")
    assert [d.step_seconds for d in first] == pytest.approx([0.1, 0.25, 0.4])
    assert [d.link.up for d in first] == [2500, 5000, 7500] and first[1].link.delay == pytest.approx(0.06)
    assert [d.link.down for d in first] == [10_000, 20_000, 30_000]
    assert {(d.straggle, d.slower, d.drop_out) for d in first} == {(0.25, 8, 0.1)}
    assert fleet.devices[3].available == Availability(((0.0, 10.0), (20.0, 30.0)), 60.0)
    for time in (0.0, 100.0, 599.0, 12_345.6):
        there = sum(d.available.since(time) == time for d in fleet.devices[4:])
        assert 155 <= there <= 165  # 80 % of them at any time
    assert fleet == load_fleet(str(tmp_path / "mine.toml"), clients=204)
    with pytest.raises(InputError, match=r"mine\.toml has 204 devices, not 10; give --clients 204"):
        load_fleet(str(tmp_path / "mine.toml"), clients=10)


def test_ten_of_which_one_straggles() -> None:
    devices = load_fleet("ten-one-straggler", 10).devices
    up = [d.link.uplink.mean * 8 / 1000 for d in devices]
    assert up == pytest.approx([6, 20, 25, 30, 35, 40, 45, 50, 55, 60])
    assert all(d.link.downlink.mean == 4 * d.link.uplink.mean and d.link.delay == 0.08 for d in devices)
    steps = [d.step_seconds for d in devices]
    assert (steps[0], steps[-1]) == pytest.approx((0.4, 0.1)) and steps == sorted(steps, reverse=True)
    with pytest.raises(InputError, match="ten-one-straggler has 10 devices, not 9"):
        load_fleet("ten-one-straggler", 9)


def test_a_thousand_phones_are_drawn_once() -> None:
    fleet = load_fleet("phones-1000")
    assert len(fleet) == 1000 and fleet == load_fleet("phones-1000", 1000)
    assert load_fleet("phones-1000", 20).devices == fleet.devices[:20]
    up = [d.link.up * 8 / 1e6 for d in fleet.devices if d.link.up]
    assert len(up) == 1000 and 0.5 <= min(up) < 0.52 and 9.6 < max(up) <= 10
    assert all(d.link.down == 4 * (d.link.up or 0) and d.drop_out == 0.05 for d in fleet.devices)
    steps = [d.step_seconds for d in fleet.devices]
    assert 0.05 <= min(steps) < 0.052 and 0.96 < max(steps) <= 1
    there = [sum(d.available.since(t) == t for d in fleet.devices) for t in (0.0, 333.3, 1e6)]
    assert all(750 < n < 850 for n in there)
    with pytest.raises(InputError, match="has 1000 devices, not 1001"):
        load_fleet("phones-1000", 1001)


def test_equal_devices_are_as_many_as_asked_for() -> None:
    assert len(set(load_fleet("equal", 7).devices)) == 1 and len(load_fleet("equal", 7)) == 7
    with pytest.raises(InputError, match="0 clients; give 1 to 100000"):
        load_fleet("equal", 0)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.floats(0.01, 1), st.floats(0, 5), st.floats(1, 1e4), st.floats(0, 1e7))
def test_a_share_of_time_is_that_share_and_waiting_ends(
    share: float, phase: float, period: float, time: float
) -> None:
    available = Availability.share(share, phase, period)
    total = sum(end - begin for begin, end in available.windows) if available.windows else period
    assert total == pytest.approx(share * period, rel=1e-6)
    start = available.since(time)
    assert time <= start <= time + period and available.since(start) == start


def test_windows_begin_anew() -> None:
    available = Availability(((10.0, 20.0), (50.0, 60.0)), 60.0)
    moments = {0: 10, 10: 10, 15: 15, 20: 50, 59.9: 59.9, 60: 70, 75: 75, 80: 110, 6000: 6010}
    assert {t: available.since(t) for t in moments} == moments
    assert Availability().since(3.0) == 3.0
    for windows in (
        ((5.0, 5.0),),
        ((0.0, 61.0),),
        ((10.0, 20.0), (15.0, 30.0)),
        ((-1.0, 2.0),),
        ((math.nan, 2.0),),
    ):
        with pytest.raises(InputError, match="give windows within the period"):
            Availability(windows, 60.0)


def test_turns_straggle_and_drop_as_often_as_said_whoever_asks_first() -> None:
    device = VirtualDevice(0.5, straggle=0.2, slower=4.0, drop_out=0.1)
    turns = [device.turn(3, 1, number) for number in range(4000)]
    assert turns[::-1] == [device.turn(3, 1, number) for number in reversed(range(4000))]
    assert {turn.step_seconds for turn in turns} == {0.5, 2.0}
    assert 0.17 < sum(turn.step_seconds > 1 for turn in turns) / 4000 < 0.23
    assert 0.08 < sum(turn.drops for turn in turns) / 4000 < 0.12
    assert turns != [device.turn(4, 1, number) for number in range(4000)]


def test_a_policy_is_told_rates_delays_and_samples() -> None:
    fleet = parse_fleet(FILE, "toy")
    told = fleet.to_policy([5] * 3 + [7] + [9] * 200)
    assert (told[0].id, told[0].samples, told[0].up, told[0].step_seconds) == (0, 5, 2500.0, 0.1)
    assert told[0].delay == fleet.delay(0) == pytest.approx(0.05)  # the mean of its own and the server's
    lte = Profile.parse("trace:lte")
    assert told[3].up == lte.uplink.mean and told[4].up == math.inf
    assert lte.trace is not None and told[3].delay == pytest.approx((lte.trace.mean_delay + 0.02) / 2)
    alone = Fleet("toy", fleet.devices)
    assert alone.delay(0) == 0.08 and alone.to_policy([1] * 204)[0].delay == 0.08
    with pytest.raises(InputError, match="samples of 3 clients for 204 devices"):
        fleet.to_policy([1, 2, 3])


STEP = "[[device]]\nstep_seconds = 0.1\n"


@each(
    "text, words",
    [
        ("", r"toy has no list of \[\[device\]\] entries"),
        ("device = 3", "has no list"),
        ("[device]\nstep_seconds = 1", "has no list"),
        ("x = ", "toy is not valid TOML"),
        ("servre = 'none'\n" + STEP, "toy has an unknown 'servre'; did you mean server"),
        ("server = 'fast'\n" + STEP, "server of toy: cannot read 'fast'"),
        ("server = 3\n" + STEP, "server of toy is 3; give it as text"),
        ("[[device]]", "device 1 of toy has no step_seconds"),
        (STEP + STEP + "step = 3", "device 2 of toy has an unknown 'step'; it takes count"),
        (STEP + "straggles = 3", "'straggles'; did you mean straggle"),
        ("[[device]]\nstep_seconds = 0", "device 1 of toy: step_seconds = 0.0 is not above zero"),
        ("[[device]]\nstep_seconds = true", "step_seconds in device 1 of toy is True; give a number"),
        (f"[[device]]\nstep_seconds = 1{'0' * 400}", "step_seconds in device 1 of toy is 10"),
        ("[[device]]\nstep_seconds = nan", "step_seconds in device 1 of toy is nan; give a number"),
        ("[[device]]\nstep_seconds = [1, 2]", "has two values for one device; give a count"),
        ("[[device]]\nstep_seconds = [1, 2, 3]\ncount = 3", "give a number, or two"),
        (STEP + "count = 0", "device 1 of toy has count = 0; give a whole number"),
        (STEP + "count = 2.0", "has count = 2.0"),
        (STEP + STEP + "count = 100_000", "device 2 of toy makes 100001 devices of 100000 at most"),
        (STEP + "link = 3", "link in device 1 of toy is 3"),
        (STEP + "link = '10mbps'", "link in device 1 of toy: cannot read '10mbps'"),
        (STEP + "count = 2\nlink = ['1mbit', '20ms']", "has up at one end of its range alone"),
        (STEP + "count = 2\nlink = ['trace:lte', 'trace:drop']", "has trace at one end"),
        (STEP + "link = []", r"link in device 1 of toy is \[\]"),
        (STEP + "straggle = 2", "device 1 of toy: straggle = 2.0 is no probability"),
        (STEP + "slower = 0.5", "slower = 0.5 is below 1"),
        (STEP + "drop_out = 1", "drop_out = 1.0; give a probability from 0 to below 1"),
        (STEP + "available = 0", "device 1 of toy: a share of time of 0"),
        (STEP + "available = 'often'", "available in device 1 of toy is 'often'"),
        (STEP + "available = [[0, 1], 2]", "has available = .*give a share of time, or windows"),
        (STEP + "available = [[30, 20]]", "device 1 of toy: the window from 30"),
        (STEP + "available = [[0, 20]]\nperiod = 10", "device 1 of toy: the window"),
        (STEP + "period = 0", "device 1 of toy: a period of 0"),
        (STEP + "period = 'day'", "device 1 of toy has period = 'day'"),
    ],
)
def test_a_wrong_file_is_refused_by_its_key(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as e:
        parse_fleet(text, "toy")
    assert "\n" not in str(e.value)


def test_names_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--devices 'phones' is unknown; .*phones-1000"):
        load_fleet("phones")
    with pytest.raises(InputError, match=r"cannot read --devices .*no\.toml: No such file"):
        load_fleet(str(tmp_path / "no.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"cannot read --devices .*bytes\.toml"):
        load_fleet(str(tmp_path / "bytes.toml"))
