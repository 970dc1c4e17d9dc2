"""Training without a pixel cache has the same batches and results."""

import multiprocessing
import os
import shutil
import signal
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proximetry.data import ImageError, loader
from proximetry.data.loader import Pixels
from proximetry.training import Callback, RunError, RunFolder, train
from proximetry.training.distributed import World
from tests.training.runs import Messages, assert_same_run, killed_at
from tests.training.test_data import make_data, stand_in_for_streams
from tests.training.tiny import make_recipe, with_


@pytest.fixture
def workers(monkeypatch):
    """Use two workers even for few images; return the started ones."""
    monkeypatch.setattr(loader, "MIN_IMAGES", 4)
    monkeypatch.setattr(loader, "cores", lambda: 2)
    started = set()
    start = loader._Workers.__init__

    def note(self, *arguments):
        start(self, *arguments)
        started.update(self._processes)

    monkeypatch.setattr(loader._Workers, "__init__", note)
    return started


def assert_equal(batches, others):
    for (pixels, labels), (again, same) in zip(batches, others, strict=True):
        assert torch.equal(pixels, again)
        assert torch.equal(labels, same)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data": {"short_side": 30, "color_jitter": 0.3}},
        {"model.squash": True, "data.crop_ratio": [0.5, 3.0]},
        {"model.squash": True, "data.random_crop": False, "data.short_side": None},
    ],
    ids=str,
)
def test_batches_and_views_are_those_of_the_pixel_cache(recipe, workers, changes):
    recipe = recipe.override(changes)
    cached, decoded = make_data(recipe), make_data(with_(recipe, "data", cache="none"))
    for epoch, start in ((0, 0), (1, 2)):
        assert_equal(decoded.batches(epoch, start), cached.batches(epoch, start))
    rows = np.flip(cached.rows["train"])
    assert torch.equal(torch.cat([*decoded.views(rows, 5)]), torch.cat([*cached.views(rows, 5)]))
    assert workers


def test_ranks_decode_only_their_part(recipe, monkeypatch):
    batch_sizes = set()
    batches = loader.ImageLoader.batches

    def note(self, rows):
        return batches(self, (batch_sizes.add(len(batch)) or batch for batch in rows))

    monkeypatch.setattr(loader.ImageLoader, "batches", note)
    whole = [pixels for pixels, _ in make_data(recipe).batches(0, 0)]
    monkeypatch.setattr("proximetry.training.distributed.World.on_main", lambda self, task: task())
    none = with_(recipe, "data", cache="none")
    parts = [make_data(none, rank=rank, size=2) for rank in (0, 1)]
    shared = zip(*(part.batches(0, 0) for part in parts), strict=True)
    assert all(
        torch.equal(torch.cat([a[0], b[0]]), pixels)
        for (a, b), pixels in zip(shared, whole, strict=True)
    )
    assert batch_sizes == {recipe.data.batch_size // 2}


@pytest.fixture(scope="module")
def cached_run(images, cache, tmp_path_factory):
    """The reference run, from the pixel cache."""
    recipe = make_recipe(images, cache, data={"cache": "pixels"})
    out = tmp_path_factory.mktemp("cached") / "run"
    train(recipe, out)
    return recipe, out


def test_run_without_cache_has_the_same_results(cached_run, workers, tmp_path):
    recipe, out = cached_run
    changes = {"cache": "none", "cache_dir": str(tmp_path / "cache")}
    train(with_(recipe, "data", **changes), tmp_path / "run")
    assert_same_run(tmp_path / "run", out)
    assert not [file for file in tmp_path.rglob("pixels.bin") if file.stat().st_size]
    assert workers


def test_run_resumes_in_another_cache_mode(cached_run, tmp_path):
    recipe, out = cached_run
    recipe = with_(recipe, "training", checkpoint_steps=1)
    for begun, resumed in (("none", "pixels"), ("pixels", "none")):
        killed_at(6, with_(recipe, "data", cache=begun), tmp_path / begun)
        train(with_(recipe, "data", cache=resumed), tmp_path / begun)
        assert_same_run(tmp_path / begun, out)


def test_run_whose_worker_is_killed_continues_in_threads(
    cached_run, workers, tmp_path, monkeypatch
):
    recipe, out = cached_run
    decode, armed = loader.decode, tmp_path / "armed"

    def die(*arguments, **options):
        if armed.exists():
            armed.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return decode(*arguments, **options)

    class ArmAfterFirstEpoch(Callback):
        def on_epoch_end(self, run, line):
            if line["epoch"] == 1:
                armed.touch()

    monkeypatch.setattr(loader, "decode", die)
    none = with_(recipe, "data", cache="none")
    with pytest.warns(UserWarning, match="continues in threads"):
        train(none, tmp_path / "run", callbacks=[ArmAfterFirstEpoch()])
    assert not armed.exists()
    assert_same_run(tmp_path / "run", out)


def test_workers_end_with_the_batches(recipe, workers):
    data = make_data(with_(recipe, "data", cache="none"))
    batches = data.batches(0, 0)
    next(batches)
    assert workers
    batches.close()
    assert not multiprocessing.active_children()


def test_images_of_any_shape_fit(recipe, workers, tmp_path):
    for number, size in enumerate([(24, 24), (300, 24), (24, 310), (90, 31)] * 6):
        folder = tmp_path / "images" / f"class{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    changes = {"root": str(tmp_path / "images"), "cache_dir": str(tmp_path / "cache")}
    recipe = with_(recipe, "data", **changes)
    cached, decoded = make_data(recipe), make_data(with_(recipe, "data", cache="none"))
    assert_equal(decoded.batches(0, 0), cached.batches(0, 0))


def test_batches_of_a_gpu_are_the_same(recipe, workers, monkeypatch):
    data = make_data(with_(recipe, "data", cache="none"))
    expected = list(data.batches(0, 0))
    stand_in_for_streams(monkeypatch)
    monkeypatch.setattr(Pixels, "send", lambda self, _: Pixels(self.flat.clone(), self.index))
    monkeypatch.setattr(data, "world", World(device=torch.device("meta")))
    monkeypatch.setattr(data, "_send", lambda labels: labels)
    for number, (pixels, _) in enumerate(data.batches(0, 0)):
        assert torch.equal(pixels, expected[number][0])
        if number == 1:
            break
    assert_equal(data.batches(0, 0), expected)


@pytest.fixture
def shards(images, tmp_path):
    """The images in tar files."""
    files = sorted(images.rglob("*.png"))
    (tmp_path / "shards").mkdir()
    for number in range(3):
        with tarfile.open(tmp_path / "shards" / f"{number}.tar", "w") as tar:
            for file in files[number::3]:
                tar.add(file, file.relative_to(images).as_posix())
    return tmp_path / "shards"


def test_shards_are_streamed_and_resumed(recipe, shards, workers, tmp_path):
    data = {"dataset": "shards", "root": str(shards), "sampler": "streamed", "shuffle_buffer": 20}
    recipe = recipe.override({"data": data, "training.checkpoint_steps": 1})
    train(with_(recipe, "data", cache="pixels"), tmp_path / "whole")
    recipe = with_(recipe, "data", cache="none")
    killed_at(6, recipe, tmp_path / "run")
    train(recipe, tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert workers


class TestBroken:
    """Unreadable images, detected before or during training."""

    @pytest.fixture
    def own(self, recipe, images, tmp_path):
        """A recipe without a cache for a copy of the images."""
        shutil.copytree(images, tmp_path / "images")
        changes = {"root": str(tmp_path / "images"), "cache_dir": str(tmp_path / "cache")}
        return recipe.override({"data": changes | {"cache": "none"}, "evaluation.held_out": 0.25})

    def cut(self, data, number, keep):
        """Truncate a training image of the first epoch; return its path."""
        row = data.rows["train"][data.sampler.batch(0, number)[0]]
        file = Path(data.catalog.file(row))
        whole = file.read_bytes()
        file.write_bytes(whole[:keep])
        return file, whole

    def test_headers_are_checked_first(self, own, workers, tmp_path):
        file, _ = self.cut(make_data(own), 0, 20)
        with pytest.raises(ImageError, match=rf"1 of 48 images .*{file.name}.*--data\.bad-images"):
            train(own, tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_damaged_image_stops_the_run_which_resumes_when_fixed(self, own, tmp_path):
        # Evaluation reads training images too. A GPU reads one batch ahead.
        own = own.override({"evaluation": {"protocol": "last", "untrained": False}})
        train(own, tmp_path / "whole", device="cpu")
        file, whole = self.cut(make_data(own), 2, 300)
        message = rf"{file.name}: damaged.*after step 2"
        with pytest.raises(RunError, match=message):
            train(own, tmp_path / "run", device="cpu")
        assert RunFolder(tmp_path / "run").inspect().checkpoint["state"]["step"] == 2
        file.write_bytes(whole)
        messages = Messages()
        train(own, tmp_path / "run", device="cpu", display=messages)
        assert "resuming after step 2 (epoch 0)" in messages.lines
        assert_same_run(tmp_path / "run", tmp_path / "whole")

    def test_damaged_image_in_evaluation_is_reported(self, own, tmp_path):
        self.cut(make_data(own), 2, 300)
        with pytest.raises(RunError, match=r"damaged.*--data.bad-images skip"):
            train(own, tmp_path / "run")

    def test_skipped_images_are_those_of_the_cache(self, own, workers, tmp_path):
        data = make_data(own)
        bad = [self.cut(data, number, keep)[0] for number, keep in ((0, 0), (1, 20), (2, 300))]
        own = with_(own, "data", bad_images="skip")
        for place in ("none", "pixels"):
            results = train(with_(own, "data", cache=place), tmp_path / place)
            for file in bad:
                assert any(f"{file.parent.name}/{file.name}: " in note for note in results["notes"])
        assert_same_run(tmp_path / "none", tmp_path / "pixels")
        workers.clear()
        make_data(own)  # unreadable images are cached
        assert not workers


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_batches_are_the_same_wherever_pixels_come_from(recipe, workers):
    places = ("gpu", "pixels", "none")
    gpu, *others = (make_data(with_(recipe, "data", cache=place), "cuda") for place in places)
    rows = gpu.rows["train"][:11]
    for other in others:
        for epoch in (0, 1):
            assert_equal(other.batches(epoch, 0), gpu.batches(epoch, 0))
        views = [torch.cat([*data.views(rows, 4)]) for data in (gpu, other)]
        assert torch.equal(*views)
