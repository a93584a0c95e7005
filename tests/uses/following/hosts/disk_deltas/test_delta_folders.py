"""Delta folders: from a trainer's, over the wire, to a host's, bit by bit; and what is refused."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commanded import Script, invoke, meanwhile, newest, one_sentence
from delta_hosts import Indexed, Sparse, State, octets
from torch import Tensor

from thinwire.files.checkpoint import read_bits, read_checkpoint, write_checkpoint
from thinwire.state.patches.patch import Version
from thinwire.types import InputError, LinkError
from thinwire.uses.following.hosts.disk_deltas.delta_watch import DeltaWatch
from thinwire.uses.following.hosts.disk_deltas.delta_writer import DeltaWriter
from thinwire.uses.following.hosts.disk_deltas.pull_hook import await_version
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher

HOSTS = {"slime": Indexed(), "modelexpress": Indexed("v", "v", 1), "trl": Sparse()}
Host = Indexed | Sparse


def first(sparse: bool) -> State:
    """Return a base; with dtypes of any size where the format knows of none."""
    g = torch.Generator().manual_seed(0)
    state = {
        "a.w": torch.randn(30, 20, generator=g).bfloat16(),
        "b": torch.randn(70_001, generator=g).bfloat16(),
    }
    more = (
        {} if sparse else {"c": torch.randn(5, generator=g), "n": torch.tensor([3]), "e": torch.empty(0, 4)}
    )
    return state | more


def stepped(state: State, seed: int) -> State:
    """Return the next version: some values move, one of them to another NaN, and one tensor stays."""
    g = torch.Generator().manual_seed(seed)
    found = {name: x.clone() for name, x in state.items()}
    for name in ("a.w", "b"):
        at = torch.randint(0, found[name].numel(), (3,), generator=g)
        found[name].view(-1)[at] = torch.randn(3, generator=g).bfloat16()
    found["b"].view(torch.int16)[-1] = 0x7FC0 + seed
    return found


def stream(host: Host, sparse: bool, root: Path, upto: int, **coding: str) -> list[State]:
    """Write versions 1 to ``upto`` as the host's trainer does, the fourth whole; return all states."""
    states = [first(sparse)]
    for number in range(1, upto + 1):
        states.append(stepped(states[-1], number))
        if number == 4:
            host.whole(root, number, states[-1])
        else:
            host.delta(root, number, states[-2], states[-1], **coding)
    return states


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all((octets(x) == octets(b[name])).all() for name, x in a.items())


@pytest.mark.parametrize("own", [True, False], ids=["counted", "called"])
@pytest.mark.parametrize("name", HOSTS)
def test_versions_cross_from_folder_to_folder(tmp_path: Path, name: str, own: bool):
    """A trainer's folder is published and followed into a host's, and both ends begin again in between."""
    host, sparse = HOSTS[name], name == "trl"
    theirs, ours, base = tmp_path / "theirs", tmp_path / "ours", tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    states = [first(sparse)]
    write_checkpoint(base / "model.safetensors", states[0], {})
    still = 2 if isinstance(host, Indexed) and not own else 0  # a version in which nothing changes
    held = {n: octets(x).tobytes() for n, x in states[0].items()}
    watch, writer = DeltaWatch(base, str(theirs), 0.0), DeltaWriter(str(ours), name, 3, base)
    with Publisher(watch.first()) as publisher, Follower("127.0.0.1", publisher.port) as follower:
        for number in range(1, 8):
            states.append(dict(states[-1]) if number == still else stepped(states[-1], number))
            if number == 4:
                host.whole(theirs, number, states[-1])
            else:
                host.delta(theirs, number, states[-2], states[-1], coding="raw" if sparse else "overwrite")
            if number == 3:
                watch = DeltaWatch(base, str(theirs), 0.0)
                found: dict[str, Tensor] | None = watch.first()
            else:
                found = watch.take() if watch._look() else None
            assert found is not None and same(found, states[-1]) and watch.notes["step"] == number
            meta = {} if own else {"delta": number}
            version = publisher.publish(number, found, **meta)
            follower.wait(version.number)
            replica = follower._caught_up()
            if number == 5:
                writer = DeltaWriter(str(ours), name, 3, base)  # the first after a restart is whole
            assert writer.write(replica.bits(), replica.shown)
            assert not writer.write(replica.bits(), replica.shown)
            held = host.pulled(ours, writer.number, held)
            assert number == writer.number and Path(writer.place).exists()
            assert held == {n: octets(x).tobytes() for n, x in states[-1].items()}
    whole = writer._anchors
    assert whole == [3, 5] or whole == [5, 8] or len(whole) == 2
    assert min(writer._form.names(writer._folder)) == whole[0]
    assert (
        sparse
        or (Path(writer.place).parent / Path(host.folder(ours, whole[0])).name / "config.json").exists()
    )


def test_commands_need_no_code(tmp_path: Path):
    """publish reads one folder, follow writes another and tells --exec; what does not fit ends with 2."""
    base, theirs, ours, store = (tmp_path / name for name in ("base", "theirs", "ours", "store"))
    states = stream(HOSTS["trl"], True, theirs, 5)
    base.mkdir()
    write_checkpoint(base / "model.safetensors", {name: x.float() for name, x in states[0].items()}, {})
    quick = ("--once", "--rest", "0.01")
    result = invoke("publish", base, "--deltas", theirs, "--dtype", "bf16", "--store", store, *quick)
    assert result.exit_code == 0, result.output
    tell = f"echo $THINWIRE_DELTA $THINWIRE_FILE >> {tmp_path / 'heard'}"
    result = invoke("follow", store, "--once", "--deltas", ours, "--base", base, "--exec", tell)
    assert result.exit_code == 0, result.output
    assert HOSTS["slime"].pulled(ours, 5, {}) == {n: octets(x).tobytes() for n, x in states[-1].items()}
    assert (tmp_path / "heard").read_text().split() == ["5", str(ours / "weight_v000005")]
    await_version(str(ours), 5)
    with pytest.raises(LinkError, match="weight_v000006 did not come within 0 s"):
        await_version(str(ours), 6, 0.0)
    wrong = invoke("follow", store, "--once", "--deltas", theirs)
    assert wrong.exit_code == 2 and "which this writer did not write" in one_sentence(wrong.stderr)
    wrong = invoke("publish", base, "--deltas", theirs, "--store", tmp_path / "other", *quick)
    assert wrong.exit_code == 2 and "is bfloat16 [30, 20] in" in one_sentence(wrong.stderr)


def test_a_publisher_goes_on_as_its_trainer_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each delta becomes a version; one that does not fit is told, and the next whole one mends that."""
    base, theirs, store = (tmp_path / name for name in ("base.safetensors", "theirs", "store"))
    states = stream(HOSTS["slime"], False, tmp_path / "made", 3)
    write_checkpoint(base, states[0], {})

    def script() -> Script:
        yield lambda: newest(store) == 1
        for number in (1, 2):
            shutil.copytree(tmp_path / "made" / f"weight_v00000{number}", theirs / f"weight_v00000{number}")
            yield lambda number=number: newest(store) == 1 + number
        shutil.copytree(tmp_path / "made" / "weight_v000003", theirs / "weight_v000004")
        yield lambda: "calls itself version 3" in notes[-1]
        assert notes[-1].endswith("version 3 stays the newest")
        (theirs / "weight_v000004").rename(theirs / "weight_v000003")
        yield lambda: newest(store) == 4

    notes = meanwhile(monkeypatch, script())
    result = invoke("publish", base, "--deltas", theirs, "--store", store, "--rest", "0.01", "--quiet")
    assert result.exit_code == 0, result.output
    assert invoke("follow", store, "--once", "--out", tmp_path / "out").exit_code == 0
    assert same(read_checkpoint(tmp_path / "out"), states[-1])


def test_a_bucket_serves_both_ends(tmp_path: Path):
    url, states = f"memory://{tmp_path.name}", [first(False)]
    write_checkpoint(tmp_path / "base.safetensors", states[0], {})
    writer = DeltaWriter(url, "modelexpress", 2)
    for number in range(1, 6):
        states.append(stepped(states[-1], number))
        write_checkpoint(tmp_path / "new.safetensors", states[-1], {})
        writer.write(read_bits(tmp_path / "new.safetensors"), Version(number, number))
    assert same(DeltaWatch(tmp_path / "base.safetensors", url, 0.0).first(), states[-1])
    assert sorted(writer._form.names(writer._folder)) == [3, 4, 5]


Spoil = Callable[[Path, Host, list[State]], object]


def whole(change: Callable[[State], State]) -> Spoil:
    return lambda root, host, states: host.whole(root, 6, change(states[-1]))


def delta(change: Callable[[State], State], number: int = 6) -> Spoil:
    """Let a trainer whose checkpoints are others write a delta."""

    def write(root: Path, host: Host, states: list[State]) -> None:
        host.delta(root, number, change(states[-1]), change(stepped(states[-1], 9)))

    return write


def about(key: str, value: str) -> Spoil:
    """Change a word in the newest version's index or metadata."""

    def spoil(root: Path, host: Host, states: list[State]) -> None:
        delta(dict)(root, host, states)
        file = next(
            p for p in root.rglob("*6/*index.json" if isinstance(host, Indexed) else "*6.safetensors")
        )
        old, new = (re.search(rf'"{key}": ?"([^"]*)"', file.read_text("latin1")), value)
        assert old is not None
        data = file.read_bytes().replace(old[1].encode(), new.encode().ljust(len(old[1])), 1)
        file.write_bytes(data)

    return spoil


def cut(root: Path, host: Host, states: list[State]) -> None:
    delta(dict)(root, host, states)
    os.truncate(next(root.rglob("*6/model-*" if isinstance(host, Indexed) else "*6.safetensors")), 40)


def lost(root: Path, host: Host, states: list[State]) -> None:
    delta(dict)(root, host, states)
    next(root.rglob("*6/model-*.safetensors")).unlink()


def pickled(root: Path, host: Host, states: list[State]) -> None:
    delta(dict)(root, host, states)
    file = next(root.rglob("*6/model-*" if isinstance(host, Indexed) else "*6.safetensors"))
    file.rename(file.with_suffix(".pt"))


def begun_again(root: Path, host: Host, states: list[State]) -> None:
    shutil.rmtree(root)
    host.delta(root, 1, states[0], stepped(states[0], 60))


def second_run(root: Path, host: Host, states: list[State]) -> None:
    Indexed("v", "v", 1).delta(root, 6, states[-1], stepped(states[-1], 9))


def half(state: State) -> State:
    return {name: x.half() if x.dtype == torch.bfloat16 else x for name, x in state.items()}


REFUSED: dict[str, tuple[Spoil, str, str]] = {
    "cut short": (cut, "both", "cut short"),
    "a file that is lost": (lost, "slime", "lacks model-00000-of-00001.safetensors, which its index names"),
    "a missing base": (delta(dict, 7), "both", "builds on version 6, and what is here is version 5"),
    "another base": (delta(lambda x: stepped(x, 50)), "slime", "does not have its checksum"),
    "a whole one that omits": (
        whole(lambda x: {n: t for n, t in x.items() if n != "a.w"}),
        "both",
        "omits a.w: who",
    ),
    "a name besides": (
        whole(lambda x: x | {"z": x["b"].clone()}),
        "both",
        "has z, which the base does not have",
    ),
    "a name unknown": (delta(lambda x: {"y": x["b"]}), "both", "changes y, which the base does not have"),
    "another shape": (whole(lambda x: x | {"b": x["b"][1:].clone()}), "both", r"b is bfloat16 \[70000\] in"),
    "another size": (delta(lambda x: {"b": x["b"][1:].clone()}), "slime", "b has another size"),
    "another dtype": (whole(half), "both", r"a.w is float16 \[30, 20\] in"),
    "values of another dtype": (delta(half), "trl", r"a.w is float16 \[30, 20\] in"),
    "positions outside": (delta(lambda x: {"a.w": x["b"]}), "trl", "positions of a.w"),
    "another encoding": (about("delta_encoding", "add"), "slime", "coded by 'add *'"),
    "another checksum": (about("checksum_format", "md5"), "slime", "coded by 'md5 *'"),
    "positions of another encoding": (about("encoding", "nvcomp"), "trl", "has positions 'nvcomp"),
    "another version": (about("model_version", "5"), "trl", "calls itself version 5"),
    "another format": (about("format", "anchor"), "trl", "has the format 'anchor"),
    "a pickle": (pickled, "both", "is a file of torch.save, which is not read"),
    "a run that began again": (begun_again, "both", "two runs share it, or one began again"),
    "two runs": (second_run, "slime", "of two runs; give each run a folder of its own"),
}


@pytest.mark.parametrize("name", ["slime", "trl"])
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, name: str):
    """The copy stays what it was, and a whole version that fits heals it."""
    host, sparse, base = HOSTS[name], name == "trl", tmp_path / "base.safetensors"
    made = stream(host, sparse, tmp_path / "made", 5)
    write_checkpoint(base, made[0], {})
    for case, (spoil, where, why) in REFUSED.items():
        if where not in ("both", name):
            continue
        root = tmp_path / case
        shutil.copytree(tmp_path / "made", root)
        watch = DeltaWatch(base, str(root), 0.0)
        assert same(watch.first(), made[-1]), case
        spoil(root, host, made)
        with pytest.raises(InputError, match=why):
            while watch._look():
                assert watch.take() is None, case
        assert re.search(why, watch.trouble) and "\n" not in watch.trouble and watch.number == 5, case
        assert same(watch._tensors(), made[-1]), case
        if case not in ("a pickle", "a run that began again", "two runs"):
            last = stepped(made[-1], 12)
            host.whole(root, 8, last)
            assert watch._look() and same(watch.take() or {}, last) and not watch.trouble, case


def test_a_writer_leaves_what_is_not_its_own(tmp_path: Path):
    write_checkpoint(tmp_path / "state.safetensors", first(False), {})
    bits = read_bits(tmp_path / "state.safetensors")
    with pytest.raises(
        InputError, match=r"hold bfloat16 alone, and [cen] is .*; publish floats, with --dtype bf16"
    ):
        DeltaWriter(str(tmp_path / "sparse"), "trl").write(bits, Version(1, 1))
    one, two = (DeltaWriter(str(tmp_path / "ours")) for _ in range(2))
    one.write(bits, Version(1, 1))
    with pytest.raises(InputError, match="weight_v000001, which somebody else has written since"):
        two.write(bits, Version(1, 1))
    assert not DeltaWriter(str(tmp_path / "ours")).write(bits, Version(1, 1))  # it is there
    with pytest.raises(InputError, match="which this writer did not write"):
        DeltaWriter(str(tmp_path / "ours"), "modelexpress")
    (tmp_path / "ours" / "thinwire.json").write_text("{}")
    with pytest.raises(InputError, match="damaged"):
        DeltaWriter(str(tmp_path / "ours"))
