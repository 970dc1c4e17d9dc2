"""Proximetry: deep metric learning with proxies."""

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"

_PACKAGES = (
    "kernels",
    "data",
    "faces",
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


def __getattr__(name: str) -> ModuleType:
    """Import a package on first access; `import proximetry` loads none."""
    if name in _PACKAGES:
        return import_module(f"proximetry.{name}")
    raise AttributeError(f"module 'proximetry' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES})
