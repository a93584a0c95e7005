"""The program of a rank that makes pictures."""

from __future__ import annotations

import torch

from thinwire.lab.machine.heap import keep_freed
from thinwire.lab.machine.processor import pick_threads
from thinwire.lab.pictures.options import EXPERTS, FLUX, PicturesConfig
from thinwire.lab.pictures.run import PicturesRank
from thinwire.lab.pictures.run_experts import ExpertsRank
from thinwire.lab.ranks.joining import joined

RANKS: dict[str, type[PicturesRank]] = {FLUX: PicturesRank, EXPERTS: ExpertsRank}


def run_rank(config: PicturesConfig) -> None:
    """Run this process's rank of ``config``; rank 0 writes the records once all is done."""
    keep_freed()
    torch.set_num_threads(pick_threads(config))
    with joined(config, "these pictures", "--ranks") as world:
        RANKS[config.model](config, world).go()
