"""PCA: principal axes and reduced embedders."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from proximetry.models import Embedder
from proximetry.models.embedder import extract_features
from proximetry.models.pca import principal_axes, regularized_moments, second_moments, with_pca


@given(seed=st.integers(0, 99), count=st.integers(1, 12), wide=st.integers(1, 9), data=st.data())
def test_principal_axes_equal_svd(seed, count, wide, data):
    torch.manual_seed(seed)
    dim = data.draw(st.integers(1, wide))
    vectors = torch.randn(count, wide, dtype=torch.float64)
    axes = principal_axes(second_moments(vectors), dim)
    assert axes.shape == (dim, wide)
    assert torch.allclose(axes @ axes.t(), torch.eye(dim), atol=1e-5)
    lost = (vectors - vectors @ axes.double().t() @ axes.double()).square().sum()
    singular = torch.linalg.svdvals(vectors)
    assert lost.item() == pytest.approx(singular[dim:].square().sum().item(), abs=1e-4)
    assert (axes.gather(1, axes.abs().argmax(1, keepdim=True)) > 0).all()


@pytest.mark.parametrize("dim", [0, 16])
def test_moments_of_few_vectors_add_the_head_covariance(dim):
    torch.manual_seed(0)
    embedder = Embedder.create("small_convnet", dim, weights="none", image_size=24)
    width = embedder.dim
    scales = torch.logspace(0, -2, width)
    if dim:
        with torch.no_grad():
            embedder.head.weight.zero_().diagonal().copy_(scales)
    vectors = F.normalize(torch.randn(2, width), dim=1)
    axes = principal_axes(regularized_moments(second_moments(vectors), embedder), 6)
    outside = vectors - vectors @ axes[:2].t() @ axes[:2]
    assert outside.norm(dim=1).max() < 0.2, "the first axes are those of the vectors"
    spread = (axes[2:] * (scales if dim else torch.ones(width))).square().sum(1)
    assert (spread.diff() <= 1e-4).all(), "the largest first"
    assert spread.sum() > 0.8 * (scales[:4].square().sum() if dim else 4)
    with torch.no_grad():
        if dim:
            embedder.head.weight.zero_()
    nothing = second_moments(torch.zeros(2, width))
    assert principal_axes(regularized_moments(nothing, embedder), 6).isfinite().all()


@given(seed=st.integers(0, 99), cut=st.integers(1, 5))
def test_prefixes_equal_fewer_axes(seed, cut):
    torch.manual_seed(seed)
    vectors = F.normalize(torch.randn(20, 6), dim=1)
    summed = second_moments(vectors[:7]) + second_moments(vectors[7:])
    long, short = (vectors @ principal_axes(summed, dim).t() for dim in (5, cut))
    assert torch.allclose(long[:, :cut], short, atol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dim", [0, 12])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_pca_is_folded_into_the_head(dim, normalize, layer_norm, tmp_path):
    torch.manual_seed(0)
    options = {"image_size": 24, "normalize": normalize, "layer_norm": layer_norm}
    embedder = Embedder.create("small_convnet", dim, weights="none", **options).eval()
    with torch.no_grad():
        if dim:
            embedder.head.bias.normal_()
        pixels = torch.randn(9, 3, 24, 24)
        vectors = embedder(pixels)
        axes = principal_axes(second_moments(vectors), 5)
        before = torch.random.get_rng_state()
        reduced = with_pca(embedder, axes)
        assert torch.equal(torch.random.get_rng_state(), before)
        expected = vectors @ axes.t()
        expected = F.normalize(expected, dim=1) if normalize else expected
        assert torch.allclose(reduced(pixels), expected, atol=1e-5)
        assert reduced.dim == reduced.architecture.dim == 5
        assert torch.equal(embedder(pixels), vectors)  # unchanged
        raw = torch.randint(0, 256, (9, 3, 24, 24), dtype=torch.uint8)
        assert torch.equal(reduced.project(extract_features(embedder, raw)), reduced.embed(raw))
        reduced.save(tmp_path / "reduced")
        again = Embedder.load(tmp_path / "reduced")
        assert torch.equal(again(pixels), reduced(pixels))


def test_principal_axes_reject_bad_dim_and_nonfinite_moments():
    for dim in (0, 7):
        with pytest.raises(ValueError, match=f"dim .* got {dim}"):
            principal_axes(torch.eye(7), dim)
    for bad in (torch.nan, torch.inf, 1e300):
        vectors = torch.eye(6, dtype=torch.float64)
        vectors[4, 2] = bad
        with pytest.raises(ValueError, match="NaN or infinite"):
            principal_axes(second_moments(vectors), 2)


def test_centered_axes_ignore_an_offset():
    torch.manual_seed(0)
    vectors = torch.randn(40, 5, dtype=torch.float64) * torch.tensor([5.0, 3.0, 1.0, 0.5, 0.2])
    here, there = second_moments(vectors), second_moments(vectors + 100)
    centered = principal_axes(there, 2, centered=True)
    assert torch.allclose(centered, principal_axes(here, 2, centered=True), atol=1e-5)
    assert not torch.allclose(centered, principal_axes(there, 2), atol=0.1)


@given(
    seed=st.integers(0, 99), power=st.floats(0, 1), scale=st.floats(1e-3, 1e3), about=st.booleans()
)
def test_whitening_divides_by_a_power_of_the_deviation(seed, power, scale, about):
    torch.manual_seed(seed)
    vectors = torch.randn(40, 6, dtype=torch.float64) * torch.logspace(0, -2, 6) + 0.1
    moments = second_moments(vectors)
    plain = principal_axes(moments, 5, about)
    axes = principal_axes(moments, 5, about, power)
    assert torch.equal(principal_axes(moments, 5, about, 0.0), plain)
    # Whitening rotates nothing and keeps the first axis.
    assert torch.allclose(F.normalize(axes, dim=1), plain, atol=1e-6)
    assert axes[0].norm().item() == pytest.approx(1, abs=1e-6)
    components = (vectors - about * vectors.mean(0)) @ plain.double().t()
    whitened = (vectors - about * vectors.mean(0)) @ axes.double().t()
    before, after = (found.square().mean(0) for found in (components, whitened))
    assert torch.allclose(after / after[0], (before / before[0]) ** (1 - power), rtol=1e-3)
    # Cosines do not depend on the norms.
    longer = principal_axes(second_moments(scale * vectors), 5, about, power)
    assert torch.allclose(longer, axes, rtol=1e-4, atol=1e-4 * float(axes.abs().max()))


@pytest.mark.parametrize("about", [False, True])
def test_whitening_limits_tiny_variances(about):
    torch.manual_seed(0)
    flat = torch.randn(30, 8) * torch.tensor([3.0, 2, 1, 0, 0, 0, 0, 0])
    axes = principal_axes(second_moments(flat), 8, about, 1.0)
    assert axes.norm(dim=1).max().item() == pytest.approx(1000, rel=1e-3)
    equal = torch.ones(9, 4)
    for power in (0.25, 1.0):
        assert principal_axes(second_moments(equal), 3, about, power).isfinite().all()
