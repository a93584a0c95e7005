"""A follower where torch is not: arrays, files and commands, against a publisher that has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from waiting import LONG

from thinwire.state.layout import WORDS, Layout, Slot, itemsize
from thinwire.state.replica import Replica
from thinwire.state.values import Bits, bits_of, narrowed
from thinwire.types import InputError
from thinwire.uses.following.pull.store_writer import ShelfWriter
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher

pytest.importorskip("zstandard")

ABSENT = """
import sys

sys.modules |= dict.fromkeys(("torch", "ml_dtypes", "safetensors", "fsspec"))  # as if they were not installed
"""
FOLLOW = """
import json, pathlib
import thinwire

port, state, base, folder = int(sys.argv[1]), sys.argv[2] or None, sys.argv[3], pathlib.Path(sys.argv[4])
if base:
    from thinwire.files.checkpoint import read_bits

    base = {name: bits.array for name, bits in read_bits(pathlib.Path(base)).items()}
with thinwire.Follower("127.0.0.1", port, state=state, base=base or None) as follower:
    follower.wait(int(sys.argv[5]))
    for version in follower:
        written = follower.write(folder / "light")
        found = {name: [x.dtype.str, x.shape, x.tobytes().hex()] for name, x in follower.arrays().items()}
        about = {"number": written.number, "nbytes": [a.nbytes for a in follower.arrivals]}
        print(json.dumps(about | {"arrays": found, "dtypes": follower.dtypes}), flush=True)
        if sys.stdin.readline() != "on\\n":
            break
"""
KINDS = {
    "half": "bfloat16",
    "eight": "float8_e4m3fn",
    "whole": "float32",
    "lossy": "bfloat16",
    "near": "float16",
}
KINDS |= {"count": "int64", "pairs": "complex64", "tied": "bfloat16"}
BOUNDS = {"lossy": 0.1, "near": 0.01}


def state(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    found = {
        name: torch.randn(6, 50, generator=g) for name in KINDS if name not in ("count", "pairs", "tied")
    }
    found |= {"count": torch.arange(5), "pairs": torch.randn(4, dtype=torch.complex64, generator=g)}
    return found | {"tied": found["half"]}


def dtypes() -> dict[str, str]:
    return {name: kind for name, kind in KINDS.items() if name not in ("count", "pairs", "tied")}


def step(tensors: dict[str, Tensor], seed: int) -> None:
    for name, x in state(seed).items():
        if name != "tied":
            tensors[name].reshape(-1)[seed::7] = x.reshape(-1)[seed::7]


@contextmanager
def light(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run the follower's program in a process of its own, which has no torch."""
    program = [sys.executable, "-c", ABSENT + FOLLOW, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, env=os.environ, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str], folder: Path, like: Follower, number: int) -> list[int]:
    """Check what the program has of a version, and return the bytes of what came."""
    assert process.stdout is not None
    found = json.loads(process.stdout.readline() or "null")
    assert found["number"] == like.wait(number, LONG).number == number
    like.write(folder / "heavy")
    assert (folder / "light").read_bytes() == (folder / "heavy").read_bytes()
    assert found["dtypes"] == like.dtypes and found["dtypes"] == KINDS
    read, tensors = load_file(folder / "light"), like.tensors()
    assert read.keys() == tensors.keys() - {"tied"}
    for name, x in tensors.items():
        assert name == "tied" or (read[name].dtype == x.dtype and torch.equal(bits(read[name]), bits(x)))
        _, shape, values = found["arrays"][name]
        assert shape == list(x.shape) and values == bits(x).numpy().tobytes().hex(), name
    assert found["arrays"]["half"][0] == "<u2" and found["arrays"]["eight"][0] == "|u1"
    return list(found["nbytes"])


def bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def go_on(process: subprocess.Popen[str], word: str = "on") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def test_versions_are_followed_written_and_gone_on_from_bit_by_bit_without_torch(tmp_path: Path) -> None:
    tensors, saved = state(), tmp_path / "saved"
    with (
        Publisher(tensors, dtype=dtypes(), bounds=BOUNDS) as publisher,
        Follower("127.0.0.1", publisher.port) as like,
    ):
        publisher.publish(step=1)
        with light(publisher.port, saved, "", tmp_path, 1) as process:
            for number in (1, 2):
                told(process, tmp_path, like, number)
                step(tensors, number)
                publisher.publish(step=number)
                go_on(process)
            told(process, tmp_path, like, 3)
            go_on(process, "end")
            assert process.wait(LONG) == 0  # before the next version, which it could have as well
        step(tensors, 3)
        publisher.publish(step=3)
        with light(publisher.port, saved, "", tmp_path, 4) as process:  # from what was saved: one patch comes
            (nbytes,) = told(process, tmp_path, like, 4)
            assert nbytes < Layout.of(tensors).nbytes / 2
            go_on(process, "end")
            assert process.wait(LONG) == 0
        heavy = Follower("127.0.0.1", publisher.port, state=saved)  # and torch goes on from its file
        assert heavy.wait(4, LONG).hash == publisher.newest.hash and not heavy.arrivals
        heavy.close()


def test_a_base_of_arrays_saves_the_keyframe(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(1000, 30).bfloat16(), "eight": torch.ones(9).to(torch.float8_e5m2)}
    with Publisher(tensors) as publisher, Follower("127.0.0.1", publisher.port) as like:
        publisher.publish()
        like.wait(1, LONG)
        like.write(tmp_path / "base")
        tensors["w"][0] = 1
        publisher.publish()
        with light(publisher.port, "", tmp_path / "base", tmp_path, 2) as process:
            assert process.stdout is not None
            found = json.loads(process.stdout.readline())
            assert found["number"] == 2 and found["nbytes"][0] < 2000
        like.wait(2, LONG)
        like.write(tmp_path / "heavy")
        assert (tmp_path / "light").read_bytes() == (tmp_path / "heavy").read_bytes()


COMMAND = """
from thinwire.cli import main

main(sys.argv[1:])
"""


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", ABSENT + COMMAND, *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True, timeout=LONG)


def test_commands_follow_stores_and_name_what_they_lack(tmp_path: Path) -> None:
    tensors = state()
    with ShelfWriter.of(tmp_path / "store", tensors, dtype=dtypes(), bounds=BOUNDS) as writer:
        for number in (1, 2):
            step(tensors, number)
            writer.publish(number)
        writer.flush()
        done = command(
            "follow", tmp_path / "store", "--once", "--out", tmp_path / "out", "--state", tmp_path / "s"
        )
        assert done.returncode == 0, done.stderr
    read = load_file(tmp_path / "out")
    assert torch.equal(read["half"], tensors["half"].bfloat16()) and torch.equal(
        read["whole"], tensors["whole"]
    )
    assert (read["lossy"].float() - tensors["lossy"]).abs().max() < 0.11
    lacking = command("publish", tmp_path / "out", "--port", 0)
    assert lacking.returncode == 2
    assert (
        lacking.stderr
        == "thinwire: this command needs torch, which is absent; pip install 'thinwire[torch]'\n"
    )


def test_numpy_rounds_as_torch_does() -> None:
    raw = np.random.default_rng(0).integers(0, 2**32, 1 << 18, dtype=np.uint32).view(np.float32)
    x = np.concatenate(
        [raw[~np.isnan(raw)], np.float32([np.inf, -np.inf, 0, -0.0, 65519, 65520, 3e38, 3.4e38])]
    )
    for kind in ("bfloat16", "float16", "float32", "float64"):
        want = torch.from_numpy(x).to(getattr(torch, kind))
        assert narrowed(x, kind).tobytes() == bits(want).numpy().tobytes(), kind


def test_bits_of_every_dtype_are_an_array_and_back() -> None:
    g = np.random.default_rng(0)
    for kind, word in WORDS.items():
        raw = g.integers(0, 2 if kind == "bool" else 127, 15 * itemsize(kind), np.uint8).view(word)
        x = Bits(kind, (3, 5), raw).array
        assert x.shape[:2] == (3, 5) and x.tobytes() == raw.tobytes(), kind
        again = bits_of(x, kind) if kind != "complex32" else Bits(kind, (3, 5), raw)  # two numbers an element
        assert again[:2] == (kind, (3, 5)) and again.words.tobytes() == raw.tobytes(), kind
    with pytest.raises(InputError, match=r"w is float32 .*, expected bfloat16"):
        Replica(Layout((Slot("w", (2,), "bfloat16"),))).start({"w": np.ones(2, np.float32)})
