"""Kill runs, and compare two bit for bit."""

import pytest
import torch
from safetensors.torch import load_file

from proximetry.training import Callback, RunFolder, train
from proximetry.training.checkpoint import load_checkpoint
from proximetry.training.reporting import PlainDisplay
from proximetry.training.run import TrainState


def tensors(folder, name="last"):
    return load_file(folder / "checkpoints" / f"{name}.safetensors")


def state_of(checkpoint):
    return load_checkpoint(checkpoint, {})


def assert_same_run(one, two, but=()):
    """Compare everything except timings and the keys `but` of the results."""
    first, second = tensors(one), tensors(two)
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key
    drop = ("images_per_second", "seconds", "evaluation_seconds")
    lines = [
        [{k: v for k, v in line.items() if k not in drop} for line in RunFolder(f).history()]
        for f in (one, two)
    ]
    assert lines[0] == lines[1]
    # The name of the weights file contains its checksum.
    weights = [[path.name for path in f.glob("embedder/embedder-*")] for f in (one, two)]
    assert weights[0] == weights[1]
    timings = ("seconds", "startup_seconds")
    results = [
        {k: v for k, v in RunFolder(f).read_results().items() if k not in (*timings, *but)}
        for f in (one, two)
    ]
    assert results[0] == results[1]


class OnStep(Callback):
    """Runs an action after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, run, loss):
        if run.state.step == self.step:
            self.action()


def fail(error):
    raise error


def killed_at(step, recipe, folder, callbacks=(), **options):
    """Train up to a step and raise."""
    kill = OnStep(step, lambda: fail(SystemError("killed")))
    with pytest.raises(SystemError):
        train(recipe, folder, callbacks=[*callbacks, kill], **options)


def set_selection_values(monkeypatch, values):
    """Set the values of the selection metric, epoch by epoch."""
    observe = TrainState.observe
    monkeypatch.setattr(
        TrainState, "observe", lambda state, _: observe(state, values[state.epoch - 1])
    )


class Messages(PlainDisplay):
    """Stores the messages of a run."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def message(self, text):
        self.lines.append(text)
