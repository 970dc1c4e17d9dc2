"""The columns of a catalogue: like tuples to read, but little larger than what they hold.

A tuple of texts takes some 100 bytes a row, most of them for Python's own needs. Here texts are
one array of bytes with the place where each begins, names that recur (classes, splits) are
numbers, and numbers are an array.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from operator import eq
from typing import TYPE_CHECKING, Any, TypeAlias

from proximetry._util.errors import shown

if TYPE_CHECKING:  # numpy is imported where it is used: the list of datasets loads without it
    import numpy as np
    import numpy.typing as npt

    Rows: TypeAlias = npt.NDArray[np.int64]
    Mask: TypeAlias = npt.NDArray[np.bool_]
    Integers: TypeAlias = npt.NDArray[np.integer[Any]]

_BLOCK = 1 << 14  # values that are made at once when all are asked for


class Column(Sequence[Any], ABC):
    """Values that never change, told apart by their place."""

    @abstractmethod
    def take(self, rows: Rows) -> Column:
        """Return the values of rows, in the order given."""

    @abstractmethod
    def _values(self, rows: slice) -> Sequence[Any]:
        """Return the plain values of a stretch of rows."""

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            import numpy as np

            return self.take(np.arange(len(self))[place])
        return self._value(range(len(self))[place])  # which knows what is negative, or too much

    def _value(self, row: int) -> Any:
        return self._values(slice(row, row + 1))[0]

    def __iter__(self) -> Iterator[Any]:
        from proximetry._util.tensors import chunks

        for block in chunks(len(self), _BLOCK):
            yield from self._values(block)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Column | tuple):
            return NotImplemented
        return self is other or (len(self) == len(other) and all(map(eq, self, other)))

    def __hash__(self) -> int:
        return hash(tuple(self))  # as a tuple that is equal

    def __add__(self, other: Sequence[Any]) -> tuple[Any, ...]:
        return (*self, *other)

    def __repr__(self) -> str:
        return shown(tuple(self._values(slice(0, min(len(self), 13)))))


class Texts(Column):
    """Texts, or None.

    Attributes:
        data: the bytes of all of them, in UTF-8 as file names have it; shared by all columns that
            were taken from one.
        starts, sizes: where in `data` each text begins, and how many bytes it has.
        missing: where there is no text, if anywhere.
    """

    def __init__(
        self,
        data: npt.NDArray[np.uint8],
        starts: Rows,
        sizes: Integers,
        missing: Mask | None = None,
    ) -> None:
        self.data, self.starts, self.sizes, self.missing = data, starts, sizes, missing

    @classmethod
    def of(cls, values: Iterable[str | None]) -> Texts:
        """Make a column of texts; one that no file name could be is a UnicodeEncodeError."""
        maker, rest = TextsMaker(), iter(values)
        while block := list(islice(rest, _BLOCK)):
            maker.extend(block)
        return maker.make()

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, rows: Rows) -> Texts:
        """Return the values of rows, in the order given."""
        missing = None if self.missing is None else self.missing[rows]
        taken = Texts(self.data, self.starts[rows], self.sizes[rows], missing)
        known = self.__dict__
        if not len(known.get("unusable", "?")):
            taken.unusable = self.unusable
        if not len(known.get("repeated", "?")) and _all_different(rows):
            taken.repeated = self.repeated
        return taken

    def joined(self) -> Texts:
        """Return the same texts with nothing else among their bytes, one after another."""
        ends = self.starts + self.sizes
        follow = len(self) and self.starts[0] == 0 and ends[-1] == len(self.data)
        return self if follow and (self.starts[1:] == ends[:-1]).all() else Texts.of(self)

    def __getstate__(self) -> dict[str, Any]:
        whole = self.joined()  # a few rows of many are not to carry all of them along
        return {name: getattr(whole, name) for name in ("data", "starts", "sizes", "missing")}

    def _values(self, rows: slice) -> Sequence[str | None]:
        view = self.data.data
        pairs = zip(self.starts[rows].tolist(), self.sizes[rows].tolist(), strict=True)
        found: list[str | None] = [
            str(view[at : at + size], "utf-8", _ESCAPE) for at, size in pairs
        ]
        if self.missing is not None:
            for row in self.missing[rows].nonzero()[0].tolist():
                found[row] = None
        return found

    def _value(self, row: int) -> str | None:
        if self.missing is not None and self.missing[row]:
            return None
        at, size = self.starts.item(row), self.sizes.item(row)
        return str(self.data.data[at : at + size], "utf-8", _ESCAPE)

    @cached_property
    def unusable(self) -> Rows:
        """The rows whose text is empty or holds a zero, which no file name does."""
        import numpy as np

        bad = self.sizes == 0
        if np.count_nonzero(self.data) < len(self.data):
            bad |= np.fromiter(("\0" in text for text in self), bool, len(self))
        return np.flatnonzero(bad)

    @cached_property
    def repeated(self) -> Rows:
        """The rows whose text other rows have too."""
        import numpy as np

        whole = self.joined()  # so that the texts of a block lie together
        from proximetry._util.tensors import chunks

        hashes = [whole._hashes(block) for block in chunks(len(self), _BLOCK)]
        alike = equal_rows(np.concatenate([np.zeros(0, np.uint64), *hashes]))
        seen: dict[str, list[int]] = {}
        for row in alike.tolist():
            seen.setdefault(self[row], []).append(row)
        return np.array(sorted(r for rows in seen.values() if len(rows) > 1 for r in rows), int)

    def _hashes(self, rows: slice) -> npt.NDArray[np.uint64]:
        """Numbers that are equal where texts are, and hardly ever elsewhere."""
        import numpy as np

        starts, sizes = self.starts[rows], self.sizes[rows].astype(np.int64)
        first, last = int(starts.min()), int((starts + sizes).max())
        raw = np.concatenate([self.data[first:last], np.zeros(8, np.uint8)])
        # The eight bytes from every byte on.
        words = np.ndarray(last - first + 1, np.uint64, raw.data, strides=(1,))
        hashes = sizes.astype(np.uint64)
        for place in range(0, int(sizes.max()), 8):
            there = np.flatnonzero(sizes > place)
            word = words[starts[there] - first + place]
            over = np.clip(8 - (sizes[there] - place), 0, 7).astype(np.uint64)
            word = word << (over * 8) if sys.byteorder == "little" else word >> (over * 8)
            mixed = (hashes[there] ^ word) * np.uint64(0x9E3779B97F4A7C15)
            hashes[there] = mixed ^ (mixed >> np.uint64(32))
        return hashes


_ESCAPE = "surrogateescape"
_WHOLE_NUMBER = re.compile("0|-?[1-9][0-9]{0,17}")  # not 007, which is a name


class Coded(Column):
    """Texts that recur.

    Attributes:
        distinct: each text that occurs, in sorted order; whole numbers by value.
        codes: the place in `distinct` of each row's.
    """

    def __init__(self, distinct: tuple[str, ...], codes: Integers) -> None:
        self.distinct, self.codes = distinct, codes

    @classmethod
    def of(cls, values: Iterable[str]) -> Coded:
        """Make a column of texts."""
        maker = CodedMaker()
        maker.extend(values)
        return maker.make()

    @classmethod
    def constant(cls, value: str, size: int) -> Coded:
        """One text in all rows."""
        import numpy as np

        return cls((value,) if size else (), np.zeros(size, np.int8))

    def __len__(self) -> int:
        return len(self.codes)

    def __contains__(self, value: object) -> bool:
        return value in self.distinct

    def take(self, rows: Rows) -> Coded:
        """Return the values of rows, in the order given."""
        return _tidied(self.distinct, self.codes[rows])

    def _value(self, row: int) -> str:
        return self.distinct[self.codes.item(row)]

    def _values(self, rows: slice) -> Sequence[str]:
        return [self.distinct[code] for code in self.codes[rows].tolist()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        import numpy as np

        return np.array(self.distinct, dtype or (None if self.distinct else "U1"))[self.codes]

    def counts(self) -> Rows:
        """How often each of `distinct` occurs."""
        import numpy as np

        return np.bincount(self.codes, minlength=len(self.distinct))

    def among(self, values: Iterable[str]) -> Mask:
        """In which rows one of these values stands."""
        return self.where(set(values).__contains__)

    def where(self, holds: Callable[[str], bool]) -> Mask:
        """For which rows something holds, which is asked once for each distinct text."""
        import numpy as np

        asked = np.fromiter(map(holds, self.distinct), bool, len(self.distinct))
        if not asked.any():
            return np.zeros(len(self), bool)
        found: Mask = asked[self.codes]
        return found


class Numbers(Column):
    """Numbers, or None.

    Attributes:
        array: int64, float64 or bool.
        missing: where there is none, if anywhere.
    """

    def __init__(self, array: npt.NDArray[Any], missing: Mask | None = None) -> None:
        self.array, self.missing = array, missing

    def __len__(self) -> int:
        return len(self.array)

    def take(self, rows: Rows) -> Numbers:
        """Return the values of rows, in the order given."""
        return Numbers(self.array[rows], None if self.missing is None else self.missing[rows])

    def _values(self, rows: slice) -> Sequence[Any]:
        found: list[Any] = self.array[rows].tolist()
        if self.missing is not None:
            for row in self.missing[rows].nonzero()[0].tolist():
                found[row] = None
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        import numpy as np

        return np.array(self.array if self.missing is None else list(self), dtype)


class TextsMaker:
    """Takes texts a few at a time, so that no more than these are there twice."""

    def __init__(self) -> None:
        import numpy as np

        self._data = bytearray()
        self._sizes: list[Integers] = [np.zeros(0, np.int32)]
        self._missing: list[Mask] = []

    def add(self, data: Any, sizes: Integers, missing: Mask) -> None:
        """Take texts that are bytes already, one after another."""
        import numpy as np

        self._data += memoryview(data)
        self._sizes.append(sizes.astype(np.int32))
        self._missing.append(missing)

    def extend(self, values: Sequence[str | None]) -> None:
        """Take plain values."""
        import numpy as np

        raw = [b"" if value is None else value.encode("utf-8", _ESCAPE) for value in values]
        missing = np.fromiter((value is None for value in values), bool, len(raw))
        self.add(b"".join(raw), np.fromiter(map(len, raw), np.int64, len(raw)), missing)

    def make(self) -> Texts:
        """Return the column of all that was taken."""
        import numpy as np

        sizes = np.concatenate(self._sizes)
        starts = np.cumsum(sizes, dtype=np.int64)
        starts -= sizes
        data = np.frombuffer(self._data, np.uint8) if self._data else np.zeros(0, np.uint8)
        data.flags.writeable = False
        missing = np.concatenate(self._missing) if self._missing else np.zeros(0, bool)
        return Texts(data, starts, sizes, missing if missing.any() else None)


class CodedMaker:
    """The same for texts that recur."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._codes: list[Integers] = []

    def add(self, distinct: Sequence[str], codes: Integers) -> None:
        """Take texts that are numbered already."""
        import numpy as np

        places = self._places
        known = [places.setdefault(text, len(places)) for text in distinct]
        self._codes.append(np.array(known, np.int32)[codes])

    def extend(self, values: Iterable[str]) -> None:
        """Take plain values."""
        import numpy as np

        places = self._places
        known = [places.setdefault(text, len(places)) for text in values]
        self._codes.append(np.array(known, np.int32))

    def make(self) -> Coded:
        """Return the column of all that was taken."""
        import numpy as np

        whole = all(map(_WHOLE_NUMBER.fullmatch, self._places))
        names = sorted(self._places, key=int if whole else None)
        order = np.empty(len(names), np.int32)
        order[[self._places[name] for name in names]] = np.arange(len(names))
        codes = np.concatenate(self._codes) if self._codes else np.zeros(0, np.int32)
        return _tidied(tuple(names), order[codes])


def _tidied(distinct: tuple[str, ...], codes: Integers) -> Coded:
    """Leave out texts that do not occur, and take numbers no larger than it needs."""
    import numpy as np

    used = np.zeros(len(distinct), bool)
    used[codes] = True
    if not used.all():
        distinct = tuple(distinct[code] for code in np.flatnonzero(used).tolist())
        codes = (np.cumsum(used, dtype=np.int32) - 1)[codes]
    codes = codes.astype(np.min_scalar_type(max(0, len(distinct) - 1)), copy=False)
    codes.flags.writeable = False
    return Coded(distinct, codes)


def pack(values: Iterable[Any]) -> Sequence[Any]:
    """Return a column of plain values; a tuple where no kind of column holds them all."""
    import numpy as np

    if isinstance(values, Column):
        return values
    given = tuple(values)
    kinds = {type(value) for value in given}
    kind = next(iter(kinds - {type(None)}), None)
    try:
        if kinds <= {str, type(None)} and kind is str:
            return Texts.of(given)
        if kinds <= {kind, type(None)} and kind in (bool, int, float):
            missing = np.fromiter((value is None for value in given), bool, len(given))
            array = np.array([kind() if v is None else v for v in given], _NUMPY[kind])
            if np.isfinite(array).all():
                return Numbers(array, missing if missing.any() else None)
    except (UnicodeEncodeError, OverflowError):
        pass
    return given


_NUMPY: dict[Any, str] = {bool: "bool", int: "int64", float: "float64"}


def take(values: Sequence[Any], rows: Rows) -> Sequence[Any]:
    """Return the values of rows, in the order given."""
    if isinstance(values, Column):
        return values.take(rows)
    return tuple(values[row] for row in rows.tolist())


def equal_rows(keys: Integers) -> Rows:
    """Return the rows whose key other rows have too."""
    import numpy as np

    in_order = np.sort(keys)
    repeated = np.unique(in_order[1:][in_order[1:] == in_order[:-1]])
    return np.flatnonzero(np.isin(keys, repeated)) if len(repeated) else np.zeros(0, np.int64)


def _all_different(rows: Rows) -> bool:
    import numpy as np

    if bool((rows[1:] > rows[:-1]).all()):
        return True
    in_order = np.sort(rows)
    return bool((in_order[1:] != in_order[:-1]).all())
