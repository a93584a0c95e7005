"""Vector quantisation: a book of vectors, and for each splat the number of one.

Source: the weighted moving averages of "Compressed 3D Gaussian Splatting", arXiv 2401.02436, as MesonGS uses
them: decay 0.8, batches drawn at random [second-hand]. Books begin as vectors of the scene: ours.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thinwire.uses.scenes.scene import Array

DECAY, BATCH, CHUNK = 0.8, 16384, 4096
Indices = npt.NDArray[np.int64]


def nearest(vectors: Array, book: Array) -> Indices:
    """Return which of ``book`` [k, d] is nearest to each vector [n, d]."""
    half = (book * book).sum(1) / 2
    found = np.empty(len(vectors), np.int64)
    for start in range(0, len(vectors), CHUNK):
        found[start : start + CHUNK] = (vectors[start : start + CHUNK] @ book.T - half).argmax(1)
    return found


def learn(vectors: Array, weights: npt.NDArray[np.float64], size: int, steps: int, seed: int = 0) -> Array:
    """Return a book of at most ``size`` of vectors [n, d], which count by their weights [n].

    >>> two = np.float32([[0, 0], [0, 0], [1, 1]])
    >>> sorted(learn(two, np.ones(3), 2, 20).round(3).tolist())
    [[0.0, 0.0], [1.0, 1.0]]
    """
    draw = np.random.default_rng(seed)
    distinct = np.unique(vectors, axis=0) if len(vectors) <= 4 * size else vectors
    size = min(size, len(distinct))
    book = distinct[draw.choice(len(distinct), size, replace=False)].astype(np.float64)
    count = np.full(size, float(weights.mean()) * min(BATCH, len(vectors)) / size)
    total = book * count[:, None]
    for _ in range(steps):
        batch = draw.integers(0, len(vectors), min(BATCH, len(vectors)))
        chosen, own = vectors[batch], weights[batch]
        at = nearest(chosen, book.astype(np.float32))
        count = DECAY * count + (1 - DECAY) * np.bincount(at, own, size)
        sums = np.stack([np.bincount(at, own * column, size) for column in chosen.T], axis=1)
        total = DECAY * total + (1 - DECAY) * sums
        there = count > 1e-30
        book[there] = total[there] / count[there, None]
    return book.astype(np.float32)
