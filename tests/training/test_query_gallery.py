"""Queries and gallery: an image is never its own match, whatever the roles."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proximetry.cli.evaluate import describe
from proximetry.data import Catalog, open_dataset
from proximetry.metrics import Metrics
from proximetry.models import Embedder
from proximetry.training import train
from proximetry.training.evaluation_inputs import (
    check_comparison,
    drop_unused_roles,
    evaluation_arguments,
)
from proximetry.training.evaluator import average_scores, evaluate_embedder, score_queries
from tests.metrics import brute
from tests.metrics.test_evaluation import CUTOFFS, EVERYTHING
from tests.training.ranks import RUN, Ranks
from tests.training.tiny import make_images, make_recipe

ROLES = {"none": (False, False), "query": (True, False), "gallery": (False, True)}
ROLES["both"] = (True, True)
LETTERS = {name[0]: roles for name, roles in ROLES.items()}
MIXTURES = (["both"], ["query", "gallery"], ["both", "gallery"], ["both", "query"], list(ROLES))


def make_catalog(labels, roles=None):
    """Rows of a table; roles by their names or first letters."""
    queries, galleries = (
        zip(*(LETTERS[role[0]] for role in roles), strict=True) if roles else (None,) * 2
    )
    paths = [f"{i}.png" for i in range(len(labels))]
    names = [f"class {label}" for label in labels]
    return Catalog(paths, names, ("test",) * len(labels), "images", queries, galleries)


def plain_lists(vectors, roles, similarity):
    """Rows in the order of similarity for each query, without the query itself."""
    matrix = brute.similarity_matrix(vectors, vectors, similarity)
    rows = range(len(vectors))
    return {
        i: brute.ranking(matrix[i], np.array([j != i and ROLES[roles[j]][1] for j in rows]))
        for i in rows
        if ROLES[roles[i]][0]
    }


@settings(max_examples=60)
@given(
    count=st.integers(2, 25),
    classes=st.integers(1, 8),
    mixture=st.sampled_from(MIXTURES),
    similarity=st.sampled_from(["cosine", "euclidean"]),
    seed=st.integers(0, 10**6),
)
def test_scores_and_confusions_equal_brute_force(count, classes, mixture, similarity, seed):
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, classes, count)
    roles = draw.choice(mixture, count).tolist()
    # Small integers: duplicate rows are distinct items, which may be retrieved. For cosines all
    # rows have one norm, so that ties are exact.
    vectors = draw.integers(-2, 3, (count, 3)).astype(np.float32)
    if similarity == "cosine":
        vectors = draw.choice([-1, 1], (count, 4)).astype(np.float32)
    catalog = make_catalog(labels, roles)
    if set(roles) == {"none"}:
        roles = ["both"] * count  # without any role, all are compared with all
    lists = plain_lists(vectors, roles, similarity)
    found = {i: [bool(labels[j] == labels[i]) for j in near] for i, near in lists.items()}
    if not any(any(hits) for hits in found.values()):
        with pytest.raises(ValueError, match=r"set to true|no query|one image each"):
            check_comparison(catalog, EVERYTHING)
        return
    check_comparison(catalog, EVERYTHING)
    expected, without = brute.evaluate(list(lists.values()), labels[list(lists)], labels, CUTOFFS)
    catalog = drop_unused_roles(catalog)
    scored = score_queries(torch.from_numpy(vectors), catalog, similarity, EVERYTHING)
    document = describe(
        scored,
        evaluation_arguments(torch.from_numpy(vectors), catalog, similarity),
        per_class=True,
        confusions=100,
    )
    scores = document["metrics"]
    assert scores == average_scores(scored)
    assert scores["queries"] == len(lists) - without
    assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    by_class = Counter(f"class {labels[i]}" for i, hits in found.items() if any(hits))
    assert {row["label"]: row["queries"] for row in document["per_class"]} == by_class
    confused = Counter(
        (f"class {labels[i]}", f"class {labels[near[0]]}")
        for i, near in lists.items()
        if any(found[i]) and not found[i][0]
    )
    assert confused == {
        (one["query"], one["nearest"]): one["count"] for one in document["confusions"]
    }


@pytest.fixture
def table(tmp_path):
    """Twelve classes of striped squares; those of the test set have roles, most images both."""
    make_images(tmp_path / "images")
    draw = np.random.default_rng(3)
    lines = ["path,label,split,query,gallery"]
    for path in sorted((tmp_path / "images").glob("*/*.png")):
        test = path.parent.name > "class07"
        # Labels at random: whoever finds itself is right, and nobody else.
        label = f"t{draw.integers(0, 5)}" if test else path.parent.name
        roles = ROLES[draw.choice(["both", "both", "query", "gallery"])] if test else ROLES["none"]
        row = [path.relative_to(tmp_path), label, "test" if test else "train", *roles]
        lines.append(",".join(map(str, row)).lower())
    (tmp_path / "table.csv").write_text("\n".join(lines))
    return tmp_path / "table.csv"


def by_hand(folder, table):
    """Metrics of the saved embedder by brute force, one query after the other."""
    catalog = open_dataset("csv", table).filter(split="test")
    vectors = Embedder.load(folder / "embedder").encode(map(catalog.file, range(len(catalog))))
    names = {role: name for name, role in ROLES.items()}
    roles = [names[role] for role in zip(catalog.queries, catalog.galleries, strict=True)]
    lists = plain_lists(vectors.double().numpy(), roles, "cosine")
    labels = np.array(catalog.labels)
    return brute.evaluate(list(lists.values()), labels[list(lists)], labels, (1, 2, 4, 8))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_selects_by_the_metrics_of_evaluation(server, table, cache, tmp_path, processes):
    recipe = make_recipe(
        table,
        cache,
        data={"dataset": "csv"},
        training={"epochs": 1},
        evaluation={"protocol": "paper", "metrics": {"clustering": False}},
    )
    if processes == 1:
        train(recipe, tmp_path / "run", device="cpu")
    else:
        recipe.save(tmp_path / "recipe.yaml")
        ranks = Ranks(server, tmp_path, RUN, tmp_path / "recipe.yaml", tmp_path / "run")
        assert ranks.ended() == [0, 0], ranks.output(0)
    found = json.loads((tmp_path / "run" / "results.json").read_text())["selected"]["test"]
    expected, without = by_hand(tmp_path / "run", table)
    assert found["queries_without_positive"] == without
    shared = found.keys() & expected.keys()
    assert {"recall@1", "map@r"} <= shared
    for name in shared:
        assert found[name] == pytest.approx(expected[name], abs=1e-9), name
    assert expected["recall@1"] < 0.9


@pytest.mark.parametrize(
    ("labels", "roles", "computed", "message"),
    [
        ("abcd", None, {}, "one image each"),
        ("aabb", "qqqq", {}, "none of the 4 images of images has gallery"),
        ("aabb", "gggg", {}, "none of the 4 images of images has query"),
        ("aabb", "bggb", {}, None),
        ("abab", "qqgg", {}, None),
        ("aabb", "qqgg", {}, "no query among the 4"),
        ("abcc", "bbgg", {}, "no query among the 4"),
        ("aabb", "bbgg", {"clustering": True}, "clustering needs one set"),
        ("aabb", "bbbb", {"clustering": True}, None),
        ("aabbcd", "bbbbbb", {"verification": True}, None),
        ("aabbc", "bbbbb", {"verification": True}, "four classes"),
        ("abababcd", "bbggbbgg", {"verification": True}, "verification needs one set"),
        ("aabb", "nnnn", {"clustering": True}, None),
    ],
)
def test_unmeasurable_catalogs_are_rejected(labels, roles, computed, message):
    catalog = make_catalog(labels, roles)
    metrics = Metrics(**computed)
    if message is None:
        check_comparison(catalog, metrics)
        return
    with pytest.raises(ValueError, match=message):
        check_comparison(catalog, metrics)
    with pytest.raises(ValueError, match=message):  # the images do not exist
        evaluate_embedder(None, catalog, metrics=metrics)


@pytest.mark.parametrize(
    ("roles", "trivial"),
    [
        (None, [4, 8]),
        ("bbbbb", [4, 8]),
        ("bbbbq", [4, 8]),  # the last one can find four
        ("bbggg", [4, 8]),
        ("bbqgg", [4, 8]),
        ("bbqqq", [2, 4, 8]),
        ("qqggg", [4, 8]),
        ("qqqgg", [2, 4, 8]),
    ],
)
def test_trivial_recall_is_noted(roles, trivial):
    first, *notes = check_comparison(make_catalog("aaaaa", roles), Metrics())
    assert first.startswith("all images are of one class")
    assert [note.partition(" ")[0] for note in notes] == [f"recall@{k}" for k in trivial]
    assert all("100 % for any embedder" in note for note in notes)
