"""``thinwire plan-serving``: machines are timed, files go from one to another, wrong words are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from commanded import invoke

from thinwire.runs.models import cuts
from thinwire.uses.serving.planning import stage_timing

transformers = pytest.importorskip("transformers")
SMALL = ("--prompt-tokens", "24", "--tokens", "8", "--chunk", "16", "--cache", "64", "--dtype", "fp32")
LINK = ("--link", "20mbit,20ms")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    return tiny_models.write_llama(tmp_path_factory.mktemp("planned"), tiny_tokenizer, 10) / "model"


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "SPAN", 0.0)
    monkeypatch.setattr(stage_timing, "SEEN", 16)  # longer prompts are taken to cost in line with it


def plan(model: Path, *arguments: object) -> tuple[int, str, str]:
    result = invoke("plan-serving", "--model", model, *SMALL, *arguments, COLUMNS="160")
    return result.exit_code, result.stdout, result.stderr


def test_a_machine_measured_elsewhere_takes_part(place: Path, tmp_path: Path) -> None:
    code, out, err = plan(place, "--measure")
    assert code == 0, err
    measured = json.loads(out)
    assert measured["cached"] == 2 * 2 * 8 * 4 and measured["device"] == "cpu"
    (tmp_path / "attic.json").write_text(json.dumps(measured | {"memory": 1e9}))
    far = ("--link", "20mbit,500ms", "--right-drafts", "0.8", "--json")
    code, out, err = plan(place, *far, "--machine", tmp_path / "attic.json")
    assert code == 0, err
    found = json.loads(out)
    assert {(way["recipe"], way["drafts"] > 0) for way in found["stages"]} >= {
        (recipe, drafts) for recipe in ("exact", "bf16", "thinwire") for drafts in (False, True)
    }
    assert all(sum(way["cut"]) == 4 for way in found["stages"]) and len(found["needs"]) == 2
    plain = [way for way in found["stages"] if not way["drafts"]]
    assert all(way["tokens_per_second"] < 1 for way in plain)  # a trip takes that long at least
    assert found["one_is_faster"] and found["alone"] in ("machine 1", "machine 2") and not found["experts"]


def test_the_table_says_which_is_faster_and_how_to_start(place: Path) -> None:
    longer = ("--prompt-tokens", "200", "--cache", "256")
    code, out, err = plan(place, *LINK, *longer, "--machine", "speed=0.5,memory=4", "--machine", "speed=2")
    assert code == 0, err
    assert "One machine is faster: machine " in out and "machine 3:" in out
    (start,) = [line for line in out.splitlines() if line.startswith("torchrun")]
    assert "--stages 3" in start and "--cut " in start and "--cache 256" in start and "--chunk 16" in start
    assert "predicted" in err


def test_experts_are_set_beside_stages(tmp_path: Path, tiny_tokenizer: Any) -> None:
    config = tiny_models.make_config("mixtral")
    config.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    code, out, err = plan(tmp_path, *LINK, "--init", "random", "--disk", "1", "--json", "--memory", "0.00035")
    assert code == 0, err
    spread, read = json.loads(out)["experts"]
    assert spread["derived"] and read["derived"]
    assert spread["tokens_per_second"] <= 1 / (4 * 2 * 0.02)  # four layers, two exchanges, 20 ms each
    assert read["first_token_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--link none says nothing of the link"),
        ((*LINK, "--machine", "speed=fast"), "--machine 'speed=fast' has the part 'speed=fast'"),
        ((*LINK, "--machine", "speed=0"), "has the part 'speed=0'"),
        ((*LINK, "--machine", "nowhere.json"), "cannot read --machine nowhere.json"),
        ((*LINK, "--machine", "EMPTY"), "lacks or mistakes"),
        ((*LINK, "--machine", "OTHER"), "was measured with --chunk 32, the plan is for 16"),
        ((*LINK, "--memory", "0.00001"), "has no memory for a single layer"),
        ((*LINK, "--tokens", "50"), "74 tokens at once are more than the --cache of 64"),
        ((*LINK, "--right-drafts", "1"), "--right-drafts is 1.0; it must be below 1"),
        (("--link", "up=1mbit,20ms", "--emulate"), "a plan takes one rate and one delay"),
        ((*LINK, *("--machine", "speed=1") * 16), "17 machines; give 15 besides this one at most"),
        ((*LINK, *("--machine", "speed=1") * 4), "5 stages need 5 layers or more"),
    ],
)
def test_wrong_words_end_in_one_sentence(
    place: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "EMPTY").write_text("{}")
    curve = {"at": [1], "values": [1.0]}
    passes = {"layer": curve, "rest": curve, "head": curve, "pair": 0, "row": 0}
    coding = {
        name: {"nbytes": curve, "encode": curve, "decode": curve} for name in ("exact", "bf16", "thinwire")
    }
    other = {"model": str(place), "dtype": "float32", "device": "cpu", "threads": 0, "chunk": 32}
    other |= {"memory": 1e9, "cached": 128, "passes": passes, "coding": coding}
    (tmp_path / "OTHER").write_text(json.dumps(other))
    given = [str(tmp_path / a) if a in ("EMPTY", "OTHER") else a for a in arguments]
    code, out, err = plan(place, *given)
    assert code == 2 and message in err and out == ""
    assert [line.startswith("thinwire: ") for line in err.splitlines() if "busy" not in line] == [True], err
