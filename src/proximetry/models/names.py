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
MOST_TTA_CROPS = 16
"""Of test-time augmentation, a forward pass each."""

POOLINGS: tuple[str, ...] = (
    "auto",
    "pre-logits",
    "avg",
    "max",
    "avg+max",
    "gem",
    "gem-learned",
    "flatten",
    "token",
    "cls-avg",
)

OWN = "own:"
"""What stands before the name of a dataset, network or loss of one's own, in place of ours."""
VECTOR_BACKBONES: tuple[str, ...] = ("vectors", "vectors_mlp")
"""Networks that take vectors instead of images: a head alone, or one behind a small MLP."""

WEIGHTS_SOURCES: tuple[str, ...] = ("auto", "package", "hub", "none")  # or a path
