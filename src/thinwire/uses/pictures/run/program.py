"""The program of a rank that makes pictures."""

from __future__ import annotations

import torch

from thinwire.runs.machine.heap import keep_freed
from thinwire.runs.machine.processor import pick_threads
from thinwire.runs.ranks.joining import joined
from thinwire.uses.pictures.run.options import EXPERTS, FLUX, PicturesConfig
from thinwire.uses.pictures.run.run import PicturesRank
from thinwire.uses.pictures.run.run_experts import ExpertsRank

RANKS: dict[str, type[PicturesRank]] = {FLUX: PicturesRank, EXPERTS: ExpertsRank}


def run_rank(config: PicturesConfig) -> None:
    """Run this process's rank of ``config``; rank 0 writes the records once all is done."""
    keep_freed()
    torch.set_num_threads(pick_threads(config))
    with joined(config, "these pictures", "--ranks") as world:
        RANKS[config.model](config, world).go()
