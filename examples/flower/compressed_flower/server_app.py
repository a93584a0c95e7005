"""The server: a strategy of Flower, wrapped."""

from __future__ import annotations

from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from compressed_flower.task import network
from thinwire.codecs import TopK, Uniform
from thinwire.rounds.client_profile import Fixed
from thinwire.rounds.download import DeltaDownload
from thinwire.rounds.local_training import Decay
from thinwire.uses.federated.flower.strategy import Compressed

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds; write the final weights' bytes if asked."""
    strategy = FedAvg(fraction_evaluate=0.0)
    if context.run_config["compress"]:
        policy = Fixed(steps=5, codec=TopK(0.05, Uniform(4, group=64)))
        strategy = Compressed(strategy, policy, DeltaDownload(), rates=Decay(0.5))
    initial = ArrayRecord(network().state_dict())
    result = strategy.start(grid, initial, num_rounds=int(context.run_config["num-server-rounds"]))
    if context.run_config["weights"]:
        place = Path(str(context.run_config["weights"]))
        whole = place.with_suffix(".part")  # who waits for the file is to find all of it
        whole.write_bytes(b"".join(array.numpy().tobytes() for array in result.arrays.values()))
        whole.rename(place)
