"""`Finding`: one problem of a dataset; `KINDS` of problems."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from proximetry.data.suggestions import Action, Suggestion


class Kind(NamedTuple):
    """A kind of finding.

    Attributes:
        section: of the page.
        gain: how much a fix is worth; findings are ordered by gain × score.
        strict: whether it makes results wrong for certain, so that `--strict` fails.
        title: for the summary.
    """

    section: str
    gain: float
    strict: bool
    title: str


KINDS = {
    "unreadable": Kind("Files", 1.0, True, "unreadable images"),
    "leakage": Kind("Leakage", 0.95, True, "copies across splits"),
    "label conflict": Kind("Labels", 0.9, True, "copies in several classes"),
    "label error": Kind("Labels", 0.8, False, "probable label errors"),
    "exact duplicate": Kind("Duplicates", 0.5, False, "exact duplicates"),
    "near-duplicate": Kind("Duplicates", 0.4, False, "near-duplicates in a class"),
    "similar classes": Kind("Classes", 0.35, False, "pairs of classes that look like one"),
    "small classes": Kind("Classes", 0.3, False, "very small classes"),
    "unbalanced classes": Kind("Classes", 0.3, False, "very large classes"),
    "tiny": Kind("Files", 0.25, False, "tiny images"),
    "outlier": Kind("Outliers", 0.2, False, "outliers"),
}


class Finding(NamedTuple):
    """One problem.

    Attributes:
        kind: one of `KINDS`.
        rows: images by their row in the catalog; the suggestion is about the first one.
        reason: what was found, in words.
        score: how certain it is, from 0 to 1.
        action: "drop", "relabel" or "move"; None if only a person can decide.
        target: the new class or split.
    """

    kind: str
    rows: tuple[int, ...]
    reason: str
    score: float
    action: Action | None = None
    target: str = ""

    @property
    def gain(self) -> float:
        """The expected gain of a fix, for the order of findings."""
        return KINDS[self.kind].gain * self.score

    @property
    def suggestion(self) -> str:
        """The suggestion in words."""
        words = {"relabel": "relabel to ", "move": "move to ", "drop": "drop"}
        return f"{words[self.action]}{self.target}" if self.action else ""


Findings: TypeAlias = Iterable[Finding]


def suggest_once(findings: Findings, paths: list[str]) -> list[Suggestion]:
    """Return one suggestion for each image: that of its first finding with one."""
    suggestions: dict[int, Suggestion] = {}
    for kind, rows, reason, _, action, target in findings:
        if action is not None:
            label, split = ((target if action == name else "") for name in ("relabel", "move"))
            one = Suggestion(paths[rows[0]], kind, action, label, split, reason)
            suggestions.setdefault(rows[0], one)
    return [*suggestions.values()]
