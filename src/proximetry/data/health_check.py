"""`health`: find problems of a dataset before training."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from proximetry.data.catalog import Catalog

if TYPE_CHECKING:
    from proximetry.health import Health  # a higher package


def health(images: Catalog | str | os.PathLike[str], model: Any = None, **options: Any) -> Health:
    """Find duplicates, leakage, wrong labels and unreadable images; see `proximetry.check`."""
    import proximetry  # a higher package, which only this function needs

    return proximetry.check(images, model, **options)
