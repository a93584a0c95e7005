"""SGLang's custom loader: a few bytes say what is wanted, the weights come from the trainer."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from commanded import invoke
from fused_model import FusedModel, checkpoint
from safetensors.torch import load_file
from torch import Tensor

from tests.uses.following.hosts.read_signatures import HERE
from thinwire.types import InputError, LinkError
from thinwire.uses.following.hosts import sglang_loader
from thinwire.uses.following.hosts.host_signatures import lacking, parameters
from thinwire.uses.following.hosts.sglang_loader import CALLED, LOADER, TESTED, bring_up, load, wanted
from thinwire.uses.following.push.publisher import Publisher

PAGE = Path(__file__).parents[4] / "docs/rollouts.md"
WHEEL = json.loads((HERE / "sglang.json").read_text("utf-8"))


class Engine:
    """SGLang's engine as far as an update goes: it is refused unless a session is open."""

    def __init__(self, *models: FusedModel) -> None:
        self.models, self.open = models, False

    def begin_weight_update(self, selector: str = "all") -> tuple[bool, str]:
        was, self.open = self.open, True
        return not was, "a session is open"

    def update_weights_from_tensor(
        self,
        named_tensors: list[tuple[str, Tensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> tuple[bool, str]:
        if not self.open or load_format != LOADER:
            return False, "no session, or no such loader"
        for model in self.models:
            load(model, named_tensors)
        return True, "Success"

    def end_weight_update(self) -> tuple[bool, str]:
        was, self.open = self.open, False
        return was, "no session is open"

    def update_weights_from_disk(self, model_path: str, load_format: str | None = None) -> Any: ...


@pytest.fixture
def requests() -> Iterator[tuple[int, list[tuple[str, Any]]]]:
    """Serve as SGLang's HTTP server does; yield the port, and what was asked for."""
    found: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["content-type"] == "application/json"
            found.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server.server_port, found
        server.shutdown()
        thread.join()


def test_what_is_relied_on_is_in_the_wheel_and_in_the_stand_in() -> None:
    assert WHEEL["version"] == TESTED and list(lacking(CALLED, WHEEL["signatures"])) == []
    for method, names in CALLED["Engine"].items():
        assert parameters(getattr(Engine, method)) == names
    assert WHEEL["calls"]["custom_loader"] == [["*"] * len(parameters(load))]


def test_all_workers_are_brought_to_the_version_that_is_wanted() -> None:
    tensors, model, expected = checkpoint(), FusedModel(1), FusedModel(1)
    engine = Engine(model)
    with Publisher(tensors) as publisher:
        address = f"127.0.0.1:{publisher.port}"
        for step in range(3):
            tensors["model.layers.0.mlp.up_proj.weight"][step:] *= 2
            bring_up(engine, address, publisher.publish().number)
            expected.load_weights(tensors.items())
            both = zip(model.parameters(), expected.parameters(), strict=True)
            assert all(torch.equal(x, y) for x, y in both) and not engine.open
        with pytest.raises(LinkError, match=f"version 9 from {address}"):
            bring_up(engine, address, 9, timeout=0.2)
        assert not engine.open
        engine.open = True
        with pytest.raises(LinkError, match="begin_weight_update says: a session is open"):
            bring_up(engine, address)
        sglang_loader.close()


def test_tensors_that_are_no_request_are_refused() -> None:
    with pytest.raises(InputError, match="is not what wanted"):
        load(FusedModel(), checkpoint().items())
    with pytest.raises(InputError, match="names no trainer"):
        load(FusedModel(), [("thinwire:[]", torch.tensor([1]))])
    with pytest.raises(InputError, match="is no version"):
        wanted("127.0.0.1:7200", -1)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_pages_command_lets_a_server_load_what_was_written(
    requests: tuple[int, list[tuple[str, Any]]], tmp_path: Path
) -> None:
    port, asked = requests
    found = re.search(r"--exec '(curl .*update_weights_from_disk.*)'", PAGE.read_text("utf-8"))
    assert found is not None
    command, tensors = found[1].replace(":30000", f":{port}"), checkpoint()
    out = tmp_path / "worker" / "model.safetensors"
    out.parent.mkdir()
    with Publisher(tensors) as publisher:
        publisher.publish()
        result = invoke("follow", f"127.0.0.1:{publisher.port}", "--out", out, "--once", "--exec", command)
    assert result.exit_code == 0, result.output
    [(path, given)] = asked
    assert path == "/update_weights_from_disk" and set(given) <= set(
        WHEEL["fields"]["UpdateWeightFromDiskReqInput"]
    )
    loaded = [load_file(file) for file in Path(given["model_path"]).glob("*.safetensors")]
    assert len(loaded) == 1 and all(torch.equal(x, tensors[name]) for name, x in loaded[0].items())
