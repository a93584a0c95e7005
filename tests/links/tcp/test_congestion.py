"""TCP's congestion control is the one that was asked for, at both ends of a link and behind a hub."""

from __future__ import annotations

import errno
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from thinwire import Follower, Publisher
from thinwire.links.hub.hub import Hub
from thinwire.links.mesh import connect_mesh
from thinwire.links.pair.zmq_link import ZmqLink
from thinwire.links.tcp import congestion
from thinwire.links.tcp import info as tcp_info
from thinwire.runs.ranks.launcher import EmulatedLauncher
from thinwire.types import InputError
from thinwire.uses.doctor.run import diagnosis
from thinwire.uses.training.run.options import TrainConfig

pytestmark = pytest.mark.skipif(not tcp_info.supported(), reason="congestion controls: Linux only")


@pytest.fixture
def other() -> str:
    """A control that may be chosen here and is not what connections have anyway."""
    with socket.socket() as sock:
        usual = control_of(sock)
    for name in ("reno", "cubic", "bbr"):
        if name == usual:
            continue
        try:
            return congestion.resolve(name) or ""
        except InputError:
            continue
    pytest.skip(f"this system lets programs choose {usual} only")


def control_of(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, tcp_info.TCP_CONGESTION, 16).split(b"\0")[0].decode()


def controls(port: int) -> set[tuple[bool, str]]:
    """Return, for each end at ``port``, whether it is the listener's, and its control."""
    ours = (i for i in map(tcp_info.read_at, tcp_info.sockets()) if i and port in (i.local[1], i.remote[1]))
    return {(i.local[1] == port, i.congestion) for i in ours}


def refuse(number: int) -> type[socket.socket]:
    class Refusing(socket.socket):
        def setsockopt(self, *_: object) -> None:
            raise OSError(number, "no")

    return Refusing


def test_an_unknown_control_is_one_sentence_and_nothing_listens() -> None:
    before = set(tcp_info.sockets())
    with pytest.raises(InputError, match=r"teleport is not known here; choose system or one of .*reno"):
        Hub.bind(control="teleport")
    assert set(tcp_info.sockets()) <= before


@pytest.mark.parametrize("name", ["", "a" * 16, "bbr\0", "bbr\n", "bbré"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="is no name of a congestion control"):
        congestion.resolve(name)


def test_what_programs_may_not_choose_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", refuse(errno.EPERM))
    monkeypatch.setattr(congestion, "system", lambda: "cubic")
    with pytest.raises(InputError, match=r"sysctl -w net\.ipv4\.tcp_allowed_congestion_control='\.\.\. bbr'"):
        congestion.resolve("bbr")


def test_auto_takes_bbr_where_the_system_lists_it_for_programs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(congestion, "_SETTINGS", tmp_path)
    monkeypatch.setattr(congestion, "_refusal", lambda _: None)  # root may choose any
    assert congestion.resolve(congestion.AUTO) is None
    (tmp_path / "tcp_allowed_congestion_control").write_text("reno cubic\n")
    assert congestion.resolve(congestion.AUTO) is None
    (tmp_path / "tcp_allowed_congestion_control").write_text("reno cubic bbr\n")
    assert congestion.resolve(congestion.AUTO) == "bbr"
    (tmp_path / "tcp_congestion_control").write_text("bbr\n")
    assert congestion.resolve("bbr") is None  # connections have it anyway


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOENT, errno.ENOPROTOOPT])
def test_auto_does_without_where_bbr_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(socket, "socket", refuse(number))
    assert congestion.resolve(congestion.AUTO) is None


def test_auto_leaves_an_emulators_links_alone(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    monkeypatch.setenv(congestion.EMULATED, "1.1")
    assert congestion.resolve(congestion.AUTO) is None
    assert congestion.resolve(other) == other  # asked for by name, it counts


def test_elsewhere_than_on_linux_the_systems_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_info, "visible", lambda: False)
    monkeypatch.setattr(congestion, "_SETTINGS", Path("nowhere"))
    assert congestion.resolve(congestion.AUTO) is congestion.resolve(congestion.SYSTEM) is None
    with pytest.raises(InputError, match="needs Linux; take system"):
        congestion.resolve("bbr")


def test_both_ends_of_a_link_have_what_was_asked_for(other: str) -> None:
    listening = ZmqLink.bind(b"name", control=other)
    dialling = ZmqLink.connect(b"name", "127.0.0.1", listening.port, control=other)
    try:
        dialling.send(b"hello").result(10)
        assert listening.recv().result(10) == b"hello"
        assert controls(listening.port) == {(True, other), (False, other)}
        dialling.redial()  # a connection made anew is no exception
        end = time.monotonic() + 10
        while time.monotonic() < end and not dialling.send(b"again").done():
            time.sleep(0.01)
        assert listening.recv().result(10) == b"again"
        assert {name for mine, name in controls(listening.port) if not mine} == {other}
    finally:
        dialling.close(0.0)
        listening.close(0.0)


def test_a_publishers_patches_leave_by_what_was_asked_for(other: str) -> None:
    with Publisher({"w": torch.ones(8)}, congestion=other) as publisher:
        follower = Follower(publisher.host, publisher.port)
        try:
            publisher.publish()
            assert follower.wait(1, 10.0).number == 1
            assert (True, other) in controls(publisher.port)
        finally:
            follower.close()


def test_a_descriptor_that_is_no_connection_is_left_alone(other: str) -> None:
    with Path(os.devnull).open() as file:
        congestion.at_descriptor(file.fileno(), 1, other)
    congestion.at_descriptor(1 << 20, 1, other)
    congestion.at_descriptor(-1, 1, other)


def test_a_connection_to_another_port_is_left_alone(other: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as mine:
            congestion.at_descriptor(mine.fileno(), port + 1, other)  # the number is another connection's now
            assert control_of(mine) != other
            congestion.at_descriptor(mine.fileno(), port, other)
            assert control_of(mine) == other


def test_looking_at_a_socket_changes_nothing_of_it() -> None:
    before = socket.getdefaulttimeout()
    with socket.socket() as mine:
        socket.setdefaulttimeout(
            1.0
        )  # a copy that Python makes then is set not to block, and so is its owner
        try:
            place = tcp_info.place_of(mine.fileno())
            assert place is not None
            with tcp_info.borrowed(place) as lent:
                assert lent is not None
            assert os.get_blocking(mine.fileno())
        finally:
            socket.setdefaulttimeout(before)


def test_what_is_no_socket_any_more_is_not_kept_open() -> None:
    with Path(os.devnull).open() as file:
        place = tcp_info.SocketPlace(file.fileno(), os.fstat(file.fileno()).st_ino)
        free = os.dup(file.fileno())
        os.close(free)
        with tcp_info.borrowed(place) as lent:
            assert lent is None
        again = os.dup(file.fileno())
        os.close(again)
        assert again == free  # no descriptor was left


def test_who_listens_at_another_port_is_left_alone(other: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine:
        congestion.at_port(mine.getsockname()[1] + 1, other)
        assert control_of(mine) != other
        congestion.at_port(mine.getsockname()[1], other)
        assert control_of(mine) == other


def test_all_connections_of_a_mesh_have_what_was_asked_for(other: str) -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(connect_mesh, rank, 2, store, control=other) for rank in range(2)]
        peers = [found.result(30) for found in made]
    try:
        assert {p[1 - rank].kernel.read().congestion for rank, p in enumerate(peers)} == {other}
    finally:
        for p in peers:
            for peer in p.values():
                peer.close(0.0)


@pytest.mark.parametrize(
    ("asked", "used"), [("auto", "cubic"), ("cubic", "cubic"), ("bbr", "bbr"), ("system", "vegas")]
)
def test_emulated_links_have_cubic_unless_told(
    monkeypatch: pytest.MonkeyPatch, asked: str, used: str
) -> None:
    monkeypatch.setattr(congestion, "system", lambda: "vegas")
    config = TrainConfig(emulate=True, link="10mbit,30ms", congestion=asked)
    assert EmulatedLauncher(config)._net.congestion == used


def test_doctor_says_which_control_links_get(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"tcp_congestion_control": "cubic", "tcp_slow_start_after_idle": "1"}
    monkeypatch.setattr(diagnosis, "tcp_settings", lambda: usual)
    monkeypatch.setattr(congestion, "resolve", lambda _: "bbr")
    assert diagnosis._tcp().finding.startswith("bbr, ")
    monkeypatch.setattr(congestion, "resolve", lambda _: None)
    assert diagnosis._tcp().finding.startswith("cubic starts slowly") and "tcp_bbr" in diagnosis._tcp().remedy
