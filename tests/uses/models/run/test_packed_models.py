"""Models packed by the command: they load into transformers, keep their target, and travel as patches."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from packed_models import SEQ, learned, train
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.files.checkpoint import read_checkpoint, write_checkpoint
from thinwire.links.shape import LinkShape
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.models.about_packed_model import describe
from thinwire.uses.models.run.model_folder import read_packed
from thinwire.uses.models.run.packing_demo import DemoModel, run
from thinwire.uses.models.run.record import ModelRecord

pytest.importorskip("zstandard")
pytestmark = pytest.mark.usefixtures("one_thread")


def invoke(*arguments: object):
    return CliRunner(env={"NO_COLOR": "1", "TERM": "dumb"}).invoke(app, [str(a) for a in arguments])


def packed(*arguments: object) -> ModelRecord:
    result = invoke("pack", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return ModelRecord.from_dict(json.loads(result.stdout))


def refused(*arguments: object, code: int = 2) -> str:
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    (line,) = result.stderr.strip().splitlines()
    return str(line)


def loss(folder: Path, ids: torch.Tensor) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    batch = ids[: len(ids) // SEQ * SEQ].view(-1, SEQ)
    with torch.no_grad():
        return float(model(input_ids=batch, labels=batch).loss)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory):
    """Return a folder with a model and its text, the model, and its tokens."""
    patch = pytest.MonkeyPatch()
    patch.setenv("THINWIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
    folder = tmp_path_factory.mktemp("model")
    model, ids = learned(folder)
    yield folder, model, ids
    patch.undo()


def test_a_text_makes_the_same_bytes_worth_more(home, tmp_path: Path) -> None:
    folder, _, ids = home
    found = {}
    for name, more in {"seen": ["--calibration-data", folder / "text.md"], "blind": []}.items():
        out = tmp_path / f"{name}.tw"
        record = packed(folder, "-o", out, "--target", "36kB", *more)
        assert out.stat().st_size == record.packed_nbytes <= 36_000 == record.target_nbytes
        assert invoke("unpack", out, "-o", tmp_path / name).exit_code == 0
        found[name] = loss(tmp_path / name, ids)
    was = loss(folder, ids)
    assert found["blind"] - was > 0.002 and found["seen"] - was < 0.5 * (found["blind"] - was)
    assert record.notes and "--calibration-data" in record.notes[0]


def test_the_record_says_what_was_lost_and_where_the_bytes_are(home, tmp_path: Path) -> None:
    folder, _, _ = home
    out = tmp_path / "m.tw"
    text = ["--calibration-data", folder / "text.md"]
    record = packed(folder, "-o", out, "--seconds", 2, "--link", "160kbit,100ms", *text)
    assert record.target_nbytes == 38_000 and record.packed_nbytes <= 38_000
    assert record.seconds_predicted is not None and 1.5 < record.seconds_predicted <= 2
    assert record.perplexity is not None and record.perplexity_source is not None
    assert 1 < record.perplexity_source < record.perplexity * 1.05
    sizes = {t.name: t.nbytes for t in record.tensors}
    assert set(sizes) == set(read_checkpoint(folder)) and sum(sizes.values()) < record.packed_nbytes
    assert math.isclose(record.bits_a_weight, 8 * sum(sizes.values()) / 80_960)
    seen = describe(out, check=True)
    assert {t["name"]: t["nbytes"] for t in seen["tensors"]} == sizes
    assert seen["nbytes"] == record.packed_nbytes and seen["bits_a_weight"] == round(record.bits_a_weight, 3)


def test_matrices_that_are_turned_over_and_tied_are_coded_once(tmp_path: Path) -> None:
    """GPT-2 keeps its matrices turned over, and has a head that is its embedding."""
    text = tmp_path / "text.md"
    folder = tmp_path / "gpt2"
    _, ids = learned(folder, kind="gpt2", steps=20)
    text.write_text((folder / "text.md").read_text())
    record = packed(folder, "-o", tmp_path / "m.tw", "--target", "60kB", "--calibration-data", text)
    entries = read_packed(tmp_path / "m.tw").entries
    turned = {name for name, entry in entries.items() if entry.about.get("swapped")}
    assert {name.split(".")[-2] for name in turned} == {"c_attn", "c_proj", "c_fc"}
    assert record.perplexity is not None and record.perplexity_source is not None
    assert record.perplexity < 1.3 * record.perplexity_source
    assert invoke("unpack", tmp_path / "m.tw", "-o", tmp_path / "back").exit_code == 0
    assert loss(tmp_path / "back", ids) < loss(folder, ids) + 0.3


@pytest.mark.parametrize("kind", ("mixtral", "gptj", "opt"))
def test_the_perplexity_is_that_of_what_unpacks_whatever_the_family(tmp_path: Path, kind: str) -> None:
    """Experts have other names in files; some families cannot be split, which packing need not."""
    folder, back = tmp_path / "model", tmp_path / "back"
    learned(folder, kind, steps=12)
    text = ["--calibration-data", folder / "text.md"]
    record = packed(folder, "-o", tmp_path / "m.tw", "--bits", 3, *text)
    assert invoke("unpack", tmp_path / "m.tw", "-o", back).exit_code == 0
    again = packed(back, "-o", tmp_path / "n.tw", "--target", "1GB", *text)
    assert again.perplexity_source == pytest.approx(record.perplexity, rel=1e-4)
    assert record.perplexity != pytest.approx(record.perplexity_source, rel=1e-4)


def test_codes_say_what_they_take_on_disk_and_on_the_way(home, tmp_path: Path) -> None:
    folder, _, _ = home
    link = ["--seconds", 2, "--link", "160kbit,100ms"]
    record = packed(folder, "-o", tmp_path / "m.safetensors", "--codes", *link)
    assert record.packed_nbytes > 80_960 and any("publish" in note for note in record.notes)
    assert record.seconds_predicted is not None and record.seconds_predicted <= 2
    assert "safetensors" in refused("pack", folder, "-o", tmp_path / "m.tw", "--codes", *link)


def test_inspect_notices_a_bit_that_fell_over(home, tmp_path: Path) -> None:
    folder, _, _ = home
    packed(folder, "-o", tmp_path / "m.tw", "--bits", 4)
    data = bytearray((tmp_path / "m.tw").read_bytes())
    data[-1000] ^= 4
    (tmp_path / "m.tw").write_bytes(data)
    assert invoke("inspect", tmp_path / "m.tw", "--check").exit_code == 3


def test_fixed_widths_and_lossless(home, tmp_path: Path) -> None:
    folder, _, ids = home
    record = packed(folder, "-o", tmp_path / "b.tw", "--bits", 4, "--calibration-data", folder / "text.md")
    assert {t.kind for t in record.tensors} == {"groups", "plain"} and record.target_bits == 4
    assert invoke("unpack", tmp_path / "b.tw", "-o", tmp_path / "b").exit_code == 0
    assert loss(tmp_path / "b", ids) < loss(folder, ids) + 0.3
    whole = packed(folder, "-o", tmp_path / "w.tw", "--target", "9MB")
    assert whole.lossless and any("without any loss" in note for note in whole.notes)
    assert invoke("unpack", tmp_path / "w.tw", "-o", tmp_path / "w").exit_code == 0
    first, back = read_checkpoint(folder), read_checkpoint(tmp_path / "w")
    assert all(torch.equal(x, back[name]) for name, x in first.items())


def test_a_fine_tuned_version_is_a_small_patch(home, tmp_path: Path) -> None:
    folder, _, ids = home
    text = ["--calibration-data", folder / "text.md"]
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    packed(folder, "-o", old, "--target", "35kB", "--codes", *text)
    tuned = tmp_path / "tuned"
    shutil.copytree(folder, tuned)
    later = transformers.AutoModelForCausalLM.from_pretrained(folder)
    train(later.train(), ids, 3, rate=1e-4)
    later.save_pretrained(tuned)
    (tuned / "text.md").unlink()  # a file of the first version alone, and one that is longer now
    (tuned / "config.json").write_text(json.dumps(json.loads((tuned / "config.json").read_text()), indent=3))
    packed(tuned, "-o", new, "--base", old, "--codes", *text)
    with Publisher(read_checkpoint(old)) as publisher, Follower(publisher.host, publisher.port) as follower:
        publisher.publish()
        assert follower.wait(1, timeout=60).number == 1
        first = follower.status.nbytes
        publisher.publish(tensors=read_checkpoint(new))
        assert follower.wait(2, timeout=60).number == 2
        patch = follower.status.nbytes - first
        write_checkpoint(tmp_path / "came.safetensors", follower.tensors(), {})
    assert first < 45_000 and patch < first / 5
    assert invoke("unpack", tmp_path / "came.safetensors", "-o", tmp_path / "came").exit_code == 0
    assert loss(tmp_path / "came", ids) < loss(tuned, ids) + 0.2
    assert {f.name for f in (tmp_path / "came").iterdir()} >= {"text.md", "config.json"}


def test_the_demo_leaves_a_file_and_a_record_and_says_three_sentences(home, tmp_path: Path) -> None:
    folder, _, _ = home
    told: list[str] = []
    asked = DemoModel(
        tmp_path, LinkShape.parse("1mbit"), str(folder), str(folder / "text.md"), 3.5, "the a of"
    )
    record = run(asked, told.append)
    assert ModelRecord.from_dict(json.loads((tmp_path / "run.json").read_text())) == record
    assert (tmp_path / "model.tw").stat().st_size == record.packed_nbytes <= 3.5 * 80_960 / 8
    assert sum(line.startswith("  the a of") for line in told) == 3
    assert record.perplexity is not None and record.rivals[0].perplexity is not None


def test_bad_input_is_one_sentence_and_leaves_nothing(home, tmp_path: Path) -> None:
    folder, _, _ = home
    out = tmp_path / "m.tw"
    short = tmp_path / "short.txt"
    short.write_text("too short\nto be read\n")
    bad = tmp_path / "bad.safetensors"
    write_checkpoint(bad, {"layer.w": torch.full((40, 40), torch.nan)}, {})
    told = {
        "give one target": ["pack", folder, "-o", out],
        "are for scenes": ["pack", folder, "-o", out, "--quality", "40dB"],
        "are for models": ["pack", tmp_path / "scene.ply", "-o", out, "--target", "1MB", "--codes"],
        "give a longer text": ["pack", folder, "-o", out, "--target", "1MB", "--calibration-data", short],
        "layer.w has a NaN": ["pack", bad, "-o", out, "--target", "1MB"],
        "bytes at least, and 900 are asked for": ["pack", folder, "-o", out, "--target", "900b"],
        "is not in 2..9": ["pack", folder, "-o", out, "--bits", 1],
        "old.tw is not there": ["pack", folder, "-o", out, "--base", tmp_path / "old.tw"],
        "is no packed model": ["unpack", bad, "-o", tmp_path / "back"],
    }
    for sentence, arguments in told.items():
        assert sentence in refused(*arguments)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["bad.safetensors", "short.txt"]
    out.write_bytes(b"x")
    assert "give --force" in refused("pack", folder, "-o", out, "--target", "30kB")
    assert out.read_bytes() == b"x"


def test_a_folder_that_transformers_does_not_load_whole_or_run_is_refused(home, tmp_path: Path) -> None:
    lacking, strange = (shutil.copytree(home[0], tmp_path / name) for name in ("lacking", "strange"))
    tensors = read_checkpoint(lacking)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    write_checkpoint(lacking / "model.safetensors", tensors, {})
    about = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(about | {"model_type": "t5"}))
    arguments = ["-o", tmp_path / "m.tw", "--target", "30kB", "--calibration-data", home[0] / "text.md"]
    assert "up_proj.weight'], which its model needs" in refused("pack", lacking, *arguments)
    assert "of type 't5', and no causal language model" in refused("pack", strange, *arguments)
    kept = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "num_hidden_layers")
    sizes = {k: about[k] for k in kept} | {"num_attention_heads": 4, "num_key_value_heads": 4}
    greedy = transformers.MixtralConfig(**sizes, num_local_experts=2, num_experts_per_tok=3)
    transformers.MixtralForCausalLM(greedy).save_pretrained(strange)
    assert "strange cannot read a text" in refused("pack", strange, *arguments)
    assert packed(lacking, *arguments[:2], "--bits", 4).lossless is False


def test_a_cut_packed_file_leaves_no_folder(home, tmp_path: Path) -> None:
    folder, _, _ = home
    packed(folder, "-o", tmp_path / "m.tw", "--bits", 4)
    data = (tmp_path / "m.tw").read_bytes()
    (tmp_path / "m.tw").write_bytes(data[:-100])
    for what in (["unpack", tmp_path / "m.tw", "-o", tmp_path / "back"], ["inspect", tmp_path / "m.tw"]):
        line = refused(*what, code=3)
        assert f"{tmp_path / 'm.tw'}: {len(data) - 100} bytes, and" in line and "was cut short" in line
    assert [f.name for f in tmp_path.iterdir()] == ["m.tw"]


def test_codes_are_shown_as_such_and_wrong_places_are_told(home, tmp_path: Path) -> None:
    folder, file, codes = home[0], tmp_path / "m.tw", tmp_path / "m.safetensors"
    record = packed(folder, "-o", file, "--bits", 3)
    packed(folder, "-o", codes, "--bits", 3, "--codes")
    shown = json.loads(invoke("inspect", codes, "--json").stdout)
    assert shown["holds"] == "codes of a packed model" and shown["nbytes"] == codes.stat().st_size
    assert shown["bits_a_weight"] == round(record.bits_a_weight, 3)
    assert shown["tensors"] == describe(file, check=False)["tensors"]
    place = tmp_path / "d.safetensors"
    place.mkdir()
    assert "is a folder" in refused("unpack", file, "-o", place, "--force")
    assert "into a file" in refused("pack", folder, "-o", "s3://bucket/m.tw", "--bits", 3)
    assert "is a packed model" in refused("pack", file, "-o", tmp_path / "n.tw", "--target", "9kB")
    assert "is a packed model" in refused("view", file, "-o", tmp_path / "page.html")
