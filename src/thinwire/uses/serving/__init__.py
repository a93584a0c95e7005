"""Language models served by stages."""

from thinwire.uses.use import SERVING, Command, Use

USE = Use(
    __name__,
    commands=(
        Command(".commands.serve_text:serve", SERVING),
        Command(".commands.serve_text:generate_text", SERVING),
    ),
    registries=(".recipes:SERVING",),
)
