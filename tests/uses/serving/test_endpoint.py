"""The endpoint answers as OpenAI's API does, and refuses in words what it cannot."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import tiny_models
from waiting import until

from thinwire.links.sockets import make_room
from thinwire.types import InputError
from thinwire.uses.serving.run.asked_texts import AskedReader
from thinwire.uses.serving.run.text_pieces import TextPieces

from .rings import greedy, random_model, ring, works

transformers = pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
ROOM, KEY = 60, "a-key-of-this-test"
FORM = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


class Endpoint:
    """A running endpoint and its model."""

    def __init__(self, port: int, model: Any, tokenizer: Any, engine: Any) -> None:
        self.port, self.model, self.tokenizer, self.engine = port, model, tokenizer, engine

    def ask(self, path: str, body: Any = None, key: str = KEY) -> tuple[int, Any]:
        """Return status and answer of a call."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        call = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Authorization": f"Bearer {key}"}
        )
        try:
            with urllib.request.urlopen(call, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as e:
            return e.code, json.load(e)

    def says(self, prompt: str, many: int) -> str:
        """Return what the model says, by itself."""
        said = greedy(self.model, self.tokenizer(prompt).input_ids, many)
        return str(self.tokenizer.decode(said, skip_special_tokens=True))


def post(body: bytes) -> bytes:
    """Return a call of completions as it is on the wire."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def running(model: Any, tokenizer: Any, most: int = 1000) -> Iterator[Endpoint]:
    from thinwire.uses.serving.run.chat_api import Served, application
    from thinwire.uses.serving.run.endpoint.open_connections import http_server

    with ring(works(model, 2, rows=4 * ROOM)) as engine, socket.create_server(("127.0.0.1", 0)) as listener:
        reader = AskedReader(tokenizer, model.config.vocab_size, ROOM)
        served = Served(engine, reader, tokenizer, "tiny", key=KEY)
        server = http_server(application(served), most, 5)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield Endpoint(listener.getsockname()[1], model, tokenizer, engine)
        finally:
            server.should_exit = True
            thread.join(20)


@pytest.fixture(scope="module")
def endpoint(tiny_tokenizer: Any) -> Iterator[Endpoint]:
    tiny_tokenizer.chat_template = FORM
    model = random_model(transformers.LlamaConfig(**tiny_models.LLAMA))
    with running(model, tiny_tokenizer) as found:
        yield found


def test_completions_are_the_models_own_words(endpoint: Endpoint) -> None:
    prompts = ["the ship", "a house of"]
    status, found = endpoint.ask("/v1/completions", {"prompt": prompts, "max_tokens": 9, "temperature": 0})
    assert status == 200 and [c["text"] for c in found["choices"]] == [endpoint.says(p, 9) for p in prompts]
    assert found["usage"]["completion_tokens"] == 18 and found["choices"][0]["finish_reason"] == "length"
    whole = endpoint.says("the ship", 9)
    stop = whole[4:7]
    status, found = endpoint.ask(
        "/v1/completions", {"prompt": "the ship", "max_tokens": 9, "temperature": 0, "stop": stop}
    )
    assert found["choices"][0] == {
        "index": 0,
        "text": whole[: whole.index(stop)],
        "logprobs": None,
        "finish_reason": "stop",
    }


def test_a_chat_streams_the_same_text_by_seed(endpoint: Endpoint) -> None:
    asked = {
        "messages": [{"role": "user", "content": "the ship"}],
        "max_tokens": 9,
        "seed": 5,
        "temperature": 0.7,
    }
    _, whole = endpoint.ask("/v1/chat/completions", asked)
    stream = asked | {"stream": True, "stream_options": {"include_usage": True}}
    call = urllib.request.Request(
        f"http://127.0.0.1:{endpoint.port}/v1/chat/completions",
        json.dumps(stream).encode(),
        {"Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(call, timeout=30) as answer:
        lines = [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]
    events = [json.loads(line) for line in lines[:-1]]
    text = "".join(c["delta"].get("content", "") for e in events for c in e["choices"])
    assert lines[-1] == "[DONE]" and text == whole["choices"][0]["message"]["content"]
    assert events[-1]["usage"] == whole["usage"] and events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("completions", b"{", "no JSON"),
        ("completions", [1], "no JSON object"),
        ("completions", {"prompt": "a", "max_tokens": 1000}, f"more than the {ROOM} that fit"),
        ("completions", {"prompt": [999]}, "tokens below 300"),
        ("completions", {"prompt": "a", "temperature": float("nan")}, "temperature"),
        ("completions", {"prompt": "a", "top_p": 0}, "top_p=0.0 is not above 0"),
        ("completions", {"prompt": "a", "n": 99}, "8 at most"),
        ("completions", {"prompt": "a", "n": 0}, "one at least"),
        ("completions", {"prompt": ["a"] * 9}, "n=1 answers to 9 prompts"),
        ("completions", {"prompt": "a", "max_tokens": 10**300}, "max_tokens=1000"),
        ("completions", {"prompt": "a", "temperature": 10**400}, "temperature=1000"),
        ("completions", {"prompt": "a", "max_tokens": -1}, "max_tokens=-1 is below 1"),
        ("completions", {"prompt": "a " * (1 << 20)}, "characters are more than"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a " * (1 << 20)}]}, "characters are"),
        ("completions", b"[" * (1 << 20), "no JSON"),
        ("completions", {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias is not supported"),
        ("chat/completions", {"messages": "hello"}, "messages is not a list"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "send text alone",
        ),
        ("completions", b" " * (1 << 23), "more than"),
    ],
)
def test_a_wrong_call_is_refused_in_a_sentence(endpoint: Endpoint, path: str, body: Any, said: str) -> None:
    status, found = endpoint.ask(f"/v1/{path}", body)
    assert status == 400 and said in found["error"]["message"]
    assert endpoint.ask("/v1/models", key="wrong")[0] == 401 == endpoint.ask(f"/v1/{path}", {}, "")[0]
    assert endpoint.ask("/v1/models")[1]["data"][0]["id"] == "tiny" and endpoint.ask("/health")[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_frees_the_cache(endpoint: Endpoint, stream: bool) -> None:
    body = json.dumps({"prompt": ["the ship"] * 8, "max_tokens": 50, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", endpoint.port)) as client:
        client.sendall(post(body))
        if stream:
            assert client.recv(100)
        until(lambda: endpoint.engine.running and endpoint.engine.waiting)  # some have no room yet
    until(lambda: not endpoint.engine.running + endpoint.engine.waiting)


def test_too_many_that_wait_are_told_to_come_again(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.uses.serving.text_engine.QUEUED", 0)
    status, found = endpoint.ask("/v1/completions", {"prompt": "a", "max_tokens": 5})
    assert status == 429 and "wait for room in the cache already" in found["error"]["message"]


def test_quiet_clients_keep_nobody_out(endpoint: Endpoint, tiny_tokenizer: Any) -> None:
    make_room()
    with ExitStack() as stack:
        connect = lambda port: stack.enter_context(socket.create_connection(("127.0.0.1", port)))  # noqa: E731
        for _ in range(1000):
            connect(endpoint.port)
        assert endpoint.ask("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        with running(endpoint.model, tiny_tokenizer, most=4) as small:
            begun = connect(small.port)  # a call under way, whose place nobody gets
            begun.sendall(post(b" " * 100)[:-50])
            assert small.ask("/health")[0] == 200  # so it has been heard
            quiet = [connect(small.port) for _ in range(4)]
            assert small.ask("/health")[0] == 200
            assert quiet[0].recv(1) == b""  # the one that has been quiet for longest
            begun.sendall(b" " * 50)
            assert b"400" in begun.recv(1000)
            for busy in [connect(small.port) for _ in range(4)]:
                busy.sendall(post(b" ")[:-1])
                time.sleep(0.05)
            late = connect(small.port)
            late.sendall(post(b" ")[:-1])
            assert b"503" in late.recv(100)  # all places are taken by calls under way


def test_a_limit_of_open_files_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    from thinwire.uses.serving.run.endpoint import open_connections

    monkeypatch.setattr(open_connections, "make_room", lambda: None)
    told = []
    for files in (90, 400, 8192):
        monkeypatch.setattr(resource, "getrlimit", lambda which, files=files: (files, files))
        try:
            told.append(open_connections.most_connections())
        except InputError as e:
            told.append(str(e))
    assert "may open 90 files, which is too few" in told[0] and "ulimit -n" in told[0]
    assert told[1][0] == 300 and "takes 300 connections" in told[1][1] and told[2] == (1000, "")


def test_text_comes_in_whole_characters_up_to_a_stop_word(tiny_tokenizer: Any) -> None:
    text = "the naïve café ends here and goes on"
    tokens = tiny_tokenizer(text).input_ids
    for stops, expected in (((), text), (("ends here",), text.split("ends here")[0])):
        pieces = TextPieces(tiny_tokenizer, stops)
        parts = [pieces.add([token]) for token in tokens] + [pieces.end()]
        assert "".join(parts) == expected and not any("\ufffd" in part for part in parts)
        assert pieces.stopped == bool(stops)
