"""The gauntlet that updates of a swarm run before they make a version: members that lie are named.

Published [second-hand: Templar's and Covenant-72B's Gauntlet]: each update is applied alone in part, and
the loss is compared before and after on blocks that its member was given and on others, for the same member
over rounds. Ours: lengths, zeros, copies and repeats are found without any loss; copiers are told from
originals by whose blocks the common direction helps; what is usual comes from the members themselves; and
naming.

Checks without losses look at every update:

- *length*: beyond 100 times the usual norm an update is refused. Honest ones of 1 to 50 steps are 0.2 to 2.7
  times as long as the median. One that is over twice as long as is usual for the root of its blocks counts
  less.
- *silence*: zeros have no weight; who sends them again and again is named. A first update may well be
  zeros: of a single step of AdamW, all values are equally large, and a dead zone keeps all of them for the
  next.
- *repeats*: sketches of four versions show what was sent before, by anyone, and how the swarm moved.

Losses look at as many as there is time for:

- *gain*: 5 % of the update is applied, since small steps show the slope and not the curvature. An update
  fails without a quarter of the usual gain on its own blocks. Honest members reach 0.7 to 2.6 of the usual
  gain, in the first rounds and after 300 steps; noise has -0.01 to 0.02, a turned sign -1, an old update
  -0.2 to 0.
- *own data*: then only held-out blocks say anything, and an honest update of few steps may not help those.
  One fails only where it is behind by more than honest ones differ. Late in training few rounds are so
  clear.
- *branches*: the mean of many members' updates is shorter for its blocks and more like others, and says less
  of each block. Lengths and likeness are as of one member; it need not help its own blocks more than others.
- *copies*: of two alike, each that helps its own blocks more than the other does is honest. Of two that do
  not, the copier is who is behind on its own blocks. Where nobody was given any, both
  count half, and nobody is named.

Who fails in two of its last three rounds is named, and has no weight until it has helped in five rounds in
a row. Between none and full, weights follow from lengths and copies alone: gains of honest members of as
many steps differ by 5 to 25 % in a round, which is not worth a weight.

Not stopped: a majority that lies together says what is usual. One that says it is a branch of many counts
for as many as it says. Poison that helps the blocks held out, or is
too slight for them (shuffled labels help in the first two rounds). A liar with own data late
in training, where honest gains are no clearer than chance. Mixtures of others' updates, for the first 16
rounds. A member that is honest only while it is new. A lone member with own data, which nothing can be held
against. Members see the model and the blocks they are given.

Figures: gpt2-lab on Shakespeare, 8 members of 10 steps, or of 1 to 50, AdamW at 1e-3, 1.2 bits with error
feedback, rounds 1 to 4 and those after 300 steps [measured, one seed].
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor

from thinwire.rounds.judging import Candidate, Judgement
from thinwire.types import InputError, require
from thinwire.uses.training.swarm.evidence import Standing
from thinwire.uses.training.swarm.likeness import Sketches, packed, unit, unpacked
from thinwire.uses.training.swarm.scoring import Gain, ScoringTime, Trial

LOUD, FAINT = 100.0, 1e-3  # times the usual norm: above and below, no update is honest
BOLD = 2.0  # times the usual norm for so many blocks: what is longer counts less
NORMS = 64  # of trusted updates, that say what is usual
STEP = 0.05  # of each update: how far along it losses are compared
LEAST = 0.25  # of the usual gain: less is none
CLEAR = 3.0  # standard errors that the usual gain is above 0, if anybody is to be held against it
HALF, FAR = 0.5, 2.0  # of the usual gain on blocks held out: so many standard deviations below it, one fails
BLOCKS, MOST = 8, 32  # that a candidate is scored on, by the time there is; half its own, if it was given any
TOGETHER = 3  # candidates at least are scored beside each other, where there are as many
ALIKE = 0.65  # cosine of two updates of a round; or half-way from what is usual to 1, where that is more
LONELY = 0.1  # cosine with the nearest other, up to which an update goes with nobody
SURE = 0.9  # cosine of two that no work of their own made so alike
PAIRED = 24  # assigned blocks of each of two alike
CHANCE = (
    1.5,
    0.5,
)  # standard errors a round that one alike may be behind, and where it is sure that one copies
OWN = 2.5  # standard errors by which an update helps its own blocks more than one alike, if it is no copy
COPIER = 2.0  # such beyond those, summed over rounds
AGAIN = 0.95  # cosine of sketches with what was sent before, at least
VERSIONS = 4  # of which sketches are kept
SWARM = "swarm"  # whose movements are kept beside what members sent


@dataclass(eq=False)
class Look:
    """What a round shows of a candidate."""

    client: int
    change: Tensor
    norm: float
    sketch: Tensor
    members: int = 1  # whose mean it is
    failed: str = ""  # why it does not count, and speaks against its sender
    share: float = 1.0  # that counts otherwise
    less: str = ""  # why that is below 1
    gains: dict[str, Gain] = field(default_factory=dict)  # by "own" and "held"
    helped: bool = False


class Gauntlet:
    """Judge updates by their norms, their likeness and what they do to losses; name members that lie.

    ``losses``: of blocks [n, seq + 1] under weights [1, N], one each [n], in nats a token; best in float32.
    ``assigned``: the blocks that a client trained on in this round; None where it has data of its own.
    ``heldout`` [m, seq + 1]: blocks nobody trains on. ``seed``: draws blocks and sketches; a secret.
    ``share``: of the time, by ``clock`` in seconds, that losses may take; what is not used is there later.
    Only the first measurement, of four blocks, cannot know how long that is. Where time is short, suspects
    and newcomers are scored first, then those not scored for longest. ``name``: of a client, for reasons.

    Errors: ``InputError`` for no held-out blocks, or a share outside of (0, 1].

    >>> def losses(row, blocks):
    ...     return (row - blocks.mean()).square().sum().expand(len(blocks))
    >>> judge = Gauntlet(losses, lambda client: None, torch.ones(4, 3), seed=7)
    >>> judge.weigh(0, torch.zeros(1, 2), [Candidate(5, torch.full((1, 2), -0.1), samples=8)])
    {5: Judgement(trust=1.0, reason='')}
    """

    def __init__(
        self,
        losses: Callable[[Tensor, Tensor], Tensor],
        assigned: Callable[[int], Tensor | None],
        heldout: Tensor,
        seed: int,
        share: float = 0.1,
        name: Callable[[int], str] = "member {}".format,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require(len(heldout) > 0, InputError, "no blocks are held out to score updates on; hold some out")
        require(0 < share <= 1, InputError, f"a share of {share} of the time is not in (0, 1]; 0.1 is usual")
        self._assigned, self._heldout, self._seed, self._name = assigned, heldout, seed, name
        self._time = ScoringTime(losses, share, clock)
        self._members: dict[int, Standing] = {}
        self._norms: deque[float] = deque(maxlen=NORMS)
        self._nearness = 0.5  # cosine that is usual between two updates of a round
        self._sent: dict[int, dict[str, str]] = {}  # sketches by version, and who sent them
        self._sums: Tensor | None = None  # those of the weights that were judged last
        self._sketches: Sketches | None = None

    @property
    def named(self) -> dict[int, str]:
        """Why members are named, by their numbers."""
        return {c: m.named for c, m in sorted(self._members.items()) if m.named}

    def weigh(self, version: int, weights: Tensor, candidates: Sequence[Candidate]) -> dict[int, Judgement]:
        """Return a verdict on each candidate; see ``Judge``."""
        self._time.begin()
        draw = torch.Generator().manual_seed((self._seed * 1_000_003 + version) % (1 << 63))
        trial = Trial(self._time, weights, self._heldout, draw)
        looks = self._looks(version, weights, candidates)
        if looks:
            self._time.learn(weights, self._heldout[: BLOCKS // 2])
        usual = self._check_norms(looks, trial)
        self._check_sent_before(looks)
        if usual > 0:
            self._check_lengths(looks)
            self._check_alike(looks, trial, usual)
            self._score(version, looks, trial, usual)
        for look in looks:
            if look.failed or look.helped:
                self._member(look.client).mark(version, look.failed)
        self._remember(version, looks)
        return {look.client: self._verdict(look) for look in looks}

    def _verdict(self, look: Look) -> Judgement:
        member = self._member(look.client)
        if member.named:
            return Judgement(0.0, f"{member.named} (named at version {member.since})")
        if look.failed or look.norm == 0:
            return Judgement(0.0, look.failed or f"{self._who(look)} sent nothing")
        return Judgement(look.share, look.less)

    def _member(self, client: int) -> Standing:
        return self._members.setdefault(client, Standing())

    def _who(self, look: Look) -> str:
        return self._name(look.client)

    def _looks(self, version: int, weights: Tensor, candidates: Sequence[Candidate]) -> list[Look]:
        """Return the candidates by client; updates of one client count together."""
        if self._sketches is None:
            self._sketches = Sketches(weights.numel(), self._seed)
        sums = self._sketches.sums
        self._note_movement(version, sums(weights))
        changes, members = dict[int, Tensor](), {c.client: c.members for c in candidates}
        for c in candidates:
            changes[c.client] = changes[c.client] + c.change if c.client in changes else c.change
        looks = []
        for client, change in sorted(changes.items()):
            norm = float(torch.linalg.vector_norm(change, dtype=torch.float64))
            sketch = unit(sums(change)) if norm < float("inf") else torch.zeros(0)
            looks.append(Look(client, change, norm, sketch, members[client]))
            if not norm < float("inf"):
                looks[-1].failed = f"the update of {self._who(looks[-1])} is not finite"
        return looks

    # -- without losses --------------------------------------------------------------------------------

    def _check_norms(self, looks: list[Look], trial: Trial) -> float:
        """Fail those far from the usual norm, and return it; 0 where there is none."""
        heard = [k for k in looks if k.norm > 0 and not k.failed]
        self._check_silence(looks, len(heard))
        if not heard:
            return 0.0
        usual = median_low([*self._norms, *(k.norm for k in heard)])
        if not self._norms and len(heard) == 2 and heard[0].norm != heard[1].norm:
            usual = self._of_two(sorted(heard, key=lambda k: k.norm), trial)
        for look in heard:
            times = look.norm / usual
            if times > LOUD:
                look.failed = f"the update of {self._who(look)} is {times:.3g} times as long as is usual"
            elif times < FAINT:
                look.failed = f"the update of {self._who(look)} is {times:.1g} of the usual length"
        return usual

    def _check_silence(self, looks: list[Look], heard: int) -> None:
        """Fail those that sent zeros again, where most do not: a codec may keep all of a first update."""
        for look in looks:
            member = self._member(look.client)
            member.silent = member.silent + 1 if look.norm == 0 and 2 * heard >= len(looks) else 0
            if member.silent > 1:
                look.failed = f"{self._who(look)} sent nothing {member.silent} times in a row"

    def _of_two(self, heard: list[Look], trial: Trial) -> float:
        """Return the usual norm where there are two updates alone, the shorter first: losses say which."""
        short, long = heard
        if long.norm <= LOUD * short.norm:
            return short.norm
        blocks = trial.some(self._heldout, BLOCKS)
        sound = (
            trial.time.affords(2 * len(blocks))
            and trial.gain(trial.moved(long.change, 1.0), blocks).mean > -1
        )
        return long.norm if sound else short.norm

    def _check_lengths(self, looks: list[Look]) -> None:
        """Let those count less that are long for their blocks: lengths grow with the root of local steps."""
        given = {k: self._given(k.client) for k in looks if not k.failed and k.norm > 0}
        roots = {k.client: math.sqrt(len(b) / k.members) for k, b in given.items() if b is not None}
        if len(roots) <= 2:
            return
        usual = median(k.norm / roots[k.client] for k in looks if k.client in roots)
        for look in looks:
            times = look.norm / roots[look.client] / usual if look.client in roots else 0.0
            if times > LOUD:
                look.failed = (
                    f"the update of {self._who(look)} is {times:.3g} times as long as others for its blocks"
                )
            elif times > BOLD:
                look.share = BOLD / times
                look.less = (
                    f"the update of {self._who(look)} is {times:.2g} times as long as others for its blocks"
                )

    def _given(self, client: int) -> Tensor | None:
        blocks = self._assigned(client)
        return blocks if blocks is not None and len(blocks) else None

    def _note_movement(self, version: int, sums: Tensor) -> None:
        """Keep a sketch of how the last version moved the weights, which every member knows."""
        if self._sums is not None and bool((moved := self._sums - sums).any()):
            self._sent.setdefault(version - 1, {})[SWARM] = packed(unit(moved))
        self._sums = sums

    def _check_sent_before(self, looks: list[Look]) -> None:
        """Fail those that sent again what they, another or the swarm did in a version before.

        Where large batches make all updates of a task alike, half-way from what is usual to 1 is asked for.
        """
        known = [(v, who, unpacked(text)) for v, sent in self._sent.items() for who, text in sent.items()]
        if not known:
            return
        table = torch.stack([sketch for *_, sketch in known])
        heard = [look for look in looks if not look.failed and look.norm > 0]
        nearest = [[float(x) for x in (table @ look.sketch).max(0)] for look in heard]
        limit = max(AGAIN, (1 + median(near for near, _ in nearest)) / 2) if nearest else 1.0
        for look, (near, place) in zip(heard, nearest, strict=True):
            if near > limit:
                version, who, _ = known[int(place)]
                whose = (
                    "the movement of the whole swarm"
                    if who == SWARM
                    else f"an update of {self._name(int(who))}"
                )
                look.failed = (
                    f"{self._who(look)} sent {whose} at version {version} again: their cosine is {near:.3f}"
                )

    def _remember(self, version: int, looks: list[Look]) -> None:
        sound = [k for k in looks if k.norm and len(k.sketch)]
        self._sent.setdefault(version, {}).update((str(k.client), packed(k.sketch)) for k in sound)
        for old in sorted(self._sent)[:-VERSIONS]:
            del self._sent[old]
        self._norms.extend(k.norm for k in sound if not k.failed and not self._member(k.client).named)

    # -- alike -----------------------------------------------------------------------------------------

    def _check_alike(self, looks: list[Look], trial: Trial, usual: float) -> None:
        """Find the copiers among updates of a round that are alike; where nothing tells, they count half."""
        sound = [k for k in looks if not k.failed and k.norm > 0]
        near = [(_of_one(float(a.sketch @ b.sketch), a, b), a, b) for a, b in combinations(sound, 2)]
        # Who goes with nobody says nothing of how alike the updates of this task are.
        going = {k.client for x, a, b in near if x > LONELY for k in (a, b)}
        usual_ones = [x for x, a, b in near if {a.client, b.client} <= going]
        if len(going) > 2:
            self._nearness = median(usual_ones)
        least = max(ALIKE, (1 + self._nearness) / 2)
        behind = dict[int, float]()
        pairs = [(x, a, b) for x, a, b in near if x > least]
        alike = []
        for x, a, b in pairs:
            found = self._behind(a, b, trial, usual)
            if found is None or max(found) > -math.inf:
                alike.append((a, b))
            if found is None:  # what is known of both stays
                continue
            for look, errors in zip((a, b), found, strict=True):
                beyond = min(4.0, errors) - CHANCE[x > SURE]
                behind[look.client] = max(beyond, behind.get(look.client, -math.inf))
        for client, beyond in behind.items():
            self._member(client).copied = max(0.0, self._member(client).copied + beyond)
        for a, b in alike:
            self._settle(a, b)

    def _behind(self, a: Look, b: Look, trial: Trial, usual: float) -> tuple[float, float] | None:
        """Return by how many standard errors both help the blocks of each less than those of the other.

        Of one that helps its own blocks more than the other update does, less than any: it made its update.
        None where there is no time to see.
        """
        given = [self._given(k.client) for k in (a, b)]
        known = [trial.some(blocks, PAIRED) for blocks in given if blocks is not None]
        if len(known) < 2 or not trial.time.affords(3 * sum(map(len, known))):
            return None
        length, n, blocks = min(usual, a.norm, b.norm), len(known[0]), torch.cat(known)
        without = trial.losses(0.0, a.change, blocks)
        with_a, with_b = (trial.losses(length / k.norm, k.change, blocks) for k in (a, b))
        both = (with_a + with_b) / 2
        gains = Gain.of(without[:n], both[:n]), Gain.of(without[n:], both[n:])
        even = Gain(0.0, 0.0)
        own = Gain.of(with_b[:n], with_a[:n]).above(even), Gain.of(with_a[n:], with_b[n:]).above(even)
        behind = gains[1].above(gains[0]), gains[0].above(gains[1])
        return tuple(-math.inf if o > OWN else x for o, x in zip(own, behind, strict=True))  # type: ignore[return-value]

    def _settle(self, a: Look, b: Look) -> None:
        """Say of two alike who copies the other; if that is not known, let both count half."""
        copied = [self._member(k.client).copied for k in (a, b)]
        copier, other = (a, b) if copied[0] > copied[1] else (b, a)
        if max(copied) >= COPIER:
            copier.failed = (
                f"the update of {self._who(copier)} is a copy of that of {self._who(other)}: it is clear, by "
                f"{max(copied):.1f} standard errors, that it was made on the latter's blocks"
            )
            return
        for look in (k for k in (a, b) if k.share == 1.0):
            look.share = 0.5
            both = f"{self._who(a)} and {self._who(b)}"
            look.less = f"the updates of {both} are alike, and nothing tells whose it is"

    # -- by losses -------------------------------------------------------------------------------------

    def _order(self, looks: list[Look]) -> list[Look]:
        """Return whom to score: suspects, newcomers, then those not scored for longest, named ones last.

        Of equals, those first whose updates go least with the sum of the others'.
        """
        sound = [k for k in looks if not k.failed and k.norm > 0]
        total = sum(k.sketch for k in sound)

        def key(look: Look) -> tuple[int, int, float]:
            member = self._member(look.client)
            rank = 3 if member.named else 0 if member.suspect else 1 if member.measured < 0 else 2
            return rank, member.measured, float(unit(total - look.sketch) @ look.sketch)

        return sorted(sound, key=key)

    def _score(self, version: int, looks: list[Look], trial: Trial, usual: float) -> None:
        """Measure gains of as many as there is time for, and fail those that do not help."""
        waiting = self._order(looks)
        many, group = BLOCKS, len(waiting[:TOGETHER])
        while many < MOST and trial.time.affords(4 * many * (len(waiting) + 1)):
            many *= 2
        own = {k.client: self._own(k.client, many // 2, trial) for k in waiting}
        held = many if None in own.values() else many // 2
        cost = held + many  # of a candidate, at most
        if not waiting or not trial.time.affords(held + group * cost):
            return
        trial.begin(held)
        for n, look in enumerate(waiting):
            if n >= TOGETHER and not trial.time.affords(cost):
                break
            gains = trial.gains(trial.moved(look.change, STEP), own[look.client])
            part = STEP * min(1.0, look.norm / usual)  # of few steps less may be hoped for
            look.gains = {kind: gain.times(1 / part) for kind, gain in gains.items()}
            self._member(look.client).measured = version
        scored = [k for k in waiting if k.gains]
        fair = [k for k in scored if not self._member(k.client).named]
        for look in scored:
            self._judge(look, fair)

    def _own(self, client: int, many: int, trial: Trial) -> Tensor | None:
        blocks = self._given(client)
        return None if blocks is None else trial.some(blocks, many)

    def _judge(self, look: Look, fair: list[Look]) -> None:
        """Fail an update without a gain beside those of others, or that does harm where it is alone."""
        kind = "own" if "own" in look.gains else "held"
        gain, known = look.gains[kind], [k.gains[kind] for k in fair if kind in k.gains]
        usual, alone = _usual(known, kind == "own"), not [k for k in fair if k is not look]
        low = bool(usual) and not alone and gain.mean + gain.error < LEAST * usual
        where = "the blocks it was given" if kind == "own" else "blocks held out"
        what = (
            f"along the update of {self._who(look)} the loss of {where} falls by {gain.mean:.2g} nats a token"
        )
        if low and (kind == "own" or gain.mean + FAR * _spread(gain, known, usual) < HALF * usual):
            look.failed = f"{what}, where {usual:.2g} is usual"
        elif low:
            look.share, look.less = 0.0, f"{what}, where {usual:.2g} is usual, which may be chance"
        elif alone and kind == "own" and gain.mean + CLEAR * gain.error < 0:
            look.failed = f"{what}: it does harm"
        elif (
            kind == "own"
            and look.members == 1
            and self._member(look.client).fit(gain.above(look.gains["held"]))
        ):
            look.failed = f"the updates of {self._who(look)} help the blocks it was given no more than others"
        else:
            look.helped = gain.mean - gain.error > LEAST * usual

    # -- to go on later --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what is kept, as plain values."""
        return {
            "members": {str(c): m.to_dict() for c, m in sorted(self._members.items())},
            "norms": list(self._norms),
            "nearness": self._nearness,
            "sent": {str(v): sent for v, sent in self._sent.items()},
            "sums": None if self._sums is None else self._sums.tolist(),
            "time": self._time.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what ``state`` returned; of nothing, begin anew."""
        if not state:
            return
        self._members = {int(c): Standing(**m) for c, m in state["members"].items()}
        self._norms = deque(state["norms"], NORMS)
        self._nearness = state["nearness"]
        self._sent = {int(v): dict(sent) for v, sent in state["sent"].items()}
        self._sums = None if state["sums"] is None else torch.tensor(state["sums"], dtype=torch.float64)
        self._time.load(state["time"])


def _of_one(cosine: float, a: Look, b: Look) -> float:
    """Return how alike two updates were, had each come of one member: means of many are more alike.

    >>> some = [Look(0, torch.zeros(1), 1.0, torch.zeros(1), members) for members in (1, 8)]
    >>> round(_of_one(0.8, some[0], some[0]), 2), round(_of_one(0.8, some[1], some[1]), 2)
    (0.8, 0.33)
    """
    many = math.sqrt(a.members * b.members)
    return cosine / (many - (many - 1) * max(0.0, cosine))


def _usual(gains: Sequence[Gain], own: bool) -> float:
    """Return the median gain; 0 where it is not clear of errors.

    On their ``own`` blocks all that are honest gain: there, and of two, those above 0 say what is usual.

    >>> two = [Gain(0.2, 0.01), Gain(-0.2, 0.01)]
    >>> _usual(two, own=True), _usual([Gain(0.2, 0.1)], own=True)
    (0.2, 0.0)
    """
    sound = [g for g in gains if g.mean > 0] if own or len(gains) < 3 else list(gains)
    found = median(g.mean for g in sound) if sound else 0.0
    return found if sound and found > CLEAR * median(g.error for g in sound) else 0.0


def _spread(gain: Gain, known: list[Gain], usual: float) -> float:
    """Return how much honest gains on held-out blocks differ, the error of ``gain`` included.

    Of fewer than five nobody can say; then it is half of what is usual.
    """
    middle = median(g.mean for g in known)
    spread = 1.48 * median(abs(g.mean - middle) for g in known) if len(known) > 4 else 0.5 * usual
    return math.hypot(gain.error, max(spread, 0.1 * usual))
