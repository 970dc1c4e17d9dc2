"""Queries: several as one, a rectangle, ids; search effort and recall."""

import numpy as np
import pytest
from PIL import Image

from proximetry._util.errors import UsageError
from proximetry.data import open_image
from proximetry.search import Gallery
from tests.search.conftest import make_vectors
from tests.search.test_indexes import build as build_clusters
from tests.search.test_indexes import draw_clusters


@pytest.fixture(scope="module")
def files(images):
    return sorted(map(str, images.rglob("*.png")))


@pytest.fixture(scope="module")
def built(embedder, files, tmp_path_factory):
    return Gallery.build(embedder, files, tmp_path_factory.mktemp("gallery") / "g")


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("combine", ["mean", "max"])
def test_combined_queries_match_brute_force(gallery, combine):
    queries, stored = unit(make_vectors(3, seed=4)), unit(make_vectors(60))
    result = gallery.search(queries, 5, combine=combine, where={"label": {"!=": "class0"}})
    mean = unit(queries.mean(0, keepdims=True))[0]
    scores = stored @ mean if combine == "mean" else (stored @ queries.T).max(1)
    scores[::5] = -np.inf
    assert result.ids.tolist() == [np.argsort(-scores)[:5].tolist()]
    np.testing.assert_allclose(result.similarities[0], np.sort(scores)[::-1][:5], atol=1e-6)
    one = gallery.search(queries[:1], 5, combine=combine)
    assert np.array_equal(one.ids, gallery.search(queries[:1], 5).ids)


def test_ids_exclude_themselves(gallery, built, files):
    vectors = gallery.vectors([7, 30])
    plain = gallery.search(vectors, 6)
    for ids in ([7, 30], np.array([7, 30])):
        assert np.array_equal(gallery.search(ids, 5).ids, plain.ids[:, 1:])
    assert gallery.search(7, 5).ids.tolist() == plain.ids[:1, 1:].tolist()
    both = gallery.search([7, 30], 60, combine="max").ids[0]
    assert set(both) == {*range(60), -1} - {7, 30}
    assert not {7, 30} & {*gallery.search([7, 30], 5, combine="mean", expand=2).ids[0]}
    assert 7 not in gallery.search(7, 5, rerank=True).ids
    result = built.search(3, 2)
    assert result.queries == [files[3]]
    assert result.show().size[0] > 100


def test_box_searches_a_rectangle(built, files, tmp_path):
    image = Image.new("RGB", (64, 64), "white")
    image.paste(open_image(files[9]), (20, 10))
    image.save(tmp_path / "scene.png")
    width, height = open_image(files[9]).size
    box = (20, 10, 20 + width, 10 + height)
    result = built.search(tmp_path / "scene.png", 1, box=box)
    assert result.paths[0, 0] == files[9]
    assert result.similarities[0, 0] > 0.9999


@pytest.mark.parametrize(
    ("options", "token"),
    [
        ({"queries": 99_999}, "no image .* has the id 99999"),
        ({"queries": -1}, "no image .* has the id -1"),
        ({"queries": [0, -1]}, "no image .* has the id -1"),
        ({"combine": "min"}, "combine must be"),
        ({"combine": "max", "rerank": True}, "does not support"),
        ({"box": (0, 0, 5, 5)}, "box needs an image"),
        ({"queries": 3, "box": (0, 0, 5, 5)}, "box needs an image"),
        ({"nprobe": 4}, "nprobe has no effect on index Flat"),
        ({"ef": 0}, "ef must be an integer"),
        ({"exact": True, "refine": 2}, "refine has no effect"),
    ],
)
def test_invalid_queries(gallery, options, token):
    with pytest.raises(UsageError, match=token):
        gallery.search(**{"queries": make_vectors(1), **options})


def test_invalid_boxes(built, files):
    for box, token in (
        ((0, 0, 9, 10_000), "exceeds the image"),
        ((5, 0, 5, 3), "is empty"),
        ((0.5, 0, 5, 3), "four integers"),
        ((-1, 0, 5, 3), "of at least 0"),
    ):
        with pytest.raises(UsageError, match=token):
            built.search(files[0], box=box)
    with pytest.raises(UsageError, match="box needs one image"):
        built.search(files[:2], box=(0, 0, 3, 3))


@pytest.mark.parametrize(
    ("kind", "low", "high", "invalid"),
    [
        ("HNSW32", {"ef": 11}, {"ef": 2000}, {"nprobe": 3}),
        ("IVF256,Flat", {"nprobe": 1}, {"nprobe": 256}, {"refine": 3}),
        ("IVF64,PQ16x4", {"refine": 1}, {"refine": 100, "nprobe": 64}, {"ef": 3}),
    ],
)
def test_effort_changes_recall(tmp_path, kind, low, high, invalid):
    gallery = build_clusters(tmp_path / "g", kind)
    assert gallery.recall() >= 0.97
    assert gallery.recall(300, **high) >= 0.99
    assert gallery.recall(300, **high) > gallery.recall(300, **low)
    queries = draw_clusters(np.arange(50), seed=3)
    exact = gallery.search(queries, 10, exact=True)
    stored = gallery.vectors(gallery.ids())
    expected = np.argsort(-(unit(queries) @ stored.T), 1, kind="stable")[:, :10]
    assert np.mean([np.isin(*pair).mean() for pair in zip(exact.ids, expected, strict=True)]) == 1
    more = gallery.search(queries, 10, **high).similarities
    less = gallery.search(queries, 10, **low).similarities
    assert (less <= more).all()
    with pytest.raises(UsageError, match=f"{next(iter(invalid))} has no effect on index {kind}"):
        gallery.search(queries, **invalid)
    with pytest.raises(UsageError, match="exact cannot be combined"):
        gallery.search(queries, exact=True, **low)


SHARES = [0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0]


@pytest.mark.parametrize("kind", ["Flat", "HNSW32", "IVF64,Flat"])
def test_filters_are_exact_at_every_selectivity(tmp_path, kind):
    gallery = build_clusters(tmp_path / "g", kind)
    stored, total = gallery.vectors(gallery.ids()), len(gallery)
    queries = unit(draw_clusters(np.arange(60), seed=3))
    scores = queries @ stored.T
    for share in SHARES:
        count = max(1, round(share * total))
        where = {"path": {"<": f"/images/{count:05d}.png"}}
        if share == 1 and kind != "Flat":  # approximate, as without a filter
            assert gallery.recall() >= 0.98
            continue
        result = gallery.search(queries, 10, where=where)
        expected = np.sort(scores[:, :count], 1)[:, ::-1][:, :10]
        found = np.take_along_axis(scores, np.maximum(result.ids, 0), 1)[:, : expected.shape[1]]
        np.testing.assert_allclose(found, expected, atol=1e-6)
