"""Random tables with odd labels, paths, roles and columns, compared with a reference reader."""

import csv
import math
import os
import random

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from proximetry.data import Catalog

NAMES = ["a/1.png", "a/2.png", "b/3.png", "b/ü 4.png", "b/5\udcff.png", 'c/"6".png', "c/7,\n.png"]
LABELS = ["ant", "Ant", "ant ", "ü", "\udcffx", 'q"', "a,b", "n\nl", "\r", "0", "007", "none"]
MISSING = ["", "nan", "NaN", "None"]
OTHERS = ("price", "box", "bbox_x", "labels", "Path", "vector", "group1", "width")
FLAGS = {"true": True, "TRUE": True, "1": True, "yes": True, "false": False, "0": False, "": False}
SPLITS = ["train", "val", "test", "all"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("tables")
    for name in NAMES:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"x")
    (root / "link").symlink_to("a")
    (root / "b" / "again.png").symlink_to("../a/1.png")
    return root


def odd_path(rng, root):
    """Return one of the paths of an image, rarely something else."""
    name = rng.choice(NAMES)
    kind = rng.random()
    if kind < 0.85:
        return name
    if kind < 0.9:
        folder, _, last = name.partition("/")
        return rng.choice([f"./{name}", f"a/../{name}", f"{folder}//{last}", str(root / name)])
    if kind < 0.95:
        return rng.choice(["link/2.png", "b/again.png"])
    return rng.choice(["gone.png", "", "a/1.png/x.png", "z\0.png", "a"])


def draw(rng, root):
    """Return the columns of a table as text; most rows are valid."""
    rows = rng.randrange(1, 6)
    columns = {"path": [odd_path(rng, root) for _ in range(rows)]}
    if rng.random() < 0.8:
        columns["path"] = rng.sample(NAMES, rows)
    seldom = 0.05 if rng.random() < 0.5 else 0
    columns["label"] = [
        rng.choice(MISSING if rng.random() < seldom else LABELS) for _ in range(rows)
    ]
    if rng.random() < 0.5:
        columns["split"] = [
            "dev" if rng.random() < seldom else rng.choice(SPLITS) for _ in range(rows)
        ]
    for name in ("query", "gallery") if rng.random() < 0.4 else ():
        columns[name] = [
            "maybe" if rng.random() < seldom else rng.choice([*FLAGS]) for _ in range(rows)
        ]
    if rng.random() < 0.3:
        columns["group"] = [rng.choice(["", *LABELS]) for _ in range(rows)]
    if rng.random() < 0.2:
        columns[rng.choice(OTHERS)] = ["1"] * rows
    if rng.random() < 0.05:
        del columns[rng.choice([*columns])]
    names = list(columns)
    rng.shuffle(names)
    return {name: columns[name] for name in names}


def value_fault(columns):
    missing = [repr(name) for name in ("path", "label") if name not in columns]
    if missing:
        return f"missing columns: {', '.join(missing)}"
    for row, label in enumerate(columns["label"], start=1):
        if label in MISSING:
            return f"column label has no value in row {row} "
    if ("query" in columns) != ("gallery" in columns):
        return "both columns or neither"
    for name in ("path", "split", "query", "gallery"):
        for row, value in enumerate(columns.get(name, ()), start=1):
            text = {"path": value and "\0" not in value, "split": value in SPLITS}
            if not text.get(name, value in FLAGS):
                return f"row {row}, column {name}: "
    return None


def file_fault(root, columns):
    paths = columns["path"]
    for row, path in enumerate(paths, start=1):
        if paths.count(path) > 1:
            return f"row {row}, column path: {path!r} is listed {paths.count(path)} times"
    for row, path in enumerate(paths, start=1):
        if not os.path.exists(root / path):
            return f"{path!r} (row {row})"
    real = [os.path.realpath(root / path) for path in paths]
    for row, place in enumerate(real, start=1):
        if place in real[: row - 1]:
            return f"row {row}, column path: {paths[row - 1]!r} is the image of row "
    return None


def account(root, columns):
    """Return the fields of the table's catalog, or the error."""
    fault = value_fault(columns) or file_fault(root, columns)
    return fault or {
        "paths": tuple(columns["path"]),
        "labels": tuple(columns["label"]),
        "splits": tuple(columns.get("split", ["all"] * len(columns["path"]))),
        "queries": flags(columns, "query"),
        "galleries": flags(columns, "gallery"),
        "groups": tuple(columns["group"]) if "group" in columns else None,
    }


def flags(columns, name):
    return tuple(FLAGS[value] for value in columns[name]) if name in columns else None


def write_csv(file, columns):
    with file.open("w", newline="", encoding="utf-8", errors="surrogateescape") as stream:
        csv.writer(stream).writerows([columns, *zip(*columns.values(), strict=True)])


def parquet_column(rng, name, values):
    """Return the values as text, bytes, numbers or with missing values, as other programs do."""
    if name in ("query", "gallery") and set(values) <= FLAGS.keys() and rng.random() < 0.5:
        return arrow.array([None if value == "" else FLAGS[value] for value in values])
    if name == "label" and rng.random() < 0.3 and {"", "nan"} & set(values):
        texts = [
            None if value == "" else value.encode(errors="surrogateescape") for value in values
        ]
        return arrow.array(texts, arrow.binary())
    raw = [value.encode(errors="surrogateescape") for value in values]
    column = arrow.array(raw, arrow.binary())
    if rng.random() < 0.6:  # not checked for UTF-8
        column = arrow.Array.from_buffers(arrow.string(), len(values), column.buffers())
    return column


def write_parquet(rng, file, columns):
    arrays = [parquet_column(rng, name, values) for name, values in columns.items()]
    parquet.write_table(arrow.table(arrays, names=list(columns)), file)


def check(file, root, columns, read):
    wanted = account(root, columns)
    try:
        found = read(file, root)
    except ValueError as error:
        found = str(error)
    if isinstance(wanted, str):
        assert isinstance(found, str), wanted
        assert found.startswith(str(file))
        assert wanted in found
    else:
        assert isinstance(found, Catalog), found
        assert {name: getattr(found, name) for name in wanted} == wanted
        others = [name for name in columns if name in OTHERS]
        unused = [name for name in others if name not in found.columns]  # raw bytes of Parquet
        assert found.notes == ((f"unused columns: {unused[0]}",) if unused else ())
        assert set(found.columns) <= set(others)
        assert not unused or file.suffix == ".parquet"
    return "rejected" if isinstance(wanted, str) else "read"


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_random_tables_equal_a_reference_reader(root, form, tmp_path):
    rng = random.Random(form)
    seen = []
    for _ in range(600):
        columns = draw(rng, root)
        file = tmp_path / f"table.{form}"
        if form == "csv":
            write_csv(file, columns)
        else:
            write_parquet(rng, file, columns)
        seen.append(check(file, root, columns, getattr(Catalog, f"from_{form}")))
    assert min(seen.count("read"), seen.count("rejected")) > 100


def test_missing_numbers_are_not_labels(root, tmp_path):
    rng = random.Random(0)
    for _ in range(40):
        labels = [rng.choice([1.0, 2.5, math.inf, math.nan, None]) for _ in range(3)]
        table = arrow.table({"path": NAMES[:3], "label": arrow.array(labels, from_pandas=False)})
        parquet.write_table(table, tmp_path / "t.parquet")
        gaps = [row for row, label in enumerate(labels, 1) if label is None or math.isnan(label)]
        if gaps:
            with pytest.raises(ValueError, match=f"column label has no value in row {gaps[0]} "):
                Catalog.from_parquet(tmp_path / "t.parquet", root)
        else:
            found = Catalog.from_parquet(tmp_path / "t.parquet", root)
            assert found.labels == tuple({1.0: "1"}.get(label, str(label)) for label in labels)


def test_damaged_tables_are_read_or_named(root, tmp_path):
    """A damaged table is read, or the error names it."""
    rng = random.Random(1)
    good = {"path": NAMES[:3], "label": ["ant", "bee", "ü"], "split": ["train", "test", "test"]}
    for form in ("csv", "parquet"):
        file = tmp_path / f"damaged.{form}"
        write_csv(file, good) if form == "csv" else write_parquet(rng, file, good)
        data = file.read_bytes()
        rejected = []
        for _ in range(250):
            damaged = bytearray(data)
            for _ in range(rng.randrange(1, 5)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            cut = rng.random() < 0.3
            file.write_bytes(damaged[: rng.randrange(len(damaged))] if cut else damaged)
            try:
                getattr(Catalog, f"from_{form}")(file, root)
            except ValueError as error:
                rejected.append(str(error))
        assert len(rejected) > 50
        assert [message for message in rejected if str(file) not in message] == []
