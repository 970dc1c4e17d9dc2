"""Pair losses from pytorch-metric-learning with the interface of proxy losses."""

import pytest
import torch
from pytorch_metric_learning import losses as peer
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.miners import BatchHardMiner
from pytorch_metric_learning.reducers import DoNothingReducer, MeanReducer

from proximetry.losses.pairs import PAIR_LOSSES, PairLoss
from tests.losses.cases import batch


@pytest.mark.parametrize(
    ("name", "memory"),
    [(name, None) for name in PAIR_LOSSES] + [(n, 32) for n in PAIR_LOSSES if n != "n_pair"],
)
def test_pair_losses_return_float32_scalars_with_gradients(name, memory):
    x, y = batch(size=24, dtype=torch.bfloat16)
    x.requires_grad_()
    loss = PairLoss(name, memory=memory, dim=5)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(x, y)
        assert (value.dtype, value.ndim) == (torch.float32, 0)
    value.backward()
    assert torch.isfinite(x.grad).all()
    assert x.grad.abs().sum() > 0
    without_pairs = PairLoss(name)(torch.randn(1, 5), torch.tensor([0]))
    assert without_pairs.item() == 0.0


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e25, 1e30])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_long_and_short_embeddings_keep_their_direction(name, scale):
    """Beyond 1.8e19 the square of a float32 is infinite, below 1e-23 it is zero."""
    x, y = batch(size=12, dtype=torch.float32)
    torch.manual_seed(0)
    expected = PairLoss(name)(x, y).item()
    torch.manual_seed(0)
    assert PairLoss(name)(x * scale, y).item() == pytest.approx(expected, rel=1e-5)


def test_settings_reach_the_loss():
    x, y = batch(size=12, dtype=torch.float32)
    expected = peer.NPairsLoss()(x, y)
    assert PairLoss("n_pair")(x, y).item() == pytest.approx(expected.item())
    assert PairLoss("margin", num_classes=7).loss.beta.shape == (7,)
    assert PairLoss("contrastive", margin=0.1)(x, y) > PairLoss("contrastive", margin=0.9)(x, y)


def batches(count, size=12):
    return [batch(size, seed=seed, dtype=torch.float32) for seed in range(count)]


@pytest.mark.parametrize("name", ["contrastive", "multi_similarity", "triplet"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_memory_resumes_from_its_state_bit_for_bit(name, steps):
    """Before the memory of 32 is full and after; the fourth batch of 12 wraps around."""
    first = PairLoss(name, memory=32, dim=5)
    for x, y in batches(steps):
        first(x, y)
    second = PairLoss(name, memory=32, dim=5)
    second.load_state_dict(first.state_dict())
    for x, y in batches(6)[steps:]:
        assert torch.equal(first(x, y), second(x, y))
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key])


@pytest.mark.parametrize("name", ["contrastive", "multi_similarity", "triplet"])
def test_batch_larger_than_the_memory_is_compared_with_itself(name):
    x, y = batch(size=12, dtype=torch.float32)
    loss = PairLoss(name, memory=7, dim=5)
    for _ in range(2):  # whether the memory is empty or full
        assert loss(x, y).item() == pytest.approx(PairLoss(name)(x, y).item())


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_ignored_labels_do_not_change_value_and_gradient(name):
    x, y = batch(size=24, dtype=torch.float32)
    y[::5] = -1
    remaining = y >= 0
    x[::10] = torch.nan  # ignored samples may have any value
    actual = []
    for given, labels in ((x.clone(), y), (x[remaining], y[remaining])):
        given.requires_grad_()
        torch.manual_seed(0)
        value = PairLoss(name)(given, labels)
        actual.append((value.detach(), *torch.autograd.grad(value, given)))
    assert torch.equal(actual[0][0], actual[1][0])
    assert torch.equal(actual[0][1][remaining], actual[1][1])
    assert (actual[0][1][~remaining] == 0).all()
    nothing = x.clone().requires_grad_()
    value = PairLoss(name)(nothing, torch.full_like(y, -1))
    assert value.item() == 0.0
    assert (torch.autograd.grad(value, nothing)[0] == 0).all()


def test_memory_skips_ignored_labels_and_evaluation_mode():
    first, second = (PairLoss("contrastive", memory=32, dim=5) for _ in range(2))
    for x, y in batches(4):
        y[2] = y[7] = -1
        assert torch.equal(first.train()(x, y), second(x[y >= 0], y[y >= 0]))
        first(x, torch.full_like(y, -1))
        assert torch.equal(first.eval()(x, y), PairLoss("contrastive")(x, y))


@pytest.mark.parametrize(
    "make_loss",
    [
        *(peer.SupConLoss, peer.NTXentLoss, peer.CircleLoss, peer.FastAPLoss, peer.AngularLoss),
        *(peer.TupletMarginLoss, peer.NCALoss, peer.InstanceLoss),
        lambda: peer.RankedListLoss(margin=0.4, Tn=5.0),
        lambda: peer.TripletMarginLoss(distance=LpDistance(power=2), reducer=MeanReducer()),
        lambda: peer.ProxyAnchorLoss(7, 5),
        lambda: peer.MultipleLosses([peer.ContrastiveLoss(), peer.CircleLoss()]),
    ],
)
def test_loss_objects_give_their_own_values(make_loss):
    x, y = batch(size=24, dtype=torch.float32)
    torch.manual_seed(0)
    loss = make_loss()
    expected = loss(x, y)
    for labels in (y, y.numpy(), y.tolist()):
        given = x.clone().requires_grad_()
        value = PairLoss(loss)(given, labels)
        assert value.item() == pytest.approx(expected.item(), rel=1e-5)
        value.backward()
        assert torch.isfinite(given.grad).all()
    assert list(PairLoss(loss).parameters()) == list(loss.parameters())


def test_miner_overrides_the_default():
    x, y = batch(size=24, dtype=torch.float32)
    miner = BatchHardMiner()
    plain = peer.TripletMarginLoss(margin=0.1)
    expected = plain(x, y, miner(x, y)).item()
    assert PairLoss("triplet", miner=miner)(x, y).item() == pytest.approx(expected)
    assert PairLoss(plain, miner=miner)(x, y).item() == pytest.approx(expected)
    assert PairLoss("triplet")(x, y).item() != pytest.approx(expected)


NOT_REDUCED = peer.ContrastiveLoss(reducer=DoNothingReducer())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PairLoss("tripet"), "'triplet'"),
        (lambda: PairLoss("triplet", marign=1.0), "marign"),
        (lambda: PairLoss("vicreg"), "objects"),
        (lambda: PairLoss(peer.SupConLoss), "SupConLoss"),
        (lambda: PairLoss(None), "loss None"),
        (lambda: PairLoss("triplet", miner="semihard"), "miner .* 'semihard'"),
        (lambda: PairLoss("triplet", miner=BatchHardMiner), "BatchHardMiner"),
        (lambda: PairLoss(peer.SupConLoss(), temperature=0.1), "SupConLoss .* 'temperature'"),
        (lambda: PairLoss(peer.FastAPLoss(), memory=8, dim=3), "FastAPLoss .* memory"),
        (lambda: PairLoss(peer.CrossBatchMemory(peer.SupConLoss(), 5, 32)), "CrossBatchMemory"),
        (lambda: PairLoss(NOT_REDUCED)(torch.ones(2, 3), [0, 0]), "reducer"),
        (lambda: PairLoss("triplet", memory=3), "Pass dim"),
        (lambda: PairLoss("n_pair", memory=8, dim=3), "n_pair"),
        (lambda: PairLoss("triplet", memory=0, dim=3), "memory .* 0"),
        (lambda: PairLoss("triplet")(torch.zeros(2, 3), [0, 0, 0]), "3 entries for 2"),
        (lambda: PairLoss("triplet", memory=4, dim=5)(torch.zeros(2, 3), [0, 0]), "3 dimensions"),
    ],
)
def test_pair_loss_rejects_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
