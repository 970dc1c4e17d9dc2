"""The search page of a gallery and its HTTP API. Names are imported on first use."""

from typing import TYPE_CHECKING

from proximetry._util.imports import lazy_exports

if TYPE_CHECKING:
    from proximetry.web.app import make_app
    from proximetry.web.server import serve

__all__ = ["make_app", "serve"]

__getattr__ = lazy_exports(__name__, {"app": ("make_app",), "server": ("serve",)}, extra="web")
