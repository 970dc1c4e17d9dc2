import numpy as np
import pytest
import torch

from proximetry.metrics import map_embeddings


def groups(count=200, classes=5, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, dim, generator=generator)
    labels = torch.arange(count) % classes
    return centers[labels] + 0.1 * torch.randn(count, dim, generator=generator), labels


def test_neighbors_stay_neighbors():
    vectors, labels = groups()
    points = torch.from_numpy(map_embeddings(vectors))
    nearest = (torch.cdist(points, points) + 1e9 * torch.eye(len(points))).argmin(1)
    assert points.shape == (200, 2)
    assert (labels[nearest] == labels).all()
    assert points.min() >= 0
    assert points.max() <= 1
    assert float((points.max(0).values - points.min(0).values).max()) == pytest.approx(1)


def test_only_distances_depend_on_length():
    vectors, _ = groups(60)
    lengths = torch.rand(60, 1) + 0.5
    assert np.allclose(map_embeddings(vectors), map_embeddings(vectors * lengths), atol=0.05)
    near = map_embeddings(vectors, similarity="euclidean")
    assert not np.allclose(
        near, map_embeddings(vectors * lengths, similarity="euclidean"), atol=0.05
    )


@pytest.mark.parametrize("count", [1, 2, 3, 9, 10, 11])
@pytest.mark.parametrize("dim", [1, 2, 64])
def test_a_few_embeddings_have_a_map(count, dim):
    vectors = torch.randn(count, dim, generator=torch.Generator().manual_seed(count))
    points = map_embeddings(vectors, similarity="euclidean")
    assert points.shape == (count, 2)
    assert np.isfinite(points).all()
    assert ((points >= 0) & (points <= 1)).all()


def test_copies_lie_in_one_place():
    assert (map_embeddings(torch.ones(40, 8)) == 0.5).all()


def test_map_embeddings_rejects_invalid_input():
    with pytest.raises(ValueError, match="one of cosine, euclidean"):
        map_embeddings(torch.randn(5, 3), similarity="hamming")
    with pytest.raises(ValueError, match="rows: 1"):
        map_embeddings(torch.tensor([[0.0, 1.0], [float("nan"), 1.0]]))
