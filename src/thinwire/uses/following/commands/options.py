"""The options of ``thinwire publish`` and ``thinwire follow``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.dtypes import FLOATS, SHORT, name_of
from thinwire.files import PART_REST, REST
from thinwire.links.address import Address
from thinwire.runs import options as shared
from thinwire.runs.options import COUNTED, Options, option
from thinwire.runs.terminal.addresses import PORT, check_file, check_state
from thinwire.runs.terminal.shell_command import SECONDS
from thinwire.types import InputError, require
from thinwire.uses.following.follower_base import PATIENCE, POLL

DAY = 86_400.0  # seconds: the most of --rest and --wait
PUSH, PULL = "For followers that connect", "For followers that fetch"
DELTAS, FORMATS = "For hosts that read deltas", ("slime", "modelexpress", "trl")


@dataclass(frozen=True)
class PublishConfig(Options):
    """What is published, as what, and where."""

    dtype: tuple[str, ...] = option(
        (),
        "",
        "Cast floats, or those called NAME (* stands for any text), to what followers use; again for "
        "another name, which counts before what is for all.",
        metavar="[NAME=]bf16|fp16|fp32",
    )
    bound: tuple[str, ...] = option(
        (),
        "",
        "Let floats, or the tensor NAME, be off by so much in their own units; again for another name. "
        "What --dtype rounds comes on top, and must not be more.",
        metavar="[NAME=]ERROR",
    )
    strict: bool = option(False, "", "Refuse what --dtype makes infinite or cuts off, instead of a note.")
    host: str = shared.listen_host("127.0.0.1", PUSH)
    port: int | None = shared.listen_port(None, PUSH, f", {PORT} if there is no --store")
    token_file: str | None = shared.token_file()
    state: str | None = option(
        None,
        PUSH,
        "Save the newest version there, each minute and at the end, and go on from it: followers need "
        "no keyframe then.",
        metavar="FILE",
    )
    store: str | None = option(None, PULL, "Folder or store to write versions to.", metavar="URL")
    name: str = option("state", "", "What the state is called.")
    rest: float | None = shared.seconds(
        None,
        f"Read what has not changed for so long: {REST:g}, or {PART_REST:g} where only some of several "
        "files have changed since the last version.",
        DAY,
    )
    wait: float = shared.seconds(
        0.0, "Wait so long for FILE, if training is still to write it.", DAY, least=0
    )
    congestion: str = shared.congestion()
    once: bool = option(False, "", "Publish what is there, and end when a follower or the store has it.")
    layers: bool = option(False, "", "FILE is a packed scene: publish each of its layers as a version.")
    deltas: str | None = option(
        None,
        "",
        "Folder or store where a trainer writes deltas, as slime, miles, modelexpress or TRL has them; each "
        "is published. FILE is the checkpoint that they begin with.",
        metavar="URL",
    )
    quiet: bool = shared.quiet(text="Show no live line.")

    def validate(self) -> None:
        """Raise ``InputError`` for what is no dtype, no bound or no place for a state."""
        saved = self.state is None or self.at is not None
        require(saved, InputError, "--state is for --port; a store is what its publisher needs")
        apart = self.deltas is None or not self.layers
        require(apart, InputError, "--deltas is for checkpoints, and --layers for scenes; leave one out")
        _ = parse_dtypes(self.dtype), parse_bounds(self.bound)

    @property
    def at(self) -> tuple[str, int, Path | None, str] | None:
        """Host, port, saved state and congestion control; None where there is only a store."""
        port = PORT if self.port is None and self.store is None else self.port
        return None if port is None else (self.host, port, check_state(self.state), self.congestion)


@dataclass(frozen=True)
class FollowConfig(Options):
    """What to do with each version, and how long to wait for it."""

    out: str | None = option(
        None, "", "Write each version there, whole or not at all.", metavar="FILE.safetensors"
    )
    every: float = shared.seconds(0.0, "Write at most so often: the newest then.", least=0)
    state: str | None = option(
        None, "", "Go on from what was saved there, and save what is held.", metavar="FILE"
    )
    base: str | None = option(
        None, "", "Start from this checkpoint; one patch follows if its values are known.", metavar="FILE"
    )
    relay: str | None = option(
        None, "", "Serve other followers there, from what comes here.", metavar="HOST:PORT"
    )
    congestion: str = shared.congestion()
    exec: str | None = option(
        None,
        "",
        "Run a shell command after each version, with THINWIRE_VERSION and THINWIRE_FILE set.",
        metavar="COMMAND",
    )
    exec_timeout: float = shared.seconds(SECONDS, "Kill what --exec runs after so long, and go on.")
    deltas: str | None = option(
        None,
        DELTAS,
        "Write each version to this folder or store as a delta, for a host that reads its own format; --exec "
        "gets THINWIRE_DELTA, its number there. A folder in --base is the host's version 0.",
        metavar="URL",
    )
    delta_format: str = option(FORMATS[0], DELTAS, "How --deltas are laid out.", choices=FORMATS)
    anchor_every: int = option(
        20,
        DELTAS,
        "Write a whole checkpoint in place of each so many deltas; what is older than the last but one goes.",
        least=2,
        most=COUNTED,
    )
    name: str | None = option(None, "", "What the state is called: refuse one that is called anything else.")
    token_file: str | None = shared.token_file()
    once: bool = option(False, "", "End when the newest version is here, with code 3 if --exec failed.")
    poll: float = shared.seconds(POLL, "Look into a store so often.")
    patience: float = shared.seconds(PATIENCE, "Give up after so long without a sign of the publisher.")
    max_gb: float | None = shared.max_gb()
    quiet: bool = shared.quiet(text="Show no live line.")

    def validate(self) -> None:
        """Raise ``InputError`` for files that cannot be written, and for a relay at no address."""
        _ = self.files, self.serve

    @property
    def serve(self) -> Address | None:
        """Where to serve others, if anywhere."""
        return None if self.relay is None else Address.parse(self.relay, "--relay", like=PORT)

    @property
    def files(self) -> tuple[Path | None, Path | None]:
        """What to write to for --out and for --state, which are two files."""
        out, state = check_file(self.out, "--out"), check_state(self.state)
        apart = out is None or state is None or out.resolve() != state.resolve()
        require(apart, InputError, f"--out and --state are both {out}; give each a file of its own")
        return out, state


def parse_dtypes(texts: Sequence[str]) -> dict[str, str]:
    """Return what --dtype says by name, that for all floats under an empty one. Errors: ``InputError``.

    >>> parse_dtypes(["bf16", "*norm*=fp32"])
    {'': 'bf16', '*norm*': 'fp32'}
    """
    found = {}
    for text in texts:
        name, _, kind = text.rpartition("=")
        told = f"--dtype is {text!r}; it must be one of {', '.join(SHORT)}"
        require(name_of(kind) in FLOATS, InputError, f"{told}, or NAME= and one of them" if name else told)
        found[name] = kind
    return found


def parse_bounds(texts: Sequence[str]) -> dict[str, float] | float | None:
    """Return what --bound says: one bound for all floats, or one by name. Errors: ``InputError``.

    >>> parse_bounds(["1e-4"]), parse_bounds(["head=0.1", "embed=0.2"])
    (0.0001, {'head': 0.1, 'embed': 0.2})
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError as e:
            raise InputError(f"--bound {text!r} is not ERROR or NAME=ERROR; write it like 1e-4") from e
        require(found[name] > 0, InputError, f"--bound is {text}; an error must be above 0")
    mixed = "" in found and len(texts) > 1
    require(not mixed, InputError, "--bound is given for all floats and again; give names, or one number")
    return found.get("", found) if found else None
