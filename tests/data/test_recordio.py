"""Training sets of InsightFace: RecordIO written byte by byte, damaged and hostile files."""

import io
import pickle
from pathlib import Path
from struct import pack

import numpy as np
import pytest
from PIL import Image

from proximetry.data import Catalog, ImageError, open_dataset, open_image, resolve_source
from proximetry.data.folders import read_member, shard_members

MAGIC = b"\x0a\x23\xd7\xce"


def chunk(flag, data):
    return MAGIC + pack("<I", flag << 29 | len(data)) + data + bytes(-len(data) % 4)


def record(data):
    """Split the data at each aligned magic number, as the format requires."""
    parts, start = [], 0
    for at in range(0, len(data) - 3, 4):
        if data[at : at + 4] == MAGIC:
            parts.append(data[start:at])
            start = at + 4
    parts.append(data[start:])
    if len(parts) == 1:
        return chunk(0, data)
    flags = [1, *[2] * (len(parts) - 2), 3]
    return b"".join(chunk(flag, part) for flag, part in zip(flags, parts, strict=True))


def packed(labels, content=b""):
    """Return header, labels and image."""
    if np.isscalar(labels):
        return pack("<IfQQ", 0, labels, 7, 0) + content
    return pack("<IfQQ", len(labels), 0, 7, 0) + pack(f"<{len(labels)}f", *labels) + content


def write(folder, records, name="train"):
    """Write records, {number: data}, and their index."""
    data, lines = b"", []
    for number, content in records.items():
        lines.append(f"{number}\t{len(data)}\n")
        data += record(content)
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.rec").write_bytes(data)
    (folder / f"{name}.idx").write_text("".join(lines))
    return folder / f"{name}.rec"


def png(value):
    stream = io.BytesIO()
    Image.new("RGB", (3, 2), (value,) * 3).save(stream, "png")
    return stream.getvalue()


def faces(sizes=(2, 1, 3)):
    """Return a training set: images from 1, then identities, and their range in record 0."""
    total = sum(sizes)
    records = {0: packed([total + 1, total + 1 + len(sizes)])}
    labels = np.repeat(np.arange(len(sizes)), sizes)
    for number, label in enumerate(labels.tolist(), 1):
        # Labels of images are a number, or an array.
        records[number] = packed(label if number % 2 else [label, 0.5, 9], png(number))
    ends = 1 + np.cumsum(sizes)
    for number, (end, size) in enumerate(zip(ends, sizes, strict=True), total + 1):
        records[number] = packed([end - size, end])
    return records


def test_training_set(tmp_path):
    file = write(tmp_path / "faces", faces())
    catalog = Catalog.from_records(file)
    assert catalog.paths == tuple(f"train.rec::{n}" for n in range(1, 7))
    assert catalog.labels == tuple("001222")
    assert catalog.notes == ()
    assert [open_image(catalog.file(n)).getpixel((0, 0))[0] for n in range(6)] == [*range(1, 7)]
    assert catalog.missing_files() == []
    for source in (file, tmp_path / "faces"):
        name, root = resolve_source(source)
        assert name == "records"
        assert open_dataset(name, root).labels == catalog.labels
    assert pickle.loads(pickle.dumps(shard_members(file)))["2"][0] % 4 == 0


def test_labels_without_identities(tmp_path):
    """Record 0 is an image, or starts a shuffled set: labels are those of the images."""
    records = {n: packed(label, png(n)) for n, label in enumerate([5, 12, 5, 3])}
    catalog = Catalog.from_records(write(tmp_path, records))
    assert catalog.labels == ("5", "12", "5", "3")
    assert catalog.class_names == ("3", "5", "12")
    records = {number + 1: data for number, data in records.items()}
    assert Catalog.from_records(write(tmp_path, records)).labels == catalog.labels


def test_large_numbers_use_the_labels_of_the_images(tmp_path):
    """Ranges in float32 are exact up to 2²⁴ only."""
    records = faces() | {2**24 + 2: packed([1, 2])}
    records[3] = packed([41], png(3))
    catalog = Catalog.from_records(write(tmp_path, records))
    assert catalog.labels == ("0", "0", "41", "2", "2", "2")


def test_images_in_chunks(tmp_path):
    """An image with the magic number is stored in parts, also at its begin and end."""
    images = {1: MAGIC * 3, 2: b"ab" + MAGIC, 3: b"abcd" + MAGIC + b"x" + MAGIC + b"yyy"}
    records = {n: packed(n, image) for n, image in images.items()}
    # The labels move the magic number out of or into alignment.
    records |= {n + 10: packed([n, MAGIC[0]], image) for n, image in images.items()}
    file = str(write(tmp_path, records))
    assert MAGIC + pack("<I", 1 << 29 | 24) in Path(file).read_bytes()
    for number, image in images.items():
        assert read_member(file, str(number)) == image
        assert read_member(file, str(number + 10)) == image
    assert Catalog.from_records(file).labels == tuple("123123")


def test_index_in_any_order(tmp_path):
    file = write(tmp_path, faces())
    index = tmp_path / "train.idx"
    lines = index.read_text().splitlines()
    index.write_text("\n".join(reversed(lines)))
    assert Catalog.from_records(file).labels == tuple("001222")
    # A changed file is read again.
    write(tmp_path, faces((1, 1)))
    assert Catalog.from_records(file).labels == tuple("01")


def test_unlisted_images_are_noted(tmp_path):
    records = faces()
    records[7] = packed([2, 3])
    catalog = Catalog.from_records(write(tmp_path, records))
    assert catalog.paths[0] == "train.rec::2"
    assert catalog.notes == ("1 images without identity are skipped",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: packed([7, 1e6])}, "only 3 of 999993 identities"),
        ({0: packed([7, np.nan])}, "label is nan"),
        ({0: packed([-7, 9])}, "label is -7"),
        ({0: packed([7.5, 9])}, "label is 7.5"),
        ({0: b"abc"}, "label is nan"),
        ({0: pack("<IfQQ", 2, 0, 0, 0)}, "labels are truncated"),
        ({0: pack("<IfQQ", 2**32 - 1, 0, 0, 0)}, "labels are truncated"),
        ({8: packed([1, 4])}, "two identities"),
        ({8: packed([1])}, "not the range"),
        ({8: packed([1, np.inf])}, "label is inf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_records(tmp_path, change, message):
    file = write(tmp_path, faces() | change)
    with pytest.raises(ValueError, match=message) as caught:
        Catalog.from_records(file)
    assert str(caught.value).startswith(str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("1\n", "number and the offset"),
        ("1\t2\t3\n", "number and the offset"),
        ("x\t2\n", "could not convert"),
        ("1\t0\n1\t0\n", "lists a record twice"),
        ("1\t-4\n", "record 1 is outside"),
        ("1\t99999\n", "record 1 is outside"),
        ("-1\t0\n", "record -1 is outside"),
        ("99999999999999999999\t0\n", "."),
    ],
)
def test_damaged_indexes(tmp_path, text, message):
    file = write(tmp_path, faces())
    (tmp_path / "train.idx").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Catalog.from_records(file)
    assert "train.idx" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"abcdefgh", "magic number"),
        (MAGIC + pack("<I", 2**29 - 1), "truncated"),
        (MAGIC + pack("<I", 1 << 29) + b"", "truncated"),
        (chunk(2, b"x" * 40), "wrong flags"),
        (chunk(7, b"x" * 40), "wrong flags"),
        (chunk(1, b"x" * 40) + chunk(0, b"x" * 4), "wrong flags"),
        (chunk(1, b"x" * 40) + chunk(1, b"x" * 4), "wrong flags"),
        (chunk(0, b"x" * 9), "header is truncated"),
        (chunk(0, packed([1, 2])[:-1]), "header is truncated"),
        (chunk(0, packed(1, b"no image")), "not an image"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_chunks(tmp_path, data, message):
    file = tmp_path / "x.rec"
    file.write_bytes(data)
    (tmp_path / "x.idx").write_text("1\t0\n")
    with pytest.raises(ImageError, match=message):
        open_image(f"{file}::1")


def test_missing_files_and_members(tmp_path):
    file = write(tmp_path, faces())
    for member in ("99", "01", "-1", "x", "", "١", "9" * 5000):
        if member:
            with pytest.raises(ImageError, match="no member"):
                open_image(f"{file}::{member}")
    assert "1" in shard_members(file)
    assert list(shard_members(file)) == [str(n) for n in range(10)]
    (tmp_path / "train.idx").unlink()
    with pytest.raises(ValueError, match=r"needs its \.idx file"):
        Catalog.from_records(file)
    with pytest.raises(ImageError, match="no such file"):
        open_image(f"{file}::1")


def test_every_truncation_and_flipped_byte_raises_or_reads(tmp_path):
    """No error but ValueError and ImageError."""
    rng = np.random.default_rng(0)
    file = write(tmp_path, faces((2, 1)))
    data = file.read_bytes()
    damaged = [data[:end] for end in range(0, len(data), 7)]
    for _ in range(300):
        changed = bytearray(data)
        changed[rng.integers(len(data))] = rng.integers(256)
        damaged.append(bytes(changed))
    for content in damaged:
        file.write_bytes(content)
        try:
            catalog = Catalog.from_records(file)
        except ValueError:
            continue
        for row in range(len(catalog)):
            try:
                open_image(catalog.file(row))
            except ImageError:
                continue


def test_train_on_records(call, tmp_path):
    rng = np.random.default_rng(0)
    records = faces((6,) * 6)
    for number in range(1, 37):
        stream = io.BytesIO()
        pixels = rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(stream, "jpeg")
        records[number] = packed(0, stream.getvalue())
    file = write(tmp_path / "faces", records)
    words = ["--model", "small_convnet", "--model.weights", "none", "--model.image-size", 16]
    words += ["--training.epochs", 1, "--data.batch-size", 8]
    call("train", file, tmp_path / "run", *words)
    assert (tmp_path / "run" / "results.json").is_file()
