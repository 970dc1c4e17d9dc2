"""Measure time and memory of a training step with very many identities.

python -m benchmarks.identities [--identities 100000]

ArcFace and RegularFace's exclusive term on a batch of embeddings, forward, backward, SGD and
projection. A straightforward implementation holds the cosines of all pairs of proxies, and those
of the batch with all proxies.
"""

import argparse
import time

import torch

from benchmarks.measure import peak_memory, versions
from proximetry.losses import ArcFace, ExclusiveRegularizer


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--identities", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=600)
    parser.add_argument("--dim", type=int, default=512)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    loss = ArcFace(arguments.identities, arguments.dim)
    exclusive = ExclusiveRegularizer(6.0)
    loss.proxies.project_()
    x = torch.randn(arguments.batch, arguments.dim, requires_grad=True)
    y = torch.randint(arguments.identities, (arguments.batch,))
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)  # with momentum: one more such array

    def step() -> None:
        optimizer.zero_grad()
        (loss(x, y) + exclusive(loss.proxies)).backward()
        optimizer.step()
        loss.proxies.project_()

    start = time.perf_counter()
    memory = peak_memory(step)
    seconds = time.perf_counter() - start
    weight = loss.proxies.weight.nbytes
    print(versions())
    print(
        f"{arguments.identities} identities, {arguments.dim} dimensions, batch {arguments.batch}: "
        f"{seconds:.1f} s per step, {memory / 2**20:.0f} MiB beyond the proxies "
        f"({weight / 2**20:.0f} MiB; their gradient is as large); the cosines of all pairs of "
        f"proxies would be {4 * arguments.identities**2 / 2**30:.1f} GiB"
    )


if __name__ == "__main__":
    main()
