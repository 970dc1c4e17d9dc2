"""The health of a dataset before training. Names are imported at first use."""

from typing import TYPE_CHECKING

from proximetry._util.imports import lazy_exports

if TYPE_CHECKING:
    from proximetry.health.finding import Finding
    from proximetry.health.health import Health, check

__all__ = ["Finding", "Health", "check"]

__getattr__ = lazy_exports(
    __name__, {"finding": ("Finding",), "health": ("Health", "check")}, extra="report"
)
