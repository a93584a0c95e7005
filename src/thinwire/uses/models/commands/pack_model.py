"""The part of ``thinwire pack`` and ``unpack`` that is of models."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.runs.machine.standard_streams import print_json, tell
from thinwire.runs.records.folder_lock import holding
from thinwire.runs.terminal.addresses import URL, check_absent
from thinwire.types import InputError, PayloadError, require
from thinwire.uses.packing import PackConfig

if TYPE_CHECKING:
    from thinwire.uses.models.run.record import ModelRecord

SCENES = (".ply", ".spz", ".sog", ".splat", ".json")  # how names of scenes end
WEIGHTS = ".safetensors"
KEPT = ("bits", "codes", "calibration_data", "device", "dtype")  # options in the record, besides the target
WORST = 5  # tensors that are named


def is_model(source: Path) -> bool:
    """Say whether what is to be packed is a model: a folder of one, its weights, or a name.

    >>> is_model(Path("smollm2-135m")), is_model(Path("scene.compressed.ply"))
    (True, False)
    """
    if source.is_dir():
        return not (source / "meta.json").is_file()
    return source.suffix == WEIGHTS or (not source.exists() and source.suffix.lower() not in SCENES)


def pack_model(source: Path, out: Path, config: PackConfig) -> None:
    """Pack a model and say what became of it."""
    # After the checks: a wrong option is refused before torch is even imported.
    from thinwire.uses.models.run.model_folder import published_nbytes, write_packed
    from thinwire.uses.models.run.model_packing import ModelPacking, pack, predicted

    most, shape, report = config.most, config.shape, config.report
    told = f"--codes writes a safetensors file, and {out} is called otherwise; give -o {out.stem}.safetensors"
    require(not config.codes or out.suffix == WEIGHTS, InputError, told)
    base = None if config.base is None else Path(config.base)
    with nullcontext() if report is None else holding(report, "--report"):
        text, where = config.calibration_data, (config.device, config.dtype)
        packed, record = pack(ModelPacking(str(source), most, config.bits, base, text, *where))
        record.packed_nbytes = sent = write_packed(packed, out, config.codes)
        if config.codes:
            sent = published_nbytes(packed)
            over = f", {sent - most} above the target for a packed file" if most and sent > most else ""
            told = f"{out.name} has a byte or two a code; publish sends {sent} bytes of it at first{over}"
            record.notes.append(told)
        if shape is not None:
            record = predicted(record, shape, sent)
        record.config = {"model": str(source), "target": most}
        record.config |= {name: getattr(config, name) for name in KEPT}
        record.config["base"] = base and str(base)
        if report is not None:
            from thinwire.runs.report.page import leave_report
            from thinwire.uses.models.run import cards

            page = leave_report(Path(report), record, cards)
    if config.json:
        print_json(record.to_dict())
        return
    _say(out, record)
    if report is not None:
        tell(f"report: {page}")


def _say(out: Path, record: ModelRecord) -> None:
    tell(f"{record.source}: {len(record.tensors)} tensors, {record.source_nbytes} bytes")
    tell(f"{out}: {record.packed_nbytes} bytes, {record.bits_a_weight:.3f} bits a weight")
    for tensor in sorted(record.tensors, key=lambda t: -t.nbytes)[:WORST]:
        bits = "" if tensor.bits is None else f", {tensor.bits:.2f} bits a weight"
        tell(f"{tensor.name}: {tensor.nbytes} bytes{bits}")
    if record.perplexity is not None:
        told = f"perplexity {record.perplexity:.2f}, of the source {record.perplexity_source or 0:.2f}"
        tell(f"{told}, on {record.tokens_heldout} tokens held out")
    if record.seconds_predicted is not None:
        tell(f"{record.seconds_predicted:.1f} s over the link")
    for note in record.notes:
        tell(f"note: {note}")


def check_folder(source: Path) -> None:
    """Raise ``InputError`` for a folder of scenes, as their trainers leave it, and no model."""
    if not source.is_dir() or any(source.glob(f"*{WEIGHTS}")):
        return
    places = [*source.iterdir(), *source.glob("point_cloud/iteration_*/*")]
    scenes = [file for file in places if file.suffix.lower() in SCENES[:-1] and file.is_file()]
    newest = max(scenes, key=lambda file: file.stat().st_mtime, default=source)
    told = f"{source} is a folder without a model, and a scene is packed from its file; give {newest}"
    require(not scenes, InputError, told)


def check_out(out: str) -> None:
    """Raise ``InputError`` where a packed model would not be written to a file."""
    told = f"{out} is no file here; a model is packed into a file: name one"
    require(not URL.match(out) and not out.endswith(("/", os.sep)), InputError, told)


def check_unpacked(source: Path) -> None:
    """Raise ``InputError`` where what is to be packed was packed before."""
    packed = source.suffix.lower() not in SCENES and is_packed_model(source)
    told = f"{source} is a packed model; give the model it was made of, or thinwire unpack it first"
    require(not packed, InputError, told)


def is_packed_model(source: Path) -> bool:
    """Say whether a file is a packed model, or a checkpoint of codes, by how it begins or is called."""
    if source.suffix == WEIGHTS:
        return True
    if not source.is_file():
        return False
    from thinwire.uses.models.packed_model import is_model as begins_so

    with source.open("rb") as file:
        return begins_so(file.read(256))


def unpack_model(source: Path, out: Path, force: bool, code: bool) -> None:
    """Write the model that a packed one stands for: a folder, or a file called ``.safetensors``."""
    told = f"{out} is a folder; give the name of a file in it, or one that does not end in {WEIGHTS}"
    require(not (out.suffix == WEIGHTS and out.is_dir()), InputError, told)
    told = f"cannot write {out}: {out.parent} is no folder; make it"
    require(out.absolute().parent.is_dir(), InputError, told)
    check_absent(out, force)
    from thinwire.uses.models.run.model_folder import loads_as, read_packed, told_of_left, write_unpacked

    require(source.is_file(), InputError, f"{source} is not there; give what thinwire pack wrote")
    packed = read_packed(source)
    try:
        made = write_unpacked(packed, out, code)
    except PayloadError as e:  # that of one tensor
        raise PayloadError(f"{source}: {e}") from e
    tell(f"{out}: a model of {made.tensors} tensors{loads_as(made)}")
    for note in told_of_left(made.left):
        tell(f"note: {note}")
