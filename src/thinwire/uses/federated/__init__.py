"""Federated learning: clients train on their own data, and a server adds up what they send."""

from thinwire.uses.use import TRAINING, Command, RunKind, Use

USE = Use(
    __name__,
    commands=(
        Command(".commands.federate:federate", TRAINING),
        Command(".commands.serve:federate_serve", TRAINING),
        Command(".commands.join:federate_join", TRAINING),
    ),
    kinds={"federated": RunKind(".run.record:FederatedRecord", ".run.cards")},
    demos={"federated": ".commands.demo:federated"},
    registries=(".recipes:FEDERATED",),
)
