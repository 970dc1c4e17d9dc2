"""Columns of a catalog: pyarrow arrays that read like tuples.

Text is stored as bytes, since file names need not be UTF-8. Text that recurs (classes, splits) is a
dictionary array, whose values are sorted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from operator import eq
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]

from proximetry._util.errors import shown

Rows: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

TEXT = pa.large_binary()
_BLOCK = 1 << 14  # values that are converted at a time
_WHOLE_NUMBER = re.compile("0|-?[1-9][0-9]{0,17}")  # not 007, which is a name


class Column(Sequence[Any]):
    """Immutable, integer-indexed column of text, numbers or flags; a value may be None.

    Attributes:
        array: the values; text as bytes, `surrogateescape` decodes it.
    """

    def __init__(self, array: pa.Array) -> None:
        self.array = array

    @classmethod
    def of(cls, values: Iterable[str | None]) -> Column:
        """Return a column of text; raises UnicodeEncodeError for text that no file name can be."""
        rest, blocks = iter(values), []
        while block := list(islice(rest, _BLOCK)):
            blocks.append(pa.array([None if v is None else encode(v) for v in block], TEXT))
        return cls(pa.chunked_array(blocks, TEXT).combine_chunks())

    @classmethod
    def coded(cls, distinct: Sequence[str], codes: npt.NDArray[Any]) -> Column:
        """Return a column of recurring text, given distinct values and the index of each row's."""
        keys: Sequence[Any] = distinct
        if all(map(_WHOLE_NUMBER.fullmatch, distinct)):
            keys = [*map(int, distinct)]
        order = sorted(range(len(distinct)), key=keys.__getitem__)
        ranks = np.empty(len(order), np.int32)
        ranks[order] = np.arange(len(order), dtype=np.int32)
        names = pa.array([encode(distinct[i]) for i in order], TEXT)
        return cls(_used(names, ranks[codes]))

    @classmethod
    def constant(cls, value: str, size: int) -> Column:
        """Return a column with one text in all rows."""
        return cls.coded((value,), np.zeros(size, np.int8))

    @cached_property
    def is_text(self) -> bool:
        """Whether values are text, without None."""
        kind = self.array.type
        return (kind == TEXT or pa.types.is_dictionary(kind)) and not self.array.null_count

    @cached_property
    def distinct(self) -> tuple[str, ...]:
        """The values of recurring text, in sorted order; whole numbers by value."""
        return tuple(map(decode, self.array.dictionary.to_pylist()))

    @property
    def codes(self) -> npt.NDArray[Any]:
        """Index in `distinct` of each row's value."""
        codes: npt.NDArray[Any] = self.array.indices.to_numpy()
        return codes

    def where(self, holds: Callable[[str], bool]) -> Mask:
        """Return the rows of recurring text whose value meets a condition."""
        mask: Mask = np.fromiter(map(holds, self.distinct), bool, len(self.distinct))
        return mask[self.codes] if mask.any() else np.zeros(len(self), bool)

    def take(self, rows: Rows) -> Column:
        """Return the values of rows, in this order."""
        taken = self.array.take(pa.array(rows))
        if pa.types.is_dictionary(taken.type):
            return Column(_used(taken.dictionary, taken.indices.to_numpy()))
        return Column(taken)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return self.take(np.arange(len(self))[place])
        value = self.array[range(len(self))[place]].as_py()
        return decode(value) if isinstance(value, bytes) else value

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _BLOCK):
            for value in self.array[start : start + _BLOCK].to_pylist():
                yield decode(value) if isinstance(value, bytes) else value

    def __contains__(self, value: object) -> bool:
        known = self.distinct if pa.types.is_dictionary(self.array.type) else iter(self)
        return value in known

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Column | tuple):
            return NotImplemented
        return self is other or (len(self) == len(other) and all(map(eq, self, other)))

    def __hash__(self) -> int:
        return hash(tuple(self))  # as an equal tuple

    def __add__(self, other: Sequence[Any]) -> tuple[Any, ...]:
        return (*self, *other)

    def __repr__(self) -> str:
        return shown(tuple(islice(self, 13)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if pa.types.is_dictionary(self.array.type):
            names = np.array(self.distinct, dtype or (None if self.distinct else "U1"))
            return cast(npt.NDArray[Any], names[self.codes])
        if self.array.type == TEXT or self.array.null_count:
            return np.array(list(self), dtype)
        values: npt.NDArray[Any] = self.array.to_numpy(zero_copy_only=False)
        return np.asarray(values, dtype)

    def __reduce__(self) -> Any:
        return Column, (self.array,)


def encode(text: str) -> bytes:
    """Return the bytes of a text that may be a file name."""
    return text.encode("utf-8", "surrogateescape")


def decode(data: bytes) -> str:
    """Return the text of bytes that may be a file name."""
    return data.decode("utf-8", "surrogateescape")


def _used(names: pa.Array, codes: npt.NDArray[Any]) -> pa.DictionaryArray:
    """Return a dictionary array without unused values, and with the smallest codes."""
    used = np.zeros(len(names), bool)
    used[codes] = True
    if not used.all():
        names = names.filter(pa.array(used))
        codes = (np.cumsum(used, dtype=np.int32) - 1)[codes]
    kind = next(kind for kind in (np.int8, np.int16, np.int32) if len(names) <= np.iinfo(kind).max)
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(kind, copy=False)), names)


def pack(values: Iterable[Any], *, recurring: bool = False) -> Sequence[Any]:
    """Return a column of plain values; a tuple if they are of different kinds."""
    if isinstance(values, Column):
        if recurring and values.is_text and values.array.type == TEXT:
            codes = values.array.dictionary_encode()
            names = list(map(decode, codes.dictionary.to_pylist()))
            return Column.coded(names, codes.indices.to_numpy())
        return values
    plain = tuple(values)
    kinds = {type(value) for value in plain}
    kind: Any = next(iter(kinds - {type(None)}), str if recurring else None)
    if not kinds <= {kind, type(None)}:
        return plain
    try:
        if kind is str:
            if recurring and None not in plain:
                places = {text: i for i, text in enumerate(dict.fromkeys(plain))}
                codes = np.fromiter(map(places.__getitem__, plain), np.int64, len(plain))
                return Column.coded(tuple(places), codes)
            return Column.of(plain)
        if kind is bool:
            return Column(pa.array(plain, pa.bool_()))
        if kind is int:
            return Column(pa.array(plain, pa.int64()))
        if kind is float and all(value is None or math.isfinite(value) for value in plain):
            return Column(pa.array(plain, pa.float64()))
    except (UnicodeEncodeError, OverflowError):
        pass
    return plain


def take(values: Sequence[Any], rows: Rows) -> Sequence[Any]:
    """Return the values of rows, in this order."""
    if isinstance(values, Column):
        return values.take(rows)
    return tuple(values[row] for row in rows.tolist())


def repeated_rows(keys: npt.NDArray[np.int64]) -> Rows:
    """Return the rows whose key other rows have, too."""
    ordered = np.sort(keys)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    return np.flatnonzero(np.isin(keys, repeated)) if len(repeated) else np.zeros(0, np.int64)
