"""Proximetry: deep metric learning with proxies.

import proximetry as px

run = px.train("photos")
gallery = px.index("photos", model=run.path)
gallery.search("query.jpg").show()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from proximetry._util.imports import lazy_exports

if TYPE_CHECKING:
    from proximetry.data import Catalog
    from proximetry.health import Health, check
    from proximetry.metrics import Metrics, evaluate, retrieve
    from proximetry.models import Embedder
    from proximetry.recipe import Recipe
    from proximetry.run import Run, train
    from proximetry.search import Gallery, index

__version__ = "0.2.0"

__all__ = [
    "Catalog",
    "Embedder",
    "Gallery",
    "Health",
    "Metrics",
    "Recipe",
    "Run",
    "check",
    "evaluate",
    "index",
    "retrieve",
    "train",
]

_PACKAGES = (
    "kernels",
    "data",
    "faces",
    "health",
    "losses",
    "metrics",
    "models",
    "recipe",
    "reports",
    "reproduce",
    "search",
    "training",
    "web",
)
_load = lazy_exports(
    __name__,
    {
        "data": ("Catalog",),
        "health": ("Health", "check"),
        "metrics": ("Metrics", "evaluate", "retrieve"),
        "models": ("Embedder",),
        "run": ("Run", "train"),
        "search": ("Gallery", "index"),
        "recipe": ("Recipe",),
    },
)


def __getattr__(name: str) -> Any:
    """Import a package or a name on first access; `import proximetry` loads none."""
    return import_module(f"proximetry.{name}") if name in _PACKAGES else _load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
