"""Language models served by stages."""

from thinwire.uses.use import SERVING, Command, Use

USE = Use(
    __name__,
    commands=(
        Command(".commands.serve:serve", SERVING),
        Command(".commands.serve:generate_text", SERVING),
    ),
    registries=(".recipes:SERVING",),
)
