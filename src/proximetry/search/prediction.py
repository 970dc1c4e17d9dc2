"""`Prediction`: the class of an image by a majority vote of its nearest neighbors."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class Prediction(NamedTuple):
    """A predicted class.

    Attributes:
        label: the most frequent class of the neighbors; None if none of them has a class.
        votes: the number of neighbors of this class.
        neighbors: the number of neighbors that have a class.
    """

    label: str | None
    votes: int
    neighbors: int

    def __str__(self) -> str:
        return f"{self.label} ({self.votes} of {self.neighbors})" if self.neighbors else "no class"


def vote(labels: Iterable[str | None]) -> Prediction:
    """Return the most frequent class of neighbors, nearest first; ties go to the nearer one.

    Examples:
        >>> vote(["crow", "jay", None, "jay"])
        Prediction(label='jay', votes=2, neighbors=3)
    """
    counts = Counter(label for label in labels if label is not None)
    if not counts:
        return Prediction(None, 0, 0)
    ((label, votes),) = counts.most_common(1)
    return Prediction(label, votes, counts.total())
