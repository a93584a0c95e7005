"""A fine-tuned version of a packed model as a patch: ``make bench-model-versions``.

SmolLM2-135M is packed to 3 bits a weight as codes, by what Shakespeare says of it, and published to a
follower over loopback. Then it learns from the same text, is packed like the first version, and published
again. The patch stands beside a second version packed anew. Perplexity is on what of the text is held out.
Writes ``bench/results/versions.json``. Ten minutes on two slow cores.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from bench.study.cells import RESULTS, made_by
from bench.study.tables import Draw, columns
from thinwire.runs.data.corpus import load_corpus
from thinwire.runs.models.model_source import SMOLLM
from thinwire.runs.models.tokenizer import tokenise
from thinwire.runs.records.writer import write_json
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.models.budgets import like, to_budget
from thinwire.uses.models.codes import code_tensors, from_code_tensors
from thinwire.uses.models.entry import unpack_entry
from thinwire.uses.models.packed_model import PackedModel, write_model
from thinwire.uses.models.run.calibrated_source import CalibratedModel, read_source, read_text_with
from thinwire.uses.models.run.layerwise import perplexity
from thinwire.uses.models.run.model_folder import unpacked
from thinwire.uses.models.run.model_packing import Size
from thinwire.uses.models.tensors import Stepped

RESULT = RESULTS / "versions.json"
TEXT, BITS = "shakespeare", 3
STEPS, BATCH, SEQ, RATE = 40, 4, 256, 1e-5
PATIENCE = 300.0  # seconds that a follower may take for a version


def learn(reading: CalibratedModel) -> None:
    """Train the model of a reading for some steps on the text that it has read."""
    ids = tokenise(reading.tokenizer, *load_corpus(TEXT).train)
    draw, net = torch.Generator().manual_seed(0), reading.net
    net.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(STEPS):
        starts = torch.randint(len(ids) - SEQ, (BATCH,), generator=draw).tolist()
        batch = torch.stack([ids[at : at + SEQ] for at in starts])
        loss = net(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, round(float(loss), 3), flush=True)
    net.requires_grad_(False).eval()


def told(reading: CalibratedModel, packed: PackedModel) -> dict[str, Any]:
    """Return the bytes of a packed model's file, and how well it tells the text."""
    reading.put(unpacked(packed))
    return {"nbytes": len(write_model(packed)), "perplexity": perplexity(reading.net, reading.heldout)}


def moved(old: PackedModel, new: PackedModel) -> float:
    """Return the share of codes that are others."""
    others = total = 0
    for name, entry in old.entries.items():
        if entry.kind == Stepped.kind:
            a, b = (unpack_entry(m.entries[name], name).codes for m in (old, new))  # type: ignore[union-attr]
            others, total = others + int((a != b).sum()), total + a.numel()
    return others / total


def carried(versions: list[PackedModel]) -> tuple[list[int], PackedModel]:
    """Publish versions to a follower over loopback; return the bytes of each, and what the follower has."""
    nbytes = list[int]()
    first, *rest = [code_tensors(v) for v in versions]
    with Publisher(first) as publisher, Follower(publisher.host, publisher.port) as follower:
        for number, tensors in enumerate([first, *rest], 1):
            publisher.publish(tensors=tensors)
            if follower.wait(number, timeout=PATIENCE).number != number:
                raise SystemExit(f"version {number} did not come within {PATIENCE:g} seconds")
            nbytes.append(follower.status.nbytes - sum(nbytes))
        return nbytes, from_code_tensors(follower.tensors())


def measure() -> dict[str, Any]:
    """Return the figures of both versions."""
    source = read_source(SMOLLM)
    reading = read_text_with(source, TEXT)
    most = BITS * sum(x.numel() for x in source.tensors.values()) // 8
    found: dict[str, Any] = {"source": {"nbytes": source.nbytes, "perplexity": _ppl(reading)}}
    old = PackedModel(to_budget(reading.model, most, Size(source.files)), source.files)
    found["first"] = told(reading, old)
    reading.put(source.tensors)
    learn(reading)
    found["tuned"] = {"nbytes": source.nbytes, "perplexity": _ppl(reading)}
    with tempfile.TemporaryDirectory() as folder:
        reading.net.save_pretrained(folder)
        reading.tokenizer.save_pretrained(folder)
        again = read_source(folder)
        second = read_text_with(again, TEXT)
        new = PackedModel(like(second.model, old.entries).entries, {**old.files, **again.files})
        found["like"] = told(second, new)
        anew = PackedModel(to_budget(second.model, most, Size(again.files)), again.files)
        found["anew"] = told(second, anew)
        (keyframe, patch), came = carried([old, new])
        found["followed"] = told(second, came)
    return found | {"keyframe": keyframe, "patch": patch, "moved": moved(old, new)}


def _ppl(reading: CalibratedModel) -> float:
    return perplexity(reading.net, reading.heldout)


VERSIONS = (  # a model, the one that it learned to be, and how the second comes to who has the first
    ("first, as it was", "source", "source"),
    ("first, packed", "first", "first"),
    ("second, as it was", "tuned", "tuned"),
    ("second, packed anew", "anew", "anew"),
    ("second, a patch of the first, `--base`", "patch", "followed"),
)
table = columns(
    lambda found: (
        {"name": n, "sent": found[s], "perplexity": found[p]["perplexity"]} for n, s, p in VERSIONS
    ),
    ("version", "{name}"),
    (
        "bytes",
        lambda r: f"{(r['sent'] if isinstance(r['sent'], int) else r['sent']['nbytes']) / 1e6:,.1f} MB",
    ),
    ("perplexity", "{perplexity:.1f}"),
)
TABLES: dict[str, Draw] = {"versions": table}


def main() -> None:
    found = measure()
    about = {"steps": STEPS, "batch": BATCH, "seq": SEQ, "rate": RATE, "bits": BITS, "text": TEXT}
    write_json(RESULT, found | {"job": about, "made": made_by()})


if __name__ == "__main__":
    main()
