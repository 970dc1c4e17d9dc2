"""`EmbeddedImages`: the readable images of a dataset, their vectors and nearest neighbors."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from proximetry._util.tensors import l2_normalize
from proximetry._util.types import IntArray, Progress
from proximetry.data import Catalog
from proximetry.models import Embedder
from proximetry.search import Gallery

NEIGHBORS = 10
_BLOCK = 4096  # images searched at a time


@dataclass(frozen=True)
class EmbeddedImages:
    """Images with their neighbors; numbers count the rows of `catalog`.

    Attributes:
        catalog: the readable images.
        rows: their rows in the catalog of all images.
        vectors: of unit length, [n, dim].
        neighbors: the nearest other images of each, nearest first, [n, k].
        cosines: with each neighbor, [n, k].
        has_files: whether the images can be opened, not only their vectors.
    """

    catalog: Catalog
    rows: IntArray
    vectors: Any
    neighbors: IntArray
    cosines: Any
    has_files: bool

    @classmethod
    def search(
        cls, catalog: Catalog, rows: IntArray, vectors: Any, has_files: bool, progress: Progress
    ) -> EmbeddedImages:
        """Find the neighbors: exactly, with an index for more than 100 000 images."""
        vectors = l2_normalize(torch.from_numpy(vectors))[0].numpy()
        total = len(rows)
        k = min(NEIGHBORS, total - 1)
        identity = Embedder.create("vectors", None, weights="none", input_dim=vectors.shape[1])
        names = [str(number) for number in range(total)]
        neighbors, cosines = np.empty((total, k), np.int64), np.empty((total, k), np.float32)
        with tempfile.TemporaryDirectory() as folder:
            gallery = Gallery.build(identity, names, folder, vectors=vectors)
            for start in range(0, total, _BLOCK):
                block = slice(start, min(start + _BLOCK, total))
                found = gallery.search(np.arange(total)[block], k)  # ids, without themselves
                neighbors[block], cosines[block] = found.ids, found.similarities
                progress(block.stop, total)
        return cls(catalog.subset(rows), rows, vectors, neighbors, cosines, has_files)

    @cached_property
    def codes(self) -> IntArray:
        """The class of each image."""
        return self.catalog.codes

    @cached_property
    def neighbor_codes(self) -> IntArray:
        """The class of each neighbor, [n, k]."""
        return self.codes[self.neighbors]

    @cached_property
    def class_sizes(self) -> IntArray:
        """The number of images of each class."""
        return np.bincount(self.codes)
