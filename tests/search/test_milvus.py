"""Galleries on Milvus, here a file of Milvus Lite: the same ranking as from a folder."""

import json
import os
import shutil
import sys

import numpy as np
import pytest

from proximetry import cli
from proximetry._util.errors import UsageError
from proximetry.data import Catalog
from proximetry.metrics import retrieve
from proximetry.search import Gallery, metadata, milvus, milvus_client, new_images
from tests.search.conftest import make_embedder, make_table, make_vectors, names

pytest.importorskip("milvus_lite")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Stage vectors in a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROXIMETRY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """One file for all tests, since opening one is slow."""
    return tmp_path_factory.mktemp("milvus") / "galleries.db"


@pytest.fixture
def address(file, request):
    name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
    return f"milvus:{file}/{name}"


def both(embedder, table, vectors, address, folder, **options):
    """Build a gallery on Milvus and in a folder; return both, and Milvus's ids in folder order."""
    remote = Gallery.build(embedder, table, address, vectors=vectors, **options)
    local = Gallery.build(embedder, table, folder / "gallery", vectors=vectors)
    return remote, local, by_path(remote, local.rows(local.ids())["path"])


def by_path(gallery, paths):
    """Return the ids of images by path; on Milvus they are hashes."""
    ids = gallery.ids()
    known = dict(zip(gallery.rows(ids)["path"], ids.tolist(), strict=True))
    return np.array([known[path] for path in paths])


def assert_same(result, expected, ids):
    """Assert that rankings are equal up to ties."""
    values, scores = (
        one.similarities if one.scores is None else one.scores for one in (result, expected)
    )
    np.testing.assert_allclose(values, scores[:, : result.k], atol=1e-6)
    named = np.where(expected.ids >= 0, ids[expected.ids], -1)[:, : result.k]
    assert (expected.ids[:, result.k :] == -1).all()
    differ = result.ids != named
    gaps = np.abs(np.diff(scores, axis=1, prepend=np.inf, append=-np.inf))
    tied = np.minimum(gaps[:, :-1], gaps[:, 1:])[:, : result.k] < 1e-6
    tied[:, -1] = True  # the list may end within a tie
    assert not (differ & ~tied).any()
    assert set(result.columns) == set(expected.columns)


@pytest.mark.parametrize("normalize", [True, False])
def test_search_equals_a_folder_up_to_ties(normalize, address, tmp_path):
    embedder = make_embedder(normalize=normalize)
    vectors = np.round(make_vectors(300) * 2) / 2  # many are equally near
    vectors[100:160] = vectors[7]  # and sixty are copies
    remote, local, ids = both(embedder, make_table(0, 300), vectors, address, tmp_path)
    queries = np.concatenate([vectors[:9], make_vectors(5, seed=1)])
    for k in (1, 5, 20, 299, 1000):
        assert_same(remote.search(queries, k), local.search(queries, k), ids)
    where = {"label": ["class1", "class3"]}
    assert_same(
        remote.search(queries, 30, where=where), local.search(queries, 30, where=where), ids
    )
    assert np.array_equal(remote.ids(where), np.sort(ids[local.ids(where)]))
    for options in ({"rerank": True}, {"expand": 3 * normalize}):
        result, expected = (one.search(queries[-5:], 5, **options) for one in (remote, local))
        assert_same(result, expected, ids)
    threshold = 0.9 if normalize else 1.0
    alike, expected = remote.duplicates(threshold), local.duplicates(threshold)
    pairs = np.sort(ids[expected.pairs], axis=1)
    assert sorted(alike.pairs.tolist()) == sorted(pairs.tolist())
    assert len(expected.pairs) > 1000
    np.testing.assert_allclose(alike.similarities, expected.similarities, atol=1e-6)
    groups = [sorted(ids[group].tolist()) for group in expected.groups]
    assert sorted(group.tolist() for group in alike.groups) == sorted(groups)
    np.testing.assert_allclose(remote.vectors(ids), local.vectors(local.ids()), atol=1e-6)
    assert remote.rows(ids) == local.rows(local.ids())
    assert len(remote) == 300
    assert remote.index == "auto"
    assert f"300 images, 8 dimensions, {local.similarity}, index Flat" in repr(remote)


def test_build_and_search_images(embedder, images, address):
    catalog = Catalog.from_folder(images)
    lines = []
    Gallery.build(embedder, catalog, address, report=lines.append)
    assert lines == ["index: Milvus Flat for 48 images: every search is exact"]
    gallery = Gallery.open(address, embedder)
    files = [catalog.file(row) for row in range(3)]
    result = gallery.search(files, 4)
    assert result.paths[:, 0].tolist() == files
    assert result.column("split")[0, 0] == "all"
    other = Gallery.open(address)
    assert np.array_equal(other.search(embedder.encode(files), 4).ids, result.ids)
    with pytest.raises(UsageError, match="stores no embedder"):
        other.search([catalog.file(0)])
    with pytest.raises(UsageError, match="did not build"):
        Gallery.open(address, make_embedder(seed=1))


def test_changes_by_several_writers(embedder, address):
    first = Gallery.build(embedder, make_table(0, 20), address, vectors=make_vectors(20))
    second = Gallery.open(address)
    before = by_path(first, names(0, 20))
    new = second.add(make_table(20, 5), vectors=make_vectors(5, seed=1))
    assert len(first) == 25
    assert np.array_equal(new, by_path(first, names(20, 5)))
    again = make_vectors(4, seed=2)
    renewed = first.add(make_table(23, 4), vectors=again)  # replaces two
    assert len(second) == 27
    assert np.array_equal(renewed[:2], new[3:])  # an id belongs to a path
    assert np.allclose(second.vectors(renewed), again / np.linalg.norm(again, axis=1)[:, None])
    assert sorted(second.rows(second.ids())["path"]) == names(0, 27)
    second.remove(before[:10])
    assert len(first) == 17
    assert first.contains(names(9, 2)) == [False, True]
    assert not set(first.search(make_vectors(20), 17).ids.ravel().tolist()) & set(before[:10])
    with pytest.raises(UsageError, match=f"has the id {before[0]}"):
        first.remove(before[:1])
    first.compact()
    assert not first.needs_compaction
    first.remove(first.ids())
    assert len(second) == 0
    assert (second.search(make_vectors(2), 3).ids == -1).all()
    assert len(second.duplicates().pairs) == 0


HOSTILE = [
    "it's",
    'say "x"',
    "back\\slash\\",
    '"] or path in ["',
    "line\nbreak\ttab\r",
    "{x}",
    "ü 😀",
    os.fsdecode(b"caf\xe9"),
    "\x01",
    "",
    " ",
]


def test_any_text_is_stored_and_filtered(embedder, address):
    paths = [f"/images/{text.replace(chr(47), '_')}{row}" for row, text in enumerate(HOSTILE)]
    columns = {"path": paths, "label": HOSTILE, 'odd "name\\': HOSTILE[::-1], "vector": HOSTILE}
    gallery = Gallery.build(
        embedder, metadata.from_columns(columns), address, vectors=make_vectors(len(HOSTILE))
    )
    ids = by_path(gallery, paths)
    assert {name: gallery.rows(ids)[name] for name in columns} == columns
    for row, text in enumerate(HOSTILE):
        assert gallery.ids({"label": text}).tolist() == [ids[row]]
        assert gallery.ids({"vector": text}).tolist() == [ids[row]]
        assert gallery.ids({'odd "name\\': text}).tolist() == [ids[len(ids) - 1 - row]]
        assert gallery.ids({"path": paths[row]}).tolist() == [ids[row]]
    assert Gallery.open(address).columns == gallery.columns


NUMBERS = {
    "year": [1990, 2001, 2001, None, 2**60 + 1],
    "ok": [True, False, None, None, None],
    "x": [0.5, 2, 3, None, -1.5],
    "color": [None, "red", None, "7", "rose"],
    "label": [None, "a", "b", None, "ba"],
}
NUMERIC_WHERES = [
    ({"year": 2001}, [1, 2]),
    ({"year": "1990"}, [0]),
    ({"year": None}, [3]),
    ({"year": [None, 1990]}, [0, 3]),
    ({"year": {"!=": 2001}}, [0, 3, 4]),
    ({"year": {"!=": [None, 2001]}}, [0, 4]),
    ({"year": {">=": 1990, "<": "2001"}}, [0]),
    ({"year": {">": 2**60}}, [4]),
    ({"year": {"<": 10**30}}, [0, 1, 2, 4]),
    ({"x": {"<": float("inf"), ">": -1.5}}, [0, 1, 2]),
    ({"ok": "true"}, [0]),
    ({"ok": False}, [1]),
    ({"ok": {"!=": True}}, [1, 2, 3, 4]),
    ({"x": "2.0"}, [1]),
    ({"color": 7}, [3]),
    ({"color": {"^=": ["r", "7"]}}, [1, 3, 4]),
    ({"color": {"^=": "ro"}}, [4]),
    ({"color": {">": "red"}}, [4]),
    ({"label": None}, [0, 3]),
    ({"label": {"!=": None}}, [1, 2, 4]),
    ({"label": {"!=": "a"}}, [0, 2, 3, 4]),
    ({"label": {"^=": "b"}}, [2, 4]),
    ({"label": {"^=": ""}}, [1, 2, 4]),
    ({"label": {">=": "b"}}, [2, 4]),
    ({"label": [None, "a"], "color": [None, "red"]}, [0, 1]),
]


def test_new_columns_are_known_to_the_writer(embedder, address):
    with Gallery.build(embedder, ["a.png"], address, vectors=make_vectors(1)) as gallery:
        table = metadata.from_columns({"path": names(0, 2), "year": [2001, 2002]})
        ids = gallery.add(table, vectors=make_vectors(2, seed=1))
        assert gallery.columns == ["path", "label", "year"]
        assert gallery.ids({"year": 2002}).tolist() == [ids[1]]
        gallery.close()  # again at the end of `with`


def test_label_errors_while_others_write(embedder, address, call, monkeypatch):
    draw = np.random.default_rng(0)
    classes = np.arange(60) % 2
    vectors = np.eye(2, 8)[classes] + 0.1 * draw.standard_normal((60, 8))
    labels = [f"class{number}" for number in classes]
    labels[7], labels[20] = "class0", None
    table = make_table(0, 60)
    table = metadata.from_columns({"path": table["path"].to_pylist(), "label": labels})
    gallery = Gallery.build(embedder, table, address, vectors=vectors)
    ((found,), take) = gallery.label_errors(), milvus.Collection.take
    assert (found.id, found.label) == (by_path(gallery, names(7, 1))[0], "class0")
    assert "class0 → class1?" in call("outliers", address)

    def write_after_take(collection, *arguments):
        monkeypatch.undo()
        columns = take(collection, *arguments)
        gallery.add(make_table(60, 9), vectors=make_vectors(9))
        return columns

    monkeypatch.setattr(milvus.Collection, "take", write_after_take)
    assert [one.id for one in gallery.label_errors()] == [found.id]


def test_served_gallery_limits_its_own_calls_only(embedder, address):
    pytest.importorskip("fastapi")
    from proximetry.web.live_gallery import LiveGallery

    gallery = Gallery.build(embedder, ["a.png"], address, vectors=make_vectors(1))
    served = LiveGallery(gallery).current()
    assert len(served) == 1
    limits = [
        (one._snapshot.client.call_seconds, one._snapshot.client.retry_seconds)
        for one in (served, gallery)
    ]
    assert limits == [(10, 0), (milvus_client.CALL_SECONDS, milvus_client.RETRY_SECONDS)]


def test_numeric_columns_and_missing_values(embedder, address):
    table = metadata.from_columns({"path": names(0, 5), **NUMBERS})
    gallery = Gallery.build(embedder, table.slice(0, 3), address, vectors=make_vectors(3))
    other = Gallery.open(address)
    gallery.add(table.slice(3), vectors=make_vectors(2, seed=1))
    other.refresh()
    ids = by_path(gallery, names(0, 5))
    for where, expected in NUMERIC_WHERES:
        assert other.ids(where).tolist() == sorted(ids[expected].tolist()), where
    assert other.rows(ids[[3, 1]])["year"] == [None, 2001]
    assert other.rows(ids[[0, 2]])["ok"] == [True, None]
    for where, token in (
        ({"yaer": 1990}, "did you mean 'year'"),
        ({"year": "then"}, "year 'then'"),
        ({"label": []}, "no value for label"),
        ({"label": {">": 3}}, "has type text"),
    ):
        with pytest.raises(UsageError, match=token):
            other.search(make_vectors(1), where=where)


def assert_batches_cover_all_rows(gallery, monkeypatch):
    """Assert that reading in small batches returns every row once."""
    expected = gallery.ids()
    vectors = gallery.vectors(expected)
    with monkeypatch.context() as patch:
        patch.setattr(milvus, "MAX_K", 151)
        patch.setattr(gallery._snapshot, "_batch", 149)
        assert np.array_equal(gallery.ids(), expected)
        assert np.array_equal(gallery.vectors(expected), vectors)


def test_small_batches(embedder, address, monkeypatch):
    built = Gallery.build(embedder, make_table(0, 300), address, vectors=make_vectors(300))
    assert_batches_cover_all_rows(built, monkeypatch)


def test_one_call_per_search(embedder, address, monkeypatch):
    built = Gallery.build(embedder, make_table(0, 30), address, vectors=make_vectors(30))
    calls, call = [], milvus.MilvusClient.__getattr__
    monkeypatch.setattr(
        milvus.MilvusClient,
        "__getattr__",
        lambda self, name: calls.append(name) or call(self, name),
    )
    result = built.search(make_vectors(5), 7, where={"label": "class1"})
    assert {*result.labels.ravel()} == {"class1"}
    assert result.paths.shape == (5, 6)
    assert calls == ["search"]


@pytest.mark.parametrize("index", ["HNSW16", "IVF8,SQ8"])
def test_approximate_index(index, embedder, address):
    vectors = make_vectors(400)
    gallery = Gallery.build(embedder, make_table(0, 400), address, index, vectors=vectors)
    result, expected = gallery.search(vectors[:20], 3), retrieve(vectors, queries=vectors[:20], k=3)
    ids = by_path(gallery, names(0, 400))
    assert np.isin(result.ids, ids[expected.ids]).mean() > 0.9
    assert result.similarities[:, 0].min() > 1 - 1e-6
    assert gallery.duplicates(0.9).pairs.shape[1] == 2
    client, name = gallery._snapshot.client, gallery._snapshot.name
    client.release_collection(name)
    client.drop_index(name, "vector")  # as if killed while it re-indexes
    assert f"index {index[:3]}" in repr(Gallery.open(address))


def test_interrupted_build_resumes(embedder, images, address, monkeypatch):
    catalog = Catalog.from_folder(images)
    monkeypatch.setattr(new_images, "CHUNK", 10)
    encode, done = type(embedder).encode, []

    def count(self, files, *args, **options):
        done.extend(files)
        if len(done) == 40:
            raise KeyboardInterrupt
        return encode(self, files, *args, **options)

    monkeypatch.setattr(type(embedder), "encode", count)
    with pytest.raises(KeyboardInterrupt):
        Gallery.build(embedder, catalog, address)
    with pytest.raises(UsageError, match="not finished"):
        Gallery.open(address)
    built = Gallery.build(embedder, catalog, address)
    assert len(done) == 40 + 18  # thirty were written the first time
    assert len(Gallery.open(address)) == len(built) == 48
    with pytest.raises(UsageError, match="already exists"):
        Gallery.build(embedder, catalog, address)


def stop(*args, **options):
    raise KeyboardInterrupt


def test_interrupted_addition_is_repeated(embedder, address, monkeypatch):
    gallery = Gallery.build(embedder, make_table(0, 5), address, vectors=make_vectors(5))
    monkeypatch.setattr(new_images, "CHUNK", 4)
    more, vectors = make_table(5, 10), make_vectors(10, seed=1)
    with pytest.raises(KeyboardInterrupt):
        gallery.add(more, vectors=vectors, progress=stop)
    assert len(gallery) == 9
    gallery.add(more, vectors=vectors)
    assert sorted(gallery.rows(gallery.ids())["path"]) == names(0, 15)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (100_000, ("FLAT", {})),
        (100_001, ("HNSW", {"M": 32, "efConstruction": 200})),
        (3_000_000, ("IVF_SQ8", {"nlist": 4096})),
        (1_000_000_000, ("IVF_SQ8", {"nlist": 4096})),  # in segments of 1 GB
    ],
)
def test_index_follows_the_number_of_images(count, expected):
    assert milvus.choose_index("auto", count) == expected


@pytest.mark.parametrize(
    ("address", "token"),
    [
        ("milvus://host:19530", "invalid address"),
        ("milvus://host:19530/two/names", "invalid address"),
        ("milvus:file.txt", "invalid address"),
        ("milvus://user:secret@host/c", "MILVUS_TOKEN"),
        ("milvus:/nowhere/at/all/file.db", "no gallery milvus:/nowhere"),
        ("milvus://host/birds?shard=2", "did you mean 'shards'"),
        ("milvus://host/birds?shards=0", "shards must be an integer"),
        ("milvus://host/birds?consistency=strong", "Strong, Session, Bounded or Eventually"),
        ("milvus:x.db?partition=a b", "partition must be a name, got 'a b'"),
    ],
)
def test_invalid_address_is_rejected(address, token):
    with pytest.raises(UsageError, match=token) as error:
        Gallery.open(address)
    assert "secret" not in str(error.value)


def test_parse_addresses():
    parse = milvus_client.Address.parse
    assert parse("milvus://host/birds").uri == "http://host:19530"
    assert parse("milvuss://host:443/birds").uri == "https://host:443"
    assert parse("milvus:///data/x.db/birds").uri == parse("milvus:/data/x.db").uri == "/data/x.db"
    assert parse("milvus:x.db").collection == "gallery"
    assert parse("milvus:x.db").uri == os.path.abspath("x.db")
    assert parse("milvus:x.db/a?partition=b").partition == "b"
    options = parse("milvus://host/birds?db=d&consistency=Bounded&shards=3&replicas=2")
    assert (options.uri, options.collection, options.db) == ("http://host:19530", "birds", "d")
    assert (options.consistency, options.shards) == ("Bounded", 3)
    assert options.replicas == 2


def test_errors_of_milvus_name_the_address(embedder, file, address, monkeypatch):
    monkeypatch.setenv("MILVUS_TOKEN", "root:secret")
    with pytest.raises(ValueError, match=r"milvus://127.0.0.1:1/c: no answer") as error:
        Gallery.build(embedder, make_table(0, 1), "milvus://127.0.0.1:1/c")
    assert "secret" not in str(error.value)
    built = Gallery.build(embedder, make_table(0, 3), address, vectors=make_vectors(3))
    with pytest.raises(UsageError, match="already exists"):
        Gallery.build(embedder, make_table(0, 3), address, vectors=make_vectors(3))
    with pytest.raises(UsageError, match="unknown index"):
        Gallery.build(embedder, make_table(0, 3), f"{address}2", "BFlat")
    with pytest.raises(UsageError, match="no gallery"):
        Gallery.open(f"{address}2")
    client, name = built._snapshot.client, f"{built._snapshot.name}_theirs"
    client.create_collection(name, dimension=4)
    with pytest.raises(UsageError, match="not a gallery"):
        Gallery.open(f"milvus:{file}/{name}")
    client.alter_collection_properties(built._snapshot.name, {"proximetry": '{"version": 7}'})
    with pytest.raises(ValueError, match="format version 7"):
        built.refresh()
    client.drop_collection(built._snapshot.name)
    with pytest.raises(ValueError, match="does not exist"):
        built.search(make_vectors(1))


def test_largest_k(embedder, address, monkeypatch):
    monkeypatch.setattr(milvus, "MAX_K", 50)
    table, vectors = make_table(0, 120), np.tile(make_vectors(1), (120, 1))
    gallery = Gallery.build(embedder, table, address, vectors=vectors)
    result = gallery.search(vectors[:1], 10)  # a hundred and twenty are equally near
    assert len(set(result.ids[0].tolist())) == 10
    with pytest.raises(UsageError, match="at most 50"):
        gallery.search(vectors[:1], 51)


def test_commands(images, address, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    make_embedder().save(tmp_path / "model")
    shutil.copytree(images, tmp_path / "images")

    def call(*words, code=0):
        got = cli.main([str(word) for word in words])
        printed = capfd.readouterr()
        assert got == code, printed.err
        return printed.err if code else printed.out

    where = ("--gallery", address)
    text = call("index", "images", "--model", "model", *where)
    assert f"{address}: 48 images, 48 new" in text
    assert f"proximetry search QUERY.jpg --gallery {address} --model model" in text
    shutil.copy("images/class00/0.png", "images/class00/copy.png")
    text = call("index", "images", "--model", "model", "--device", "cpu", *where)
    assert "49 images, 1 new" in text
    query = "images/class00/0.png"
    assert "--model RUN" in call("search", query, *where, code=2)
    result = call("search", query, *where, "--model", "model", "-k", 2, "--json")
    (one,) = json.loads(result)["queries"]
    # Embedded in different batches, copies need not have equal vectors.
    assert {os.path.basename(image["path"]) for image in one["results"]} == {"0.png", "copy.png"}
    assert "1 group, 2 of 49 images" in call("duplicates", address, "--threshold", 0.99999)


def test_missing_pymilvus_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(ModuleNotFoundError, match="extra 'milvus'"):
        Gallery.open("milvus://localhost/birds")


def test_page_serves_milvus(embedder, images, address, monkeypatch):
    testclient = pytest.importorskip("fastapi.testclient")
    from proximetry.web.app import make_app
    from proximetry.web.gallery_map import MapMaker

    monkeypatch.setattr(MapMaker, "_start", lambda self, gallery: None)
    gallery = Gallery.build(embedder, Catalog.from_folder(images), address)
    with testclient.TestClient(make_app(gallery)) as client:
        info = client.get("/gallery").json()
        assert (info["images"], info["class_count"]) == (48, 12)
        first, second = info["suggested"][:2]
        assert int(first) > 2**53
        assert isinstance(first, str)  # too large for numbers of JavaScript
        item = client.get(f"/items/{first}").json()
        assert item["id"] == first
        assert client.get(item["image"]).status_code == 200
        assert len(client.get(f"/items?ids={first},{second},7").json()) == 2
        where = f"label={item['label']}"
        found = client.post("/search", data={"id": first, "k": 3, "where": where}).json()
        assert {one["label"] for one in found["results"]} == {item["label"]}
        assert first not in [one["id"] for one in found["results"]]
        assert client.post("/search", data={"id": "7"}).status_code == 404
    assert address.rpartition("/")[2] == info["name"]
