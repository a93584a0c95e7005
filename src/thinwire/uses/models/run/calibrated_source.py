"""A model to be packed: its tensors, the other files of its folder, and what a text says of it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.files.base import at_home
from thinwire.files.checkpoint import SINGLE, SUFFIX, Stored, files_of, folder_of, write_checkpoint
from thinwire.runs.data.corpus import load_corpus
from thinwire.runs.machine.compute import ON_CPU, Compute
from thinwire.runs.machine.devices import check_room, device_trouble
from thinwire.runs.models.families import Conversion, import_transformers, meta_model
from thinwire.runs.models.model_source import SMOLLM, check_tokens, resolve_model, tokenizer_of
from thinwire.runs.models.smollm import smollm_folder
from thinwire.runs.models.tokenizer import tokenise
from thinwire.types import WRONG_VALUES, InputError, require
from thinwire.uses.models.codes import is_codes
from thinwire.uses.models.companions import (
    ADAPTER,
    SHARDS,
    SMALL,
    is_code,
    is_data,
    is_plain,
    wants_code,
    weights_name,
)
from thinwire.uses.models.run.calibration import WINDOW, Calibration, longest_of, swaps
from thinwire.uses.models.run.layerwise import compute_wide, perplexity
from thinwire.uses.models.run.scratch_files import Waiting
from thinwire.uses.models.weights_to_pack import Model

READ, HELDOUT = 16, 4  # windows that moments come from, and that perplexity is of, at most
ADAPTER_WEIGHTS = weights_name({ADAPTER: b""})
WITHOUT = "pack it without --calibration-data"
LONGEST = 1 << 20  # tokens of a text that are looked through


@dataclass(frozen=True, eq=False)
class Source:
    """A model as files: its place, tensors by the names in files, and small files that belong to it."""

    name: str
    folder: Path | None
    tensors: Mapping[str, Tensor]
    files: Mapping[str, bytes] = field(default_factory=dict)
    left: tuple[str, ...] = ()  # what of its folder does not go along

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())


def read_source(name: str) -> Source:
    """Return the model in a folder, a safetensors file, or of a name. Errors: ``InputError``."""
    place = at_home(name)
    if name == SMOLLM:
        place = smollm_folder()
    elif not place.exists():
        found = resolve_model(name, None, dropout=None, trial=False).weights
        require(found is not None, InputError, f"{name} has no weights to pack; give a model's folder")
        place = found or place
    place = _adapter_in(place)
    weights = files_of(place)
    tensors = Stored(place)
    require(bool(tensors), InputError, f"{name} has no tensors; give the folder of a model")
    told = f"{name} holds codes that thinwire packed; give the model that they were made of"
    require(not is_codes(tensors), InputError, told)
    if place.is_file() and not (place.name == ADAPTER_WEIGHTS and (place.parent / ADAPTER).is_file()):
        return Source(name, None, tensors)
    folder = folder_of(place) if place.is_dir() else place.parent
    files, left = files_along(folder, weights, SMALL)
    return Source(name, folder, tensors, files, tuple(left))


def _adapter_in(place: Path) -> Path:
    """Return the file of an adapter's folder, as peft calls it; any other place as it is."""
    if not (place / ADAPTER).is_file():
        return place
    file = place / ADAPTER_WEIGHTS
    told = f"{place} is an adapter's folder without {file.name}; save the adapter with save_pretrained"
    require(file.is_file(), InputError, told)
    return file


class CalibratedModel(NamedTuple):
    """A model that reads a text: it, moments and special matrices by names in files, and tokens held out."""

    net: Any
    model: Model
    heldout: Tensor
    tokens: int
    tokenizer: Any
    names: Mapping[str, str]  # of the model's own parameters, by those in files
    folder: Path
    compute: Compute = ON_CPU

    def resting(self) -> CalibratedModel:
        """Return it without the net, which takes as much memory as what is coded meanwhile."""
        return self._replace(net=None)

    def awake(self) -> CalibratedModel:
        """Return it with the net of the folder again, and without what its text said of weights."""
        net = _loaded(self.folder, kept_in(self.model.tensors), self.compute)
        return self._replace(net=net, model=Model({}))

    def perplexity(self) -> float:
        """Return the perplexity of the tokens held out, computed in the dtype of compute."""
        with self.compute.autocast():
            return perplexity(self.net, self.heldout)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the model weights, by the names in files."""
        if set(tensors) <= set(self.names):
            own = self.net.state_dict()
            for name, x in tensors.items():
                own[self.names[name]].copy_(x)
        else:  # some are put together of several, as experts are: transformers knows how
            again = _again(self.folder, tensors, kept_in(tensors))
            self.net.load_state_dict(again.state_dict())
        self.net.tie_weights()


def _again(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """Return the model of a folder with other tensors."""
    with tempfile.TemporaryDirectory() as work:
        for file in folder.glob("*.json"):
            if not file.name.endswith(f"{SUFFIX}.index.json"):
                shutil.copy(file, work)
        write_checkpoint(Path(work) / SINGLE, dict(tensors), {})
        return _loaded(Path(work), dtype, ON_CPU)


def read_text_with(source: Source, text: str, compute: Compute = ON_CPU) -> CalibratedModel:
    """Return what a text, by name or path, says of a model's matrices. Errors: ``InputError``.

    The model runs on the device of ``compute``; what is said of its matrices is on the processor.
    """
    if source.folder is None:
        raise InputError(f"--calibration-data needs a model's folder, and {source.name} is none")
    Model(source.tensors)  # before what takes long: tensors that cannot be packed are refused
    tokenizer = tokenizer_of(source.folder, source.name)
    check_causal(source.folder, source.name)
    net = _loaded(source.folder, kept_in(source.tensors), compute)
    read, heldout = windows_of(net, tokenizer, text, source.name)
    calibration = Calibration(net)
    try:
        check_looks_back(net, read[0].to(compute.device), source.name)
        with compute.autocast():
            calibration.read(read)
    except InputError:
        raise
    except WRONG_VALUES as e:  # it loads and cannot run: more experts a token than there are, say
        if (trouble := device_trouble(e)) is not None:
            raise trouble from e
        told = f"{source.name} cannot read a text: {_why(e)}; repair it, or {WITHOUT}"
        raise InputError(told) from e
    names = names_of(source, net)
    model = replace(described(source, net, calibration.moments(), names), device=compute.device)
    return CalibratedModel(net, model, heldout, read.numel(), tokenizer, names, source.folder, compute)


def kept_in(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the type that a model is kept in: that of its tensors where all are of one with 16 bits."""
    found = {x.dtype for x in tensors.values() if x.is_floating_point()}
    return found.pop() if found in ({torch.bfloat16}, {torch.float16}) else torch.float32


def _loaded(folder: Path, dtype: torch.dtype, compute: Compute) -> Any:
    """Return the model of a folder, without the bars that transformers draws: it computes in float32."""
    transformers = import_transformers()
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        auto = transformers.AutoModelForCausalLM
        net, found = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except (*WRONG_VALUES, AssertionError, OSError) as e:
        raise InputError(f"transformers cannot load {folder}: {_why(e)}; {WITHOUT}") from e
    finally:
        if shown:
            logging.enable_progress_bar()
    absent = sorted(found["missing_keys"])
    told = f"{folder} has no {absent[:1]}, which its model needs; repair it, or {WITHOUT}"
    require(not absent, InputError, told)
    device = compute.device
    check_room(device, sum(p.numel() * p.element_size() for p in net.parameters()), f"the model in {folder}")
    net.to(device)
    compute_wide(net)
    return net.eval()


def _why(error: Exception) -> str:
    """Return the first line of what a library says."""
    return str(error).strip().partition("\n")[0][:200]


def windows_of(net: Any, tokenizer: Any, text: str, name: str) -> tuple[Tensor, Tensor]:
    """Return tokens [windows, tokens] from all over a text, and from what of it is held out."""
    corpus = load_corpus(text)
    size = min(WINDOW, longest_of(net))
    known = net.get_input_embeddings().num_embeddings
    parts = list[Tensor]()
    for documents, most in ((corpus.train, READ), (corpus.heldout, HELDOUT)):
        ids = tokenise(tokenizer, *documents, limit=LONGEST)
        check_tokens(ids, known, tokenizer, name)
        count = len(ids) // size
        told = f"--calibration-data {text} has {len(ids)} tokens in one part, and {size} are read at a time"
        require(count > 0, InputError, f"{told}; give a longer text")
        chosen = torch.linspace(0, count - 1, min(most, count)).long()
        parts.append(ids[: count * size].view(count, size)[chosen])
    return parts[0], parts[1]


def names_of(source: Source, net: Any) -> dict[str, str]:
    """Return the name of a model's parameter by that in files, of those that are the same tensor in both."""
    found, own = dict[str, str](), net.state_dict()
    try:
        conversion = Conversion(meta_model(net.config))
    except InputError:  # a family that thinwire does not split: what has the same name is all that is known
        return {name: name for name in source.tensors if name in own}
    for name in source.tensors:
        targets, pattern = conversion.targets(name)
        if pattern is None and targets[0] in conversion.names:
            found[name] = targets[0]
    return found


def described(source: Source, net: Any, moments: Waiting, names: Mapping[str, str]) -> Model:
    """Return a model with moments under the names that its files have."""
    kinds, first = _kinds(net)
    own, swapped, lookups = dict[str, str](), set[str](), set[str]()
    for name, target in names.items():
        known = first.get(target, target)
        if known in moments:
            own[name] = known
            swapped |= {name} if kinds[known] == "swapped" else set()
            lookups |= {name} if kinds[known] == "lookup" else set()
    return Model(source.tensors, moments.under(own), swapped, lookups)


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


TEMPLATES = "additional_chat_templates"  # a folder that transformers writes
MODULES = "modules.json"  # of sentence-transformers: its parts have folders of their own
STATES = frozenset({"trainer_state.json", "optimizer.json"})  # of a training


def files_along(folder: Path, weights: list[Path], most: int = SMALL) -> tuple[dict[str, bytes], list[str]]:
    """Return the files that belong to a model, by their names in its folder, and those that stay there.

    ``weights``: the files that its tensors are in, which are neither. Hidden files stay and are not named.
    """
    every, left = _all(folder), list[str]()
    data = {name: file for name, file in every.items() if _belongs(name, file) and file not in weights}
    found = {name: file.read_bytes() for name, file in data.items() if _fits(file, most)}
    code = wants_code(found)
    for name, file in every.items():
        if name in found or file in weights or name.endswith(SHARDS):
            continue
        if code and is_code(name) and "/" not in name and is_plain(name) and _fits(file, most):
            found[name] = file.read_bytes()
        else:
            left.append(f"{name} (above {most >> 20} MiB)" if name in data else name)
    return found, left


def _fits(file: Path, most: int) -> bool:
    return file.stat().st_size <= most


def _belongs(name: str, file: Path) -> bool:
    return file.is_file() and is_data(name) and is_plain(name) and file.name not in STATES


def _all(folder: Path) -> dict[str, Path]:
    """Return the files of a model's folder, those of folders that belong to it, and other folders as such."""
    found = dict[str, Path]()
    parts = _parts(folder)
    for file in sorted(folder.iterdir()):
        if file.name.startswith("."):
            continue
        if file.is_dir() and file.name in parts:
            found |= {f"{file.name}/{name}": own for name, own in _below(file)}
        else:
            found[file.name + "/" * file.is_dir()] = file
    return found


def _below(folder: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield file.relative_to(folder).as_posix(), file


def _parts(folder: Path) -> set[str]:
    """Return the folders below that belong to the model."""
    try:
        modules = json.loads((folder / MODULES).read_bytes())
        paths = [m["path"] for m in modules if isinstance(m, Mapping)]
    except (OSError, *WRONG_VALUES):
        paths = []
    return {TEMPLATES, *(path.split("/")[0] for path in paths if isinstance(path, str) and path)}


FEW = 16  # tokens that are read
NEAR = 1e-5  # of the largest logit: rounding differs with the other tokens of a batch of experts
REMEDY = "--calibration-data is for those alone: pack it without"


def check_causal(folder: Path, name: str) -> None:
    """Raise ``InputError`` where a config names a model of another kind: an encoder, a classifier, say.

    ``AutoModelForCausalLM`` would load many of them, with a head that they never learned or of another use.
    """
    transformers = import_transformers()
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    own = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    named = [str(said) for said in (config.architectures or ())]
    known = {c.__name__ for c in (own if isinstance(own, tuple) else (own,)) if c is not None}
    # Of what reads pictures or sounds too, a text says nothing of many weights.
    causal = bool(known) and not config.is_encoder_decoder and config.get_text_config() is config
    causal = causal and all(_is_one_of(said, known, transformers) for said in named)
    what = named[0] if named else "model"
    told = f"{name} is a {what} of type {config.model_type!r}, and no causal language model of text alone"
    require(causal, InputError, f"{told}; {REMEDY}")


def _is_one_of(said: str, known: set[str], transformers: Any) -> bool:
    """Say whether a class is one of those known, or an older name of one."""
    alike = said.casefold() in {one.casefold() for one in known}
    return alike or (said.endswith("ForCausalLM") and not hasattr(transformers, said))


@torch.no_grad()
def check_looks_back(net: Any, window: Tensor, name: str) -> None:
    """Raise ``InputError`` where what a model says of tokens [tokens] depends on later ones."""
    ids, other = window[:FEW], window[:FEW].clone()
    half = len(ids) // 2
    other[half:] = (ids[half:] + 1) % net.get_input_embeddings().num_embeddings
    said, again = (net(input_ids=x[None], use_cache=False).logits[0, :half].float() for x in (ids, other))
    off = (said - again).abs().max() if half else torch.zeros(())
    back = bool(off <= NEAR * said.abs().max()) if said.isfinite().all() else True
    told = f"{name} is no causal language model: what it says of a word depends on words behind it"
    require(back, InputError, f"{told}; {REMEDY}")
