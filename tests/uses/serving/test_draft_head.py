"""Draft heads: what they propose beside the ring is what they say alone, and no text changes by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from thinwire.seeding import seeded
from thinwire.types import InputError
from thinwire.uses.serving.choosing.draft_tree import DraftTree, best_tree
from thinwire.uses.serving.drafting.draft_head import DraftHead, DraftShape
from thinwire.uses.serving.drafting.draft_lessons import DraftLesson, agreement
from thinwire.uses.serving.drafting.draft_training import begin, train_head
from thinwire.uses.serving.drafting.head_drafts import AskedDrafts, HeadDrafts
from thinwire.uses.serving.run.drafts.head_file import is_head, load_head, save_head
from thinwire.uses.serving.text_requests import TextRequest
from thinwire.uses.serving.token_picking import Picking

from .rings import greedy, random_model, ring, works

WIDTH, VOCAB, WINDOW = 32, 64, 8
SHAPE = DraftShape("small", WIDTH, heads=2, inner=48, window=WINDOW)


@pytest.fixture(scope="module")
def llama() -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": VOCAB}
    made = random_model(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    made.lm_head.weight.data *= 4  # surer of itself than at random
    return made


@pytest.fixture
def head(llama: Any) -> DraftHead:
    with seeded(3):
        made = DraftHead(SHAPE, torch.arange(1, VOCAB, 2)).eval()
    return made.bind(llama.lm_head.weight.data)


def states_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return found


def alone(head: DraftHead, states: Tensor, tokens: list[int], many: int) -> list[int]:
    """Return what a head says behind states [m, D], all of them in one pass and nothing kept."""
    found: list[int] = []
    own, said = states[None], list(tokens)
    with torch.inference_mode():
        for _ in range(many):
            n = own.shape[1]
            state, _ = head(own, torch.tensor([said]), torch.arange(n)[None], head.empty(1))
            found.append(int(head.common[head.scores(state[0, -1]).argmax()]))
            own, said = torch.cat((own, state[:, -1:]), 1), [*said, found[-1]]
    return found


def test_texts_side_by_side_get_what_each_gets_alone(llama: Any, head: DraftHead) -> None:
    with seeded(5):
        texts = [torch.randint(VOCAB, (1, n)) for n in (9, 17, 26)]
    states, drafts = [states_of(llama, t)[0] for t in texts], HeadDrafts(head)
    known = [3, 9, 20]  # tokens of each that its prompt has
    for i, (t, k) in enumerate(zip(texts, known, strict=True)):
        at = max(0, k - WINDOW)
        drafts.begin(i, t[0, at:k].tolist(), at)
        for start in range(0, k - 1, 4):  # in chunks
            drafts.pass_by(i, start, states[i][start : min(start + 4, k - 1)])
    for more in (1, 3, 2):  # tokens that are picked in a round
        asked = list[AskedDrafts]()
        for i, (t, k) in enumerate(zip(texts, known, strict=True)):
            own = states[i][k - 1 : k - 1 + more]  # the states before them
            asked.append(
                drafts.ask(i, k - 1, own, t[0, k : k + more].tolist(), DraftTree.chain(3 + i % 2), Picking())
            )
        known = [k + more for k in known]
        for i, (k, found) in enumerate(zip(known, drafts.draft(asked), strict=True)):
            assert found == alone(head, states[i][: k - 1], texts[i][0, 1:k].tolist(), 3 + i % 2)


def test_the_unrolled_lesson_is_what_the_head_does_when_it_goes_on_alone(llama: Any, head: DraftHead) -> None:
    with seeded(6):
        tokens = torch.randint(VOCAB, (2, 14))
    lesson, steps = DraftLesson(tokens, states_of(llama, tokens)), 3
    heard = agreement(head, lesson, steps)
    right = [list[bool]() for _ in range(steps)]
    for row, states in zip(tokens, lesson.states, strict=True):
        said = head.common[head.scores(states).argmax(-1)]  # by the model, of the common ones
        for t in range(12):
            x, known, past = states[None, : t + 1], row[None, 1 : t + 2], head.empty(1)
            at = torch.arange(t + 1)[None]
            for j in range(min(steps, 12 - t)):  # the tokens are the text's, the states its own
                with torch.inference_mode():
                    state, past = head(x, known, at, past)
                right[j].append(bool(head.common[head.scores(state[0, -1]).argmax()] == said[t + j + 1]))
                x, at = state[:, -1:], torch.tensor([[t + j + 1]])
                known = row[None, t + j + 2 : t + j + 3]
    for h, own in zip(heard, right, strict=True):
        assert h == pytest.approx(sum(own) / len(own), abs=1e-6)


def bushy(*_times: object) -> DraftTree:
    """Return a tree whose right path is rarely the first one."""
    return DraftTree((-1, 0, -1, 2, 2, -1), (0, 0, 1, 0, 1, 2))


def chain(*_times: object) -> DraftTree:
    """Return drafts behind each other."""
    return DraftTree.chain(3)


@pytest.mark.parametrize(
    ("stages", "temperature", "trees"), [(1, 0.0, bushy), (3, 1.0, bushy), (3, 0.0, chain)]
)
def test_a_head_leaves_texts_as_they_are(llama: Any, stages: int, temperature: float, trees: Any) -> None:
    with seeded(3):
        made = DraftHead(SHAPE, torch.arange(VOCAB))
    learn(made.bind(llama.lm_head.weight.data), llama)
    with seeded(7):
        prompts = [tuple(torch.randint(VOCAB, (n,)).tolist()) for n in (1, 3, 30)]
    said = dict[bool, list[list[int]]]()
    own = works(llama, stages)
    head = own[-1].drafts_by(made)
    given = {"head": head if stages == 1 else None, "tail": WINDOW, "chunk": 7}
    with ring(own, later_head=head, trees=trees, **given) as engine:
        engine.times.note(0, 1.0)  # a trip must be known before drafts
        for drafts in (False, True):
            asked = [TextRequest(p, 20, Picking(temperature, seed=4), drafts=drafts) for p in prompts]
            texts = [engine.submit(r) for r in asked]
            said[drafts] = [t.wait() for t in texts]
            assert all(t.drafted == 0 for t in texts) or drafts
    assert said[True] == said[False]
    assert said[True] == [greedy(llama, p, 20) for p in prompts] or temperature
    assert sum(t.accepted for t in texts) > 2  # of 60 tokens, by a head that has seen few texts
    assert not head._held  # whoever is over is forgotten


def learn(head: DraftHead, model: Any) -> None:
    """Teach a head by texts that the model makes."""
    with seeded(8), torch.no_grad():
        tokens = torch.randint(VOCAB, (32, 1))
        for _ in range(23):
            scores = model(input_ids=tokens, use_cache=False).logits[:, -1]
            tokens = torch.cat((tokens, scores.softmax(-1).multinomial(1)), 1)
    lesson = DraftLesson(tokens, states_of(model, tokens).clone())
    begin(head, lesson.states)
    train_head(head, lambda: lesson, 80, rate=1e-2)


def test_the_dearer_a_draft_the_fewer_are_sent() -> None:
    shares = [0.5, 0.14, 0.07, 0.05]
    many = [len(best_tree(shares, 0.1, token, 0.004).parents) for token in (0.0, 0.0015, 0.005, 0.013, 0.1)]
    assert many[0] > 8 and many[-1] == 0 and many == sorted(many, reverse=True) and len(set(many)) > 3
    for parents in (best_tree(shares, 0.1, 0.0015, 0.004).parents, best_tree([0.9], 0.1).parents):
        assert all(parent < i for i, parent in enumerate(parents))


def test_a_file_gives_the_head_back_and_another_file_is_refused(head: DraftHead, tmp_path: Path) -> None:
    file = tmp_path / "head.safetensors"
    save_head(head, file)
    assert is_head(file) and not is_head(tmp_path / "none")
    back = load_head(file)
    assert back.shape == SHAPE and torch.equal(back.common, head.common)
    for name, p in back.state_dict().items():
        own = head.state_dict()[name]
        assert torch.allclose(p, own, atol=float(own.abs().max()) / 250)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(InputError, match="no file of a draft head"):
        load_head(file)
    with pytest.raises(InputError, match="train one for it"):
        back.bind(torch.zeros(VOCAB, WIDTH + 2))
