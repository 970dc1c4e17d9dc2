"""The HTTP API."""

import asyncio
import os
import shutil
import time
from collections import Counter
from io import BytesIO

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from PIL import Image

from proximetry.data import open_image
from proximetry.search import Gallery, metadata
from proximetry.web import gallery_map, live_gallery, make_app
from proximetry.web.middleware import AccessMiddleware
from tests.search.conftest import make_embedder, make_table, make_vectors
from tests.web.conftest import CLASSES, EACH, TOKEN, TestClient, bomb, client_of, png

TOTAL = CLASSES * EACH


def results(response):
    assert response.status_code == 200, response.text
    return response.json()["results"]


def test_upload_search_equals_gallery_search(client, shared):
    upload = png()
    answer = client.post("/search", files={"image": ("x.png", upload)}, data={"k": 7})
    expected = shared.search([open_image(upload)], 7)
    assert [one["id"] for one in results(answer)] == expected.ids[0].tolist()
    assert [one["rank"] for one in results(answer)] == list(range(1, 8))
    near = [one["similarity"] for one in results(answer)]
    np.testing.assert_allclose(near, expected.similarities[0], atol=1e-6)
    assert [one["label"] for one in results(answer)] == expected.labels[0].tolist()
    assert answer.json()["images"] == TOTAL
    assert answer.json()["queries"] == [None]
    assert answer.json()["prediction"] == expected.predictions[0]._asdict()
    assert "model;dur=" in answer.headers["server-timing"]


def test_explain_returns_image_of_upload_or_item(client, shared):
    paths = shared.rows([3, 7], ["path"])["path"]
    expected = shared.embedder.explain(*paths).image()
    answer = client.post("/explain", data={"id": 3, "result": 7})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "image/webp"
    with Image.open(BytesIO(answer.content)) as picture:
        assert picture.size == expected.size
        difference = np.asarray(picture.convert("RGB"), float) - np.asarray(expected, float)
        assert abs(difference).mean() < 6  # WebP is lossy
    uploaded = client.post("/explain", files={"image": ("x.png", png())}, data={"result": 7})
    assert uploaded.status_code == 200
    assert uploaded.content != answer.content
    assert client.get("/gallery").json()["explains"]


def test_explain_needs_token(shared):
    with client_of(shared.path, TOKEN) as client:
        data = {"id": 3, "result": 7}
        assert client.post("/explain", data=data).status_code == 401
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert client.post("/explain", data=data, headers=headers).status_code == 200
        foreign = {**headers, "origin": "http://evil.example"}
        assert client.post("/explain", data=data, headers=foreign).status_code == 403


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        ({"data": {"id": 3, "result": 10**6}}, 404, "no image has the id 1000000"),
        ({"data": {"id": 10**6, "result": 3}}, 404, "no image has the id 1000000"),
        ({"data": {"id": 3}}, 422, "result"),
        ({"data": {"result": 3}}, 422, "pass an image, or the id"),
        ({"data": {"id": 3, "result": 3, "k": 5}}, 422, "no field 'k'"),
        (
            {"data": {"id": 3, "result": 3}, "files": {"image": b"hello"}},
            422,
            "up to 1 query image",
        ),
        ({"data": {"result": 3}, "files": {"image": b"hello"}}, 415, "not an image"),
        ({"data": {"result": 3}, "files": {"image": bomb()}}, 415, "too large"),
    ],
)
def test_explain_rejects_invalid_requests(client, request_, status, message):
    answer = client.post("/explain", **request_)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["detail"]


def test_explain_of_missing_file_and_unsupported_embedder(tmp_path, editable, editable_client):
    (path,) = editable.rows([3], ["path"])["path"]
    os.remove(path)
    answer = editable_client.post("/explain", data={"id": 3, "result": 7})
    assert answer.status_code == 410
    assert str(tmp_path) not in answer.text
    images = editable.rows([4, 5], ["path"])["path"]
    embedder = make_embedder(normalize=False)  # Euclidean
    gallery = Gallery.build(embedder, images, tmp_path / "euclidean")
    with client_of(gallery.path) as client:
        assert not client.get("/gallery").json()["explains"]
        answer = client.post("/explain", data={"id": 0, "result": 1})
        assert answer.status_code == 422
        assert "euclidean" in answer.json()["detail"]


def test_large_upload_equals_its_stored_vector(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (150, 200, 3), np.uint8)
    file = tmp_path / "photo.jpg"
    Image.fromarray(noise).resize((1200, 900)).save(file)
    gallery = Gallery.build(make_embedder(), [file], tmp_path / "gallery")
    pixels = gallery.embedder.preprocessing.pixels
    assert not pixels(file).equal(pixels(open_image(file)))  # a reduced size is decoded
    assert pixels(file).equal(pixels(file.read_bytes()))
    with client_of(gallery.path) as client:
        (one,) = results(client.post("/search", files={"image": file.read_bytes()}, data={"k": 1}))
        thumbnail = client.get("/items/0/image?size=300")
    expected = gallery.search(gallery.vectors([0]), 1).similarities[0, 0]
    assert one["similarity"] == pytest.approx(expected, abs=1e-6)
    assert thumbnail.headers["content-type"] == "image/jpeg"
    with Image.open(BytesIO(thumbnail.content)) as image:
        assert image.size == (300, 225)


def test_search_by_id_excludes_the_query(client, shared):
    answer = client.post("/search", data={"id": 7, "k": 5})
    expected = shared.search(shared.vectors([7]), 6)
    assert [7, *(one["id"] for one in results(answer))] == expected.ids[0].tolist()
    assert answer.json()["queries"][0]["id"] == 7
    assert len(results(client.post("/search", data={"id": 7, "k": 1000}))) == TOTAL - 1


def test_several_queries_and_boxes(client, shared):
    files = [("image", ("x.png", png())), ("image", ("y.png", png((9, 200, 9))))]
    data = {"id": [3, 5], "box": ["", "0,0,0.5,1", "", "0.25,0.25,1,1"], "k": 9}
    answer = client.post("/search", files=files, data=data)
    assert [one and one["id"] for one in answer.json()["queries"]] == [None, None, 3, 5]
    green = open_image(png((9, 200, 9)))
    item = open_image(shared.rows([5])["path"][0])
    parts = [
        open_image(png()),
        green.crop((0, 0, 12, 24)),
        shared.rows([3])["path"][0],
        item.crop((item.width // 4, item.height // 4, item.width, item.height)),
    ]
    vectors = shared.embedder.encode(parts).numpy()
    expected = [one for one in shared.search(vectors.mean(0), 11).ids[0] if one not in (3, 5)]
    assert [one["id"] for one in results(answer)] == expected[:9]
    nearest = results(client.post("/search", files=files, data={**data, "combine": "max"}))
    found = shared.search(vectors, TOTAL)
    for one in nearest:
        assert one["similarity"] == pytest.approx(
            max(found.similarities[found.ids == one["id"]]), abs=1e-6
        )
    votes = client.post("/search", data={"id": 0, "k": 30, "neighbors": 4}).json()["prediction"]
    assert votes["neighbors"] == 4


def test_conditions_with_operators_and_as_json(client, shared):
    for where, expected in (
        (["year>=2004", "year<2006"], {"year": {">=": 2004, "<": 2006}}),
        (["label!=class01", "label!=class02"], {"label": {"!=": ["class01", "class02"]}}),
        (["label^=class0", "year=2001"], {"label": {"^=": "class0"}, "year": 2001}),
        (['{"year": {">": 2005}, "label": ["class01", "class03"]}'], None),
    ):
        matches = results(client.post("/search", data={"id": 0, "k": 100, "where": where}))
        expected = expected or {"year": {">": 2005}, "label": ["class01", "class03"]}
        assert {one["id"] for one in matches} == set(shared.ids(expected).tolist()) - {0}


def test_metadata_of_several_items(client):
    items = client.get("/items?ids=5,2,999").json()
    assert [item["id"] for item in items] == [5, 2]
    assert items[0] == client.get("/items/5").json()
    for wrong in ("", "1,", "a", "-1", "1e3"):
        assert client.get(f"/items?ids={wrong}").status_code == 422


def test_full_paths_on_request(shared):
    app = AccessMiddleware(make_app(shared.path, full_paths=True))
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/items/0").json()["file"] == shared.rows([0])["path"][0]


def test_conditions_and_threshold(client):
    data = {"id": 0, "k": 30, "where": ["label=class01", "label=class02"]}
    both = results(client.post("/search", data=data))
    assert {one["label"] for one in both} == {"class01", "class02"}
    assert len(both) == 2 * EACH
    empty = {**data, "where": [*data["where"], ""]}
    assert results(client.post("/search", data=empty)) == both
    least = both[3]["similarity"]
    fewer = results(client.post("/search", data={**data, "threshold": least}))
    assert fewer == [one for one in both if one["similarity"] >= least]
    assert len(fewer) < len(both)


@pytest.mark.parametrize(
    ("data", "code", "token"),
    [
        ({}, 422, "pass an image"),
        ({"id": 3, "k": 0}, 422, "k: "),
        ({"id": 3, "k": 10**9}, 422, "1000"),
        ({"id": 10**30}, 422, "id: "),
        ({"id": "../../etc/passwd"}, 422, "id: "),
        ({"id": 999}, 404, "999"),
        ({"id": 3, "where": "label"}, 422, "COLUMN=VALUE"),
        ({"id": 3, "where": "label=clas01"}, 422, "did you mean 'class01'?"),
        ({"id": 3, "where": "size=3"}, 422, "no column 'size'"),
        ({"id": 3, "where": "path=/tmp"}, 422, "no column 'path'"),
        ({"id": 3, "where": '{"path": {"^=": "/"}}'}, 422, "no column 'path'"),
        ({"id": 3, "where": '{"year": {"~": 3}}'}, 422, "unknown operator"),
        ({"id": 3, "where": "{"}, 422, "not JSON"),
        ({"id": 3, "where": '{"label": "\\ud800"}'}, 422, "label = needs text, got '\\ud800'"),
        ({"id": 3, "where": '{"\\ud800": 1}'}, 422, "no column '\\ud800'"),
        ({"id": 3, "where": '{"a":' * 3000 + "1" + "}" * 3000}, 422, "not JSON"),
        ({"id": 3, "where": ["year=2001", '{"year": 3}']}, 422, "two conditions of year"),
        ({"id": 3, "box": "0,0,2,1"}, 422, "LEFT,TOP,RIGHT,BOTTOM"),
        ({"id": 3, "box": "0.5,0,0.5,1"}, 422, "invalid box"),
        ({"id": 3, "box": ["0,0,1,1", ""]}, 422, "2 boxes for 1 query image"),
        ({"id": 3, "combine": "min"}, 422, "combine: "),
        ({"id": [*range(17)]}, 422, "id: "),
        ({"id": 3, "wher": "label=class01"}, 422, "did you mean 'where'"),
        ({"id": 3, "threshold": "nan"}, 422, "threshold: "),
        *(
            ({name: ("x.txt", b"1")}, 422, f"{name} must not be a file")
            for name in ("k", "id", "where", "threshold")
        ),
    ],
)
def test_invalid_queries_are_rejected(client, shared, data, code, token):
    files = {name: data[name] for name in data if isinstance(data[name], tuple)}
    fields = {name: data[name] for name in data if name not in files}
    answer = client.post("/search", data=fields, files=files or None)
    assert answer.status_code == code
    assert token in answer.json()["detail"]
    assert str(shared.path.parent) not in answer.text
    assert "\n" not in answer.json()["detail"]


def test_items_and_thumbnails(client, shared):
    item = client.get("/items/8").json()
    (path,) = shared.rows([8])["path"]
    assert path.endswith(item["file"])
    assert not item["file"].startswith("/")
    assert item["label"] == "class01"
    for size, expected in ((16, 16), (512, 24)):
        response = client.get(f"/{item['image']}", params={"size": size})
        assert response.headers["content-type"] == "image/png"
        with Image.open(BytesIO(response.content)) as image:
            assert image.size == (expected, expected)
    full = np.asarray(Image.open(BytesIO(response.content)))
    np.testing.assert_array_equal(full, np.asarray(open_image(path)))
    assert client.get("/items/8/image?size=100000").status_code == 422
    assert client.get("/items/99").status_code == 404
    assert client.get("/items/99/image").status_code == 404
    assert client.get(f"/items/{2**70}").status_code == 422


@pytest.mark.parametrize("size", [64, 512])
def test_etag_depends_on_the_file(tmp_path, size):
    def ask(client, etag):
        return client.get(f"/items/0/image?size={size}", headers={"if-none-match": etag})

    etag = ""
    for color in ("red", "blue"):  # every gallery has an image 0
        file = tmp_path / f"{color}.png"
        Image.new("RGB", (24, 24), color).save(file)
        gallery = Gallery.build(make_embedder(), [file], tmp_path / color)
        with client_of(gallery.path) as client:
            answer = ask(client, etag)
            with Image.open(BytesIO(answer.content)) as image:
                assert image.getpixel((0, 0)) == ((255, 0, 0) if color == "red" else (0, 0, 255))
            assert answer.headers["cache-control"] == "private, no-cache"
            etag = answer.headers["etag"]
            again = ask(client, etag)
            assert (again.status_code, again.content) == (304, b"")
            Image.new("RGB", (24, 24), "green").save(file)
            changed = ask(client, etag)
            assert changed.status_code == 200
            file.unlink()
            assert ask(client, changed.headers["etag"]).status_code == 410


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_for_map(client):
    for _ in range(6000):  # computed with low priority, while other tests run
        answer = client.get("/map")
        if answer.status_code != 202:
            return answer
        assert answer.json()["state"] == "computing"
        time.sleep(0.05)
    raise AssertionError("no map")


@pytest.mark.slow
def test_map_is_computed_in_a_process_and_cached(real_maps, shared, tmp_path, monkeypatch):
    monkeypatch.setenv("PROXIMETRY_CACHE", str(tmp_path))
    with client_of(shared.path) as client:
        answer = wait_for_map(client).json()
    assert answer["ids"] == shared.ids().tolist()
    assert answer["images"] == TOTAL
    assert len(answer["x"]) == len(answer["y"]) == len(answer["label"]) == TOTAL
    assert all(0 <= value <= 1 for value in answer["x"] + answer["y"])
    labels = [answer["labels"][number] for number in answer["label"]]
    assert labels == shared.rows(shared.ids())["label"]
    with client_of(shared.path) as another:  # reads the map from the cache
        assert another.get("/map").json() == answer


def test_damaged_map_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("PROXIMETRY_CACHE", str(tmp_path / "cache"))
    points = np.zeros((3, 2), np.float32)
    file = gallery_map._file("a" * 64)
    file.parent.mkdir(parents=True)
    np.savez(file, ids=np.arange(3), points=points)
    assert gallery_map.read_map("a" * 64) is not None
    content = file.read_bytes()
    for damaged in (b"", content[:60], content[:-30], b"x" * 500):
        file.write_bytes(damaged)
        assert gallery_map.read_map("a" * 64) is None
    np.savez(file, ids=np.arange(4), points=points)
    assert gallery_map.read_map("a" * 64) is None


def test_map_samples_large_galleries(tmp_path, monkeypatch):
    monkeypatch.setenv("PROXIMETRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gallery_map, "MAX_POINTS", 9)
    table, vectors = make_table(0, 60), make_vectors(60)
    gallery = Gallery.build(make_embedder(), table, tmp_path / "gallery", vectors=vectors)
    ids, _ = gallery_map.sample(gallery)
    assert len(ids) == 9
    assert set(ids) < set(gallery.ids())
    with client_of(gallery.path) as client:
        answer = client.get("/map").json()
        assert answer["ids"] == ids.tolist()
        assert answer["images"] == 60


def test_failed_map_is_logged(real_maps, editable, tmp_path, monkeypatch, caplog, capfd):
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("PROXIMETRY_CACHE", str(tmp_path / "cache"))
    with client_of(editable.path) as client:
        answer = wait_for_map(client)
        assert answer.status_code == 503
        assert "the map failed" in answer.json()["detail"]
        assert "the map failed" in caplog.text
        assert str(tmp_path / "cache") in capfd.readouterr().err
        assert results(client.post("/search", data={"id": 0}))
        started = []
        monkeypatch.setattr(
            gallery_map.MapMaker, "_start", lambda maker, gallery: started.append(gallery.version)
        )
        assert client.get("/map").status_code == 503
        assert not started
        monkeypatch.setattr(gallery_map, "_RETRY_SECONDS", 0.0)  # as if a minute had passed
        assert client.get("/map").status_code == 202
        assert started == [editable.version]


def test_server_follows_changes_of_the_gallery(editable, editable_client, monkeypatch):
    other = Gallery.open(editable.path)
    old = wait_for_map(editable_client).json()
    other.remove([3, 4])
    assert editable_client.get("/items/3").status_code == 404
    assert editable_client.post("/search", data={"id": 3}).status_code == 404
    ids = [one["id"] for one in results(editable_client.post("/search", data={"id": 0, "k": 100}))]
    assert not {3, 4} & set(ids)
    monkeypatch.setattr(gallery_map.MapMaker, "_start", lambda *args: None)
    outdated = editable_client.get(
        "/map"
    ).json()  # the old map is served until the new one is ready
    assert outdated["outdated"]
    assert set(outdated["ids"]) == set(old["ids"]) - {3, 4}
    file = editable.path.parent / "new.png"
    Image.new("RGB", (24, 24), "red").save(file)
    (new,) = other.add([file], labels=[None])
    assert editable_client.get(f"/items/{new}").json()["file"] == "new.png"
    assert editable_client.get("/gallery").json()["images"] == TOTAL - 1
    table = metadata.from_columns({"path": ["/images/red.png"], "label": ["new"], "color": ["red"]})
    (red,) = other.add(table, vectors=make_vectors(1))
    matches = results(editable_client.post("/search", data={"id": 0, "where": "color=red"}))
    assert [one["id"] for one in matches] == [red]


@pytest.mark.parametrize("seed", [0, 5])
def test_rebuilt_gallery_has_its_embedder_and_no_old_map(
    editable, editable_client, monkeypatch, seed
):
    assert wait_for_map(editable_client).json()["ids"] == editable.ids().tolist()
    monkeypatch.setattr(gallery_map.MapMaker, "_start", lambda *args: None)
    images = editable.rows(range(9))["path"]
    shutil.rmtree(editable.path)
    assert results(
        editable_client.post("/search", data={"id": 5})
    )  # the last version is still served
    other = Gallery.build(make_embedder(seed=seed), images, editable.path)
    wait_until(lambda: editable_client.get("/gallery").json()["images"] == len(images))
    answer = editable_client.post("/search", files={"image": ("x.png", png())}, data={"k": 3})
    expected = other.search([open_image(png())], 3)
    assert [one["id"] for one in results(answer)] == expected.ids[0].tolist()
    answer = editable_client.get("/map")
    assert answer.status_code == 202
    assert answer.json()["images"] == 9
    assert not answer.json().get("ids")


def test_event_loop_reads_no_files(editable, editable_client, monkeypatch):
    follow, looks = live_gallery.LiveGallery._reload, []

    def followed(self):
        try:
            asyncio.get_running_loop()
            looks.append("loop")
        except RuntimeError:
            looks.append("thread")
        follow(self)

    monkeypatch.setattr(live_gallery.LiveGallery, "_reload", followed)
    for data in ({"id": 0}, {"id": 0, "where": "label=class01"}):
        assert results(editable_client.post("/search", data=data))
    assert results(editable_client.post("/search", files={"image": ("x.png", png())}))
    assert editable_client.post("/search", data={"id": 0, "where": "size=3"}).status_code == 422
    for address in ("/items/0", "/items/0/image", "/map", "/gallery", "/healthz"):
        assert editable_client.get(address).status_code == 200
    assert set(looks) == {"thread"}


def test_gallery_is_described(client):
    about = client.get("/gallery").json()
    assert about["images"] == TOTAL
    assert about["class_count"] == CLASSES
    assert {one["images"] for one in about["classes"]} == {EACH}
    assert about["metrics"]["test"] == {"recall@1": 0.875}
    columns = {column["name"]: column for column in about["columns"]}
    assert [*columns] == ["label", "split", "year", "reviewed"]
    assert (columns["reviewed"]["kind"], columns["reviewed"]["values"]) == (
        "text",
        ["False", "True"],
    )
    reviewed = client.post("/search", data={"id": 0, "where": "reviewed=True", "k": TOTAL})
    assert len(results(reviewed)) == TOTAL // 2 - 1
    assert (columns["year"]["minimum"], columns["year"]["maximum"]) == (2000, 2009)
    assert columns["label"]["values"] == [f"class{number:02d}" for number in range(CLASSES)]
    assert set(about["suggested"]) <= set(range(TOTAL))


def test_an_empty_gallery(editable, editable_client):
    Gallery.open(editable.path).remove(editable.ids())
    assert results(editable_client.post("/search", files={"image": ("x.png", png())})) == []
    assert editable_client.get("/gallery").json()["suggested"] == []
    file = next(editable.path.parent.rglob("*.png"))
    editable.add([file], labels=["new"])
    (match,) = results(editable_client.post("/search", files={"image": ("x.png", png())}))
    assert match["file"] == file.name
    assert match["image"] is not None


def test_paths_that_are_not_utf8_and_nan(tmp_path):
    names = [os.fsdecode(b"/images/caf\xe9.png"), "/images/b.png"]
    table = metadata.from_columns(
        {"path": names, "label": [os.fsdecode(b"\xff"), "b"], "size": [1.5, np.nan]}
    )
    gallery = Gallery.build(make_embedder(), table, tmp_path / "gallery", vectors=make_vectors(2))
    with client_of(gallery.path) as client:
        item = client.get("/items/0").json()
        assert item["file"] == "caf\ufffd.png"
        assert item["details"] == {"size": 1.5}
        (other,) = results(client.post("/search", data={"id": 0}))
        assert other["details"] == {"size": None}
        assert client.get("/items/0/image").status_code == 410


def test_euclidean_threshold(tmp_path):
    embedder = make_embedder(normalize=False)
    gallery = Gallery.build(
        embedder, make_table(0, 20), tmp_path / "gallery", vectors=make_vectors(20)
    )
    with client_of(gallery.path) as client:
        near = results(client.post("/search", data={"id": 0, "k": 19}))
        assert all(one["similarity"] <= 0 for one in near)
        far = -near[4]["similarity"]
        assert (
            results(client.post("/search", data={"id": 0, "k": 19, "threshold": far})) == near[:5]
        )


def test_openapi(client):
    document = client.get("/openapi.json").json()
    paths = {"/search", "/explain", "/items/{item}", "/items/{item}/image"}
    paths |= {"/items", "/metrics", "/map", "/gallery", "/healthz"}
    assert set(document["paths"]) == paths
    form = document["paths"]["/search"]["post"]["requestBody"]["content"]
    assert "multipart/form-data" in form
    assert "HTTPValidationError" not in str(document)
    (answer,) = document["paths"]["/search"]["post"]["responses"]["200"]["content"].values()
    assert answer["schema"]["$ref"].endswith("/Matches")
    assert client.get("/docs").status_code == 404


def test_fuzzed_requests_do_not_fail(shared):
    app = make_app(shared.path)
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json", AccessMiddleware(app, hosts=["testserver"])
    )
    statuses = Counter()
    for operation in schema.get_all_operations():
        _send_anything(operation.ok(), statuses)
    app.state.service.close()
    assert not any(status >= 500 for status in statuses), statuses
    assert {200, 404, 422} <= set(statuses)


def _send_anything(operation, statuses):
    @given(case=operation.as_strategy())
    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    def send(case):
        answer = case.call()
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert isinstance(answer.json()["detail"], str)

    send()
