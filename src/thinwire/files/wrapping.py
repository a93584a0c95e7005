"""A patch as a safetensors file: one tensor of bytes, and in the header what any tool may want to know of it.

The format is a length, a JSON header and the tensors' bytes; so little is needed of it here that it is
written and read without the package. Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

from thinwire.types import PayloadError

TENSOR = "patch"
MAX_HEADER = 1 << 16  # bytes
ALIGN = 8


def wrap(body: bytes, notes: Mapping[str, str]) -> bytes:
    """Return a safetensors file of the uint8 tensor ``patch`` [len(body)], with ``notes`` as metadata."""
    tensor = {"dtype": "U8", "shape": [len(body)], "data_offsets": [0, len(body)]}
    header = json.dumps({"__metadata__": dict(notes), TENSOR: tensor}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGN)
    return struct.pack("<Q", len(header)) + header + body


def unwrap(data: bytes) -> memoryview:
    """Return the body of a file that ``wrap`` made, without copying; ``PayloadError`` for any other."""
    if len(data) < 8:
        raise PayloadError(f"a file of {len(data)} bytes is no safetensors file")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(MAX_HEADER, len(data) - 8):
        raise PayloadError(f"a safetensors header of {length} bytes in a file of {len(data)}")
    body = memoryview(data)[8 + length :]
    try:
        tensor = json.loads(data[8 : 8 + length])[TENSOR]
        fits = tensor["dtype"] == "U8" and tensor["data_offsets"] == [0, len(body)]
    except (ValueError, TypeError, LookupError, RecursionError) as e:
        raise PayloadError(f"a safetensors file without a tensor {TENSOR!r}") from e
    if not fits:
        raise PayloadError(f"a safetensors file whose tensor {TENSOR!r} is not its {len(body)} bytes")
    return body
