"""How long a step of a video of Wan 1.3B's size takes on several machines: blocks timed, the step replayed.

``python -m bench.video.wan_times [PATCHES]`` on the processor, and part ``video`` of ``bench.gpu`` on a
card: one block of Wan 2.1 1.3B's shapes with random weights computes one patch of 81 frames of 480 x 832
pixels, against the keys and values of all 32,760 tokens, as mode pipe lets it. What surrounds the blocks, and
the coding of a patch, is timed too. From these times a step on 2 and 4 machines is replayed over links, which
is no measurement of a link: a patch waits for the rank, for the line, and for its way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.study.cells import RESULTS, Kept, makers, run_study
from bench.study.tables import Draw, columns
from thinwire.runs.records.writer import read_json
from thinwire.uses.pictures.coding import Endpoints
from thinwire.uses.pictures.context_parallel.divided.block_ranges import cut
from thinwire.uses.pictures.context_parallel.kept_keys import KeptKeys, TokenLayout
from thinwire.uses.pictures.context_parallel.patches import Patches
from thinwire.uses.pictures.context_parallel.recipes import ATTENTION, parse_diffusion_recipe
from thinwire.uses.pictures.diffusers_names.block_hooks import piped
from thinwire.uses.pictures.diffusers_names.interfaces import Attention, Given, Stock
from thinwire.uses.pictures.rank_message import RankMessage

KEPT = Kept("wan_times")
SHAPE: dict[str, Any] = {  # of the published Wan 2.1 1.3B, but for the number of layers
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 8960,
    "patch_size": (1, 2, 2),
}
LAYERS, WIDTH = 30, 1536
LATENT = (1, 16, 21, 60, 104)  # of 81 frames of 480 x 832 pixels
SMALL = (1, 16, 4, 16, 16)
WORDS = 512
CPU, CUDA = "cpu", "cuda"
PATCHES = (1, 4, 8, 16, 32)
PASSES = (1.0, 3.0, 10.0, 30.0)  # seconds that one machine may take for a pass
PAYING = 16, "100 Mbit/s, 5 ms"  # patches and link where those are compared
RECIPES = ("pipe-fp16", "compact-pipe", "compact-pipe:bits=3", "compact-pipe:bits=2")
LINKS = {
    "1 Gbit/s, 1 ms": (125e6, 1e-3),
    "100 Mbit/s, 5 ms": (12.5e6, 5e-3),
    "20 Mbit/s, 20 ms": (2.5e6, 20e-3),
}
REPEATS = 2
Row = dict[str, Any]


class Cell(NamedTuple):
    device: str
    patches: int


def cells() -> Iterator[Cell]:
    """Yield the cells of the processor."""
    yield from (Cell(CPU, patches) for patches in PATCHES)


def kept(device: str, patches: int) -> Row | None:
    """Return what was measured on a device; a card's is in ``gpu.json``."""
    if device == CPU:
        found: Row | None = KEPT.get(Cell(device, patches))
        return found
    rows = read_json(RESULTS / "gpu.json").get("parts", {}).get("video", {}).get("rows", [])
    return next((row for row in rows if row["patches"] == patches and "block_s" in row), None)


class TimedPatch:
    """The session of one rank that has the only block: it computes some patches of ``tokens``."""

    def __init__(self, tokens: int, patches: int, device: str) -> None:
        self._cuts, self._device, self._kept = Patches(tokens, patches), device, KeptKeys()
        shape = 1, tokens, SHAPE["num_attention_heads"], SHAPE["attention_head_dim"]
        x = torch.randn(shape).to(device, torch.bfloat16)
        self._kept.whole((0, 0, 0), Attention(x, x, x, None))
        self._turn = 0
        self.blocks, self.wholes, self.hidden = list[float](), list[float](), torch.empty(0)

    def run(self, given: Given, compute: Any) -> Any:
        """Compute a patch that warms up, if there are several, and some that count."""
        for turn in range(min(len(self._cuts), 1 + REPEATS)):
            self._turn, start = turn, self._now()
            made = compute()
            self.wholes.append(self._now() - start)
        return made

    def cut(self, name: str, x: Tensor, dim: int, of: Any = ()) -> Tensor:
        """Return this turn's tokens."""
        return self._cuts[self._turn].take(x, dim) if x.shape[dim] == self._cuts.tokens else x

    def attend(self, layer: str, attention: Attention, stock: Stock) -> Tensor:
        """Attend to all tokens."""
        layout, patch = TokenLayout(self._cuts.tokens, False), self._cuts[self._turn]
        return stock.whole(self._kept.renewed((0, 0, 0), attention, patch, layout))

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Return a place for the output."""
        return x.new_zeros(()).expand([*x.shape[:dim], self._cuts.tokens, *x.shape[dim + 1 :]])

    def at_block(self, number: int, streams: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Begin to time the block."""
        self.hidden, self._start = streams["hidden_states"], self._now()
        return streams

    def owns(self, number: int) -> bool:
        """Say that the block is this rank's."""
        return True

    def done(self, number: int) -> None:
        """End timing the block."""
        self.blocks.append(self._now() - self._start)

    def begin_block(self, number: int) -> None:
        """Do nothing: this model has no blocks beside its list."""

    def share(self, x: Tensor) -> Tensor:
        """Return an output as it is."""
        return x

    def again(self) -> bool:
        """Say that no module's output is kept."""
        return False

    def fail(self, cause: BaseException) -> None:
        """Do nothing: nobody waits."""

    def reset(self) -> None:
        """Do nothing."""

    def _now(self) -> float:
        if self._device == CUDA:
            torch.cuda.synchronize()
        return perf_counter()


@torch.no_grad()
def measure(cell: Cell, latent: tuple[int, ...] = LATENT) -> Row:
    """Time a block, what surrounds the blocks, and the coding of a patch."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model: Any = WanTransformer3DModel(**SHAPE, num_layers=1).to(cell.device, torch.bfloat16).eval()
    inputs = {
        "hidden_states": torch.randn(latent).to(cell.device, torch.bfloat16),
        "encoder_hidden_states": torch.randn(1, WORDS, SHAPE["text_dim"]).to(cell.device, torch.bfloat16),
        "timestep": torch.tensor([500.0], device=cell.device),
    }
    tokens = latent[2] * latent[3] * latent[4] // 4
    session = TimedPatch(tokens, cell.patches, cell.device)
    with piped(model, session, session):
        model(**inputs)
    kept = slice(1, None) if len(session.blocks) > 1 else slice(None)  # but the first, which warms up
    block, whole = min(session.blocks[kept]), min(session.wholes[kept])
    coded = {name: coding(session.hidden, name) for name in RECIPES}
    weights = sum(p.numel() for p in model.blocks[0].parameters())
    about = {"threads": torch.get_num_threads(), "name": named(cell.device)}
    return {"tokens": tokens, "block_s": block, "around_s": whole - block, "coded": coded, **about} | {
        "block_parameters": weights
    }


def coding(x: Tensor, recipe: str) -> Row:
    """Return the seconds and bytes of a patch's hidden state, coded and decoded in a later step."""
    scheme = parse_diffusion_recipe(recipe).schemes[ATTENTION]
    a, b, times = Endpoints(scheme, [0]), Endpoints(scheme, [0]), list[tuple[float, float, int]]()
    for step in range(10, 13):
        x = x + 0.01 * torch.randn_like(x)
        start = perf_counter()
        packet, _ = a.encode(x, [0], step)
        between = perf_counter()
        b.decode(0, packet, [0], [tuple(x.shape)], x)
        found = perf_counter() - between
        times.append((between - start, found, len(RankMessage(0, 0, [packet]).pack())))
    encode, decode, nbytes = times[-1]
    return {"encode_s": encode, "decode_s": decode, "nbytes": nbytes}


def named(device: str) -> str:
    """Return the device's name."""
    return torch.cuda.get_device_name() if device == CUDA else "cpu"


def replayed(
    found: Row, recipe: str, patches: int, ranks: int, link: tuple[float, float], speed: float = 1.0
) -> float:
    """Return the seconds of a step: of each patch on each rank, and on each line between two.

    ``speed``: how many times as fast as measured each rank computes and codes.
    """
    rate, delay = link
    coded, shares = found["coded"][recipe], [len(own) for own in cut(range(LAYERS), ranks)]
    output = 2 * found["tokens"] / patches * 64  # the model's output as float16: 16 channels of 4 pixels
    free, line, came = [0.0] * ranks, [0.0] * ranks, [0.0] * patches
    for k, blocks in enumerate(shares):
        size = coded["nbytes"] if k < ranks - 1 else output
        compute = blocks * found["block_s"] + found["around_s"]
        for m in range(patches):
            taken = compute + coded["encode_s"] + (coded["decode_s"] if k else 0.0)
            free[k] = max(free[k], came[m]) + taken / speed
            line[k] = max(line[k], free[k]) + size / rate
            came[m] = line[k] + delay
    return max(came)


def one_machine(device: str) -> float | None:
    """Return the seconds of a pass on one machine."""
    found = kept(device, 1)
    return None if found is None else LAYERS * float(found["block_s"]) + float(found["around_s"])


def paying() -> Iterator[Row]:
    """Yield how much faster two machines of some speeds are, each way."""
    patches, link = PAYING
    found, one = kept(CPU, patches), one_machine(CPU)
    for seconds in PASSES if found and one else ():
        step = {r: replayed(found, r, patches, 2, LINKS[link], one / seconds) for r in RECIPES}
        yield {"one_s": seconds, "gains": {recipe: seconds / s for recipe, s in step.items()}}


def summary() -> Row:
    """Return the replayed steps of all devices, against one machine's step."""
    rows = []
    for device in (CPU, CUDA):
        one = one_machine(device)
        if one is None:
            continue
        for patches in PATCHES[1:]:
            found = kept(device, patches)
            for ranks in (2, 4) if found else ():
                for recipe in RECIPES:
                    seconds = {n: replayed(found, recipe, patches, ranks, link) for n, link in LINKS.items()}
                    sent = found["coded"][recipe]["nbytes"] * patches
                    about = {"device": found["name"], "patches": patches, "ranks": ranks, "recipe": recipe}
                    gains = {n: one / s for n, s in seconds.items()}
                    rows.append(about | {"one_s": one, "nbytes": sent, "gains": gains})
    cells_ = [found for cell in cells() if (found := KEPT.get(cell))]
    return {"rows": rows, "paying": list(paying()), "made_by": makers(cells_)}


wan_times = columns(
    "rows",
    ("device", "{device}"),
    ("machines", "{ranks}"),
    ("patches", "{patches}"),
    ("way", "`{recipe}`"),
    ("MB a step", "{nbytes:.1fM}"),
    ("one machine's step", "{one_s:.1f} s"),
    *((f"× over {name}", lambda r, name=name: f"{r['gains'][name]:.2f}×") for name in LINKS),
)
wan_paying = columns(
    "paying",
    ("one machine's pass", "{one_s:.0f} s"),
    *((f"`{recipe}`", lambda r, recipe=recipe: f"{r['gains'][recipe]:.2f}×") for recipe in RECIPES),
)
TABLES: dict[str, Draw] = {"wan_times": wan_times, "wan_times-paying": wan_paying}

if __name__ == "__main__":
    run_study("wan_times", sys.argv[1:], cells, measure, summary)
