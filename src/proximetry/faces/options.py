"""Choices of the commands; imports nothing, because the command line reads them for its help."""

from typing import Literal, TypeAlias

Size: TypeAlias = Literal["112x112", "112x96"]
"""Height × width of an aligned face."""

Keep: TypeAlias = Literal["largest", "center", "all"]
"""Which faces of an image are kept."""

BadImages: TypeAlias = Literal["error", "skip"]
"""What to do with images that are missing or unreadable."""
