"""Triton kernels, the layers that use them, and CUDA graphs.

Kernels of layers take channels-last tensors ([N, H, W, C] in memory) and accumulate in float32.
The tests compare each with plain torch.
"""
