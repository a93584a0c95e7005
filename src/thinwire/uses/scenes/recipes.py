"""Recipes of packed scenes: how 3D Gaussians become few bytes.

In docstrings [quoted] is what the named paper says, [second-hand] what others read in its code.

>>> SCENES.parse("mesongs:prune=0.3").schemes["scene"]
MesonGS(prune=0.3)
"""

from __future__ import annotations

from typing import Annotated

from thinwire.choosing.registry import Parameter, Registry
from thinwire.uses.scenes.code.morton import MOST_DEPTH
from thinwire.uses.scenes.importance_coder import Thinwire
from thinwire.uses.scenes.layers import SHARES
from thinwire.uses.scenes.mesongs import MesonGS

SCENE = "scene"  # the one role
Coder = MesonGS | Thinwire

SCENES = Registry[Coder, None]("scenes", (SCENE,), (MesonGS, Thinwire))
LAYERS = Parameter("in how many layers a scene comes, the coarse ones first", 1, max(SHARES))
TRANSFORM = Parameter(
    "channels as they are, or as Haar's coefficients where these are fewer bits", choices=("raw", "cheapest")
)
PRUNE = Parameter("the share of splats that go", 0, 0.99, whole=False)
DEPTH = Parameter("halvings of the scene along each axis", 1, MOST_DEPTH)
BLOCKS = Parameter("into how many blocks of a range of their own channels are cut", 1, 1000)
BOOK = Parameter("vectors in the book of harmonics", 1, 65536)
STEPS = Parameter("batches that the book is learnt from", 0, 100_000)
BETA = Parameter("the power of a splat's volume in its importance", 0, 1, whole=False)
PACKING = Parameter("what codes the numbers", choices=("deflate", "own"))
VOXELS = Parameter("where in its voxel a splat comes back", choices=("corner", "middle"))
REFINE = Parameter("steps of fine-tuning on pictures of the scene itself", 0, 100_000)


@SCENES.register("thinwire", "Steps of equal cost to the picture, by class of importance.", "docs/recipes.md")
def thinwire(
    layers: Annotated[int, LAYERS] = 4, transform: Annotated[str, TRANSFORM] = "raw"
) -> dict[str, Coder]:
    """Code with an octree and uniform steps, to the bytes, seconds or dB asked for.

    Layers show a coarse scene early, and take some of the bytes for it. One layer is the smallest.
    """
    return {SCENE: Thinwire(layers, transform == "cheapest")}


@SCENES.register("mesongs", "Octree, Haar transform, 8 bits, vectors.", "MesonGS, arXiv 2409.09756")
def mesongs(
    prune: Annotated[float, PRUNE] = 0.2,
    depth: Annotated[int, DEPTH] = 14,
    blocks: Annotated[int, BLOCKS] = 66,
    book: Annotated[int, BOOK] = 2048,
    steps: Annotated[int, STEPS] = 100,
    beta: Annotated[float, BETA] = 0.1,
    coder: Annotated[str, PACKING] = "deflate",
    voxels: Annotated[str, VOXELS] = "corner",
    refine: Annotated[int, REFINE] = 0,
) -> dict[str, Coder]:
    """Code as the paper describes; ``refine`` fine-tunes, on pictures of the scene in place of photographs.

    Source: importance from views times volume, 66 blocks of 8 bits, books of 2,048 vectors and up that 1,000
    batches teach [second-hand]. Ours: synthetic views, fewer ``steps``, ``coder=own``, ``voxels=middle``.
    """
    return {SCENE: MesonGS(prune, depth, blocks, book, steps, beta, coder, voxels, refine)}
