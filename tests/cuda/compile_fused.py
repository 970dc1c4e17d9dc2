"""Compile the kernels of the fused engine for a GPU; print the local memory of each in bytes.

What the interpreter accepts need not compile, and registers that spill to local memory are slow.
"""

import os
import re
import subprocess
import tempfile
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from proximetry.losses import ProxySGD, RowwiseAdam, create, fused_kernels

NUMBERS = {"scale", "offset", "ignore_above", "gamma", "lr", "momentum", "weight_decay"}
NUMBERS |= {"first_decay", "second_decay", "eps"}
INTEGERS = {"first", "count", "rows", "batch", "classes", "capacity", "splits", "programs"}
LONG_INTEGERS = {"n", "start"}


def argument_type(kernel: str, name: str) -> str:
    is_product = kernel in {"log_sums", "entries", "embedding_gradients", "proxy_gradients"}
    if name in {"labels", "labels_out"}:
        return "*i64"
    if name in {"w", "g", "x_parts"} or (name == "x" and is_product):
        return "*bf16"
    if name in NUMBERS or (kernel, name) in {
        ("class_terms", "weight"),
        ("add_pair_gradients", "factor"),
    }:
        return "fp32"
    if name in LONG_INTEGERS:
        return "i64"
    return "i32" if name in INTEGERS else "*fp32"


def local_memory(name: str, constants: dict[str, object]) -> int:
    """Compile a kernel as the engine launches it."""
    kernel = getattr(fused_kernels, name)
    options = {key: constants[key] for key in ("num_warps", "num_stages") if key in constants}
    kinds, values, hints = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        key = parameter.name
        if key in constants:  # None for arrays that are not needed
            kinds[key], values[(place,)] = "constexpr", constants[key]
            continue
        kinds[key] = argument_type(name, key)
        if kinds[key][0] == "*":
            hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, kinds, values, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage).group(1))


class Recorder:
    """Stands for a kernel; records the options of its launches."""

    def __init__(self, name, kernel, recorded):
        self.name, self.arg_names, self.recorded = name, kernel.arg_names, recorded

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            named = zip(self.arg_names, arguments, strict=False)
            options |= {key: None for key, value in named if value is None}
            self.recorded[self.name, str(sorted(options.items(), key=str))] = options

        return launch


def launches():
    """Return the kernels and options that the engine launches for some losses."""
    names = [key for key, value in vars(fused_kernels).items() if hasattr(value, "arg_names")]
    kernels = {name: getattr(fused_kernels, name) for name in names if name[0] != "_"}
    recorded = {}
    recorders = {name: Recorder(name, kernel, recorded) for name, kernel in kernels.items()}
    # Kernels are recorded, not run: their outputs must be valid labels.
    valid = mock.patch.object(torch, "empty_like", torch.zeros_like)
    on_cpu = mock.patch.object(fused_kernels, "INTERPRETED", tl.constexpr(True))
    with mock.patch.multiple(fused_kernels, **recorders), valid, on_cpu:
        for loss, k, precision in (
            ("proxy_anchor", 1, "bf16"),
            ("proxy_anchor", 1, "float32"),
            ("norm_softmax", 1, "tf32"),
            ("mpa", 4, "bf16"),
            ("soft_triple", 2, "bf16"),
            ("proxy_sigmoid", 1, "bf16"),
            ("uniface", 1, "float32"),
            ("uniface", 1, "tf32"),
            ("proxy_sigmoid", 2, "bf16"),
            ("curricularface", 1, "bf16"),
            ("curricularface", 1, "float32"),
            ("mv_softmax", 2, "tf32"),
            ("proxy_circle", 1, "tf32"),
            ("sphereface2", 1, "bf16"),
            ("sphereface2", 1, "float32"),
            ("sphereface2", 2, "bf16"),
        ):
            settings = {} if k == 1 else {"proxies_per_class": k}
            module = create(loss, 64, 512, engine="fused", precision=precision, **settings)
            x = torch.randn(512, 512, requires_grad=True)
            module(x, torch.arange(512) % 64).backward()
            module.proxy_optimizer = RowwiseAdam(module.proxies, 0.1)
            if precision == "bf16":
                module.proxy_optimizer = ProxySGD(module.proxies, 0.1, momentum=0.9)
            module(x, torch.arange(512) % 64).backward()
    return [(name, options) for (name, _), options in recorded.items()]


if __name__ == "__main__":
    for name, options in launches():
        print(name, local_memory(name, options), options, flush=True)
