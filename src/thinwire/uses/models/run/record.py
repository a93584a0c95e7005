"""The record of one packed model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.runs.records.run_record import RunRecord, about


@dataclass
class TensorInfo:
    """A tensor of a packed model."""

    name: str = about("its name")
    kind: str = about("`steps`, `groups` of fixed width, `plain` as it was, or `same` as another")
    shape: list[int] = about("its shape; empty for `same`", make=list)
    nbytes: int = about("bytes it takes in the file", 0)
    bits: float | None = about("bits a weight; `null` where it has no bytes of its own", None)


@dataclass
class RivalPacking:
    """Another way to pack the same model."""

    name: str = about("what was done")
    nbytes: int = about("bytes of its file")
    perplexity: float | None = about("on the same text; `null` where not measured", None)


@dataclass
class ModelRecord(RunRecord):
    """The record of a model that was packed."""

    # What a model is packed to is what runs are compared for.
    FREE: ClassVar[frozenset[str]] = RunRecord.FREE | {"target", "bits", "codes", "like", "base", "link"}

    kind: str = about("`model`", "model")
    unit: str = about("`model`", "model")
    source: str = about("the model that was packed", "")
    source_nbytes: int = about("bytes of its tensors", 0)
    target_nbytes: int | None = about("bytes asked for, if any", None)
    target_bits: float | None = about("bits a weight in memory asked for, if any", None)
    packed_nbytes: int = about("bytes of the packed file, header and other files included", 0)
    bits_a_weight: float = about("bits of the tensors in the file, for each weight of the model", 0.0)
    lossless: bool = about("whether all tensors are as they were", False)
    tensors: list[TensorInfo] = about("one object a tensor", make=list)
    rivals: list[RivalPacking] = about("other ways to pack the same model", make=list)
    perplexity: float | None = about("of the packed model on the held-out part of the text, if any", None)
    perplexity_source: float | None = about("of the model as it was, on the same tokens", None)
    tokens_read: int = about("tokens that the moments come from", 0)
    tokens_heldout: int = about("tokens that the perplexities are of", 0)
    seconds_predicted: float | None = about("seconds until it is there, over the link asked for", None)
    encode_cpu_s: float = about("processor seconds of packing, the pass over the text included", 0.0)
    decode_cpu_s: float = about("processor seconds of unpacking", 0.0)
