"""A tiny dataset of colored squares and a recipe that trains on it in a second."""

import numpy as np
from PIL import Image

from proximetry.training import Recipe


def make_images(root, classes=12, each=4, side=24, seed=0):
    """Make class folders; a class is a hue and a stripe pattern, with noise."""
    draw = np.random.default_rng(seed)
    for c in range(classes):
        folder = root / f"class{c:02d}"
        folder.mkdir(parents=True)
        base = draw.integers(40, 216, 3)
        for i in range(each):
            image = np.tile(base, (side, side, 1)).astype(float)
            image[:, :: c % 4 + 2] *= 0.5
            image += draw.normal(0, 10, image.shape) + draw.normal(0, 16, 3)  # brightness varies
            Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
    return root


def tiny_values(cache, **changes):
    """Return the plain values of a recipe for these images; changes as section=dict(key=value)."""
    values = {
        "name": "tiny",
        "data": {
            "dataset": "folder",
            "short_side": 24,
            "batch_size": 8,
            "crop_scale": [0.6, 1.0],
            "cache_dir": str(cache),
        },
        "model": {
            "backbone": "small_convnet",
            "dim": 8,
            "pooling": "avg+max",
            "weights": "none",
            "image_size": 24,
        },
        "optimizer": {"lr": 1e-3, "proxy_multiplier": 10.0},
        "schedule": {"name": "step", "every": 2},
        "training": {"epochs": 3},
        "evaluation": {"held_out": 0.25},
    }
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys}
    return values


def make_recipe(root, cache, **changes):
    """Return a recipe for `make_images`."""
    data = {"root": str(root), **changes.pop("data", {})}
    return Recipe.load(tiny_values(cache, data=data, **changes))


def with_(recipe, section, **keys):
    return recipe.override({section: keys})
