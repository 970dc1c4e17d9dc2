"""Seeds for every purpose from the one seed of a run."""

import numpy as np


def derive(*numbers: int) -> int:
    """Return a 63-bit seed that depends on all the numbers, the same on every machine."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state[0]) >> 1
