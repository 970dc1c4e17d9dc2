"""`.bin` verification sets: pickles written byte by byte, damaged and hostile ones."""

import io
import pickle
from struct import pack

import numpy as np
import pytest
from PIL import Image

from proximetry.data import open_image
from proximetry.data.image_pairs import read_image_pairs

IMAGES = [b"abc", b"x" * 300, b"", b"y" * 70_000]


def python2(images, same):
    """Write protocol 2 as Python 2 does: its strings are bytes."""
    data = b"\x80\x02]q\x00("
    for number, image in enumerate(images, 1):
        short = len(image) < 256
        data += b"U" + pack("B", len(image)) if short else b"T" + pack("<i", len(image))
        data += image + b"q" + pack("B", number)
    return data + b"e]q\xf0(" + b"".join(b"\x88" if s else b"\x89" for s in same) + b"e\x86q\xf1."


def contents(path, data):
    """Return the images of a file as bytes, and its flags."""
    path.write_bytes(data)
    pairs = read_image_pairs(path)
    return [data[start : start + size] for start, size in pairs.images], pairs.same


def test_python_2_file_byte_by_byte(tmp_path):
    data = python2(IMAGES, [True, False])
    assert pickle.loads(data, encoding="bytes") == (IMAGES, [True, False])
    assert contents(tmp_path / "lfw.bin", data) == (IMAGES, [True, False])


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("flag", [bool, int, np.bool_])
@pytest.mark.parametrize("rows", [None, (-1,), (-1, 1)], ids=["bytes", "array", "column"])
def test_python_3_files(tmp_path, protocol, flag, rows):
    images = [np.frombuffer(i, np.uint8).reshape(rows).copy() if rows else i for i in IMAGES]
    data = pickle.dumps((images, [flag(1), flag(0)]), protocol)
    assert contents(tmp_path / "lfw.bin", data) == (IMAGES, [True, False])


def test_repeated_images_and_flags_of_protocol_0(tmp_path):
    """Repeated objects are references; Python 2 writes flags as I01 and I00 below protocol 2."""
    data = pickle.dumps(([IMAGES[0], IMAGES[1]] * 2, [True, False]), 3)
    assert contents(tmp_path / "a.bin", data)[0] == IMAGES[:2] * 2
    assert contents(tmp_path / "b.bin", b"((lp0\nU\x01ap1\naU\x01bag1\nag1\na(lI01\naI00\nat.") == (
        [b"a", b"b", b"a", b"a"],
        [True, False],
    )


class Harmful:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"\x89PNG\r\n", "pickle of two lists"),
        (python2(IMAGES, [1, 0])[:-1], "exhausted before seeing STOP"),
        (python2(IMAGES, [1, 0])[:5000], "expected 70000 bytes"),
        (python2(IMAGES, [1]), "4 images for 1 pairs"),
        (python2([], []), "0 images for 0 pairs"),
        (b"\x80\x02]].", r"not \(images, same\)"),
        (b"\x80\x04\x8e" + b"\xff" * 8, "pickle of two lists"),
        (b"\x80\x04\x8e" + pack("<Q", 2**62) + b"a.", "expected 4611686018427387904 bytes"),
        (b"\x80\x02h\x07.", "damaged"),
        (b"\x80\x02e.", "damaged"),
        (b"\x80\x02.", "damaged"),
        (b"\x80\x02U\x01aU\x01ba.", "no list"),
        (b"\x80\x02}.", "unexpected EMPTY_DICT at byte 2"),
        (b"cos\nsystem\n(U\x02idtR.", "'os system'"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.", "'os system'"),
        (pickle.dumps(([Harmful()] * 2, [True])), "'builtins print'"),
        (pickle.dumps((["a", "b"], [True])), "neither bytes nor an array"),
        (pickle.dumps(([b"a", b"b"], [2])), "a flag is neither"),
        (pickle.dumps(([b"a", b"b"], [b"1"])), "a flag is neither"),
        (pickle.dumps(([np.zeros(3, np.int16)] * 2, [True])), "other values than bytes"),
        (pickle.dumps(([np.array(["a", None], object)] * 2, [True])), "neither bytes nor an array"),
        (pickle.dumps(([b"a", b"b"], np.array([True]))), "not .images, same"),
        (pickle.dumps([b"a"] * 3), r"not \(images, same\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # pickles may differ by process
)
def test_damaged_and_hostile_files(tmp_path, capsys, data, message):
    path = tmp_path / "lfw.bin"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        read_image_pairs(path)
    assert str(caught.value).startswith(str(path))
    assert "executed" not in capsys.readouterr().out


def test_every_truncation_and_flipped_byte_raises_or_reads(tmp_path):
    """No error but ValueError, and no position outside the file."""
    rng = np.random.default_rng(0)
    arrays = [np.frombuffer(i, np.uint8) for i in IMAGES[:2]]
    for data in (python2(IMAGES[:2], [True]), pickle.dumps((arrays, [np.True_]), 4)):
        damaged = [data[:end] for end in range(len(data))]
        for _ in range(500):
            changed = bytearray(data)
            changed[rng.integers(len(data))] = rng.integers(256)
            damaged.append(bytes(changed))
        for content in damaged:
            (tmp_path / "x.bin").write_bytes(content)
            try:
                pairs = read_image_pairs(tmp_path / "x.bin")
            except ValueError:
                continue
            assert all(start + size <= len(content) for start, size in pairs.images)


def test_nested_references_are_not_expanded(tmp_path):
    """Forty lists, each with its predecessor ten times, would be 10⁴⁰ elements."""
    data = b"\x80\x02]q\x00"
    for number in range(40):
        data += b"](" + b"h" + pack("B", number) + (b"h" + pack("B", number)) * 9
        data += b"eq" + pack("B", number + 1)
    with pytest.raises(ValueError, match="not"):
        contents(tmp_path / "x.bin", data + b".")
    with pytest.raises(ValueError, match="not allowed"):
        contents(tmp_path / "x.bin", data + b"h\x01\x93.")


def test_images_are_addressed_by_number(tmp_path):
    stream = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(stream, "png")
    (tmp_path / "lfw.bin").write_bytes(python2([b"", stream.getvalue()], [True]))
    assert open_image(tmp_path / "lfw.bin::1").size == (3, 2)
    with pytest.raises(ValueError, match="not an image"):
        open_image(tmp_path / "lfw.bin::0")
    with pytest.raises(ValueError, match="no member '2'"):
        open_image(tmp_path / "lfw.bin::2")
