"""Faces: found in pictures and aligned; embedders tested by the protocols of LFW, YTF and MegaFace.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from proximetry._util.errors import lazy_exports

if TYPE_CHECKING:
    from proximetry.faces.align import align_folder
    from proximetry.faces.alignment import similarity, template, warp
    from proximetry.faces.detector import Detector, Faces, find_detector
    from proximetry.faces.embedder import FaceEmbedder, open_embedder
    from proximetry.faces.identify import identify_people, read_people
    from proximetry.faces.journal import Alignment
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

__getattr__ = lazy_exports(
    __name__,
    {
        "align": ("align_folder",),
        "alignment": ("similarity", "template", "warp"),
        "detector": ("Detector", "Faces", "find_detector"),
        "embedder": ("FaceEmbedder", "open_embedder"),
        "identify": ("identify_people", "read_people"),
        "journal": ("Alignment",),
        "pairs": ("PairProtocol", "read_protocol"),
        "verify": ("verify_pairs",),
    },
    extra="faces",
)
