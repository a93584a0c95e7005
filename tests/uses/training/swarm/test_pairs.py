"""Two members that are half of one each, over a relay, beside a whole one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny_models
import torch
from relayed import TOKEN, Running, mesh

from thinwire.rounds.parameters import Parameters
from thinwire.rounds.update_messages import Update, VersionMessage
from thinwire.runs.machine.compute import ON_CPU
from thinwire.runs.models.model_source import ModelSource
from thinwire.types import InputError, LinkError, ThinwireError
from thinwire.uses.kinds import load_run
from thinwire.uses.training.swarm.member import SwarmMember
from thinwire.uses.training.swarm.pairs import halves, pair_crossing
from thinwire.uses.training.swarm.run import pair_program
from thinwire.uses.training.swarm.run.keeper_program import Keeper
from thinwire.uses.training.swarm.run.member_program import SwarmTerms, join
from thinwire.uses.training.swarm.run.options import SwarmConfig, SwarmJoinConfig
from thinwire.uses.training.swarm.run.record import SwarmRecord
from thinwire.uses.training.swarm.run.swarm_model import build_whole, loss_in

pytestmark = pytest.mark.usefixtures("own_kits", "all_scored")
transformers = pytest.importorskip("transformers")
ROUNDS = 16
TIED = {"num_hidden_layers": 3, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    folder = tiny_models.write_llama(tmp_path_factory.mktemp("pairs"), tiny_tokenizer, 1200, **TIED)
    (folder / "token").write_bytes(TOKEN)
    return folder


class OnThread:
    """What runs on a thread, with what it said, and how it ended."""

    def __init__(self, call: Callable[[Callable[[str], object]], Any]) -> None:
        self.notes: list[str] = []
        self.found: Any = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[Callable[[str], object]], Any]) -> None:
        try:
            self.found = call(self.notes.append)
        except ThinwireError as e:
            self.found = e

    def said(self, text: str) -> bool:
        end = time.monotonic() + 60
        while not (found := any(text in note for note in self.notes)) and time.monotonic() < end:
            assert not isinstance(self.found, Exception), self.found
            time.sleep(0.02)
        assert found, self.notes
        return True

    def end(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive(), self.notes
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class Emil(SwarmMember):
    """A whole member, whose rounds last until the pair is there again."""

    replaced = threading.Event()
    held_by: ClassVar[list[SwarmMember]] = []

    def train(self, version: VersionMessage, start: torch.Tensor | None = None) -> Update:
        self.replaced.wait(0.5)
        self.held_by[:] = [self]
        return super().train(version, start)


def slow_goodbye(meet: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    """Let a first half's last word take a second: the keeper, whose relay passes it on, is to wait for it."""

    def met(partner: Any, client: int) -> None:
        send = partner.mailbox.send

        def sent(tag: bytes, body: bytes, *label: str) -> Any:
            if tag == halves.ORDER and body[:1] == halves.OVER:
                return threading.Timer(1.0, send, (tag, body)).start()
            return send(tag, body, *label)

        partner.mailbox.send = sent
        meet(partner, client)

    return met


def test_a_pair_and_a_whole_member_train_one_model_and_a_half_that_froze_is_replaced(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_of, make_half, over = dict[str, Any](), pair_program.make_half, threading.Event()
    monkeypatch.setattr(pair_crossing, "WAIT", 2.0)

    def made(config: SwarmJoinConfig, *args: Any) -> Any:
        half = made_of[config.name] = make_half(config, *args)
        if config.name == "bert":
            steps, versions = half.part_of_steps, list[int]()

            def freeze(version: VersionMessage, start: torch.Tensor) -> torch.Tensor:
                versions.extend([version.number] * len(version.packets))
                if len(versions) > 2:
                    over.wait(60)
                    raise InputError("it froze")  # or it would come back, as half of another pair
                return steps(version, start)

            half.part_of_steps = freeze
        elif config.name == "anna":
            half.meet = slow_goodbye(half.meet)
        return half

    monkeypatch.setattr(pair_program, "make_half", made)
    given = {
        "model": str(place / "model"),
        "data": str(place / "text.txt"),
        "seq": 16,
        "batch": 4,
        "lr": 0.01,
    }
    given |= {"rounds": ROUNDS, "local_steps": 3, "eval_samples": 8, "members": 2, "out": str(tmp_path)}
    given |= {"listen": "127.0.0.1:0", "token_file": str(place / "token"), "gather": 60.0}
    listens = threading.Event()

    def keep(noted: Callable[[str], object]) -> int:
        def told(hub: Any) -> None:
            ports.append(hub.port)
            listens.set()

        Keeper(SwarmConfig.from_dict(given), lambda *_: None, noted).run(told)
        return 0

    ports = list[int]()
    keeper = OnThread(keep)
    assert listens.wait(60), keeper.found

    def joined(name: str, stages: int = 2, patience: float = 30.0) -> OnThread:
        who = {"address": f"127.0.0.1:{ports[0]}", "token_file": str(place / "token"), "device": "cpu"}
        config = SwarmJoinConfig.from_dict(who | {"name": name, "stages": stages, "patience": patience})
        if stages == 2:
            return OnThread(lambda noted: pair_program.join_half(config, noted))
        return OnThread(lambda noted: join(config, noted, Emil))

    with pytest.raises(LinkError, match=r"no other half came to 127.* for 0.5 s; start one more"):
        joined("carl", patience=0.5).end()
    anna = joined("anna")
    assert keeper.said("anna waits for another half")
    joined("bert")
    emil = joined("emil", stages=1)
    assert anna.said("anna+bert are one member")
    assert anna.said("anna waits for another half") and anna.said("anna+bert has lost a half: waited 2 s")
    monkeypatch.setattr(pair_crossing, "WAIT", 60.0)  # who is only slow is not lost
    dora = joined("dora")
    assert keeper.said("anna+dora (client")
    alone = joined("fritz")
    assert keeper.said("fritz waits for another half")
    Emil.replaced.set()
    assert [m.end() for m in (anna, dora, emil, alone)] == [ROUNDS] * 4
    keeper.end()
    over.set()
    record = load_run(tmp_path)
    assert isinstance(record, SwarmRecord)
    first, last = record.loss.eval_first, record.loss.eval_final
    assert first is not None and last is not None and last < first
    members = {m.name: m for m in record.members}  # the first pair is another one if it was not gone yet
    assert members.keys() - {"anna+bert"} == {"anna+dora", "emil"}
    assert all(members[name].rounds > 1 and members[name].weight > 0 for name in ("anna+dora", "emil"))
    assert record.totals["samples"] == sum(m.samples for m in record.members)
    # the same bits at the second half as at the first one and at the whole member
    there = [half for name, half in made_of.items() if name != "bert"] + Emil.held_by
    held = {f"{h.held.number}:{h.held.check:08x}" for h in there if h.held is not None}
    assert len(there) == 3 and len(held) == 1 and set(record.equal.values()) == held


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_gradients_of_two_halves_are_those_of_the_whole_model(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(pair_program, "RECIPE", "fp32")
    if family == "gpt2":
        ends = {"bos_token_id": 0, "eos_token_id": 1}
        config = transformers.GPT2Config(
            **tiny_models.GPT2, **ends, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
        )
    else:
        config = transformers.LlamaConfig(**tiny_models.LLAMA | TIED)
    source = ModelSource("tiny", family, config, None, None)
    whole = build_whole(source, 0, 0, ON_CPU)
    parameters = Parameters(whole)
    terms = SwarmTerms(0, parameters.numel, 16, 4, 0, 0, False, False, 0.0, 0.0, "k", 1)
    exact = SwarmJoinConfig(device="cpu", dtype="float32")
    both = [pair_program.make_half(exact, terms, source, k) for k in range(2)]
    assert all(half.signature.digest == parameters.signature.digest for half in both)
    row, found = parameters.read(), torch.zeros(1, parameters.numel)
    blocks = torch.randint(300, (4, 17))
    blocks[0, 3:9] = ~blocks[0, 3:9]  # not to be learnt
    with Running() as relay, mesh(relay) as ranks, ThreadPoolExecutor(2) as pool:
        for half, peers in zip(both, ranks, strict=True):
            half.crossing.connect(next(iter(peers.values())))
        done = [pool.submit(h.crossing, h._model, blocks) for h in both]
        losses = [float(d.result(30).detach()) for d in done]
    for half in both:
        assert torch.equal(half.part.of(row), half._parameters.read())
        own = torch.cat([p.grad.reshape(1, -1) for p in half._model.parameters()], 1)
        at = 0
        for start, many in half.part.spans:
            found[:, start : start + many] += own[:, at : at + many]
            at += many
    whole.train()
    loss = loss_in(ON_CPU)(whole, blocks)
    loss.backward()
    assert losses[1] == pytest.approx(float(loss.detach()), rel=1e-5)
    wanted = torch.cat([p.grad.reshape(1, -1) for p in whole.parameters() if p.grad is not None], 1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_two_halves_have_all_adapters_of_the_whole_model() -> None:
    pytest.importorskip("peft")
    config = transformers.LlamaConfig(**tiny_models.LLAMA | TIED)
    source = ModelSource("tiny", "llama", config, None, None)
    parameters = Parameters(build_whole(source, 4, 0, ON_CPU))
    row, found = parameters.read(), list[torch.Tensor]()
    terms = SwarmTerms(0, parameters.numel, 16, 4, 4, 0, False, False, 0.0, 0.0, "k", 1)
    for stage in range(2):
        half = pair_program.make_half(SwarmJoinConfig(device="cpu"), terms, source, stage)
        assert half.signature.digest == parameters.signature.digest and half.part.twin is None
        found.append(half._parameters.read())
    assert torch.equal(torch.cat(found, 1), row)


def test_a_half_that_nobody_joins_or_that_cannot_be_says_why(place: Path) -> None:
    with pytest.raises(InputError, match="--stages 3 is neither 1, the whole model, nor 2"):
        SwarmJoinConfig(stages=3)
    with pytest.raises(InputError, match="--stages 2 needs the token"):
        SwarmJoinConfig(stages=2)
    with pytest.raises(InputError, match="would leave this machine"):
        SwarmJoinConfig(stages=2, data="texts", token_file=str(place / "token"))
