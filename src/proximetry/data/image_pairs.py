"""Read the ``.bin`` verification sets of InsightFace (LFW, CFP-FP, AgeDB-30, …).

Such a file is a pickle of ``(images, same)``: a list of encoded image files, two per pair, and a
list of flags. Loading a pickle can run any code, so this module interprets the few opcodes that
build lists, tuples, bytes and flags, and rejects all others. NumPy arrays of bytes, which many
packing scripts write instead of bytes, are recognized by name; nothing is imported or called.
"""

import math
import mmap
import os
from dataclasses import dataclass
from pickletools import genops
from typing import IO, Any, NamedTuple, cast


class Span(NamedTuple):
    """Position of bytes in a file."""

    offset: int
    size: int


class ImagePairs(NamedTuple):
    """Images 2i and 2i + 1 are pair i.

    Attributes:
        images: the position of each encoded image in the file.
        same: whether each pair shows the same person.
    """

    images: list[Span]
    same: list[bool]


@dataclass
class _Object:
    """A call in the pickle that is not executed."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: tuple[Any, ...] = ()


_ARRAY, _BUFFER = "multiarray _reconstruct", "numeric _frombuffer"
_SCALAR, _DTYPE, _NDARRAY = "multiarray scalar", "numpy dtype", "numpy ndarray"
# The modules were renamed in NumPy 2.
_NAMES = {
    **{f"numpy.{core}.{name}": name for core in ("core", "_core") for name in (_ARRAY, _BUFFER)},
    **{f"numpy.{core}.{_SCALAR}": _SCALAR for core in ("core", "_core")},
    _DTYPE: _DTYPE,
    _NDARRAY: _NDARRAY,
}
# The opcodes that each method of `_Reader` interprets.
_METHODS = {
    "skip": "PROTO FRAME",
    "push_span": "BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8",
    "push": "SHORT_BINUNICODE BINUNICODE BINUNICODE8 UNICODE INT BININT BININT1 BININT2 LONG LONG1",
    "push_constant": "NEWTRUE NEWFALSE NONE",
    "push_list": "EMPTY_LIST",
    "mark": "MARK",
    "make_list": "LIST",
    "make_tuple": "TUPLE",
    "make_short_tuple": "EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3",
    "append": "APPEND",
    "extend": "APPENDS",
    "memoize": "PUT BINPUT LONG_BINPUT MEMOIZE",
    "recall": "GET BINGET LONG_BINGET",
    "find_type": "GLOBAL STACK_GLOBAL",
    "reduce": "REDUCE",
    "build": "BUILD",
}
_OPCODES = {name: method for method, names in _METHODS.items() for name in names.split()}
_CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None}
_LENGTHS = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_image_pairs(file: str | os.PathLike[str]) -> ImagePairs:
    """Read the positions of the images and the flags of a ``.bin`` verification set."""
    with open(file, "rb") as stream:
        try:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                match _Reader(content).read():
                    case [list(images), list(flags)]:
                        spans = [_image(value) for value in images]
                        same = [_flag(value, content) for value in flags]
                    case _:
                        raise ValueError("it is not (images, same)")
            if not same or len(spans) != 2 * len(same):
                raise ValueError(f"it has {len(spans)} images for {len(same)} pairs")
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            reason = str(error) if isinstance(error, ValueError) else "it is damaged"
            raise ValueError(
                f"{os.fspath(file)} is not a verification set, a pickle of two lists, encoded "
                f"images and flags: {reason}"
            ) from error
    return ImagePairs(spans, same)


class _Reader:
    """Read a pickle, with `Span` for bytes and `_Object` for NumPy's types."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        for code, argument, position in genops(cast(IO[bytes], self._content)):
            if code.name == "STOP":
                break
            if code.name not in _OPCODES:
                raise ValueError(f"unexpected {code.name} at byte {position}")
            getattr(self, f"_{_OPCODES[code.name]}")(code.name, argument)
        return self._stack.pop()

    def _skip(self, _: str, argument: Any) -> None:
        pass

    def _push_span(self, _: str, argument: str | bytes) -> None:
        self._stack.append(Span(self._content.tell() - len(argument), len(argument)))

    def _push(self, _: str, argument: Any) -> None:
        self._stack.append(argument)

    def _push_constant(self, name: str, _: Any) -> None:
        self._stack.append(_CONSTANTS[name])

    def _push_list(self, *_: Any) -> None:
        self._stack.append([])

    def _mark(self, *_: Any) -> None:
        self._marks.append(len(self._stack))

    def _pop(self, start: int) -> list[Any]:
        if start < 0:
            raise ValueError("it is damaged")
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _make_list(self, *_: Any) -> None:
        self._stack.append(self._pop(self._marks.pop()))

    def _make_tuple(self, *_: Any) -> None:
        self._stack.append(tuple(self._pop(self._marks.pop())))

    def _make_short_tuple(self, name: str, _: Any) -> None:
        self._stack.append(tuple(self._pop(len(self._stack) - _LENGTHS[name])))

    def _append(self, *_: Any) -> None:
        self._extend_last(self._pop(len(self._stack) - 1))

    def _extend(self, *_: Any) -> None:
        self._extend_last(self._pop(self._marks.pop()))

    def _extend_last(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise ValueError("it appends to an object that is no list")
        self._stack[-1].extend(values)

    def _memoize(self, name: str, argument: int) -> None:
        self._memo[len(self._memo) if name == "MEMOIZE" else argument] = self._stack[-1]

    def _recall(self, _: str, argument: int) -> None:
        self._stack.append(self._memo[argument])

    def _find_type(self, name: str, argument: str) -> None:
        """Push a type of NumPy; reject all other names."""
        if name == "STACK_GLOBAL":
            words = self._pop(len(self._stack) - 2)
            argument = " ".join(word for word in words if isinstance(word, str))
        if argument not in _NAMES:
            raise ValueError(f"it contains {argument[:100]!r}, which is not allowed")
        self._stack.append(_Object(_NAMES[argument]))

    def _reduce(self, *_: Any) -> None:
        called, arguments = self._pop(len(self._stack) - 2)
        if not isinstance(called, _Object) or not isinstance(arguments, tuple):
            raise ValueError("it calls an object that is no type")
        self._stack.append(_Object(called.name, arguments))

    def _build(self, *_: Any) -> None:
        instance, state = self._pop(len(self._stack) - 2)
        if not isinstance(instance, _Object) or not isinstance(state, tuple):
            raise ValueError("it sets the state of an object that is no array")
        instance.state = state
        self._stack.append(instance)


def _image(value: Any) -> Span:
    """Return the position of an encoded image: bytes, or an array of bytes."""
    match value:
        case Span():
            return value
        case _Object(name=name, state=[_, [*shape], _, _, Span() as span]) if name == _ARRAY:
            pass
        case _Object(name=name, arguments=[Span() as span, _, [*shape], _]) if name == _BUFFER:
            pass
        case _:
            raise ValueError("an image is neither bytes nor an array of bytes")
    sides = [side for side in shape[:3] if isinstance(side, int)]
    if len(sides) < len(shape) or math.prod(sides) != span.size:
        raise ValueError("an image is an array of other values than bytes")
    return span


def _flag(value: Any, content: mmap.mmap) -> bool:
    match value:
        case _Object(name=name, arguments=[_, Span(offset, 1)]) if name == _SCALAR:
            value = content[offset]
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError("a flag is neither True nor False")
    return bool(value)
