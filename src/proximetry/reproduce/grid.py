"""Tables in Markdown."""

from collections.abc import Iterable

NOTHING = "—"


def table_head(columns: Iterable[str]) -> list[str]:
    """The first two lines of a table."""
    names = list(columns)
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]


def table_line(cells: Iterable[object]) -> str:
    """A line of it; None is a dash."""
    return "| " + " | ".join(NOTHING if c is None else str(c) for c in cells) + " |"
