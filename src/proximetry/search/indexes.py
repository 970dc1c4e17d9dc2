"""Approximate faiss indexes: choose, build, open and search them.

An index returns candidates of one segment, which are then re-scored with the full vectors; an
index of compressed vectors returns more than k candidates. Filters are applied to the candidates,
because a faiss selector would not show which rows an index did not reach.
"""

from __future__ import annotations

import math
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_value, pluralize
from proximetry._util.imports import import_optional
from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Progress
from proximetry.metrics.reranking import binary_codes, num_candidates
from proximetry.models.constants import Similarity

EXACT, BINARY = "Flat", "BFlat"
MAX_FLAT_ROWS = 100_000  # scanned in tens of ms on two cores
MAX_GRAPH_ROWS = 2_000_000  # beyond, a graph takes over 5 GB at 512 dimensions, and hours
MIN_INDEXED_ROWS = 10_000  # below, a scan is faster
RECALL = 0.98  # minimum recall@10; the search effort of a new index is doubled to reach it
MAX_EFFORT = 32
EF_SEARCH = 128
_BLOCK = 16_384  # vectors added at a time
_POINTS_PER_LIST = 64  # for training; 256, the default of faiss, is not better

_SUPPORTED = re.compile(
    r"(OPQ\d+(_\d+)?,|PCA[RW]*\d+,)?"
    r"(Flat|HNSW\d+(,(Flat|SQ\w+|PQ\w+))?|IVF\d+,(Flat|SQ\w+|PQ\w+)|SQ\w+)"
)


@cache
def load_faiss() -> Any:
    """Import faiss with passive waiting of its OpenMP threads.

    faiss and torch each have an OpenMP runtime, whose busy-waiting threads would block each other.
    """
    key, policy = "OMP_WAIT_POLICY", os.environ.get("OMP_WAIT_POLICY")
    os.environ.setdefault(key, "PASSIVE")
    try:
        return import_optional("faiss", "search", "An approximate index")
    finally:
        if policy is None:
            del os.environ[key]


def resolve(index: str, count: int) -> str:
    """Return the index to build for this number of rows, "" for an exact scan."""
    if index == "auto":
        graph = "HNSW32" if count <= MAX_GRAPH_ROWS else f"IVF{choose_nlist(count)},SQ8"
        index = EXACT if count <= MAX_FLAT_ROWS else graph
    if index == EXACT or count < max(MIN_INDEXED_ROWS, _min_training_vectors(index)):
        return ""
    return index


def choose_nlist(count: int) -> int:
    """Return nlist for a number of rows: a power of two near 4 √n."""
    return int(2 ** round(np.log2(4 * np.sqrt(count))))


def _min_training_vectors(index: str) -> int:
    """Return the minimum number of vectors to train an index."""
    ivf = re.search(r"IVF(\d+)", index)
    return max(int(ivf[1]) if ivf else 0, 256 if "PQ" in index else 0)


def check(index: str, dim: int, count: int) -> None:
    """Raise UsageError for an unknown index or one that needs more vectors for training."""
    if index == "auto":
        index = resolve(index, count) or EXACT
    if index == EXACT:
        return
    if not _SUPPORTED.fullmatch(index) and index != BINARY:
        raise UsageError(
            f"unknown index {format_value(index)}. Use auto, Flat, HNSW32, IVF1024,PQ64 or another "
            "factory string of faiss, or BFlat for binary codes."
        )
    try:
        _make(index, dim, "cosine")
    except RuntimeError as error:
        raise UsageError(
            f"index {index} does not support {dim} dimensions: {_reason(error)}"
        ) from error
    if count < _min_training_vectors(index):
        raise UsageError(
            f"index {index} needs at least {_min_training_vectors(index)} images for training, got "
            f"{count}. Use auto."
        )


def _reason(error: RuntimeError) -> str:
    return str(error).rpartition("Error: ")[2].strip() or str(error)


def _make(index: str, dim: int, similarity: Similarity) -> Any:
    faiss = load_faiss()
    if index == BINARY:
        return faiss.index_binary_factory(-(-dim // 8) * 8, index)
    metric = faiss.METRIC_INNER_PRODUCT if similarity == "cosine" else faiss.METRIC_L2
    return faiss.index_factory(dim, index, metric)


def build(
    index: str,
    vectors: npt.NDArray[np.float32],
    similarity: Similarity,
    file: Path,
    progress: Progress,
) -> None:
    """Build an index of all vectors and write it to a file."""
    faiss = load_faiss()
    built, binary = _make(index, vectors.shape[1], similarity), index == BINARY
    if not built.is_trained:
        sample, points = vectors, _POINTS_PER_LIST * max(_min_training_vectors(index), 1024)
        if len(vectors) > points:
            sample_rows = np.random.default_rng(0).choice(len(vectors), points, replace=False)
            sample = vectors[np.sort(sample_rows)]
        built.train(sample)
    for rows in chunks(len(vectors), _BLOCK):
        built.add(binary_codes(vectors[rows]) if binary else vectors[rows])
        progress(rows.stop, len(vectors))
    write = faiss.write_index_binary if binary else faiss.write_index
    write(built, os.fspath(file))


def knobs(index: str) -> list[str]:
    """Return the arguments of `Gallery.search` that change the effort of an index."""
    names = ["nprobe"] * ("IVF" in index) + ["ef"] * ("HNSW" in index)
    return names + ["refine"] * is_compressed(index)


def is_compressed(index: str) -> bool:
    """Return whether an index has coarser vectors, so that candidates are re-scored."""
    return index == BINARY or any(part in index for part in ("PQ", "SQ", "PCA"))


def compressed_candidates(k: int) -> int:
    """Return the number of candidates for k results from an index of compressed vectors."""
    return 10 * max(k, 10)


class Index:
    """An open index.

    Attributes:
        kind: its factory string.
        effort: multiplies efSearch, nprobe and the candidates of compressed vectors.
    """

    def __init__(self, file: Path, kind: str, effort: int = 1) -> None:
        faiss = load_faiss()
        self.kind, self.effort, self._binary = kind, effort, kind == BINARY
        read = faiss.read_index_binary if self._binary else faiss.read_index
        flags = int(faiss.IO_FLAG_MMAP_IFC)
        if "IVF" in kind:
            # Lists on disk are slower; they are used only if memory is too small.
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            flags = int(faiss.IO_FLAG_MMAP) if file.stat().st_size > memory // 2 else 0
        try:
            self._index = read(os.fspath(file), flags)
        except RuntimeError as error:
            if not file.exists():
                raise FileNotFoundError(2, "No such file", str(file)) from error
            raise ValueError(f"{file} is damaged: {_reason(error)}") from error

    def count(self, k: int, refine: int | None = None) -> int:
        """Return the number of candidates for k results: more for coarser codes."""
        if not is_compressed(self.kind):
            return k
        if refine is not None:
            return k * refine
        default = num_candidates(k) if self._binary else compressed_candidates(k)
        return default * self.effort

    def candidates(
        self,
        queries: npt.NDArray[np.float32],
        k: int,
        share: float = 1.0,
        *,
        nprobe: int | None = None,
        ef: int | None = None,
        refine: int | None = None,
    ) -> IntArray:
        """Return the rows of probable neighbors, [queries, n]; −1 if there are fewer.

        If only a share of all rows is allowed, n grows so that about twice `count(k)` of the
        returned rows are allowed if these are spread evenly.
        """
        oversampling = 2 / share if share < 1 else 1.0
        count = min(math.ceil(self.count(k, refine) * oversampling), self._index.ntotal)
        points = binary_codes(queries) if self._binary else queries
        faiss, single = load_faiss(), "HNSW" in self.kind and len(queries) == 1
        threads = faiss.omp_get_max_threads()
        parameters = self._parameters(count, oversampling, nprobe, ef)
        # `faiss.contrib.torch_utils` replaces `search` with a function without parameters.
        search = getattr(self._index, "search_numpy", self._index.search)
        if single:  # waking other threads takes longer than one graph search
            faiss.omp_set_num_threads(1)
        try:
            _, rows = search(points, count, params=parameters)
        finally:
            if single:
                faiss.omp_set_num_threads(threads)
        return np.asarray(rows)

    def _parameters(
        self, count: int, oversampling: float, nprobe: int | None, ef: int | None
    ) -> Any:
        faiss = load_faiss()
        index, transformed = self._index, isinstance(self._index, faiss.IndexPreTransform)
        if transformed:
            index = faiss.downcast_index(index.index)
        if isinstance(index, faiss.IndexIVF):
            default = math.ceil(choose_nprobe(index.nlist) * self.effort * oversampling)
            inner = faiss.SearchParametersIVF(nprobe=min(nprobe or default, index.nlist))
        elif isinstance(index, faiss.IndexHNSW):
            default = max(EF_SEARCH * self.effort, 2 * count)
            inner = faiss.SearchParametersHNSW(efSearch=ef or default)
        else:
            return None
        return faiss.SearchParametersPreTransform(index_params=inner) if transformed else inner


def choose_nprobe(nlist: int) -> int:
    """Return nprobe: nlist / 8, from 16 to 256."""
    return max(min(nlist, 16), min(nlist // 8, 256))


def describe(index: str, count: int, recall: float | None = None, prefix: str = "") -> str:
    """Describe an index of `count` images in one line."""
    exact = index in ("", EXACT)
    accuracy = "every search is exact" if exact else "approximate, with exact similarities"
    if recall is not None:
        accuracy += f", recall@10 {math.floor(1000 * recall) / 1000:.3f}"
        if recall < RECALL:
            accuracy += f", below {RECALL}; auto and Flat have a higher recall"
    return f"index: {prefix}{index or EXACT} for {pluralize(count, 'image')}: {accuracy}"
