"""Validation of vectors, labels and groups; integer codes of labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.formatting import join_first
from proximetry._util.labels import Labels, as_labels
from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Similarity, is_integer
from proximetry.metrics._search.similarities import ROWS

Embeddings = Tensor | npt.NDArray[Any]

# Names that other tools use.
_SYNONYMS = {"l2": "euclidean", "ip": "dot", "inner_product": "dot", "angular": "cosine"}


def as_count(value: Any, name: str, minimum: int = 1) -> int:
    """Return an integer of any type as an int; raise for others and those below ``minimum``."""
    if not is_integer(value, minimum):
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")
    return int(value)


def check_similarity(similarity: str, choices: Any = Similarity) -> None:
    """Raise unless a similarity is one of the choices, a `Literal`."""
    names = get_args(choices)
    if similarity not in names:
        synonym = _SYNONYMS.get(str(similarity).lower())
        hint = f", called {synonym!r} here" if synonym else ""
        raise ValueError(
            f"unknown similarity {similarity!r}{hint}. Choose one of {', '.join(names)}."
        )


def as_vectors(
    values: Embeddings | None, similarity: Similarity, name: str, *, allow_empty: bool = False
) -> Tensor:
    """Return validated embeddings, or packed codes for the Hamming distance."""
    check_similarity(similarity)
    if similarity == "hamming":
        codes = _as_matrix(values, name, allow_empty)
        if codes.dtype != torch.uint8:
            raise ValueError(
                f"{name} must be packed uint8 codes for the Hamming distance, got {codes.dtype}. "
                "Pack bits with numpy.packbits(bits, axis=1)."
            )
        return codes
    vectors = as_embeddings(values, name, allow_empty=allow_empty)
    if similarity != "cosine" and len(vectors):
        limits = torch.finfo(vectors.dtype)
        longest = float(torch.stack(vectors.aminmax()).abs().max()) * math.sqrt(vectors.shape[1])
        if longest > math.sqrt(limits.max) / 2 or 0 < longest < math.sqrt(limits.tiny / limits.eps):
            raise ValueError(
                f"the vectors of {name} have lengths up to {longest:.3g}, whose squares overflow "
                f"or underflow {vectors.dtype}. Rescale them."
            )
    return vectors


def as_embeddings(
    values: Embeddings | None, name: str = "embeddings", *, allow_empty: bool = False
) -> Tensor:
    """Return a finite matrix on its device: float64 stays, every other float becomes float32."""
    matrix = _as_matrix(values, name, allow_empty)
    if not matrix.is_floating_point():
        raise ValueError(
            f"{name} must be floating point, got {matrix.dtype}. Convert it, or use "
            'similarity="hamming" for packed uint8 codes.'
        )
    if matrix.dtype != torch.float64:
        matrix = matrix.to(torch.float32)
    # A sum is finite only if every term is, and needs no temporary; it may overflow.
    if not bool(torch.isfinite(matrix.sum())):
        parts = [~torch.isfinite(matrix[rows]).all(1) for rows in chunks(len(matrix), ROWS)]
        bad = torch.cat(parts).nonzero()[:, 0].tolist()
        if bad:
            raise ValueError(
                f"{name} has NaN or infinite values in {len(bad)} of {len(matrix)} rows: "
                f"{join_first(map(str, bad))}. Remove or recompute these rows."
            )
    return matrix


def _as_matrix(values: Embeddings | None, name: str, allow_empty: bool) -> Tensor:
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "fiub" or values.dtype.itemsize > 8:
            raise ValueError(f"{name} must be float32 or float64, got {values.dtype}")
        # torch rejects negative strides and other byte orders, and warns of read-only arrays.
        native = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
        matrix = torch.from_numpy(native if native.flags.writeable else native.copy())
    elif isinstance(values, Tensor):
        # MPS lacks float64, in which the metrics are summed.
        matrix = values.detach().cpu() if values.device.type == "mps" else values.detach()
    else:
        raise ValueError(
            f"{name} must be a torch tensor or a NumPy array, got {type(values).__name__}"
        )
    if matrix.ndim != 2:
        raise ValueError(
            f"{name} must be a matrix (items × dimensions), got shape {tuple(matrix.shape)}"
        )
    if matrix.shape[1] == 0 or (matrix.shape[0] == 0 and not allow_empty):
        raise ValueError(f"{name} is empty: shape {tuple(matrix.shape)}")
    return matrix


@dataclass(frozen=True)
class Items:
    """The validated vectors, labels and groups of a gallery or of queries."""

    vectors: Tensor
    labels: npt.NDArray[Any]
    groups: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.vectors)


RawInputs = tuple[Embeddings | None, Labels | None, Labels | None]  # vectors, labels, groups

_NAMES = (
    ("embeddings", "labels", "ignore_groups"),
    ("queries", "query_labels", "query_ignore_groups"),
)


def check_inputs(
    similarity: Similarity,
    first: RawInputs,
    second: RawInputs,
    *,
    names: tuple[tuple[str, str, str], ...] = _NAMES,
    allow_empty: bool = False,
    allow_unlabeled: bool = False,
) -> list[Items]:
    """Return the validated sets, by default a gallery and queries; the second is optional.

    With ``allow_unlabeled`` every item is a class if there are no labels.
    """
    for one, two, name, other in zip(first, second, *names, strict=True):
        if second[0] is None and two is not None:
            raise ValueError(f"{other} without {names[1][0]}. Pass both or neither.")
        if second[0] is not None and (one is None) != (two is None):
            raise ValueError(f"{name} without {other}, or the reverse. Pass both or neither.")
    inputs, sets = [first] if second[0] is None else [first, second], []
    for raw, (vectors_name, labels_name, groups_name) in zip(inputs, names, strict=False):
        vectors = as_vectors(raw[0], similarity, vectors_name, allow_empty=allow_empty)
        labels = range(len(vectors)) if raw[1] is None and allow_unlabeled else raw[1]
        groups = None if raw[2] is None else as_labels(raw[2], len(vectors), groups_name)
        sets.append(Items(vectors, as_labels(labels, len(vectors), labels_name), groups))
    facts = [(items.vectors.shape[1], items.vectors.device, items.vectors.dtype) for items in sets]
    for what, one, two in zip(("dimensions", "devices", "types"), facts[0], facts[-1], strict=True):
        if one != two:
            raise ValueError(
                f"{names[0][0]} and {names[1][0]} have different {what}: {one} and {two}"
            )
    return sets


def join_labels(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate labels, which are all integers or all strings."""
    arrays = [array for array in arrays if len(array)] or arrays[:1]
    if len({array.dtype.kind for array in arrays}) > 1:
        raise ValueError("some labels are integers and others are strings. Use one type.")
    return np.concatenate(arrays)


def encode(*arrays: npt.NDArray[Any]) -> tuple[list[IntArray], npt.NDArray[Any]]:
    """Return integer codes of each array and the distinct labels of all arrays by code."""
    classes, codes = np.unique(join_labels(arrays), return_inverse=True)
    ends = np.cumsum([len(array) for array in arrays])[:-1]
    return [part.astype(np.int64) for part in np.split(codes.reshape(-1), ends)], classes
