"""Triton kernels of `proximetry.cuda.fused`; tensors are channels-last: [N, H, W, C] in memory.

Each has a plain torch twin in the tests. Sums are taken in float32, whatever the tensors are.
"""
