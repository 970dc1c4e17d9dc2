"""The pages: self-contained, escaped, with the numbers of the run."""

import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from markupsafe import escape

from proximetry import cli
from proximetry.cli.demo import make_gallery
from proximetry.data import open_dataset
from proximetry.reports import RunRecord, evaluate_run, report, report_page, write_report
from proximetry.reports.html_page import ReportSection
from proximetry.reports.html_page import page as make_page
from proximetry.search import Gallery
from proximetry.training import Recipe, RunFolder, train
from tests.reports.conftest import FILE, HOSTILE, Page, make_recipe, make_table
from tests.training.runs import killed_at


@pytest.fixture(scope="session")
def page(records, evaluations):
    content = report_page(records[0], evaluations[0])
    assert records[0].missing == []
    return Page(content)


@pytest.fixture(scope="session")
def comparison(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "page.html"
    assert write_report(runs, out) == []
    return Page(out.read_bytes())


@pytest.fixture
def call(call):
    return partial(call, "report")


def assert_alone(page):
    """No address leads out of the page, and no script but ours runs."""
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
            value = attributes.get(name, "#")
            assert value.startswith(("#", "data:image/webp;base64,")), (tag, name, value[:80])
    assert page.all("link") == page.all("iframe") == page.all("object") == []
    assert page.all("script") == [{}]
    (policy,) = [m["content"] for m in page.all("meta") if "http-equiv" in m]
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_pages_are_self_contained_and_escape_hostile_names(page, comparison):
    assert_alone(page)
    assert_alone(comparison)
    assert "http" not in page.text
    assert HOSTILE in page.text
    assert any(HOSTILE in row[0] for row in page.table("Every class"))
    assert any(attributes.get("title", "").endswith(FILE) for _, attributes in page.elements)
    assert any(a.get("class") == "path" for a in comparison.all("span"))


@pytest.mark.parametrize("value", ['"><script>', "a & b <i>", "caf\udce9", "bell\x07", "&lt;"])
def test_templates_escape_hostile_text(value):
    sections = [ReportSection("Queries", escape(value))]
    page = Page(make_page(value, sections, heading=value, about=value, notes=[value]))
    assert_alone(page)
    shown = value.replace("\udce9", "?").replace("\x07", "�")
    assert page.text.count(shown) == 5
    assert page.all("i") == []


def test_tables_contain_the_metrics_of_the_run(page, records, evaluations):
    results = records[0].results
    rows = {row[0]: row[1:] for row in page.table("Metrics of the test set")}
    for name in ("recall@1", "MAP@R", "ndcg@4"):
        untrained, *_, selected, interval = rows[name]
        key = name.lower()
        assert untrained == f"{100 * results['untrained']['test'][key]:.1f}"
        assert selected == f"{100 * results['selected']['test'][key]:.1f}"
        one = evaluations[0].intervals[key]
        assert interval == f"{100 * one.low:.1f} to {100 * one.high:.1f}"
    assert "24 queries" in page.text
    assert "95 % bootstrap confidence interval, resampled by class" in page.text
    assert "selected by held-out MAP@R with training distractors" in page.text


def cards(content):
    """Return the text of each card of a report by name."""
    parts = [rf'<div class="{part}">(.*?)</div>' for part in ("name", "figure", "small")]
    matches = re.findall("".join(parts), content.decode())
    return {name: (figure, below) for name, figure, below in matches}


def test_cards_compare_with_the_untrained_model(records, evaluations, tmp_path):
    figure, below = cards(report_page(records[0], evaluations[0]))["recall@1"]
    untrained, selected = (
        records[0].results[epoch]["test"]["recall@1"] for epoch in ("untrained", "selected")
    )
    assert figure == f"{100 * untrained:.1f} → {100 * selected:.1f} %"
    assert below.startswith("untrained → trained; 95 % interval ")
    assert below.endswith("; test set")
    # With other data, the metrics on that data.
    table = make_table(tmp_path / "other", seed=3)
    table.write_text(table.read_text().replace(",class1", ",room1"))
    result = evaluate_run(records[0], str(table))
    assert not result.matches_run
    figure, below = cards(report_page(records[0], result))["MAP@R"]
    assert figure == f"{100 * result.scores['map@r']:.1f} %"
    assert below.endswith("; other, split test")


def test_table_of_every_class(page, evaluations):
    result = evaluations[0]
    hits, labels = {}, result.catalog.labels
    for query, label in enumerate(labels):
        hits.setdefault(label, []).append(bool(result.neighbors.hits[query, 0]))
    table = {row[0]: row[1:3] for row in page.table("Every class")}
    assert table == {
        label: [str(len(own)), f"{100 * sum(own) / len(own):.1f}"] for label, own in hits.items()
    }
    order = [float(row[2]) for row in page.table("Every class")]
    assert order == sorted(order)


def test_curves_have_every_epoch(page, records):
    history = records[0].history
    rows = page.table("Every epoch")
    assert [row[0] for row in rows] == [str(line["epoch"]) for line in history]
    assert rows[1][1] == f"{history[1]['loss']:.4g}"
    charts = [svg["aria-label"] for svg in page.all("svg") if svg.get("class") == "chart"]
    for title in ("Loss", "Learning rate", "Metrics, test set", "Distinct proxies"):
        assert any(label.startswith(title) for label in charts), title


def test_images_have_alt_text_and_marks(page, evaluations):
    shown = [a for a in page.all("img") if a.get("class") != "sprite"]
    assert all(a["alt"] for a in shown)
    assert page.text.count("MAP@R 1") + page.text.count("MAP@R 0") > 0
    assert {"✓ correct", "✗ incorrect"} <= set(re.findall("[✓✗] [a-z]+", page.text))
    assert len([a for a in shown if a["alt"].startswith("query")]) >= 12


def test_origin_has_recipe_versions_command_and_seed(page, records):
    environment = records[0].environment
    assert environment["command"] in page.text
    assert f"torch {environment['packages']['torch']}" in page.text
    assert records[0].recipe.to_yaml() in page.text
    assert environment["git"]["commit"] in page.text


def test_comparison_reports_paired_differences(comparison, records, evaluations):
    rows = {
        row[0]: row[1:] for row in comparison.table("Metrics of all runs on the same 24 queries")
    }
    one, other = (f.scores["map@r"] for f in evaluations)
    first, second, difference = rows["MAP@R"]
    assert first.startswith(f"{100 * one:.1f}")
    assert second.startswith(f"{100 * other:.1f}")
    sign = f"{100 * (other - one):+.1f}".replace("-", "−")
    assert re.match(re.escape(sign) + " (better|worse|no significant difference)", difference)
    scores = evaluations[0].evaluation.scores
    assert f"Bonferroni correction for the {len(scores)} comparisons" in comparison.text
    one = evaluations[0].evaluation.compare(
        evaluations[1].evaluation, confidence=1 - 0.05 / len(scores)
    )
    low, high = (f"{100 * bound:+.1f}".replace("-", "−") for bound in one["map@r"][1:])
    assert difference.endswith(f"{low} to {high}")
    keys = {row[0]: row[1:] for row in comparison.table("Recipe keys that differ")}
    assert keys == {"training.seed": ["0", "1"]}
    right = [f.neighbors.hits[:, 0] for f in evaluations]
    alone = int((right[0] & ~right[1]).sum())
    assert f"only in seed0 for {alone}, only in seed1 for" in comparison.text


@pytest.mark.parametrize(
    ("metrics", "select_by"),
    [
        ({"at_r": False}, "recall@1"),
        ({"recall_at": [], "at_r": False, "mrr": False, "ndcg_at": [], "map_at": [2]}, "map@2"),
    ],
    ids=["fewer", "none in common"],
)
def test_runs_with_other_metrics_are_compared(runs, run, tmp_path, metrics, select_by):
    place = RunFolder(run).recipe
    evaluation = {"metrics": metrics, "select_by": select_by}
    Recipe.load(place).override({"evaluation": evaluation}).save(place)
    assert write_report([runs[1], run], tmp_path / "page.html") == []
    page = Page((tmp_path / "page.html").read_bytes())
    rows = {row[0]: row[1:] for row in page.table("Metrics of all runs on the same 24 queries")}
    assert rows["MAP@R"][1:] == ["–", "–"]
    assert "Correct in run only" in page.text


def test_runs_on_other_images_are_not_compared(runs, run, tmp_path, call):
    other = make_table(tmp_path / "other", seed=3)
    place = RunFolder(run).recipe
    place.write_text(place.read_text().replace(str(runs[0].parent / "images.csv"), str(other)))
    other.write_text(other.read_text().replace(",class1", ",room1"))
    out = call(runs[0], run, "--out", tmp_path / "page.html")
    assert out == f"report: {tmp_path / 'page.html'}\n"
    page = Page((tmp_path / "page.html").read_bytes())
    assert "These runs were not evaluated on the same images" in page.text
    assert "difference" not in [cell for rows in page.tables.values() for cell in rows[0]]
    assert "have changed" in page.text
    # On the same images, they are compared.
    call(runs[0], run, "--data", other, "--out", tmp_path / "page.html")
    assert "paired by class" in Page((tmp_path / "page.html").read_bytes()).text


def test_other_folders_with_the_same_names_are_other_images(records, evaluations, tmp_path):
    table = make_table(tmp_path / "other", seed=3)
    other = evaluate_run(records[1], str(table))
    assert other.catalog.paths == evaluations[0].catalog.paths
    assert not evaluations[0].is_comparable_to(other)
    # The same folder by another name has the same images.
    (tmp_path / "link").symlink_to(evaluations[1].catalog.root)
    linked = replace(
        evaluations[1], catalog=replace(evaluations[1].catalog, root=tmp_path / "link")
    )
    assert evaluations[0].is_comparable_to(linked)


def test_binary_codes_are_among_the_metrics(home, table):
    model = {"bits": 16, "dim": 16}
    recipe = make_recipe(table, home / "cache", model=model, training={"epochs": 1})
    train(recipe, home / "bits")
    record = RunRecord.read(home / "bits")
    result = evaluate_run(record)
    results = record.results["selected"]["test"]["codes"]
    assert result.matches_run
    assert result.scores["codes"] == pytest.approx(results, abs=1e-12)
    for one in (result, replace(result, matches_run=False)):
        caption = "Metrics of the test set" if one.matches_run else "Metrics on the images of this"
        rows = {row[0]: row[1:] for row in Page(report_page(record, one)).table(caption)}
        for name in ("recall@1", "MAP@R", "ndcg@4"):
            *_, shown, interval = rows[f"{name}, codes (Hamming)"]
            assert (shown, interval) == (f"{100 * results[name.lower()]:.1f}", "–")
        assert not [name for name in rows if name.startswith("queries")]


@pytest.fixture
def moved(run, table, tmp_path):
    """A run whose images have moved."""
    shutil.copytree(table.parent / "images", tmp_path / "new" / "images")
    shutil.copy(table, tmp_path / "new")
    place = RunFolder(run).recipe
    place.write_text(place.read_text().replace(str(table), "/gone/images.csv"))
    return run


def test_moved_images_are_listed_as_missing(moved, tmp_path, call):
    out = call(moved)
    assert "missing: Queries, classes, intervals and the map" in out
    assert "/gone/images.csv" in out
    page = Page((moved / "report.html").read_bytes())
    assert_alone(page)
    assert "Missing from this report" in page.text
    assert page.table("Metrics of the test set")
    assert "distinct if their directions" in page.text
    assert "missing: Proxies in use: no training images" in out
    for words in (["--data", tmp_path / "new/images.csv"], ["--root", tmp_path / "new/images.csv"]):
        out = call(moved, *words)
        page = Page((moved / "report.html").read_bytes())
        assert page.table("Every class")
        assert "have changed" not in page.text
        assert out == f"report: {moved / 'report.html'}\n"
        assert re.search(r"of \d+ training images of \d+ of \d+ classes", page.text)


def test_comparison_without_the_images_of_one_run(runs, moved, call, tmp_path):
    out = call(runs[1], moved, "--out", tmp_path / "page.html")
    assert "/gone/images.csv" in out
    page = Page((tmp_path / "page.html").read_bytes())
    assert_alone(page)
    caption = "Metrics that each run reported"
    rows = {row[0]: row[1:] for row in page.table(f"{caption}, test set")}
    results = [RunFolder(path).read_results()["selected"]["test"] for path in (runs[1], moved)]
    assert rows["recall@1"] == [f"{100 * one['recall@1']:.1f}" for one in results]
    assert "differences cannot be tested" in page.text


@pytest.mark.parametrize("stage", ["first", "second"])
def test_report_of_two_stages(run, tmp_path, call, stage):
    """The report is on the current stage, also between stages, when the first has results."""
    two = tmp_path / "two"
    two.mkdir()
    place = run.rename(two / f"{stage}-stage")
    if stage == "second":
        assert call(two) == f"report: {two / 'report.html'}\n"
        assert Page((two / "report.html").read_bytes()).table("Every class")
        RunFolder(place).results.unlink()
    out = call(two)
    assert f"unfinished; 2 of 2 epochs of the {stage} stage are logged" in out
    assert f"`train` with {two} to resume" in out


def test_run_without_held_out_or_test_images(home, table, tmp_path, call):
    lines = [line for line in table.read_text().splitlines() if not line.endswith(",test")]
    shutil.copytree(table.parent / "images", tmp_path / "images")
    (tmp_path / "train.csv").write_text("\n".join(lines))
    recipe = make_recipe(tmp_path / "train.csv", home / "cache", evaluation={"protocol": "last"})
    train(recipe, tmp_path / "all")
    out = call(tmp_path / "all")
    assert "nothing to evaluate" in out
    assert "No metrics were computed" in Page((tmp_path / "all" / "report.html").read_bytes()).text
    call(tmp_path / "all", "--data", table)
    text = Page((tmp_path / "all" / "report.html").read_bytes()).text
    assert "Metrics on the images of this report" in text
    assert "Last epoch" in text
    assert "Selected epoch" not in text


def test_columns_and_bad_images_come_from_the_recipe_or_options(moved, tmp_path, call):
    place, new = RunFolder(moved).recipe, tmp_path / "new" / "images.csv"
    recipe = Recipe.load(place).override({"data.columns.label": "kind", "data.bad_images": "skip"})
    recipe.save(place)
    new.write_text(new.read_text().replace("path,label", "path,kind", 1))
    (tmp_path / "new/images/class11/0.png").unlink()
    assert call(moved, "--data", new) == f"report: {moved / 'report.html'}\n"
    assert Page((moved / "report.html").read_bytes()).table("Every class")
    new.write_text(new.read_text().replace("path,kind", "file,category", 1))
    message = call(moved, "--data", new, code=1)
    assert "kind" in message
    assert "--data.columns label=COLUMN" in message
    call(moved, "--data", new, "--data.columns", "path=file,label=category")
    assert Page((moved / "report.html").read_bytes()).table("Every class")


def test_unreadable_images_are_skipped(moved, tmp_path, call):
    (tmp_path / "new/images/class11/0.png").write_bytes(b"no image")
    call(moved, "--data", tmp_path / "new/images.csv")
    text = Page((moved / "report.html").read_bytes()).text
    assert "1 images cannot be read" in text
    assert "have changed" in text


def test_interrupted_run(home, table, tmp_path, call):
    recipe = make_recipe(table, home / "cache", evaluation={"untrained": False})
    killed_at(6, recipe, tmp_path / "interrupted")
    out = call(tmp_path / "interrupted")
    assert "unfinished; 1 of 2 epochs are logged" in out
    page = Page((tmp_path / "interrupted" / "report.html").read_bytes())
    assert "its last saved embedder is of epoch 1" in page.text
    assert page.table("Every class")
    # A run that has just started.
    shutil.rmtree(tmp_path / "interrupted" / "embedder")
    shutil.rmtree(tmp_path / "interrupted" / "checkpoints")
    (tmp_path / "interrupted" / "metrics.jsonl").unlink()
    call(tmp_path / "interrupted")
    page = Page((tmp_path / "interrupted" / "report.html").read_bytes())
    assert "No metrics were computed" in page.text
    assert "No epoch has been logged" in page.text


@pytest.mark.parametrize("name", ["results.json", "environment.json", "metrics.jsonl"])
def test_damaged_files_are_rejected(run, call, name):
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[: len(content) // 2] + b"\n")
    assert str(run / name) in call(run, code=1)
    assert not (run / "report.html").exists()


def test_usage_errors(run, tmp_path, call):
    for words, message in (
        ([], "RUNS is missing"),
        ([tmp_path / "none"], f"no such folder: {tmp_path / 'none'}. Pass the folder of a run."),
        ([tmp_path], "has no recipe.yaml. Pass the folder of a run."),
        ([run, "--out", tmp_path / "x.txt"], "must end in .html"),
        ([run, "--out", tmp_path / "no/x.html"], "there is no folder"),
        ([run, "--columns", "path=file"], "Pass the table as --data"),
        ([run, "--data", tmp_path / "nowhere"], "nowhere"),
    ):
        assert message in call(*words, code=2)
    assert not (run / "report.html").exists()


def test_report_is_written_atomically(run, monkeypatch, call):
    (run / "report.html").write_text("old")
    monkeypatch.setattr(report, "report_page", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call(run)
    assert (run / "report.html").read_text() == "old"
    assert not [path for path in run.iterdir() if path.name.startswith(".")]
    monkeypatch.undo()
    call(run)
    assert (run / "report.html").read_bytes().startswith(b"<!doctype html>")


def test_removing_a_run_removes_its_report(run):
    (run / "report.html").write_text("of the old run")
    RunFolder(run).remove()
    assert not (run / "report.html").exists()


def test_report_without_the_map_extra(run, monkeypatch, call):
    monkeypatch.setitem(sys.modules, "openTSNE", None)
    out = call(run)
    assert "missing: Map: A map of embeddings needs openTSNE" in out
    page = Page((run / "report.html").read_bytes())
    assert page.table("Every class")
    assert "map" not in [attributes.get("class") for attributes in page.all("div")]


def test_run_without_proxies(records, evaluations):
    recipe = records[0].recipe.override({"loss.name": "pairs/contrastive"})
    last = {key: value for key, value in records[0].results["last"].items() if key != "proxies"}
    record = replace(records[0], recipe=recipe, results={**records[0].results, "last": last})
    assert b'id="proxies"' not in report_page(record, evaluations[0])
    assert record.missing == []


def test_custom_loss_without_proxies(home, table, tmp_path):
    recipe = make_recipe(table, home / "cache", training={"epochs": 1})
    train(recipe, tmp_path / "custom", loss=lambda x, labels: x.var(0).sum())
    assert write_report([tmp_path / "custom"], tmp_path / "page.html") == []
    assert b'id="proxies"' not in (tmp_path / "page.html").read_bytes()


def test_demo_without_pyarrow_makes_no_gallery(run, table, monkeypatch):
    result = evaluate_run(RunRecord.read(run))
    for name in [*sys.modules]:
        if name.startswith("proximetry.search."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    test = open_dataset("csv", table).filter(split="test")
    line = make_gallery(run / "gallery", result.embedder, test, result.vectors)
    assert "pip install '.[" in line


def test_demo_prints_outputs_and_next_commands(home, table, tmp_path, monkeypatch, capsys):
    recipe = make_recipe(table, home / "cache", training={"epochs": 1})
    small = SimpleNamespace(load=lambda name, changes: recipe.override(changes))
    monkeypatch.setattr("proximetry.cli.demo.Recipe", small)
    monkeypatch.setattr("proximetry.data.glyphs", lambda: open_dataset("csv", table))
    out = tmp_path / "run"
    for _ in range(2):  # the second time with existing outputs
        assert cli.main(["demo", "--out", str(out)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert f"Gallery: {out / 'gallery'}" in lines
        assert f"Report:  {out / 'report.html'}" in lines
        assert f"  proximetry serve {out / 'gallery'}" in lines[lines.index("Next:") :]
        assert len(Gallery.open(out / "gallery")) == 24
        assert Page((out / "report.html").read_bytes()).table("Every class")
