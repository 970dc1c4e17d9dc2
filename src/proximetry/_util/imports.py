"""Optional packages, and imports on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def import_optional(module: str, extra: str | None, purpose: str) -> Any:
    """Import an optional package; if it is missing, raise with the extra or package to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise missing_package(purpose, module, extra) from error


def missing_package(purpose: str, module: str, extra: str | None) -> ModuleNotFoundError:
    """Return an error that names what to install."""
    package = module.partition(".")[0]
    command = install_hint(extra) if extra else f"pip install {package}"
    return ModuleNotFoundError(f"{purpose} needs {package}: {command}", name=package)


def install_hint(extra: str) -> str:
    """Return how to install an extra."""
    return f"install the extra {extra!r}, in a clone with pip install '.[{extra}]'"


def lazy_exports(
    package: str, modules: Mapping[str, Sequence[str]], extra: str | None = None
) -> Callable[[str], Any]:
    """Return a package's `__getattr__` that imports its names on first use.

    If an import fails, the error names `extra` as what to install.
    """
    origins = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{package}.{origins[name]}"), name)
        except ModuleNotFoundError as error:
            if extra is None:
                raise
            # This extra includes the extras of lower packages, which the error may name.
            raise missing_package(f"{package}.{name}", error.name or "", extra) from error

    return load
