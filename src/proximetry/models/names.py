"""Names that recipes and the command line check; importing this file loads no torch."""

from typing import Literal, get_args

Similarity = Literal["cosine", "euclidean"]
SIMILARITIES: tuple[str, ...] = get_args(Similarity)

POOLINGS: tuple[str, ...] = (
    "auto",
    "avg",
    "max",
    "avg+max",
    "gem",
    "gem-learned",
    "flatten",
    "token",
)

WEIGHTS_SOURCES: tuple[str, ...] = ("auto", "package", "hub", "none")  # or a path
