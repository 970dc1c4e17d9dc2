"""The health of a dataset as one HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from proximetry._util.formatting import format_int
from proximetry.data import VectorCatalog
from proximetry.health.finding import KINDS, Finding
from proximetry.health.health import Health
from proximetry.reports.html_page import page, percent, section, short
from proximetry.reports.thumbnails import load_thumbnail

MAX_FINDINGS = 200


def health_page(health: Health) -> bytes:
    """Return the page: the findings by section, those with the largest expected gain first."""
    catalog, shown = health.catalog, select(health.findings)
    sections = []
    for title in dict.fromkeys(KINDS[finding.kind].section for finding in health.findings):
        kinds = {k: kind.title for k, kind in KINDS.items() if kind.section == title}
        rows = [
            {
                "images": [_image(health, row) for row in finding.rows],
                "kind": finding.kind,
                "reason": finding.reason,
                "suggestion": finding.suggestion,
                "score": finding.score,
            }
            for finding in shown
            if finding.kind in kinds
        ]
        counts = [(kinds[k], count) for k, count in health.counts.items() if k in kinds]
        sections.append(section(title, "health.html", rows=rows, counts=counts))
    cards = [
        (KINDS[kind].title.capitalize(), format_int(count), "")
        for kind, count in health.counts.items()
    ]
    if health.label_noise is not None:
        cards.append(("Wrong labels", f"{percent(health.label_noise)} %", "estimated share"))
    classes = format_int(len(catalog.class_names))
    about = f"{format_int(len(catalog))} images of {classes} classes in {catalog.root}"
    notes = [*health.notes, *([] if health.findings else ["No problem was found."])]
    if len(shown) < len(health.findings):
        total = format_int(len(health.findings))
        notes.append(f"{len(shown)} of {total} findings are shown; the suggestions have all.")
    return page(
        "Health of a dataset",
        sections,
        heading=f"Health of {short(catalog.root.resolve().name)}",
        about=about,
        notes=notes,
        cards=cards,
    )


def select(findings: Iterable[Finding], limit: int = MAX_FINDINGS) -> list[Finding]:
    """Return the first findings, with an equal share for each kind that has enough."""
    ordered, seen = list(findings), Counter[str]()
    share = limit // max(1, len({finding.kind for finding in ordered}))
    ranks = []
    for finding in ordered:
        ranks.append(seen[finding.kind] >= share)
        seen[finding.kind] += 1
    first = sorted(range(len(ordered)), key=lambda i: (ranks[i], i))[:limit]
    return [ordered[i] for i in sorted(first)]


def _image(health: Health, row: int) -> dict[str, Any]:
    catalog = health.catalog
    vectors = isinstance(catalog, VectorCatalog) and not catalog.has_paths
    file, path, split = catalog.file(row), catalog.paths[row], catalog.splits[row]
    return {
        "file": file,
        "path": short(path),
        "label": short(catalog.labels[row]),
        "split": "" if split == "all" else split,
        "thumbnail": None if vectors else load_thumbnail(file),
        "placeholder": short(path) if vectors else "not readable",
    }
