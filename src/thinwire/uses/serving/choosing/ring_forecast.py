"""What a ring of stages will take for texts: its passes, coding and messages, played on a clock.

It goes as the stages do: the first one sends a pass with all that is ready, a chunk of prompts at most; a
later one takes all that has come; a message waits for its turn on the line, and for TCP's window after a
pause.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from thinwire.links.tcp.idle import FIRST_WINDOW, Line
from thinwire.uses.serving.choosing.draft_length import DraftSite, FewestSeconds, tokens_a_round

MOST = 512  # tokens that a later stage puts together in one pass
ROUNDS = 4  # by which a trip is told, and what a draft adds to it
LEAST = 1e-9  # seconds of what takes none
HEAD, PORTION = 80, 18  # bytes of a message, and of each portion in it, beside its hidden states


@dataclass(frozen=True)
class TokenCurve:
    """Numbers measured at some counts of tokens; linear between them, and beyond as at the end.

    >>> curve = TokenCurve((1, 4), (1.0, 2.5))
    >>> curve(2), curve(6), TokenCurve((3,), (7.0,))(9)
    (1.5, 3.5, 7.0)
    """

    at: tuple[int, ...]
    values: tuple[float, ...]

    def __call__(self, many: float) -> float:
        """Return the number at so many tokens, at least 0."""
        if len(self.at) == 1:
            return self.values[0]
        i = min(max(bisect_left(self.at, many), 1), len(self.at) - 1)
        (a, b), (low, high) = self.at[i - 1 : i + 1], self.values[i - 1 : i + 1]
        return max(0.0, low + (high - low) * (many - a) / (b - a))

    def scaled(self, factor: float) -> TokenCurve:
        """Return it with all numbers times a factor."""
        return TokenCurve(self.at, tuple(value * factor for value in self.values))


@dataclass(frozen=True)
class PassCosts:
    """What a pass takes a machine, in seconds, by the tokens in it.

    ``layer``: one layer; ``rest``: what a pass takes without layers; ``head``: of the last stage, by the
    tokens whose next one is wanted. ``pair``: a layer's, for a token and a row that it may see; ``row``: a
    layer's, for each row that is gathered where several texts are in a pass.
    """

    layer: TokenCurve
    rest: TokenCurve
    head: TokenCurve
    pair: float = 0.0
    row: float = 0.0

    def scaled(self, factor: float) -> PassCosts:
        """Return those of a machine that takes so many times as long."""
        layer, rest, head = (curve.scaled(factor) for curve in (self.layer, self.rest, self.head))
        return PassCosts(layer, rest, head, self.pair * factor, self.row * factor)


@dataclass(frozen=True)
class CodingCosts:
    """A recipe's messages, by the tokens of one: their bytes, and seconds to code and to decode them."""

    nbytes: TokenCurve
    encode: TokenCurve
    decode: TokenCurve

    def scaled(self, factor: float) -> CodingCosts:
        """Return those of a machine that takes so many times as long."""
        return CodingCosts(self.nbytes, self.encode.scaled(factor), self.decode.scaled(factor))


@dataclass(frozen=True)
class RingStage:
    """A machine with its layers."""

    costs: PassCosts
    coding: CodingCosts
    layers: int


@dataclass(frozen=True)
class RingLink:
    """The link between neighbours: bytes/s (None: no limit), one-way seconds.

    ``restarts``: TCP begins with a small window after a pause, as cubic does.
    """

    rate: float | None = None
    delay: float = 0.0
    restarts: bool = True


@dataclass(frozen=True)
class AskedOf:
    """What a ring is asked: ``at_once`` texts of so many tokens, each continued by ``tokens``."""

    prompt: int
    tokens: int
    at_once: int = 1
    chunk: int = 128


@dataclass(frozen=True)
class RingForecast:
    """Seconds to the first token, tokens a second behind it (medians of texts), and bytes of all stages.

    ``drafts``: proposed in each round; ``all_per_second``: tokens a second of all texts together.
    """

    first_token_s: float
    tokens_per_second: float
    all_per_second: float
    nbytes: float
    drafts: int = 0

    def seconds(self, tokens: int) -> float:
        """Return what a text of so many tokens takes."""
        return self.first_token_s + (tokens - 1) / self.tokens_per_second


def forecast(
    stages: Sequence[RingStage], link: RingLink, asked: AskedOf, right: float | None = None
) -> RingForecast:
    """Return what stages take; ``right``: share of drafts that are right, None without drafts.

    How many are drafted is what serves best, as the first stage will find by its own times.
    """
    plain = _Ring(stages, link, asked).run()
    if right is None or asked.tokens < 3:
        return plain
    most = FewestSeconds().most
    trip = _rounds(stages, link, asked, 0) / ROUNDS
    longest = (_rounds(stages, link, asked, most) - trip) / (ROUNDS - 1)
    (k,) = FewestSeconds().choose([DraftSite(right, trip, max(0.0, longest - trip) / most)])
    return _Ring(stages, link, asked, k, tokens_a_round(right, k)).run() if k else plain


def _rounds(stages: Sequence[RingStage], link: RingLink, asked: AskedOf, drafts: int) -> float:
    """Return the seconds of ``ROUNDS`` rounds of one text; the first of them has no drafts."""
    tokens = 2 + (ROUNDS - 1) * (1 + drafts)
    one = AskedOf(asked.prompt, tokens, 1, asked.chunk)
    return (tokens - 1) / _Ring(stages, link, one, drafts, 1.0 + drafts).run().tokens_per_second


@dataclass(eq=False)
class _Asked:
    """A text on its way; ``made``: of expected tokens, so no whole number."""

    left: int  # tokens of its prompt
    at: int = 0
    made: float = 0.0
    rounds: int = 0
    first: float = 0.0
    last: float = 0.0

    @property
    def rate(self) -> float:
        return (self.made - 1) / max(self.last - self.first, LEAST)


@dataclass
class _Part:
    text: _Asked
    tokens: int
    seen: int
    wanted: int


@dataclass(eq=False)
class _Place:
    """A stage: what has come, and whether it works. On the first one that are texts that have tokens."""

    stage: RingStage
    came: list[_Part] = field(default_factory=list)
    busy: bool = False


class _Ring:
    """One play. Events are what a stage has finished, and what has come to a stage."""

    def __init__(
        self, stages: Sequence[RingStage], link: RingLink, asked: AskedOf, drafts: int = 0, gain: float = 1.0
    ) -> None:
        self.places = [_Place(stage) for stage in stages]
        self.link, self.asked, self.drafts, self.gain = link, asked, drafts, gain
        self.lines = [Line() for _ in stages]  # from a stage to the next, and from the last to the first
        self.ready = [_Asked(asked.prompt) for _ in range(asked.at_once)]
        self.texts = list(self.ready)
        self.nbytes = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, int, list[_Part]]] = []

    def run(self) -> RingForecast:
        self._start(0, 0.0)
        while self._events:
            now, _, what, k, parts = heapq.heappop(self._events)
            if what == "done":
                self.places[k].busy = False
                self._send(k, now, parts)
            else:
                self.places[k].came += parts
            if not self.places[k].busy:
                self._start(k, now)
        rates = [text.rate for text in self.texts]
        first = median(text.first for text in self.texts)
        return RingForecast(first, median(rates), sum(rates), self.nbytes, self.drafts)

    def _later(self, now: float, what: str, k: int, parts: list[_Part]) -> None:
        heapq.heappush(self._events, (now, next(self._order), what, k, parts))

    def _start(self, k: int, now: float) -> None:
        """Begin a pass with what is there, if anything is."""
        place, parts = self.places[k], list[_Part]()
        if k == 0:
            self._hear(place.came, now)
            place.came = []
            parts = self._next()
        else:
            while place.came and sum(p.tokens for p in parts) < MOST:
                parts.append(place.came.pop(0))
        if parts:
            place.busy = True
            self._later(now + self._seconds(k, parts), "done", k, parts)

    def _hear(self, parts: Sequence[_Part], now: float) -> None:
        for part in parts:
            text = part.text
            left = self.asked.tokens - text.made
            text.made += min(left, self.gain if text.rounds > 1 else 1.0)
            text.rounds += 1
            text.first, text.last = text.first or now, now
            if text.made < self.asked.tokens - 1e-9:
                self.ready.append(text)

    def _next(self) -> list[_Part]:
        """Return what goes through together: the next tokens of all texts, and a chunk of prompts."""
        parts, left, room = list[_Part](), list[_Asked](), self.asked.chunk
        for text in self.ready:
            if not text.left:
                rest = self.asked.tokens - int(text.made) - 1
                many = 1 + (min(self.drafts, rest) if text.rounds > 1 else 0)
                parts.append(_Part(text, many, text.at + int(text.made) - 1 + many, many))
                continue
            many = min(room, text.left)
            room, text.left, text.at = room - many, text.left - many, text.at + many
            if many:
                parts.append(_Part(text, many, text.at, int(not text.left)))
            if text.left:
                left.append(text)
        self.ready = left
        return parts

    def _seconds(self, k: int, parts: Sequence[_Part]) -> float:
        """Return what a stage takes to decode, extend and code portions."""
        stage, last = self.places[k].stage, k == len(self.places) - 1
        tokens, seen = sum(p.tokens for p in parts), sum(p.seen for p in parts)
        costs, coding = stage.costs, stage.coding
        gathered = seen if len(parts) > 1 else 0
        layer = costs.layer(tokens) + costs.pair * tokens * seen + costs.row * gathered
        found = costs.rest(tokens) + stage.layers * layer
        wanted = sum(p.wanted for p in parts)
        found += costs.head(wanted) if last and wanted else 0.0
        found += 0.0 if k == 0 else sum(coding.decode(p.tokens) for p in parts)
        return found + (0.0 if last else sum(coding.encode(p.tokens) for p in parts))

    def _send(self, k: int, now: float, parts: list[_Part]) -> None:
        last = k == len(self.places) - 1
        parts = [p for p in parts if p.wanted] if last else parts
        if not parts:
            return
        if len(self.places) == 1:
            self.places[0].came += parts
            return
        size = float(HEAD + PORTION * len(parts))
        size += 0 if last else sum(self.places[k].stage.coding.nbytes(p.tokens) for p in parts)
        self.nbytes += size
        self._later(self._arrived(self.lines[k], now, size), "came", 0 if last else k + 1, parts)

    def _arrived(self, line: Line, now: float, nbytes: float) -> float:
        rate, delay = self.link.rate, self.link.delay
        if not rate:
            return now + delay
        first = FIRST_WINDOW / rate if self.link.restarts else 0.0
        return line.send(now, nbytes / rate, 2 * delay, first) + delay
