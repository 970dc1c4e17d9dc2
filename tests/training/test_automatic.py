"""Resolve `auto` for any device; a resumed run keeps its choices."""

from dataclasses import replace

import pytest

from proximetry.recipe import auto as module
from proximetry.recipe.auto import DeviceInfo, StorageInfo, choose
from proximetry.training import Recipe, RunError, train
from proximetry.training.reporting import PlainDisplay
from tests.training.runs import killed_at
from tests.training.tiny import with_

H200 = DeviceInfo("NVIDIA H200", True, capability=(9, 0), free=140 * 10**9, triton=True)
CPU = DeviceInfo("the CPU (2 threads)")
FIXED = {"data.cache": "pixels", "training.precision": "float32", "training.cuda_graph": False}
FORCED = {"data.cache": "gpu", "training.precision": "float16", "training.cuda_graph": True}
GB = 10**9


def roomy(pixels):
    """Return sizes of a pixel cache with at most 20 GB missing, on a machine with enough memory."""
    return StorageInfo(int(pixels), min(int(pixels), 20 * GB), disk=1000 * GB, memory=500 * GB)


@pytest.mark.parametrize(
    ("device", "values", "pixels", "chosen", "note"),
    [
        (H200, {}, 4.1, ("gpu", "bfloat16", True), "GPU (4.1 GB), bfloat16, CUDA graph"),
        (H200, {}, 60, ("pixels", "bfloat16", True), "(60.0 GB exceed the GPU"),
        (replace(H200, capability=(7, 5)), {}, 1, ("gpu", "float32", True), "has no bfloat16"),
        (replace(H200, processes=2), {}, 1, ("gpu", "bfloat16", False), "(2 processes)"),
        (H200, {"training.accumulate": 4}, 1, ("gpu", "bfloat16", False), "accumulate 4"),
        (replace(H200, triton=False), {}, 1, ("gpu", "bfloat16", False), "(Triton"),
        (H200, FIXED, 1, ("pixels", "float32", False), "disk, float32, no CUDA graph"),
        (replace(H200, processes=2, free=0), FORCED, 1, ("gpu", "float16", True), "(2 processes)"),
        (CPU, {}, 1, ("pixels", "float32", False), "pixels from disk, float32"),
        (CPU, {"training.precision": "bfloat16"}, 1, ("pixels", "bfloat16", False), "bfloat16"),
    ],
)
def test_choices_depend_on_the_device(device, values, pixels, chosen, note):
    storage = roomy(pixels * GB)
    recipe, (line,) = choose(Recipe.load(values), device, images=1000, storage=storage)
    assert (recipe.data.cache, recipe.training.precision, recipe.training.cuda_graph) == chosen
    assert note in line


@pytest.mark.parametrize(
    ("device", "sizes", "chosen", "note"),
    [
        (H200, (9, 9, 40, 500), "none", "limit of 8.0 GB; --data.cache pixels"),
        (H200, (21, 21, 1000, 500), "none", "limit of 20.0 GB"),
        (H200, (30, 0, 40, 500), "gpu", "(30.0 GB)"),
        (H200, (257, 20, 1000, 200), "none", "257.0 GB of pixels exceed the memory"),
        (CPU, (20, 20, 100, 22), "none", "20.0 GB of pixels exceed the memory"),
        (CPU, (20, 0, 100, 22), "pixels", "pixels from disk"),
    ],
)
def test_images_are_decoded_on_the_fly_if_pixels_do_not_fit(device, sizes, chosen, note):
    storage = StorageInfo(*(size * GB for size in sizes))
    recipe, lines = choose(Recipe(), device, images=1000, storage=storage)
    assert recipe.data.cache == chosen
    assert note in lines[0]


@pytest.mark.parametrize(
    ("device", "images", "epochs", "every"),
    [
        (CPU, 10, 100, 34),
        (CPU, 3000, 12, 4),
        (H200, 180, 50, 17),  # two steps each
        (H200, 3000, 30, 10),
        (H200, 10**6, 10, 4),
        (H200, 10**8, 5, 2),
    ],
)
def test_epochs_depend_on_the_device_and_the_number_of_images(device, images, epochs, every):
    recipe = Recipe.load(
        {"data.batch_size": 90, "training.epochs": "auto", "schedule.every": "auto"}
    )
    recipe, lines = choose(recipe, device, images=images, storage=roomy(1))
    assert (recipe.training.epochs, recipe.schedule.every) == (epochs, every)
    assert lines[1].startswith(f"{epochs} epochs, by the number of training images (")


@pytest.mark.parametrize(
    ("device", "images", "epochs", "evaluation", "checkpoint"),
    [
        (CPU, 2240, 12, 1, 1),
        (H200, 2240, 30, 3, 9),
        (H200, 2240, 5, 1, 9),
        (H200, 60, 100, 10, 334),
        (H200, 10**6, 30, 3, 1),
    ],
)
def test_evaluation_and_checkpoint_intervals_depend_on_sizes_only(
    device, images, epochs, evaluation, checkpoint
):
    recipe = Recipe.load({"training.epochs": epochs, "evaluation.every": "auto"})
    recipe, _ = choose(recipe, device, images=images, storage=roomy(1))
    assert recipe.evaluation.every == evaluation
    assert recipe.training.checkpoint_epochs == checkpoint


def test_run_records_and_prints_its_choices(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "EPOCHS_ON_CPU", 2)
    monkeypatch.setattr(module, "MIN_STEPS", 1)
    recipe = with_(recipe, "training", epochs="auto")
    results = train(recipe, tmp_path / "run", device="cpu", display=PlainDisplay())
    out = capsys.readouterr().out
    assert "pixels from disk, float32" in out
    assert "2 epochs, by the number of training images (36)" in out
    assert results["epochs"] == 2
    recorded = Recipe.load(tmp_path / "run" / "recipe.yaml")
    assert "auto" not in (recorded.data.cache, *recorded.training.model_dump().values())


def test_resumed_run_keeps_its_choices(recipe, tmp_path):
    started = recipe.override(
        {"training.precision": "bfloat16", "data.cache": "pixels", "evaluation.every": 2}
    )
    train(started, tmp_path / "whole", device="cpu")
    killed_at(5, started, tmp_path / "cut")
    recipe = with_(recipe, "evaluation", every="auto")  # kept like the precision
    train(recipe, tmp_path / "cut", device="cpu")
    weights = [
        next((tmp_path / name / "embedder").glob("*.safetensors")) for name in ("whole", "cut")
    ]
    assert weights[0].name == weights[1].name, "the name holds the checksum"
    with pytest.raises(RunError, match=r"training\.precision 'bfloat16' → 'float32'"):
        train(with_(recipe, "training", precision="float32"), tmp_path / "cut")
