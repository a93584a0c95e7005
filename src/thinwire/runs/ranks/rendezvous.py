"""Where the ranks of a run meet: what the environment says of this process, and the store they share.

Without a relay that is torch's store at MASTER_ADDR and MASTER_PORT: torchrun's own, or rank 0's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from thinwire.links.address import shown
from thinwire.links.names import await_answer, interface_names
from thinwire.links.security import is_loopback
from thinwire.runs.machine.network import check_own
from thinwire.runs.ranks.run_config import RunConfig
from thinwire.types import InputError, LinkError, ThinwireError, require

if TYPE_CHECKING:
    import torch.distributed as dist

PATIENCE = 5.0  # seconds before a wait says what it is for
POLL = 0.2  # seconds
MASTER = ("MASTER_ADDR", "MASTER_PORT")
_runs = itertools.count()  # of this process: all ranks of a comparison count alike


def under_torchrun(config: RunConfig) -> bool:
    """Say whether this process is one rank that somebody else started: torchrun, or a user with a relay.

    Errors: ``InputError`` for a rank that is not told where the others are.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return False
    missing = [name for name in MASTER if config.relay is None and name not in os.environ]
    require(
        not missing,
        InputError,
        f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not, so this rank cannot find the others; "
        "set what is missing, give --relay, or unset RANK for a run of its own",
    )
    return True


def starts_all(config: RunConfig) -> bool:
    """Say whether this process starts all ranks; elsewhere it is one of them, as ``under_torchrun`` says.

    Errors: ``InputError`` where ranks cannot run or meet so.
    """
    if not under_torchrun(config):
        if not config.emulate and config.relay is None:
            check_own(config.host)
        return True
    text = "--emulate starts all ranks itself, but RANK is set; leave torchrun out, or --emulate"
    require(not config.emulate, InputError, text)
    _check_reach(config)
    return False


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as the environment has them."""
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    require(rank < size, InputError, f"RANK is {rank}, but WORLD_SIZE is {size}; ranks count from 0")
    if "MASTER_PORT" in os.environ:
        port = _number("MASTER_PORT")
        require(
            port < 65536, InputError, f"MASTER_PORT is {port}, but ports end at 65535; set the one of rank 0"
        )
    return rank, size


def _check_reach(config: RunConfig) -> None:
    """Raise ``InputError`` where this rank would tell others, on other machines, a loopback address."""
    rank, size = rank_and_world()
    if config.relay is not None or config.advertise is not None or not is_loopback(config.host):
        return
    if rank == size - 1:  # which only dials
        return
    master = os.environ["MASTER_ADDR"]
    local = os.environ.get("LOCAL_WORLD_SIZE")
    here = local is None and master in (socket.gethostname(), socket.getfqdn())
    require(
        str(size) == local or is_loopback(master) or here,
        InputError,
        f"the ranks meet at {master}, but others cannot reach this one at --host {config.host}; "
        "give its address in their network as --host, on each rank but the last",
    )


def _number(variable: str) -> int:
    text = os.environ[variable]
    require(text.isdecimal(), InputError, f"{variable} is {text!r}; set it to a whole number")
    return int(text)


def meet(config: RunConfig, rank: int, size: int, replicas: int = 1) -> dist.Store:
    """Return a store that the ranks of this run share, once torch's process group is there too.

    Each of ``replicas`` has a process group of its own, as if it were alone.

    With a relay the ranks need no store and get one of their own. Errors: ``LinkError`` after
    ``config.deadline`` seconds in which the others did not come.
    """
    import torch.distributed as dist

    wait = timedelta(seconds=config.deadline)
    # torch's stages want a process group to exist. All traffic goes over our own links, so gloo need not
    # connect anything, and its one listening socket stays on loopback.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    # The store of torchrun outlives a run, and with it the addresses of the run before.
    own = dist.PrefixStore(f"thinwire/{next(_runs)}", _store(config, rank, size, wait))
    replica, place = divmod(rank, size // replicas)
    group = dist.PrefixStore(f"replica/{replica}", own)
    dist.init_process_group("gloo", store=group, rank=place, world_size=size // replicas, timeout=wait)
    return own


@contextlib.contextmanager
def explained(config: RunConfig, rank: int) -> Iterator[None]:
    """Say in a sentence, as a ``LinkError``, what torch's store or process group raises in the block."""
    try:
        yield
    except (RuntimeError, ValueError) as e:
        if isinstance(e, ThinwireError):
            raise
        why = " ".join(str(e).split())[:200]
        raise LinkError(f"rank {rank} could not meet the others at {meeting(config)} ({why})") from e


def meeting(config: RunConfig) -> str:
    """Return the address at which the ranks meet, as ``HOST:PORT``."""
    return config.relay or ":".join(os.environ[name] for name in MASTER)


def loopback_interface() -> str:
    """Return the name of this machine's loopback interface."""
    names = interface_names()
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def _store(config: RunConfig, rank: int, size: int, wait: timedelta) -> dist.Store:
    import torch.distributed as dist

    if config.relay is not None:
        return dist.HashStore()
    if rank:
        _await_answer(config, rank)
    store: dist.Store = next(dist.rendezvous("env://", rank, size, timeout=wait))[0]
    return store


def _await_answer(config: RunConfig, rank: int) -> None:
    """Wait until rank 0 listens."""
    host, port = (os.environ[name] for name in MASTER)
    try:
        await_answer(host, int(port), time.monotonic() + config.deadline, POLL)
    except OSError as e:
        raise LinkError(
            f"rank {rank} found nobody at {shown(host, int(port))} for {config.deadline:g} s "
            f"({e.strerror or e}); start rank 0, or correct the address"
        ) from e


@contextlib.contextmanager
def telling(config: RunConfig, rank: int, size: int) -> Iterator[None]:
    """Say on stderr what the block waits for, should it take longer than ``PATIENCE`` seconds."""
    others = ", ".join(str(other) for other in range(size) if other != rank)
    many = "s" if size > 2 else ""
    text = f"rank {rank}: waiting for rank{many} {others} at {meeting(config)}, up to {config.deadline:g} s\n"
    alarm = threading.Timer(PATIENCE, sys.stderr.write, [text])
    alarm.daemon = True
    if not config.quiet:
        alarm.start()
    try:
        yield
    finally:
        alarm.cancel()
