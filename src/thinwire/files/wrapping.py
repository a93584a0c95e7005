"""A patch as a safetensors file: one tensor of bytes, and in the header what a tool may want to know."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.files.header import fields, header
from thinwire.types import WRONG_VALUES, PayloadError

TENSOR = "patch"
MAX_HEADER = 1 << 16  # bytes


def wrap(body: bytes, notes: Mapping[str, str]) -> bytes:
    """Return a safetensors file of the uint8 tensor ``patch`` [len(body)], with ``notes`` as metadata."""
    return header(notes, [(TENSOR, "U8", [len(body)], len(body))]) + body


def unwrap(data: bytes) -> memoryview:
    """Return the body of a file that ``wrap`` made, without copying; ``PayloadError`` for any other."""
    try:
        told, begin = fields(data, MAX_HEADER)
        tensor, body = told[TENSOR], memoryview(data)[begin:]
        fits = tensor["dtype"] == "U8" and tensor["data_offsets"] == [0, len(body)]
    except (*WRONG_VALUES, RecursionError) as e:
        raise PayloadError(f"a safetensors file without a tensor {TENSOR!r}") from e
    if not fits:
        raise PayloadError(f"a safetensors file whose tensor {TENSOR!r} is not its {len(body)} bytes")
    return body
