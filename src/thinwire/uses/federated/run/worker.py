"""A process that computes turns of clients: ``python -m thinwire.uses.federated.run.worker CONFIG SEED``.

Reads turns and weights on stdin, writes differences on stdout, and ends when stdin closes.
"""

from __future__ import annotations

import os
import sys
from typing import IO

import torch
from torch import Tensor

from thinwire.types import ThinwireError
from thinwire.uses.federated.run.options import FederatedConfig
from thinwire.uses.federated.run.setup import Setup
from thinwire.uses.federated.run.trainer import ANSWER, Turn, read_exactly, row_of, send_row


def main(text: str, seed: str) -> None:
    """Answer turns until nobody asks any more."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    torch.set_num_threads(1)
    setup = Setup.of(FederatedConfig.from_json(text), int(seed))
    while True:
        try:
            turn = Turn.unpack(read_exactly(asked, Turn.FORM.size))
            weights = row_of(read_exactly(asked, 4 * setup.values))
        except EOFError:
            return
        _answer(answers, setup, turn, weights)


def _answer(answers: IO[bytes], setup: Setup, turn: Turn, weights: Tensor) -> None:
    try:
        change = setup.compute(turn, weights)
    except ThinwireError as e:
        text = str(e).encode()
        answers.write(ANSWER.pack(1, len(text)) + text)
        answers.flush()
        return
    send_row(answers, ANSWER.pack(0, 4 * change.numel()), change)


if __name__ == "__main__":
    main(*sys.argv[1:])
