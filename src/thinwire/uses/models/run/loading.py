"""What loads an unpacked model, as far as its files say, and what is told of files that stayed behind."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from thinwire.uses.models.companions import ADAPTER, CONFIG, is_code, settings_in, wants_code

NAMED = 6  # files that are named of many


class Unpacked(NamedTuple):
    """What was written of a packed model: how many tensors, which other files, and which were not."""

    tensors: int
    files: dict[str, bytes]
    left: list[str]


def loads_as(made: Unpacked) -> str:
    """Return a clause on what loads a model, an empty one where its files do not say.

    >>> loads_as(Unpacked(4, {"config.json": b'{"_class_name": "UNet2DModel"}'}, []))
    ', which diffusers loads as UNet2DModel'
    """
    about = settings_in(made.files, CONFIG)
    if ADAPTER in made.files:
        base = settings_in(made.files, ADAPTER).get("base_model_name_or_path")
        return f", an adapter that peft loads onto {base!s:.99}" if base else ", an adapter"
    if isinstance(about.get("_class_name"), str):
        return f", which diffusers loads as {about['_class_name']:.99}"
    if "auto_map" in about and not _is_known(about):
        if any(map(is_code, made.files)):
            return ", which transformers loads with trust_remote_code=True alone: read its code first"
        return ", which transformers does not load without the model's own code"
    return f", which transformers loads as {about['architectures'][0]}" if _is_known(about) else ""


def _is_known(about: Mapping[str, object]) -> bool:
    """Say whether transformers has the class that a config names, for models of its type."""
    if importlib.util.find_spec("transformers") is None:
        return False
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    named = about.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return (
        isinstance(first, str)
        and about.get("model_type") in CONFIG_MAPPING_NAMES
        and isinstance(getattr(transformers, first, None), type)
    )


def told_of_left(left: list[str]) -> Iterator[str]:
    """Yield a sentence on code that was not written, and one on files that are no part of a model."""
    code = [name for name in left if is_code(name)]
    other = [name for name in left if not is_code(name)]
    if code:
        yield f"{listed(code)}: code, which whoever packed it chose; --allow-code writes it, read it first"
    if other:
        yield f"{listed(other)}: left out, of no kind that a model needs"


def listed(names: list[str]) -> str:
    """Return names in a row, of many the first few and how many more there are.

    >>> listed(["a", "b"])
    'a, b'
    """
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def told_of_code(files: Mapping[str, bytes]) -> list[str]:
    """Return a sentence on code that goes along with a model that has some of its own."""
    if not wants_code(files):
        return []
    code = sorted(filter(is_code, files))
    if code:
        return [f"{listed(code)}: the model's own code, which unpack writes with --allow-code alone"]
    return ["its auto_map names classes of the model's own whose code is not in its folder"]
