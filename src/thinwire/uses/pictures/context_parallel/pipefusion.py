"""Mode pipe: each rank has some of the blocks, and the picture passes through them in patches.

After some steps at first, a rank attends from one patch to all others as they were at their last turn, one
step ago at most; so all ranks work at the same time, on different patches (PipeFusion, arXiv 2405.14430).
Between ranks the hidden state of a patch travels, coded as what has changed since its last turn. The text is
computed with every patch, so that it is never old: with the first patch alone, 32 words beside 2,048 tokens
in 4 patches took 4.4 % fewer bytes between ranks and lost 1.4 dB at 4 bits, 1.7 dB as float16 [measured].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.collectives import MeshExchange
from thinwire.types import DesyncError, InputError, LinkError, Packet, require
from thinwire.uses.pictures.arrivals import Arrivals, Arrived, arrived
from thinwire.uses.pictures.coding import Coding, Endpoints
from thinwire.uses.pictures.context_parallel.divided.block_ranges import ranges_of
from thinwire.uses.pictures.context_parallel.kept_keys import KeptKeys, TokenLayout, taken
from thinwire.uses.pictures.context_parallel.modes import SPACE, Division
from thinwire.uses.pictures.context_parallel.patch_streams import PatchStreams
from thinwire.uses.pictures.context_parallel.patches import MOST_SUITED, Patches, TokenPatch, suited
from thinwire.uses.pictures.diffusers_names.block_hooks import piped
from thinwire.uses.pictures.diffusers_names.interfaces import Attention, Given, Stock
from thinwire.uses.pictures.diffusers_names.pipe_plans import blocks_of, pipe_plan_of
from thinwire.uses.pictures.diffusers_names.plans import SplitPlan
from thinwire.uses.pictures.message_bytes import device_of
from thinwire.uses.pictures.messages import ExchangeTally, Posted, Repairs, SentValues, check
from thinwire.uses.pictures.model_calls import CallInputs, CountedCalls, Inquiry, shapes_of
from thinwire.uses.pictures.rank_message import Key, RankMessage, TensorKind
from thinwire.uses.pictures.send_lane import SendLane
from thinwire.verdicts import Questions

_GENERATION, _CALL = 32, 16  # bits of a message's step below its generation, and below its call
_OUTPUTS, _BESIDE = 1 << 15, 1 << 14  # the first slots of outputs, and of what goes beside a patch
MOST_PATCHES = 1024
_SHARED = MOST_PATCHES  # the slot of an output that is not in patches
_GRACE = 0.1  # of the deadline: how much later a rank gives up for each that the awaited one waits for itself


class PipeFusion(CountedCalls):
    """The passes of one model whose blocks are divided; a ``WholeForward``."""

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        super().__init__(Inquiry(exchange, deadline))
        self.tally = ExchangeTally()
        self._exchange, self._deadline, self._division = exchange, deadline, division
        self._rank, self._ranks = exchange.rank, exchange.ranks
        self._place = self._ranks.index(self._rank)
        self._last = self._place == len(self._ranks) - 1
        self._repairs = Repairs(exchange, deadline)
        self._codings, self._lane = (attention, output), SendLane(self._abandon)
        self._questions, self._arrivals = Questions(), Arrivals(exchange)
        self._warmup = max(1, attention.warmup)
        self._forget()

    def attached(self, model: nn.Module, plan: SplitPlan | None = None) -> AbstractContextManager[None]:
        """Let the calls of ``model`` pass through the ranks inside the block."""
        self._plan, self._model = pipe_plan_of(model), model
        blocks = blocks_of(model)
        self._own = ranges_of(model, blocks, len(self._ranks))[self._place]
        beside = {name for block in blocks for name in block.streams} & set(self._plan.beside)
        self._words = set(self._plan.words) or beside
        return piped(model, self, self, plan)

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the others not to wait for this rank, in this picture and at the beginning of the next."""
        self._inquiry.leave()
        self._lane.close()
        self._arrivals.end()
        self._repairs.leave()
        with suppress(LinkError):
            self._abandon(cause)
            self._stop(self.clock.generation + 1 << _GENERATION, RankMessage.stop(cause))

    def run(self, given: Given, compute: Callable[..., Any]) -> Any:
        """Return the model's output for these inputs, the same bits on all ranks."""
        inputs, seen = given.inputs, CallInputs.of(given.inputs)
        self._begin(given, shapes_of(inputs), seen.time)
        self._inputs = self._inquiry.note(self.clock.generation, seen.sums)
        self._frames = self._plan.frames(self._model, inputs)
        self._moves = any(_is_video(x) for x in inputs.values())
        beside = [inputs.get(name) for name in self._words]
        self._beside = sum(x.shape[1] for x in beside if isinstance(x, Tensor))
        self._cuts, self._outputs = None, []
        turns = [None] if self._call.step < self._warmup else range(self._number)
        for self._turn in turns:  # of a patch, or of all
            # The first rank has its streams, and the last keeps them.
            self._has, self._gave = not self._place, self._last
            made = compute()
        text = f"{type(self._model).__name__} has joined no output; use mode one"
        require(self._cuts is not None and not self._outputs, InputError, text)
        self._lane.flush()
        self._questions.settle()
        self.tally.calls += 1
        self._calls += 1
        self._ended = True
        return made

    def cut(self, name: str, x: Tensor, dim: int, of: Sequence[str] = ()) -> Tensor:
        """Return this turn's tokens of an input; one that has other tokens than ``of`` stays whole.

        Of one that is of the picture and the text, the text's tokens stay.
        """
        if self._cuts is None and not of:
            self._cuts = self._cut_up(x.shape[dim])
        if self._cuts is not None and self._turn is not None and len(of) > 1 and x.shape[dim] > self._tokens:
            return taken(x, self._cuts[self._turn], self._layout, dim)
        if self._cuts is None or (of and x.shape[dim] != self._cuts.tokens):
            return x
        text = f"{name} has {x.shape[dim]} tokens where others have {self._cuts.tokens}; use mode gather"
        require(x.shape[dim] == self._cuts.tokens, InputError, text)
        return x if self._turn is None else self._cuts[self._turn].take(x, dim)

    def _cut_up(self, tokens: int) -> Patches:
        """Return the patches of a call, as many as in the first one of its picture."""
        frames = self._frames if self._division.over == SPACE else 0
        text = f"mode pipe does not know the frames of a {type(self._model).__name__}; leave over={SPACE} out"
        require(bool(frames) or self._division.over != SPACE or not self._moves, InputError, text)
        self._number = self._number or self._division.patches
        if not self._number:
            self._number = min(suited(tokens, self._beside, len(self._ranks)), tokens // (frames or 1))
        self._repairs.await_of_each(2 * self._number + 1)  # two packets a patch, and the output
        return Patches(tokens, self._number, frames)

    def again(self) -> bool:
        """Say whether this is a later patch of the same call."""
        return bool(self._turn)

    def owns(self, number: int) -> bool:
        """Say whether a block is this rank's."""
        return number in self._own

    def at_block(self, number: int, streams: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Take the streams from the rank before, or hand them on to the next, where its blocks begin."""
        self.begin_block(number)
        if not self._has and number >= self._own.start:  # a call may pass over blocks
            self._has, streams = True, self._taken(streams)
        if not self._gave and number >= self._own.stop:
            self._gave = True
            for m, patch in self._turned():
                parts, frames = self._streams(patch).parts(streams), self._alike(streams, patch)
                self._send(m, TensorKind.HIDDEN, parts, frames)
        return streams

    def begin_block(self, number: int) -> None:
        """Note that a block begins."""
        self._block, self._attention, self._heard = number, 0, False

    def done(self, number: int) -> None:
        """Refuse a block whose attention was to this patch alone."""
        text = f"block {number} has exchanged nothing in its attention, so the picture would be wrong"
        require(self._heard, InputError, f"{text}; use mode one")

    def attend(self, layer: str, attention: Attention, stock: Stock) -> Tensor:
        """Return the attention of these tokens to all, those of other patches as of their last turn."""
        place = (self._call.stream, self._block, self._attention)  # one processor may serve several layers
        self._heard, self._attention = True, self._attention + 1
        if self._turn is None:
            return stock.whole(self._kept.whole(place, attention))
        return stock.whole(self._kept.renewed(place, attention, self._patches[self._turn], self._layout))

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Return the output of all patches after the last one's turn, and before it a place for it."""
        text = "a call passes over all blocks of the last rank; use fewer ranks, or mode gather"
        require(self._has and self._gave, InputError, text)
        shape = [*x.shape[:dim], self._tokens, *x.shape[dim + 1 :]]
        if self._last:
            for m, patch in self._turned():
                part = patch.take(x, dim) if self._turn is None else x
                self._outputs.append(self._send_output(m, part))
        if not self._ends_call:
            return x.new_zeros(()).expand(shape)
        out = x.new_empty(shape)
        for m, patch in enumerate(self._patches):
            place = [*x.shape[:dim], patch.tokens, *x.shape[dim + 1 :]]
            patch.put(out, self._outputs[m] if self._last else self._output(m, tuple(place), x), dim)
        self._outputs = []
        return out

    def share(self, x: Tensor) -> Tensor:
        """Return an output that is not in patches, as the last rank has it after the last one's turn."""
        if not self._ends_call:
            return x
        if self._last:
            return self._send_output(_SHARED, x)
        return self._output(_SHARED, tuple(x.shape), x).clone()  # what was decoded is kept as a reference

    def _forget(self) -> None:
        hidden, output = (Endpoints(coding, self._ranks) for coding in self._codings)
        self._ends = {TensorKind.HIDDEN: hidden, TensorKind.OUTPUT: output}
        self._kept, self._calls, self._number = KeptKeys(), 0, 0

    @property
    def _patches(self) -> Patches:
        text = f"{type(self._model).__name__} runs its blocks before its tokens are cut; use mode one"
        require(self._cuts is not None, InputError, text)
        return self._cuts  # type: ignore[return-value]  # require has checked it

    @property
    def _tokens(self) -> int:
        return self._patches.tokens

    @property
    def _layout(self) -> TokenLayout:
        return TokenLayout(self._tokens, self._plan.text_after)

    def _turned(self) -> list[tuple[int, TokenPatch]]:
        """Return the patches of this turn: one, or all."""
        every = list(enumerate(self._patches))
        return every if self._turn is None else [every[self._turn]]

    @property
    def _ends_call(self) -> bool:
        return self._turn in (None, len(self._patches) - 1)

    def _streams(self, patch: TokenPatch) -> PatchStreams:
        return PatchStreams(patch, self._layout, self._plan.beside, self._turn is not None)

    def _taken(self, streams: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the streams as the rank before has left them, those of all patches put together."""
        found = {name: torch.empty_like(x) for name, x in streams.items()}
        like, before = next(iter(streams.values())), self._ranks[self._place - 1]
        for m, patch in self._turned():
            ours = self._streams(patch)
            shapes = ours.shapes(streams)
            ours.put(found, self._received(before, m, TensorKind.HIDDEN, shapes, like))
        return found

    def _output(self, m: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        rows = (1, math.prod(shape[:-1]), shape[-1])
        [x] = self._received(self._ranks[-1], m, TensorKind.OUTPUT, [rows], like)
        return x.reshape(shape)

    def _send_output(self, m: int, x: Tensor) -> Tensor:
        [x_hat] = self._send(m, TensorKind.OUTPUT, [x.reshape(1, -1, x.shape[-1])])
        return x_hat.reshape(x.shape).to(x.dtype, copy=True)

    def _alike(self, streams: Mapping[str, Tensor], patch: TokenPatch) -> int:
        """Return in how many frames the tokens of a patch are, if in whole ones."""
        each = self._tokens // self._frames if self._frames and self._division.chained else 0
        if self._division.over == SPACE:
            each = each and patch.tokens // self._frames
        batch = next(iter(streams.values())).shape[0]
        return batch * patch.tokens // each if each and patch.tokens % each == 0 else 1

    def _send(self, m: int, kind: TensorKind, parts: Sequence[Tensor], frames: int = 1) -> list[Tensor]:
        """Send tensors [1, rows, width], the first one of so many frames; return what others will decode."""
        start, ends, step = perf_counter(), self._ends[kind], self._step(kind, m)
        packets, decoded = [], []
        for i, x in enumerate(parts):
            keys = [self._key(kind, m + i * _BESIDE, self._rank).pack()]
            packet, x_hat = ends.encode(x, keys, self._call.step, 1 if i else frames)
            packets.append(packet)
            decoded.append(x_hat)
            if ends.remember:
                sent = dict.fromkeys(self._next, SentValues(ends, x_hat, keys))
                self._repairs.keep(step + i * _BESIDE, sent)
        begun = RankMessage(self._key(kind, m, self._rank).pack(), self._inputs, packets).packing()
        self.tally.code_s += perf_counter() - start

        def send() -> None:
            body = begun()
            self._exchange.hand_over(step, dict.fromkeys(self._next, body))
            self.tally.count(kind, len(body) * len(self._next))

        self._lane.do(device_of(packets), send)
        self.tally.exchanges += 1
        return decoded

    def _received(
        self, rank: int, m: int, kind: TensorKind, shapes: Sequence[tuple[int, ...]], like: Tensor
    ) -> list[Tensor]:
        start = perf_counter()
        found = self._awaited(rank, kind, m)
        came = perf_counter()
        self.tally.wait_s += came - start
        due = Posted(self._step(kind, m), f"patch {m}", self._key(kind, m, rank), self._inputs, len(shapes))
        check(rank, found.message, due, self._inquiry)
        self._arrivals.begin(like.device)
        packets = self._arrivals.take(found, like.device)
        every = [
            self._decoded(rank, m + i * _BESIDE, kind, packet, shape, like)
            for i, (packet, shape) in enumerate(zip(packets, shapes, strict=True))
        ]
        self.tally.code_s += perf_counter() - came
        return every

    def _decoded(
        self,
        rank: int,
        slot: int,
        kind: TensorKind,
        packet: Packet | None,
        shape: tuple[int, ...],
        like: Tensor,
    ) -> Tensor:
        ends, keys = self._ends[kind], [self._key(kind, slot, rank).pack()]
        try:
            x = ends.decode(rank, packet, keys, [shape], like, self._questions)
        except DesyncError:
            self.tally.repairs += 1
            whole = self._repairs.ask(rank, self._step(kind, slot), like.device)
            x = ends.replace(rank, whole, keys, [shape], like)
        return x.to(like.dtype)

    def _awaited(self, rank: int, kind: TensorKind, m: int) -> Arrived:
        """Return a message; where none comes, tell those who wait for this rank whom it waited for."""
        before = self._ranks[:-1] if kind == TensorKind.OUTPUT else self._ranks[: self._place - 1]
        late, cause = self._deadline * (1 + _GRACE * len(before)), rank
        try:
            data = self._exchange.receive(rank, self._step(kind, m), late, f"patch {m}")
            self._lane.check()
            found = arrived(data)
            cause = found.message.key - 1 if found.message.stopped and found.message.key else rank
            found.message.check_sender(rank)
            return found
        except LinkError as e:
            with suppress(LinkError):
                self._abandon(e, cause)
            others = [str(r) for r in before if r != self._rank]
            if others and cause == rank and self._exchange.peers[rank].mailbox.error is None:
                raise LinkError(f"{e}; it waits in turn for rank {' and '.join(others)}") from e
            raise

    def _renew(self) -> None:
        self._lane.renew()
        self._questions = Questions()

    def _abandon(self, cause: BaseException | None = None, waited: int | None = None) -> None:
        """Tell those who wait for more of this picture that no more comes, and for whom this rank waited."""
        stop = RankMessage.stop(cause, waited)
        for call in (self._calls, self._calls + 1):
            self._stop((self.clock.generation << _GENERATION) + (call << _CALL), stop)

    def _stop(self, call: int, stop: RankMessage) -> None:
        body = stop.pack()
        for m in (*range(self._number or MOST_SUITED), _SHARED):
            self._exchange.scatter(call + self._slot(self._sends, m), dict.fromkeys(self._next, body))

    @property
    def _sends(self) -> TensorKind:
        return TensorKind.OUTPUT if self._last else TensorKind.HIDDEN

    @property
    def _next(self) -> list[int]:
        """The ranks that get what this rank makes: the next one, or all others the output."""
        return [r for r in self._ranks if r != self._rank] if self._last else [self._ranks[self._place + 1]]

    def _key(self, kind: TensorKind, m: int, source: int) -> Key:
        return Key(self._call.stream, m, kind, source)

    def _step(self, kind: TensorKind, m: int) -> int:
        return (self.clock.generation << _GENERATION) + (self._calls << _CALL) + self._slot(kind, m)

    def _slot(self, kind: TensorKind, m: int) -> int:
        return m if kind == TensorKind.HIDDEN else _OUTPUTS + m

    _turn: int | None = None  # which patch, or all
    _block, _attention, _heard = 0, 0, False  # of the block that runs
    _cuts: Patches | None = None
    _moves = False
    _frames, _beside, _number = 0, 0, 0  # of the tokens; beside each patch; of patches


def _is_video(x: Any) -> bool:
    """Say whether an input is latents of several frames [B, channels, frames, height, width]."""
    return isinstance(x, Tensor) and x.dim() == 5 and x.shape[2] > 1
