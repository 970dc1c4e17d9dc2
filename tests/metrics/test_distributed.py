"""Two real processes over gloo give the numbers of one."""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from proximetry.metrics import Metrics, evaluate, identify

CUTS = (0, 23, 60)  # uneven shares
EMPTY = (0, 60, 60)  # one process has no items
CHOSEN = Metrics(recall_at=(1, 10), ndcg_at=(5,), map_at=(5,), precision_at=(3,))


def data():
    draw = np.random.default_rng(0)
    numbers = draw.integers(0, 12, 60)
    return {
        "vectors": draw.integers(-2, 3, (60, 3)).astype(np.float32),
        "queries": draw.integers(-2, 3, (60, 3)).astype(np.float32),
        "numbers": numbers,
        "names": np.array([f"class {'x' * n}" for n in numbers]),  # widths differ between shares
        "groups": draw.integers(0, 6, 60),
        "smooth": draw.normal(size=(60, 8)),
        "rows": np.arange(60),
    }


def cases(share):
    given = {name: values[share] for name, values in data().items()}
    vectors, numbers = given["vectors"], given["numbers"]
    half = torch.from_numpy(vectors).to(torch.bfloat16)
    return {
        "plain": (vectors, numbers, {"similarity": "dot"}),
        "text": (vectors, given["names"], {"similarity": "euclidean"}),
        "half": (half, torch.from_numpy(numbers), {"similarity": "dot"}),
        "cosine": (given["smooth"], numbers, {}),
        "expand": (given["smooth"], numbers, {"expand": 3}),
        "rerank": (given["smooth"], numbers, {"rerank": True}),
        "codes": (given["smooth"], numbers, {"binary": True}),
        "candidates": (given["smooth"], numbers, {"binary": True, "candidates": 7}),
        "clustering": (
            given["smooth"],
            numbers,
            {"metrics": Metrics(clustering=True, verification=True)},
        ),
        "offset": (
            given["smooth"].astype(np.float32) + np.float32(3000),
            numbers,
            {
                "similarity": "euclidean",
                "queries": given["smooth"].astype(np.float32) + np.float32(3000.5),
                "query_labels": numbers,
            },
        ),
        "groups": (vectors, numbers, {"similarity": "dot", "ignore_groups": given["groups"]}),
        "roles": (
            vectors,
            numbers,
            {
                "similarity": "dot",
                "queries": vectors,
                "query_labels": numbers,
                "ignore_groups": given["rows"],
                "query_ignore_groups": given["rows"],
            },
        ),
        "queries": (
            vectors,
            given["names"],
            {
                "similarity": "dot",
                "queries": given["queries"],
                "query_labels": given["names"][::-1].copy(),
                "ignore_groups": given["groups"],
                "query_ignore_groups": given["groups"],
            },
        ),
    }


def summarize(vectors, labels, **options):
    """Return the means, and a score of every query."""
    evaluation = evaluate(vectors, labels, **{"metrics": CHOSEN, **options})
    scores = np.nan_to_num(evaluation.scores["map@r"], nan=-1)
    return {**evaluation, "queries": scores.tolist()}


def faces():
    draw = np.random.default_rng(1)
    return draw.normal(size=(20, 8)), np.arange(20) // 3


def distractor_sets(share):
    """Return distractors as a matrix, as a stream, and None (closed set)."""
    rows, far = data()["smooth"][share], {"far": (0.1, 0.01)}
    return {
        "matrix": (rows, far),
        "stream": ((rows[i : i + 9] for i in range(0, len(rows), 9)), far),
        "closed": (None, far),
    }


def query_label_order(cuts):
    names = data()["names"]
    return np.concatenate([names[a:b][::-1] for a, b in pairwise(cuts)])


def work(rank, file, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    group = dist.group.WORLD
    actual: dict[str, Any] = {}
    for label, cuts in (("uneven", CUTS), ("empty", EMPTY)):
        share = slice(cuts[rank], cuts[rank + 1])
        for name, (vectors, labels, options) in cases(share).items():
            actual[f"{label} {name}"] = summarize(vectors, labels, **options, group=group)
    share = slice(CUTS[rank], CUTS[rank + 1])
    vectors, labels, _ = cases(share)["cosine"]
    for name, spoiled, spoiled_labels in (
        ("nan", np.where(rank == 1, np.nan, vectors), labels),
        ("width", vectors[:, : 8 - rank], labels),
        ("kinds", vectors, labels if rank else labels.astype(str)),
        ("nothing", vectors[:0], labels[:0]),
        ("alone", vectors, np.arange(len(vectors)) + 100 * rank),
    ):
        try:
            evaluate(spoiled, spoiled_labels, group=group)
        except ValueError as error:
            actual[f"error {name}"] = str(error)
    for name, (distractors, options) in distractor_sets(share).items():
        result = identify(*faces(), distractors=distractors, **options, group=group)
        actual[f"identify {name}"] = [result.ranks.tolist(), str(result), result.impostor_pairs]
    try:
        rows = data()["smooth"][share]
        identify(*faces(), distractors=np.where(rank == 1, np.nan, rows), group=group)
    except ValueError as error:
        actual["error identify"] = str(error)
    torch.save(actual, os.path.join(out, f"{rank}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reports():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(os.path.join(folder, "meet"), folder), nprocs=2)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_processes_agree_to_the_last_bit(reports):
    assert repr(reports[0]) == repr(reports[1])


@pytest.mark.parametrize("label", ["uneven", "empty"])
@pytest.mark.parametrize("name", list(cases(slice(None))))
def test_two_processes_equal_one(reports, label, name):
    vectors, labels, options = cases(slice(None))[name]
    if name == "queries":
        options["query_labels"] = query_label_order(CUTS if label == "uneven" else EMPTY)
    assert reports[0][f"{label} {name}"] == summarize(vectors, labels, **options)


def test_error_on_one_process_raises_on_all(reports):
    for report in reports:
        assert "process 1: embeddings has NaN" in report["error nan"]
        assert "process 0: 8 dimensions" in report["error width"]
        assert "process 1: 7 dimensions" in report["error width"]
        assert "Use one type" in report["error kinds"]
        assert report["error nothing"] == "embeddings is empty on every process"
        assert "none of the 60 queries has a positive" in report["error alone"]


@pytest.mark.parametrize("name", ["matrix", "stream", "closed"])
def test_identification_by_two_processes_equals_one(reports, name):
    distractors, options = distractor_sets(slice(None))[name]
    result = identify(*faces(), distractors=distractors, **options)
    expected = [result.ranks.tolist(), str(result), result.impostor_pairs]
    assert reports[0][f"identify {name}"] == expected
    assert "process 1: distractors has NaN" in reports[0]["error identify"]
