"""The parts that need no model: shares, the clock of generations, keys, and messages, also forged ones."""

from __future__ import annotations

from random import Random

import pytest
import torch

from thinwire.channels.channel import Scheme
from thinwire.codecs import Cast
from thinwire.types import InputError, PayloadError
from thinwire.uses.pictures.coding import Coding, Endpoints, mask_in, mask_packet
from thinwire.uses.pictures.context_parallel.attention import attended, divisible, merged
from thinwire.uses.pictures.context_parallel.patches import suited
from thinwire.uses.pictures.context_parallel.recipes import ATTENTION, DIFFUSION, OUTPUT
from thinwire.uses.pictures.context_parallel.sharding import TokenShares
from thinwire.uses.pictures.diffusers_names.interfaces import Attention
from thinwire.uses.pictures.message_bytes import opened, packing
from thinwire.uses.pictures.model_calls import StepCounter
from thinwire.uses.pictures.rank_message import Key, RankMessage, TensorKind


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("tokens", [(64, 7), (63, 63), (5, 6)])
def test_every_rank_knows_what_the_others_have(world: int, tokens: tuple[int, int]) -> None:
    every = [TokenShares(rank, world) for rank in range(world)]
    cut = [[s.cut(f"x{i}", torch.zeros(1, n, 2), 1).shape[1] for i, n in enumerate(tokens)] for s in every]
    assert [sum(parts) for parts in zip(*cut, strict=True)] == list(tokens)
    for shares, own in zip(every, cut, strict=True):
        for part in (own[:1], own[1:], own):
            lengths = shares.lengths(sum(part), "a layer")
            assert sum(part) in lengths[shares.rank]
        assert all(sum(cut[rank]) in may for rank, may in lengths.items())


def test_replicated_tokens_are_no_shares() -> None:
    shares = TokenShares(0, 2)
    shares.cut("hidden_states", torch.zeros(1, 64, 4), 1)
    shares.cut("img_ids", torch.zeros(64, 3), 0)  # positions, which no layer attends to
    for tokens in (64, 32 + 7, 7, 0):
        with pytest.raises(InputError, match=f"attn has {tokens} tokens here, no shares"):
            shares.lengths(tokens, "attn")


# name, time, shape; then generation, stream and step
CALLS = [
    ((None, 1.0, 1), (1, 0, 0)),
    ((None, 0.5, 1), (1, 0, 1)),
    ((None, 1.0, 1), (2, 0, 0)),  # the time is back up
    ((None, 1.0, 1), (2, 1, 0)),  # a second forward pass of the step
    ((None, 0.5, 1), (2, 0, 1)),
    ((None, 0.5, 1), (2, 1, 1)),
    ((None, 0.4, 2), (3, 0, 0)),  # another shape
    (("uncond", 0.3, 2), (3, 1, 0)),
    (("cond", 0.3, 3), (3, 2, 0)),  # streams may have shapes of their own
    (("uncond", 0.2, 2), (3, 1, 1)),
    (("uncond", 0.1, 3), (4, 0, 0)),
    (("uncond", 0.05, 3), (4, 0, 1)),
    (("uncond", 0.05, 3), (4, 0, 2)),  # a scheduler that takes a time twice
    (("uncond", 0.1, 3), (5, 0, 0)),
    (("cond", 0.1, 3), (5, 1, 0)),
    (("uncond", 0.1, 3), (6, 0, 0)),  # the picture before ended with its first step
    ((None, None, 1), (6, 1, 0)),  # a model without time
    ((None, None, 1), (6, 1, 1)),
]


def test_generations_streams_and_steps() -> None:
    clock = StepCounter()
    for (name, time, shape), (generation, stream, step) in CALLS:
        call = clock.call(name, time, shape)
        assert (clock.generation, call.stream, call.step) == (generation, stream, step), (name, time, shape)
        assert call.begins is (step == 0 and stream == 0)
    clock.reset()
    assert clock.call(None, None, 1).begins
    assert clock.generation == 7


def test_time_may_rise() -> None:
    """Known from the third step on, and for good."""
    clock, seen = StepCounter(), []
    for time in (0.0, 0.3, 0.6, 0.9, 0.0, 0.5, 0.9, 0.0, 0.9):
        call = clock.call(None, time, 1)
        seen.append((clock.generation, call.step))
    assert seen == [(1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2), (4, 0), (4, 1)]
    falling = [clock.call(None, time, 1).step for time in (0.8, 0.5, 0.2, 0.9, 0.6)]
    assert falling == [0, 1, 2, 0, 1]


def test_keys_are_distinct() -> None:
    keys = [Key(s, n, k, r).pack() for s in (0, 1, 15) for n in (0, 300) for k in TensorKind for r in (0, 9)]
    assert len(set(keys)) == len(keys)
    assert max(keys) < 1 << 63


@pytest.mark.parametrize("name", DIFFUSION.entries)
def test_recipes_read_back_from_their_spec(name: str) -> None:
    recipe = DIFFUSION.parse(name)
    assert DIFFUSION.parse(recipe.spec).schemes == recipe.schemes
    assert recipe.schemes.keys() == {ATTENTION, OUTPUT}


def test_recipes_refuse() -> None:
    with pytest.raises(InputError, match=r"compact: bits=3 is not a whole number in 1\.\.2"):
        DIFFUSION.parse("compact:bits=3")
    with pytest.raises(InputError, match=r"is not Coding\(\.\.\.\)"):
        DIFFUSION.parse("attention=Raw(), output=Raw()")
    with pytest.raises(InputError, match="warmup=-1 is not a number of steps"):
        Coding(warmup=-1)


def test_messages_that_others_forge_are_refused() -> None:
    """Cut, changed or of another shape or layer: a refusal, or the tensor that was due."""
    random, x, keys = Random(0), torch.randn(2, 6, 4), [1, 2]
    packet = Endpoints(Coding(Scheme(Cast("float16"))), []).encode(x, keys, 0)[0]
    data = packing([packet, mask_packet(torch.ones(1, 1, 1, 3, dtype=torch.bool), 5)])()
    message = RankMessage(7, 8, data).pack()
    assert RankMessage.unpack(message).data == data
    for cut in range(len(message)):
        with pytest.raises(PayloadError):
            RankMessage.unpack(message[:cut])
    for _ in range(300):
        forged = bytearray(message)
        forged[random.randrange(len(forged))] ^= 1 << random.randrange(8)
        try:
            packets = opened(RankMessage.unpack(forged).data, x.device)
            made = Endpoints(Coding(), [1]).decode(1, packets[0], keys, [(2, 6, 4)], x)
            mask = mask_in(packets[1], torch.ones(1, 1, 1, 9, dtype=torch.bool), 3, 5)
        except (PayloadError, IndexError):
            continue
        assert made.shape == x.shape
        assert mask.shape == (1, 1, 1, 3)


@pytest.mark.parametrize(("keys", "shape"), [([1, 2], (2, 5, 4)), ([1, 3], (2, 6, 4))])
def test_packets_of_another_shape_or_layer(keys: list[int], shape: tuple[int, ...]) -> None:
    packet = Endpoints(Coding(), []).encode(torch.zeros(2, 6, 4), [1, 2], 0)[0]
    with pytest.raises(PayloadError):
        Endpoints(Coding(), [1]).decode(1, packet, keys, [shape], torch.zeros(1))
    assert packet.spec.shape == (2, 6, 4)


@pytest.mark.parametrize(("large", "scale"), [(1.0, None), (60.0, None), (1.0, 0.3)])
def test_keys_in_parts_are_attended_to_as_whole(large: float, scale: float | None) -> None:
    """Also where all weight is in one of the parts."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 24, 3, 16)
    query = query[:, :9] * large
    first, second = ((key[:, part], value[:, part]) for part in (slice(7), slice(7, None)))
    found = merged(*(attended(Attention(query, *part, None), scale) for part in (first, second)))
    turned = (x.transpose(1, 2) for x in (query, key, value))
    whole = torch.nn.functional.scaled_dot_product_attention(*turned, scale=scale).transpose(1, 2)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


def test_keys_with_a_mask_come_whole() -> None:
    x, mask = torch.zeros(1, 4, 2, 8), torch.ones(1, 4, dtype=torch.bool)
    assert divisible(Attention(x, x, x, None)) and not divisible(Attention(x, x, x, mask))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("beside", [0, 512])
def test_no_other_number_of_patches_makes_a_step_shorter(ranks: int, beside: int) -> None:
    def lasts(patches: int) -> float:
        return (patches + ranks - 1) * (8192 / patches + beside + 128)

    best = suited(8192, beside, ranks)
    assert lasts(best) <= 1.02 * min(map(lasts, range(ranks, 65)))
    assert suited(10**8, beside, ranks) == 64 and suited(3, beside, 8) == 3
