"""Pair losses from pytorch-metric-learning behind our interface."""

import pytest
import torch
from pytorch_metric_learning import losses as peer

from proximetry.losses.pair_losses import PAIR_LOSSES, PairLoss
from tests.losses.cases import batch


@pytest.mark.parametrize(
    ("name", "memory"),
    [(name, None) for name in PAIR_LOSSES] + [(n, 32) for n in PAIR_LOSSES if n != "n_pair"],
)
def test_each_gives_a_float32_scalar_with_a_gradient(name, memory):
    x, y = batch(size=24, dtype=torch.float32)
    x.requires_grad_()
    loss = PairLoss(name, memory=memory, dim=5)
    for _ in range(2):
        value = loss(x, y)
        assert value.dtype == torch.float32
        assert value.ndim == 0
    value.backward()
    assert torch.isfinite(x.grad).all()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_batch_without_pairs_is_zero_and_half_precision_is_widened(name):
    loss = PairLoss(name)
    x = torch.randn(1, 5, requires_grad=True)
    assert loss(x, torch.tensor([0])).item() == 0.0
    x, y = batch(size=12, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss(x, y).dtype == torch.float32


def test_settings_reach_the_loss():
    x, y = batch(size=12, dtype=torch.float32)
    expected = peer.NPairsLoss()(x, y)
    assert PairLoss("n_pair")(x, y).item() == pytest.approx(expected.item())
    assert PairLoss("margin", num_classes=7).loss.beta.shape == (7,)
    assert PairLoss("contrastive", margin=0.1)(x, y) > PairLoss("contrastive", margin=0.9)(x, y)


def test_memory_remembers_past_batches():
    x, y = batch(size=12, dtype=torch.float32)
    loss = PairLoss("contrastive", memory=24, dim=5)
    first = loss(x, y).item()
    assert loss(x * 2 + 1, y).item() != pytest.approx(first)
    assert loss.state_dict()["loss.embedding_memory"].shape == (24, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PairLoss("tripet"), "did you mean 'triplet'"),
        (lambda: PairLoss("triplet", marign=1.0), "marign"),
        (lambda: PairLoss("triplet", memory=3), "needs dim"),
        (lambda: PairLoss("n_pair", memory=8, dim=3), "n_pair. takes no settings"),
        (lambda: PairLoss("triplet", memory=0, dim=3), "memory .* got 0"),
        (lambda: PairLoss("triplet")(torch.zeros(2, 3), torch.zeros(3).long()), "2 embeddings"),
    ],
)
def test_bad_use(call, message):
    with pytest.raises(ValueError, match=message):
        call()
