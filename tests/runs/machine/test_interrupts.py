"""Signals that ask a program to end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from waiting import until

from thinwire.runs.machine import interrupts
from thinwire.runs.machine.interrupts import held_back, stopped_by_signals

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


def tell(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_program_is_asked_once_by_two_signals_and_again_later(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, now = signal.signal(number, signal.SIG_DFL), [100.0]  # whatever it is here, as under nohup
    monkeypatch.setattr(interrupts, "monotonic", lambda: now[0])
    with stopped_by_signals():
        with pytest.raises(KeyboardInterrupt):
            tell(number)
        now[0] += 0.5
        tell(number)  # the second one of timeout
        now[0] += 1.5
        with pytest.raises(KeyboardInterrupt):  # the first may have been lost, or its closing hang
            tell(number)
    assert signal.getsignal(number) is signal.SIG_DFL
    signal.signal(number, before)


@pytest.fixture
def another_thread() -> Iterator[int]:
    """Run a thread that takes signals, as those of a library do; yield which it is."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert thread.ident
    yield thread.ident
    over.set()
    thread.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("by", ["the main thread", "another"])
def test_a_signal_waits_until_who_was_started_is_known(
    number: signal.Signals, by: str, another_thread: int
) -> None:
    taker = threading.get_ident() if by == "the main thread" else another_thread
    started = []
    with stopped_by_signals(), pytest.raises(KeyboardInterrupt), held_back():
        signal.pthread_kill(taker, number)
        until(lambda: number in signal.sigpending())
        started.append("a rank")
    assert started == ["a rank"]
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_an_object_is_freed_comes_again(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python prints what is raised there, and goes on as if nobody had asked."""
    lost = list[object]()
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    class Freed:
        def __del__(self) -> None:
            tell(number)
            time.sleep(0)  # signals are answered between two operations

    with stopped_by_signals(), pytest.raises(KeyboardInterrupt):
        held = [Freed()]
        held.clear()
        time.sleep(5)
    assert not lost
