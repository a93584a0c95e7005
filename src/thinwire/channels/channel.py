"""Channels: a sender and a receiver, the only owners of state, joined by self-describing packets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import index

import torch
from torch import Tensor

from thinwire import codecs, spec, staging
from thinwire.channels import memory, wire
from thinwire.channels.entries import Entries, unsigned
from thinwire.channels.memory import Delta, Memory, NoMemory, SecondOrderDelta, parse_memory
from thinwire.channels.references import References, Store, check_holds
from thinwire.channels.rows import check_finite, merged, row_sums, some_rows
from thinwire.codecs import Cast, Codec, Raw, is_finite, parse_codec, roundtrip, tuned
from thinwire.codecs.codec import decode_against, decoded, roundtrip_against, writable
from thinwire.spec import Spec
from thinwire.types import (
    MAX_KEY,
    WRONG_VALUES,
    DesyncError,
    InputError,
    MissingExtra,
    Mode,
    Packet,
    Payload,
    PayloadError,
    Section,
    TensorSpec,
    require,
)
from thinwire.verdicts import Questions, deferred

PLAIN = (Delta, SecondOrderDelta)  # memories of which a residual is the difference to what is predicted
SHARED = 0  # the one key of a shared memory
Update = tuple[list[int], list[Payload]]  # keys, and the states to keep for them, coded


@dataclass(frozen=True, repr=False)
class Scheme(Spec):
    """How an engine sends in one role: codec, memory, codec of keyframes, and form of references.

    ``codec`` codes residuals. ``keyframe`` codes the first message of a key under a mirrored memory.
    ``references`` is the form in which both ends keep references. These are float32, and ``Raw`` sends them
    as float32. Only keyframes of bfloat16 tensors are sent as bfloat16, by ``Cast``.

    >>> Scheme(memory=memory.Delta())
    Scheme(memory=Delta())
    """

    codec: Codec = field(default_factory=Raw)
    memory: Memory = field(default_factory=NoMemory)
    keyframe: Codec = field(default_factory=Raw)
    references: Codec = field(default_factory=Raw)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("codec", Codec), ("memory", Memory), ("keyframe", Codec), ("references", Codec)):
            given = getattr(self, name)
            wrong = f"{name}={given!r} is no {kind.__name__.lower()}; see the recipes"
            require(isinstance(given, kind), InputError, wrong)
        check_holds(self.references)


def parse_scheme(text: str) -> Scheme:
    """Return the scheme that a spec describes; ``PayloadError`` otherwise."""
    known = {**codecs.REGISTRY, **memory.REGISTRY, "Scheme": Scheme}
    found: Scheme = spec.parse(text, known, Scheme, "a scheme")
    return found


class ChannelEnd:
    """What both ends of a channel are: references, and how often each has moved."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._versions: dict[int, int] = {}  # updates of each key; a sender's reset does not turn them back

    def prefetch(self, keys: Iterable[int]) -> None:
        """Let a store on disk begin to read the references of these keys. Any thread may call this."""
        self._references.prefetch(sample_ids(keys))

    def states(self) -> Iterator[dict[str, Tensor]]:
        """Yield references and versions as tensors, one reference at a time: all may not fit in memory."""
        yield from self._references.states()
        versions = torch.tensor(list(self._versions.items()), dtype=torch.int64, device="cpu")
        yield {"versions": versions.reshape(-1, 2)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return references and versions as plain tensors."""
        return {name: tensor for part in self.states() for name, tensor in part.items()}

    def load_states(self, parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Load what ``states`` yielded, in these parts or in larger ones."""
        self._take_over(parts)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what ``state_dict`` returned."""
        self.load_states([state])

    def close(self) -> None:
        """Free the references. The sender or receiver cannot be used again."""
        self._references.close()

    def _take_over(self, parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Replace references and versions; return what else there is."""
        self._references.drop()
        rest: dict[str, Tensor] = {}
        for part in parts:
            rest |= {name: tensor.clone() for name, tensor in part.items() if name.isalpha()}
            self._references.take(part)
        self._versions = {int(k): int(v) for k, v in rest.pop("versions").tolist()}
        return rest


class Sender(ChannelEnd):
    """Encode tensors for a receiver, and keep the references that it will have."""

    def __init__(self, scheme: Scheme | None = None, store: Store | None = None) -> None:
        self.scheme = scheme or Scheme()
        super().__init__(References(self.scheme.references, store))
        self._stale: set[int] = set()  # keys whose next message must be a keyframe

    def encode(
        self,
        x: Tensor,
        keys: Sequence[int],
        slots: Sequence[int] | None = None,
        *,
        codec: Codec | None = None,
        keyframe: Codec | None = None,
        mode: Mode | None = None,
    ) -> tuple[Packet, Tensor]:
        """Return the packet for ``x``, and x_hat, the tensor that the receiver will return.

        Args: ``x`` [B, ...]; ``keys``: the B sample ids; ``slots``: the B places within the step (default:
        0..B-1), for memories keyed by step; ``codec``, ``keyframe``: replace the scheme's for this message.
        ``mode=Mode.DIRECT`` sends by ``codec`` and touches no reference, for evaluation. ``Mode.KEYFRAME``
        sends by ``keyframe``, or else ``codec``, and needs no reference at the receiver: use it after a
        ``DesyncError``. In both modes the default is ``Raw()``.
        The packet, and x_hat of a direct message, may share memory with ``x``: pack before ``x`` changes.
        Errors: ``InputError`` if keys are not B >= 1 distinct whole numbers below 2**63, if the tensor or
        mode cannot be sent, if samples have another shape than their references, or if a reference would
        keep a NaN or an infinity. Nothing waits for a device that ``x`` is on: what only its values tell
        is raised when the packet is packed, and the next message of its keys then needs no reference.
        """
        x = x.detach()
        check_sendable(x)
        keys = row_ids(keys, len(x))
        if mode not in (None, Mode.DIRECT, Mode.KEYFRAME):
            raise InputError(f"mode={mode!r} cannot be asked for; take Mode.DIRECT, Mode.KEYFRAME or None")
        direct = mode == Mode.DIRECT or isinstance(self.scheme.memory, NoMemory)
        held = [] if direct else state_keys(self.scheme.memory, keys, slots)
        with deferred() as found:
            if direct:
                packet, x_hat = self._direct(
                    x, keys, codec or (Raw() if mode == Mode.DIRECT else self.scheme.codec)
                )
            else:
                packet, x_hat = self._remembered(x, keys, held, codec, keyframe, mode)
        if not found:
            return packet, x_hat
        found.undo = partial(self.reset, held)
        return replace(packet, verdicts=found), x_hat

    def _direct(self, x: Tensor, keys: list[int], codec: Codec) -> tuple[Packet, Tensor]:
        payload, x_hat = roundtrip(codec, x)
        zeros = [0] * len(keys)
        entries, sections = Entries(keys, zeros, zeros, zeros), (Section(Mode.DIRECT, repr(codec), payload),)
        return Packet(TensorSpec.of(x), "NoMemory()", "Raw()", entries, sections), x_hat

    def _remembered(
        self,
        x: Tensor,
        keys: list[int],
        held: Sequence[int],
        codec: Codec | None,
        keyframe: Codec | None,
        mode: Mode | None,
    ) -> tuple[Packet, Tensor]:
        if mode == Mode.KEYFRAME:
            self.reset(held)
            codec, keyframe = None, keyframe or codec or Raw()
        codec, keyframe = codec or self.scheme.codec, keyframe or self.scheme.keyframe
        if x.dtype == torch.bfloat16 and keyframe == Raw():
            keyframe = Cast("bfloat16")  # as exact; a float16's infinities would not survive the like
        return self._coded(x, keys, held, codec, keyframe)

    def _coded(
        self, x: Tensor, keys: list[int], held: Sequence[int], codec: Codec, keyframe: Codec
    ) -> tuple[Packet, Tensor]:
        mem = self.scheme.memory
        new = [k not in self._versions or k in self._stale for k in held]
        self._check_shapes(x, keys, held, new)
        sections: list[Section] = []
        outputs: list[tuple[list[int], Tensor]] = []
        states: list[tuple[list[int], Tensor | None]] = []  # kept once all rows are coded, or none of them
        for first in (True, False):
            rows = [i for i, is_new in enumerate(new) if is_new is first]
            if not rows:
                continue
            s = None if first else self._load([held[i] for i in rows], x.device)
            mode = (Mode.KEYFRAME if first else Mode.DELTA) if mem.mirrored else Mode.DIRECT
            chosen = keyframe if first and mem.mirrored else codec
            payload, x_hat, state = _sent(mem, chosen, some_rows(x, rows), s)
            if state is not None and not is_finite(chosen):  # type: ignore[arg-type]  # it is frozen
                check_finite(x_hat if mem.shared else state)  # a mean hides what it is of
            states.append(([held[i] for i in rows], state))
            outputs.append((rows, x_hat))
            sections.append(Section(mode, repr(chosen), payload))
        for kept in states:
            self._save(*kept)
        for k in dict.fromkeys(held):
            self._versions[k] = self._versions.get(k, 0) + 1
        self._stale.difference_update(held)
        x_hat = writable(merged(outputs), (x, *(p for s in sections for p in s.payload.parts)))
        zeros = [0] * len(x)
        placed = zeros if len(outputs) == 1 else [int(not is_new) for is_new in new]
        versions, sums = (
            ([self._versions[k] for k in held], row_sums(x_hat)) if mem.mirrored else (zeros, zeros)
        )
        entries = Entries(keys, versions, placed, sums)
        spec, held_as = TensorSpec(tuple(x.shape)), repr(self.scheme.references)
        return Packet(spec, repr(mem), held_as, entries, tuple(sections)), x_hat

    def _check_shapes(self, x: Tensor, keys: Sequence[int], held: Sequence[int], new: Sequence[bool]) -> None:
        fits = self.scheme.memory.state_shape(tuple(x.shape))
        for key, k, is_new in zip(keys, held, new, strict=True):
            if not is_new and self._references.shape(k) not in (fits, None):
                raise InputError(
                    f"sample {key} has the shape {tuple(x.shape[1:])}, and its reference another; "
                    "pad samples to one shape, or reset its key"
                )

    def _load(self, held: Sequence[int], device: torch.device) -> Tensor:
        shared = self.scheme.memory.shared
        states = self._references.load(held[:1] if shared else held, device)
        return states[0] if shared else states

    def _save(self, held: Sequence[int], state: Tensor | None) -> None:
        if state is not None:
            shared = self.scheme.memory.shared
            self._references.save(held[:1] if shared else held, state[None] if shared else state)

    def reset(self, keys: Iterable[int] | None = None) -> None:
        """Forget some keys, or all. The next message of each is a keyframe."""
        keys = list(self._versions) if keys is None or self.scheme.memory.shared else sample_ids(keys)
        self._references.drop(keys)
        self._stale.update(keys)

    def held(self) -> dict[int, Payload]:
        """Return the references as they are held, not to be written to, for ``take_back``."""
        return self._references.held()

    def take_back(self, held: Mapping[int, Payload]) -> None:
        """Hold what ``held`` returned before a message that nobody uses, and nothing else."""
        self.reset()
        self._references.put(list(held), list(held.values()))
        self._stale.difference_update(held)

    def load_states(self, parts: Iterable[Mapping[str, Tensor]]) -> None:
        self._take_over(parts)
        self._stale = set(self._versions) - set(self._references.store.keys())


class Receiver(ChannelEnd):
    """Decode the packets of one sender, in order. It needs no configuration: packets describe themselves."""

    def __init__(self, store: Store | None = None) -> None:
        super().__init__(References(Raw(), store))

    def decode(
        self,
        packet: Packet,
        slots: Sequence[int] | None = None,
        *,
        expect: TensorSpec | None = None,
        device: torch.device | str | None = None,
        later: Questions | None = None,
    ) -> Tensor:
        """Return the tensor in a packet, and update the references.

        Args: ``slots``: as given to the sender; ``expect``: the shape of the result (its dtype is not
        compared), which bounds what a hostile packet can allocate; ``device``: where to decode (default:
        where the packet is; one from the wire is on the CPU); ``later``: who asks what only a device can
        tell, so that nothing waits for it here. Before ``later.settle()`` the tensor is not known to be
        right, and after an error of that the keys need a keyframe.
        Errors: ``PayloadError`` for a packet that does not fit; ``DesyncError`` with the keys for a gap, a
        repetition or a failed check. After an error nothing has changed.
        """
        if expect is not None and packet.spec.shape != expect.shape:
            raise PayloadError(f"a packet for shape {packet.spec.shape} where {expect.shape} is expected")
        packet = settled(packet)
        mem, entries = parse_memory(packet.memory), Entries.of(packet.entries)
        held = state_keys(mem, entries.keys, slots)
        if mem.mirrored:
            self._check_versions(packet, entries, held)
        try:  # whatever a hostile packet trips over in here is a PayloadError
            parts = packet if device is None else moved(packet, torch.device(device))
            x_hat, updates = self._decode(parts, mem, entries, held, later)
        except MissingExtra:
            raise
        except WRONG_VALUES as e:
            raise PayloadError(f"a packet does not decode: {e}") from e
        for keys, states in updates:
            self._references.put(keys, states)
        if mem.mirrored:
            self._versions.update(zip(held, entries.versions, strict=True))
        return x_hat

    def _decode(
        self, packet: Packet, mem: Memory, entries: Entries, held: Sequence[int], later: Questions | None
    ) -> tuple[Tensor, list[Update]]:
        """Return the tensor, and by which references it is to be remembered; changes nothing.

        What is on a device is asked about once, after all is queued.
        """
        if mem.mirrored:
            self._hold_as(packet)
        with deferred() as found:
            outputs = [self._section(packet, i, mem, entries, held) for i in range(len(packet.sections))]
            x_hat = merged([(rows, x) for rows, x, _ in outputs])
        questions = Questions() if later is None else later
        if not mem.mirrored:
            questions.ask(found.tensors(), found.settle)
            if later is None:
                questions.settle()
            return x_hat, []
        sums, here = row_sums(x_hat), x_hat.device.type == "cpu"
        if here:
            self._check_sums(entries, held, sums)
        with deferred() as kept:
            updates = [self._update(mem, [held[i] for i in rows], state) for rows, _, state in outputs]
        if not here:
            questions.ask(found.tensors(), found.settle)
            questions.ask([sums], lambda read: self._check_sums(entries, held, read[0]))
            questions.ask(kept.tensors(), kept.settle)
            if later is None:
                questions.settle()
        return x_hat, updates

    def _update(self, mem: Memory, keys: list[int], state: Tensor | None) -> Update:
        if state is None:
            return [], []
        keys, state = (keys[:1], state[None]) if mem.shared else (keys, state)
        return keys, self._references.encode(state)

    def _section(
        self, packet: Packet, index: int, mem: Memory, entries: Entries, held: Sequence[int]
    ) -> tuple[list[int], Tensor, Tensor | None]:
        section, rows = packet.sections[index], entries.rows(index)
        if mem.mirrored is (section.mode is Mode.DIRECT):
            raise PayloadError(f"a section in mode {section.mode.name} under memory {packet.memory}")
        s = None
        if section.mode is Mode.DELTA:
            s = self._state(mem, [held[i] for i in rows], section.payload)
        x_hat = _received(mem, section, s)
        return rows, x_hat, mem.advance(x_hat, s) if mem.mirrored else None

    def _state(self, mem: Memory, keys: list[int], payload: Payload) -> Tensor:
        """Return the state of ``keys``; ``PayloadError`` where it or the values would be stretched to fit."""
        keys = keys[:1] if mem.shared else keys
        fits = mem.state_shape(payload.spec.shape)
        if any(self._references.shape(k) not in (fits, None) for k in keys):
            raise PayloadError(f"a packet of {mem} does not fit the state held for its keys")
        s = self._references.load(keys, payload.parts[0].device if payload.parts else "cpu")
        return s[0] if mem.shared else s

    def _check_versions(self, packet: Packet, entries: Entries, held: Sequence[int]) -> None:
        wrong = []
        modes = [section.mode for section in packet.sections]
        for i, (k, version) in enumerate(zip(held, entries.versions, strict=True)):
            mode, have = modes[entries.sections[i]], self._versions.get(k, 0)
            if (mode is Mode.DELTA and (not have or version != have + 1)) or (
                mode is Mode.KEYFRAME and version <= have
            ):
                wrong.append((entries.keys[i], have + 1, version, k))
        if wrong:
            key, want, got, _ = wrong[0]
            raise DesyncError(
                f"sample {key}: expected version {want}, got {got}; ask the sender for a keyframe",
                tuple(w[3] for w in wrong),
            )

    def _hold_as(self, packet: Packet) -> None:
        if packet.spec.dtype != torch.float32:
            raise PayloadError(f"values to remember are float32, not {packet.spec.dtype}")
        codec = parse_codec(packet.references)
        if codec != self._references.codec:
            wrong = f"a packet holds references as {codec!r}, the ones before as {self._references.codec!r}"
            require(not self._versions, PayloadError, wrong)
            try:
                check_holds(codec)
            except InputError as e:
                raise PayloadError(str(e)) from e
            self._references.codec = codec

    def _check_sums(self, entries: Entries, held: Sequence[int], sums: Tensor) -> None:
        found = unsigned(sums)
        if found == entries.checks:
            return
        wrong = [i for i, (a, b) in enumerate(zip(entries.checks, found, strict=True)) if a != b]
        key = entries.keys[wrong[0]]
        message = f"sample {key}: the reconstruction differs from the sender's; ask for a keyframe"
        raise DesyncError(message, tuple(held[i] for i in wrong))

    def reset(self, keys: Iterable[int] | None = None) -> None:
        """Forget some keys, or all. Only a keyframe of each is accepted next."""
        keys = list(self._versions) if keys is None else sample_ids(keys)
        self._references.drop(keys)
        for k in keys:
            self._versions.pop(k, None)

    def states(self) -> Iterator[dict[str, Tensor]]:
        yield from super().states()
        yield {"codec": torch.frombuffer(bytearray(repr(self._references.codec).encode()), dtype=torch.uint8)}

    def load_states(self, parts: Iterable[Mapping[str, Tensor]]) -> None:
        codec = self._take_over(parts)["codec"]
        self._references.codec = parse_codec(bytes(codec.tolist()).decode())


def settled(packet: Packet) -> Packet:
    """Return a packet that was not packed, with what was to be asked of its device asked.

    Errors: as of ``wire.pack``.
    """
    if packet.verdicts is None:
        return packet
    packet.verdicts.settle()
    return replace(packet, verdicts=None)


def moved(packet: Packet, device: torch.device) -> Packet:
    """Return a packet with its parts on ``device``: in one copy."""
    parts = [p for s in packet.sections for p in s.payload.parts]
    if all(p.device.type == device.type for p in parts):
        return packet
    there = iter(staging.brought(parts, device))
    return with_parts(packet, [tuple([next(there) for _ in s.payload.parts]) for s in packet.sections])


def with_parts(packet: Packet, parts: Sequence[tuple[Tensor, ...]]) -> Packet:
    """Return a packet with other parts, a tuple for each section."""
    payloads = [Payload(s.payload.spec, own) for s, own in zip(packet.sections, parts, strict=True)]
    sections = zip(packet.sections, payloads, strict=True)
    return replace(packet, sections=tuple(replace(s, payload=payload) for s, payload in sections))


def _sent(mem: Memory, codec: Codec, x: Tensor, s: Tensor | None) -> tuple[Payload, Tensor, Tensor | None]:
    """Return the payload of rows, what the receiver will return, and the next state."""
    if s is not None and type(mem) in PLAIN:  # which is done in one go, and from any dtype
        payload, x_hat = roundtrip_against(codec, x, mem.predicted(s))  # type: ignore[attr-defined]
        return payload, x_hat, mem.advance(x_hat, s)
    values = x.float()
    y = mem.residual(values, s)
    payload, y_hat = roundtrip(tuned(codec, values), y)
    x_hat = mem.restore(y_hat, s)
    return payload, x_hat, mem.advance(x_hat, s, y)


def _received(mem: Memory, section: Section, s: Tensor | None) -> Tensor:
    codec, payload = parse_codec(section.codec), section.payload
    if s is not None and type(mem) in PLAIN:
        return decode_against(codec, payload, mem.predicted(s))  # type: ignore[attr-defined]
    return mem.restore(decoded(codec, payload), s)


def check_sendable(x: Tensor) -> None:
    """Raise ``InputError`` unless a packet can describe ``x``."""
    if x.dtype not in wire.CODES:
        raise InputError(f"a tensor of {x.dtype} cannot be sent; cast it, such as to float32")
    if not 0 < x.dim() <= wire.MAX_DIMENSIONS:
        raise InputError(
            f"a tensor of {x.dim()} dimensions cannot be sent; give 1 to {wire.MAX_DIMENSIONS}, samples first"
        )


def sample_ids(keys: Iterable[int]) -> list[int]:
    """Return the ids of samples as plain numbers; ``InputError`` unless they are whole and below 2**63."""
    try:
        found = [index(k) for k in keys]
    except TypeError as e:
        raise InputError(f"sample ids are whole numbers, got {repr(keys)[:80]}") from e
    if found and not 0 <= min(found) <= max(found) < MAX_KEY:
        raise InputError(f"sample ids are numbers from 0 to 2**63 - 1, got {min(found)} to {max(found)}")
    return found


def row_ids(keys: Iterable[int], n: int) -> list[int]:
    """Return the ids of ``n`` rows, one at least; ``InputError`` unless they are as many distinct ones."""
    found = sample_ids(keys)
    if not len(set(found)) == len(found) == n > 0:
        raise InputError(f"{n} rows need as many distinct sample ids, got {found[:8]}")
    return found


def state_keys(mem: Memory, keys: Sequence[int], slots: Sequence[int] | None) -> list[int]:
    """Return under which key the state of each sample is kept."""
    if mem.shared:
        return [SHARED] * len(keys)
    if mem.key == "sample":
        return list(keys)
    slots = range(len(keys)) if slots is None else slots
    require(len(slots) == len(keys), InputError, f"{len(keys)} samples need as many slots, got {len(slots)}")
    return sample_ids(slots)
