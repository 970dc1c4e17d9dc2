"""The fast path on NVIDIA GPUs: Triton kernels, the layers that use them, and CUDA graphs.

Kernels of layers take channels-last tensors, [N, H, W, C] in memory, and sum in float32 whatever
the tensors are. Each has a plain torch twin in the tests.
"""
