"""Faces: detection and alignment, and the test protocols of LFW, YTF and MegaFace.

Names are imported on first use.
"""

from typing import TYPE_CHECKING, Literal, TypeAlias

from proximetry._util.errors import lazy_exports

if TYPE_CHECKING:
    from proximetry.faces.align import Alignment, align_folder
    from proximetry.faces.alignment import similarity, template, warp
    from proximetry.faces.detector import Detector, Faces, find_detector
    from proximetry.faces.embedder import FaceEmbedder, open_embedder
    from proximetry.faces.identify import identify_people, read_people
    from proximetry.faces.pairs import PairProtocol, read_protocol
    from proximetry.faces.verify import verify_pairs

__all__ = [
    "Alignment",
    "Detector",
    "FaceEmbedder",
    "Faces",
    "PairProtocol",
    "align_folder",
    "find_detector",
    "identify_people",
    "open_embedder",
    "read_people",
    "read_protocol",
    "similarity",
    "template",
    "verify_pairs",
    "warp",
]

Size: TypeAlias = Literal["112x112", "112x96"]
"""Height × width of an aligned face."""

Keep: TypeAlias = Literal["largest", "center", "all"]
"""Which faces of an image are kept."""

BadImages: TypeAlias = Literal["error", "skip"]
"""What to do with images that are missing or unreadable."""

__getattr__ = lazy_exports(
    __name__,
    {
        "align": ("Alignment", "align_folder"),
        "alignment": ("similarity", "template", "warp"),
        "detector": ("Detector", "Faces", "find_detector"),
        "embedder": ("FaceEmbedder", "open_embedder"),
        "identify": ("identify_people", "read_people"),
        "pairs": ("PairProtocol", "read_protocol"),
        "verify": ("verify_pairs",),
    },
    extra="faces",
)
