"""A server's terms are believed within bounds: what is out of them is refused before it is made use of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each import each

from thinwire.types import ThinwireError
from thinwire.uses.federated.run import client_program
from thinwire.uses.federated.run.client_program import make_client
from thinwire.uses.federated.run.datasets import Dataset
from thinwire.uses.federated.run.options import JoinConfig

X, Y = torch.randn(12, 1, 8, 8), torch.arange(12) % 3
DATA = Dataset("toy", X, Y, X, Y, classes=3)
GOOD: dict[str, Any] = {
    "client": 2, "method": "fedavg", "model": "logistic", "shape": [1, 8, 8], "classes": 3,
    "values": 65 * 3, "batch": 4, "seed": 1, "feedback": True,
}  # fmt: skip
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"classes": 1 << 40}, "classes is 1099511627776, which is not in 2..65536"),
    ({"classes": 1 << 24}, "which is not in 2..65536"),
    ({"classes": 60_000, "values": 65 * 60_000 - 1}, "the model has 3900000 parameters here"),
    ({"classes": -1}, "classes is -1 in a message"),
    ({"classes": 2}, "in 3 classes, the server's are"),
    ({"values": 1 << 45}, "GB here"),
    ({"values": True}, "values is True in a message"),
    ({"batch": 0}, "batch is 0"),
    ({"batch": 1 << 40}, "batch is 1099511627776"),
    ({"seed": 1 << 61}, "seed is"),
    ({"seed": 0.5}, "seed is 0.5 in a message"),
    ({"client": 1 << 63}, "client is"),
    ({"client": None}, "client is None"),
    ({"shape": [1 << 20, 1 << 20]}, "the server's are [1048576, 1048576]"),
    ({"shape": "\x1b[2J" * 900}, "'\\x1b[2J"),
    ({"model": "os:system"}, "a model of its own"),
    ({"model": "\x1b[2J"}, "' [2J' is unknown"),
    ({"model": ["cnn"] * 900}, "unknown"),
    ({"feedback": "no"}, "feedback is 'no'"),
]


def test_terms_in_their_bounds_make_a_client() -> None:
    client = make_client(JoinConfig(), GOOD, DATA)
    assert (client.id, client.values, client.data.samples) == (2, 195, 12)


@each("hostile", HOSTILE)
def test_terms_out_of_bounds_are_refused_before_a_model_is_made(
    hostile: tuple[dict[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, said = hostile
    build = client_program.build_model

    def counted(*what: Any) -> torch.nn.Module:
        assert torch.get_default_device().type == "meta"  # nothing is made but to be counted
        return build(*what)

    monkeypatch.setattr(client_program, "build_model", counted)
    with pytest.raises(ThinwireError) as error:
        make_client(JoinConfig(), GOOD | odd, DATA)
    text = str(error.value)
    assert said in text and len(text) < 400 and text.isprintable()
    for name in odd:
        with pytest.raises(ThinwireError):
            make_client(JoinConfig(), {n: v for n, v in GOOD.items() if n != name}, DATA)
