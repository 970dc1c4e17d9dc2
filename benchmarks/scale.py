"""Estimate bytes, memory and time of a step with sharded proxies, for 1 to 1 024 GPUs.

    python -m benchmarks.scale

A step is the loss, forward and backward, and AdamW on the proxies, without the network. The
constants are of H200 GPUs, eight in a node. The estimate adds computation and communication, which
do not overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from proximetry._util.formatting import format_int, readable_size

# Measured on one H200.
PRODUCT_RATE = 788e12  # operations per second of bf16 products
MEMORY_RATE = 4.3e12  # bytes per second
GPU_BYTES = 120e9  # of its 141 GB; the network needs some
ENGINE_SHARE = 0.33  # of the product rate, reached by the fused engine at 10⁶ classes

# Of the manufacturers, in each direction; the latency is assumed.
NODE = 8  # GPUs
NODE_RATE = 450e9  # bytes per second and GPU in a node, NVLink
NETWORK_RATE = 50e9  # bytes per second and GPU between nodes, 400 Gbit/s
LATENCY = 10e-6  # seconds for each doubling of the number of GPUs in a collective

BATCH, DIM = 128, 512  # samples of each GPU, dimensions
FLOAT = 4  # bytes
BATCH_ARRAYS = 6  # arrays [batch of all GPUs, dim]: gathered, normalized, gradients, copies
ROW_ARRAYS = 4  # arrays of the size of the proxies: proxies, gradient, two moments
ADAMW_PASSES = 7  # reads of proxies, gradient and moments, writes of all but the gradient

GPUS = 1, 8, 64, 256, 1024
CLASSES = 10**5, 10**6, 10**7, 10**8, 10**9


@dataclass(frozen=True)
class Step:
    """One step of a loss with one proxy per class, on each of the GPUs."""

    gpus: int
    classes: int
    by_class: bool = True

    @property
    def embedding_bytes(self) -> int:
        """Embeddings of all GPUs: gathered in forward, their gradients reduced in backward."""
        return self.gpus * BATCH * DIM * FLOAT

    @property
    def value_bytes(self) -> int:
        """All-reduced values: a similarity per sample, and by class a scalar in total.

        By sample also a maximum and a sum per sample.
        """
        values = self.gpus * BATCH
        return FLOAT * (values + 1 if self.by_class else 3 * values)

    @property
    def proxy_bytes(self) -> float:
        """Proxies of a GPU."""
        return self.classes / self.gpus * DIM * FLOAT

    @property
    def memory(self) -> float:
        """Bytes on a GPU for the loss and its optimizer."""
        return ROW_ARRAYS * self.proxy_bytes + BATCH_ARRAYS * self.embedding_bytes

    @property
    def seconds(self) -> float:
        """Seconds of the loss, its optimizer and the communication."""
        products, passes = (3, 2) if self.by_class else (4, 3)
        operations = 2 * products * self.gpus * BATCH * DIM * self.classes / self.gpus
        computing = operations / (ENGINE_SHARE * PRODUCT_RATE)
        loss = max(computing, passes * self.proxy_bytes / MEMORY_RATE)
        return loss + ADAMW_PASSES * self.proxy_bytes / MEMORY_RATE + self.communication

    @property
    def communication(self) -> float:
        """Seconds of the collectives, as rings."""
        rate = NODE_RATE if self.gpus <= NODE else NETWORK_RATE
        sums = 1 if self.by_class else 2
        # A sum is twice the traffic of a gather.
        moved = (2 * self.embedding_bytes + 2 * self.value_bytes) * (1 - 1 / self.gpus)
        return moved / rate + (2 + sums) * LATENCY * math.log2(self.gpus)


def cell(gpus: int, classes: int) -> str:
    """Return milliseconds by class and by sample, and memory; a dash if it does not fit."""
    steps = [Step(gpus, classes, by_class) for by_class in (True, False)]
    if steps[0].memory > GPU_BYTES:
        return "–"
    times = [1000 * step.seconds for step in steps]
    low, high = (f"{time:.0f}" if time >= 100 else f"{time:.2g}" for time in times)
    return f"{low} / {high} ms, {readable_size(steps[0].memory)}"


def table() -> str:
    """Return the estimates as Markdown, a row for each number of classes."""
    head = ["classes", *(f"{gpus} GPU{'s' * (gpus > 1)}" for gpus in GPUS)]
    rows = [[format_int(classes), *(cell(gpus, classes) for gpus in GPUS)] for classes in CLASSES]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
