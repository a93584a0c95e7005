"""A ShelfReader in its own thread: models, iteration, ages, saved states, outages."""

from __future__ import annotations

import socket
import time
from time import monotonic
from types import SimpleNamespace

import pytest
import torch
from stores import FAST, Clock, Model, Source, writing
from waiting import LONG, until
from wired import OPERATIONS, Gone, Wired, thousand

from thinwire.files.local_folder import PlainFolder
from thinwire.types import AuthError, InputError, LinkError
from thinwire.uses.following.pull import store_reader as reader_module
from thinwire.uses.following.pull.claim import read_manifest
from thinwire.uses.following.pull.manifest import Proof
from thinwire.uses.following.pull.store_reader import SIGNS, ShelfReader
from thinwire.uses.following.pull.store_writer import ShelfWriter

pytest.importorskip("zstandard")


def test_a_model_is_published_and_followed(tmp_path):
    model, follower = Model(0), Model(1)
    with (
        ShelfWriter.of(tmp_path, model, name="policy", token=b"t") as writer,
        ShelfReader(tmp_path, b"t", name="policy", **FAST) as reader,
    ):
        for step in range(20):
            model.train_a_little()
            version = writer.publish(step, loss=0.5)
            assert version.meta == {"step": step, "loss": 0.5}
            found = reader.wait(version.number, timeout=LONG)
            assert (found.number, found.meta["step"]) == (step + 1, step)
            assert reader.apply_to(follower).pause < LONG
            assert torch.equal(follower.w, model.w) and int(follower.count) == step + 1
        writer.flush()
        status = reader.status
        assert (status.version, status.held, status.error) == (20, 20, None)
        assert status.age < LONG and status.rate > 0 and status.trip > 0 and status.ratio > 1
        assert status.nbytes > 0 and writer.status.nbytes > 0 and writer.status.version == 20
    assert writer.status.error is None


def test_iteration_skips_to_the_newest_and_ends_with_the_publisher(tmp_path):
    model, numbers = Model(), []
    writer = ShelfWriter.of(tmp_path, model)
    reader = ShelfReader(tmp_path, **FAST)
    writer.publish(0)
    for version in reader:
        numbers.append(version.number)
        assert reader.tensors()["w"].shape == (2000,)
        if version.number < 10:
            for _ in range(3):
                model.train_a_little()
                last = writer.publish()
        else:
            writer.close()
            writer.close()
    assert numbers == sorted(set(numbers)) and numbers[-1] == last.number
    assert torch.equal(reader.tensors()["w"], model.w)
    reader.close()
    reader.close()
    assert list(reader) == []


def test_ages_are_right_once_the_readers_clock_is(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=monotonic, time=lambda: time.time() - 3600)
    monkeypatch.setattr("thinwire.uses.following.pull.store_reader.time", clock)
    with ShelfWriter.of(tmp_path, Model()) as writer, ShelfReader(tmp_path, **FAST) as reader:
        writer.publish()
        reader.wait(timeout=LONG)
        until(lambda: reader.status.age > 0)  # by the publisher's clock, from which it has heard
        clock.time = time.time
        assert reader.status.age < 1800


def test_ages_are_right_once_the_publishers_clock_is(plain):
    class Wall(Clock):
        ahead = 3600.0

        def __call__(self):
            return time.time() + self.ahead

    source, clock = Source(), Wall()
    store = writing(plain, source, clock)
    with ShelfReader(plain.path, **FAST) as reader:
        for number in range(1, SIGNS + 3):
            source.publish()
            store.write()
            reader.wait(number, timeout=LONG)
            clock.ahead = 0.0
        until(lambda: reader.status.age < 1800)


def test_a_reader_saves_on_close_and_goes_on_from_there(tmp_path):
    pytest.importorskip("safetensors")
    model, state = Model(), tmp_path / "held.safetensors"
    with ShelfWriter.of(tmp_path / "store", model) as writer:
        first = writer.publish()
        with ShelfReader(tmp_path / "store", state=state, **FAST) as reader:
            reader.wait(first.number)
            read = reader.status.nbytes
        model.train_a_little()
        second = writer.publish()
        with ShelfReader(tmp_path / "store", state=state, into=Model(), **FAST) as reader:
            reader.wait(second.number)
            assert torch.equal(reader.tensors()["w"], model.w)
            assert reader.status.nbytes < read
    with pytest.raises(InputError, match="there is no place to save to"):
        ShelfReader(tmp_path / "store", **FAST).save()


def test_a_file_that_takes_long_to_come_is_no_silence(tmp_path, monkeypatch):
    """Longer than the reader's patience, which it has again when the file is there."""
    read = PlainFolder.read

    def slowly(folder, name, limit):
        time.sleep(0.5 if name.startswith(("patches", "keyframes")) else 0.0)
        return read(folder, name, limit)

    with ShelfWriter.of(tmp_path, Model()) as writer:
        writer.publish()
    names = {f.name.partition("/")[0] for f in read_manifest(PlainFolder(tmp_path), Proof(None)).files}
    assert names <= {"patches", "keyframes"}
    monkeypatch.setattr(PlainFolder, "read", slowly)
    monkeypatch.setattr(reader_module, "SLOW", 10.0)
    with ShelfReader(tmp_path, patience=0.1, **FAST) as reader:
        assert next(iter(reader)).number == 1


def test_a_reader_of_nothing_waits_and_names_the_store(tmp_path):
    with ShelfReader(tmp_path / "none", patience=0.05, **FAST) as reader:
        with pytest.raises(
            LinkError, match=r"version 1 did not come from .*none in 0.05 s: no state is .* yet"
        ):
            reader.wait(timeout=0.05)
        with pytest.raises(
            LinkError, match=r"no sign of the publisher at .*none for 0.05 s: no state is .* yet"
        ):
            list(reader)
        with pytest.raises(InputError, match="nothing has come from"):
            reader.apply_to(Model())
        assert reader.status.error and reader.status.age is None


def test_a_server_that_says_nothing_is_not_waited_for_once_given_up(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        where = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            pytest.raises(LinkError, match=rf"no sign of the publisher at {where} for 0.1 s"),
            ShelfReader(where, patience=0.1, **FAST) as reader,
        ):
            list(reader)
        assert time.monotonic() - began < 20  # less than the silence that a server is granted


@pytest.mark.parametrize(
    "call", [lambda r: r.wait(), list, lambda r: r.tensors(), lambda r: r.apply_to(Model())]
)
def test_a_wrong_token_reaches_whoever_asks(tmp_path, call):
    with ShelfWriter.of(tmp_path, Model(), token=b"a") as writer:
        writer.publish()
        writer.flush()
        with ShelfReader(tmp_path, b"b", **FAST) as reader:
            with pytest.raises(AuthError, match="another token"):
                reader.wait()
            with pytest.raises(AuthError, match="another token"):
                call(reader)


def test_who_waits_for_ever_is_served(tmp_path):
    forever = float("inf")
    with ShelfWriter.of(tmp_path, Model()) as writer:
        writer.publish()
        writer.flush(forever)
        with ShelfReader(tmp_path, poll=forever, patience=forever) as reader:
            assert reader.wait(1, forever).number == 1
            assert next(iter(reader)).number == 1
            assert reader._thread.is_alive() and reader.status.error is None
        with ShelfReader(tmp_path, poll=forever, patience=0.01) as reader:
            reader.wait(1, LONG)
            versions = iter(reader)
            next(versions)
            with pytest.raises(LinkError, match=r"no sign of the publisher at .* for 0\.01 s"):
                next(versions)
        writer.close(forever)


def test_an_outage_ends_neither_publisher_nor_reader(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is published meanwhile: it is the signs of life that meet with it."""
    monkeypatch.setattr("thinwire.uses.following.pull.store_writer.RETRY", 0.01)
    state = thousand()
    with ShelfWriter.of(url, state, lease=1.0) as writer, ShelfReader(url, poll=0.01) as reader:
        writer.publish()
        reader.wait(1, timeout=LONG)
        writer.flush(LONG)
        for connection in Wired.made:
            connection.broken = Gone("closed")
        Wired.outage |= dict.fromkeys((*OPERATIONS, "connect"), Gone("no endpoint"))
        until(lambda: "no endpoint" in (writer.status.error or ""))
        until(lambda: "no endpoint" in (reader.status.error or ""))
        Wired.outage.clear()
        state["w"][0] = 7.0
        writer.publish()
        reader.wait(2, timeout=LONG)
        assert torch.equal(reader.tensors()["w"], state["w"])
        until(lambda: writer.status.error is None)
