"""Make one picture on several machines: its tokens, or its experts, are divided between them."""

from thinwire.uses.use import PICTURES, Command, RunKind, Use

USE = Use(
    __name__,
    commands=(
        Command(".commands.generate:generate", PICTURES),
        Command(".commands.worker:worker", PICTURES),
    ),
    kinds={"pictures": RunKind(".run.record:PicturesRecord", ".run.cards")},
    demos={"pictures": ".commands.demo:pictures", "video": ".commands.demo:video"},
    registries=(
        ".context_parallel.recipes:DIFFUSION",
        ".expert_parallel.recipes:EXPERTS",
    ),
)
