"""A ring of stages says what the whole model says, whatever it is asked at once."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from meshes import meshes

from thinwire.channels.channel import Scheme
from thinwire.codecs import Cast
from thinwire.types import InputError, LinkError, ThinwireError
from thinwire.uses.serving.drafts import ModelDrafts, PhraseDrafts
from thinwire.uses.serving.later_stage import PASSES, LaterStage
from thinwire.uses.serving.ring_messages import STOP as RING_END
from thinwire.uses.serving.ring_messages import Portion
from thinwire.uses.serving.row_pool import TextRows, TextSegment
from thinwire.uses.serving.text_requests import CANCELLED, LENGTH, STOP, TextRequest
from thinwire.uses.serving.token_picking import Picking

from .rings import greedy, random_model, ring, works

transformers = pytest.importorskip("transformers")
KINDS = ("llama", "gpt2", "gemma2", "qwen3_moe")


@pytest.fixture(scope="module")
def llama() -> Any:
    return random_model(transformers.LlamaConfig(**tiny_models.LLAMA))


def prompts(many: int, longest: int = 30) -> list[tuple[int, ...]]:
    torch.manual_seed(3)
    return [tuple(torch.randint(300, (int(n),)).tolist()) for n in torch.randint(1, longest, (many,))]


@pytest.mark.parametrize("kind", KINDS)
def test_stages_say_what_the_whole_model_says_many_at_once(kind: str) -> None:
    name, given = tiny_models.CONFIGS[kind]
    model = random_model(getattr(transformers, name)(**given))
    asked = [TextRequest(p, 9) for p in prompts(6)]
    for stages in (1, 3):
        with ring(works(model, stages), chunk=8) as engine:
            texts = [engine.submit(r) for r in asked]
            assert [t.wait() for t in texts] == [greedy(model, r.prompt, 9) for r in asked]
            assert {t.reason for t in texts} == {LENGTH} and engine.running == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("own", [True, False])
def test_drafts_leave_the_text_as_it_is_and_save_trips(llama: Any, temperature: float, own: bool) -> None:
    picking = Picking(temperature, top_p=0.9, top_k=40, seed=7)
    repeating = (5, 6, 7, 8) * 5
    said = dict[bool, list[int]]()
    drafter = ModelDrafts(llama) if own else PhraseDrafts()
    with ring(works(llama, 2), drafter=drafter) as engine:
        engine.times.note(0, 1.0)  # so that drafts are worth it
        for drafts in (False, True):
            text = engine.submit(TextRequest(repeating, 24, picking, drafts=drafts))
            said[drafts] = text.wait()
            assert text.rounds + text.accepted >= 24 and (drafts or text.drafted == 0)
        assert said[True] == said[False] and len(said[True]) == 24
        if own:  # the model is its own draft: what it draws with the same noise is right
            assert text.accepted == text.drafted > 10 and text.rounds < 12


def test_a_text_ends_at_its_end_and_rows_are_free_for_the_next(llama: Any) -> None:
    (prompt,) = prompts(1)
    said = greedy(llama, prompt, 12)
    end = said[5]
    need = len(prompt) + 12
    with ring(works(llama, 2, rows=need)) as engine:  # room for one
        first = engine.submit(TextRequest(prompt, 12, ends=frozenset([end])))
        others = [engine.submit(TextRequest(prompt, 12)) for _ in range(3)]
        assert first.wait() == said[: said.index(end)] and first.reason == STOP
        engine.cancel(others[1])
        assert others[0].wait() == said == others[2].wait()
        assert others[1].reason == CANCELLED and others[1].wait() == []
        with pytest.raises(InputError, match=f"{need + 1} tokens of prompt and answer do not fit"):
            engine.submit(TextRequest(prompt, 13))


def test_one_that_is_cancelled_in_the_middle_harms_no_other(llama: Any) -> None:
    many = prompts(5)
    with ring(works(llama, 2, rows=300), chunk=4) as engine:
        gone = [engine.submit(TextRequest(p, 40)) for p in many]
        next(iter(gone[0]))
        for text in gone:
            engine.cancel(text)
        kept = [engine.submit(TextRequest(p, 9)) for p in many]
        assert [t.wait() for t in kept] == [greedy(llama, p, 9) for p in many]


def test_a_stage_that_fails_is_named_to_all_that_wait_for_it(llama: Any) -> None:
    made = works(llama, 2)
    (prompt,) = prompts(1)
    with ring(made) as engine:
        texts = [engine.submit(TextRequest(prompt, 100)) for _ in range(2)]
        next(iter(texts[0]))
        made[1].width = 7  # so that what comes does not fit
        for text in texts:
            with pytest.raises(ThinwireError, match=r"stage 1 failed: a packet for shape"):
                text.wait()
        with pytest.raises(ThinwireError, match="stage 1 failed"):
            engine.submit(TextRequest(prompt, 5))


def test_a_stage_that_is_gone_is_named(llama: Any) -> None:
    made = works(llama, 2)
    (prompt,) = prompts(1)
    with ring(made, {"deadline": 1.5}) as engine:
        text = engine.submit(TextRequest(prompt, 100))
        next(iter(text))
        engine.last._link.close(0.0)  # as of a process that was killed
        with pytest.raises(LinkError, match="rank 1"):
            text.wait()


def test_what_comes_behind_the_end_is_left_to_the_next_ring(llama: Any) -> None:
    with meshes(2) as ranks:
        there, here = ranks[0][1].mailbox, ranks[1][0].mailbox
        for tag, data in ((PASSES, RING_END), (PASSES, b"the next ring's"), (b"Z", b"all have come")):
            there.send(tag, data)
        assert here.look(b"Z", 10) == b"all have come"
        LaterStage(1, works(llama, 2)[1], here, here).run()
        assert here.look(PASSES) == b"the next ring's"


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_each_draft_of_a_tree_is_seen_as_if_its_way_were_the_text(kind: str) -> None:
    name, given = tiny_models.CONFIGS[kind]
    model = random_model(getattr(transformers, name)(**given))
    (work,) = works(model, 1)
    rows, other, text = TextRows(30, 40), TextRows(90, 20), [7, 9, 11, 13, 15, 17]
    parents, drafts = (-1, 0, -1, 2, 0), [21, 22, 23, 24, 25]
    work.extend(
        [Portion(TextSegment(1, rows, 0, 5)), Portion(TextSegment(2, other, 0, 3))],
        torch.tensor([[*text[:5], 1, 2, 3]]),
    )
    tree = Portion(TextSegment(1, rows, 5, 6, parents), 6, tuple(drafts))
    found = work.extend(
        [Portion(TextSegment(2, other, 3, 1), 1), tree], torch.tensor([[4, text[5], *drafts]])
    )[0, 1:]
    ways = [[], [0], [0, 1], [2], [2, 3], [0, 4]]
    for own, way in zip(found, ways, strict=True):
        tokens = torch.tensor([text + [drafts[i] for i in way]])
        with torch.inference_mode():
            expected = model(input_ids=tokens, use_cache=False).logits[0, -1]
        assert torch.allclose(own, expected, atol=1e-4)
    # The path 2, 3 was right: what follows sees it, and no other draft.
    after = Portion(TextSegment(1, rows, 8, 1), 1, kept=(8, 9))
    found = work.extend([after], torch.tensor([[31]]))[0, 0]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[*text, 23, 24, 31]]), use_cache=False).logits[0, -1]
    assert torch.allclose(found, expected, atol=1e-4)


def test_drafts_cross_as_tokens_do_however_many_they_are(llama: Any) -> None:
    first, second = works(llama, 2, prompt=Scheme(Cast("bfloat16")))
    for drafted, exact in ((tuple(range(19)), True), ((), False)):
        portion = Portion(TextSegment(1, TextRows(0, 40), 0, 20), 1 + len(drafted), drafted)
        hidden = first.extend([portion], torch.arange(20)[None])
        assert torch.equal(second.decode(first.code([portion], hidden)), hidden) == exact
