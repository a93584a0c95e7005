"""Train one model on several machines: in stages, as replicas, or both."""

from thinwire.uses.use import NETWORKS, TRAINING, Command, RunKind, Use

USE = Use(
    __name__,
    commands=(
        Command(".commands.train:train", TRAINING),
        Command(".commands.train:compare", TRAINING),
        Command(".commands.plan:plan", NETWORKS),
    ),
    kinds={
        "pipeline": RunKind(".run.record:TrainRecord", ".run.cards"),
        "replicas": RunKind(
            ".run.record:ReplicasRecord",
            ".run.replica_cards",
        ),
    },
    demos={
        "": ".commands.demo:training",
        "replicas": ".commands.demo:replicas",
    },
    registries=(
        ".pipeline.recipes:PIPELINE",
        ".replicas.recipes:REPLICAS",
    ),
)
