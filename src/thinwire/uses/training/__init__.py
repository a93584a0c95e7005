"""Train one model on several machines: in stages, as replicas, or both."""

from thinwire.uses.use import NETWORKS, TRAINING, Command, RunKind, Use

USE = Use(
    __name__,
    commands=(
        Command(".commands.train:train", TRAINING),
        Command(".commands.train:compare", TRAINING),
        Command(".commands.keep_swarm:swarm", TRAINING),
        Command(".commands.join_swarm:join", TRAINING),
        Command(".commands.plan:plan", NETWORKS),
    ),
    kinds={
        "pipeline": RunKind(".run.record:TrainRecord", ".run.cards"),
        "replicas": RunKind(
            ".run.record:ReplicasRecord",
            ".run.replica_cards",
        ),
        "swarm": RunKind(".swarm.run.record:SwarmRecord", ".swarm.run.cards"),
    },
    demos={
        "": ".commands.demo:training",
        "replicas": ".commands.demo:replicas",
        "swarm": ".commands.demo:swarm",
    },
    registries=(
        ".pipeline.recipes:PIPELINE",
        ".replicas.recipes:REPLICAS",
    ),
)
