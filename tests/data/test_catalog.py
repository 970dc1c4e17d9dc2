import datetime
import os
import pickle
import string
import tarfile
import tracemalloc
from dataclasses import replace

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from proximetry.data import Catalog, ClassBalancedSampler
from proximetry.data.tables import Column, encode, pack, write_csv, write_parquet

CHARACTERS = st.characters(blacklist_categories=("Cs",), blacklist_characters="\0")
NOT_UTF8 = st.sampled_from("\udc80\udcff")
TEXT = st.text(CHARACTERS | NOT_UTF8, min_size=1, max_size=12)


@st.composite
def catalogs(draw, min_rows=0):
    rows = draw(st.integers(min_rows, 12))
    column = lambda values: st.lists(values, min_size=rows, max_size=rows).map(tuple)  # noqa: E731
    flags = draw(st.booleans())
    return Catalog(
        paths=draw(st.lists(TEXT, min_size=rows, max_size=rows, unique=True).map(tuple)),
        labels=draw(column(TEXT)),
        splits=draw(column(st.sampled_from(["all", "train", "val", "test"]))),
        queries=draw(column(st.booleans())) if flags else None,
        galleries=draw(column(st.booleans())) if flags else None,
        groups=draw(st.none() | column(st.just("") | TEXT)),
    )


def small(labels="aabbccdd", splits=None):
    paths = tuple(f"{label}/{i}.png" for i, label in enumerate(labels))
    return Catalog(paths, tuple(labels), splits or ("all",) * len(labels))


def make_tree(root, names, junk=()):
    for name in (*names, *junk):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(file, "PNG")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(catalog=catalogs(), form=st.sampled_from(["csv", "parquet"]))
def test_round_trip(tmp_path, catalog, form):
    file = tmp_path / f"table.{form}"
    getattr(catalog, f"to_{form}")(file)
    again = getattr(Catalog, f"from_{form}")(file, root=catalog.root, check_files=False)
    assert again == catalog
    assert not list(tmp_path.glob(".*.part"))


@given(catalog=catalogs(min_rows=1), seed=st.integers(0, 5), fraction=st.floats(0.05, 0.95))
def test_split_classes_is_a_partition(catalog, seed, fraction):
    if len(catalog.class_names) < 2:
        with pytest.raises(ValueError, match="cannot be split"):
            catalog.split_classes(fraction)
        return
    a, b = catalog.split_classes(fraction, seed=seed)
    assert not set(a.labels) & set(b.labels)
    assert sorted(a.paths + b.paths) == sorted(catalog.paths)
    assert set(a.splits) == {"train"}
    assert set(b.splits) == {"test"}
    expected = min(max(round(fraction * len(catalog.class_names)), 1), len(catalog.class_names) - 1)
    assert len(a.class_names) == expected
    # The split does not depend on the order of the rows.
    order = np.random.default_rng(seed).permutation(len(catalog))
    shuffled, _ = catalog.subset(order).split_classes(fraction, seed=seed)
    assert shuffled.class_names == a.class_names


@given(st.integers(3, 40), st.lists(st.integers(1, 9), min_size=2, max_size=3))
def test_fractions_never_leave_a_part_empty(classes, weights):
    catalog = small([f"c{i}" for i in range(classes)])
    shares = [w / sum(weights) for w in weights]
    parts = catalog.split_classes(shares, names=("train", "val", "test")[: len(shares)])
    sizes = [len(p.class_names) for p in parts]
    assert min(sizes) >= 1
    assert sum(sizes) == classes
    assert all(abs(n - s * classes) <= 2 for n, s in zip(sizes, shares, strict=True))


def test_split_classes_by_counts_and_seed():
    catalog = small(string.ascii_lowercase * 2)
    parts = catalog.split_classes((13, 6, 7), names=("train", "val", "test"))
    assert [len(p.class_names) for p in parts] == [13, 6, 7]
    assert [len(p) for p in parts] == [26, 12, 14]
    assert catalog.split_classes(0.5)[0] == catalog.split_classes(0.5, seed=0)[0]
    assert catalog.split_classes(0.5)[0] != catalog.split_classes(0.5, seed=1)[0]


@pytest.mark.parametrize(
    ("parts", "names", "message"),
    [
        ((2, 1), ("train", "test"), r"\(2, 1\) must be positive and sum to 4"),
        ((0.5, 0.6), ("train", "test"), "sum to 1"),
        (1.0, ("train", "test"), "positive"),
        (0.5, ("train",), "2 parts need 2 names"),
        (0.5, ("train", "tset"), "'tset' is not one of"),
    ],
)
def test_split_classes_errors(parts, names, message):
    with pytest.raises(ValueError, match=message):
        small().split_classes(parts, names=names)


def test_codes_follow_sorted_class_names():
    catalog = small("cabca")
    assert catalog.class_names == ("a", "b", "c")
    assert catalog.codes.tolist() == [2, 0, 1, 2, 0]
    assert catalog.codes.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        catalog.codes[0] = 1


def test_subset_by_rows_and_mask():
    catalog = small()
    assert catalog.subset([3, 0]).paths == ("b/3.png", "a/0.png")
    assert catalog.subset(catalog.codes == 1).labels == ("b", "b")
    assert len(catalog.subset([])) == 0
    assert catalog.subset([-1]).labels == ("d",)
    with pytest.raises(IndexError, match="index 8 is out of bounds"):
        catalog.subset([8])
    with pytest.raises(IndexError, match="boolean index did not match"):
        catalog.subset(np.ones(3, bool))
    with pytest.raises(IndexError, match="integer"):
        catalog.subset([0.5])


def test_filter():
    catalog = Catalog(
        ("1", "2", "3", "4"),
        ("a", "a", "b", "b"),
        ("train", "test", "test", "test"),
        queries=(False, True, True, False),
        galleries=(False, False, False, True),
        groups=("x", "x", "y", "y"),
    )
    assert catalog.filter(split="test").paths == ("2", "3", "4")
    assert catalog.filter(split="test", query=True, group="y").paths == ("3",)
    assert catalog.filter(labels="a").paths == ("1", "2")
    assert catalog.filter(gallery=True).paths == ("4",)
    with pytest.raises(ValueError, match="did you mean 'test'"):
        catalog.filter(split="tset")
    with pytest.raises(ValueError, match="unknown class: 'z'"):
        catalog.filter(labels=["a", "z"])
    with pytest.raises(ValueError, match="no query column"):
        small().filter(query=True)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"labels": ("a", "")}, "row 2, column label: '' is not valid text"),
        ({"labels": ("a", 3)}, "row 2, column label: 3 is not"),
        ({"labels": ("a",)}, "labels has 1 entries, paths has 2"),
        ({"paths": ("x\0", "y")}, "row 1, column path"),
        ({"paths": ("x", "y\ud800")}, "row 2, column path"),
        (
            {"labels": [""] * 20, "paths": [*"abcdefghijklmnopqrst"], "splits": ["all"] * 20},
            "15 more",
        ),
        ({"paths": ("x", "x")}, "row 1, column path: 'x' is listed 2 times; row 2"),
        ({"splits": ("train", "dev")}, "row 2, column split: 'dev' is not one of all, train, val"),
        ({"queries": (True, True)}, "both columns or neither"),
        ({"queries": (True, 2), "galleries": (True, True)}, "row 2, column query: 2 is neither"),
    ],
)
def test_validation_names_row_column_and_value(columns, message):
    good = {"paths": ("x", "y"), "labels": ("a", "b"), "splits": ("train", "test")}
    with pytest.raises(ValueError, match=message):
        Catalog(**(good | columns))


FURTHER = {
    "price": (9.5, None, 3.0),
    "year": (1999, 2001, -5),
    "color": ("red", None, "1"),
    "zip": ("00123", "4", "5"),
    "odd name": (os.fsdecode(b"caf\xe9"), "a,b", '"'),
}


def test_further_columns_are_kept(tmp_path):
    catalog = Catalog(
        ("a.png", "b.png", "c.png"), ("ant", "bee", "ant"), ("all",) * 3, columns=FURTHER
    )
    assert catalog.subset([2, 0]).columns["year"] == (-5, 1999)
    assert catalog.filter(labels="ant").columns["color"] == ("red", "1")
    (train, test) = catalog.split_classes(0.5)
    assert len(train.columns["zip"]) == len(train)
    assert {len(values) for values in test.columns.values()} == {len(test)}
    assert hash(catalog) == hash(replace(catalog, columns={}))
    assert catalog != replace(catalog, columns={})
    assert pickle.loads(pickle.dumps(catalog)) == catalog
    catalog.to_csv(tmp_path / "table.csv")
    assert Catalog.from_csv(tmp_path / "table.csv", check_files=False).columns == FURTHER
    without = replace(catalog, columns={k: v for k, v in FURTHER.items() if k != "odd name"})
    without.to_parquet(tmp_path / "table.parquet")
    again = Catalog.from_parquet(tmp_path / "table.parquet", check_files=False)
    assert again.columns == without.columns
    assert again.notes == ()


@pytest.mark.parametrize("write", [write_csv, write_parquet])
@pytest.mark.parametrize("columns", [{"a": [1], "b": [1, 2]}, {"a": ["x", "\ud800"]}])
def test_invalid_columns_leave_the_written_table_alone(tmp_path, write, columns):
    file = tmp_path / "table"
    write(file, {"a": [1]})
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"length|shorter|longer|surrogates"):
        write(file, columns)
    assert [entry.name for entry in tmp_path.iterdir()] == ["table"]
    assert file.read_bytes() == before


def test_kinds_of_columns_in_parquet(tmp_path):
    columns = {
        "path": ["a.png", "b.png"],
        "label": ["ant", "bee"],
        "sold": [True, None],
        "day": [datetime.date(1999, 12, 31), None],
        "weight": [float("nan"), 2.5],
        "big": arrow.array([2**64 - 1, 1], arrow.uint64()),
        "kind": arrow.array(["x", "y"]).dictionary_encode(),
        "vector": [[1.0, 2.0], [3.0, 4.0]],
        "raw": [b"\xff", b"x"],
    }
    file = tmp_path / "table.parquet"
    parquet.write_table(arrow.table(columns), file)
    found = Catalog.from_parquet(file, check_files=False)
    assert found.columns == {
        "sold": (True, None),
        "day": ("1999-12-31", None),
        "weight": (None, 2.5),
        "big": (str(2**64 - 1), 1),
        "kind": ("x", "y"),
    }
    assert found.notes == ("unused columns: vector, raw",)


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["1", "-2"], (1, -2)),
        (["1", "2.5"], (1.0, 2.5)),
        (["1e3", ".5"], (1000.0, 0.5)),
        (["1", ""], (1, None)),
        (["", ""], (None, None)),
        (["01", "2"], ("01", "2")),
        (["1", "nan"], ("1", "nan")),
        (["1", "1e999"], ("1", "1e999")),
        (["1_0", "2"], ("1_0", "2")),
        (["1", "-"], ("1", "-")),
        (["1", "."], ("1", ".")),
        (["1", "e5"], ("1", "e5")),
        (["1" * 30, "2"], ("1" * 30, "2")),
        (["-.5", "-0.25e-1"], (-0.5, -0.025)),
        (["\u0661", "2"], ("\u0661", "2")),
        (["true", "false"], ("true", "false")),
    ],
)
def test_cells_are_numbers_if_all_of_them_are(tmp_path, cells, values):
    lines = [f"{row}.png,ant,{cell}" for row, cell in enumerate(cells)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label,x", *lines]))
    found = Catalog.from_csv(tmp_path / "table.csv", check_files=False)
    assert found.columns == {"x": values}
    assert [type(value) for value in found.columns["x"]] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"path": ("x",)}, "columns has 'path'"),
        ({"": ("x",)}, "invalid name of a column: ''"),
        ({"x": ("a", "b")}, "x has 2 entries, paths has 1"),
        ({"x": ([1],)}, r"row 1, column x: \[1\] is neither text nor a number"),
        ({"x": (float("inf"),)}, "row 1, column x: inf is neither"),
    ],
)
def test_invalid_extra_columns_are_rejected(columns, message):
    with pytest.raises(ValueError, match=message):
        Catalog(("a.png",), ("ant",), ("all",), columns=columns)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty, expected a header"),
        ("path,labels\nx,a\n", "missing columns: 'label'; it has path, labels"),
        ("path;label\nx;a\n", "separated by commas"),
        ("path,split\nx,train\n", "missing columns: 'label'"),
        ("file,kind\nx,a\n", "missing columns: 'path', 'label'"),
        ("path,path,label\nx,x,a\n", "duplicate column 'path'"),
        ("path,label\nx,a\ny\n", "row 2 has 1 fields, the header has 2"),
        ("path,label,query,gallery\nx,a,maybe,1\n", "column query: 'maybe' is neither"),
        ("path,label,split\nx,a,dev\n", "row 1, column split: 'dev'"),
        ('path,label\n"x,a\n', "not a CSV file"),
        ("\ufeffpath,label\nx,a\n".encode("utf-16-le"), "UTF-8"),
        ("\ufeffpath,label\nx,a\n".encode("utf-16-be"), "UTF-8"),
    ],
)
def test_csv_errors_name_the_file(tmp_path, text, message):
    file = tmp_path / "table.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message) as caught:
        Catalog.from_csv(file, check_files=False)
    assert str(file) in str(caught.value)


def test_csv_from_a_spreadsheet(tmp_path):
    file = tmp_path / "table.csv"
    file.write_bytes("\ufeff,path,label,query,gallery\r\n7,x,é,TRUE,0\r\n\r\n".encode())
    catalog = Catalog.from_csv(file, check_files=False)
    assert catalog.columns == {}  # a column without a name contains row numbers
    assert catalog.labels == ("é",)
    assert catalog.splits == ("all",)
    assert catalog.queries == (True,)
    assert catalog.root == tmp_path


def test_parquet_errors(tmp_path):
    (tmp_path / "text.parquet").write_text("nothing")
    with pytest.raises(ValueError, match=r"text\.parquet: not a readable Parquet"):
        Catalog.from_parquet(tmp_path / "text.parquet")
    lists = arrow.table({"path": ["x"], "label": [["a", "b"]]})
    parquet.write_table(lists, tmp_path / "lists.parquet")
    with pytest.raises(ValueError, match=r"row 1, column label: \['a', 'b'\] is not valid text"):
        Catalog.from_parquet(tmp_path / "lists.parquet", check_files=False)


def test_extra_columns_are_listed_in_layout(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("path,label,width,height,x\na.jpg,x,1,2,3\nb.jpg,y,1,2,3\n")
    expected = "images: 2 classes: x, y; extra columns, used only for search: width, height, x"
    assert Catalog.from_csv(file, check_files=False).layout == expected


@pytest.mark.parametrize(
    "other", ["./a/1.png", "a/../a/1.png", "b/../a//1.png", "link/1.png", "again.png", "ABSOLUTE"]
)
def test_image_under_two_paths_is_rejected(tmp_path, other):
    make_tree(tmp_path, ["a/1.png", "b/2.png"])
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "again.png").symlink_to("link/1.png")
    other = tmp_path / "a/1.png" if other == "ABSOLUTE" else other
    table = tmp_path / "table.csv"
    table.write_text(f"path,label\na/1.png,a\nb/2.png,b\n{other},a\n")
    with pytest.raises(ValueError, match=f"row 3, column path: '{other}' .* row 1, 'a/1.png'"):
        Catalog.from_csv(table)
    (tmp_path / "hard.png").hardlink_to(tmp_path / "a/1.png")  # hard links are allowed
    table.write_text("path,label\na/1.png,a\nhard.png,a\n")
    assert len(Catalog.from_csv(table)) == 2


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_unreadable_table_is_named(tmp_path, form, request):
    read = getattr(Catalog, f"from_{form}")
    with pytest.raises(ValueError, match=f"no such table: {tmp_path}/none"):
        read(tmp_path / "none")
    with pytest.raises(ValueError, match=f"the table {tmp_path} cannot be read: a folder, not a"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # opening it would block forever
    with pytest.raises(ValueError, match="pipe cannot be read: a named pipe, not a file"):
        read(tmp_path / "pipe")
    folder = request.getfixturevalue("ordinary_user")
    (folder / "table").touch(mode=0)
    with pytest.raises(ValueError, match=f"{folder}/table cannot be read: Permission denied"):
        read(folder / "table")


def test_folder_of_folders(tmp_path):
    names = ["b/2.png", "a/1.jpg", "a/deep/3.PNG"]
    make_tree(tmp_path, names, junk=["a/readme.txt", "a/.hidden.png", ".git/x.png", "top.png"])
    (tmp_path / "empty").mkdir()
    catalog = Catalog.from_folder(tmp_path)
    assert catalog.paths == ("a/1.jpg", "a/deep/3.PNG", "b/2.png")
    assert catalog.labels == ("a", "a", "b")
    assert set(catalog.splits) == {"all"}
    assert catalog.notes == (
        "files that are not images in a class folder (2): top.png, a/readme.txt",
        "class folders without images (1): empty",
    )
    assert catalog.missing_files() == []
    assert "note: files that are not images" in catalog.describe()


def test_notes_on_nested_folders_and_unsupported_formats(tmp_path):
    make_tree(tmp_path, ["2024/ant/1.png", "2025/bee/2.png"], junk=["2024/ant/IMG_1.DNG"])
    assert Catalog.from_folder(tmp_path).notes == (
        "all images lie in folders below the class folders, as 2024/ant/1.png; the outer ones are "
        "the classes",
        "files of an unsupported image format; convert to JPEG or PNG (1): 2024/ant/IMG_1.DNG",
    )


def by_split(catalog):
    return dict(zip(catalog.paths, catalog.splits, strict=True))


SPLIT_TREE = ["train/a/1.png", "test/b/2.png", "val/c/deep/3.png"]


@pytest.mark.parametrize(
    ("more", "skipped"),
    [
        ([], ""),
        (["__MACOSX/._train", "lost+found/x/1.png"], "; skipped: __MACOSX, lost+found"),
        ([".git/a/1.png", "docs/read.txt"], "; skipped: .git, docs"),
        (["docs/1.png", "extra/z/9.png"], "; skipped: docs, extra"),
        (["train/a/.old/1.png", "test/b/@eaDir/2.jpg"], "; skipped: test/b/@eaDir, train/a/.old"),
    ],
)
def test_folder_with_splits(tmp_path, more, skipped):
    make_tree(tmp_path, SPLIT_TREE, more)
    catalog = Catalog.from_folder(tmp_path)
    assert by_split(catalog) == {path: path.split("/")[0] for path in SPLIT_TREE}
    assert set(catalog.labels) == {"a", "b", "c"}
    expected = "images: 1 class in train/, 1 class in val/, 1 class in test/"
    assert catalog.layout == expected + skipped
    assert catalog.describe().startswith(catalog.layout)


def test_ambiguous_split_folder_is_rejected(tmp_path):
    make_tree(tmp_path, ["train/steam/1.png", "train/diesel/2.png", "bus/3.png"])
    with pytest.raises(ValueError, match=r"train/ is a split or a class.* Move bus/ elsewhere"):
        Catalog.from_folder(tmp_path)
    (tmp_path / "train").rename(tmp_path / "trains")
    catalog = Catalog.from_folder(tmp_path)
    assert catalog.labels == ("bus", "trains", "trains")
    assert catalog.layout == "images: 2 classes: bus, trains"


def test_splits_inside_shards(tmp_path):
    make_tree(tmp_path, [*SPLIT_TREE, "docs/x/1.png"])
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("train/a/1.png", "test/b/2.png", "docs/x/1.png"):
            tar.add(tmp_path / name, name)
    catalog = Catalog.from_shards([tmp_path / "a.tar"])
    assert by_split(catalog) == {"a.tar::train/a/1.png": "train", "a.tar::test/b/2.png": "test"}
    assert catalog.layout == (
        "images: 1 class in train/, 1 class in test/; skipped: a.tar::docs/x/1.png"
    )


def test_links_to_class_folders_are_followed(tmp_path):
    make_tree(tmp_path, ["pool/x/1.png", "pool/y/deep/2.png", "root/b/3.png", "root/a/4.png"])
    (tmp_path / "root/x").symlink_to(tmp_path / "pool/x")
    (tmp_path / "root/b/more").symlink_to(tmp_path / "pool/y")  # below a class folder
    (tmp_path / "root/a/6.png").symlink_to(tmp_path / "elsewhere.png")
    (tmp_path / "root/gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "root/a/loop.png").symlink_to("loop.png")
    for name, target in {"self": ".", "above": "..", "a/up": "../..", "c": "a"}.items():
        (tmp_path / "root" / name).symlink_to(target)  # links within the root are skipped
    catalog = Catalog.from_folder(tmp_path / "root")
    assert catalog.paths == ("a/4.png", "a/6.png", "a/loop.png", "b/3.png", "x/1.png")
    assert catalog.missing_files() == [1]
    skipped = catalog.layout.partition("; skipped: ")[2]
    for name in ("self", "above", "a/up", "c", "b/more"):
        assert f"{name} (a link to" in skipped
    assert catalog.notes == ("files that are not images in a class folder (1): gone",)


@pytest.mark.parametrize("closed", ["b", "b/deep", "train"])
def test_folder_without_permission_is_named(ordinary_user, closed):
    make_tree(ordinary_user, ["a/1.png", "b/2.png", "b/deep/3.png", "train/4.png"])
    (ordinary_user / closed).chmod(0)
    message = f"{ordinary_user / closed} cannot be read: Permission denied"
    with pytest.raises(OSError, match=message):
        Catalog.from_folder(ordinary_user)


def test_folder_errors(tmp_path):
    with pytest.raises(ValueError, match="not a folder"):
        Catalog.from_folder(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"<class>/<image>.jpg, found notes\.txt"):
        Catalog.from_folder(tmp_path)


def test_describe():
    catalog = small("aaabbc", splits=("train", "train", "train", "train", "test", "test"))
    lines = catalog.describe().splitlines()
    assert lines[0] == "6 images of 3 classes in ."
    assert lines[1].split() == ["split", "images", "classes", "smallest", "median", "largest"]
    assert lines[2].split() == ["train", "4", "2", "1", "2", "3"]
    assert lines[3].split() == ["test", "2", "2", "1", "1", "1"]
    assert lines[4].split() == ["total", "6", "3", "1", "2", "3"]
    assert lines[5].startswith("note: train and test share 1 class, so test does not measure")
    apart = small("aab", splits=("train", "train", "test"))
    assert "train and test share no class" in apart.describe()
    assert "0 images of 0 classes" in small("").describe()


def test_rows_take_little_more_memory_than_their_bytes(tmp_path):
    """Peak memory is at most 200 bytes per row: ten million rows fit in 2 GiB."""
    rows = 200_000
    numbers = np.random.default_rng(0).permutation(rows)
    columns = {
        "path": [f"images/{number:09d}.jpg" for number in numbers],
        "label": [f"class {number // 10}" for number in numbers],
        "split": np.where(numbers % 100 < 80, "train", "test"),
        "year": 1990 + numbers % 30,
    }
    parquet.write_table(arrow.table(columns), tmp_path / "table.parquet", row_group_size=50_000)
    paths, labels = columns["path"], columns["label"]
    tracemalloc.start()  # tracks NumPy arrays and Python objects
    try:
        catalog = Catalog.from_parquet(tmp_path / "table.parquet", check_files=False)
        held, most = tracemalloc.get_traced_memory()
        sampler = ClassBalancedSampler(catalog.filter(split="train").codes, 45, 4)
        sampler.batch(3, 7)
        with_sampler = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 90 * rows
    assert max(most, with_sampler) < 200 * rows
    assert catalog.paths == tuple(paths)
    assert catalog.labels == tuple(labels)
    assert catalog.class_names == tuple(sorted(set(labels)))
    some = np.random.default_rng(1).choice(rows, 50)
    assert [catalog.columns["year"][row] for row in some] == columns["year"][some].tolist()
    train = catalog.filter(split="train")
    assert train.paths[-1] == paths[np.flatnonzero(columns["split"] == "train")[-1]]
    # A small subset does not keep the other rows in memory.
    assert len(pickle.dumps(train.subset([5, 3]))) < 5000


@given(st.lists(st.none() | st.text(st.characters(blacklist_categories=("Cs",)), max_size=20)))
def test_columns_of_texts_are_like_tuples(values):
    column = Column(encode(values))
    assert column == tuple(values)
    assert tuple(column) == tuple(values)
    assert hash(column) == hash(tuple(values))
    assert len(column) == len(values)
    assert column[1:-1] == tuple(values)[1:-1]
    assert pickle.loads(pickle.dumps(column[::-2])) == tuple(values)[::-2]
    assert [column[i] for i in range(-len(values), len(values))] == values * 2
    texts = tuple("" if value is None else value for value in values)
    coded = pack(texts, categorical=True)
    assert coded == texts
    assert coded.distinct == tuple(sorted(set(texts)))
    assert coded[::3] == texts[::3]
    assert coded[::3].distinct == tuple(sorted(set(texts[::3])))
    assert pack(Column(encode(texts)), categorical=True).array == coded.array
