"""Galleries: images, their vectors and an index on disk. Names are imported on first use."""

from typing import TYPE_CHECKING

from proximetry._util.imports import lazy_exports

if TYPE_CHECKING:
    from proximetry.search.duplicates import Duplicates
    from proximetry.search.gallery import Gallery
    from proximetry.search.image_sheets import contact_sheet
    from proximetry.search.indexing import index
    from proximetry.search.prediction import Prediction
    from proximetry.search.search_result import SearchResult

__all__ = ["Duplicates", "Gallery", "Prediction", "SearchResult", "contact_sheet", "index"]

__getattr__ = lazy_exports(
    __name__,
    {
        "duplicates": ("Duplicates",),
        "gallery": ("Gallery",),
        "search_result": ("SearchResult",),
        "image_sheets": ("contact_sheet",),
        "indexing": ("index",),
        "prediction": ("Prediction",),
    },
    extra="search",
)
