"""Read the training sets of InsightFace, RecordIO files of MXNet, without MXNet.

A record is one chunk, or several where its data contain the magic number. A chunk is the magic
number, a word with a flag (3 bits) and a length (29 bits), the data, and padding to four bytes. The
flag is 0 for a whole record; 1, 2 and 3 mark the first, middle and last chunk of a record, between
which the magic number was removed. The data are the number of labels, a label, two ids, the labels
if there are several, and an encoded image. An .idx file lists number and offset of each record.

Record 0 has the range of the numbers of the identities as labels, and the record of an identity
the range of its images. Without such records, the label of an image is its identity.
"""

import io
import math
import os
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from proximetry._util.errors import UsageError
from proximetry._util.types import IntArray

_CHUNK, _HEADER = struct.Struct("<II"), struct.Struct("<IfQQ")
_MAGIC = 0xCED7230A
_LENGTH = 2**29 - 1  # of a chunk, and the limit of a record
_EXACT = 2**24  # labels are float32, which rounds larger numbers


class Records(Mapping[str, tuple[int, int]]):
    """Offset and size of each record in a file, by its number as text."""

    def __init__(self, file: str, numbers: IntArray, offsets: IntArray, file_size: int) -> None:
        order = np.argsort(numbers, kind="stable")
        self.file, self.numbers, self.offsets = file, numbers[order], offsets[order]
        ends = np.append(np.sort(offsets), file_size)
        self.sizes = ends[np.searchsorted(ends, self.offsets, side="right")] - self.offsets

    def __getitem__(self, member: str) -> tuple[int, int]:
        if not member.isdecimal() or len(member) > 18:
            raise KeyError(member)
        row = int(np.searchsorted(self.numbers, int(member)))
        if row == len(self.numbers) or str(self.numbers[row]) != member:
            raise KeyError(member)
        return int(self.offsets[row]), int(self.sizes[row])

    def __iter__(self) -> Iterator[str]:
        return map(str, self.numbers.tolist())

    def __len__(self) -> int:
        return len(self.numbers)


def index_file(file: str) -> str:
    """Return the name of the index of a .rec file."""
    return os.path.splitext(file)[0] + ".idx"


@lru_cache(maxsize=64)
def read_index(file: str, state: tuple[int, ...], index_state: tuple[int, ...]) -> Records:
    """Read the index of a .rec file; ``state`` and ``index_state`` identify a version of both."""
    index = index_file(file)
    if not index_state[0]:
        raise ValueError(f"{index} is empty")
    try:
        table = np.loadtxt(index, np.int64, comments=None, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{index}: {error}") from None
    if table.shape[1:] != (2,) or not len(table):
        raise ValueError(f"{index}: expected lines of the number and the offset of a record")
    numbers, offsets = table.T
    outside = (numbers < 0) | (offsets < 0) | (offsets + _CHUNK.size > state[0])
    if outside.any():
        raise ValueError(f"{index}: record {numbers[outside][0]} is outside {file}")
    if len(np.unique(numbers)) < len(numbers):
        raise ValueError(f"{index} lists a record twice")
    return Records(file, numbers, offsets, state[0])


def read_image(stream: BinaryIO, offset: int) -> bytes:
    """Return the encoded image of the record at an offset."""
    data = _read_record(stream, offset)
    count = _HEADER.unpack_from(data)[0] if len(data) >= _HEADER.size else 0
    if len(data) < _HEADER.size + 4 * count:
        raise _damaged(offset, "its header is truncated")
    return data[_HEADER.size + 4 * count :]


def _read_record(stream: BinaryIO, offset: int) -> bytes:
    stream.seek(offset)
    data, flag = io.BytesIO(), 1
    while flag in (1, 2):
        first = not data.tell()
        flag, length = _read_chunk(stream, offset)
        if (flag in (0, 1)) != first or flag > 3 or data.tell() + length > _LENGTH:
            raise _damaged(offset, "its chunks have wrong flags or are too long")
        data.write(_read_exactly(stream, length, offset))
        if flag in (1, 2):
            data.write(_MAGIC.to_bytes(4, "little"))
            stream.seek(-length % 4, os.SEEK_CUR)
    return data.getvalue()


def _read_chunk(stream: BinaryIO, offset: int) -> tuple[int, int]:
    """Return flag and length of a chunk."""
    magic, word = _CHUNK.unpack(_read_exactly(stream, _CHUNK.size, offset))
    if magic != _MAGIC:
        raise _damaged(offset, "a chunk does not begin with the magic number")
    return word >> 29, word & _LENGTH


def _read_exactly(stream: BinaryIO, size: int, offset: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise _damaged(offset, "it is truncated")
    return data


def _damaged(offset: int, reason: str) -> ValueError:
    return ValueError(f"the record at byte {offset} is damaged: {reason}")


def _read_labels(stream: BinaryIO, offset: int) -> tuple[float, ...]:
    """Return the label, or the several labels, of a record."""
    stream.seek(offset)
    flag, length = _read_chunk(stream, offset)
    size = _HEADER.size + 8  # more than two labels are not used
    data = _read_record(stream, offset) if flag else stream.read(min(length, size))
    count, label, *_ = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else (0, math.nan)
    if not count:
        return (label,)
    if len(data) < _HEADER.size + 4 * min(count, 2):
        raise _damaged(offset, "its labels are truncated")
    return struct.unpack_from(f"<{min(count, 2)}f", data, _HEADER.size)


def scan_records(records: Records) -> tuple[IntArray, IntArray, list[str]]:
    """Return the numbers of the images, their identities, and notes."""
    with open(records.file, "rb") as stream:
        try:
            first = _read_labels(stream, records["0"][0]) if "0" in records else ()
            if len(first) < 2:
                return records.numbers, _labels_of(stream, records.offsets), []
            start = _integer(first[0], 0)
            images = records.numbers[(records.numbers > 0) & (records.numbers < start)]
            if records.numbers[-1] > _EXACT:
                rows = np.searchsorted(records.numbers, images)
                return images, _labels_of(stream, records.offsets[rows]), []
            labels = _labels_by_range(stream, records, images, first)
        except ValueError as error:
            raise ValueError(f"{records.file}: {error}") from error
    unlabeled = int((labels < 0).sum())
    notes = [f"{unlabeled} images without identity are skipped"] if unlabeled else []
    return images[labels >= 0], labels[labels >= 0], notes


def _labels_of(stream: BinaryIO, offsets: IntArray) -> IntArray:
    """Read the label of each image."""
    values = (_integer(_read_labels(stream, at)[0], at) for at in offsets.tolist())
    return np.fromiter(values, np.int64, len(offsets))


def _labels_by_range(
    stream: BinaryIO, records: Records, images: IntArray, bounds: tuple[float, ...]
) -> IntArray:
    """Return the identity of each image by the ranges in the records of the identities, else −1."""
    start, stop = (_integer(value, 0) for value in bounds[:2])
    labels = np.full(len(images), -1)
    identities = records.numbers[(records.numbers >= start) & (records.numbers < stop)]
    if len(identities) < stop - start:
        raise ValueError(f"only {len(identities)} of {stop - start} identities are in the index")
    for number in identities.tolist():
        offset = records[str(number)][0]
        values = _read_labels(stream, offset)
        if len(values) < 2:
            raise _damaged(offset, "it is not the range of the images of an identity")
        begin, end = np.searchsorted(images, [_integer(value, offset) for value in values])
        if (labels[begin:end] >= 0).any():
            raise _damaged(offset, "its images belong to two identities")
        labels[begin:end] = number - start
    return labels


def _integer(value: float, offset: int) -> int:
    if not math.isfinite(value) or value < 0 or value != int(value):
        raise _damaged(offset, f"its label is {value}")
    return int(value)


def find_records(path: Path) -> Path:
    """Return the .rec file, or that of a folder, if it and its index exist."""
    file = path / "train.rec" if path.is_dir() else path
    for needed in (str(file), index_file(str(file))):
        if not os.path.isfile(needed):
            raise UsageError(f"no such file: {needed}. A .rec file needs its .idx file beside it.")
    return file
