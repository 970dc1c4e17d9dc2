"""Names and limits for recipes and the command line; imports no torch."""

from typing import get_args

from proximetry._util.types import EmbedderSimilarity

Similarity = EmbedderSimilarity
SIMILARITIES: tuple[str, ...] = get_args(Similarity)

# Limits of memory.
MAX_DIM = 65_536  # dimensions of an embedding
MAX_BITS = 4096  # of a binary code
MAX_SIDE = 4096  # of an image, in pixels
MAX_BATCH_SIZE = 65_536  # images per forward pass
MAX_TTA_CROPS = 16  # of test-time augmentation, one forward pass each

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

HUB = "hub:"
"""Prefix of the name of a repository on the Hugging Face Hub, where a path is also accepted."""
ONNX = "onnx"
"""Name of the backbone of an embedder that is an ONNX file."""
CUSTOM = "custom:"
"""Prefix of the names of custom datasets, networks and losses."""
VECTOR_BACKBONES: tuple[str, ...] = ("vectors", "vectors_mlp")
"""Networks for vectors instead of images: a linear head, without or with a small MLP before it."""

WEIGHTS_SOURCES: tuple[str, ...] = ("auto", "package", "hub", "none")  # or a path
