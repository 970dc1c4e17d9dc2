"""Galleries on a real Milvus server, which the tests start, kill and start again."""

import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from proximetry._util.errors import UsageError
from proximetry.data import Catalog
from proximetry.search import Gallery, milvus
from tests.processes import Process
from tests.search.conftest import make_embedder, make_table, make_vectors, names
from tests.search.milvus_server import MilvusServer, executable
from tests.search.test_milvus import (
    NUMBERS,
    NUMERIC_WHERES,
    assert_batches_cover_all_rows,
    assert_same,
    both,
    by_path,
)
from tests.training.tiny import make_images

pytest.importorskip("pymilvus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        executable() is None, reason="no milvus-server on PATH: make .milvus/.ready"
    ),
]


@pytest.fixture(scope="module")
def milvus_server(tmp_path_factory):
    running = MilvusServer(tmp_path_factory.mktemp("milvus"))
    try:
        if not running.wait():
            pytest.skip(f"milvus-server does not start: {running.log()}")
        yield running
    finally:
        running.kill()


@pytest.fixture
def address(milvus_server, request):
    return milvus_server.address(request.node.name)


@pytest.fixture
def fast_address(address):
    """An address whose searches see what this process has added, without waiting."""
    return f"{address}?consistency=Session"


def start(server, tmp_path, name, code, *arguments):
    """Run code in another process."""
    root = Path(__file__).parents[2]
    lines = f"import sys\nsys.path.insert(0, {str(root)!r})\n"
    lines += "from tests.search.conftest import *\n"
    return Process(server, tmp_path / name, lines + code, *arguments)


def test_build_search_filter_and_change(address, fast_address, tmp_path, monkeypatch):
    embedder, vectors = make_embedder(), make_vectors(300)
    remote, local, ids = both(embedder, make_table(0, 300), vectors, fast_address, tmp_path)
    strong = Gallery.open(address)
    queries = np.concatenate([vectors[:9], make_vectors(5, seed=1)])
    wheres = [
        {},
        {"label": ["class1", "class3"]},
        {"label": {"!=": "class1"}, "path": {"^=": "/images/0001"}},
        {"path": {">=": "/images/00200.png", "<": "/images/00210.png"}},
    ]

    def assert_equal():
        for where in wheres:
            expected = local.search(queries, 7, where=where)
            assert_same(remote.search(queries, 7, where=where), expected, ids)
        assert np.array_equal(remote.ids(wheres[2]), np.sort(ids[local.ids(wheres[2])]))

    assert_equal()
    with pytest.raises(UsageError, match="no image has label 'class9'"):
        remote.search(queries, where={"label": "class9"})
    assert remote.duplicates(0.9).pairs.shape == local.duplicates(0.9).pairs.shape
    assert_batches_cover_all_rows(remote, monkeypatch)
    new = remote.add(make_table(300, 5), vectors=make_vectors(5, seed=2))
    assert len(strong) == 305
    assert np.array_equal(remote.add(make_table(300, 5), vectors=make_vectors(5, seed=2)), new)
    assert len(strong) == 305
    remote.remove(new)
    assert len(strong) == 300
    assert remote.predict(vectors[:3], 1) == local.predict(vectors[:3], 1)
    assert not remote.needs_compaction
    monkeypatch.setattr(milvus.indexes, "resolve", lambda index, count: "HNSW16")
    assert remote.needs_compaction
    lines = []
    remote.compact(report=lines.append)
    assert "Milvus HNSW for 300 images" in lines[0]
    assert not Gallery.open(address).needs_compaction
    settings = remote._snapshot.client.describe_index(remote._snapshot.name, "vector")
    assert (int(settings["M"]), int(settings["efConstruction"])) == (16, 200)
    assert_batches_cover_all_rows(remote, monkeypatch)
    assert_equal()  # now with an index, and an index of text
    client, name = remote._snapshot.client, remote._snapshot.name
    client.release_collection(name)
    client.drop_index(name, "vector")  # as if killed while it re-indexes
    assert len(Gallery.open(address)) == 300


@pytest.mark.parametrize("index", ["IVF8,SQ8", "AUTOINDEX"])
def test_other_indexes(index, milvus_server, tmp_path):
    address, vectors = milvus_server.address(f"index_{index[:3]}"), make_vectors(300)
    embedder = make_embedder(normalize=False)
    remote = Gallery.build(embedder, make_table(0, 300), address, index, vectors=vectors)
    result = remote.search(vectors[:20], 3)
    assert result.paths[:, 0].tolist() == names(0, 20)
    assert np.abs(result.similarities[:, 0]).max() < 1e-6
    assert not remote.needs_compaction


def test_missing_and_numeric_values(fast_address):
    table = milvus.metadata.from_columns({"path": names(0, 5), **NUMBERS})
    gallery = Gallery.build(make_embedder(), table, fast_address, vectors=make_vectors(5))
    ids = by_path(gallery, names(0, 5))
    for where, expected in NUMERIC_WHERES:
        result = gallery.search(make_vectors(1), 5, where=where)
        assert sorted(result.ids[0].tolist()) == sorted(ids[expected].tolist()), where


def test_killed_build_resumes(server, milvus_server, tmp_path):
    images, address = make_images(tmp_path / "images"), milvus_server.address("killed")
    code = """
from proximetry.search import new_images, milvus
new_images.CHUNK = 10
Gallery.build(make_embedder(), sys.argv[1], sys.argv[2], progress=lambda *n: print(*n, flush=True))
"""
    killed = start(server, tmp_path, "log", code, images, address)
    killed.until(lambda: (tmp_path / "log").exists() and "20 48" in killed.output())
    killed.kill()
    with pytest.raises(UsageError, match="not finished"):
        Gallery.open(address)
    embedder, read = make_embedder(), []
    encode = embedder.encode
    embedder.encode = lambda files, *rest, **options: (
        read.extend(files) or encode(files, *rest, **options)
    )
    with pytest.raises(UsageError, match="interrupted build with another"):
        Gallery.build(make_embedder(seed=1), images, address)
    built = Gallery.build(embedder, images, address)
    assert len(built) == 48
    assert len(read) <= 38
    catalog = Catalog.from_folder(images)
    files = [catalog.file(row) for row in range(5)]
    assert Gallery.open(address, embedder).search(files, 1).paths[:, 0].tolist() == files


def test_two_processes_write(server, milvus_server, tmp_path):
    address = milvus_server.address("writers")
    Gallery.build(make_embedder(), make_table(0, 10), address, vectors=make_vectors(10))
    code = """
gallery, first = Gallery.open(sys.argv[1]), int(sys.argv[2])
for turn in range(4):
    start = first + 10 * turn
    vectors = make_vectors(20, seed=start)
    ids = gallery.add(make_table(start, 20), vectors=vectors)
    gallery.remove(ids[:5])
"""
    writers = [start(server, tmp_path, str(first), code, address, first) for first in (100, 120)]
    for writer in writers:
        assert writer.ended() == 0, writer.output()
    gallery = Gallery.open(address)
    paths = {*gallery.rows(gallery.ids())["path"]}
    assert len(paths) == len(gallery)
    assert {*names(0, 10), *names(165, 5)} <= paths <= {*names(0, 10), *names(100, 70)}


def test_searches_survive_a_restart(milvus_server):
    address = milvus_server.address("restarted")
    gallery = Gallery.build(make_embedder(), make_table(0, 30), address, vectors=make_vectors(30))
    expected = gallery.search(make_vectors(5), 3)
    results, ending = [], threading.Event()

    def search():
        while not ending.is_set():
            results.append(gallery.search(make_vectors(5), 3))

    thread = threading.Thread(target=search)
    thread.start()
    time.sleep(1)
    milvus_server.kill()
    milvus_server.start()
    before = len(results)
    while thread.is_alive() and len(results) < before + 3:
        time.sleep(0.1)
    ending.set()
    thread.join()
    assert len(results) >= before + 3
    assert all(result.paths.tolist() == expected.paths.tolist() for result in results)
    gallery.add(make_table(30, 3), vectors=make_vectors(3, seed=1))
    assert len(gallery) == 33
    gallery.close()


def test_page_serves_milvus(server, milvus_server, embedder, images, tmp_path):
    httpx = pytest.importorskip("httpx")
    from tests.web.browser import CHROMIUM, Visit, ranks
    from tests.web.conftest import start as serve

    address, model = milvus_server.address("served"), tmp_path / "model"
    embedder.save(model)
    with Gallery.build(embedder, Catalog.from_folder(images), address) as gallery:
        ids = gallery.ids()
        expected = gallery.search(ids[:1], 3)
        rows = gallery.rows(ids)
    environment = {"PROXIMETRY_CACHE": str(tmp_path / "cache")}
    process, url = serve(server, tmp_path / "log", address, "--model", model, **environment)
    with httpx.Client(base_url=url, timeout=60) as client:
        while (info := client.get("gallery")).status_code == 503:
            time.sleep(0.1)
        assert (info.json()["name"], info.json()["images"]) == ("served", 48)
        found = client.post("search", data={"id": str(ids[0]), "k": 3}).json()
        assert [int(one["id"]) for one in found["results"]] == expected.ids[0].tolist()
        with open(rows["path"][5], "rb") as file:
            found = client.post("search", files={"image": file}, data={"k": 2}).json()
        assert found["results"][0]["file"] == rows["path"][5]
        assert found["results"][0]["similarity"] > 0.999
        where = {"id": str(ids[0]), "where": ["label=class03", "split!=test"]}
        found = client.post("search", data=where).json()
        assert {one["label"] for one in found["results"]} == {"class03"}
        missing = client.post("search", data={"id": str(ids[0]), "where": "label=class99"})
        assert (missing.status_code, "class99" in missing.text) == (422, True)
        image = client.get(found["results"][0]["image"], params={"size": 64})
        assert image.headers["content-type"] == "image/png"
        while (points := client.get("map")).status_code == 202:
            time.sleep(0.1)
        assert sorted(map(int, points.json()["ids"])) == ids.tolist()
        assert "proximetry_gallery_images 48" in client.get("metrics").text
        if CHROMIUM:
            sync_api = pytest.importorskip("playwright.sync_api")
            with sync_api.sync_playwright() as playwright:
                chromium = playwright.chromium.launch(
                    executable_path=CHROMIUM, args=["--no-sandbox"]
                )
                visit = Visit(chromium, url)
                visit.page.locator("#grid .card").first.click()
                assert ranks(visit.page)[:2] == ["1", "2"]
                visit.page.goto(f"{url}#item/{ids[0]}")
                visit.page.wait_for_url(f"**#item/{ids[0]}")
                assert ranks(visit.page)[:2] == ["1", "2"]
                visit.end()
                chromium.close()
        milvus_server.kill()
        begin = time.monotonic()
        for request in (
            client.build_request("POST", "search", data={"id": str(ids[0])}),
            client.build_request("GET", f"items/{ids[0]}"),
        ):
            answer = client.send(request)
            assert (answer.status_code, "Milvus does not answer" in answer.text) == (503, True)
        assert time.monotonic() - begin < 40
        assert client.get("healthz").status_code == 200
        milvus_server.start()
        assert milvus_server.wait()
        while client.post("search", data={"id": str(ids[0])}).status_code != 200:
            time.sleep(0.5)
    process.send(signal.SIGINT)
    assert process.ended() == 0, process.output()
    assert "Traceback" not in process.output()


def test_wrong_port_is_reported(server, milvus_server, embedder, tmp_path):
    address = "milvus://127.0.0.1:1/birds"
    embedder.save(tmp_path / "model")
    code = """
from proximetry.cli import main
sys.exit(main(["serve", *sys.argv[1:]]))
"""
    process = start(server, tmp_path, "log", code, address, "--model", tmp_path / "model")
    begin = time.monotonic()
    assert process.ended() == 1
    assert time.monotonic() - begin < 30
    assert f"{address}: no answer. Is Milvus running there" in process.output()


def test_address_options(milvus_server):
    import pymilvus

    client = pymilvus.MilvusClient(f"http://127.0.0.1:{milvus_server.port}")
    client.create_database("birds")
    address = f"{milvus_server.address('options')}?db=birds&shards=2&partition="
    embedder, vectors = make_embedder(), make_vectors(10)
    with Gallery.build(embedder, make_table(0, 6), address + "a", vectors=vectors[:6]) as built:
        assert built._snapshot.client.describe_collection("options")["num_shards"] == 2
    with pytest.raises(UsageError, match="is closed"):
        len(built)
    first = Gallery.open(address + "a")
    second = Gallery.build(embedder, make_table(6, 4), address + "b", vectors=vectors[6:])
    whole = Gallery.open(address.partition("&partition")[0])
    assert [len(first), len(second), len(whole)] == [6, 4, 10]
    assert second.search(vectors[:1], 10).ids.shape == (1, 4)
    assert whole.search(vectors, 1).paths[:, 0].tolist() == names(0, 10)
    second.remove(second.ids())
    assert len(whole) == 6
    with pytest.raises(UsageError, match="no gallery"):
        Gallery.open(f"{milvus_server.address('options')}?db=brids")
    with pytest.raises(UsageError, match="no gallery"):
        Gallery.open(f"{milvus_server.address('options')}?db=birds&partition=c")
