"""Names that recipes and the command line check; importing this file loads no torch."""

from typing import Literal, get_args

Similarity = Literal["cosine", "euclidean"]
SIMILARITIES: tuple[str, ...] = get_args(Similarity)

LARGEST_DIM = 65_536
"""Dimensions of an embedding. More, here and below, is a mistake that would eat the memory."""
LARGEST_BITS = 4096
"""Of a binary code."""
LARGEST_SIDE = 4096
"""Of the images that a network takes, in pixels."""
LARGEST_BATCH = 65_536
"""Images in one forward pass."""

POOLINGS: tuple[str, ...] = (
    "auto",
    "avg",
    "max",
    "avg+max",
    "gem",
    "gem-learned",
    "flatten",
    "token",
    "cls-avg",
)

WEIGHTS_SOURCES: tuple[str, ...] = ("auto", "package", "hub", "none")  # or a path
