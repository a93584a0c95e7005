"""Plans: what a node is to do with a version, in the strategy's own ``ConfigRecord``; the version beside it.

The packets of the version lie as uint8 arrays ``thinwire.0``, ``thinwire.1``, ... in the ``ArrayRecord``
beside the arrays that are not float32. Flower's clipping mods want one record of each kind, so we add none.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from thinwire.codecs import parse_codec
from thinwire.types import WRONG_VALUES, PayloadError
from thinwire.uses.federated.flower import host
from thinwire.uses.federated.flower.records import Layout, only, payload, replaced
from thinwire.uses.federated.message import Form, Version

PREFIX = "thinwire."
UPDATE = f"{PREFIX}update"  # the name of a reply's payload
CLIPPED = (
    "the strategy clips what a client sends, and feedback would add to it what earlier updates left, beyond "
    "the clipping norm; give feedback=False"
)
NUMBERS = ("number", "sequence", "confirmed", "check", "form", "steps", "rate")


@dataclass(frozen=True)
class Plan:
    """A version for a node. ``layout`` is left out where the node holds it already.

    ``client``: the node's id at the server; ``feedback``: whether what is not sent goes with the next update;
    ``weighted_by``: the metric that says how many samples a node has.
    """

    version: Version
    client: int
    feedback: bool
    weighted_by: str
    layout: Layout | None

    def put(self, content: Any, rest: dict[str, Any]) -> Any:
        """Return the ``RecordDict`` that asks as ``content`` does, with the version in place of arrays."""
        flwr, version = host.app(), self.version
        values: dict[str, Any] = {name: getattr(version, name) for name in NUMBERS}
        values |= {"form": int(version.form), "codec": repr(version.codec), "packets": len(version.packets)}
        values |= {"client": self.client, "feedback": self.feedback, "weighted-by": self.weighted_by}
        if self.layout is not None:
            values["layout"] = self.layout.pack()
        key, _ = only(content.array_records, "array", "a message of the strategy")
        name, config = only(content.config_records, "config", "a message of the strategy")
        arrays = {f"{PREFIX}{i}": payload(p) for i, p in enumerate(version.packets)}
        config = flwr.ConfigRecord({**config, **{f"{PREFIX}{n}": v for n, v in values.items()}})
        return replaced(content, {key: flwr.ArrayRecord({**rest, **arrays}), name: config})

    @classmethod
    def find(cls, content: Any) -> Plan | None:
        """Return the plan in what a node was sent; None where there is none.

        Errors: ``PayloadError`` for a plan that makes no sense.
        """
        planned = [c for c in content.config_records.values() if f"{PREFIX}number" in c]
        if not planned:
            return None
        _, arrays = only(content.array_records, "array", "a message with a plan")
        given = {n.removeprefix(PREFIX): v for n, v in planned[0].items() if n.startswith(PREFIX)}
        try:
            return cls._read(given, [arrays[f"{PREFIX}{i}"].data for i in range(given["packets"])])
        except (*WRONG_VALUES, struct.error) as e:
            raise PayloadError(f"a plan that does not read: {type(e).__name__}: {e}") from e

    @classmethod
    def _read(cls, given: dict[str, Any], packets: list[bytes]) -> Plan:
        number, sequence, confirmed, check, form, steps, rate = (given[name] for name in NUMBERS)
        codec, form = parse_codec(given["codec"]), Form(form)
        made = Version(number, sequence, confirmed, check, form, tuple(packets), steps, rate, codec)
        layout = Layout.unpack(given["layout"]) if "layout" in given else None
        version = Version.unpack(made.pack())  # which checks it
        return cls(version, int(given["client"]), bool(given["feedback"]), str(given["weighted-by"]), layout)
