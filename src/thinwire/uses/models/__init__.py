"""Weights of language models, coded small: bits where they matter under a budget of bytes."""

from thinwire.uses.use import RunKind, Use

USE = Use(
    __name__,
    kinds={"model": RunKind(".run.record:ModelRecord", ".run.cards")},
    demos={"models": ".commands.demo:models"},
    readers=(".about_packed_model",),
)
