"""A prompt that begins like an earlier text is copied: it is in the right rows, and the text is the same."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.types import PayloadError
from thinwire.uses.serving.prefix_reuse import HeldText, KeptTexts
from thinwire.uses.serving.row_pool import RowCopy, StageCache, TextRows
from thinwire.uses.serving.text_requests import TextRequest

from .rings import greedy, random_model, ring, works

transformers = pytest.importorskip("transformers")
ROOM = 120


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3), st.integers(0, 4)), max_size=30))
def test_what_is_copied_is_what_the_prompt_says(asked: list[tuple[int, int, int]]) -> None:
    kept, memory, running = KeptTexts(ROOM), torch.full((ROOM,), -1), list[HeldText]()
    for n, turn, back in asked:
        prompt = [*range(n - n // 3), *(100 * turn + i for i in range(n // 3))]  # they begin alike
        granted = kept.take(prompt, n + 5, running)
        if granted is not None:
            (rows, copy), own = granted, torch.tensor(prompt)
            assert all(rows.end <= r.first or r.end <= rows.first for r, _ in running)
            assert torch.equal(memory[copy.first : copy.first + copy.many], own[: copy.many])
            assert copy.many < n
            memory[rows.first : rows.first + n] = own
            running.append(HeldText(rows, prompt))
        if running and back < len(running):
            kept.leave(running.pop(back))


def test_rows_are_copied_from_any_place_to_any() -> None:
    cache = StageCache(10, {}, torch.device("cpu"))
    cache._keys[0] = torch.arange(10.0).view(1, 1, 10, 1)
    cache.copy(RowCopy(0, 6), TextRows(2, 8))
    assert cache._keys[0].flatten().tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 8, 9]
    for wrong in (
        (RowCopy(8, 3), TextRows(0, 5)),
        (RowCopy(0, 3), TextRows(0, 2)),
        (RowCopy(0, 2), TextRows(9, 2)),
    ):
        with pytest.raises(PayloadError, match="copied from"):
            cache.copy(*wrong)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("stages", [1, 3])
def test_a_conversation_is_not_computed_again_and_says_the_same(kind: str, stages: int) -> None:
    name, given_ = tiny_models.CONFIGS[kind]
    model = random_model(getattr(transformers, name)(**given_))
    torch.manual_seed(1)
    turns = [torch.randint(300, (k,)).tolist() for k in (20, 6, 7)]
    with ring(works(model, stages, rows=90), chunk=8) as engine:
        held, beside = list[int](), engine.submit(TextRequest((*turns[0], 7), 20))
        for turn in turns:
            before, prompt = engine.work.spent.tokens, (*held, *turn)
            text = engine.submit(TextRequest(prompt, 5))
            assert text.wait() == greedy(model, prompt, 5)
            if held:
                assert text.reused >= len(held) - 1
                assert engine.work.spent.tokens - before < len(prompt)
            held = [*prompt, *text.made]
        assert beside.wait() == greedy(model, beside.request.prompt, 20)
        again = engine.submit(TextRequest(tuple(turns[0]), 60))  # for which all others are forgotten
        assert again.wait()[:9] == greedy(model, turns[0], 9)


def test_nothing_is_kept_where_none_is_wanted() -> None:
    model, prompt = random_model(transformers.LlamaConfig(**tiny_models.LLAMA)), tuple(range(20))
    with ring(works(model, 1), reuse=False) as engine:
        first = engine.submit(TextRequest(prompt, 4)).wait()
        again = engine.submit(TextRequest(prompt, 4))
        assert again.wait() == first == greedy(model, prompt, 4) and again.reused == 0
