"""All that knows faiss: which index, how to build, open and ask it.

An index proposes rows of one segment; how near they are is computed from the vectors afterwards.
So an index that keeps no full vectors is asked for more rows than are wanted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from proximetry._common import Steps, UsageError, chunks, need, shown
from proximetry.metrics.codes import binary_codes, candidates
from proximetry.metrics.inputs import IntArray
from proximetry.models.names import Similarity

EXACT, BINARY = "Flat", "BFlat"
# Up to here the scan takes some tens of milliseconds on two cores.
MOST_EXACT = 100_000
# Fewer rows are scanned in less time than an index needs to be set up.
LEAST_INDEXED = 10_000
_BLOCK = 16_384
# Training points per centroid; faiss takes up to 256, which finds nothing more.
_POINTS = 64

_BINARY = re.compile(BINARY)
_KNOWN = re.compile(
    r"(OPQ\d+(_\d+)?,|PCA[RW]*\d+,)?"
    r"(Flat|HNSW\d+(,(Flat|SQ\w+|PQ\w+))?|IVF\d+,(Flat|SQ\w+|PQ\w+)|SQ\w+)"
)


@cache
def load_faiss() -> Any:
    """Import faiss such that its threads sleep while they wait.

    It brings an OpenMP runtime of its own besides torch's. Threads of two runtimes that wait in
    loops keep each other from the cores.
    """
    key, policy = "OMP_WAIT_POLICY", os.environ.get("OMP_WAIT_POLICY")
    os.environ.setdefault(key, "PASSIVE")
    try:
        return need("faiss", "search", "An approximate index")
    finally:
        if policy is None:
            del os.environ[key]


def resolve(index: str, count: int, dim: int) -> str:
    """Return what an index that was asked for means for so many rows, "" for an exact scan."""
    if index == "auto":
        index = EXACT if count <= MOST_EXACT else f"IVF{_lists(count)},{_compressed(dim)}"
    if index == EXACT or count < max(LEAST_INDEXED, _training(index)):
        return ""
    return index


def _compressed(dim: int) -> str:
    """Codes of up to 64 bytes: product quantisation cuts vectors into equal pieces."""
    pieces = max(number for number in range(1, 65) if dim % number == 0)
    return f"PQ{pieces}" if pieces >= min(dim, 16) else "SQ8"


def _lists(count: int) -> int:
    """As many lists as usual: a power of two near 4 √n."""
    return int(2 ** round(np.log2(4 * np.sqrt(count))))


def _training(index: str) -> int:
    """How many vectors an index needs to be trained, at the least."""
    lists = re.search(r"IVF(\d+)", index)
    return max(int(lists[1]) if lists else 0, 256 if "PQ" in index else 0)


def check(index: str, dim: int, count: int) -> None:
    """Refuse an index that there is not, or that cannot be trained on so few vectors."""
    if index == "auto":
        index = resolve(index, count, dim) or EXACT
    if index == EXACT:
        return
    if not _KNOWN.fullmatch(index) and not _BINARY.fullmatch(index):
        raise UsageError(
            f"unknown index {shown(index)}; write auto, Flat, HNSW32, IVF1024,PQ64 or another "
            "factory string of faiss, or BFlat for binary codes"
        )
    try:
        _make(index, dim, "cosine")
    except RuntimeError as error:
        raise UsageError(
            f"index {index} cannot be made for {dim} dimensions: {_reason(error)}"
        ) from error
    if count < _training(index):
        raise UsageError(
            f"index {index} is trained on at least {_training(index)} images, and there are "
            f"{count}; use auto"
        )


def _reason(error: RuntimeError) -> str:
    return str(error).rpartition("Error: ")[2].strip() or str(error)


def _make(index: str, dim: int, similarity: Similarity) -> Any:
    faiss = load_faiss()
    if _BINARY.fullmatch(index):
        return faiss.index_binary_factory(-(-dim // 8) * 8, index)
    metric = faiss.METRIC_INNER_PRODUCT if similarity == "cosine" else faiss.METRIC_L2
    return faiss.index_factory(dim, index, metric)


def build(
    index: str,
    vectors: npt.NDArray[np.float32],
    similarity: Similarity,
    file: Path,
    steps: Steps,
) -> None:
    """Build an index of all vectors and write it to a file."""
    faiss = load_faiss()
    made, binary = _make(index, vectors.shape[1], similarity), bool(_BINARY.fullmatch(index))
    if not made.is_trained:
        steps(f"training {index}", 0, 1)
        _limit_training(made)
        wanted = _POINTS * max(_training(index), 1024)
        draw = np.random.default_rng(0)
        if len(vectors) > wanted:
            sample = vectors[np.sort(draw.choice(len(vectors), wanted, replace=False))]
        else:
            sample = vectors
        made.train(sample)
        steps(f"training {index}", 1, 1)
    for rows in chunks(len(vectors), _BLOCK):
        made.add(binary_codes(vectors[rows]) if binary else vectors[rows])
        steps(f"building {index}", rows.stop, len(vectors))
    write = faiss.write_index_binary if binary else faiss.write_index
    write(made, os.fspath(file))


def _limit_training(index: Any) -> None:
    """Take no more training points than are of use."""
    faiss = load_faiss()
    if isinstance(index, faiss.IndexPreTransform):
        index = faiss.downcast_index(index.index)
    owners: list[Any] = [index, getattr(index, "pq", None)]
    for owner in owners:
        if hasattr(owner, "cp"):
            owner.cp.max_points_per_centroid = _POINTS


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let this thread use so many of faiss's: waking others takes longer than one graph search."""
    if count is None:
        yield
        return
    faiss = load_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def compressed(k: int) -> int:
    """How many rows to ask for where k are wanted and vectors are compressed."""
    return 4 * max(k, 10)


class Index:
    """An index that is open, ready to propose rows."""

    def __init__(self, file: Path, kind: str) -> None:
        faiss = load_faiss()
        self.kind, self._binary = kind, bool(_BINARY.fullmatch(kind))
        read = faiss.read_index_binary if self._binary else faiss.read_index
        try:
            self._index = read(os.fspath(file), self._flags(file))
        except RuntimeError as error:
            if not file.exists():
                raise FileNotFoundError(2, "No such file", str(file)) from error
            raise ValueError(f"{file} is damaged: {_reason(error)}") from error

    def _flags(self, file: Path) -> int:
        faiss = load_faiss()
        if "IVF" not in self.kind:
            return int(faiss.IO_FLAG_MMAP_IFC)
        # Lists on disk are slower to read, and only needed where memory does not hold them.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(faiss.IO_FLAG_MMAP) if file.stat().st_size > memory // 2 else 0

    def count(self, k: int) -> int:
        """Rows to ask for where k are wanted: the coarser the codes, the more."""
        if self._binary:
            return candidates(k)
        return compressed(k) if any(part in self.kind for part in ("PQ", "SQ", "PCA")) else k

    def candidates(
        self,
        queries: npt.NDArray[np.float32],
        k: int,
        allowed: npt.NDArray[np.bool_] | None,
    ) -> IntArray:
        """Return rows that are probably near, [queries, n], −1 where there are fewer."""
        count = min(self.count(k), self._index.ntotal)
        asked = binary_codes(queries) if self._binary else queries
        with _threads(1 if "HNSW" in self.kind and len(queries) == 1 else None):
            _, found = self._index.search(asked, count, params=self._parameters(count, allowed))
        return np.asarray(found)

    def _parameters(self, count: int, allowed: npt.NDArray[np.bool_] | None) -> Any:
        faiss = load_faiss()
        given: dict[str, Any] = {}
        if allowed is not None:
            bits = np.packbits(allowed, bitorder="little")
            given["sel"] = faiss.IDSelectorBitmap(bits)
        index = self._index
        outer = isinstance(index, faiss.IndexPreTransform)
        if outer:
            index = faiss.downcast_index(index.index)
        if isinstance(index, faiss.IndexIVF):
            found = faiss.SearchParametersIVF(nprobe=probes(index.nlist), **given)
        elif isinstance(index, faiss.IndexHNSW):
            found = faiss.SearchParametersHNSW(efSearch=max(DEPTH, 2 * count), **given)
        else:
            found = faiss.SearchParameters(**given) if given else None
        return faiss.SearchParametersPreTransform(index_params=found) if outer and found else found


DEPTH = 128
"""How many nodes a search in a graph keeps in view."""


def probes(lists: int) -> int:
    """Return how many of the lists are looked through: an eighth of them, of few ones more."""
    return max(min(lists, 16), lists // 8)
