"""Files of draft heads: safetensors, with a note of how the head is built."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from thinwire.replacing import replacing
from thinwire.types import WRONG_VALUES, InputError, require
from thinwire.uses.serving.drafting.draft_head import DraftHead, DraftShape

KEY, VERSION = "thinwire.drafts", 1
SCALE = ".scale"  # behind the name of a matrix
TINY = 1e-30


def save_head(head: DraftHead, path: str | Path) -> None:
    """Write a head to a safetensors file, whole or not at all. Errors: ``OSError``.

    Matrices are int8 with a scale for each row: what a head says is checked, so that a little error costs
    little, and a file may come with a package.
    """
    tensors = {"common": head.common.to("cpu", torch.int32)}
    for name, p in head.state_dict().items():
        x = p.detach().to("cpu", torch.float32)
        if x.dim() == 2:
            scale = x.abs().amax(1).clamp_min(TINY) / 127
            tensors[name + SCALE], x = scale, (x / scale[:, None]).round().to(torch.int8)
        tensors[name] = x.contiguous()
    note = json.dumps(asdict(head.shape) | {"version": VERSION})
    with replacing(path) as part:
        save_file(tensors, part, {KEY: note})


def is_head(path: str | Path) -> bool:
    """Return whether a file is one of a draft head."""
    try:
        with safe_open(str(path), "pt") as file:
            return KEY in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def load_head(path: str | Path) -> DraftHead:
    """Read a head from a file, in float32. Errors: ``InputError`` for a file that is none, or damaged."""
    wrong = f"{path} is no file of a draft head; make one with thinwire train-drafts"
    try:
        with safe_open(str(path), "pt") as file:
            note: dict[str, Any] = json.loads((file.metadata() or {})[KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        version = note.pop("version")
        require(version == VERSION, InputError, f"{path}: version {version!r:.20}; update thinwire")
        common = tensors.pop("common").long()
        require(common.dim() == 1 and len(common) > 0 and int(common.min()) >= 0, InputError, wrong)
        head = DraftHead(DraftShape(**note), common)
        scales = {n: tensors.pop(n + SCALE) for n in [*tensors] if n + SCALE in tensors}
        read = {n: t.float() * (scales[n][:, None] if n in scales else 1) for n, t in tensors.items()}
        head.load_state_dict(read)
    except (OSError, SafetensorError, RuntimeError, *WRONG_VALUES) as e:
        raise InputError(f"{wrong} ({' '.join(str(e).split())[:100]})") from e
    finite = all(bool(p.isfinite().all()) for p in head.parameters())
    require(finite, InputError, f"{path} has a NaN or an infinity; make it again")
    return head.eval()
