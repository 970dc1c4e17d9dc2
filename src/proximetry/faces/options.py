"""What the commands can be asked for; light, because the command line reads it for its help."""

from typing import Literal, TypeAlias

Size: TypeAlias = Literal["112x112", "112x96"]
"""Height × width of an aligned face."""

Keep: TypeAlias = Literal["largest", "centre", "center", "all"]
"""Which faces of a picture are kept; "center" is "centre"."""

BadImages: TypeAlias = Literal["error", "skip"]
"""What happens at images that are missing or cannot be read."""
