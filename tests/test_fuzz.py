"""Hostile bytes: a refusal or a tensor of the expected shape, never anything else, at no great cost.

``packets.receive`` lets every other exception through, so a case fails by raising. Check sums are made right
after each mutation, because a wrong one hides all that lies behind it.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from packets import INT8, MEMORIES, SHAPE, every_kind, receive, resigned, sequence, signed

from thinwire import codecs
from thinwire.channels import memory, wire
from thinwire.channels.channel import Receiver
from thinwire.channels.memory import Memory
from thinwire.codecs import Cast, Raw, Uniform
from thinwire.types import TensorSpec

CASES = {"noise": 3_000, "cuts": 6_000, "bytes": 7_000, "words": 2_000, "specs": 2_500, "shapes": 1_500}
CORPUS = [wire.pack(p) for p in every_kind()]
EXTREMES = (0, 1, 2, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FC00000, 0xFF800000)


class Victim:
    """A receiver that already holds references, and a packet that it would accept next."""

    def __init__(self, mem: Memory) -> None:
        first, self.next = (wire.pack(p) for p, _ in sequence(mem, Uniform(bits=3)))
        self._receiver = Receiver()
        receive(first, self._receiver)
        self._state = self._receiver.state_dict()

    def take(self, data: bytes) -> str:
        """Give it bytes; check that a refusal changes none of its references."""
        result = receive(data, self._receiver)
        if result == "tensor":
            self._receiver = Receiver()
            self._receiver.load_state_dict(self._state)
        elif not self.is_unchanged():
            raise AssertionError("a refused packet changed the references")
        return result

    def is_unchanged(self) -> bool:
        now = self._receiver.state_dict()
        return now.keys() == self._state.keys() and all(
            torch.equal(now[k], v) for k, v in self._state.items()
        )


VICTIMS = [Victim(m) for m in MEMORIES if m.mirrored]


def cases(name: str) -> Callable[[Callable[[Random], None]], Callable[[], None]]:
    """Run a test on as many random numbers as ``CASES`` says, the same ones each time."""

    def decorate(test: Callable[[Random], None]) -> Callable[[], None]:
        def run() -> None:
            for seed in range(CASES[name]):
                try:
                    test(Random(seed))
                except BaseException as e:
                    e.add_note(f"with Random({seed})")
                    raise

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


def test_there_are_twenty_thousand_cases() -> None:
    assert sum(CASES.values()) >= 20_000
    assert sum(map(len, CORPUS)) >= CASES["cuts"]


def test_what_is_not_damaged_comes_through() -> None:
    """The cases below prove nothing if the packets they start from were refused anyway."""
    assert {receive(v.next) for v in VICTIMS} == {"DesyncError"}
    assert {v.take(v.next) for v in VICTIMS} == {"tensor"}
    assert all(resigned(data) == data for data in CORPUS)
    assert sum(receive(data, expect=None) == "tensor" for data in CORPUS) > len(CORPUS) / 2


@cases("noise")
def test_noise(random: Random) -> None:
    data = random.randbytes(random.randrange(300))
    assert receive((wire.MAGIC + b"\1\0")[: random.randrange(5)] + data) == "PayloadError"
    assert receive(signed(data)) == "PayloadError"


def test_cuts_at_every_offset() -> None:
    tried = 0
    for data in CORPUS:
        for at in range(len(data)):
            cut = data[:at] if at < 8 else resigned(data[:at])
            assert receive(cut, expect=None) == "PayloadError"
            tried += 1
        assert receive(resigned(data + b"\0"), expect=None) == "PayloadError"
    assert tried >= CASES["cuts"]


def pick(random: Random) -> tuple[Victim, bytearray]:
    victim = random.choice(VICTIMS)
    return victim, bytearray(random.choice([victim.next, victim.next, random.choice(CORPUS)]))


@cases("bytes")
def test_one_byte_is_another(random: Random) -> None:
    victim, data = pick(random)
    # Half of the hits are on the heads: the parts, which are longer, tolerate most values.
    end = random.choice([len(data), min(len(data), 160)])
    data[random.randrange(8, end)] ^= random.randrange(1, 256)
    victim.take(resigned(bytes(data)))


@cases("words")
def test_a_word_is_an_extreme_one(random: Random) -> None:
    victim, data = pick(random)
    form, mask = random.choice([("<H", 0xFFFF), ("<I", 0xFFFFFFFF)])
    struct.pack_into(form, data, random.randrange(8, len(data) - 4), random.choice(EXTREMES) & mask)
    victim.take(resigned(bytes(data)))


NUMBERS = ["0", "1", "-1", "3", "8", "1.5", "-0.5", "1e999", "1e-300", "1000000000", "1073741824", "True"]
WORDS = [*NUMBERS, "''", "'tensor'", "'channel'", "'token'", "'stochastic'", "'e5m3'", "'float16'", "'step'"]
NAMES = {n: list(c.__dataclass_fields__) for n, c in {**codecs.REGISTRY, **memory.REGISTRY}.items()}
SOUND = [repr(c) for c in (INT8, Uniform(bits=3), Raw(), Cast())]


def call(random: Random, registry: Mapping[str, type], depth: int = 0) -> str:
    """Return a call of a registered name with any arguments, nested."""

    def value() -> str:
        return (
            call(random, registry, depth + 1) if random.random() < 0.5 - depth / 8 else random.choice(WORDS)
        )

    name = random.choice(list(registry))
    positional = [value() for _ in range(random.choice([0, 0, 1, 2]))]
    rest = NAMES[name][len(positional) :] if random.random() < 0.9 else [*NAMES[name], "x"]
    keywords = [f"{k}={value()}" for k in random.sample(rest, min(len(rest), random.randrange(3)))]
    return f"{name}({', '.join(positional + keywords)})"


def codec_spec(random: Random) -> str:
    return random.choice(SOUND) if random.random() < 0.2 else call(random, codecs.REGISTRY)


def memory_spec(random: Random) -> str:
    return repr(random.choice(MEMORIES)) if random.random() < 0.7 else call(random, memory.REGISTRY)


def parts(random: Random) -> list[tuple[int, bytes]]:
    return [
        (random.randrange(len(wire.DTYPES)), random.randbytes(random.randrange(48)))
        for _ in range(random.randrange(4))
    ]


def write(
    mem: str,
    references: str,
    entries: Sequence[tuple[int, int, int, int]],
    sections: Sequence[tuple[int, str, Sequence[tuple[int, bytes]]]],
    shape: tuple[int, ...] = SHAPE,
    dtype: int = 0,
) -> bytes:
    """Write a packet whose frame is sound, whatever is in it."""
    out = struct.pack("<BBBBI", dtype, len(shape), len(sections), 0, len(entries))
    out += struct.pack(f"<{len(shape)}I", *shape)
    out += b"".join(struct.pack("<H", len(t)) + t.encode() for t in (mem, references))
    out += b"".join(struct.pack("<QIIB", *e) for e in entries)
    rest = b""
    for mode, codec, parts in sections:
        out += struct.pack("<BBH", mode, len(parts), len(codec)) + codec.encode()
        for kind, data in parts:
            size = wire.DTYPES[kind].itemsize
            out += struct.pack("<BI", kind, len(data) // size)
            rest += data[: len(data) // size * size]
    return signed(out + rest)


def zeros_for(codec: str, rows: int) -> list[tuple[int, bytes]]:
    """Return parts as ``codec`` would write them for zeros, if it is one: the spec is then what is tested."""
    try:
        payload = codecs.parse_codec(codec).encode(torch.zeros(rows, *SHAPE[1:]))
    except Exception:
        return []
    return [(wire.CODES[p.dtype], bytes(p.view(torch.uint8).tolist())) for p in payload.parts]


@cases("specs")
def test_sound_frames_with_any_content(random: Random) -> None:
    codec, version = codec_spec(random), random.randrange(4)
    inside = zeros_for(codec, 3) if random.random() < 0.6 else parts(random)
    entries = [(k, version, 0, 0) for k in (2, 4, 1)]
    sections = [(random.randrange(3), codec, inside)]
    data = write(memory_spec(random), codec_spec(random), entries, sections)
    random.choice(VICTIMS).take(data)
    receive(data)


@cases("shapes")
def test_any_shape_and_any_layout_of_sections(random: Random) -> None:
    n = random.randrange(1, 5)
    shape = (n, *random.choices([0, 1, 2, 3, 7, 1 << 16, (1 << 32) - 1], k=random.randrange(8)))
    places = random.choices(range(4), k=n)
    entries = [(9 - i, 1 + i % 2, 0, places[i]) for i in range(n)]
    codec = codec_spec(random)
    sections = [(random.randrange(3), codec, zeros_for(codec, 1))] * len(set(places))
    data = write(memory_spec(random), "Raw()", entries, sections, shape, random.randrange(len(wire.DTYPES)))
    receive(data, expect=None)
    receive(data, expect=TensorSpec(shape))


BOMBS = """
import resource, sys, time
sys.path[:0] = sys.argv[1:]
from test_fuzz import bombs, warm_up
from packets import receive
warm_up()
found = bombs()
with open("/proc/self/statm") as f:
    size = int(f.read().split()[0]) * resource.getpagesize()
room = 256 << 20
resource.setrlimit(resource.RLIMIT_AS, (size + room, size + room))
start = time.perf_counter()
from thinwire.channels import wire
from thinwire.channels.channel import Receiver
from thinwire.types import DesyncError, PayloadError
for name, data, limit in found:
    try:
        Receiver().decode(wire.unpack(data, max_nbytes=limit))
    except (PayloadError, DesyncError) as e:
        said = str(e) + str(e.__cause__)
        if "alloc" in said.lower() or isinstance(e.__cause__, MemoryError):
            sys.exit(f"{name}: {said}")
    else:
        sys.exit(f"{name}: decoded")
print(f"{time.perf_counter() - start:.1f}")
"""


def warm_up() -> None:
    """Load what is loaded at first use, so that only packets count against the limit on memory."""
    for data in CORPUS:
        receive(data, expect=None)


def bombs() -> list[tuple[str, bytes, int]]:
    """Return packets of a few bytes that ask for a lot, and how many bytes their tensor may take."""
    import zstandard

    frame = bytes([0x80]) + zstandard.ZstdCompressor().compress(bytes(1 << 26))
    claim = bytes([0x80]) + b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", (1 << 62)) + bytes(32)
    deep = "Entropy(" * 7 + "Raw()" + ")" * 7
    big, flat, small = (1, 1 << 16, 1 << 14), (1, 1 << 24), 1 << 24
    first = [(4, bytes(4) + b"\1"), (0, bytes(4))]  # an index of 0, and its value
    direct: list[tuple[str, list[tuple[int, bytes]], tuple[int, ...], int]] = [
        ("TopK(ratio=1e-9)", first, big, small),
        ("HardThreshold(threshold=1)", [(4, b"\1\0\0\0" + first[0][1]), first[1]], big, small),
        ("HardThreshold(threshold=1)", [(4, b"\0\0\0\x10" + bytes(8)), (0, b"")], big, small),
        ("ChunkTopK(ratio=1e-9)", [(4, bytes(8)), (0, bytes(4))], big, small),
        ("InTurn(every=1000000000)", [(0, bytes(8))], big, small),
        ("Entropy(Raw())", [(4, frame)], (1, 1000), small),
        ("Entropy(Raw())", [(4, claim)], (1, 1000), small),
        ("Entropy(Uniform())", [(4, claim), (4, claim)], (1, 1000), small),
        (deep, [(4, frame)], (1, 4, 1000), small),
        ("RandomK(ratio=1)", [(8, bytes(8))], big, small),
        ("Sink(Raw(), positions=1000000000)", [(4, b"")], (1, 8, 1 << 20), 1 << 27),
        ("Hadamard(Raw(), block=1073741824)", [], (1, 8), small),
        ("TileAdaptive()", [(4, b"")] * 7, flat, 1 << 27),
        *[("Raw()", [], (1, *[d] * 7), 1 << 28) for d in (1 << 8, 1 << 20, (1 << 32) - 1)],
    ]
    one = [(5, 1, 0, 0)]
    found = [(c, write("NoMemory()", "Raw()", one, [(0, c, parts)], s), n) for c, parts, s, n in direct]
    few, wide = [(i, 1, 0, 0) for i in range(3)], (3, 0, (1 << 32) - 1)
    found.append(("mean", write("RunningMean()", "Raw()", few, [(1, "Raw()", [(0, b"")])], wide), 1 << 28))
    deltas = [("ChannelMean(Raw())", [(1, b"")]), ("Uniform(group=1000000000000)", [(4, b""), (2, b"")])]
    return found + [(c, write("Delta()", "Raw()", one, [(1, c, p)], flat), 1 << 27) for c, p in deltas]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the size of a process from /proc")
def test_bombs_are_refused_before_they_cost_memory() -> None:
    here, src = Path(__file__).parent, Path(wire.__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", BOMBS, str(here), str(here / "shared"), str(src)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"OMP_NUM_THREADS": "1", "PATH": ""},
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 30
