"""Options that several commands have: one definition each, which a command may say more of."""

from __future__ import annotations

from typing import Any

from thinwire.links.tcp.congestion import AUTO, MEANING
from thinwire.runs.options import option

FOREVER = 1e9  # seconds: more than anybody waits, and no more than clocks can count


def seconds(default: float | None, text: str, most: float = FOREVER, **more: Any) -> Any:
    """Return an option of seconds, above 0 unless ``more`` says otherwise."""
    bounds: dict[str, Any] = {"most": most, "unit": " seconds"} | ({} if "least" in more else {"above": 0})
    return option(default, "", text, metavar="SECONDS", **bounds, **more)


def token_file(panel: str = "", text: str = "File with the token that all machines share") -> Any:
    """Return the option that several commands have under this name."""
    return option(None, panel, f"{text} (or set THINWIRE_TOKEN).", metavar="FILE", free=True)


def listen_host(default: str, panel: str = "", more: str = "", **about: Any) -> Any:
    """Return the option of where to listen."""
    return option(default, panel, f"Address to listen at{more}.", metavar="ADDRESS", free=True, **about)


def listen_port(default: int | None, panel: str = "", more: str = "") -> Any:
    """Return the option of the port to listen at."""
    text = f"Port to listen at{more}; 0 takes a free one."
    return option(default, panel, text, metavar="PORT", least=0, most=65535, free=True)


def force() -> Any:
    """Return the option of what replaces what is there."""
    return option(False, "", "Put it in the place of what is there.")


def quiet(panel: str = "", text: str = "No progress display.") -> Any:
    """Return the option of what says nothing on the way."""
    return option(False, panel, text, free=True)


def congestion() -> Any:
    """Return the option of TCP's congestion control."""
    return option(AUTO, "", MEANING, metavar="NAME")


def max_gb() -> Any:
    """Return the option of the largest state to take."""
    text = "Take no larger state, so that no stranger fills the memory."
    return option(None, "", text, metavar="GB", above=0, unit=" GB")


def printed(what: str, panel: str = "") -> Any:
    """Return the option of what prints a record alone."""
    return option(False, panel, f"Print {what}, and nothing else, on stdout.", free=True)
