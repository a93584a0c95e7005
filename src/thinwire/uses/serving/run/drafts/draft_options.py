"""Options of training a draft head."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.runs import options as shared
from thinwire.runs.options import Options, option

HEAD = "Head"


@dataclass(frozen=True)
class DraftsConfig(Options):
    """Say for which model, by which texts, and how large the head is."""

    model: str = option(
        "smollm2-135m", "", "smollm2-135m, a local Hugging Face folder, or a hub name.", metavar="MODEL"
    )
    data: str = option(
        "shakespeare", "", "Text to learn from: shakespeare, wikitext-2, or a folder.", metavar="DATA"
    )
    out: str = option("drafts.safetensors", "", "The file to write.", metavar="FILE", free=True)
    tokens: int = option(
        400_000,
        "",
        "Tokens of text; the model's hidden states of them are kept in memory, 2 bytes a value.",
        metavar="N",
        least=1024,
        most=1 << 30,
    )
    steps: int = option(600, "", "Lessons, of eight pieces of text each.", metavar="N", least=1, most=1 << 30)
    common: int = option(
        8192, HEAD, "It proposes the commonest tokens alone, so many.", metavar="N", least=2, most=1 << 24
    )
    window: int = option(64, HEAD, "Tokens that it looks back over.", metavar="N", least=1, most=4096)
    inner: int = option(
        0,
        HEAD,
        "Width of its feed-forward part; 0: twice that of hidden states.",
        metavar="N",
        least=0,
        most=1 << 20,
    )
    seed: int = option(0, "", "Seed of its first weights.", metavar="N", least=0, most=10**12)
    device: str = shared.device()
    dtype: str = shared.compute_dtype()
    quiet: bool = shared.quiet()
    json: bool = shared.printed("what it came to")
