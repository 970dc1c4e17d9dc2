import gc
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from proximetry.data import RandomResizedCrop
from proximetry.models import Embedder
from proximetry.training import RecipeError, RunError
from proximetry.training.distributed import World
from proximetry.training.reporting import Display
from proximetry.training.sources.image_data import ImageData
from proximetry.training.sources.training_data import (
    add_label_noise,
    cache_sizes,
    limit_per_class,
    make_sampler,
    open_catalog,
)
from tests.training.tiny import with_


def preprocessing_of(recipe):
    m = recipe.model
    return Embedder.create(
        m.backbone,
        m.dim,
        weights="none",
        image_size=m.image_size,
        resize=m.resize,
        squash=m.squash,
    ).preprocessing


def make_data(recipe, device="cpu", **world):
    here = World(device=torch.device(device), **world)
    data = ImageData(recipe, preprocessing_of(recipe), here, Display(), open_catalog(recipe))
    data.open_cache("pixels" if recipe.data.cache == "auto" else recipe.data.cache)
    return data


@pytest.fixture
def makers(monkeypatch):
    """The thread that cropped each batch."""
    made = []
    apply = RandomResizedCrop.apply

    def note(self, pixels, rows, windows):
        made.append(threading.current_thread())
        return apply(self, pixels, rows, windows)

    monkeypatch.setattr(RandomResizedCrop, "apply", note)
    return made


def test_cpu_crops_are_made_in_a_thread_and_depend_on_the_batch_number(recipe, makers):
    data = make_data(recipe)
    batches = list(data.batches(0, 0))
    assert len(batches) == len(data.sampler) > 1
    assert threading.main_thread() not in makers
    # A batch depends on its number only: starting later gives the same ones.
    for (pixels, labels), (again, same) in zip(batches[1:], data.batches(0, 1), strict=True):
        assert torch.equal(pixels, again)
        assert torch.equal(labels, same)


def stand_in_for_streams(monkeypatch):
    """Run the work of a stream immediately."""
    nothing = SimpleNamespace(
        record=lambda: None,
        synchronize=lambda: None,
        wait_event=lambda event: None,
        wait_stream=lambda stream: None,
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: nothing)
    monkeypatch.setattr(torch.cuda, "Event", lambda: nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: nothing)


def test_gpu_crops_are_made_one_batch_ahead_in_the_main_thread(recipe, makers, monkeypatch):
    data = make_data(recipe)
    expected = list(data.batches(0, 0))
    makers.clear()

    class Far:
        """Pixels that report another device."""

        device = torch.device("meta")
        is_cuda = True

    near = data._source
    far = type(near)(near.catalog, near.flat, near.index)
    monkeypatch.setattr(far, "flat", Far())
    apply = RandomResizedCrop.apply
    monkeypatch.setattr(
        RandomResizedCrop, "apply", lambda self, _, rows, windows: apply(self, near, rows, windows)
    )
    data._source = far
    monkeypatch.setattr(data, "world", World(device=torch.device("meta")))
    monkeypatch.setattr(data, "_send", lambda labels: labels)
    stand_in_for_streams(monkeypatch)
    got, begun = [], []
    for batch in data.batches(0, 0):
        got.append(batch)
        begun.append(len(makers))
    assert set(makers) == {threading.main_thread()}
    # The next batch is started before this one is returned.
    assert begun == [*range(2, len(got) + 1), len(got)]
    for (pixels, labels), (again, same) in zip(expected, got, strict=True):
        assert torch.equal(pixels, again)
        assert torch.equal(labels, same)


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("short_side", [24, 20, 40, None])
def test_evaluation_views_equal_preprocessed_files(recipe, short_side, squash):
    changes = {"data.short_side": short_side, "model.resize": 32, "model.squash": squash}
    recipe = recipe.override(changes)
    data = make_data(recipe)
    rows = data.rows["held_out"]
    views = torch.cat(list(data.views(rows, 5)))
    for row, view in zip(rows, views, strict=True):
        assert torch.equal(view, preprocessing_of(recipe).pixels(data.catalog.file(row)))


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, (32, 32)),
        ({"model.squash": True}, (32, (32, 32))),
        ({"model.squash": True, "data.short_side": 40}, (40, (32, 32))),
        ({"model.squash": True, "data.random_crop": False}, ((32, 32), (32, 32))),
        (
            {"model.squash": True, "data.random_crop": False, "data.short_side": 40},
            ((40, 40), (32, 32)),
        ),
        ({"model.freeze_backbone": True, "data.short_side": 40}, (32, 32)),
        ({"model.freeze_backbone": True, "model.squash": True}, ((32, 32), (32, 32))),
    ],
    ids=str,
)
def test_cache_sizes(recipe, changes, sizes):
    recipe = recipe.override({"data.short_side": None, "model.resize": 32, **changes})
    assert cache_sizes(recipe, preprocessing_of(recipe)) == sizes


@pytest.mark.parametrize("sampler", ["shuffled", "streamed", "balanced"])
def test_batch_larger_than_the_training_set_is_noted(recipe, sampler):
    recipe = with_(recipe, "data", sampler=sampler, batch_size=36, images_per_class=4)
    data = make_data(recipe)
    assert (len(data.rows["train"]), data.notes[1:]) == (36, [])
    recipe = with_(recipe, "data", batch_size=45, images_per_class=5)
    data = make_data(recipe)
    assert data.notes[1:] == [
        "data.batch_size 45 is more than the 36 training images: an epoch is one step; a smaller "
        "batch makes more steps"
    ]
    assert len(data.sampler) == 1
    batch = data.sampler.batch(0, 0)
    if sampler == "balanced":
        assert len(batch) == 45
    else:
        assert sorted(batch.tolist()) == list(range(36))


def test_training_images_per_class_are_limited(recipe):
    data, full = make_data(with_(recipe, "data", max_images_per_class=3)), make_data(recipe)
    assert data.class_counts == [3] * len(data.class_names)
    assert set(data.rows["train"]) < set(full.rows["train"])
    assert data.rows["held_out"].tolist() == full.rows["held_out"].tolist()
    more = make_data(with_(recipe, "data", max_images_per_class=4))
    assert more.rows["train"].tolist() == full.rows["train"].tolist()
    uneven = full.catalog.subset(range(7))  # of classes with four images
    assert np.bincount(uneven.codes[limit_per_class(uneven, np.arange(7), 3)]).tolist() == [3, 3]


def test_label_noise_changes_a_fraction_of_the_training_labels(recipe):
    data, clean = make_data(with_(recipe, "data", label_noise=0.5)), make_data(recipe)
    assert data.catalog == clean.catalog
    labels, expected = (
        np.concatenate([one._batch(0, number).labels for number in range(len(one.sampler))])
        for one in (data, clean)
    )
    assert np.mean(labels != expected) == pytest.approx(0.5, abs=0.15)
    codes = np.repeat(np.arange(10), 100)
    noisy = add_label_noise(codes, 0.2)
    assert np.sum(noisy != codes) == 200
    assert np.unique(noisy[noisy != codes]).tolist() == list(range(10))
    assert add_label_noise(codes, 0.0).tolist() == codes.tolist()


def test_ranks_share_a_batch_evenly(recipe):
    with pytest.raises(RecipeError, match=r"data.batch_size 8 cannot be shared evenly by 3"):
        make_sampler(recipe, np.arange(8), World(size=3))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_ranks_share_all_rows(size):
    for total in (0, 1, 2, 8, 10, 36):
        parts = [range(total)[World(rank=r, size=size).local_slice(total)] for r in range(size)]
        assert [row for part in parts for row in part] == list(range(total))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranks_that_read_different_images_stop(recipe, monkeypatch):
    class Rank(World):
        def on_main(self, task):
            return task()

    def gather(found, own):
        found[:] = [own, own | more]

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    more = set()
    catalog = open_catalog(recipe)
    data = ImageData(recipe, preprocessing_of(recipe), Rank(size=2), Display(), catalog)
    data.open_cache("pixels")
    more = {("class00/1.png", "cannot be opened: Too many open files")}
    message = r"some processes can read images that others cannot: class00/1\.png: cannot be opened"
    with pytest.raises(RunError, match=message):
        data.open_cache("pixels")


def test_pixels_that_exceed_gpu_memory_name_the_remedy(recipe, monkeypatch):
    def run_out(tensor, device):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.Tensor, "to", run_out)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 10, 1 << 30))
    message = r"data\.cache gpu: the pixels need .* Use data\.cache pixels or none"
    with pytest.raises(RunError, match=message):
        make_data(with_(recipe, "data", cache="gpu"), "cuda")


def test_pixels_are_freed_with_the_data(recipe):
    data = make_data(recipe)
    for _ in data.batches(0, 0):
        break
    pixels = weakref.ref(data._source.flat)
    gc.disable()  # memory is freed without the garbage collector
    try:
        del data, _
        assert pixels() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_on_the_gpu(recipe):
    expected = make_data(recipe)
    before = torch.cuda.memory_allocated()
    data = make_data(with_(recipe, "data", cache="gpu"), "cuda")
    rows = data.rows["train"][:10]
    list(data.batches(0, 0))  # the kernel is compiled
    list(data.views(rows, 4))
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = list(data.batches(0, 0))
        views = list(data.views(rows, 5))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for (pixels, labels), (here, same) in zip(batches, expected.batches(0, 0), strict=True):
        assert pixels.device.type == labels.device.type == "cuda"
        assert (pixels.cpu().int() - here.int()).abs().max() <= 1
        assert np.array_equal(labels.cpu(), same)
    for there, here in zip(views, expected.views(rows, 5), strict=True):
        assert (there.cpu().int() - here.int()).abs().max() <= 1
    del data, batches, views, pixels, labels, there
    assert torch.cuda.memory_allocated() == before


def test_color_jitter_changes_pixels_only(recipe):
    plain = make_data(recipe)
    colored = make_data(with_(recipe, "data", color_jitter=0.4, hue=0.2, grayscale=0.3))
    for (pixels, labels), (changed, same) in zip(
        plain.batches(0, 0), colored.batches(0, 0), strict=True
    ):
        assert torch.equal(labels, same)
        assert not torch.equal(pixels, changed)
        # Windows and flips are the same, so bright pixels stay bright.
        light, still = (p.double().mean(1).flatten(1) for p in (pixels, changed))
        light, still = light - light.mean(1, keepdim=True), still - still.mean(1, keepdim=True)
        cosine = (light * still).sum(1) / (light.norm(dim=1) * still.norm(dim=1))
        assert cosine.median() > 0.9
    rows = plain.rows["held_out"]
    for view, other in zip(plain.views(rows, 5), colored.views(rows, 5), strict=True):
        assert torch.equal(view, other)
    again = make_data(with_(recipe, "data", color_jitter=0.4, hue=0.2, grayscale=0.3))
    assert torch.equal(next(colored.batches(1, 2))[0], next(again.batches(1, 2))[0])
