"""How the programs of a kernel share the channels, for all kernels here."""

import triton
import triton.language as tl

# Channels of one program; 32 in bfloat16 are two sectors of memory.
CHANNELS = 32

# Triton compiles a kernel anew for sizes that are one or divide by 16. That pays for the number of
# channels alone, which decides whether 16 bytes are read at once; not for these.
SIZES = ["rows", "programs", "strips", "half", "N", "H", "W", "HO", "WO", "PT", "PL"]


@triton.jit
def share(C, BC: tl.constexpr):
    """The channels of this program, and its number among the programs that have the same."""
    blocks = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    return (pid % blocks) * BC + tl.arange(0, BC), pid // blocks
