"""Galleries: images, their vectors and an index, on disk, to be searched.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from proximetry._util.errors import lazy_exports

if TYPE_CHECKING:
    from proximetry.search.exact import Duplicates
    from proximetry.search.gallery import Gallery
    from proximetry.search.result import SearchResult
    from proximetry.search.sheet import contact_sheet

__all__ = ["Duplicates", "Gallery", "SearchResult", "contact_sheet"]

__getattr__ = lazy_exports(
    __name__,
    {
        "exact": ("Duplicates",),
        "gallery": ("Gallery",),
        "result": ("SearchResult",),
        "sheet": ("contact_sheet",),
    },
    extra="search",
)
