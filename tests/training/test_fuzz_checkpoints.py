"""Randomly damaged run folders resume to the same run or raise an error."""

import random
import shutil

import pytest

from proximetry.training import RunError, RunFolder, train
from proximetry.training.checkpoint import CheckpointError, load_checkpoint
from tests.training.runs import Messages, assert_same_run
from tests.training.tiny import make_recipe

FILES = [
    "checkpoints/last.safetensors",
    "checkpoints/best.safetensors",
    "checkpoints/epoch-0001.safetensors",
    "checkpoints/epoch-0002.safetensors",
    "metrics.jsonl",
    "recipe.yaml",
    "environment.json",
    "embedder/embedder.json",
    "run.lock",
]
CHECKPOINTS = FILES[:4]
OFTEN = [*FILES[:2], "metrics.jsonl"]


@pytest.fixture(scope="module")
def recipe(images, cache):
    changes = {"checkpoint_steps": 2, "keep_checkpoint_every": 1}
    return make_recipe(images, cache, training=changes)


def flip(draw, content):
    """Change one bit."""
    content = bytearray(content)
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


def cut(draw, content):
    return content[: draw.randrange(len(content) + 1)]


def overwrite(draw, content):
    """Zero a block, as after a power failure."""
    start = draw.randrange(len(content) + 1)
    block = content[start : start + draw.choice([1, 512, 4096])]
    return content[:start] + bytes(len(block)) + content[start + len(block) :]


def lines_changed(draw, content):
    """Drop a line, repeat one, or add a number."""
    lines = content.splitlines(keepends=True) or [b"5\n"]
    place = draw.randrange(len(lines))
    lines[place : place + 1] = draw.choice([[], 2 * [lines[place]], [lines[place], b"5\n"]])
    return b"".join(lines)


def damage(draw, out):
    """Damage one or two files."""
    kind = draw.randrange(8)
    there = [name for name in FILES if (out / name).exists()]
    checkpoints = [out / name for name in CHECKPOINTS if name in there]
    if kind == 0:
        (out / draw.choice(there)).unlink()
    elif kind == 1:
        (out / draw.choice(CHECKPOINTS)).write_bytes(draw.choice(checkpoints).read_bytes())
    elif kind == 2:
        one, two = draw.sample(checkpoints, 2)
        contents = one.read_bytes(), two.read_bytes()
        two.write_bytes(contents[0])
        one.write_bytes(contents[1])
    else:
        name = draw.choice([*there, *(name for name in there if name in OFTEN)])
        change = lines_changed if name == "metrics.jsonl" else draw.choice([flip, cut, overwrite])
        (out / name).write_bytes(change(draw, (out / name).read_bytes()))


@pytest.mark.parametrize("seed", range(24))
def test_damaged_run_resumes_or_raises(recipe, whole, interrupted_run, tmp_path, seed):
    draw, out = random.Random(seed), shutil.copytree(interrupted_run, tmp_path / "run")
    for _ in range(draw.choice([1, 1, 2, 3])):
        damage(draw, out)
    messages, message = Messages(), ""
    try:
        results = train(recipe, out, display=messages)
    except (ValueError, OSError) as error:
        message = str(error)
    if message:
        assert str(out) in message
        assert "--fresh" in message or "contains no run" in message
        if "--fresh" in message:
            train(recipe, out, resume=False)
            assert_same_run(whole, out)
        return
    assert_same_run(whole, out, but=["notes"])
    assert set(results["notes"]) <= {*RunFolder(whole).read_results()["notes"], *messages.lines}


@pytest.mark.parametrize("change", [flip, cut, overwrite])
def test_damage_to_checkpoint_or_results_is_detected(whole, tmp_path, change):
    draw, folder = random.Random(0), RunFolder(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    for name, read in (
        ("checkpoints/last.safetensors", lambda: load_checkpoint(folder.last, {})),
        ("results.json", folder.read_results),
    ):
        content = (whole / name).read_bytes()
        for _ in range(100):
            damaged = change(draw, content)
            if damaged != content:
                (tmp_path / name).write_bytes(damaged)
                with pytest.raises((CheckpointError, RunError), match=name):
                    read()
