"""Faces: detection, alignment, and the evaluation protocols of LFW, YTF, IJB and MegaFace.

Names are imported on first use.
"""

# ruff: noqa: F403
from typing import TYPE_CHECKING, Literal, TypeAlias

from proximetry._util.imports import lazy_exports

if TYPE_CHECKING:
    from proximetry.faces.align import *
    from proximetry.faces.detector import *
    from proximetry.faces.face_embedder import *
    from proximetry.faces.geometry import *
    from proximetry.faces.identify import *
    from proximetry.faces.ijb import *
    from proximetry.faces.pair_protocol import *
    from proximetry.faces.verify import *

_EXPORTS = {
    "align": "Alignment align_folder",
    "geometry": "similarity template warp",
    "detector": "Detector Faces find_detector",
    "face_embedder": "FaceEmbedder open_embedder",
    "identify": "identify_people read_people",
    "ijb": "TemplateProtocol read_ijb verify_templates",
    "pair_protocol": "PairProtocol read_protocol",
    "verify": "verify_pairs",
}

__all__ = [name for names in _EXPORTS.values() for name in names.split()]

Size: TypeAlias = Literal["112x112", "112x96"]
"""Height × width of an aligned face."""

Keep: TypeAlias = Literal["largest", "center", "all"]
"""Which faces of an image to keep."""

Flip: TypeAlias = Literal["concat", "sum", "none"]
"""How to combine the embeddings of an image and its mirror image."""

BadImages: TypeAlias = Literal["error", "skip"]
"""What to do with images that are missing or unreadable."""

__getattr__ = lazy_exports(
    __name__, {module: names.split() for module, names in _EXPORTS.items()}, extra="faces"
)
