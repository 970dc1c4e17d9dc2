"""`health`: find problems of a dataset before training."""

from __future__ import annotations

import os
from typing import Any

from proximetry.data.catalog import Catalog


def health(images: Catalog | str | os.PathLike[str], model: Any = None, **options: Any) -> Any:
    """Return the `Health` of a dataset; see `proximetry.check`."""
    import proximetry  # a higher package, which only this function needs

    return proximetry.check(images, model, **options)
