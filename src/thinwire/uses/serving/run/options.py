"""Options of serving a language model by stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thinwire.runs import options as shared
from thinwire.runs.options import option
from thinwire.runs.ranks.run_config import JOB, LINK, MACHINES, RunConfig
from thinwire.types import InputError, require

SERVING = "Serving"
AUTO, NONE, PHRASES = "auto", "none", "phrases"  # who drafts, or a model, or a file of a draft head


@dataclass(frozen=True)
class StagesConfig(RunConfig):
    """Say which model is cut into stages, and what crosses between them."""

    model: str = option(
        "smollm2-135m", JOB, "smollm2-135m, a local Hugging Face folder, or a hub name.", metavar="MODEL"
    )
    init: str | None = option(
        None, JOB, "'random' starts from random weights.", metavar="random", choices=("random",)
    )
    stages: int = option(
        1,
        MACHINES,
        "Stages that the model is cut into, a process or machine each.",
        metavar="N",
        least=1,
        most=16,
    )
    cut: str | None = option(
        None, MACHINES, "Layers of each stage, as in 19,11 (default: balanced by cost).", metavar="N,N,..."
    )
    recipe: str = option(
        "thinwire",
        LINK,
        "What crosses: exact, bf16, or thinwire, with prompts coded, as in thinwire:bits=3.",
        metavar="NAME[:K=V,...]",
    )
    chunk: int = option(
        128,
        SERVING,
        "Tokens of prompts that cross together, while the next are computed.",
        least=1,
        most=1 << 16,
    )
    cache: int = option(
        8192,
        SERVING,
        "Tokens of prompts and answers under way that all stages have room for.",
        least=16,
        most=1 << 28,
    )
    drafts: str = option(
        AUTO,
        SERVING,
        "Who proposes tokens before they are known: phrases (what the text said before), a draft head (a "
        "file of train-drafts), a small model of the same tokens, none; auto is the head that comes with the "
        "model, else phrases.",
        metavar="NAME|FILE|MODEL",
    )
    reuse: bool = option(
        True,
        SERVING,
        "Copy what a prompt shares with an earlier text that is still in the cache, instead of computing it.",
    )
    prefixes: str | None = option(
        None,
        SERVING,
        "Folder in which each stage stores its keys and values of prompts, to load them after a restart.",
        metavar="DIR",
        free=True,
    )
    device: str = shared.device(SERVING)
    dtype: str = shared.compute_dtype(SERVING)

    @property
    def ranks(self) -> int:
        """Processes that are needed."""
        return self.stages

    def validate(self) -> None:
        """Refuse options that do not go together, in one sentence."""
        super().validate()
        from thinwire.uses.serving.recipes import parse_serving

        parse_serving(self.recipe)


@dataclass(frozen=True)
class EndpointConfig(StagesConfig):
    """And where the endpoint listens."""

    out: str = option("runs/serve", JOB, "Folder of the record.", metavar="DIR", free=True)
    listen: str = option(
        "127.0.0.1:8000",
        SERVING,
        "Where the endpoint listens; off loopback it needs --api-key-file.",
        metavar="HOST:PORT",
        free=True,
    )
    api_key_file: str | None = option(
        None, SERVING, "A file with the key that clients send as a bearer token.", metavar="FILE", free=True
    )

    resume_requests: bool = option(
        False,
        SERVING,
        "Wait --deadline seconds for a stage that is lost, then go on with the texts under way.",
    )

    def validate(self) -> None:
        """Refuse an endpoint that others reach without a key."""
        super().validate()
        from thinwire.links.security import is_loopback

        host, _ = self.endpoint
        open_to_all = not is_loopback(host) and self.api_key_file is None
        wrong = (
            f"--listen {self.listen} can be reached by others; give --api-key-file, or listen at 127.0.0.1"
        )
        require(not open_to_all, InputError, wrong)
        self.read_key()

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the endpoint."""
        from thinwire.links.address import Address

        found = Address.parse(self.listen, "--listen", like=8000)
        return found.host, found.port

    def read_key(self) -> str | None:
        """Return the key, where one is needed. Errors: ``InputError`` for a file that has none."""
        if self.api_key_file is None:
            return None
        try:
            key = Path(self.api_key_file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as e:
            why = getattr(e, "strerror", None) or e
            raise InputError(
                f"cannot read --api-key-file {self.api_key_file}: {why}; write a key into it"
            ) from e
        short = f"the key in {self.api_key_file} has {len(key)} characters; give it 16 or more"
        require(len(key) >= 16, InputError, short)
        return key


@dataclass(frozen=True)
class ContinueConfig(StagesConfig):
    """And one text to be continued."""

    out: str = option("runs/text", JOB, "Folder of the record.", metavar="DIR", free=True)
    prompt: str = option("", "", "", metavar="PROMPT")
    tokens: int = option(64, SERVING, "Tokens to add at most.", metavar="N", least=1, most=1 << 20)
    temperature: float = option(
        0.0, SERVING, "0 takes the likeliest token; above it draws.", metavar="T", least=0, most=100
    )
    top_p: float = option(
        1.0, SERVING, "Draw from the likeliest tokens with this share.", metavar="P", above=0, most=1
    )
    chat: bool = option(False, SERVING, "Take the prompt as a message, in the model's own form of a chat.")


@dataclass(frozen=True)
class MeasuredConfig(StagesConfig):
    """And texts that several ways go on from, to be compared."""

    out: str = option("runs/texts", JOB, "Folder of the records.", metavar="DIR", free=True)
    data: str = option("shakespeare", JOB, "The text whose held-out part prompts are from.", metavar="DATA")
    texts: int = option(2, JOB, "Prompts.", metavar="N", least=1, most=64)
    prompt_tokens: int = option(256, JOB, "Tokens of a prompt.", metavar="N", least=1, most=1 << 20)
    tokens: int = option(32, JOB, "Tokens that each is continued by.", metavar="N", least=2, most=1 << 16)
    temperature: float = option(
        0.8, JOB, "Of the texts that are timed; those that are compared are the likeliest.", least=0, most=100
    )
    reuse: bool = option(
        False, SERVING, "Copy what a prompt shares with an earlier text; each is asked twice here."
    )
    at_once: int = option(1, JOB, "Texts that are timed at the same time.", metavar="N", least=1, most=64)
