"""Stages as processes: what the commands start, and what they leave."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from launchers import SERVING, free_port, warm

from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.records.writer import load_run
from thinwire.types import InputError
from thinwire.uses.kinds import load_runs
from thinwire.uses.serving.run import cards
from thinwire.uses.serving.run.options import EndpointConfig
from thinwire.uses.serving.run.record import ServingRecord
from thinwire.uses.serving.run.serving_trial import check_serving
from thinwire.uses.serving.run.stage_program import ends_of

transformers = pytest.importorskip("transformers")
RUN_WAYS = """
import json, sys
from thinwire.uses.serving.run.options import MeasuredConfig
from thinwire.uses.serving.run.serving_demo import ServingWay, run_ways
ways = ServingWay("one", 1, "exact", False), ServingWay("coded-drafts", 2, "exact", True)
run_ways(MeasuredConfig.from_dict(json.loads(sys.argv[1])), ways, lambda text: None)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    tiny_tokenizer.chat_template = None
    return tiny_models.write_llama(tmp_path_factory.mktemp("served"), tiny_tokenizer, 1200)


def test_ways_are_compared_and_drawn(place: Path, tmp_path: Path) -> None:
    given = {"model": str(place / "model"), "data": str(place / "text.txt"), "out": str(tmp_path)}
    given |= {"texts": 2, "prompt_tokens": 20, "tokens": 8, "cache": 64, "dtype": "fp32", "at_once": 2}
    run = warm().python(tmp_path / "said", "-c", RUN_WAYS, json.dumps(given), needs=SERVING)
    assert run.wait() == 0, run.err
    one, two = (load_run(tmp_path / way, ServingRecord) for way in ("one", "coded-drafts"))
    assert one.equal_tokens == two.equal_tokens == 1.0 and one.shown == two.shown
    assert (
        one.bytes == {}
        and two.bytes["stages"] > two.totals["tokens"] * 32 * 4
        and len(two.memory.peak_rss_bytes) == 2
    )
    runs = load_runs([tmp_path / way for way in ("one", "coded-drafts")])
    assert all(len(run.metrics) == 2 for run in runs)
    assert "tokens a second" in cards.headline(runs) and len(cards.cards(runs)) == 3


def test_a_server_answers_until_it_is_told_to_end(place: Path, tmp_path: Path) -> None:
    given = ["--stages", 1, "--dtype", "fp32", "--model", place / "model", "--cache", 64, "--out", tmp_path]
    where = f"127.0.0.1:{free_port()}"
    server = warm().start(tmp_path / "said", "serve", *given, "--listen", where)
    try:
        server.says(f"listening at http://{where}")
        body = json.dumps({"prompt": "the ship", "max_tokens": 4}).encode()
        call = urllib.request.Request(f"http://{where}/v1/completions", body)
        with urllib.request.urlopen(call, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] <= 4
    finally:
        server.signal(signal.SIGTERM)
    assert server.wait() == 130
    (run,) = load_runs([tmp_path])
    assert run.record.status == "interrupted" and run.record.totals["texts"] == len(run.metrics) == 1
    assert "1 texts by" in cards.setting([run]) and len(cards.cards([run])) == 2
    assert "ship" not in (tmp_path / "run.json").read_text()  # nobody's words are kept


def test_what_cannot_be_served_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"can be reached by others; give --api-key-file"):
        EndpointConfig.from_dict({"listen": "0.0.0.0:8000"})
    (tmp_path / "key").write_text("short")
    with pytest.raises(InputError, match="has 5 characters; give it 16 or more"):
        EndpointConfig.from_dict({"api_key_file": str(tmp_path / "key")})
    with pytest.raises(InputError, match="codec"):
        EndpointConfig.from_dict({"recipe": "codec"})
    name, given = tiny_models.CONFIGS["bloom"]
    with pytest.raises(InputError, match="models of type 'bloom' cannot be served by stages"):
        check_serving(getattr(transformers, name)(**given))
    check_serving(transformers.LlamaConfig(**tiny_models.LLAMA))


def test_a_model_may_have_several_tokens_that_end_a_text(tmp_path: Path, tiny_tokenizer: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    config = transformers.LlamaConfig(**tiny_models.LLAMA | {"eos_token_id": [5, 6]})
    found = ends_of(ModelSource("tiny", "llama", config, tiny_tokenizer, tmp_path))
    assert found == {5, 6, 7, 8, tiny_tokenizer.eos_token_id} - {None}
