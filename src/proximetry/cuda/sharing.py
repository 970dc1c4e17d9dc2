"""How the programs of a kernel share the channels, for all kernels here."""

import triton
import triton.language as tl

# Channels of one program; 32 in bfloat16 are two sectors of memory.
CHANNELS = 32


@triton.jit
def share(C, BC: tl.constexpr):
    """The channels of this program, and its number among the programs that have the same."""
    blocks = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    return (pid % blocks) * BC + tl.arange(0, BC), pid // blocks
