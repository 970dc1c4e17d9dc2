"""Terminal output of a run: a live display or plain lines."""

import io
import itertools
import re
import signal
import sys
import types

import pytest
import torch
import yaml

from proximetry.training import Recipe, train
from proximetry.training.metrics_table import WITH_DISTRACTORS, describe_protocol, result_rows
from proximetry.training.reporting import (
    Display,
    PlainDisplay,
    RichDisplay,
    describe_epoch,
    make_display,
)
from tests.processes import Process
from tests.training.ranks import TRAIN, Ranks
from tests.training.tiny import tiny_values, with_


def test_plain_display_prints_a_line_per_epoch(recipe, tmp_path, capsys):
    display = make_display()
    assert isinstance(display, PlainDisplay)
    recipe = with_(recipe, "data", cache_dir=str(tmp_path / "cache"))
    train(recipe, tmp_path / "run", device="cpu", display=display)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("images: 12 classes: class00, ")
    assert lines[1].startswith("on the CPU (1 thread): ")
    assert lines[2] == "decoding 48 images into the cache (83 kB)…"
    assert lines[3].startswith("decoded 48 images in ")
    assert lines[4].startswith("untrained  held-out R@1")
    assert lines[5].startswith("epoch   1  loss")
    assert re.search(r"held-out R@1 +\d+\.\d  MAP@R +\d+\.\d  with distractors +\d+\.\d$", lines[5])
    assert len(lines) == 8


def test_plain_display_prints_progress_once_a_minute(capsys, monkeypatch):
    display, now = PlainDisplay(), 1000.0
    monkeypatch.setattr("proximetry.training.reporting.time.monotonic", lambda: now)
    for _ in range(2):  # training and evaluation images, two minutes each
        for number in range(121):
            display.progress("decoding", 10 * number, 1200)
            now += 1
    display.progress("checking", 1, 2)
    assert capsys.readouterr().out.splitlines() == ["decoding: 600 of 1 200, about 60 s left"] * 2


# Decodes once a file exists.
WAITING_RUN = """
import sys, time
from pathlib import Path
from proximetry.data import pixel_cache
parallel_map = pixel_cache.parallel_map
def hold(*arguments, **options):
    while not Path(sys.argv[3]).exists():
        time.sleep(0.01)
    return parallel_map(*arguments, **options)
pixel_cache.parallel_map = hold
"""


def test_concurrent_runs_build_one_cache(images, server, tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(tiny_values(tmp_path / "cache", data={"root": str(images)}))
    )
    gate, waits = tmp_path / "open", "waiting for another process that decodes the images…"
    started = []

    def begin(name, ranks=0):
        home = tmp_path / name
        home.mkdir()
        words = WAITING_RUN + TRAIN, tmp_path / "recipe.yaml", home / "run", gate
        (home / "rank0.log").touch()
        if ranks:
            started.append(Ranks(server, home, *words, size=ranks))
        else:
            started.append(Process(server, home / "rank0.log", *words))
        return started[-1], home / "rank0.log"

    try:
        first, first_log = begin("first")
        first.until(lambda: "decoding" in first_log.read_text())
        several, several_log = begin("several", ranks=2)
        several.until(lambda: waits in several_log.read_text())
        stopped, stopped_log = begin("stopped")
        stopped.until(lambda: waits in stopped_log.read_text())
        stopped.send(signal.SIGINT)
        assert stopped.ended() == 130
        assert stopped_log.read_text().splitlines()[-2:] == [waits, "proximetry: stopped"]
        gate.touch()
        assert [first.ended(), *several.ended()] == [0, 0, 0]
    finally:
        for processes in started:
            processes.kill()
    assert re.findall("decod.*images|wait.*", first_log.read_text()) == [
        "decoding 48 images",
        "decoded 48 images",
    ]
    assert re.findall("decod.*|wait.*", several_log.read_text()) == [waits]


def test_display_without_recall_at_1(recipe, tmp_path, capsys):
    chosen = {"metrics": {"recall_at": [2, 4]}, "select_by": "recall@2"}
    recipe = recipe.override({"training.epochs": 1, "evaluation": chosen})
    results = train(recipe, tmp_path / "run", device="cpu", display=PlainDisplay())
    assert re.search(r"epoch   1 .*held-out R@2 +\d+\.\d  MAP@R", capsys.readouterr().out)
    assert "recall@1" not in results["selected"]["held_out"]


def test_rate_that_was_not_measured_is_not_shown():
    line = {"epoch": 1, "loss": 2.0}
    for rate, shown in ((None, False), (0.0, False), (0.04, False), (0.3, True), (900.0, True)):
        assert ("img/s" in describe_epoch({**line, "images_per_second": rate})) == shown, rate


def test_untrained_is_the_first_row_of_the_table():
    scores = {"recall@1": 0.5}
    results = {
        "protocol": "held_out",
        "untrained": {"epoch": 0, "held_out": scores, "test": scores},
        "last": {"epoch": 3, "held_out": scores, "test": scores},
        "selected": {"epoch": 2, "held_out": scores},
    }
    assert list(result_rows(results)) == [
        "untrained, held-out",
        "untrained, test",
        "last epoch (3), held-out",
        "last epoch (3), test",
        "selected epoch (2), held-out",
    ]


@pytest.mark.parametrize(
    ("protocol", "row"),
    [("held_out", "selected epoch (3), test"), ("last", "last epoch (3), test")],
)
def test_last_and_selected_epoch_has_one_row(protocol, row):
    part = {"epoch": 3, "test": {"recall@1": 0.5}}
    assert list(result_rows({"protocol": protocol, "last": part, "selected": part})) == [row]


@pytest.mark.parametrize(
    ("protocol", "select_by", "more", "words"),
    [
        (
            "held_out",
            "map@r",
            {},
            f"epoch 3 is saved, selected by held-out MAP@R {WITH_DISTRACTORS}, not by the test set",
        ),
        ("held_out", "nmi", {}, "3 is saved, selected by held-out nmi, not by the test set"),
        ("held_out", "nmi", {"first_stage": {"epoch": 3}}, "the second stage"),
        ("last", "map@r", {}, "the last epoch (3) is saved; no epoch was selected"),
        ("paper", "map@r", {}, "selected by test MAP@R"),
    ],
)
def test_describe_protocol(protocol, select_by, more, words):
    results = {"protocol": protocol, "selected": {"epoch": 3}, **more}
    text = describe_protocol(results, select_by)
    assert text.startswith(f"protocol {protocol}: ")
    assert words in text


def test_rich_display_on_a_terminal(recipe, tmp_path, monkeypatch):
    from rich.console import Console

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    display = make_display()
    assert isinstance(display, RichDisplay)
    screen = io.StringIO()
    display._progress.live.console = Console(file=screen, force_terminal=True, width=100)
    train(
        with_(recipe, "data", cache_dir=str(tmp_path / "cache")), tmp_path / "run", display=display
    )
    shown = screen.getvalue()
    assert "48 of 48" in shown, "images decoded"
    assert "epoch   3" in shown
    assert "img/s" in shown


def test_progress_bar_keeps_the_last_loss_of_a_gpu(monkeypatch):
    display = RichDisplay(io.StringIO())
    data = types.SimpleNamespace(sampler=range(100), rows={"train": range(200)})
    state = types.SimpleNamespace(step=0, epoch=0)
    run = types.SimpleNamespace(recipe=Recipe(), data=data, state=state)
    gpu, clock, reads = torch.device("cuda"), itertools.count(1), []

    def loss(value):
        return types.SimpleNamespace(device=gpu, item=lambda: reads.append(value) or value)

    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with display:
        display.on_start(run)
        for state.step in range(1, 50):
            display.on_step_end(run, loss(float(state.step)))
            (task,) = display._progress.tasks
            assert f"loss {reads[-1]:.3f}" in task.fields["figures"]
    assert reads == [1, 21, 41]  # reading it waits for the GPU


def test_train_prints_nothing_without_display(recipe, tmp_path, capsys):
    assert type(Display()) is Display
    train(with_(recipe, "training", epochs=1), tmp_path / "run")
    printed = capsys.readouterr()
    assert printed.out == ""
