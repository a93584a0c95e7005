"""What replicas tell each other before the first step, so that none trains another model, or otherwise."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass

from thinwire.checksum.bit_sums import sums_of
from thinwire.collectives.exchange import words_of
from thinwire.types import WRONG_VALUES, InputError, PayloadError, require
from thinwire.uses.training.replicas.loop.stepped import SteppedModel
from thinwire.uses.training.replicas.networks import Network

MOST = 1 << 26  # bytes of what a replica says of itself


@dataclass(frozen=True)
class Start:
    """What a replica begins with.

    ``parameters``: shape and dtype of each by name, as text; ``sums``: ``bit_sum`` of each one's values;
    ``ties``: other names of parameters, and the one that stands for them.
    """

    recipe: str
    ranks: int
    parameters: dict[str, str]
    sums: dict[str, int]
    ties: dict[str, str]

    @staticmethod
    def of(stepped: SteppedModel, recipe: str, ranks: int) -> Start:
        """Return how this replica begins; waits for the parameters' device once."""
        local = stepped.local
        described = {
            name: f"{list(p.shape)} {str(p.dtype).removeprefix('torch.')}" for name, p in local.items()
        }
        sums = dict(zip(local, sums_of(list(local.values())), strict=True))
        return Start(recipe, ranks, described, sums, stepped.ties)

    def difference(self, other: Start, who: str) -> str | None:
        """Return a sentence on the first thing in which ``other``, the start of ``who``, is another one."""
        if other.ranks != self.ranks:
            return f"{who} trains with {other.ranks} replicas, and this one with {self.ranks}; connect all"
        if other.recipe != self.recipe:
            return f"{who} has the recipe {other.recipe}, and this one {self.recipe}; give all the same"
        for what, own, theirs in (
            ("is", self.parameters, other.parameters),
            ("is another name of", self.ties, other.ties),
        ):
            for name in sorted({**own, **theirs}):
                here, there = own.get(name, "nothing"), theirs.get(name, "nothing")
                if here != there:
                    text = f"{name} {what} {there} at {who}, and {here} here"
                    return f"{text}; give all replicas one model and one optimiser"
        unlike = sorted(name for name in self.sums if self.sums[name] != other.sums.get(name))
        if unlike:
            more = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
            return f"{unlike[0]}{more} has other values at {who}; start all replicas from the same weights"
        return None


def agree(network: Network, own: Start) -> None:
    """Raise ``InputError`` on every replica that begins otherwise than another one."""
    exchange = network.messages("start")
    exchange.post(0, zlib.compress(json.dumps(asdict(own)).encode()))
    try:
        for rank, data in exchange.collect(0, network.deadline).items():
            wrong = own.difference(_start(data, rank), f"rank {rank}")
            require(wrong is None, InputError, wrong or "")
    finally:
        exchange.close()


def _start(data: bytes, rank: int) -> Start:
    try:
        unpacked = zlib.decompressobj().decompress(data, MOST)
        return Start(**words_of(unpacked, f"rank {rank}"))  # type: ignore[arg-type]
    except (*WRONG_VALUES, zlib.error) as e:
        raise PayloadError(f"what rank {rank} says of itself cannot be read") from e
