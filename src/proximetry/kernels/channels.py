"""Assignment of channels to the programs of a kernel."""

import triton
import triton.language as tl

# Channels per program; 32 in bfloat16 are two memory sectors.
CHANNELS = 32

# Triton recompiles a kernel for sizes that are 1 or divisible by 16. That is useful for the number
# of channels, which decides whether loads of 16 bytes are possible, but not for these sizes.
SIZES = ["rows", "programs", "strips", "half", "N", "H", "W", "HO", "WO", "PT", "PL"]


@triton.jit
def program_channels(C, BC: tl.constexpr):
    """Return the channels of this program, and its index among those with the same channels."""
    blocks = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    return (pid % blocks) * BC + tl.arange(0, BC), pid // blocks
