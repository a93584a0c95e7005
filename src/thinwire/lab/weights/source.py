"""A model to be packed: its tensors, the other files of its folder, and what a text says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.assets.weights.codes import is_codes
from thinwire.assets.weights.model import Model
from thinwire.assets.weights.moments import Moments
from thinwire.files.checkpoint import folder_of, read_checkpoint
from thinwire.lab.data.corpus import load_corpus
from thinwire.lab.models.families import Conversion, import_transformers, meta_model
from thinwire.lab.models.smollm import smollm_folder
from thinwire.lab.models.source import SMOLLM, ModelSource, config_of, resolve_model, tokenizer_of
from thinwire.lab.models.tokenizer import tokenise
from thinwire.lab.weights.calibration import WINDOW, Calibration, swaps
from thinwire.types import InputError, require

READ, HELDOUT = 16, 4  # windows that moments come from, and that perplexity is of, at most
INFORMED = {"output_loading_info": True}
LONGEST = 1 << 20  # tokens of a text that are looked through
SMALL = 64 << 20  # bytes of another file that goes along
KEPT = frozenset({".json", ".txt", ".model", ".jinja", ".md", ".tiktoken"})
LEGAL = ("LICENSE", "LICENCE", "NOTICE")
TRAINED = ("trainer_state.json",)


@dataclass(frozen=True, eq=False)
class Source:
    """A model as files: its place, tensors by the names in files, and small files that belong to it."""

    name: str
    folder: Path | None
    tensors: Mapping[str, Tensor]
    files: Mapping[str, bytes] = field(default_factory=dict)
    left: tuple[str, ...] = ()  # files that are too large to go along

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())


def read_source(name: str) -> Source:
    """Return the model in a folder, a safetensors file, or of a name. Errors: ``InputError``."""
    place = Path(name).expanduser()
    if name == SMOLLM:
        place = smollm_folder()
    elif not place.exists():
        found = resolve_model(name, None, dropout=None, trial=False).weights
        require(found is not None, InputError, f"{name} has no weights to pack; give a model's folder")
        place = found or place
    tensors = read_checkpoint(place)
    require(bool(tensors), InputError, f"{name} has no tensors; give the folder of a model")
    told = f"{name} holds codes that thinwire packed; give the model that they were made of"
    require(not is_codes(tensors), InputError, told)
    folder = folder_of(place) if place.is_dir() else None
    along = [] if folder is None else [f for f in sorted(folder.iterdir()) if _goes_along(f)]
    files = {f.name: f.read_bytes() for f in along if f.stat().st_size <= SMALL}
    return Source(name, folder, tensors, files, tuple(f.name for f in along if f.name not in files))


def _goes_along(file: Path) -> bool:
    """Say whether a file of a model's folder belongs to the model: no code, no state of its training."""
    kept = file.suffix in KEPT or file.name.startswith(LEGAL)
    left = file.name in TRAINED or file.name.startswith(".") or file.name.endswith(".index.json")
    return kept and not left and file.suffix != ".py" and file.is_file()


class Reading(NamedTuple):
    """A model that reads a text: it, moments and special matrices by names in files, and tokens held out."""

    net: Any
    model: Model
    heldout: Tensor
    tokens: int
    tokenizer: Any

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the model weights, by the names in files: transformers makes its own of them."""
        with _silent():
            made, info = type(self.net).from_pretrained(
                None, config=self.net.config, state_dict=dict(tensors), dtype=torch.float32, **INFORMED
            )
        own = {name: x for name, x in made.state_dict().items() if name not in info["missing_keys"]}
        self.net.load_state_dict(own, strict=False, assign=True)
        self.net.tie_weights()


def read_text_with(source: Source, text: str) -> Reading:
    """Return what a text, by name or path, says of a model's matrices. Errors: ``InputError``."""
    folder = source.folder
    if folder is None:
        raise InputError(f"--calibrate needs a model's folder, and {source.name} is none")
    config_of(folder, source.name)  # what cannot be read is told in a sentence
    net, tokenizer = _loaded(source.name, folder), tokenizer_of(folder)
    read, heldout = windows_of(net, source.name, tokenizer, text)
    calibration = Calibration(net)
    calibration.read(read)
    model = described(source, net, calibration.moments(), names_of(source, net))
    return Reading(net, model, heldout, read.numel(), tokenizer)


def _loaded(name: str, folder: Path) -> Any:
    """Return the causal language model in a folder. Errors: ``InputError``."""
    told = f"--calibrate reads a text with a causal language model, and {name} is none"
    with _silent() as transformers:
        try:
            net, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, **INFORMED
            )
        except (OSError, ValueError, KeyError) as e:
            raise InputError(f"{told} ({' '.join(str(e).split())[:120]}); leave it out") from e
    missing = sorted(info["missing_keys"])
    require(not missing, InputError, f"{told}: it has no {missing[0] if missing else ''}; leave it out")
    return net.eval()


@contextmanager
def _silent() -> Iterator[Any]:
    """Give transformers, without the bars that it draws."""
    transformers = import_transformers()
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        if shown:
            logging.enable_progress_bar()


def windows_of(net: Any, name: str, tokenizer: Any, text: str) -> tuple[Tensor, Tensor]:
    """Return tokens [windows, tokens] from all over a text, and from what of it is held out."""
    corpus, config = load_corpus(text), net.config.get_text_config()
    source = ModelSource(name, config.model_type, config, tokenizer, None)
    size = min(WINDOW, getattr(config, "max_position_embeddings", WINDOW))
    parts = list[Tensor]()
    for documents, most in ((corpus.train, READ), (corpus.heldout, HELDOUT)):
        ids = tokenise(tokenizer, *documents, limit=LONGEST)
        count = len(ids) // size
        told = f"--calibrate {text} has {len(ids)} tokens in one part, and {size} are read at a time"
        require(count > 0, InputError, f"{told}; give a longer text")
        source.check_tokens(ids)
        chosen = torch.linspace(0, count - 1, min(most, count)).long()
        parts.append(ids[: count * size].view(count, size)[chosen])
    return parts[0], parts[1]


def names_of(source: Source, net: Any) -> dict[str, str]:
    """Return the name of a model's parameter by that in files, of those that are the same tensor in both."""
    conversion, found = Conversion(meta_model(net.config)), dict[str, str]()
    for name in source.tensors:
        targets, pattern = conversion.targets(name)
        if pattern is None and targets[0] in conversion.names:
            found[name] = targets[0]
    return found


def described(source: Source, net: Any, moments: Mapping[str, Moments], names: Mapping[str, str]) -> Model:
    """Return a model with moments under the names that its files have."""
    kinds, first = _kinds(net)
    own, swapped, lookups = dict[str, Moments](), set[str](), set[str]()
    for name, target in names.items():
        known = first.get(target, target)
        if known in moments:
            own[name] = moments[known]
            swapped |= {name} if kinds[known] == "swapped" else set()
            lookups |= {name} if kinds[known] == "lookup" else set()
    return Model(source.tensors, own, swapped, lookups)


def _kinds(net: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return how each weight is used, and the first name of each: tied ones have two."""
    names, kinds, first = {id(p): n for n, p in net.named_parameters()}, dict[str, str](), dict[str, str]()
    for place, module in net.named_modules():
        name = names.get(id(getattr(module, "weight", None)))
        if name is not None:
            first[f"{place}.weight"] = name
            kinds[name] = "lookup" if kinds.get(name) == "lookup" else _kind(module)
    return kinds, first


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Embedding):
        return "lookup"
    return "swapped" if swaps(module) else "linear"
