"""One layer that goes on where a model's last one ended: it says the next tokens before the model does.

From the model's last hidden state and the token that was picked behind it, the layer makes what stands for
the next hidden state; then from that and its own token the one after, and so on (EAGLE, Li et al., arXiv
2401.15077, section 4.1). It looks back over a few tokens, and it knows the commonest tokens alone (FR-Spec,
Zhao et al., arXiv 2502.14856): the rows of a head are most of what a small model reads for a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.types import InputError, require

THETA = 10_000.0  # of rotary angles: the layer looks back over few tokens
MOST = 1 << 20


@dataclass(frozen=True)
class DraftShape:
    """What a head is built by. ``width``: of the model's hidden states; ``inner``: of the feed-forward part.

    ``window``: positions that it looks back over, its own included; ``model``: whose tokens it proposes.
    """

    model: str
    width: int
    heads: int
    inner: int
    window: int = 64

    def __post_init__(self) -> None:
        for name in ("width", "heads", "inner", "window"):
            value = getattr(self, name)
            good = isinstance(value, int) and 0 < value <= MOST
            require(good, InputError, f"{name}={value!r} of a draft head; give a number above 0")
        wrong = f"{self.heads} heads do not share {self.width} values evenly; give another number of heads"
        require(self.width % (2 * self.heads) == 0, InputError, wrong)


@dataclass
class DraftPast:
    """Keys and values [N, heads, S, width / heads] of positions [N, S]; -1 where there is none."""

    keys: Tensor
    values: Tensor
    positions: Tensor

    def joined(self, keys: Tensor, values: Tensor, positions: Tensor) -> DraftPast:
        """Return it with more behind."""
        pairs = (self.keys, keys), (self.values, values)
        k, v = (torch.cat(pair, 2) for pair in pairs)
        return DraftPast(k, v, torch.cat((self.positions, positions), 1))

    @classmethod
    def beside(cls, pasts: Sequence[DraftPast]) -> DraftPast:
        """Return pasts of as many positions as one, text by text."""
        parts = zip(*((p.keys, p.values, p.positions) for p in pasts), strict=True)
        keys, values, positions = (torch.cat(part) for part in parts)
        return cls(keys, values, positions)

    def kept(self, text: int, most: int) -> DraftPast:
        """Return the last positions that one text has, ``most`` of them."""
        there = (self.positions[text] >= 0).nonzero()[-most:, 0]
        one = slice(text, text + 1)
        keys, values = self.keys[one].index_select(2, there), self.values[one].index_select(2, there)
        return DraftPast(keys, values, self.positions[one].index_select(1, there))

    def padded(self, many: int) -> DraftPast:
        """Return it with ``many`` positions, those that are not there at first."""
        more = many - self.positions.shape[1]
        keys, values = (F.pad(x, (0, 0, more, 0)) for x in (self.keys, self.values))
        return DraftPast(keys, values, F.pad(self.positions, (more, 0), value=-1))


class Norm(nn.RMSNorm):
    """A norm in the dtype of its weights, whatever comes: under autocast too."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., D] divided by its root mean square, times the weights."""
        found: Tensor = super().forward(x.to(self.weight.dtype))
        return found


class DraftHead(nn.Module):
    """The layer. ``common`` [C] int64: the tokens that it may propose.

    Its parameters are of the dtype that it computes in. The model's own head gives a row for each token; so
    that a head file is small, it holds none of them: see ``bind``.
    """

    common: Tensor
    rows: Tensor
    table: Tensor

    def __init__(self, shape: DraftShape, common: Tensor) -> None:
        super().__init__()
        self.shape = shape
        d, inner = shape.width, shape.inner
        self.of_state, self.of_token = Norm(d), Norm(d)
        self.joined = nn.Linear(2 * d, d, bias=False)
        self.before, self.behind, self.out = Norm(d), Norm(d), Norm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.attended = nn.Linear(d, d, bias=False)
        self.gated = nn.Linear(d, 2 * inner, bias=False)
        self.narrowed = nn.Linear(inner, d, bias=False)
        self.register_buffer("common", common, persistent=False)
        self.register_buffer("rows", torch.empty(0), persistent=False)
        self.register_buffer("table", torch.empty(0), persistent=False)

    def bind(self, table: Tensor) -> Self:
        """Use the rows [V, D] of the model's own head, for what comes in and for what goes out."""
        most, width = int(self.common.max()), self.shape.width
        good = most < len(table) and table.shape[1] == width
        wrong = (
            f"a draft head for tokens up to {most} and states of {width}, and a model of {tuple(table.shape)}"
        )
        require(good, InputError, f"{wrong}; train one for it by thinwire train-drafts")
        own = self.joined.weight
        self.table = table
        self.rows = table[self.common.to(table.device)].to(own.device, own.dtype)
        return self

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens [...], [..., D]."""
        own = self.joined.weight
        return self.table[tokens.to(self.table.device)].to(own.device, own.dtype)

    def mixed(self, state: Tensor, token: Tensor) -> Tensor:
        """Return what the layer begins with: of hidden states and of the rows of the tokens behind them."""
        found: Tensor = self.joined(torch.cat((self.of_state(state), self.of_token(token)), -1))
        return found

    def asked(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [N, heads, n, D / heads] of x [N, n, D] at positions [N, n]."""
        n, many, d = x.shape
        parts = self.qkv(self.before(x)).view(n, many, 3, self.shape.heads, d // self.shape.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        return turned(q, positions), turned(k, positions), v

    def finished(self, x: Tensor, found: Tensor) -> Tensor:
        """Return the states [N, n, D] that follow, given what was attended to [N, heads, n, D / heads]."""
        x = x + self.attended(found.transpose(1, 2).reshape(x.shape))
        gate, up = self.gated(self.behind(x)).chunk(2, -1)
        state: Tensor = self.out(x + self.narrowed(F.silu(gate) * up))
        return state

    def forward(
        self, state: Tensor, tokens: Tensor, positions: Tensor, past: DraftPast, way: Tensor | None = None
    ) -> tuple[Tensor, DraftPast]:
        """Return states [N, n, D] one token further on, and the past with these positions.

        ``state`` [N, n, D]; ``tokens`` [N, n]: the one behind each; ``positions`` [N, n]: -1 for none.
        ``way`` [N, n, k]: which of the last k places of the past, these included, each may see, where what
        is there is a tree.
        """
        x = self.mixed(state, self.embed(tokens))
        q, k, v = self.asked(x, positions)
        past = past.joined(k, v, positions)
        apart = positions[:, :, None] - past.positions[:, None]
        seen = (apart >= 0) & (apart < self.shape.window) & (past.positions[:, None] >= 0)
        if way is not None:
            seen[:, :, seen.shape[2] - way.shape[2] :] = way
        seen = seen | (positions[:, :, None] < 0)  # what is not there may see anything: no row without a sum
        found = F.scaled_dot_product_attention(q, past.keys, past.values, attn_mask=seen[:, None])
        return self.finished(x, found), past

    def empty(self, many: int) -> DraftPast:
        """Return the past of ``many`` texts that have none."""
        own, s = self.joined.weight, self.shape
        none = own.new_empty(many, s.heads, 0, s.width // s.heads)
        return DraftPast(none, none, torch.empty(many, 0, dtype=torch.int64, device=own.device))

    def scores(self, state: Tensor) -> Tensor:
        """Return logits [..., C] of the common tokens."""
        return state @ self.rows.T


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Return x [N, heads, n, w] by rotary angles of positions [N, n]."""
    half = x.shape[-1] // 2
    rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(THETA) / half))
    angles = positions[:, None, :, None] * rates
    c, s = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * c - b * s, b * c + a * s), -1)
