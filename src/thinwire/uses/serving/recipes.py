"""What crosses between stages that serve, by name."""

from __future__ import annotations

from typing import Annotated

from thinwire.channels.channel import Scheme
from thinwire.choosing.registry import Parameter, Recipe, Registry
from thinwire.codecs import Cast, ChannelMean, DeadZone, Entropy, Sink
from thinwire.codecs.deadzone import step_for

PROMPT, TOKEN = "prompt", "token"  # roles: a prompt's hidden states; those of a token or some, and drafts
SERVING = Registry[Scheme, None]("serving", (PROMPT, TOKEN), (Scheme,))
BITS = Parameter("the accuracy of a prompt's hidden state, in bits of a direct code", 0.5, 8, whole=False)


@SERVING.register("exact", "Hidden states as they are computed, bit for bit.", "none")
def exact() -> dict[str, Scheme]:
    """Send what one machine would go on with: the text is the same, token for token."""
    return {PROMPT: Scheme(), TOKEN: Scheme()}


@SERVING.register("bf16", "Hidden states cast to bf16.", "common practice")
def bf16() -> dict[str, Scheme]:
    """Send bf16; exact where models compute in it."""
    half = Scheme(Cast("bfloat16"))
    return {PROMPT: half, TOKEN: half}


@SERVING.register("thinwire", "Prompts coded at an even error, tokens as they are.", "docs/serving.md")
def thinwire(bits: Annotated[float, BITS] = 4.0) -> dict[str, Scheme]:
    """Code prompts, whose bytes take seconds on a slow line; a token's are too few to matter.

    One step a message under an entropy coder. The first position, an attention sink, and the channels' means,
    which carry most of the energy, travel apart, as in training's first visits.
    """
    coded = Sink(ChannelMean(Entropy(DeadZone(step_for(bits)))), positions=1)
    return {PROMPT: Scheme(coded), TOKEN: Scheme()}


def parse_serving(text: str) -> Recipe[Scheme, None]:
    """Return the recipe that a text names. Errors: ``InputError``."""
    return SERVING.parse(text)
