"""What a server says that is to be done, believed only within bounds: before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from thinwire.runs.machine.processor import memory_bytes
from thinwire.types import MAX_KEY, InputError, PayloadError, require
from thinwire.uses.federated.remote.words import text, whole
from thinwire.uses.federated.run.models import build_model
from thinwire.uses.federated.run.options import FederatedConfig
from thinwire.uses.federated.run.tasks import Dataset

CLASSES = 1 << 16  # at most; the largest sets of labels in use have 21,841
SEED = 10**9
NAME = 80  # characters of a name
COPIES = 6  # of a model, that a client holds as it trains: values, gradient, start, copy, change, residual


@dataclass(frozen=True)
class Terms:
    """A server's terms, each in its bounds. ``shape`` is as it came, to be compared."""

    client: int
    method: str
    model: str
    shape: Any
    classes: int
    values: int
    batch: int
    seed: int
    feedback: bool

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Terms:
        """Read what ``Serving.terms`` made. Errors: ``PayloadError`` naming what is out of bounds."""
        values = dict(given)
        batch = next(f.metadata["limits"] for f in fields(FederatedConfig) if f.name == "batch")

        def number(name: str, least: int, most: int = MAX_KEY) -> int:
            found = whole(values, name)
            wrong = f"the server's {name} is {found}, which is not in {least}..{most}"
            require(least <= found <= most, PayloadError, wrong)
            return found

        feedback = values.get("feedback")
        wrong = f"the server's feedback is {ascii(feedback)[:40]}, not true or false"
        require(isinstance(feedback, bool), PayloadError, wrong)
        return cls(
            number("client", 0),
            text(values, "method")[:NAME],
            text(values, "model")[:NAME],
            values.get("shape"),
            number("classes", 2, CLASSES),
            number("values", 1),
            number("batch", batch["least"], batch["most"]),
            number("seed", 0, SEED),
            bool(feedback),
        )

    def check(self, data: Dataset, where: str, model: str) -> None:
        """Raise ``InputError`` where the data of ``where`` are not of the server's kind, or ``model`` is not.

        A model that a server may name is counted before it is made.
        """
        theirs = ascii(self.shape)[:80]
        fits = self.shape == list(data.shape) and self.classes >= data.classes
        wrong = (
            f"{where} has samples of {list(data.shape)} in {data.classes} classes, the server's are {theirs}"
        )
        require(fits, InputError, f"{wrong} in {self.classes}; give the same kind of data")
        takes, (total, free) = 4 * COPIES * self.values, memory_bytes()
        have = free or total or takes
        wrong = f"the server's model of {self.values} values takes {takes / 1e9:.3g} GB here"
        require(takes <= have, InputError, f"{wrong}, and {have / 1e9:.3g} are free; train a smaller one")
        if ":" not in model:
            with torch.device("meta"):
                made = build_model(model, data.shape, self.classes, self.seed)
            self.check_count(sum(math.prod(p.shape) for p in made.parameters()))

    def check_count(self, many: int) -> None:
        """Raise ``InputError`` where a model has not as many parameters as the server's."""
        wrong = f"the model has {many} parameters here and {self.values} at the server; give the same --model"
        require(many == self.values, InputError, wrong)
