"""The folder of a transformer as diffusers saves it: its config, its weights, and samples of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.files.checkpoint import SUFFIX, Stored, read_index
from thinwire.types import WRONG_VALUES, InputError, require
from thinwire.uses.pictures.diffusers_names.empty_model import CONFIG, WEIGHTS, is_surplus

SAMPLE = 2048  # bytes at the beginning, in the middle and at the end of a tensor
_QUANTISED = "quantization_config"


class TransformerFolder:
    """What is in the folder of a transformer of class ``kind``.

    Errors: ``InputError``, one sentence, for a folder that has none, or one that is not read here.
    """

    def __init__(self, kind: type, folder: Path, variant: str | None = None) -> None:
        self._kind, self.folder = kind, folder
        self.config = _config(kind, folder)
        self.stored = Stored(folder, _files(folder, variant))

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Raise ``InputError`` unless the files have just the tensors that the model wants, of its shapes."""
        found, name = self.stored.entries, self._kind.__name__
        lacks = sorted(wanted.keys() - found.keys())
        _none(lacks, f"{self.folder} lacks {{}} of a {name}; fetch it again, or give the model's own class")
        more = sorted(n for n in found.keys() - wanted.keys() if is_surplus(self._kind, n))
        _none(more, f"{self.folder} has {{}}, which a {name} has no place for; give the model's own class")
        for each, x in wanted.items():
            shape = found[each].shape
            text = f"{self.folder} has {each} of shape {shape}, and a {name} by its {CONFIG} {tuple(x.shape)}"
            require(shape == tuple(x.shape), InputError, f"{text}; fetch the folder again")

    def samples(self) -> int:
        """Return a checksum of all names, dtypes and shapes, and of some bytes of each tensor.

        However it is cut into files. A model that is trained further has other bytes in all of its tensors.
        """
        found = 0
        for name, entry in sorted(self.stored.entries.items()):
            found = zlib.crc32(f"{name} {entry.kind} {entry.shape}".encode(), found)
            nbytes = entry.stop - entry.start
            for start in sorted({0, max(0, nbytes - SAMPLE) // 2, max(0, nbytes - SAMPLE)}):
                found = zlib.crc32(self.stored.piece(name, start, min(nbytes, start + SAMPLE)), found)
        return found


def _config(kind: type, folder: Path) -> dict[str, Any]:
    text = f"{folder} is not there; give a local folder, such as 'hf download' makes"
    require(folder.is_dir(), InputError, text)
    file = folder / CONFIG
    text = f"{folder} has no {CONFIG}; give a transformer's folder, as of save_pretrained, or subfolder="
    require(file.is_file(), InputError, text)
    try:
        found = json.loads(file.read_text("utf-8"))
        own = str(found.get("_class_name", kind.__name__))
    except WRONG_VALUES as e:
        raise InputError(f"{file} is no config of a model: {str(e)[:100]}; fetch it again") from e
    require(
        own == kind.__name__, InputError, f"{file} is of a {own}, not of a {kind.__name__}; give that class"
    )
    method = found.get(_QUANTISED)
    name = method.get("quant_method", "a method of its own") if isinstance(method, dict) else method
    text = f"{folder} is quantised by {name}, and plain weights alone are loaded in part; load it whole"
    require(not method, InputError, text)
    return found


def _files(folder: Path, variant: str | None) -> list[Path]:
    """Return the files of weights: those of an index, or one."""
    middle = "" if variant is None else f".{variant}"
    index = folder / f"{WEIGHTS}{SUFFIX}.index{middle}.json"
    if index.is_file():
        names = sorted(set(read_index(index).values()))
        strays = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        _none(strays, f"{index} names {{}}, which {folder} does not have; fetch the model again")
        return [folder / name for name in names]
    single = folder / f"{WEIGHTS}{middle}{SUFFIX}"
    pickled = any(folder.glob(f"{WEIGHTS}*.bin*"))
    text = f"{folder} has no {single.name}, nor an index of such files"
    advice = "fetch it" if variant is None else "give another variant"
    advice = "a .bin is a pickle, and not read: save it by save_pretrained" if pickled else advice
    require(single.is_file(), InputError, f"{text}; {advice}")
    return [single]


def _none(names: Iterable[str], text: str) -> None:
    found = list(names)
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    require(not found, InputError, text.replace("{}", f"{''.join(found[:1]):.99}{more}"))
