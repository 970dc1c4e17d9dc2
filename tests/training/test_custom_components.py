"""Custom data, networks, losses and callbacks in `train`."""

import multiprocessing
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from proximetry import losses
from proximetry.data import Catalog, VectorCatalog
from proximetry.models import Embedder, Preprocessing
from proximetry.training import Callback, Recipe, RunError, RunFolder, Stopped, train
from tests.training.ranks import Ranks
from tests.training.runs import Messages, OnStep, assert_same_run, fail
from tests.training.tiny import make_recipe, tiny_values

PIXELS = Preprocessing(24, (24, 24), (0.5,) * 3, (0.25,) * 3)


class Images(Dataset):
    """Like torchvision's: class folders, PIL images, `targets` and a transform."""

    def __init__(self, root, transform=None, lists=True):
        catalog = Catalog.from_folder(root)
        self.files = [catalog.file(row) for row in range(len(catalog))]
        self.codes = catalog.codes.tolist()
        if lists:
            self.targets = self.codes
        self.transform = transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, row):
        image = Image.open(self.files[row])
        image = image if self.transform is None else self.transform(image)
        return image, self.codes[row]


class Net(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 5, stride=2)
        self.norm = nn.BatchNorm2d(12)
        self.linear = nn.Linear(24, dim)

    def forward(self, pixels):
        x = self.norm(self.conv(pixels)).relu()
        return self.linear(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1))


class Centers(nn.Module):
    """A loss with parameters, a buffer that counts, and random numbers."""

    def __init__(self, classes, dim, scale=10.0):
        super().__init__()
        self.scale = scale
        self.centers = nn.Parameter(torch.randn(classes, dim))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, embeddings, labels):
        self.calls += 1
        noise = 0.01 * torch.randn(())
        logits = self.scale * embeddings @ nn.functional.normalize(self.centers).t()
        return nn.functional.cross_entropy(logits + noise, labels)


def noisy(image):
    """Random numbers of torch, NumPy and Python."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    pixels = pixels + 0.05 * torch.randn(()) + 0.05 * random.random() + 0.05 * np.random.rand()
    return pixels.float()


@pytest.fixture
def tiny(cache):
    """A recipe whose data, model and loss are replaced."""
    return Recipe.load(tiny_values(cache, data={"batch_size": 12}, training={"epochs": 2}))


def test_torch_dataset_trains_like_its_folder(images, cache, tmp_path):
    recipe = make_recipe(images, cache, training={"epochs": 2}, data={"color_jitter": 0.3})
    train(recipe, tmp_path / "folder")
    messages, handler = Messages(), signal.getsignal(signal.SIGCHLD)
    train(recipe, tmp_path / "own", data=Images(images), display=messages)
    assert signal.getsignal(signal.SIGCHLD) == handler  # torch's handler raises anywhere
    assert_same_run_of_other_names(tmp_path / "folder", tmp_path / "own")
    assert RunFolder(tmp_path / "own").read_recipe().data.dataset == "custom:Images"
    assert any("images from the dataset" in line for line in messages.lines)


def assert_same_run_of_other_names(one, two):
    """Weights and metrics are the same, although class names differ."""
    histories = [
        [{k: v for k, v in line.items() if "second" not in k} for line in RunFolder(f).history()]
        for f in (one, two)
    ]
    assert histories[0] == histories[1]
    assert len(histories[0]) == 3


def test_evaluation_within_an_epoch_keeps_its_batches(images, tiny, tmp_path):
    recipe = tiny.override({"data.batch_size": 4, "training.epochs": 1})

    class EvaluateAfterThirdStep(Callback):
        def on_step_end(self, run, loss):
            if run.state.step == 3:
                run.evaluator.evaluate(["held_out"])

    for name, callbacks in (("plain", []), ("evaluated", [EvaluateAfterThirdStep()])):
        train(recipe, tmp_path / name, data=Images(images), callbacks=callbacks)
    assert RunFolder(tmp_path / "plain").history()[-1]["step"] == 9
    assert_same_run(tmp_path / "plain", tmp_path / "evaluated")


def own_run(images, tiny, out, **others):
    torch.manual_seed(5)
    return train(
        tiny,
        out,
        data=Images(images, noisy, lists=False),
        embedder=Embedder.wrap(Net(), PIXELS, 8),
        loss=Centers(9, 8),
        **others,
    )


def test_custom_components_resume_bit_exact(images, tiny, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    results = own_run(images, tiny, whole)
    with pytest.raises(SystemError):
        own_run(images, tiny, cut, callbacks=[OnStep(4, lambda: fail(SystemError("killed")))])
    own_run(images, tiny, cut)
    assert_same_run(whole, cut)
    recipe = RunFolder(whole).read_recipe()
    assert (recipe.model.backbone, recipe.model.dim) == ("custom:Net", 8)
    assert (recipe.loss.name, recipe.loss.settings) == ("custom:Centers", {"scale": 10.0})
    assert results["weights"]["source"] == "custom"
    trained = Embedder.load(whole, module=Net())
    data = Images(images)
    vectors = trained.encode([data[row][0] for row in range(4)])
    assert torch.isfinite(vectors).all()
    with pytest.raises(RunError, match=r"loss.settings .*10.0.* → .*5.0"):
        train(
            tiny,
            whole,
            data=Images(images, noisy),
            embedder=Embedder.wrap(Net(), PIXELS, 8),
            loss=Centers(9, 8, scale=5.0),
        )
    with pytest.raises(RunError, match=r"loss\.name 'custom:Centers' → 'proxy_anchor'"):
        train(tiny, whole, data=Images(images), embedder=Embedder.wrap(Net(), PIXELS, 8))


def test_custom_components_are_not_modified(images, tiny, tmp_path):
    rates = {}

    class Look:
        def on_start(self, run):
            rates.update({g["name"]: g["lr"] for g in run.updater.optimizer.param_groups})

    split = {"train": Images(images), "test": Subset(Images(images), range(8))}
    changes = {"training.epochs": 1, "evaluation.protocol": "last"}
    embedder, loss = Embedder.wrap(Net(), PIXELS, 8), Centers(12, 8)
    before = [value.clone() for value in (*embedder.parameters(), *loss.parameters())]
    results = train(
        tiny.override(changes),
        tmp_path / "run",
        data=split,
        embedder=embedder,
        loss=loss,
        callbacks=[Look()],
    )
    after = [*embedder.parameters(), *loss.parameters()]
    assert all(map(torch.equal, before, after))
    assert rates == {"backbone": 1e-3, "loss": 1e-2}
    assert results["selected"]["test"]["queries"] == 8
    assert any("share 2 classes" in note for note in results["notes"])


@pytest.mark.parametrize("kind", ["pml", "proxies", "function"])
def test_custom_losses(kind, images, tiny, cache, tmp_path):
    if kind == "pml":
        pml = pytest.importorskip("pytorch_metric_learning.losses")
        loss = pml.SupConLoss(temperature=0.2)
        expected = ("custom:SupConLoss", {"temperature": 0.2})
    elif kind == "proxies":
        loss = losses.create("norm_softmax", 9, 8, scale=12.0)
        expected = ("custom:NormSoftmax", {"scale": 12.0})
    else:

        def spread(embeddings, labels):
            return (embeddings @ embeddings.t() - (labels[:, None] == labels).float()).pow(2).mean()

        loss, expected = spread, ("custom:spread", {})
    recipe = make_recipe(images, cache, training={"epochs": 1})
    results = train(recipe, tmp_path / "run", loss=loss)
    config = RunFolder(tmp_path / "run").read_recipe().loss
    assert config.name == expected[0]
    assert expected[1].items() <= config.settings.items()
    assert results["last"]["held_out"]["map@r"] > 0
    assert ("proxies" in results["last"]) == (kind == "proxies")


def test_custom_catalog(images, cache, tmp_path):
    recipe = make_recipe(images, cache, training={"epochs": 1})
    train(recipe, tmp_path / "folder")
    other = recipe.override({"data.root": None})
    train(other, tmp_path / "own", data=Catalog.from_folder(images))
    assert_same_run(tmp_path / "folder", tmp_path / "own")


class Logs:
    """Has some of the methods and no base class."""

    def __init__(self):
        self.seen = []

    def on_epoch_end(self, run, line):
        self.seen.append(line["epoch"])

    def on_end(self, run, results):
        self.seen.append(results["epochs"])


class Stops(Callback):
    def on_step_end(self, run, loss):
        if run.state.step == 2:
            run.stop()


def test_callbacks_log_and_stop(recipe, tmp_path):
    with pytest.raises(Stopped, match="stopped after step 2, saved in"):
        train(recipe, tmp_path / "run", callbacks=[Stops()])
    logs = Logs()
    train(recipe, tmp_path / "run", callbacks=[logs])
    assert logs.seen == [1, 2, 3, 3]


class Misnamed:
    def on_epoch(self, run):
        pass


class Items(Dataset):
    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        return self.items[row]


RGB = np.zeros((24, 24, 3), np.uint8)
FLOAT = torch.zeros(3, 24, 24)


def items(image=RGB, other=RGB):
    return Items(*((image if i % 2 else other, i // 4) for i in range(40)))


VECTORS = VectorCatalog.from_arrays(
    np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32), [i // 4 for i in range(40)]
)


WRONG = {
    "a class for data": ({"data": Items}, "not a class"),
    "no dataset": ({"data": 7}, "must be a Catalog"),
    "a folder": ({"data": "images"}, "Catalog.from_folder"),
    "an empty dataset": ({"data": Items()}, "Items is empty"),
    "other splits": ({"data": {"training": items()}}, "'training'"),
    "no label": ({"data": Items(RGB, RGB)}, "item 0 of Items"),
    "a label that is none": ({"data": Items((RGB, 0.5))}, "label"),
    "a path": ({"data": items("a.jpg", "a.jpg")}, "PIL image"),
    "channels first": ({"data": items(RGB.transpose(2, 0, 1), RGB.transpose(2, 0, 1))}, "permute"),
    "a bare module": ({"embedder": Net()}, "Embedder.wrap"),
    "no embedder": ({"embedder": "resnet50"}, "embedder must be an Embedder"),
    "a class for a loss": ({"loss": Centers}, r"Write Centers\(…\)"),
    "no loss": ({"loss": 3}, "must be callable"),
    "proxies of other classes": (
        {"loss": losses.create("proxy_anchor", 12, 8)},
        "12 classes",
    ),
    "vectors for a network of images": (
        {"data": VECTORS, "embedder": Embedder.wrap(Net(), PIXELS, 8)},
        "takes images",
    ),
    "images for a network of tensors": (
        {"embedder": Embedder.wrap(nn.Linear(8, 8), (8,), 8)},
        "contains images",
    ),
    "vectors of other dimensions": (
        {"data": VECTORS, "embedder": Embedder.create("vectors", 8, input_dim=16)},
        "has 8",
    ),
    "a wrong item among many": (
        {"data": Items(*((RGB, i // 4) for i in range(40)), (RGB, None))},
        "^item 40 of Items",
    ),
    "a callback that is none": ({"callbacks": [3]}, "not a callback: 3"),
    "one callback": ({"callbacks": Logs()}, "must be a list of callbacks"),
    "a class for a callback": ({"callbacks": [Logs]}, r"Write Logs\(\)"),
    "a method of another name": ({"callbacks": [Misnamed()]}, "on_epoch is never called"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_components_create_no_folder(wrong, recipe, tmp_path):
    given, message = WRONG[wrong]
    with pytest.raises((ValueError, TypeError), match=message):
        train(recipe, tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_custom_network_for_vectors(recipe, tmp_path):
    embedder = Embedder.wrap(nn.Linear(8, 8), (8,), 8)
    train(recipe, tmp_path / "run", data=VECTORS, embedder=embedder)
    loaded = Embedder.load(tmp_path / "run", module=nn.Linear(8, 8))
    assert loaded.encode(VECTORS.vectors[:3]).shape == (3, 8)
    tensors = TensorDataset(torch.from_numpy(VECTORS.vectors), torch.arange(40) // 4)
    train(recipe, tmp_path / "tensors", data=tensors, embedder=embedder)
    with pytest.raises(TypeError, match="must be a Recipe"):
        train("default-cpu", tmp_path / "name")


def test_custom_timm_embedder_uses_training_keys(recipe, tmp_path):
    """Stochastic depth applies; the evaluation preprocessing is the embedder's."""
    rates = []

    class Look:
        def on_start(self, run):
            parts = run.updater.embedder.modules()
            rates.extend(part.drop_prob for part in parts if type(part).__name__ == "DropPath")

    changes = {"dim": 64, "pca_dim": 32, "whitening": 0.5, "drop_path": 0.9}
    changes["freeze_batchnorm"] = True
    changed = recipe.override({"model": changes, "training.epochs": 1})
    seen = {"image_size": 24, "resize": 28, "squash": True, "tta_crops": (0.8,)}
    embedder = Embedder.create("test_resnet", 8, weights="none", **seen)
    layers = [(type(part), len(part._forward_pre_hooks)) for part in embedder.modules()]
    train(changed, tmp_path / "run", embedder=embedder, callbacks=[Look()])
    assert [(type(part), len(part._forward_pre_hooks)) for part in embedder.modules()] == layers
    assert max(rates) == pytest.approx(0.9)
    saved = RunFolder(tmp_path / "run").read_recipe().model
    assert (saved.tta_crops, saved.pca_dim, saved.whitening) == ((0.8,), None, 0.0)
    assert (saved.image_size, saved.resize, saved.squash) == (24, 28, True)
    assert Embedder.load(tmp_path / "run").preprocessing == embedder.preprocessing
    assert Embedder.load(tmp_path / "run").architecture == embedder.architecture
    assert not any(type(part).__name__ == "DropPath" for part in embedder.modules())
    messages = Messages()
    train(changed, tmp_path / "own", embedder=Embedder.wrap(Net(), PIXELS, 8), display=messages)
    assert "no stochastic depth: custom:Net has no timm blocks" in messages.lines


def test_frozen_parameters_stay_frozen(recipe, tmp_path):
    net = Net()
    net.conv.requires_grad_(False)
    train(recipe, tmp_path / "run", embedder=Embedder.wrap(net, PIXELS, 8))
    trained = Embedder.load(tmp_path / "run", module=Net()).backbone
    assert torch.equal(trained.conv.weight, net.conv.weight)
    assert not torch.equal(trained.linear.weight, net.linear.weight)


def test_bits_must_match_the_embedder(recipe, tmp_path):
    changed = recipe.override({"model": {"bits": 8, "dim": 8}})
    with pytest.raises(ValueError, match=r"bits=8"):
        train(changed, tmp_path / "run", embedder=Embedder.wrap(Net(), PIXELS, 8))


def test_recipe_of_custom_components_needs_them(recipe, tmp_path):
    for section, part in (("data.dataset", "data"), ("loss.name", "loss")):
        with pytest.raises(ValueError, match=rf"{section} 'custom:Mine'.*train\({part}=…\)"):
            train(recipe.override({section: "custom:Mine"}), tmp_path / "run")


CUSTOM_COMPONENTS = """
import sys
import torch
sys.path.insert(0, sys.argv[3])
from tests.training.test_custom_components import Centers, Net, PIXELS, Images, noisy
from proximetry.models import Embedder
from proximetry.training import Recipe, train
torch.manual_seed(5)
train(
    Recipe.load(sys.argv[1]), sys.argv[2], device="cpu", data=Images(sys.argv[4], noisy),
    embedder=Embedder.wrap(Net(), PIXELS, 8), loss=Centers(9, 8),
)
"""


@pytest.mark.slow
def test_custom_components_on_two_ranks_equal_one(images, tiny, server, tmp_path):
    # Batch norm sees a different part of the batch on each rank; frozen, only rounding differs.
    recipe = tiny.override({"model.freeze_batchnorm": True, "training.epochs": 1})
    recipe.save(tmp_path / "recipe.yaml")
    root = Path(__file__).parents[2]
    words = (tmp_path / "recipe.yaml", tmp_path / "two", root, images)
    ranks = Ranks(server, tmp_path / "home", CUSTOM_COMPONENTS, *words)
    try:
        assert ranks.ended() == [0, 0], ranks.output(0) + ranks.output(1)
    finally:
        ranks.kill()
    torch.manual_seed(5)
    own = {"embedder": Embedder.wrap(Net(), PIXELS, 8), "loss": Centers(9, 8)}
    train(recipe, tmp_path / "one", data=Images(images, noisy), **own)
    one, two = (RunFolder(tmp_path / name).history()[-1] for name in ("one", "two"))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["held_out"]["map@r"] == pytest.approx(one["held_out"]["map@r"], abs=0.02)
    assert multiprocessing.active_children() == []  # no worker outlives its run
