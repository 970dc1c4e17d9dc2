"""Three digits in two dimensions, with and without RegularFace's exclusive term.

python -m examples.regularface_digits docs/regularface_digits.svg

As in Zhao et al. 2019: with three classes in the plane there is room enough, and a loss that asks
only for the right order may leave it unused. The term spreads the classes to 120°.
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from proximetry.losses import (
    AngularCenterLoss,
    ArcFace,
    CosFace,
    ExclusiveRegularizer,
    NormSoftmax,
    ProxyLoss,
    SphereFace,
    parameter_groups,
)
from proximetry.metrics import separability

DIGITS = (0, 3, 8)
STEPS = 400


@dataclass(frozen=True)
class Panel:
    """What one drawing shows: embeddings, their digits, the proxies and their smallest angle."""

    name: str
    exclusive: bool
    embeddings: Tensor
    labels: Tensor
    proxies: Tensor
    smallest_angle: float


def digits() -> tuple[Tensor, Tensor]:
    """The 8 × 8 images of three digits, and their classes."""
    images, numbers = load_digits(return_X_y=True)
    chosen = np.isin(numbers, DIGITS)
    labels = np.searchsorted(DIGITS, numbers[chosen])
    return torch.from_numpy(images[chosen] / 8 - 1).float(), torch.from_numpy(labels)


def losses() -> dict[str, tuple[ProxyLoss, float, float]]:
    """Each loss with the weights of the center loss and of the exclusive term."""
    return {
        "softmax": (NormSoftmax(3, 2, scale=15.0), 0.0, 6.0),
        "center loss": (NormSoftmax(3, 2, scale=10.0), 5.0, 15.0),
        "SphereFace": (SphereFace(3, 2, lambda_base=100.0), 0.0, 15.0),
        "CosFace": (CosFace(3, 2, scale=15.0), 0.0, 6.0),
        "ArcFace": (ArcFace(3, 2, scale=15.0), 0.0, 6.0),
    }


def train(name: str, *, exclusive: bool) -> Panel:
    """Train a small network with a loss, by projected gradient, and embed the same images."""
    torch.manual_seed(1)
    images, labels = digits()
    network = nn.Sequential(nn.Linear(64, 64), nn.PReLU(), nn.Linear(64, 64), nn.PReLU())
    network.append(nn.Linear(64, 2))
    loss, center, weight = losses()[name]
    loss.proxies.project_()
    center_loss, exclusive_term = AngularCenterLoss(center), ExclusiveRegularizer(weight)
    optimizer = torch.optim.Adam(parameter_groups(network, loss, lr=0.01, proxy_lr_multiplier=1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        embeddings, ramp = network(images), loss.ramp()
        total = loss(embeddings, labels) + center_loss(embeddings, labels, loss.proxies)
        if exclusive:
            total = total + ramp * exclusive_term(loss.proxies)
        total.backward()
        optimizer.step()
        loss.proxies.project_()
    proxies = loss.proxies.weight.detach()[:, 0]
    angle = separability(proxies).scores()["smallest_angle"]
    return Panel(name, exclusive, network(images).detach(), labels, proxies, angle)


def draw(panels: list[Panel], file: str) -> None:
    """Draw the panels, without the term above and with it below."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "proximetry"
    from matplotlib import pyplot as plt

    columns = len(panels) // 2
    figure, axes = plt.subplots(2, columns, figsize=(2.4 * columns, 5.2), layout="constrained")
    for panel, ax in zip(panels, axes.T.ravel(), strict=True):
        reach = float(panel.embeddings.norm(dim=1).quantile(0.99))
        for k, digit in enumerate(DIGITS):
            x, y = panel.embeddings[panel.labels == k].T
            ax.scatter(x / reach, y / reach, s=5, color=f"C{k}", label=str(digit), alpha=0.6)
            ax.plot([0, panel.proxies[k, 0]], [0, panel.proxies[k, 1]], color=f"C{k}")
        ax.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal", xticks=[], yticks=[])
        ax.set_title(f"{panel.name}{' + exclusive' * panel.exclusive}", fontsize=9)
        ax.set_xlabel(f"smallest angle {panel.smallest_angle:.0f}°", fontsize=8)
    axes[0, 0].legend(fontsize=7, loc="lower left")
    figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is too small for more
    everything = [
        train(name, exclusive=exclusive) for name in losses() for exclusive in (False, True)
    ]
    draw(everything, sys.argv[1])
