"""`EmbeddingTransformer` in scikit-learn pipelines."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline

from proximetry.training import EmbeddingTransformer
from tests.training.tiny import tiny_values

SMALL = {"model.dim": 8, "training.epochs": 2, "data.batch_size": 32, "evaluation.untrained": False}


@pytest.fixture(scope="module")
def vectors():
    draw = np.random.default_rng(0)
    labels = np.arange(120) % 12
    centers = draw.normal(size=(12, 16))
    return (centers[labels] + draw.normal(size=(120, 16)) / 5).astype(np.float32), labels


def test_embedding_transformer_works_in_a_pipeline(vectors):
    X, y = vectors
    transformer = EmbeddingTransformer(overrides=SMALL, device="cpu")
    embedded = transformer.fit(X, y).transform(X)
    assert (embedded.shape, embedded.dtype) == ((120, 8), np.float32)
    assert clone(transformer).get_params() == transformer.get_params()
    pipeline = make_pipeline(clone(transformer), KNeighborsClassifier(3))
    grid = {"embeddingtransformer__overrides": [SMALL, {**SMALL, "model.dim": 4}]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(X, y)
    assert search.score(X, y) > 0.9


def test_embedding_transformer_takes_paths_of_images(images, cache, tmp_path):
    values = tiny_values(cache, training={"epochs": 1})
    paths = sorted(images.rglob("*.png"))
    transformer = EmbeddingTransformer("default-cpu", values, device="cpu")
    assert transformer.fit(paths, [path.parent.name for path in paths]).transform(
        paths[:3]
    ).shape == (3, 8)
