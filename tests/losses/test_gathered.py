"""Gathered losses: two processes train as one process with all samples."""

import json

import pytest
import torch
from torch import nn

from proximetry import losses
from proximetry.losses import gathered
from tests.losses.cases import batch, make
from tests.training.ranks import Ranks

STEPS = """
import json, os, sys
import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import SupConLoss
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from proximetry import losses
from proximetry.losses import gathered, parameter_groups
from proximetry.losses.pairs import PairLoss

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, embeddings, labels):
        return nn.functional.cross_entropy(self.layer(embeddings), labels)

MAKE = {
    "proxy_anchor": lambda: losses.ProxyAnchor(5, 4),
    "mpa streamed": lambda: losses.MPA(5, 4, proxies_per_class=2, engine="streamed"),
    "soft_triple": lambda: losses.SoftTriple(5, 4, proxies_per_class=2),
    "sphereface": lambda: losses.SphereFace(5, 4),
    "supcon": SupConLoss,
    "pairs": lambda: PairLoss("contrastive", memory=32, dim=4),
    "classifier": Classifier,
}
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x, y, w = torch.randn(12, 6), torch.randint(0, 5, (12,)), torch.rand(12)
ignored = y.clone()
ignored[3] = ignored[9] = -1
shares = [(0, 7, 12), (0, 0, 12), (0, 11, 12)]  # uneven, and one rank without a sample

def train(name, whole, wrapped):
    torch.manual_seed(1)
    net, loss = nn.Linear(6, 4), MAKE[name]()
    if not whole and rank == 1:  # drawn with another seed
        for parameter in loss.parameters():
            parameter.data.normal_()
    trained, seen = net, loss
    if not whole:
        trained, loss = DistributedDataParallel(net), gathered(loss)
        if wrapped and list(loss.parameters()):
            loss = DistributedDataParallel(loss)
    optimizer = torch.optim.SGD([*net.parameters(), *loss.parameters()], lr=0.05)
    values = []
    for step in range(3):
        cut = shares[step][rank:rank + 2]
        mine = slice(0, 12) if whole else slice(*cut)
        labels = ignored if name in losses.LOSSES else y
        weights = (w[mine],) if name in losses.LOSSES else ()
        optimizer.zero_grad()
        value = loss(trained(x[mine]), labels[mine] if whole else labels[mine].numpy(), *weights)
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values, [p.detach().clone() for p in [*net.parameters(), *seen.parameters()]]

worst = {}
for name in MAKE:
    expected, parameters = train(name, True, False)
    for wrapped in (False, True):
        values, got = train(name, False, wrapped)
        differences = [abs(a - b) / (1 + abs(b)) for a, b in zip(values, expected)]
        differences += [(a - b).abs().max().item() for a, b in zip(got, parameters)]
        worst[f"{name} {wrapped}"] = max(differences)
MAKE["sampled"] = lambda: losses.ProxyAnchor(40, 4, sampled_negatives=0.5)
_, parameters = train("sampled", False, False)
mine = torch.cat([p.flatten() for p in parameters])
both = [torch.empty_like(mine) for _ in range(2)]
dist.all_gather(both, mine)
worst["sampled"] = (both[0] - both[1]).abs().max().item()
loss = gathered(losses.ProxyAnchor(5, 4))
errors = {}
for name, labels, weights in (
    ("range", (y + rank * 9).tolist(), None),
    ("length", y[: 12 - rank], None),
    ("weights", y, w if rank else None),
):
    try:
        loss(x[:, :4], labels, weights)
    except ValueError as error:
        errors[name] = str(error)
worst["errors"] = errors
open(f"{sys.argv[1]}/{rank}.json", "w").write(json.dumps(worst))
dist.destroy_process_group()
"""


def test_two_ranks_with_uneven_shares_train_as_one_process(server, tmp_path):
    ranks = Ranks(server, tmp_path, STEPS, tmp_path)
    assert ranks.ended() == [0, 0], ranks.output(0) + ranks.output(1)
    for rank in range(2):
        worst = json.loads((tmp_path / f"{rank}.json").read_text())
        errors = worst.pop("errors")
        assert "position 12" in errors["range"]
        assert ("rank 1", "shape [12]")[rank] in errors["length"]
        assert "ranks [1]" in errors["weights"]
        assert len(worst) == 15
        for name, difference in worst.items():
            assert difference < 2e-5, name


def test_gathered_in_one_process_equals_the_loss():
    x, y = batch(dtype=torch.float32)
    loss = make("proxy_anchor")
    weights = torch.rand(9)
    for labels in (y, y.numpy(), y.tolist()):
        assert torch.equal(gathered(loss)(x, labels), loss(x, y))
    assert torch.equal(
        gathered(loss)(x, y, weights, reduction="none"), loss(x, y, weights, reduction="none")
    )
    assert torch.equal(gathered(nn.MSELoss())(x, x * 2), nn.MSELoss()(x, x * 2))
    nothing = gathered(nn.MSELoss(reduction="sum"))(x[:0, 0], [])  # as one rank may have it
    assert nothing.item() == 0
    groups = losses.parameter_groups(nn.Linear(3, 5), gathered(loss), lr=0.1)
    assert any(group["params"] == [loss.proxies.weight] for group in groups)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: gathered(losses.ProxyAnchor), "ProxyAnchor"),
        (lambda x, y: gathered(make("mpa"))(x, y[:4]), r"\[9\], .* \[4\]"),
        (lambda x, y: gathered(make("mpa"))(x, list("abcdefghi")), "strings"),
        (lambda x, y: gathered(make("mpa"))(x.numpy(), y), "ndarray"),
        (lambda x, y: gathered(make("mpa"))(x, y, [1.0]), "weights"),
    ],
)
def test_gathered_rejects_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(*batch(dtype=torch.float32))
