"""A first look: every loss learns the same small problem, and is judged on classes never seen.

Each class is a point in a 16-dimensional space, seen through a random 64-dimensional lens that
adds strong noise in directions that mean nothing. The embedder has to find the directions that
matter; classes it was not trained on tell whether it did.
"""

import time

import torch
from torch import Tensor, nn

from proximetry import losses, metrics

SEEN, UNSEEN, WIDE, TRUE, DIM = 40, 40, 64, 16, 16


def samples(world: dict[str, Tensor], labels: Tensor, generator: torch.Generator) -> Tensor:
    """Noisy observations of the classes ``labels``."""
    shape = (len(labels), WIDE)
    meaning = world["classes"][labels] + 0.5 * torch.randn(len(labels), TRUE, generator=generator)
    return meaning @ world["lens"] + torch.randn(shape, generator=generator) @ world["noise"]


def train(name: str, world: dict[str, Tensor], steps: int = 500) -> nn.Module:
    """Fit a linear embedder on the seen classes."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model, loss = nn.Linear(WIDE, DIM), losses.create(name, SEEN, DIM)
    groups = losses.parameter_groups(model, loss, lr=1e-2, proxy_lr_multiplier=10)
    optimizer = torch.optim.AdamW(groups)
    for _ in range(steps):
        labels = torch.randint(0, SEEN, (128,), generator=generator)
        optimizer.zero_grad()
        loss(model(samples(world, labels, generator)), labels).backward()
        optimizer.step()
    return model


def main() -> None:
    """Print one line per loss."""
    generator = torch.Generator().manual_seed(0)
    world = {
        "classes": torch.randn(SEEN + UNSEEN, TRUE, generator=generator),
        "lens": torch.randn(TRUE, WIDE, generator=generator) / TRUE**0.5,
        "noise": torch.randn(WIDE, WIDE, generator=generator) / WIDE**0.5 * 1.5,
    }
    labels = torch.arange(UNSEEN * 20) % UNSEEN + SEEN
    test = samples(world, labels, generator)
    print(f"{SEEN} classes to train on, {UNSEEN} others to be found again, in percent:\n")
    print(f"{'':24}{'recall@1':>9}{'MAP@R':>9}{'nDCG@8':>9}{'seconds':>9}")
    for name in ["(raw vectors)", *losses.LOSSES]:
        start = time.perf_counter()
        model = nn.Identity() if name.startswith("(") else train(name, world)
        with torch.no_grad():
            result = metrics.evaluate(model(test), labels)
        values = [100 * result[key] for key in ("recall@1", "map@r", "ndcg@8")]
        seconds = time.perf_counter() - start
        print(f"{name:24}" + "".join(f"{value:9.1f}" for value in values) + f"{seconds:9.1f}")
    print("\nNext: README.md for ten lines in your own loop, docs/losses for which loss when.")


if __name__ == "__main__":
    main()
