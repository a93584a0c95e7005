"""Publish a sharded model: each process publishes its own shards, and nothing is gathered."""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from thinwire.state.boxes import Box, parse
from thinwire.state.patches.patch import Version
from thinwire.types import Closing, InputError, require
from thinwire.uses.following.published_tensors import Names, Source
from thinwire.uses.following.push.publisher import TIMEOUT, Publisher
from thinwire.uses.following.shards.local_shards import mesh_of, shards_of
from thinwire.uses.following.shards.shard_mark import KEY, Mark, own

Has = dict[str, list[int]]  # each shard's name, and the shape of what is there


class ShardPublisher(Closing):
    """Publish this process's shards of a model under ``fully_shard`` (FSDP2) or any DTensors.

    Make one on every process, at the same place of the program: they tell each other once which shards they
    have. What several have, as replicas do, the first of them publishes, and so it does what is not sharded.
    Then each calls ``publish`` after the same steps, and none waits for another. Process ``rank`` listens at
    ``port`` + rank (0: at a free port), and a ``ShardFollower`` follows all of them.

    ``source``: a module, or a mapping of names to tensors. The other options are those of ``Publisher``, with
    the names of whole tensors; ``state`` is a file for each process.

    Errors: as ``Publisher``; ``InputError`` for what has no box in a whole tensor: FSDP1, ZeRO-3, partial
    sums. It names the tensor of which a part is nowhere.

    Use: ``ShardPublisher(model, "0.0.0.0", 7200, token, dtype="bf16")``, then ``publish(step)``.
    """

    def __init__(
        self,
        source: Source,
        host: str = "127.0.0.1",
        port: int = 0,
        token: bytes | None = None,
        name: str = "state",
        *,
        names: Names | None = None,
        **options: Any,
    ) -> None:
        self.source, self._names = source, names
        here = shards_of(source, names)
        rank, run, everywhere = _told(source, here)
        publishes = _shared_out(everywhere)
        _check_whole(everywhere)
        self._own = [shard for shard in here if publishes[shard] == rank]
        ranks = sorted(set(publishes.values()))
        self._run, self._count, self.parts = run, 0, len(ranks)
        self._part = ranks.index(rank) + 1 if rank in ranks else 0
        self.publisher: Publisher | None = None  # None: others publish all that is here
        if self._part:
            for key in ("dtype", "bounds"):
                options[key] = _of_shards(key, options.get(key), self._own, everywhere)
            at = port + rank if port else 0
            self.publisher = Publisher(self._tensors(here), host, at, token, name, **options)

    @property
    def port(self) -> int:
        """Where this process listens; 0: it publishes nothing."""
        return self.publisher.port if self.publisher is not None else 0

    @property
    def newest(self) -> Version:
        """This process's part of the newest version; its number is 0 before the first."""
        return self.publisher.newest if self.publisher is not None else Version()

    def publish(
        self, step: int | None = None, tensors: Source | None = None, **meta: str | int | float
    ) -> Version:
        """Make the shards as they are now a part of the newest version, and return it at once.

        Call it on every process, as often: the n-th calls make one version, whenever each comes. Where a
        process publishes nothing, the version has the number 0. Errors: as ``Publisher.publish``.
        """
        own(meta)
        self._count += 1  # also where what follows fails: the others have counted too
        if self.publisher is None:
            return Version()
        mark = Mark(self._run, self._count, self._part, self.parts)
        here = self._tensors(shards_of(self.source if tensors is None else tensors, self._names))
        return self.publisher.publish(step, here, **meta | {KEY: str(mark)})

    def flush(self, timeout: float = TIMEOUT) -> None:
        """Wait until all followers of this process have its newest version; ``LinkError`` names one."""
        if self.publisher is not None:
            self.publisher.flush(timeout)

    def close(self, timeout: float = 0.0) -> None:
        """Stop, as ``Publisher.close``. Safe to call twice."""
        if self.publisher is not None:
            self.publisher.close(timeout)

    def _tensors(self, here: Mapping[str, Tensor]) -> dict[str, Tensor]:
        lost = next((shard for shard in self._own if shard not in here), None)
        told = f"{lost} is no shard of this process any more; make the publishers anew on all"
        require(lost is None, InputError, told)
        return {shard: here[shard] for shard in self._own}

    def _leave(self, error: BaseException | None) -> None:
        self.close(TIMEOUT if error is None else 0.0)


def _told(source: Source, here: Mapping[str, Tensor]) -> tuple[int, str, list[Has]]:
    """Return this process's rank, the run's name, and what each process has: names and shapes alone."""
    has: Has = {shard: list(x.shape) for shard, x in here.items()}
    mesh, run = mesh_of(source), secrets.token_hex(8)
    if mesh is None:
        return 0, run, [has]
    data = zlib.compress(json.dumps([run, has]).encode())
    found = [json.loads(zlib.decompress(raw)) for raw in _exchanged(data, mesh.device_type)]
    return dist.get_rank(), found[0][0], [each for _, each in found]


def _exchanged(data: bytes, device: str) -> list[bytes]:
    """Return the bytes that each process gives, by rank."""
    world = dist.get_world_size()
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(world)]
    dist.all_gather(sizes, size)
    most = max(int(n) for n in sizes)
    mine = torch.frombuffer(bytearray(data.ljust(most, b"\0")), dtype=torch.uint8).to(device)
    theirs = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(theirs, mine)
    return [x.cpu().numpy().tobytes()[: int(n)] for x, n in zip(theirs, sizes, strict=True)]


def _shared_out(everywhere: list[Has]) -> dict[str, int]:
    """Return the first process that has each shard, which publishes it."""
    found: dict[str, int] = {}
    for rank, has in enumerate(everywhere):
        for shard in has:
            found.setdefault(shard, rank)
    return found


def _check_whole(everywhere: list[Has]) -> None:
    """Raise ``InputError`` naming a tensor that the shards of all processes do not make up."""
    boxes: dict[str, dict[str, Box]] = {}
    for has in everywhere:
        for shard, shape in has.items():
            name, box = parse(shard)
            boxes.setdefault(name, {})[shard] = Box.whole(tuple(shape)) if box is None else box
    for name, found in boxes.items():
        whole, there = Box.whole(next(iter(found.values())).shape).numel, sum(b.numel for b in found.values())
        told = f"the shards of {name} on all processes have {there:,} values, and it has {whole:,}"
        require(there == whole, InputError, f"{told}; publish a model that is sharded over all of them")


def _of_shards(key: str, given: Any, shards: list[str], everywhere: list[Has]) -> Any:
    """Return an option by the names of whole tensors as one of these shards; any other as it is."""
    if not isinstance(given, Mapping):
        return given
    unknown = given.keys() - {parse(shard)[0] for has in everywhere for shard in has}
    told = f"{key} names {', '.join(sorted(map(str, unknown)))}, which is no tensor here; name another"
    require(not unknown, InputError, told)
    return {shard: given[name] for shard in shards if (name := parse(shard)[0]) in given}
