"""Fewer numbers along the principal axes: the axes themselves, and embedders turned to them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from proximetry.models import Embedder
from proximetry.models.narrowing import moments, narrow, narrowed, principal_axes


@given(seed=st.integers(0, 99), count=st.integers(1, 12), wide=st.integers(1, 9), data=st.data())
def test_axes_are_those_of_the_singular_values(seed, count, wide, data):
    torch.manual_seed(seed)
    dim = data.draw(st.integers(1, wide))
    vectors = torch.randn(count, wide, dtype=torch.float64)
    axes = principal_axes(moments(vectors), dim)
    assert axes.shape == (dim, wide)
    assert torch.allclose(axes @ axes.t(), torch.eye(dim), atol=1e-5)
    lost = (vectors - vectors @ axes.double().t() @ axes.double()).square().sum()
    singular = torch.linalg.svdvals(vectors)
    assert lost.item() == pytest.approx(singular[dim:].square().sum().item(), abs=1e-4)
    assert (axes.gather(1, axes.abs().argmax(1, keepdim=True)) > 0).all()


@given(seed=st.integers(0, 99), cut=st.integers(1, 5))
def test_the_first_numbers_are_what_fewer_axes_give(seed, cut):
    torch.manual_seed(seed)
    vectors = F.normalize(torch.randn(20, 6), dim=1)
    summed = moments(vectors[:7]) + moments(vectors[7:])
    long, short = (narrow(vectors, principal_axes(summed, dim), normalize=True) for dim in (5, cut))
    assert torch.allclose(F.normalize(long[:, :cut], dim=1), short, atol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dim", [0, 12])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_an_embedder_is_turned_with_its_head(dim, normalize, layer_norm, tmp_path):
    torch.manual_seed(0)
    embedder = Embedder.create(
        "small_convnet",
        dim,
        weights="none",
        image_size=24,
        normalize=normalize,
        layer_norm=layer_norm,
    ).eval()
    with torch.no_grad():
        if dim:
            embedder.head.bias.normal_()
        pixels = torch.randn(9, 3, 24, 24)
        vectors = embedder(pixels)
        axes = principal_axes(moments(vectors), 5)
        slim = narrowed(embedder, axes)
        expected = narrow(vectors, axes, normalize)
        assert torch.allclose(slim(pixels), expected, atol=1e-5)
        assert slim.dim == slim.architecture.dim == 5
        assert torch.equal(embedder(pixels), vectors)  # which stays as it was
        slim.save(tmp_path / "slim")
        again = Embedder.load(tmp_path / "slim")
        assert torch.equal(again(pixels), slim(pixels))


@pytest.mark.parametrize("dim", [0, 7])
def test_more_axes_than_numbers_are_refused(dim):
    with pytest.raises(ValueError, match=f"dim must be between 1 and 6, got {dim}"):
        principal_axes(torch.eye(7), dim)


def test_about_the_mean_an_offset_is_not_noticed():
    torch.manual_seed(0)
    vectors = torch.randn(40, 5, dtype=torch.float64) * torch.tensor([5.0, 3.0, 1.0, 0.5, 0.2])
    there = principal_axes(moments(vectors + 100), 2, about_mean=True)
    assert torch.allclose(there, principal_axes(moments(vectors), 2, about_mean=True), atol=1e-5)
    assert not torch.allclose(there, principal_axes(moments(vectors + 100), 2), atol=0.1)


def test_all_axes_keep_all_similarities():
    torch.manual_seed(0)
    vectors = F.normalize(torch.randn(30, 8), dim=1)
    turned = narrow(vectors, principal_axes(moments(vectors), 8), normalize=True)
    assert torch.allclose(turned @ turned.t(), vectors @ vectors.t(), atol=1e-5)
