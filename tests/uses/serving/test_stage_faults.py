"""Stages that are lost and come back, and lines that are cut: what texts and their clients see of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import tiny_models
import torch
from meshes import meshes, together
from tcp_proxy import TcpProxy
from waiting import free_port, until

from thinwire.channels.channel import Scheme
from thinwire.codecs import Cast
from thinwire.links import connect_mesh
from thinwire.types import LinkError
from thinwire.uses.serving.drafts import PhraseDrafts
from thinwire.uses.serving.later_stage import AGAIN, LaterStage
from thinwire.uses.serving.text_engine import RingEnds, TextEngine
from thinwire.uses.serving.text_requests import Text, TextRequest
from thinwire.uses.serving.token_picking import Picking

from .rings import greedy, random_model, ring, run_stage, works

transformers = pytest.importorskip("transformers")
CUT = 2.0  # seconds


@pytest.fixture(scope="module")
def llama() -> Any:
    return random_model(transformers.LlamaConfig(**tiny_models.LLAMA))


def requests() -> list[TextRequest]:
    torch.manual_seed(5)
    made = [tuple(torch.randint(300, (n,)).tolist()) for n in (3, 17, 30)]
    return [TextRequest(p, 30, Picking(t, seed=7)) for p, t in zip(made, (0.0, 1.0, 0.0), strict=True)]


class Losing:
    """A ring whose later stages are lost and started again, with nothing of what they knew."""

    def __init__(self, model: Any, stages: int, schemes: dict[str, Scheme], **engine: Any) -> None:
        self._stack, self._model, self._stages, self._schemes = ExitStack(), model, stages, schemes
        self.told = list[str]()
        first = works(model, stages, rows=100, **schemes)[0]  # room for two texts
        after, last, between = self._begin()
        more = {"again": self._again, "between": between, **engine}
        self.engine = TextEngine(first, after, last, **more)

    def _begin(self) -> RingEnds:
        ranks = self._stack.enter_context(meshes(self._stages))
        boxes = [{r: peer.mailbox for r, peer in rank.items()} for rank in ranks]
        self._later = boxes[1:]
        for k, work in enumerate(works(self._model, self._stages, rows=100, **self._schemes)[1:], 1):
            stage = LaterStage(k, work, boxes[k][k - 1], boxes[k][0], boxes[k].get(k + 1))
            threading.Thread(target=run_stage, args=(stage,), daemon=True).start()
        last = self._stages - 1
        return RingEnds(boxes[0][1], boxes[0][last], [boxes[0][k] for k in range(2, last)])

    def _again(self, error: LinkError) -> RingEnds:
        self.told.append(str(error))
        return self._begin()

    def lose(self, stage: int) -> None:
        """Lose a stage, as of a process that was killed."""
        for box in self._later[stage - 1].values():
            box._link.close(0.0)

    def close(self) -> None:
        self.engine.close()
        self._stack.close()


@contextmanager
def losing(*arguments: Any, **engine: Any) -> Iterator[Losing]:
    found = Losing(*arguments, **engine)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize(("stages", "lost"), [(2, 1), (4, 2)])
def test_texts_go_on_from_what_they_have_once_a_lost_stage_is_back(
    llama: Any, stages: int, lost: int
) -> None:
    half = {"prompt": Scheme(Cast("bfloat16"))}  # so that tokens cross otherwise than prompts do
    asked = requests()
    with ring(works(llama, stages, **half)) as whole:
        expected = [whole.submit(r).wait() for r in asked]
    assert expected[0] == greedy(llama, asked[0].prompt, 30)  # a prompt of three tokens crosses as they do
    with losing(llama, stages, half, chunk=8, drafter=PhraseDrafts()) as found:
        texts = [found.engine.submit(r) for r in asked]
        for times, reached in enumerate((4, 22), 1):  # twice, with few and many tokens of an answer
            until(lambda n=reached: len(texts[0].made) + len(texts[1].made) >= n)
            found.lose(lost)
            until(lambda n=times: len(found.told) == n)
        assert [t.wait() for t in texts] == expected and len(found.told) == 2
        assert found.engine.running == 0 and f"rank {lost}" in found.told[0]


def test_what_is_asked_or_given_up_while_a_stage_is_away_is_heard_afterwards(llama: Any) -> None:
    asked, away = requests(), threading.Event()

    def ended(text: Text) -> None:
        ends.append(text.number)

    ends = list[int]()
    with losing(llama, 2, {}, ended=ended) as found:
        begin = found._begin
        found._begin = lambda: (away.wait(20), begin())[1]  # type: ignore[method-assign]
        first = found.engine.submit(asked[0])
        next(iter(first))
        found.lose(1)
        until(lambda: found.engine.lost)
        found.engine.cancel(first)
        second = found.engine.submit(asked[1])
        away.set()
        assert len(second.wait()) == 30 and first.reason == "cancelled" and not found.engine.lost
        assert second.number in ends


def test_a_later_stage_is_told_that_all_begin_again(llama: Any) -> None:
    with meshes(3) as ranks:
        boxes = [{r: peer.mailbox for r, peer in rank.items()} for rank in ranks]
        stage = LaterStage(2, works(llama, 3)[2], boxes[2][1], boxes[2][0])
        boxes[0][2].send(AGAIN, b"")
        with pytest.raises(LinkError, match="begins again"):  # though the stage before it says nothing
            stage.run()


def test_a_cut_line_costs_time_alone(llama: Any) -> None:
    (asked, *_), made = requests(), works(llama, 2)
    import torch.distributed as dist

    store, port = dist.HashStore(), free_port()
    with TcpProxy(port) as proxy:
        route: dict[str, Any] = {"port": port, "advertise": f"127.0.0.1:{proxy.port}"}
        near, far = together(
            [lambda: connect_mesh(0, 2, store, **route), lambda: connect_mesh(1, 2, store, deadline=20.0)]
        )
        stage = LaterStage(1, made[1], far[0].mailbox, far[0].mailbox)
        thread = threading.Thread(target=run_stage, args=(stage,), daemon=True)
        thread.start()
        with TextEngine(made[0], near[1].mailbox, near[1].mailbox) as engine:
            text = engine.submit(asked)
            next(iter(text))
            before = proxy.connections
            proxy.cut()
            began = time.monotonic()
            time.sleep(CUT)
            proxy.restore()
            text.wait()
            assert time.monotonic() - began > CUT and proxy.connections > before
            assert text.made == greedy(llama, asked.prompt, 30)
        thread.join(20)
        together([near[1].close, far[0].close])
