"""What `auto` becomes on devices that are not here, and that a run keeps what was chosen."""

from dataclasses import replace

import pytest

from proximetry.recipe import auto as module
from proximetry.recipe.auto import DeviceFacts, StorageFacts, choose
from proximetry.training import Recipe, RunError, train
from proximetry.training.reporting import PlainDisplay
from tests.training.runs import killed_at
from tests.training.tiny import with_

H200 = DeviceFacts("NVIDIA H200", True, capability=(9, 0), free=140 * 10**9, triton=True)
CPU = DeviceFacts("the CPU (2 threads)")
FAST = ("gpu", "bfloat16", True)
GB = 10**9


def roomy(pixels):
    """Pixels of which at most 20 GB are missing, on a machine that has room for them."""
    return StorageFacts(int(pixels), min(int(pixels), 20 * GB), disk=1000 * GB, memory=500 * GB)


@pytest.mark.parametrize(
    ("device", "asked", "pixels", "chosen", "line"),
    [
        (H200, {}, 4.1 * GB, FAST, "pixels on the GPU (4.1 GB), bfloat16, CUDA graph"),
        (
            H200,
            {},
            60 * GB,
            ("pixels", "bfloat16", True),
            "pixels from disk (60.0 GB exceed the GPU's free memory of 140.0 GB), "
            "bfloat16, CUDA graph",
        ),
        (
            replace(H200, capability=(7, 5)),
            {},
            GB,
            ("gpu", "float32", True),
            "pixels on the GPU (1.0 GB), float32 (this GPU has no bfloat16), CUDA graph",
        ),
        (
            replace(H200, processes=2),
            {},
            GB,
            ("gpu", "bfloat16", False),
            "pixels on the GPU (1.0 GB), bfloat16, no CUDA graph (2 processes)",
        ),
        (
            H200,
            {"training.accumulate": 4},
            GB,
            ("gpu", "bfloat16", False),
            "pixels on the GPU (1.0 GB), bfloat16, no CUDA graph (training.accumulate 4)",
        ),
        (
            replace(H200, triton=False),
            {},
            GB,
            ("gpu", "bfloat16", False),
            "pixels on the GPU (1.0 GB), bfloat16, no CUDA graph (Triton is not installed)",
        ),
        (
            H200,
            {"data.cache": "pixels", "training.precision": "float32", "training.cuda_graph": False},
            GB,
            ("pixels", "float32", False),
            "pixels from disk, float32, no CUDA graph",
        ),
        (
            replace(H200, processes=2, free=0),
            {"data.cache": "gpu", "training.precision": "float16", "training.cuda_graph": True},
            GB,
            ("gpu", "float16", True),
            "pixels on the GPU, float16, no CUDA graph (2 processes)",
        ),
        (CPU, {}, GB, ("pixels", "float32", False), "pixels from disk, float32"),
        (
            CPU,
            {"training.precision": "bfloat16"},
            GB,
            ("pixels", "bfloat16", False),
            "pixels from disk, bfloat16",
        ),
    ],
)
def test_the_fastest_way_that_a_device_has(device, asked, pixels, chosen, line):
    recipe, lines = choose(Recipe.load(asked), device, images=1000, storage=roomy(pixels))
    assert (recipe.data.cache, recipe.training.precision, recipe.training.cuda_graph) == chosen
    assert lines == [f"on {device.name}: {line}"]


@pytest.mark.parametrize(
    ("device", "storage", "chosen", "line"),
    [
        (
            H200,
            StorageFacts(9 * GB, 9 * GB, disk=40 * GB, memory=500 * GB),
            "none",
            "images decoded on the fly (a pixel cache of 9.0 GB exceeds the limit of 8.0 GB; "
            "--data.cache pixels writes it)",
        ),
        (
            H200,
            StorageFacts(21 * GB, 21 * GB, disk=1000 * GB, memory=500 * GB),
            "none",
            "images decoded on the fly (a pixel cache of 21.0 GB exceeds the limit of 20.0 GB; "
            "--data.cache pixels writes it)",
        ),
        (H200, StorageFacts(30 * GB, 0, 40 * GB, 500 * GB), "gpu", "pixels on the GPU (30.0 GB)"),
        (
            H200,
            StorageFacts(257 * GB, 20 * GB, disk=1000 * GB, memory=200 * GB),
            "none",
            "images decoded on the fly (257.0 GB of pixels exceed the memory)",
        ),
        (
            CPU,
            StorageFacts(20 * GB, 20 * GB, disk=100 * GB, memory=22 * GB),
            "none",
            "images decoded on the fly (20.0 GB of pixels exceed the memory)",
        ),
        (CPU, StorageFacts(20 * GB, 0, 100 * GB, 22 * GB), "pixels", "pixels from disk"),
    ],
)
def test_images_are_decoded_on_the_fly_where_pixels_do_not_fit(device, storage, chosen, line):
    recipe, lines = choose(Recipe(), device, images=1000, storage=storage)
    assert recipe.data.cache == chosen
    assert lines[0].startswith(f"on {device.name}: {line}, ")


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
def test_epochs_go_by_the_device_and_the_number_of_images(device, images, epochs, every):
    asked = Recipe.load(
        {"data.batch_size": 90, "training.epochs": "auto", "schedule.every": "auto"}
    )
    recipe, lines = choose(asked, device, images=images, storage=roomy(1))
    assert (recipe.training.epochs, recipe.schedule.every) == (epochs, every)
    assert lines[1].startswith(f"{epochs} epochs, by the number of training images (")


def test_a_run_records_what_was_chosen_and_says_so(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "EPOCHS_ON_CPU", 2)
    monkeypatch.setattr(module, "LEAST_STEPS", 1)
    recipe = with_(recipe, "training", epochs="auto")
    results = train(recipe, tmp_path / "run", device="cpu", display=PlainDisplay())
    out = capsys.readouterr().out
    assert "pixels from disk, float32" in out
    assert "2 epochs, by the number of training images (36)" in out
    assert results["epochs"] == 2
    recorded = Recipe.load(tmp_path / "run" / "recipe.yaml")
    assert "auto" not in (recorded.data.cache, *recorded.training.model_dump().values())


def test_a_continued_run_keeps_what_it_was_begun_with(recipe, tmp_path):
    begun = recipe.override({"training.precision": "bfloat16", "data.cache": "pixels"})
    train(begun, tmp_path / "whole", device="cpu")
    killed_at(5, begun, tmp_path / "cut")
    train(recipe, tmp_path / "cut", device="cpu")  # which leaves the precision to auto
    weights = [
        next((tmp_path / name / "embedder").glob("*.safetensors")) for name in ("whole", "cut")
    ]
    assert weights[0].name == weights[1].name, "the name holds the checksum"
    with pytest.raises(RunError, match=r"training\.precision 'bfloat16' → 'float32'"):
        train(with_(recipe, "training", precision="float32"), tmp_path / "cut")


def test_a_run_may_go_on_from_another_place_of_the_pixels(recipe, tmp_path):
    killed_at(5, with_(recipe, "data", cache="pixels"), tmp_path / "run")
    assert train(with_(recipe, "data", cache="none"), tmp_path / "run")["epochs"] == 3
