"""A small table from end to end on a CPU, and what is said when something is wrong."""

import json
import math
import shutil
from functools import partial

import pytest
from filelock import FileLock

from proximetry.recipe.loading import merge
from proximetry.reproduce import (
    Interrupted,
    ReproduceError,
    ReproduceOptions,
    Table,
    reproduce,
    runner,
)
from proximetry.reproduce.page import _differences, overview, page
from proximetry.reproduce.records import RUNS, Results, read_records
from proximetry.training import Recipe
from tests.reproduce.small import (
    Ended,
    edit_run,
    make_table,
    no_training,
    numbers,
    page_of,
    remove_runs,
    run_table,
    table_values,
    train_here,
    with_base,
    write_table,
)
from tests.reproduce.test_statistics import record
from tests.training.tiny import tiny_values

IDS = [f"{row}-{part}" for row in ("mpa-k-2", "proxy-anchor") for part in ("seed0", "seed1")]
IDS += ["mpa-k-2-selection", "proxy-anchor-selection"]


def copy_of(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "small")
    return tmp_path


def test_runs_are_lines_of_one_file(whole):
    home, lines = whole
    assert list(read_records(home)) == sorted(IDS)
    assert len((home / RUNS).read_text().splitlines()) == len(IDS)
    assert sorted(path.name for path in home.iterdir()) == ["README.md", RUNS, "sweep.svg"]
    assert lines[0] == "small: 6 runs, 0 of them done already"
    assert lines[-1].endswith("0 left")
    assert sum("recall@1" in line for line in lines) == 4


def test_runs_record_what_a_figure_needs_and_no_path(whole, data, cache):
    for text in (whole[0] / RUNS).read_text().splitlines():
        assert str(data) not in text
        assert str(cache) not in text
        record = json.loads(text)
        assert record["recipe"]["data"]["root"] is None
        assert record["recipe"]["training"]["seed"] == record["seed"]
        assert record["environment"]["packages"]["torch"]
        assert record["device"] == "CPU"
        assert record["command"].startswith("proximetry reproduce small.yaml")
        assert [line["epoch"] for line in record["curve"]] == [1, 2]
        watched = "test" if record["kind"] == "full" else "held_out"
        assert all(watched in line and line["seconds"] > 0 for line in record["curve"])
        assert "test" in record["last"]
        assert record["views"] is None
        assert (record["selected_epoch"] is None) == (record["kind"] == "full")
    full = read_records(whole[0])["mpa-k-2-seed1"]
    assert full.protocol == "last"
    assert full.curve[-1]["test"] == full.last["test"]


def test_writing_a_run_replaces_its_line(whole, tmp_path):
    home = copy_of(whole, tmp_path) / "small"
    before = (home / RUNS).read_text().splitlines()
    edit_run(home, IDS[0], notes=["again"])
    after = (home / RUNS).read_text().splitlines()
    assert [new == old for old, new in zip(before, after, strict=True)].count(False) == 1
    assert read_records(home)[IDS[0]].notes == ["again"]


def test_angles_of_proxies_and_verification_stand_in_a_table(data, cache, tmp_path):
    values = with_base(
        table_values(cache, selection=False, figure=None),
        "evaluation",
        metrics={"recall_at": [1], "verification": True},
    )
    values["metrics"] = ["verification", "separability", "mean_angle", "smallest_angle"]
    for row in values["rows"]:
        del row["published"]
    apart = {"better": "MPA, K = 2", "worse": "Proxy-Anchor", "metric": "mean_angle"}
    home = run_table(Table.load({**values, "claims": [apart]}), data, tmp_path, seeds=(0, 1))
    records = read_records(home)
    found = [records[f"proxy-anchor-seed{seed}"].metrics() for seed in (0, 1)]
    for one in found:
        cosine = math.cos(math.radians(one["mean_angle"]))
        assert -1 <= one["separability"] <= 1
        assert abs(cosine - one["separability"]) < 0.1
        assert 0 < one["smallest_angle"] <= one["mean_angle"] < 180
        assert 0 <= one["verification"] <= 1
    text = page_of(home)
    line = next(line for line in text.splitlines() if line.startswith("| Proxy-Anchor | ours"))
    mean = sum(one["mean_angle"] for one in found) / 2
    assert line.split(" | ")[4].startswith(f"{mean:.1f} ±")  # degrees, not percent
    angles = Table.load({**values, "metrics": ["mean_angle"], "claims": []})
    one = records["proxy-anchor-seed0"]
    assert runner.outcome(angles, one) == f"mean_angle {found[0]['mean_angle']:.1f}"
    without = one.model_copy(update={"last": {k: one.last[k] for k in ("epoch", "test")}})
    assert runner.outcome(angles, without) == "no mean_angle"  # losses without proxies
    assert "Angles, in degrees, are of each class's proxy to its nearest rival" in text
    claim = next(line for line in text.splitlines() if line.startswith("| MPA, K = 2 above"))
    other = [records[f"mpa-k-2-seed{seed}"].metrics()["mean_angle"] for seed in (0, 1)]
    assert f"| {sum(other) / 2 - mean:+.2f} ±" in claim


def test_the_page_tells_what_no_paper_did(tmp_path):
    table, plain = make_table(tmp_path), Recipe.load(tiny_values(tmp_path))
    ours = plain.override(
        {"model": {"pca_dim": 4, "whitening": 0.25, "drop_path": 0.2, "tta_crops": [0.875, 0.5]}}
    )

    def said(*recipes):
        rows = zip(table.rows, recipes, strict=False)
        records = [record(row.name, 0, 0.5, recipe=r.to_dict()) for row, r in rows]
        return _differences(Results(table, records))

    both = "\n".join(said(ours, plain))
    assert "probability 0.2, those before it with less, unless the row says otherwise." in both
    assert "by their centre alone, 0.875, 0.5 of the sides, enlarged to the same size" in both
    assert "the features averaged, unless the row says otherwise." in both
    assert "(fitted on training images), each component divided by its standard deviation" in both
    assert "to the power 0.25." in both
    assert "otherwise" not in "".join(said(ours))
    assert not {*said(plain)} - {*said(ours)}
    assert "centre alone" not in "".join(said(plain))


def test_the_page_shows_ours_beside_the_published(whole):
    home = whole[0]
    text = page_of(home)
    records = read_records(home)
    runs = [records[f"mpa-k-2-seed{k}"] for k in (0, 1)]
    values = [100 * run.last["test"]["recall@1"] for run in runs]
    mean, spread = sum(values) / 2, abs(values[0] - values[1]) / 2**0.5
    lines = text.splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("| MPA, K = 2 | ours"))
    ours = "| MPA, K = 2 | ours, last epoch, seeds 0, 1 |"
    assert lines[row].startswith(f"{ours} {mean:.1f} ± {spread:.1f} |")
    assert lines[row + 2] == "|  | published, a large network | 69.2 | — | 26.6 |"
    chosen = records["mpa-k-2-selection"].selected_epoch
    there = [100 * run.curve[chosen - 1]["test"]["recall@1"] for run in runs]
    line = f"|  | ours, epoch {chosen}, selected on held-out classes | {sum(there) / 2:.1f} ±"
    assert lines[row + 1].startswith(line)
    claim = next(line for line in lines if line.startswith("| MPA, K = 2 above Proxy-Anchor |"))
    assert claim.startswith("| MPA, K = 2 above Proxy-Anchor | recall@1 | +0.60 |")
    assert claim.split(" | ")[4] == "2"
    assert "1 claim tested; where there is no difference, one in twenty passes" in text
    for words in (
        "20 % of the training classes",
        "| seeds | 0, 1 |",
        "| data | your own images: 60 training, 36 test images; images: 10 classes in train/, "
        "6 classes in test/ |",
        "Training crops are cut from images scaled to a short side of 24.",
        "centre crop 24.",
        "| device | CPU |",
        "torch",
        "`proximetry reproduce small.yaml --data FOLDER --seeds 0 1`",
        "Squares instead of birds.",
        "small_convnet here, a large network there",
        "![recall@1 against proxies per class K](sweep.svg)",
        "Published with a large network; not stated. A note.",
    ):
        assert words in text
    assert "Not complete" not in text
    assert "| concurrent runs | 1 |" in (home / "README.md").read_text()


def test_what_is_done_is_skipped_and_the_same_bytes_come_out(whole, data, cache, tmp_path):
    out = copy_of(whole, tmp_path)
    for seeds in ((0, 1), (0,)):  # fewer seeds asked for: the others still count
        lines = []
        home = run_table(make_table(cache), data, out, lines.append, seeds=seeds, start=no_training)
        assert f"{2 * len(seeds) + 2} of them done already" in lines[0]
        assert (home / "README.md").read_bytes() == (whole[0] / "README.md").read_bytes()
        assert (home / "sweep.svg").read_bytes() == (whole[0] / "sweep.svg").read_bytes()


def test_a_missing_run_is_made_again_alike(whole, data, cache, tmp_path):
    out = copy_of(whole, tmp_path)
    remove_runs(out / "small", "mpa-k-2-seed1")
    leftover = out / "small" / "work" / "mpa-k-2-seed1"
    leftover.mkdir(parents=True)
    (leftover / "environment.json").write_text("{")  # killed while its folder was made
    home = run_table(make_table(cache), data, out, seeds=(0, 1), keep_runs=True)
    assert numbers(home) == numbers(whole[0])
    assert page_of(home) == page_of(whole[0])
    assert (leftover / "embedder").is_dir()
    run_table(make_table(cache), data, out, seeds=(0, 1), start=no_training)
    assert not (home / "work").exists()


def test_render_needs_neither_data_nor_the_same_recipe(call, whole, tmp_path):
    out = copy_of(whole, tmp_path)
    before = {p.name: p.read_bytes() for p in (out / "small").iterdir()}
    for name in ("README.md", "sweep.svg"):
        (out / "small" / name).unlink()
    path = write_table(tmp_path / "small.yaml", table_values("/elsewhere"))
    call(path, "--out", out, "--render")
    assert {p.name: p.read_bytes() for p in (out / "small").iterdir()} == before
    with pytest.raises(ReproduceError, match="no results to render"):
        reproduce(path, out=tmp_path / "nowhere", options=ReproduceOptions(render=True))


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        ("optimizer", {"lr": 0.5}, "optimizer.lr 0.001 → 0.5"),
        ("model", {"dim": 4}, "model.dim 8 → 4"),
    ],
)
def test_another_recipe_is_refused(whole, data, cache, tmp_path, section, keys, message):
    out = copy_of(whole, tmp_path)
    table = Table.load(with_base(table_values(cache), section, **keys))
    with pytest.raises(ReproduceError) as error:
        run_table(table, data, out, seeds=(0, 1), start=no_training)
    assert message in str(error.value)
    assert "--out" in str(error.value)
    with pytest.raises(ReproduceError, match=r"training\.epochs 2 → 3"):
        run_table(make_table(cache), data, out, seeds=(2,), epochs=3, start=no_training)


def cut_off(job):
    """Train, and be interrupted before the file of the run is written."""
    train_here(job)
    raise KeyboardInterrupt


def test_another_recipe_is_refused_for_a_run_that_was_cut_off(data, cache, tmp_path):
    table = make_table(cache, selection=False)
    with pytest.raises(Interrupted, match="the same command continues"):
        run_table(table, data, tmp_path, start=cut_off)
    with pytest.raises(ReproduceError, match=r"work/proxy-anchor-seed0 was made with another"):
        run_table(table, data, tmp_path, epochs=1, start=no_training)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        (100_000 * "[", "nested too deeply"),
        ('{"table": "small", "row": 1, "seed": 0, "kind": "full"}', "row must be"),
        ("[]", "dictionary"),
        ('{"name": "a package"}', "table is missing"),
        (None, "is a duplicate"),
    ],
)
def test_damaged_line_is_named(whole, data, cache, tmp_path, content, message):
    out = copy_of(whole, tmp_path)
    path = out / "small" / RUNS
    lines = path.read_text().splitlines()
    lines[1] = lines[0] if content is None else content
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ReproduceError, match=rf"runs\.jsonl, line 2: .*{message}.*--out"):
        run_table(make_table(cache), data, out, start=no_training)


def test_run_of_unknown_row_is_named(whole, data, cache, tmp_path):
    out = copy_of(whole, tmp_path)
    rows = table_values(cache)["rows"][:1]
    with pytest.raises(ReproduceError, match=r"runs\.jsonl: mpa-k-2-seed0: there is no row"):
        run_table(make_table(cache, rows=rows, claims=[]), data, out, start=no_training)
    edit_run(out / "small", "mpa-k-2-seed0", slug="other")
    with pytest.raises(ReproduceError, match=r"runs\.jsonl: other-seed0: slug 'other'"):
        run_table(make_table(cache), data, out, start=no_training)


def test_failing_runs_are_named_and_do_not_stop_the_others(data, cache, tmp_path):
    def failing(job):
        text = ""
        if job.run.id == "mpa-k-2-seed0":
            text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB"
        elif job.run.id == "proxy-anchor-seed1":
            text = "Traceback (most recent call last):\n  in failing\nRuntimeError: a mistake"
        if not text:
            return train_here(job)
        job.log.write_text(text + "\n")
        return Ended(1)

    table, lines = make_table(cache, selection=False), []
    with pytest.raises(ReproduceError) as error:
        run_table(table, data, tmp_path, lines.append, seeds=(0, 1), start=failing)
    said = str(error.value)
    assert "2 runs failed" in said
    assert "MPA, K = 2, seed 0: this machine has too little memory" in said
    assert "--parallel" not in said
    home = tmp_path / "small"
    log = home / "work" / "proxy-anchor-seed1.log"
    assert f"seed 1: RuntimeError: a mistake (log: {log})" in said
    assert "in failing" in log.read_text()
    assert "\n" not in said
    assert list(read_records(home)) == ["mpa-k-2-seed1", "proxy-anchor-seed0"]
    text = (home / "README.md").read_text()
    assert "Still missing: mpa-k-2-seed0, proxy-anchor-seed1." in text
    assert "ours, last epoch, seed 1 |" in text
    assert "| — | 0 | no seed in common |" in text
    run_table(table, data, tmp_path, seeds=(0, 1))
    assert len(read_records(home)) == 4
    assert not (home / "work").exists()


def test_results_that_cannot_be_read_are_a_failure(data, cache, tmp_path):
    table = make_table(cache, selection=False)
    with pytest.raises(ReproduceError, match=r"2 runs failed.*results\.json"):
        run_table(table, data, tmp_path, start=lambda job: Ended(0))


@pytest.mark.parametrize(
    ("code", "log", "sentence"),
    [
        (-9, "", "was killed by signal 9, as happens when memory runs out; it can be resumed"),
        (-15, "", "its process was killed by signal 15; it can be resumed"),
        (130, "stopped after step 3", "it was stopped by a signal, and saved"),
        (1, "one\nno such folder\n\n", "no such folder"),
        (1, "", "its process ended with code 1"),
        (1, "RuntimeError: CUDA error: out of memory", "this machine has too little memory"),
    ],
)
def test_why_a_process_ended(whole, cache, tmp_path, code, log, sentence):
    run = runner.plan(make_table(cache), ReproduceOptions())[0]
    job = runner.Job(run, tmp_path, "cpu")
    job.log.write_text(log)
    with pytest.raises(ReproduceError, match=sentence):
        raise runner._why(job, code)


class Crowd:
    """Runs that are done in the order of their start, where so many fit at once.

    Attributes:
        too_large: slugs of rows that do not even fit alone.
        sizes: how many ran when one was started that did fit.
    """

    def __init__(self, room, too_large=(), code=1):
        self.room, self.too_large, self.code = room, too_large, code
        self.running, self.sizes = [], []

    def start(self, job):
        if len(self.running) >= self.room or job.run.row.slug in self.too_large:
            job.log.write_text("proximetry: not enough memory on cuda:0")
            return Ended(self.code)
        self.running.append(job)
        self.sizes.append(len(self.running))
        return InTurn(self, job)


class InTurn:
    def __init__(self, crowd, job):
        self.crowd, self.job = crowd, job

    def poll(self):
        return 0 if self.crowd.running[0] is self.job else None

    def wait(self):
        self.crowd.running.remove(self.job)
        return train_here(self.job).wait()

    def terminate(self):
        raise AssertionError("it was to end by itself")


@pytest.mark.parametrize("code", [1, -9])
@pytest.mark.parametrize("room", [2, 1])
def test_a_run_without_memory_beside_others_is_done_later(cache, data, tmp_path, room, code):
    lines, crowd = [], Crowd(room, code=code)
    table = make_table(cache, selection=False)
    home = run_table(table, data, tmp_path, lines.append, crowd.start, parallel=4, seeds=(0, 1, 2))
    assert len(read_records(home)) == 6
    assert max(crowd.sizes) == room
    assert any("run again separately, and until then at most" in line for line in lines)
    assert lines[-1].endswith("0 left")


def test_a_row_that_fits_nowhere_fails_and_hardly_slows_the_others(cache, data, tmp_path):
    crowd = Crowd(4, ["mpa-k-2"])
    table = make_table(cache, selection=False)
    with pytest.raises(ReproduceError, match=r"3 runs failed.*this machine has too little memory"):
        run_table(table, data, tmp_path, start=crowd.start, parallel=4, seeds=(0, 1, 2))
    assert len(read_records(tmp_path / "small")) == 3
    assert crowd.sizes[-1] > 1


@pytest.mark.parametrize(
    ("parallel", "given", "policy"),
    [
        (1, {}, "as it was"),
        (2, {}, "PASSIVE"),
        (2, {"GOMP_SPINCOUNT": "9"}, "as it was"),
        (2, {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
    ],
)
def test_threads_of_runs_that_share_a_machine_sleep(
    cache, tmp_path, monkeypatch, parallel, given, policy
):
    for key in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(key, raising=False)
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    run = runner.plan(make_table(cache), ReproduceOptions())[0]
    job = runner.Job(run, tmp_path, "cpu", parallel)
    said = "import os, sys; sys.stderr.write(os.environ.get('OMP_WAIT_POLICY', 'as it was'))"
    assert runner.start_process(job, ("-c", said)).wait() == 0
    assert job.log.read_text() == policy


def test_a_page_without_runs(tmp_path):
    text = page(Results(make_table(tmp_path), []), (0,))
    assert "No run of this table is done yet." in text


def test_notes_of_the_runs_are_on_the_page(whole, tmp_path):
    out = copy_of(whole, tmp_path)
    note = "Cars196: 16170 of 16185 images, 15 missing: numbers 1, 2"
    edit_run(out / "small", "mpa-k-2-seed0", notes=[note])
    table = make_table("anywhere")
    note = f"6 classes in test/; {note}"
    results = Results.read(table, out / "small")
    assert f"{note} |" in page(results)
    assert f"{note}." in overview(results, "there")
    notes = [f"left out {i}.png: no image" for i in range(9)]
    edit_run(out / "small", "mpa-k-2-seed0", notes=notes)
    text = page(Results.read(table, out / "small"))
    assert "left out 1.png: no image; and 7 more notes in runs.jsonl |" in text


def test_page_names_what_was_not_recorded(whole):
    records = read_records(whole[0]).values()
    unknown = [r.model_copy(update={"parallel": None, "images": None}) for r in records]
    for one in unknown:
        one.environment["packages"]["proximetry"] = None
    text = page(Results(make_table("anywhere"), unknown))
    assert "| data | your own images: number of images not recorded; images: " in text
    assert "| concurrent runs | not recorded |" in text
    assert "proximetry not recorded" in text


def test_what_is_missing_goes_by_the_table(call, whole, tmp_path):
    out = copy_of(whole, tmp_path)
    remove_runs(out / "small", *IDS[4:])
    path = write_table(tmp_path / "small.yaml", table_values("/elsewhere"))
    asked = [path, "--out", out, "--render"]
    call(*asked)
    text = (out / "small" / "README.md").read_text()
    assert "Still missing: proxy-anchor-selection, mpa-k-2-selection." in text
    assert "--seeds 0 1 --no-selection`" in text
    results = Results.read(make_table("anywhere"), out / "small")
    assert "Still missing: proxy-anchor-selection" in overview(results, "there")
    call(*asked, "--no-selection")
    assert "Not complete" not in (out / "small" / "README.md").read_text()


def test_only_rows_with_published_figures_have_a_line_of_them(whole, tmp_path):
    rows = table_values("anywhere")["rows"]
    del rows[0]["published"]
    table = make_table("anywhere", rows=rows)
    text = page(Results.read(table, whole[0]))
    assert text.count("| published, a large network |") == 1


@pytest.mark.parametrize("gone", ["recipe.yaml", "environment.json", "damaged"])
def test_a_folder_that_was_being_removed_blocks_nothing(whole, data, cache, tmp_path, gone):
    """Killed after the JSON was written, and killed before: parts of both folders are left."""
    out = copy_of(whole, tmp_path)
    remove_runs(out / "small", "mpa-k-2-seed1")
    for name in ("proxy-anchor-seed0", "mpa-k-2-seed1"):
        folder = out / "small" / "work" / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "last.safetensors").write_bytes(b"old")
        (folder / "environment.json").write_text("{}")
        (folder / "recipe.yaml").write_text("{{{" if gone == "damaged" else "name: old")
        if gone != "damaged":
            (folder / gone).unlink()
    home = run_table(make_table(cache), data, out, seeds=(0, 1))
    assert numbers(home) == numbers(whole[0])
    assert not (home / "work").exists()


def test_ctrl_c_while_the_page_is_written_is_one_sentence(
    whole, data, cache, tmp_path, monkeypatch
):
    out = copy_of(whole, tmp_path)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "page", interrupted)
    with pytest.raises(Interrupted, match=r"6 runs are done in .* the same command continues"):
        run_table(make_table(cache), data, out, seeds=(0, 1))


def test_a_run_remembers_how_many_shared_the_device(data, cache, tmp_path):
    table = make_table(cache, selection=False)
    with pytest.raises(Interrupted):
        run_table(table, data, tmp_path, parallel=2, start=cut_off)
    assert (tmp_path / "small" / "work" / "proxy-anchor-seed0.yaml").exists()
    home = run_table(table, data, tmp_path)  # the other was not begun
    found = {name: record.parallel for name, record in read_records(home).items()}
    assert found == {"proxy-anchor-seed0": 2, "mpa-k-2-seed0": 1}
    assert not (home / "work").exists()


def test_several_at_once_are_recorded_and_seconds_left_out(cache, data, tmp_path):
    table = make_table(cache, figure={"kind": "curves"}, selection=False)
    lines = []
    home = run_table(table, data, tmp_path, lines.append, parallel=9)
    assert "neither drawn nor compared" in lines[1]
    assert [r.parallel for r in read_records(home).values()] == [2, 2]
    text = (home / "README.md").read_text()
    assert "| concurrent runs | 2 |" in text
    assert "neither drawn nor compared: up to 2 runs shared the device." in text
    assert "seconds.svg" not in text
    assert not (home / "seconds.svg").exists()
    assert (home / "epochs.svg").exists()


def test_fewer_epochs_are_said(data, cache, tmp_path):
    rows = table_values(cache)["rows"][:1]
    table = make_table(cache, rows=rows, claims=[], selection=False)
    home = run_table(table, data, tmp_path, epochs=1)
    text = (home / "README.md").read_text()
    assert "| epochs | 1 of the table's 2 epochs |" in text
    said = "- 1 of the table's 2 epochs: learning-rate drops, warm-up and evaluation interval scale"
    assert f"{said} with the number of epochs" in text
    assert "--seeds 0 --epochs 1`" in text


def test_epochs_are_compared_row_by_row(whole, cache):
    values = table_values(cache)
    for row, epochs in zip(values["rows"], (1, 2), strict=True):
        row["changes"]["training.epochs"] = epochs
    records = read_records(whole[0]).values()
    swapped = [
        r.model_copy(update={"recipe": merge(r.recipe, {"training.epochs": epochs})})
        for r in records
        for epochs in [2 if r.row == "Proxy-Anchor" else 1]
    ]
    text = page(Results(Table.load(values), swapped))
    assert "- 1, 2 of the table's 1, 2 epochs: learning-rate drops" in text


@pytest.fixture
def call(call):
    return partial(call, "reproduce")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--list"),
        (["mpa-tabel5"], "did you mean 'mpa-table5'"),
        (["mpa-table5"], "--data is missing"),
        (["mpa-table5", "--data", "/nowhere"], "/nowhere is not a folder. Pass as --data"),
        (["mpa-table4", "--data", "EMPTY"], "found nothing. Pass as --data the folder of CUB"),
        (["mpa-table4", "--data", "DATA"], "this is not CUB-200-2011"),
        (["mpa-table4", "--data", "NUMBERED"], "this is not CUB-200-2011"),
        (["TABLE", "--data", "DATA", "--parallel", "0"], "at least 1"),
        (["TABLE", "--data", "DATA", "--epochs", "0"], "at least 1"),
        (["TABLE", "--data", "DATA", "--seeds", "1", "1"], "different"),
        (["TABLE", "--data", "DATA/train"], "has no images of split"),
        (["TABLE", "--data", "DATA", "--device", "gpu"], "there is no device 'gpu'"),
        (["TABLE", "--data", "DATA", "--device", "cuda:99"], "there is no device 'cuda:99'"),
        (["TABLE", "--data", "DATA", "--backbone", "resnet5O"], "unknown backbone 'resnet5O'"),
    ],
)
def test_mistakes_are_one_sentence(call, data, cache, tmp_path, words, message):
    for name in ("001.a", "101.b"):
        shutil.copytree(data / "train" / "class00", tmp_path / "cub" / name)
    (tmp_path / "empty").mkdir()
    places = {
        "EMPTY": tmp_path / "empty",
        "NUMBERED": tmp_path,  # holds cub/, of two classes
        "DATA": data,
        "DATA/train": data / "train",
        "TABLE": write_table(tmp_path / "t.yaml", table_values(cache)),
    }
    words = [places.get(word, word) for word in words]
    assert message in call(*words, "--out", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


def test_results_need_a_folder(call, data, cache, tmp_path, monkeypatch):
    table = write_table(tmp_path / "t.yaml", table_values(cache))
    (tmp_path / "file").write_text("")
    words = [table, "--data", data, "--device", "cpu", "--out"]
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        err = call(*words, out, code=2)
        assert "nothing can be written to" in err
        assert "(Not a directory); choose another folder" in err

    def refuse(lock, timeout):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    err = call(*words, tmp_path / "closed", code=2)
    assert "nothing can be written to" in err
    assert "(Permission denied); choose another folder" in err


@pytest.mark.slow
def test_the_command_runs_a_table_of_ones_own(call, data, cache, tmp_path):
    """With a process of its own for the run, which trains as one in this process does."""
    rows = table_values(cache)["rows"][:1]
    values = table_values(cache, rows=rows, claims=[], selection=True)
    path = write_table(tmp_path / "t.yaml", values)
    words = [path, "--data", data.parent / "data", "--out", tmp_path / "a", "--device", "cpu"]
    out = call(*words, "--no-selection", "--seeds", "4")
    home = tmp_path / "a" / "small"
    assert "Proxy-Anchor, seed 4: recall@1" in out
    assert f"results in {home / 'README.md'}" in out
    assert "held-out" not in (home / "README.md").read_text()
    assert not (home / "work").exists()
    here = run_table(path, data, tmp_path / "b", seeds=(4,), selection=False)
    assert numbers(home) == numbers(here)
    assert page_of(home) == page_of(here)
