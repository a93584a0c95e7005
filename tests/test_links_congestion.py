"""TCP's congestion control is the one that was asked for, at both ends of a link and behind a hub."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path

import pytest
import torch

from thinwire import Follower, Publisher
from thinwire.links import congestion, tcp_info
from thinwire.links.hub import Hub
from thinwire.links.zmq_link import ZmqLink
from thinwire.types import InputError

pytestmark = pytest.mark.skipif(not tcp_info.supported(), reason="congestion controls: Linux only")


@pytest.fixture
def other() -> str:
    """A control that may be chosen here and is not what connections have anyway."""
    with socket.socket() as sock:
        usual = control_of(sock)
    for name in {"reno", "cubic", "bbr"} - {usual}:
        try:
            return congestion.resolve(name) or ""
        except InputError:
            continue
    pytest.skip(f"this system lets programs choose {usual} only")


def control_of(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, tcp_info.TCP_CONGESTION, 16).split(b"\0")[0].decode()


def controls(port: int) -> set[tuple[bool, str]]:
    """Return, for each end at ``port``, whether it is the listener's, and its control."""
    return {(i.local[1] == port, i.congestion) for i in tcp_info.connections(port) or ()}


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
    with pytest.raises(InputError, match=r"sysctl -w net\.ipv4\.tcp_allowed_congestion_control='\.\.\. bbr'"):
        congestion.resolve("bbr")


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOENT, errno.ENOPROTOOPT])
def test_auto_does_without_where_bbr_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(socket, "socket", refuse(number))
    assert congestion.resolve(congestion.AUTO) is None


def test_auto_leaves_an_emulators_links_alone(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    monkeypatch.setenv(congestion.EMULATED, "1.1")
    assert congestion.resolve(congestion.AUTO) is None
    assert congestion.resolve(other) == other  # asked for by name, it counts


def test_elsewhere_than_on_linux_the_systems_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_info, "supported", lambda: False)
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
        congestion.at_descriptor(file.fileno(), other)
    congestion.at_descriptor(1 << 20, other)


def test_who_listens_at_another_port_is_left_alone(other: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine:
        congestion.at_port(mine.getsockname()[1] + 1, other)
        assert control_of(mine) != other
        congestion.at_port(mine.getsockname()[1], other)
        assert control_of(mine) == other
