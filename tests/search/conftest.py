"""A small embedder, images for it, and galleries of vectors without image files."""

import numpy as np
import pytest
import torch

from proximetry.models import Embedder
from proximetry.search import Gallery, metadata
from tests.training.tiny import make_images

DIM = 8


def make_embedder(seed=0, **options):
    torch.manual_seed(seed)
    return Embedder.create("small_convnet", DIM, weights="none", image_size=24, **options)


def names(first, count):
    return [f"/images/{number:05d}.png" for number in range(first, first + count)]


def make_table(first, count, classes=5):
    labels = [f"class{number % classes}" for number in range(first, first + count)]
    return metadata.from_columns({"path": names(first, count), "label": labels})


def make_vectors(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


@pytest.fixture(scope="session")
def embedder():
    return make_embedder()


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def gallery(embedder, tmp_path):
    """Sixty vectors."""
    return Gallery.build(
        embedder, make_table(0, 60), tmp_path / "gallery", vectors=make_vectors(60)
    )
