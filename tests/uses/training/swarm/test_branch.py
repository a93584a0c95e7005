"""A branch between a keeper and some of its members: one model, one share, one member's bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from thinwire.codecs import Raw
from thinwire.rounds.aggregation import Synchronous
from thinwire.rounds.aggregation_server import Accepted, Server
from thinwire.rounds.client_profile import ClientProfile, Fixed
from thinwire.rounds.download import DeltaDownload
from thinwire.rounds.parameters import Parameters
from thinwire.rounds.remote.branch import Branch, BranchServer, RoundSum
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import Update, VersionMessage
from thinwire.uses.kinds import load_run
from thinwire.uses.training.swarm.choosing.swarm_policy import Together
from thinwire.uses.training.swarm.gauntlet import Gauntlet
from thinwire.uses.training.swarm.member import SwarmMember
from thinwire.uses.training.swarm.passed_share import PassedShare
from thinwire.uses.training.swarm.run import member_program
from thinwire.uses.training.swarm.run.branch_program import open_branch
from thinwire.uses.training.swarm.run.keeper_program import Keeper
from thinwire.uses.training.swarm.run.liars import Liar
from thinwire.uses.training.swarm.run.member_program import join
from thinwire.uses.training.swarm.run.options import SwarmConfig, SwarmJoinConfig
from thinwire.uses.training.swarm.shares import read_share
from thinwire.uses.training.swarm.work_pool import WorkPool

pytestmark = pytest.mark.usefixtures("own_kits", "all_scored")
transformers = pytest.importorskip("transformers")
ROUNDS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("branch")
    return tiny_models.write_llama(folder, tiny_tokenizer, 1200, num_hidden_layers=2)


class Running:
    """A keeper, a branch or a member on a thread: its port, where it has one, and what it said."""

    def __init__(self, run: Callable[[Running], object]) -> None:
        self.notes: list[str] = []
        self.port, self.keeper, self.error = 0, None, None  # type: ignore[var-annotated]
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[Running], object]) -> None:
        try:
            run(self)
        except BaseException as e:
            self.error = e
        finally:
            self._listens.set()

    def keep(self, make: Callable[..., Keeper], config: SwarmConfig) -> None:
        self.keeper = make(config, lambda *_: None, self.notes.append)
        self.keeper.run(self._told)

    def _told(self, hub: Any) -> None:
        self.port, self.hub = hub.port, hub
        self._listens.set()

    def listening(self) -> Running:
        assert self._listens.wait(60) and self.error is None, self.error
        return self

    def ended(self) -> Running:
        self._thread.join(60)
        assert not self._thread.is_alive() and self.error is None, self.error
        return self


def keeper(place: Path, out: Path, **options: Any) -> Running:
    given = {
        "model": str(place / "model"),
        "data": str(place / "text.txt"),
        "out": str(out),
        "rounds": ROUNDS,
    }
    small = {"seq": 16, "batch": 4, "local_steps": 3, "lr": 0.01, "eval_samples": 8, "eval_every": 0}
    config = SwarmConfig.from_dict({"listen": "127.0.0.1:0", "gather": 60.0} | given | small | options)
    return Running(lambda own: own.keep(Keeper, config)).listening()


def branch(above: int, out: Path, name: str, members: int, judge: bool = True) -> Running:
    given = {"judge": judge, "under": f"127.0.0.1:{above}", "out": str(out), "name": name, "members": members}
    config = SwarmConfig.from_dict({"listen": "127.0.0.1:0", "gather": 60.0, "patience": 20.0} | given)
    return Running(lambda own: own.keep(open_branch, config)).listening()


def member(port: int, name: str, kind: type[SwarmMember] = SwarmMember, after: int = 0) -> Running:
    places = f"127.0.0.1:{port}" + (f",127.0.0.1:{after}" if after else "")
    config = SwarmJoinConfig.from_dict({"address": places, "name": name, "patience": 20.0, "device": "cpu"})
    return Running(lambda own: join(config, own.notes.append, kind))


def test_a_branch_is_one_member_above_and_a_keeper_below(place: Path, tmp_path: Path) -> None:
    """A branch of a branch is there too: keeper <- site <- room, and a liar in the room."""
    top = keeper(place, tmp_path / "top", members=2, judge=False)
    site = branch(top.port, tmp_path / "site", "site", members=2, judge=False)
    room = branch(site.port, tmp_path / "room", "room", members=4)
    kinds = {"anna": SwarmMember, "bert": SwarmMember, "carl": SwarmMember, "liar": Liar}
    members = [member(room.port, name, kind) for name, kind in kinds.items()]
    members += [member(site.port, "dora"), member(top.port, "emil")]
    for each in [*members, room, site, top]:
        each.ended()

    record = load_run(tmp_path / "top")
    first, last = record.loss.eval_first, record.loss.eval_final  # type: ignore[attr-defined]
    assert last < first
    held = [load_run(tmp_path / name).equal for name in ("top", "site", "room")]  # type: ignore[attr-defined]
    for own, names in zip(held, ({"site", "emil"}, {"room", "dora"}, set(kinds)), strict=True):
        assert own and set(own) <= names  # whose last word came, on a busy machine
    assert len({bits for own in held for bits in own.values()}) == 1

    room_keeper = room.keeper
    assert room_keeper is not None and isinstance(room_keeper.server.judge, Gauntlet)
    names = room_keeper.server.names()
    assert [names[client] for client in room_keeper.server.judge.named] == ["liar"]
    assert any("liar" in note and "named" in note for note in room.notes)
    above = {m.name: m for m in record.members}  # type: ignore[attr-defined]
    assert not above["site"].refused and above["site"].weight > 0
    # of five behind the site it takes the bytes of one
    assert above["site"].up < 1.2 * above["emil"].up

    pool = top.keeper.taught.work  # type: ignore[union-attr]
    assert pool.counts.done == record.totals["samples"] == sum(m.samples for m in above.values())
    below = sum(m.samples for m in load_run(tmp_path / "site").members)  # type: ignore[attr-defined]
    assert above["site"].samples == below


def test_members_of_a_branch_that_vanishes_go_on_at_the_keeper(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_program, "TURN", 1.0)
    top = keeper(place, tmp_path / "top", rounds=40, judge=False)
    site = branch(top.port, tmp_path / "site", "site", members=2)
    members = [member(site.port, name, after=top.port) for name in ("anna", "bert")]
    wait = threading.Event().wait
    while not (site.keeper and site.keeper.server.version >= 2):
        wait(0.02)
    site.hub.close(0.0)
    for each in [*members, top]:
        each.ended()
    record = load_run(tmp_path / "top")
    by_name = {m.name: m for m in record.members}  # type: ignore[attr-defined]
    assert by_name["anna"].rounds > 0 < by_name["bert"].rounds
    # what they held led on: nobody was sent the whole model again
    whole = record.bytes["raw_down"] / 2 / sum(m.rounds for m in by_name.values())
    assert by_name["anna"].down / by_name["anna"].rounds < whole
    pool = top.keeper.taught.work  # type: ignore[union-attr]
    assert pool.counts.done == record.totals["samples"]


def test_what_a_lost_member_of_a_branch_had_goes_back_up_and_nothing_counts_twice() -> None:
    """Two servers and three clients without a link: the top one's pool, a share, its gaps, and the sum."""
    pool = WorkPool(torch.arange(500).view(100, 5), batch=2)
    top = Server(torch.zeros(1, 6), Synchronous(), Fixed(steps=10), DeltaDownload(Raw()), work=pool)
    top.join(ClientProfile(0, 1.0, 100, members=3))
    own = BranchServer(
        torch.zeros(1, 6), lambda steps: Together(together=steps), PassedShare(2, 1000, held=0)
    )
    above = Branch(
        torch.nn.Linear(5, 1), own, Parameters(torch.nn.Linear(5, 1)), lambda own: Together().pace(own, 6)
    )
    for client in range(3):
        own.join(ClientProfile(client, 1.0 + client, 100))
    trained = list[int]()
    for number in range(1, 4):
        top.begin([0])
        version = VersionMessage.unpack(top.issue(0, above.held, above.sequence).pack())
        own.follow(version)
        assert own.newest == top.newest and own.given.equal(top.given)
        found = list[RoundSum]()
        own.summed = found.append
        own.begin(range(3))
        shares = {c: VersionMessage.unpack(own.issue(c, None, number - 1).pack()) for c in range(3)}
        assert sum(v.steps for v in shares.values()) == 10
        for client, told in list(shares.items())[:2]:
            ids = read_share(told.work).ids.tolist()
            trained += ids
            packet = ClientResiduals().encode(client, number, torch.full((1, 6), 1.0 + client), Raw())
            update = Update(client, told.sequence, told.number, len(ids), told.steps, packet)
            assert isinstance(own.receive(client, update.pack()), Accepted)
        lost = read_share(shares[2].work).ids.tolist()
        own.give_up(2)
        ((change, samples, left),) = found
        by = [len(read_share(shares[c].work).ids) for c in (0, 1)]
        assert samples == sum(by) and sum(n for _, n in left) == len(lost)
        torch.testing.assert_close(change, torch.full((1, 6), (by[0] + 2 * by[1]) / samples))
        answer = replace(above.answer(version, change), samples=samples, left=left)
        assert isinstance(top.receive(0, answer.pack()), Accepted)
        assert [pool._again[i] for i in range(len(lost))] == lost
    assert pool.counts.done == len(trained) == len(set(trained))
    too_many = replace(answer, sequence=4, version=3, left=((0, 30),), samples=2)
    top.begin([0])
    top.issue(0, above.held, above.sequence)
    assert "was trained on 2 samples" in str(top.receive(0, too_many.pack()))
