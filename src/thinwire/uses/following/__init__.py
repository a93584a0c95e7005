"""Publish a state and follow it: pushed over links, or pulled from a shared folder."""

from thinwire.uses.use import STATES, Command, RunKind, Use

USE = Use(
    __name__,
    commands=(
        Command(".commands.publish:publish", STATES),
        Command(".commands.follow:follow", STATES),
    ),
    kinds={
        "state": RunKind(".run.record:StateRecord", ".run.cards"),
        "rollouts": RunKind(".run.rollout_record:RolloutsRecord", ".run.rollout_cards"),
    },
    demos={"state": ".commands.demo:state"},
    registries=(".recipes:STATE",),
)
