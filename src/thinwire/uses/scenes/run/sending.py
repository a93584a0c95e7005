"""The rank programs of the demo of scenes: one sends what another asks for, which says when it can be seen.

The link between them is shaped in the sender's process. Files come from the sender's folder; the receiver has
what was sent alone. A piece is a layer, or a whole file of a form that has none.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from pathlib import Path
from time import monotonic

from thinwire.links.mesh import Peer
from thinwire.runs.ranks.joining import joined
from thinwire.runs.ranks.rank_main import await_order, say
from thinwire.uses.scenes.files.container import read_layers
from thinwire.uses.scenes.files.foreign import read_foreign
from thinwire.uses.scenes.layers import shown_after
from thinwire.uses.scenes.run.options import ScenesConfig

PACKED, RIVAL = "scene.tw", "scene.spz"  # files of the demo's folder
ASK, PIECE = b"ask", b"piece"
LABEL = "state"


def run_rank(config: ScenesConfig) -> None:
    """Send as the first rank, receive as the other."""
    with joined(config, "a sender and a receiver", "the number of processes") as world:
        (peer,) = world.peers.values()
        (send if world.rank == 0 else receive)(peer, config)
        await_order("stop", config.deadline)


def pieces_of(name: str, data: bytes) -> list[bytes]:
    """Return what of a file is sent at a time: a packed scene's layers, the header with the first."""
    if name != PACKED:
        return [data]
    ends = read_layers(data)[1]
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def send(peer: Peer, config: ScenesConfig) -> None:
    """Send each file that is asked for, until none is; what is not there is sent as nothing."""
    while name := peer.get(ASK, config.deadline, "what the receiver asks for").decode():
        file = Path(config.out) / name
        known = name in (PACKED, RIVAL) and file.exists()
        for piece in pieces_of(name, file.read_bytes()) if known else [b""]:
            peer.mailbox.send(PIECE, piece, LABEL)
    say("sent", lateness=peer.shaped.lateness.mean, worst=peer.shaped.lateness.worst)


def receive(peer: Peer, config: ScenesConfig) -> None:
    """Ask for both files in turn, decode what has come, and say when."""
    with suppress(ImportError):
        import_module("gaussforge")  # before the time is taken
    for name in (PACKED, RIVAL):
        peer.mailbox.send(ASK, name.encode(), LABEL)
        began, data, whole, i = monotonic(), b"", False, 0
        while not whole:
            piece = peer.get(PIECE, config.deadline, f"piece {i + 1} of {name}")
            data, i = data + piece, i + 1
            came = monotonic() - began
            if not piece:
                break
            if name == PACKED:
                layers, ends = read_layers(data)
                count, whole = shown_after(layers).count, len(layers) == len(ends)
            else:
                count, whole = read_foreign(data, "spz").count, True
            say("shown", file=name, piece=i, came=came, seconds=monotonic() - began, splats=count)
    peer.mailbox.send(ASK, b"", LABEL)
    say("received")
