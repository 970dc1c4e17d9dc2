"""k-means on a GPU."""

import pytest
import torch

from proximetry.metrics import kmeans


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kmeans_on_the_gpu_equals_the_cpu():
    torch.manual_seed(0)
    centers = 10 * torch.randn(8, 16)
    rows = centers[torch.arange(400) % 8] + torch.randn(400, 16)
    one, other = kmeans(rows, 8), kmeans(rows.cuda(), 8)
    assert (one.assignments == other.assignments).all()
    assert other.inertia == pytest.approx(one.inertia, rel=1e-4)
