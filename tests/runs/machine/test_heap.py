"""A process that keeps what it frees takes no pages from the kernel for the same blocks again."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
from launchers import warm

from thinwire.runs.machine import processor

# Blocks of 64 MB, as steps free and take them: the pages of the last turn, out of 16384. Aligned ones need
# some turns until what is free has merged.
FAULTS = """
import resource, sys
from thinwire.runs.machine.processor import keep_freed
if "keep" in sys.argv:
    assert keep_freed()
import torch
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")


@glibc
def test_a_block_that_was_freed_is_taken_again_as_it_is(tmp_path: Path) -> None:
    if os.sysconf("SC_PAGE_SIZE") != 4096:
        pytest.skip("pages of another size than 4 KiB")
    if any(name.startswith(processor.CHOSEN) for name in os.environ):
        pytest.skip("the environment chooses how memory is to be had")
    script = tmp_path / "faults.py"
    script.write_text(FAULTS)

    def faults(*arguments: str) -> int:
        done = warm().python(tmp_path, script, *arguments, needs=("torch",))
        assert done.wait() == 0, done.err
        return int(done.out)

    assert faults("keep") < 100 < faults()


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_CONF", "LD_PRELOAD", "GLIBC_TUNABLES"])
def test_who_has_chosen_an_allocator_keeps_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert not processor.keep_freed()


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(processor.CHOSEN):
            monkeypatch.delenv(name)

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(processor.ctypes, "CDLL", missing)
    assert not processor.keep_freed()
