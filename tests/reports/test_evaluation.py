"""Values of a report against independent computations."""

import json
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from proximetry import cli
from proximetry.data import Catalog
from proximetry.metrics import Evaluation, RetrievalResult, separability
from proximetry.models import Embedder
from proximetry.reports import RunRecord, evaluate_run
from proximetry.reports.run_evaluation import MAX_MAP_IMAGES
from proximetry.reports.run_proxies import measure_use, read_proxies
from proximetry.reports.run_sections import classes_section, confused_pairs, explain_nearest


def rankings(result):
    """Return the other images of each image, nearest first, by plain loops."""
    vectors = result.vectors.double().numpy()
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors.T
    rows = range(len(vectors))
    return [sorted(set(rows) - {q}, key=lambda i: -cosines[q, i]) for q in rows], cosines


def average_precision(result, query, order):
    """Compute MAP@R by its definition."""
    labels = result.catalog.labels
    positives = sum(label == labels[query] for label in labels) - 1
    hits, total = 0, 0.0
    for place, row in enumerate(order[:positives], 1):
        if labels[row] == labels[query]:
            hits += 1
            total += hits / place
    return total / positives


def test_scores_equal_the_results_of_the_run(records, evaluations):
    for record, result in zip(records, evaluations, strict=True):
        assert result.matches_run
        assert result.notes == []
        assert result.split == "test"
        assert result.scores == pytest.approx(record.results["selected"]["test"], abs=1e-12)


def test_intervals_equal_evaluate(runs, table, evaluations, capsys):
    assert cli.main(["evaluate", str(runs[0]), str(table), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["intervals"]
    assert {name: [one.low, one.high] for name, one in evaluations[0].intervals.items()} == printed


def test_worst_and_best_queries(evaluations):
    result = evaluations[0]
    orders, cosines = rankings(result)
    labels = result.catalog.labels
    score = [average_precision(result, q, order) for q, order in enumerate(orders)]
    nearest = [cosines[q, order[0]] for q, order in enumerate(orders)]
    for chosen, key in (
        (result.extremes(4, best=False), lambda q: (score[q], -nearest[q])),
        (result.extremes(4, best=True), lambda q: (-score[q], nearest[q])),
    ):
        expected = {}
        for query in sorted(range(len(labels)), key=key):
            expected.setdefault(labels[query], query)
        assert chosen == [*expected.values()][:4]
    for query, order in enumerate(orders):
        rank = next(i for i, row in enumerate(order, 1) if labels[row] == labels[query])
        assert result.first_positive(query) == rank


def test_confused_classes(evaluations):
    result = evaluations[1]
    labels, counts = result.catalog.labels, Counter()
    for query, order in enumerate(rankings(result)[0]):
        if labels[query] != labels[order[0]]:
            counts[labels[query], labels[order[0]]] += 1
    assert counts
    pairs = confused_pairs(result)
    assert {(a, b): n for a, b, n, _ in pairs} | {(b, a): n for a, b, _, n in pairs if n} == counts
    assert all(there >= back for _, _, there, back in pairs)
    sums = [there + back for _, _, there, back in pairs]
    assert sums == sorted(sums, reverse=True)


def test_explains_nearest_image(evaluations, monkeypatch):
    result = evaluations[0]
    query = result.extremes(1, best=False)[0]
    nearest = result.gallery[result.neighbors[query].ids[0, 0]]
    files = [result.catalog.file(int(row)) for row in (result.queries[query], nearest)]
    expected = result.embedder.explain(*files).image(side=224)
    assert explain_nearest(result, query).tobytes() == expected.tobytes()
    euclidean = replace(result.embedder.architecture, similarity="euclidean")
    monkeypatch.setattr(result.embedder, "architecture", euclidean)
    assert explain_nearest(result, query) is None


def test_roles_separate_queries_and_gallery(evaluations, records, table, tmp_path):
    lines = table.read_text().splitlines()
    for row, line in enumerate(lines):
        extra = "query,gallery" if row == 0 else f"{str(row % 4 == 0).lower()},true"
        lines[row] = f"{line},{extra}"
    shutil.copytree(table.parent / "images", tmp_path / "images")
    (tmp_path / "roles.csv").write_text("\n".join(lines))
    result = evaluate_run(records[0], str(tmp_path / "roles.csv"))
    assert len(result.neighbors) == 6
    catalog = result.catalog
    for query in range(6):
        row = result.queries[query]
        others = [result.gallery[i] for i in result.neighbors.ids[query]]
        assert row not in others
        right = [catalog.labels[other] == catalog.labels[row] for other in others]
        assert right == result.neighbors.hits[query].tolist()
    assert not result.matches_run
    assert "have changed" in result.notes[-1]


def test_proxies_of_the_selected_epoch(records, run):
    record = records[0]
    proxies = read_proxies(record)
    assert proxies.epoch == record.results["selected"]["epoch"]
    saved = load_file(record.folder.best)["loss.loss.proxies.weight"]
    assert torch.equal(proxies.weight, saved)
    assert proxies.names == Embedder.load(record.folder.embedder).class_names
    if proxies.epoch == record.results["last"]["epoch"]:
        assert separability(proxies.weight).scores() == pytest.approx(
            record.results["last"]["proxies"]
        )
    (run / "checkpoints" / "best.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"best\.safetensors"):
        read_proxies(RunRecord.read(run))


def training_images(result, table):
    whole = Catalog.from_csv(table)
    return whole.filter(labels=result.embedder.class_names)


def test_number_of_proxies_in_use(records, evaluations, table):
    record, result = records[0], evaluations[0]
    proxies, train_set = read_proxies(record), training_images(result, table)
    use = measure_use(proxies, result.embedder, train_set)
    assert use.images == len(train_set)
    files = [train_set.file(row) for row in range(len(train_set))]
    vectors = result.embedder.encode(files).double().numpy()
    chosen, effective = [], []
    for number, name in enumerate(proxies.names):
        own = proxies.weight[number].double().numpy()
        own /= np.linalg.norm(own, axis=1, keepdims=True)
        counts = Counter(
            int((own @ vectors[row]).argmax())
            for row, label in enumerate(train_set.labels)
            if label == name
        )
        shares = [count / sum(counts.values()) for count in counts.values()]
        chosen.append(len(counts))
        effective.append(np.prod([share**-share for share in shares]))
    assert use.nearest_proxies.tolist() == chosen
    np.testing.assert_allclose(use.effective, effective)


def test_use_of_proxies_needs_the_embedder_of_the_proxies(records, evaluations, table):
    proxies, train_set = read_proxies(records[0]), training_images(evaluations[0], table)
    reduced = replace(proxies, weight=torch.cat([proxies.weight, proxies.weight], dim=2))
    with pytest.raises(ValueError, match="PCA"):
        measure_use(reduced, evaluations[0].embedder, train_set)


def many_classes(count):
    """Return an evaluation of ``count`` classes with two images each, without files."""
    labels = tuple(f"class {row // 2}" for row in range(2 * count))
    catalog = Catalog(tuple(f"{row}.png" for row in range(2 * count)), labels, ("all",) * 2 * count)
    draw = np.random.default_rng(0)
    codes = np.repeat(np.arange(count), 2)
    ids = draw.integers(0, 2 * count, (2 * count, 8))
    neighbors = RetrievalResult(
        ids,
        draw.random(ids.shape),
        2 * count,
        "cosine",
        True,
        codes,
        codes,
        np.array(labels[::2]),
        np.ones_like(codes),
    )
    scores = {name: draw.random(2 * count).round() for name in ("recall@1", "map@r")}
    evaluation = Evaluation(scores, codes, np.array(labels[::2]), np.ones_like(codes))
    return catalog, neighbors, evaluation


def test_page_of_many_classes_lists_all_and_stays_small(evaluations):
    catalog, neighbors, evaluation = many_classes(11_000)
    rows = np.arange(len(catalog))
    result = replace(
        evaluations[0],
        catalog=catalog,
        neighbors=neighbors,
        evaluation=evaluation,
        queries=rows,
        gallery=rows,
    )
    content = classes_section(result).content
    assert len(content) < 1_500_000
    assert all(f">class {number}<" in content for number in range(11_000))
    assert result.unreadable
    assert "not readable" in content
    sample = result.sample()
    assert len(sample) == len(set(sample.tolist())) == MAX_MAP_IMAGES
    assert np.array_equal(sample, result.sample())
    assert (np.bincount(catalog.codes[sample]) == 1).sum() <= 1  # whole classes, except the last
    labels = tuple(f"class {row % 5}" for row in range(3000))
    few = Catalog(tuple(f"{row}.png" for row in range(3000)), labels, ("all",) * 3000)
    sample = replace(evaluations[0], catalog=few).sample()
    assert np.bincount(few.codes[sample]).tolist() == [MAX_MAP_IMAGES // 5] * 5
