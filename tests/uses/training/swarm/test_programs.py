"""Keeper and members as the commands run them, over real sockets, each on a thread of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from thinwire.types import InputError, LinkError, ThinwireError
from thinwire.uses.kinds import load_run
from thinwire.uses.training.swarm import scoring
from thinwire.uses.training.swarm.member import SwarmMember
from thinwire.uses.training.swarm.run import member_program
from thinwire.uses.training.swarm.run.keeper_program import Keeper
from thinwire.uses.training.swarm.run.liars import Liar
from thinwire.uses.training.swarm.run.member_program import join
from thinwire.uses.training.swarm.run.options import SwarmConfig, SwarmJoinConfig
from thinwire.uses.training.swarm.run.record import SwarmRecord
from thinwire.uses.training.swarm.run.standby_program import stand_by

pytestmark = pytest.mark.usefixtures("own_kits")
transformers = pytest.importorskip("transformers")
SMALL = {"seq": 16, "batch": 4, "rounds": 3, "local_steps": 3, "lr": 0.01, "eval_samples": 8, "eval_every": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """Return a folder with a tiny model and a text."""
    folder = tmp_path_factory.mktemp("swarm")
    return tiny_models.write_llama(folder, tiny_tokenizer, 400, num_hidden_layers=2)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _quietly(call: Callable[[], object]) -> None:
    with suppress(ThinwireError):
        call()


class Swarm:
    """A keeper on a thread, its port, what it said, and how it ended."""

    def __init__(self, place: Path, out: Path, **options: Any) -> None:
        given = (
            {"model": str(place / "model"), "data": str(place / "text.txt"), "out": str(out)}
            | SMALL
            | options
        )
        self.notes: list[str] = []
        self.error: BaseException | None = None
        self.out, self.port, self._listens = out, 0, threading.Event()
        self._config = SwarmConfig.from_dict({"listen": "127.0.0.1:0", "gather": 60.0} | given)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._listens.wait(60) and self.error is None, self.error

    def _run(self) -> None:
        try:
            self._keeper = Keeper(self._config, lambda *_: None, self.notes.append)
            self._keeper.run(self._told)
        except BaseException as e:
            self.error = e
            self._listens.set()

    def _told(self, hub: Any) -> None:
        self.port, self._hub = hub.port, hub
        self._listens.set()

    def joined(self, kind: type[SwarmMember] = SwarmMember, **options: Any) -> Callable[[], int]:
        """Let a member join on a thread; return what waits for its end and returns its last round."""
        found: list[int | ThinwireError] = []
        given = {"address": f"127.0.0.1:{self.port}", "patience": 20.0, "device": "cpu"} | options
        config = SwarmJoinConfig.from_dict(given)

        def run() -> None:
            try:
                found.append(join(config, lambda text: None, kind))
            except ThinwireError as e:
                found.append(e)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def ended() -> int:
            thread.join(60)
            assert found, f"{options} did not end"
            if isinstance(found[0], ThinwireError):
                raise found[0]
            return found[0]

        return ended

    def config(self, **changes: Any) -> SwarmConfig:
        return self._config.replace(**changes)

    def stop(self) -> None:
        """End as a keeper that is killed does: members hear nothing."""
        self._hub.close(0.0)
        self._thread.join(30)

    def down(self, name: str) -> int:
        server = self._keeper.server
        return next(server.traffic(c).down for c, own in server.names().items() if own == name)

    def record(self) -> SwarmRecord:
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        found = load_run(self.out)
        assert isinstance(found, SwarmRecord)
        return found


def test_members_fetch_a_model_train_it_and_leave_one_that_loads(place: Path, tmp_path: Path) -> None:
    swarm = Swarm(place, tmp_path, members=2)
    ends = [swarm.joined(name=name) for name in ("anna", "bert")]
    assert [end() for end in ends] == [3, 3]
    record = swarm.record()
    first, last = record.loss.eval_first, record.loss.eval_final
    assert first is not None and last is not None and last < first
    assert {m.name: (m.rounds, m.refused) for m in record.members} == {"anna": (3, []), "bert": (3, [])}
    assert all(m.weight > 0 for m in record.members)
    assert len(record.equal) == 2 and len(set(record.equal.values())) == 1
    assert record.totals["samples"] == sum(m.samples for m in record.members)
    assert record.bytes["kit"] > 0 and record.bytes["up"] < record.bytes["raw_up"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert sum(p.numel() for p in model.parameters()) > 0


def test_a_keeper_goes_on_from_its_last_round_and_hands_out_other_samples(
    place: Path, tmp_path: Path
) -> None:
    first = Swarm(place, tmp_path, rounds=2)
    assert first.joined(name="anna")() == 2
    first.record()
    again = Swarm(place, tmp_path, rounds=4, resume=True)
    assert again.joined(name="anna")() == 4
    record = again.record()
    assert record.totals["rounds"] == 4 and "It went on from round 2" in " ".join(record.notes)
    with pytest.raises(InputError, match="is of round 4 of 4; give more --rounds"):
        Keeper(again._config, lambda *_: None, print)


def test_a_machine_that_stands_ready_takes_over_and_members_find_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_program, "TURN", 2.0)
    first, second = Swarm(place, tmp_path / "a", rounds=50), free_port()
    ready = first.config(out=str(tmp_path / "b"), standby=f"127.0.0.1:{first.port}", patience=2.0)
    followed: list[str] = []
    standing = threading.Thread(
        target=lambda: _quietly(lambda: stand_by(ready, followed.append)), daemon=True
    )
    standing.start()
    anna = first.joined(name="anna", address=f"127.0.0.1:{first.port},127.0.0.1:{second}")
    while not any("holds round 2" in line for line in followed):
        threading.Event().wait(0.05)
    first.stop()
    standing.join(30)
    held = int(followed[-1].split()[-1])
    taken = Swarm(place, tmp_path / "b", rounds=held + 2, resume=True, listen=f"127.0.0.1:{second}")
    assert anna() == held + 2
    record = taken.record()
    (member,) = record.members
    assert (member.name, member.rounds) == ("anna", held + 2) and f"from round {held}" in " ".join(
        record.notes
    )
    # what it held led on: no whole model went down again
    assert member.down - first.down("anna") < record.bytes["raw_down"] / 2


def test_who_may_not_take_part_is_told_why(place: Path, tmp_path: Path) -> None:
    swarm = Swarm(place, tmp_path, ban=("carl",), rounds=2, members=2)
    anna = swarm.joined(name="anna")
    with pytest.raises(InputError, match="carl may not take part in this swarm"):
        swarm.joined(name="carl")()
    while not any("anna" in note for note in swarm.notes):
        threading.Event().wait(0.05)
    with pytest.raises(InputError, match="client anna is here already"):
        swarm.joined(name="anna")()
    with pytest.raises(InputError, match="is not asked for: this keeper hands out the samples"):
        swarm.joined(name="dora", data=str(place / "text.txt"))()
    bert = swarm.joined(name="bert")
    assert anna() == bert() == 2
    swarm.record()
    with pytest.raises(LinkError, match=f"no sign of 127.0.0.1:{swarm.port}"):
        join(SwarmJoinConfig(address=f"127.0.0.1:{swarm.port}", patience=1.0), lambda text: None)


def test_a_model_of_images_is_refused() -> None:
    with pytest.raises(InputError, match="cnn-fashion is no language model"):
        SwarmConfig(model="cnn-fashion")


def test_members_train_adapters_on_texts_of_their_own(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    swarm = Swarm(place, tmp_path, own_data=True, lora=4, members=2, lr=0.02)
    with pytest.raises(InputError, match="asks for data of your own; give them by --data"):
        swarm.joined(name="carl")()
    ends = [swarm.joined(name=name, data=str(place / "text.txt")) for name in ("anna", "bert")]
    assert [end() for end in ends] == [3, 3]
    record = swarm.record()
    first, last = record.loss.eval_first, record.loss.eval_final
    assert first is not None and last is not None and last < first
    assert (tmp_path / "model" / "config.json").exists()


def test_a_liar_is_named_and_does_not_count(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rounds of milliseconds leave no time for losses where a share of it is asked for
    monkeypatch.setattr(scoring.ScoringTime, "affords", lambda self, blocks: True)
    swarm = Swarm(place, tmp_path, members=4, rounds=6)
    kinds = {"anna": SwarmMember, "bert": SwarmMember, "dora": SwarmMember, "liar": Liar}
    ends = [swarm.joined(kind, name=name) for name, kind in kinds.items()]
    assert [end() for end in ends] == [6] * 4
    by_name = {m.name: m for m in swarm.record().members}
    assert by_name["liar"].weight == 0 and by_name["liar"].refused
    assert all(m.weight > 0 and not m.refused for name, m in by_name.items() if name != "liar")
