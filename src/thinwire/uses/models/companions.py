"""Files that go along with a model's tensors: their kinds, and the names that any folder takes.

A package may be somebody else's. What it names is data that a model needs, code for who asks for it, or stays
where it is; pickles are none of these.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from typing import Any

from thinwire.types import WRONG_VALUES, PayloadError, require

SMALL = 64 << 20  # bytes of a file that goes along
MOST = 1000  # files that go along; a model of transformers has about ten
LONGEST, DEEPEST = 240, 4  # bytes of a name, and its parts
DATA = frozenset(
    (
        ".json",
        ".txt",
        ".model",
        ".jinja",
        ".md",
        ".tiktoken",
        ".spm",
        ".bpe",
        ".codes",
        ".vocab",
        ".tokenizer",
    )
)
BARE = frozenset({"LICENSE", "LICENCE", "NOTICE", "COPYING", "README"})
CODE, TENSORS, SHARDS = ".py", ".safetensors", ".index.json"
CONFIG, ADAPTER = "config.json", "adapter_config.json"
_PART = re.compile(r'[^.<>:"|?*\\/ ]([^<>:"|?*\\/]*[^.<>:"|?*\\/ ])?')
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])(\..*)?", re.IGNORECASE)


def is_data(name: str) -> bool:
    """Say whether a file is of a kind that a model needs: text, a vocabulary, tensors of one of its parts.

    An index of shards is not: it sends a loader to other files than the one of tensors.

    >>> [is_data(name) for name in ("source.spm", "2_Dense/model.safetensors", "modeling.py", "rng.pth")]
    [True, True, False, False]
    """
    path = PurePosixPath(name)
    part = path.suffix == TENSORS and len(path.parts) > 1
    known = path.suffix in DATA and not name.endswith(SHARDS)
    return known or name in BARE or part


def is_code(name: str) -> bool:
    """Say whether a file is Python code.

    >>> is_code("modeling_own.py")
    True
    """
    return name.endswith(CODE)


def is_plain(name: str) -> bool:
    """Say whether a name is a file's in a folder or below it on any system, and not hidden.

    >>> [is_plain(name) for name in ("a/b.jinja", "../a", ".bashrc", "aux.json", "C:a", "/etc/a", "a/")]
    [True, False, False, False, False, False, False]
    """
    parts = name.split("/")
    good = len(parts) <= DEEPEST and name.isprintable() and len(name.encode()) <= LONGEST
    return good and all(_PART.fullmatch(part) and not _DEVICE.fullmatch(part) for part in parts)


def check_names(names: Collection[str]) -> None:
    """Raise ``PayloadError`` where a folder would not take files of these names, each by its own."""
    told = f"{len(names)} files beside the tensors, and {MOST} go along at most; leave some out"
    require(len(names) <= MOST, PayloadError, told)
    seen = dict[str, str]()  # of files, and of the folders that they are in
    files = dict[str, str]()
    for name in names:
        require(is_plain(name), PayloadError, f"a file called {name!r:.99}, which is no plain name")
        own = _folded(name)
        other = files.get(own, seen.get(own))
        require(other is None, PayloadError, f"files called {name!r:.99} and {other!r:.99}: one name to some")
        files[own] = name
        parents = [_folded(parent.as_posix()) for parent in PurePosixPath(name).parents][:-1]
        clash = next((parent for parent in parents if parent in files), None)
        require(clash is None, PayloadError, f"{clash!r:.99} is a file, and a folder of {name!r:.99}")
        seen |= dict.fromkeys(parents, name)


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def weights_name(files: Mapping[str, bytes]) -> str:
    """Return what the file of tensors is called beside these, as peft, diffusers or transformers do.

    >>> weights_name({"adapter_config.json": b"{}"}), weights_name({"config.json": b"{}"})
    ('adapter_model.safetensors', 'model.safetensors')
    """
    if ADAPTER in files:
        return f"adapter_model{TENSORS}"
    kind = "diffusion_pytorch_model" if "_class_name" in settings_in(files, CONFIG) else "model"
    return kind + TENSORS


def settings_in(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in one of these files, an empty one where there is none."""
    try:
        found = json.loads(files.get(name, b"{}"))
    except (*WRONG_VALUES, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def wants_code(files: Mapping[str, bytes]) -> bool:
    """Say whether a config among these files names classes of its own: ``auto_map``."""
    return any("auto_map" in settings_in(files, name) for name in files if name.endswith("config.json"))
