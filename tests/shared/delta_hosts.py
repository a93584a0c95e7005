"""Delta folders as their hosts write and read them, made apart from the library after the formats' facts."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torch
import zstandard
from safetensors import safe_open
from safetensors.numpy import save
from safetensors.torch import load_file, save_file
from torch import Tensor

State = dict[str, Tensor]


def checksum(kind: str, x: np.ndarray) -> str:
    if kind == "adler32":
        return f"{zlib.adler32(x):08x}"
    import xxhash

    return xxhash.xxh3_128(x).hexdigest()


def octets(x: Tensor) -> np.ndarray:
    return x.contiguous().view(-1).view(torch.uint8).numpy()


class Indexed:
    """slime's trainer and engine; those of modelexpress with other names."""

    def __init__(self, begin: str = "weight_v", label: str = "", digits: int = 6) -> None:
        self._begin, self._label, self._digits = begin, label, digits

    def folder(self, root: Path, number: int) -> Path:
        return root / f"{self._begin}{number:0{self._digits}d}"

    def version(self, number: int) -> str:
        return f"{self._label}{number:0{self._digits}d}"

    def delta(
        self, root: Path, number: int, old: State, new: State, coding: str = "xor", sums: str = "adler32"
    ):
        folder, frames, notes = self.folder(root, number), {}, {}
        for name, x in new.items():
            before, after = octets(old[name]), octets(x)
            at = np.flatnonzero(before != after).astype("<u4")
            if not at.size:
                continue
            parts = [np.array([at.size], "<u4").view(np.uint8), at.view(np.uint8), after[at]]
            plain = before ^ after if coding == "xor" else np.concatenate(parts)
            frames[name] = np.frombuffer(zstandard.compress(plain.tobytes(), 1), np.uint8)
            notes[name] = checksum(sums, after)
        about = {
            "version": self.version(number),
            "base_version": self.version(number - 1),
            "delta_encoding": coding,
            "compression_format": "zstd",
            "checksum_format": sums,
        }
        file = "model-00000-of-00001.safetensors"
        folder.mkdir(parents=True)
        if frames:
            (folder / file).write_bytes(save(frames, metadata=notes))
        self.index(root, number, about, dict.fromkeys(frames, file))

    def index(self, root: Path, number: int, about: dict[str, str], places: dict[str, str]) -> None:
        text = json.dumps({"metadata": about, "weight_map": places})
        (self.folder(root, number) / "model.safetensors.index.json").write_text(text)

    def whole(self, root: Path, number: int, state: State) -> None:
        self.folder(root, number).mkdir(parents=True)
        save_file(state, self.folder(root, number) / "model-00001-of-00001.safetensors")
        self.index(
            root, number, {"total_size": "1"}, dict.fromkeys(state, "model-00001-of-00001.safetensors")
        )

    def pulled(self, root: Path, number: int, held: dict[str, bytes]) -> dict[str, bytes]:
        """Bring a host's checkpoint, version ``number`` - 1 of it, to the next version."""
        folder = self.folder(root, number)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        if "delta_encoding" not in index["metadata"]:
            whole = {name: x for file in files for name, x in load_file(folder / file).items()}
            return {name: octets(x).tobytes() for name, x in whole.items()}
        assert index["metadata"]["base_version"] == self.version(number - 1)
        found = dict(held)
        for file in files:
            with safe_open(folder / file, "np") as opened:
                for name in opened.keys():  # noqa: SIM118
                    diff = zstandard.decompress(opened.get_tensor(name).tobytes())
                    new = (np.frombuffer(diff, np.uint8) ^ np.frombuffer(held[name], np.uint8)).tobytes()
                    assert f"{zlib.adler32(new):08x}" == opened.metadata()[name]
                    found[name] = new
        return found


class Sparse:
    """TRL's trainer and engine."""

    def delta(self, root: Path, number: int, old: State, new: State, coding: str = "gap_delta", **_: object):
        parts = {}
        for name, x in new.items():
            at = (x.view(-1).view(torch.int16) != old[name].view(-1).view(torch.int16)).nonzero().view(-1)
            if not at.numel():
                continue
            gaps = at - torch.cat([at.new_full((1,), -1), at[:-1]]) - 1
            wide = torch.uint16 if int(gaps.max()) < 1 << 16 else torch.uint32
            parts[f"{name}.idx"] = gaps.to(wide) if coding == "gap_delta" else at.to(torch.int32)
            parts[f"{name}.val"] = x.view(-1)[at].clone()
        self._save(root / "deltas", number, parts, coding)

    def whole(self, root: Path, number: int, state: State) -> None:
        self._save(root / "anchors", number, dict(state), "gap_delta")

    def _save(self, folder: Path, number: int, parts: State, coding: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        about = {"format": "sparse_weight_patch", "version": "1", "sparse": str(folder.name == "deltas")}
        about |= {"model_version": str(number), "encoding": coding, "sparsity": "0.5"}
        save_file(parts, folder / f"step_{number:06d}.safetensors", metadata=about)

    def pulled(self, root: Path, number: int, held: dict[str, bytes]) -> dict[str, bytes]:
        file = root / "anchors" / f"step_{number:06d}.safetensors"
        if file.exists():
            return {name: octets(x).tobytes() for name, x in load_file(file).items()}
        found = dict(held)
        parts = load_file(root / "deltas" / f"step_{number:06d}.safetensors")
        for name in {key.rpartition(".")[0] for key in parts}:
            at = np.cumsum(parts[f"{name}.idx"].numpy().astype(np.int64) + 1) - 1
            words = np.frombuffer(held[name], np.int16).copy()
            words[at] = parts[f"{name}.val"].view(torch.int16).numpy()
            found[name] = words.tobytes()
        return found
