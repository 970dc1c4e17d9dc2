"""Compare losses on a GPU with pytorch-metric-learning and the hardware's limit: time and memory.

python -m benchmarks.losses --device cuda [--only proxy_anchor]
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from pytorch_metric_learning import losses as peer_losses
from torch import Tensor, nn

from benchmarks.measure import peak_memory, versions
from proximetry import losses

BATCH, DIM = 512, 512
#: Measured on an H200: dense bf16 products of random matrices, and copies on the device.
FLOPS, BANDWIDTH = 790e12, 4.3e12
#: Number of bf16 matrix products per product, by precision.
PRODUCTS = {"bf16": 1, "tf32": 3, "float32": 6}


@dataclass(frozen=True)
class Case:
    """A loss, its size, and how it is computed."""

    name: str
    classes: int
    k: int = 1
    precision: str = "bf16"
    engine: str = "fused"
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: type[losses.ProxyOptimizer] | None = None

    def loss(self) -> losses.ProxyLoss:
        """Return the loss, on the GPU."""
        settings = dict(self.settings)
        if self.k > 1:
            settings["proxies_per_class"] = self.k
        with torch.device("cuda"):
            loss = losses.create(
                self.name, self.classes, DIM, engine=self.engine, precision=self.precision,
                **settings,
            )  # fmt: skip
            if self.optimizer is not None:
                loss.proxy_optimizer = self.optimizer(loss.proxies, 1e-3)  # type: ignore[call-arg]
        loss.check_labels = False
        return loss

    def peer(self) -> nn.Module | None:
        """Return the loss of pytorch-metric-learning; None if it is missing or too large."""
        if self.k > 1 or self.optimizer is not None or self.classes > 10**6:
            return None
        names = {
            "proxy_anchor": "ProxyAnchorLoss",
            "arcface": "ArcFaceLoss",
            "norm_softmax": "NormalizedSoftmaxLoss",
        }
        if self.name not in names:
            return None
        peer: nn.Module = getattr(peer_losses, names[self.name])(self.classes, DIM).cuda()
        return peer

    def floor(self) -> float:
        """Return the milliseconds for the products or for memory traffic of the proxies."""
        by_class = losses.LOSSES[self.name].form.by == "class"
        products = 3 if by_class and self.optimizer is None else 4
        rows = self.classes * self.k
        flops = products * 2 * BATCH * rows * DIM * PRODUCTS[self.precision]
        passes = (1 if products == 3 else 2) + 1  # reads of the proxies, and one write
        return 1e3 * max(flops / FLOPS, passes * rows * DIM * 4 / BANDWIDTH)

    def title(self) -> str:
        """Return the first cell of its row."""
        parts = [self.name, f"{self.classes} classes"]
        parts += [f"K = {self.k}"] if self.k > 1 else []
        parts += [f"{key} = {value}" for key, value in self.settings.items()]
        parts += [self.precision, *([] if self.engine == "fused" else [self.engine])]
        parts += [] if self.optimizer is None else [f"with {self.optimizer.__name__}"]
        return ", ".join(parts)


def cases() -> Iterator[Case]:
    for name in losses.LOSSES:
        k = 2 if "proxies_per_class" in losses.loss_settings(name) else 1
        yield Case(name, 11_318, k)
    for precision in ("bf16", "tf32", "float32"):
        yield Case("proxy_anchor", 11_318, precision=precision)
        yield Case("proxy_anchor", 100_000, precision=precision)
        yield Case("proxy_anchor", 10**6, precision=precision)
    yield Case("proxy_anchor", 10**6, precision="float32", engine="streamed")
    for name in ("arcface", "norm_softmax"):
        yield Case(name, 10**6)
    for name in ("mpa", "mpa_ap"):
        yield Case(name, 10**6, 4)
        yield Case(name, 10**6, 4, settings={"tau": 0.0})
    for optimizer in (losses.ProxySGD, losses.RowwiseAdam):
        yield Case("proxy_anchor", 10**6, optimizer=optimizer)
        yield Case("proxy_anchor", 10**7, optimizer=optimizer)
        yield Case("arcface", 10**6, optimizer=optimizer)


def step(loss: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    parameters = [x, *loss.parameters()]

    def run() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        value: Tensor = loss(x, y)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    return run


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Return the median time between two events around a run."""
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graphed(run: Callable[[], Tensor]) -> Callable[[], None]:
    """Return a replay of a CUDA graph of the run."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measure(case: Case) -> str:
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(BATCH, DIM, device="cuda", generator=generator, requires_grad=True)
    y = torch.randint(0, case.classes, (BATCH,), device="cuda", generator=generator)
    loss, peer = case.loss(), case.peer()
    repeats = 50 if case.classes < 50_000 else 9
    run = step(loss, x, y)
    eager = milliseconds(run, repeats)
    loss.zero_grad(set_to_none=True)
    gradient = 0 if case.optimizer else loss.proxies.weight.numel() * 4
    memory = (peak_memory(run, "cuda") - gradient) / 2**20
    in_graph = f"{milliseconds(graphed(run), repeats):.2f}" if case.engine == "fused" else ""
    recorded = ""
    if case.classes < 50_000:  # replaces the forward pass of the loss
        example = x.detach().clone().requires_grad_(), y.clone()
        torch.cuda.make_graphed_callables(loss, example)
        recorded = f"{milliseconds(run, repeats):.2f}"
    other = "" if peer is None else f"{milliseconds(step(peer, x, y), repeats):.2f}"
    floor = case.floor()
    cells = [
        case.title(),
        f"{eager:.2f}",
        recorded,
        in_graph,
        other,
        f"{memory:.0f}",
        f"{floor:.2f}",
    ]
    return f"| {' | '.join(cells)} | {floor / eager:.0%} |"


def print_table(only: str | None) -> None:
    """Print a row for each case."""
    print(f"batch {BATCH}, dim {DIM}, forward + backward, medians in ms; {versions()}")
    print("memory is beyond the proxies and their gradient; peer: pytorch-metric-learning, float32")
    print(
        "recorded: forward and backward by torch.cuda.make_graphed_callables; also the host's time"
    )
    print(f"floor: {FLOPS / 1e12:.0f} TFLOP/s in bf16 and {BANDWIDTH / 1e12:.1f} TB/s\n")
    print("| | eager | recorded | in a CUDA graph | peer | memory, MiB | floor | floor / eager |")
    print("|---|---|---|---|---|---|---|---|")
    for case in cases():
        if only in (None, case.name):
            print(measure(case), flush=True)
            torch.cuda.empty_cache()
