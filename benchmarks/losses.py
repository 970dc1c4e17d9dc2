"""Compare losses with pytorch-metric-learning: time and memory of forward + backward.

python -m benchmarks.losses [--repeats 9] [--only proxy_anchor] [--busy]
python -m benchmarks.losses --device cuda [--only proxy_anchor]

With `--busy`, two other processes keep two cores busy. On a GPU, the table of
`benchmarks.losses_gpu` is printed.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from pytorch_metric_learning import losses as peer_losses
from pytorch_metric_learning import regularizers as peer_regularizers
from torch import Tensor, nn

from benchmarks import losses_gpu
from benchmarks.measure import Run, alternate, peak_memory, versions
from proximetry import losses

BATCH, DIM = 180, 512


@dataclass(frozen=True)
class Case:
    """One row of the table: two implementations of a loss."""

    name: str
    loss: nn.Module
    peer: nn.Module
    call: Callable[[nn.Module, Tensor, Tensor], Tensor]
    repeats: int


def plain(loss: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    value: Tensor = loss(x, y)
    return value


def cases(only: str | None) -> Iterator[Case]:
    for classes, repeats in ((100, 100), (11_318, 9), (100_000, 5)):
        if only in (None, "proxy_anchor"):
            torch.manual_seed(0)
            anchor = losses.ProxyAnchor(classes, DIM)
            peer = peer_losses.ProxyAnchorLoss(classes, DIM)
            peer.proxies.data = anchor.proxies.weight.detach()[:, 0].clone()
            yield Case(f"Proxy-Anchor, {classes} classes", anchor, peer, plain, repeats)
    for classes, repeats in ((100, 100), (1_000, 21)):
        if only in (None, "soft_triple"):
            torch.manual_seed(0)
            triple = losses.SoftTriple(classes, DIM, proxies_per_class=10, tau=0.0)
            peer = peer_losses.SoftTripleLoss(classes, DIM, 10)
            # the peer's weight is [D, C·K], with the proxies of a class in adjacent columns
            peer.fc.data = triple.proxies.weight.detach().reshape(-1, DIM).T.contiguous()
            yield Case(f"SoftTriple, {classes} classes × 10", triple, peer, plain, repeats)
    if only in (None, "regularface"):
        torch.manual_seed(0)
        proxies = losses.Proxies(11_318, DIM)
        exclusive = nn.ModuleList([proxies, losses.ExclusiveRegularizer()])
        weights = nn.ParameterList([proxies.weight.detach()[:, 0].clone()])
        peer = nn.ModuleList([peer_regularizers.RegularFaceRegularizer(), weights])
        yield Case("RegularFace, 11318 classes", exclusive, peer, regularizer, 5)


def regularizer(pair: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    assert isinstance(pair, nn.ModuleList)
    if isinstance(pair[0], losses.Proxies):
        value: Tensor = pair[1](pair[0])
    else:
        value = pair[0](next(pair[1].parameters()))
    return value


def step(
    loss: nn.Module,
    x: Tensor,
    y: Tensor,
    call: Callable[[nn.Module, Tensor, Tensor], Tensor] = plain,
) -> Run:
    def run() -> Tensor:
        x.grad = None
        loss.zero_grad(set_to_none=True)
        value = call(loss, x, y)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    return run


def measure(case: Case, repeats: int | None) -> str:
    torch.manual_seed(1)
    classes = next(p for p in case.loss.parameters() if p.ndim == 3).shape[0]
    x = torch.randn(BATCH, DIM, requires_grad=True)
    y = torch.randint(0, classes, (BATCH,))
    run_loss, run_peer = (step(loss, x, y, case.call) for loss in (case.loss, case.peer))
    torch.testing.assert_close(run_loss(), run_peer(), rtol=1e-4, atol=1e-5)
    gradient = sum(p.numel() * p.element_size() for p in case.loss.parameters())
    memory = []
    for run, loss in ((run_loss, case.loss), (run_peer, case.peer)):
        loss.zero_grad(set_to_none=True)
        memory.append(max(0, peak_memory(run) - gradient) / 2**20)
        loss.zero_grad(set_to_none=True)
    seconds = alternate({"loss": run_loss, "peer": run_peer}, repeats or case.repeats)
    return (
        f"| {case.name} | {seconds['loss'] * 1e3:.1f} ms | {seconds['peer'] * 1e3:.1f} ms | "
        f"{seconds['peer'] / seconds['loss']:.2f} × | {memory[0]:.1f} MiB | "
        f"{memory[1]:.1f} MiB | {memory[0] / max(memory[1], 1e-9):.3f} |"
    )


def measure_intra_class_term(repeats: int | None) -> str:
    """Compare SoftTriple with its intra-class term (tau > 0) and without it."""
    classes, per_class, batch = 11_318, 2, 32
    torch.manual_seed(0)
    x = torch.randn(batch, DIM, requires_grad=True)
    y = torch.randint(0, classes, (batch,))
    runs = {
        f"tau = {tau}": step(
            losses.SoftTriple(classes, DIM, proxies_per_class=per_class, tau=tau), x, y
        )
        for tau in (0.0, 0.2)
    }
    seconds = alternate(runs, repeats or 21)
    without, with_term = seconds.values()
    times = ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in seconds.items())
    return (
        f"SoftTriple, {classes} classes × {per_class}, batch {batch}: {times}, "
        f"ratio {with_term / without:.2f}"
    )


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep a number of cores busy with other processes."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, help="runs behind each median")
    parser.add_argument(
        "--only", help="proxy_anchor, soft_triple or regularface; on a GPU any loss"
    )
    parser.add_argument("--busy", action="store_true", help="keep two cores busy")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        losses_gpu.print_table(arguments.only)
        return
    print(f"batch {BATCH}, dim {DIM}, forward + backward; {versions()}")
    print("memory is beyond the parameters and their gradient; peer: pytorch-metric-learning\n")
    print("| | proximetry | peer | speed | memory | memory of the peer | ratio |")
    print("|---|---|---|---|---|---|---|")
    with busy_cores(2 * arguments.busy):
        for case in cases(arguments.only):
            print(measure(case, arguments.repeats), flush=True)
        if arguments.only in (None, "soft_triple"):
            print(f"\n{measure_intra_class_term(arguments.repeats)}")


if __name__ == "__main__":
    main()
