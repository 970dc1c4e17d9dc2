"""End-to-end runs of a small table on the CPU, and error messages."""

import json
import math
import shutil
from functools import partial

import pytest

from proximetry.reproduce import (
    Interrupted,
    ReproduceError,
    ReproduceOptions,
    RunsFailedError,
    Table,
    reproduce,
    runner,
)
from proximetry.reproduce.records import RUNS, Results, read_records
from proximetry.reproduce.table_page import overview, page
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

IDS = [f"{row}-{part}" for row in ("mpa-k-2", "proxy-anchor") for part in ("seed0", "seed1")]
IDS += ["mpa-k-2-selection", "proxy-anchor-selection"]


def copy_of(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "small")
    return tmp_path


def test_runs_are_lines_of_one_file(whole, data, cache):
    home, lines = whole
    assert list(read_records(home)) == sorted(IDS)
    assert sorted(path.name for path in home.iterdir()) == ["README.md", RUNS, "sweep.svg"]
    assert lines[0] == "small: 6 runs, 0 already complete"
    assert lines[-1].endswith("0 left")
    assert sum("recall@1" in line for line in lines) == 4
    texts = (home / RUNS).read_text().splitlines()
    assert len(texts) == len(IDS)
    for text in texts:
        assert str(data) not in text
        assert str(cache) not in text
        record = json.loads(text)
        assert record["recipe"]["data"]["root"] is None
        assert record["recipe"]["training"]["seed"] == record["seed"]
        assert record["environment"]["packages"]["torch"]
        assert record["device"] == "CPU"
        assert [line["epoch"] for line in record["curve"]] == [1, 2]
        watched = "test" if record["kind"] == "full" else "held_out"
        assert all(watched in line and line["seconds"] > 0 for line in record["curve"])
        assert "test" in record["last"]
        assert (record["selected_epoch"] is None) == (record["kind"] == "full")
    full = read_records(home)["mpa-k-2-seed1"]
    assert full.protocol == "last"
    assert full.curve[-1]["test"] == full.last["test"]


def test_columns_of_proxy_angles_and_verification(data, cache, tmp_path):
    values = with_base(
        table_values(cache, selection=False, figure=None, claims=[]),
        "evaluation",
        metrics={"recall_at": [1], "verification": True},
    )
    values["metrics"] = ["mean_angle", "verification", "separability", "smallest_angle"]
    values["rows"] = [{"name": "Proxy-Anchor"}]
    table = Table.load(values)
    home = run_table(table, data, tmp_path, seeds=(0, 1))
    records = list(read_records(home).values())
    for metrics in (record.metrics() for record in records):
        assert abs(math.cos(math.radians(metrics["mean_angle"])) - metrics["separability"]) < 0.1
        assert 0 < metrics["smallest_angle"] <= metrics["mean_angle"] < 180
        assert 0 <= metrics["verification"] <= 1
    mean = sum(record.metrics()["mean_angle"] for record in records) / 2
    text = page_of(home)
    assert f"| Proxy-Anchor | ours, last epoch, seeds 0, 1 | {mean:.1f} ±" in text  # degrees
    assert "Angles, in degrees" in text
    one = records[0]
    assert runner.summarize(table, one) == f"mean_angle {one.metrics()['mean_angle']:.1f}"
    without = one.model_copy(update={"last": {k: one.last[k] for k in ("epoch", "test")}})
    assert runner.summarize(table, without) == "mean_angle missing"  # losses without proxies


def test_page_shows_ours_beside_the_published(whole):
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
    assert "1 claim tested; without a true difference, one in twenty is" in text
    for words in (
        "20 % of the training classes",
        "| data | your own images: 60 training, 36 test images; images: 10 classes in train/, "
        "6 classes in test/ |",
        "center crop 24.",
        "`proximetry reproduce small.yaml --data FOLDER --seeds 0 1`",
        "Squares instead of birds.",
        "small_convnet; published: a large network",
        "![recall@1 against proxies per class K](sweep.svg)",
        "Published with a large network; not stated. A note.",
    ):
        assert words in text
    assert "Not complete" not in text
    assert "| concurrent runs | 1 |" in (home / "README.md").read_text()


def test_finished_runs_are_skipped_and_the_page_is_unchanged(whole, data, cache, tmp_path):
    out = copy_of(whole, tmp_path)
    for seeds in ((0, 1), (0,)):  # runs of other seeds still count
        lines = []
        home = run_table(make_table(cache), data, out, lines.append, seeds=seeds, start=no_training)
        assert f"{2 * len(seeds) + 2} already complete" in lines[0]
        assert (home / "README.md").read_bytes() == (whole[0] / "README.md").read_bytes()
        assert (home / "sweep.svg").read_bytes() == (whole[0] / "sweep.svg").read_bytes()


def test_missing_run_is_repeated_with_the_same_results(whole, data, cache, tmp_path):
    out = copy_of(whole, tmp_path)
    remove_runs(out / "small", "mpa-k-2-seed1")
    home = run_table(make_table(cache), data, out, seeds=(0, 1), keep_runs=True)
    assert numbers(home) == numbers(whole[0])
    assert page_of(home) == page_of(whole[0])
    assert (home / "work" / "mpa-k-2-seed1" / "embedder").is_dir()
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


def test_other_recipe_is_rejected(whole, data, cache, tmp_path):
    out = copy_of(whole, tmp_path)
    table = Table.load(with_base(table_values(cache), "optimizer", lr=0.5))
    with pytest.raises(ReproduceError, match=r"optimizer\.lr 0\.001 → 0\.5.*--out"):
        run_table(table, data, out, seeds=(0, 1), start=no_training)
    with pytest.raises(ReproduceError, match=r"training\.epochs 2 → 3"):
        run_table(make_table(cache), data, out, seeds=(2,), epochs=3, start=no_training)


def interrupted(job):
    """Train, then raise an interruption before the run is recorded."""
    train_here(job)
    raise KeyboardInterrupt


def test_other_recipe_is_rejected_for_an_interrupted_run(data, cache, tmp_path):
    table = make_table(cache, selection=False)
    with pytest.raises(Interrupted):
        run_table(table, data, tmp_path, start=interrupted)
    with pytest.raises(ReproduceError, match=r"work/proxy-anchor-seed0 has a different recipe"):
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
def test_damaged_line_is_reported(whole, data, cache, tmp_path, content, message):
    out = copy_of(whole, tmp_path)
    path = out / "small" / RUNS
    lines = path.read_text().splitlines()
    lines[1] = lines[0] if content is None else content
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ReproduceError, match=rf"runs\.jsonl, line 2: .*{message}.*--out"):
        run_table(make_table(cache), data, out, start=no_training)


def test_run_of_unknown_row_is_reported(whole, data, cache, tmp_path):
    out = copy_of(whole, tmp_path)
    rows = table_values(cache)["rows"][:1]
    with pytest.raises(ReproduceError, match=r"runs\.jsonl: mpa-k-2-seed0: unknown row"):
        run_table(make_table(cache, rows=rows, claims=[]), data, out, start=no_training)


def test_failing_runs_are_reported_and_do_not_stop_the_others(data, cache, tmp_path):
    logs = {
        "mpa-k-2-seed0": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB",
        "proxy-anchor-seed1": "Traceback (most recent call last):\n  x\nRuntimeError: a mistake",
    }

    def failing(job):
        if job.run.id not in logs:
            return train_here(job)
        job.log.write_text(logs[job.run.id] + "\n")
        return Ended(1)

    table, lines = make_table(cache, selection=False), []
    with pytest.raises(RunsFailedError) as error:
        run_table(table, data, tmp_path, lines.append, seeds=(0, 1), start=failing)
    message = str(error.value)
    assert "2 of 4 runs failed" in message
    assert "MPA, K = 2, seed 0: not enough memory on cpu" in message
    home = tmp_path / "small"
    log = home / "work" / "proxy-anchor-seed1.log"
    assert f"seed 1: RuntimeError: a mistake (log: {log})" in message
    assert list(read_records(home)) == ["mpa-k-2-seed1", "proxy-anchor-seed0"]
    text = (home / "README.md").read_text()
    assert "Still missing: mpa-k-2-seed0, proxy-anchor-seed1." in text
    assert "ours, last epoch, seed 1 |" in text
    assert "| — | 0 | no seed in common |" in text
    with pytest.raises(RunsFailedError, match=r"2 of 2 runs failed.*results\.json"):
        run_table(table, data, tmp_path, seeds=(0, 1), start=lambda job: Ended(0))
    run_table(table, data, tmp_path, seeds=(0, 1))
    assert len(read_records(home)) == 4
    assert not (home / "work").exists()


@pytest.mark.parametrize(
    ("code", "log", "message"),
    [
        (-9, "", "signal 9.*memory"),
        (-15, "", "signal 15$"),
        (130, "stopped after step 3", "^stopped after step 3$"),
        (1, "one\nno such folder\n\n", "^no such folder$"),
        (1, "", "code 1"),
        (1, "RuntimeError: CUDA error: out of memory", "memory on cpu. Use a smaller --parallel"),
    ],
)
def test_reason_of_a_failed_process(cache, tmp_path, code, log, message):
    run = runner.plan(make_table(cache), ReproduceOptions())[0]
    job = runner.Job(run, tmp_path, "cpu", parallel=2)
    job.log.write_text(log)
    with pytest.raises(ReproduceError, match=message):
        raise runner._failure(job, code)


@pytest.mark.parametrize(
    ("parallel", "variables", "policy"),
    [
        (1, {}, "as it was"),
        (2, {}, "PASSIVE"),
        (2, {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
    ],
)
def test_omp_wait_policy_of_concurrent_runs(
    cache, tmp_path, monkeypatch, parallel, variables, policy
):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    run = runner.plan(make_table(cache), ReproduceOptions())[0]
    job = runner.Job(run, tmp_path, "cpu", parallel)
    monkeypatch.setattr(runner.subprocess, "Popen", lambda words, env, **_: env)
    assert runner.start_process(job).get("OMP_WAIT_POLICY", "as it was") == policy


def test_page_shows_notes_of_the_runs(whole, tmp_path):
    assert "No run of this table is complete." in page(Results(make_table(tmp_path), []))
    out = copy_of(whole, tmp_path)
    note = "Cars196: 16170 of 16185 images, 15 missing: numbers 1, 2"
    edit_run(out / "small", "mpa-k-2-seed0", notes=[note])
    table = make_table("anywhere")
    note = f"6 classes in test/; {note}"
    results = Results.read(table, out / "small")
    assert f"{note} |" in page(results)
    notes = [f"skipped {i}.png: no image" for i in range(9)]
    edit_run(out / "small", "mpa-k-2-seed0", notes=notes)
    text = page(Results.read(table, out / "small"))
    assert "skipped 1.png: no image; and 7 more notes in runs.jsonl |" in text


def test_missing_selection_runs_are_listed(call, whole, tmp_path):
    out = copy_of(whole, tmp_path)
    remove_runs(out / "small", *IDS[4:5])
    path = write_table(tmp_path / "small.yaml", table_values("/elsewhere"))
    call(path, "--out", out, "--render")
    text = (out / "small" / "README.md").read_text()
    assert "Still missing: mpa-k-2-selection." in text
    assert "--seeds 0 1`" in text
    remove_runs(out / "small", IDS[5])
    text = page(Results.read(make_table("anywhere"), out / "small"))
    assert "--seeds 0 1 --no-selection`" in text
    assert "Not complete" not in text


def test_overview_has_main_metrics_or_a_figure_and_links_to_the_page(whole):
    columns = "|  | recall@1 | recall@1, published | map@r |"
    text = overview(Results.read(make_table("anywhere", figure=None), whole[0]), "there")
    assert columns in text
    assert "[All metrics and differences](there/README.md)" in text
    text = overview(Results.read(make_table("anywhere"), whole[0]), "there")
    assert "](there/sweep.svg)" in text
    assert columns not in text


@pytest.mark.parametrize("gone", ["recipe.yaml", "environment.json", "damaged"])
def test_remains_of_a_removed_run_folder_are_ignored(whole, data, cache, tmp_path, gone):
    """Parts of the folders of a recorded and an unrecorded run are left after a kill."""
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


def test_seconds_of_concurrent_runs_are_not_compared(cache, data, tmp_path):
    table = make_table(cache, figure={"kind": "curves"}, selection=False)
    home = run_table(table, data, tmp_path, parallel=9)
    assert [r.parallel for r in read_records(home).values()] == [2, 2]
    text = (home / "README.md").read_text()
    assert "| concurrent runs | 2 |" in text
    assert "neither drawn nor compared: up to 2 runs shared the device." in text
    assert "seconds.svg" not in text
    assert not (home / "seconds.svg").exists()
    assert (home / "epochs.svg").exists()


def test_page_describes_another_number_of_epochs(data, cache, tmp_path):
    rows = table_values(cache)["rows"][:1]
    table = make_table(cache, rows=rows, claims=[], selection=False)
    text = (run_table(table, data, tmp_path, epochs=1) / "README.md").read_text()
    assert "| epochs | 1 of the table's 2 epochs |" in text
    assert "- 1 of the table's 2 epochs: learning-rate drops, frozen epochs" in text
    assert "--seeds 0 --epochs 1`" in text


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
        (["mpa-table4", "--data", "DATA"], "is not CUB-200-2011"),
        (["mpa-table4", "--data", "NUMBERED"], "is not CUB-200-2011"),
        (["TABLE", "--data", "DATA", "--parallel", "0"], "at least 1"),
        (["TABLE", "--data", "DATA", "--epochs", "0"], "at least 1"),
        (["TABLE", "--data", "DATA/train"], "has no images of split"),
        (["TABLE", "--data", "DATA", "--device", "cuda:99"], "there is no device 'cuda:99'"),
        (["TABLE", "--data", "DATA", "--backbone", "resnet5O"], "unknown backbone 'resnet5O'"),
    ],
)
def test_usage_errors(call, data, cache, tmp_path, words, message):
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


def test_out_must_be_writable(call, data, cache, tmp_path):
    table = write_table(tmp_path / "t.yaml", table_values(cache))
    (tmp_path / "file").write_text("")
    words = [table, "--data", data, "--device", "cpu", "--out"]
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "not writable: Not a directory" in call(*words, out, code=2)


@pytest.mark.slow
def test_command_runs_a_custom_table(call, data, cache, tmp_path):
    """The child process gives the same results as training in this process."""
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
