"""Optional packages, and imports on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

_COMPILER, _COMPILER_UTILS = "torch._dynamo", "torch._dynamo.utils"


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


def defer_compiler() -> None:
    """Import torch's compiler, which takes longer than torch itself, only when it is needed.

    torchvision imports it for one operator, and every optimizer to exclude itself from compilation.
    For a process that compiles no optimizer.
    """
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = _DeferredCompiler(_COMPILER)
        sys.modules[_COMPILER_UTILS] = _DeferredUtils(_COMPILER_UTILS)
        sys.meta_path.insert(0, _CompilerFinder())


def _import_compiler() -> Any:
    """Import the compiler in place of its placeholder modules."""
    if isinstance(sys.modules[_COMPILER], _Deferred):
        del sys.modules[_COMPILER], sys.modules[_COMPILER_UTILS]
    return import_module(_COMPILER)


class _Deferred(ModuleType):
    """Placeholder for a module of the compiler until another of its names is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` reads `__file__` of every module
            raise AttributeError(name)
        _import_compiler()
        return getattr(import_module(self.__name__), name)


class _DeferredCompiler(_Deferred):
    """The names that optimizers use."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package

    def disable(self, function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        return function

    def graph_break(self) -> None:
        pass


class _DeferredUtils(_Deferred):
    """The names that torchvision uses."""

    def is_compile_supported(self, device: str) -> bool:
        return bool(_import_compiler().utils.is_compile_supported(device))


class _CompilerFinder(MetaPathFinder, Loader):
    """Imports the compiler before its submodules; finds submodules loaded by that import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        deferred = isinstance(sys.modules.get(_COMPILER), _Deferred)
        if not (deferred and name.startswith(f"{_COMPILER}.")):
            return None
        compiler = _import_compiler()
        if name in sys.modules:
            return spec_from_loader(name, self)
        return PathFinder.find_spec(name, compiler.__path__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass
