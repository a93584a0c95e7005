"""A real S3 server: keys with few rights, buckets that are not there, endpoints that nothing answers at."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commanded import invoke, one_sentence
from waiting import HOST, free_port, until

from thinwire.files.checkpoint import write_checkpoint
from thinwire.files.local_folder import open_folder
from thinwire.types import InputError
from thinwire.uses.following.pull.store_reader import ShelfReader
from thinwire.uses.following.pull.store_writer import ShelfWriter

pytest.importorskip("zstandard")
pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Guarded:
    """A server of buckets, as WSGI has it: anybody may read, write, list and delete objects, and no more."""

    def __init__(self, server: Callable[..., Iterable[bytes]]) -> None:
        self.server, self.strict = server, True

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, is_object = environ["REQUEST_METHOD"], "/" in environ["PATH_INFO"].strip("/")
        on_objects = (method, environ["QUERY_STRING"].partition("&")[0]) in (
            ("GET", "list-type=2"),
            ("POST", "delete"),
        )
        if is_object or on_objects or not self.strict:
            return self.server(environ, start)
        start("403 Forbidden", [("Content-Type", "application/xml"), ("Content-Length", str(len(DENIED)))])
        return [b"" if method == "HEAD" else DENIED]


@pytest.fixture(scope="module")
def server() -> Iterator[Guarded]:
    """Yield a server that has the bucket ``own``; the environment leads to it."""
    import boto3

    found = moto.ThreadedMotoServer(HOST, 0, verbose=False)
    found.start()
    guarded = found._server.app = Guarded(found._server.app)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*found.get_host_and_port()))
        guarded.strict = False
        boto3.client("s3").create_bucket(Bucket="own")
        guarded.strict = True
        yield guarded
    found.stop()


def test_a_key_that_makes_no_buckets_publishes_and_follows(server: Guarded) -> None:
    url = "s3://own/models/policy"
    state = {"w": torch.arange(1000.0)}
    with ShelfWriter.of(url, state) as writer, ShelfReader(url, poll=0.05) as reader:
        for step in (1, 2):
            state["w"][step] = -1
            assert reader.wait(writer.publish(step=step).number).meta["step"] == step
        reader.replica.swap()
        assert torch.equal(reader.replica.tensors()["w"], state["w"])


@pytest.mark.parametrize("url", ["s3://own", "simplecache::s3://own/chained"])
def test_nor_does_a_whole_bucket_or_a_chain_need_more(server: Guarded, url: str) -> None:
    folder = open_folder(url)
    folder.write("patches/a", b"one")
    assert folder.sizes("patches") == {"patches/a": 3} and folder.read("patches/a", 3) == b"one"
    folder.delete("patches/a")
    with pytest.raises(FileNotFoundError):
        folder.read("patches/a", 3)


def test_a_bucket_that_is_not_there_is_a_sentence_and_is_not_made(
    server: Guarded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server, "strict", False)
    write_checkpoint(tmp_path / "m.safetensors", {"w": torch.zeros(3)}, {})
    url = "s3://owm/policy"
    published = ("publish", tmp_path / "m.safetensors", "--once", "--store", url)
    for command in (published, ("follow", url, "--patience", 5), ("inspect", url)):
        ended = invoke(*command)
        assert ended.exit_code == 2 and "the bucket 'owm' does not exist" in one_sentence(ended.stderr)
    with pytest.raises(InputError, match="check the name, or make the bucket first"):
        open_folder("s3://owm").write("state.json", b"{}")


def test_an_endpoint_that_refuses_is_named(server: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://{HOST}:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with ShelfReader("s3://own/policy", poll=0.05) as reader:
        until(lambda: reader.status.error, "an error")
        assert f'Could not connect to the endpoint URL: "{endpoint}/' in str(reader.status.error)


@pytest.mark.parametrize("once", [True, False])
def test_an_endpoint_that_is_silent_is_told(
    server: Guarded, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    with socket.create_server((HOST, 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{HOST}:{silent.getsockname()[1]}")
        options = ("--once",) if once else ()
        ended = invoke("follow", "s3://own/policy", "--patience", 0.3, "--poll", 0.1, *options)
    assert ended.exit_code == 3
    assert "s3://own/policy has not answered" in one_sentence(ended.stderr)
