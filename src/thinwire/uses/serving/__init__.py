"""Language models served by stages."""

from thinwire.uses.use import SERVING, Command, RunKind, Use

USE = Use(
    __name__,
    commands=(
        Command(".commands.serve_text:serve", SERVING),
        Command(".commands.serve_text:generate_text", SERVING),
        Command(".commands.plan_serving:plan_serving", SERVING),
        Command(".commands.train_drafts:train_drafts", SERVING),
    ),
    kinds={"serving": RunKind(".run.record:ServingRecord", ".run.cards")},
    demos={"serve": ".commands.demo:serve"},
    registries=(".recipes:SERVING",),
)
