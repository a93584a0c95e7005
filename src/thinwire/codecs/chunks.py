"""The largest values of each run of a tensor, by their positions in the run.

A position takes as few bits as the run's length does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.codecs.codec import Codec, Layout, fixed_layout, head, roundtrip, tuned
from thinwire.codecs.indices import disorder, increasing
from thinwire.codecs.kernels import chunks_calls
from thinwire.codecs.kernels.bits import pack_wide, unpack_wide, wide_nbytes
from thinwire.codecs.raw import Cast, Raw
from thinwire.codecs.sparse import check_kept, flattened, kept_count, kept_values, scattered, vector
from thinwire.codecs.uniform import Uniform
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, TensorSpec, require
from thinwire.verdicts import refuse

MAX_CHUNK = 2**16
_COLUMN = 8  # values of a run that are looked at together first: fewer or more take longer [measured]


@dataclass(frozen=True, repr=False)
class ChunkTopK(Spec):
    """Keep the largest magnitudes of each run of ``chunk`` values: ``ratio`` of them, at least one.

    ``values`` codes them; the last run may be shorter. To choose takes a fraction of the time that ``TopK``
    takes; a position takes 12 bits in runs of 4096 values. Use it with error feedback. Which of equal
    magnitudes are kept is not promised, and differs between a card and a CPU. Source: SparseLoCo (arXiv
    2508.15706), which chooses by runs [second-hand].

    >>> import torch
    >>> codec = ChunkTopK(ratio=0.5, chunk=4)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -4.0, 0.5, 3.0, 0.1, 0.2])))
    tensor([ 0.0000, -4.0000,  0.0000,  3.0000,  0.0000,  0.2000])
    """

    ratio: float
    chunk: int = 4096
    values: Codec = Raw()  # noqa: RUF009 -- frozen
    finite = False  # what is not kept is not looked at

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kept(self.ratio, self.values)
        good = 2 <= self.chunk <= MAX_CHUNK
        require(good, InputError, f"chunk={self.chunk} is not in 2..{MAX_CHUNK}; give the length of a run")

    def tuned(self, x: Tensor) -> ChunkTopK:
        """Return the codec for residuals of ``x``."""
        return replace(self, values=tuned(self.values, x))

    def coded_apart(self, n: int) -> bool:
        """Return whether ``n`` values are whole runs, of which those kept have scales of their own."""
        values, kept = self.values, n // self.chunk * kept_count(self.ratio, self.chunk)
        grouped = isinstance(values, Uniform) and values.rounding == "nearest" and values.group
        alone = isinstance(values, (Raw, Cast)) or bool(grouped and kept % grouped == 0)
        return alone and n % self.chunk == 0

    def encode(self, x: Tensor) -> Payload:
        flat = flattened(x)
        chunk, k, _ = self._runs(flat.numel())
        if chunks_calls.there(self._plan(flat.numel()), flat):
            packed, values, _ = chunks_calls.chosen(self._plan(flat.numel()), flat, None, False)
            return Payload(TensorSpec.of(x), (packed, *self.values.encode(values).parts))
        whole = flat.numel() // chunk * chunk
        rest = flat[whole:].abs()
        last = rest.topk(kept_count(self.ratio, rest.numel()), sorted=False).indices
        first = _largest(flat[:whole].view(-1, chunk), k)
        at = torch.cat([first.sort(1).values.flatten(), last.sort().values])
        kept = self.values.encode(flat[at + _starts(at, chunk, k)])
        return Payload(TensorSpec.of(x), (pack_wide(at, _width(chunk)), *kept.parts))

    def decode(self, payload: Payload) -> Tensor:
        n = payload.spec.numel
        chunk, k, count = self._runs(n)
        width = _width(chunk)
        packed = head(payload, torch.uint8, wide_nbytes(count, width))
        kept = kept_values(payload, count, self.values)
        if chunks_calls.there(self._plan(n), packed):
            x = torch.zeros(payload.spec.shape, dtype=payload.spec.dtype, device=packed.device)
            refuse(chunks_calls.put(self._plan(n), packed, kept, x), lambda: disorder(n))
            return x
        at = unpack_wide(packed, width, count)
        index = increasing(at + _starts(at, chunk, k), n)
        return scattered(payload.spec, index, kept)

    def roundtrip_against(self, x: Tensor, reference: Tensor) -> tuple[Payload, Tensor] | None:
        """Return the payload of the difference to ``reference``, and what it restores, by kernels."""
        plan, x = self._plan(x.numel()), x.detach()
        if not isinstance(self.values, (Raw, Cast, Uniform)) or not chunks_calls.there(plan, x, reference):
            return None  # another may have to be tuned
        packed, kept, restored = chunks_calls.chosen(plan, flattened(x), reference, True)
        coded, kept = roundtrip(self.values, kept)
        chunks_calls.put(plan, packed, kept, restored, reference)  # of our own: in order
        spec = TensorSpec(tuple(x.shape))
        return Payload(spec, (packed, *coded.parts)), restored

    def decode_against(self, payload: Payload, reference: Tensor) -> Tensor | None:
        """Return ``reference`` and what a payload adds to it, by kernels."""
        spec, plan = payload.spec, self._plan(payload.spec.numel)
        packed = head(payload, torch.uint8, wide_nbytes(plan.kept, plan.width))
        if spec.dtype != torch.float32 or not chunks_calls.there(plan, packed, reference):
            return None
        restored, kept = reference + 0.0, kept_values(payload, plan.kept, self.values)
        refuse(chunks_calls.put(plan, packed, kept, restored, reference), lambda: disorder(spec.numel))
        return restored

    def _plan(self, n: int) -> chunks_calls.Runs:
        chunk, k, count = self._runs(n)
        return chunks_calls.Runs(n, chunk, k, count - n // chunk * k, _width(chunk))

    def layout(self, spec: TensorSpec) -> Layout:
        chunk, _, count = self._runs(spec.numel)
        positions = (torch.uint8, wide_nbytes(count, _width(chunk)))
        return positions, *fixed_layout(self.values, vector(count, spec))

    def nbytes(self, spec: TensorSpec) -> int:
        chunk, _, count = self._runs(spec.numel)
        return wide_nbytes(count, _width(chunk)) + self.values.nbytes(vector(count, spec))

    def _runs(self, n: int) -> tuple[int, int, int]:
        """Return the length of a run, how many values of each are kept, and of all ``n``."""
        chunk = max(1, min(self.chunk, n))
        k = kept_count(self.ratio, chunk)
        return chunk, k, n // chunk * k + kept_count(self.ratio, n % chunk)


def _largest(runs: Tensor, k: int) -> Tensor:
    """Return where the ``k`` largest magnitudes of each row are, in any order: int64 [rows, k].

    They lie in the ``k`` columns with the largest maxima, if a row is cut into ``_COLUMN`` rows of columns.
    """
    rows, chunk = runs.shape
    columns = chunk // _COLUMN
    if chunk % _COLUMN or 2 * k > columns:  # then most columns would be looked at again
        return runs.abs().topk(k, dim=1, sorted=False).indices
    stacked = runs.view(rows, _COLUMN, columns)
    best = stacked.abs().amax(1).topk(k, dim=1, sorted=False).indices
    sizes = stacked.gather(2, best[:, None].expand(rows, _COLUMN, k)).abs_().view(rows, _COLUMN * k)
    found = sizes.topk(k, dim=1, sorted=False).indices
    return found.div(k, rounding_mode="floor").mul_(columns).add_(best.gather(1, found % k))


def _starts(at: Tensor, chunk: int, k: int) -> Tensor:
    """Return where the run of each position begins: ``k`` positions are of the first, as many of the next."""
    order = torch.arange(at.numel(), dtype=torch.int64, device=at.device)
    return order.div_(max(1, k), rounding_mode="floor").mul_(chunk)


def _width(chunk: int) -> int:
    """Return the bits of a position in a run."""
    return max(1, (chunk - 1).bit_length())
