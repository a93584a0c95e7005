"""The kernels in Triton, built for cards that are not here: the interpreter takes what a compiler refuses.

The tests of kernels run in the interpreter, and say which kernel was launched with what kinds of arguments.
Triton then builds each one for a card down to its instructions, which needs no card.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FILES = (HERE / "test_fused.py", HERE / "rans/test_rans_on_card.py")
FEWEST = 30  # kernels that these tests launch, at least
CARDS = {"A100": 80, "RTX 4090": 89, "H100": 90, "B200": 100}  # and their compute capability
RECORDING = """
import json, sys, pytest
from thinwire.codecs.kernels import triton_calls
seen, launch = {}, triton_calls.launch
def recorded(kernel, programs, tensors, numbers, constants, warps=4):
    place = [kernel.fn.__module__, kernel.fn.__name__]
    kinds = [str(t.dtype).removeprefix("torch.") for t in tensors]
    key = json.dumps([*place, kinds, [type(n).__name__ for n in numbers], constants, warps])
    seen.setdefault(key, [t.data_ptr() % 16 == 0 for t in tensors])
    launch(kernel, programs, tensors, numbers, constants, warps)
triton_calls.launch = recorded
code = pytest.main(["-q", "-n0", "-p", "no:cacheprovider", *sys.argv[2:]])
open(sys.argv[1], "w").write(json.dumps([[*json.loads(k), whole] for k, whole in seen.items()]))
sys.exit(code)
"""
BUILDING = """
import json, sys
from test_kernels_build import built
print(json.dumps([built(json.loads(line), int(sys.argv[1])) for line in sys.stdin]))
"""
NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "bool": "i1", "uint8": "u8"}
NAMES |= {"int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint16": "u16", "uint32": "u32"}
Kind = list[Any]  # module, kernel, dtypes, types of numbers, constants, warps, which tensors are aligned


def built(kind: Kind, capability: int) -> str | None:
    """Build a kernel for arguments of a kind; return what went wrong."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    module, name, dtypes, numbers, constants, warps, aligned = kind
    kernel = getattr(import_module(module), name)
    types = [f"*{NAMES[d]}" for d in dtypes] + [{"int": "i32", "float": "fp32"}[n] for n in numbers]
    given = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(constants)], strict=True))
    fixed = {(len(types) + i,): value for i, value in enumerate(constants)}
    whole = {(i,): [["tt.divisibility", 16]] for i, there in enumerate(aligned) if there}
    source = ASTSource(kernel, signature=given, constexprs=fixed, attrs=whole)
    try:
        options = {"num_warps": warps, "enable_fp_fusion": False}
        made = compile(source, GPUTarget("cuda", capability, 32), options)
    except Exception as e:
        return f"{name} {dtypes} {constants}: {type(e).__name__}: {e}"
    return None if made.asm.get("cubin") else f"{name}: nothing was built"


def run(code: str, given: str, *args: str, **more: str) -> str:
    paths = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | more
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, input=given, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Kind]:
    pytest.importorskip("triton.backends.nvidia")
    out = tmp_path_factory.mktemp("kinds") / "kinds.json"
    run(RECORDING, "", str(out), *map(str, FILES), TRITON_INTERPRET="1")
    found: list[Kind] = json.loads(out.read_text())
    assert len({tuple(kind[:2]) for kind in found}) >= FEWEST
    return found


@pytest.mark.long
@pytest.mark.parametrize("card", CARDS)
def test_every_kernel_builds(kinds: list[Kind], tmp_path: Path, card: str) -> None:
    """Build each kernel for one kind of arguments."""
    lines = "\n".join(map(json.dumps, {tuple(kind[:2]): kind for kind in kinds}.values()))
    out = run(BUILDING, lines, str(CARDS[card]), TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    wrong = [text for text in json.loads(out.splitlines()[-1]) if text]
    assert not wrong, "\n".join(wrong)
