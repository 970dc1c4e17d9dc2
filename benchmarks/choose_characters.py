"""Choose the characters of the glyph set; prints src/proximetry/data/datasets/characters.txt.

    python -m benchmarks.choose_characters > src/proximetry/data/datasets/characters.txt

Candidates are visible characters that at least twelve font faces can draw, plain letters and signs
before accented ones. A candidate is excluded if it looks like an earlier one: cropped to their ink
and scaled to one size, the two have a mean intersection over union of at least `LIMIT` over the
faces, or `CASE_LIMIT` for the two cases of a letter, whose stroke weights differ after scaling.
Characters that differ only in size or height (c and C, full stop and middle dot), code point
(Latin, Greek and Cyrillic A) or detail (two accents) thus are one class.
"""

import unicodedata

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFont

from proximetry.data.datasets.glyphs import FONTS, font_characters, load_font

LIMIT = 0.75
CASE_LIMIT = 0.55
SIDE = 32
WANTED = 1000
MIN_FACES = 12


def candidates() -> list[str]:
    drawn = [font_characters(face) for face in FONTS]
    every = sorted(set().union(*drawn))
    usable = [c for c in every if _usable(c) and sum(c in d for d in drawn) >= MIN_FACES]
    for face, known in zip(FONTS, drawn, strict=True):
        font = load_font(face, 64)
        usable = [c for c in usable if c not in known or font.getmask(c).getbbox()]
    # A stable sort: characters that are not composed of others come first.
    return sorted(usable, key=lambda c: bool(unicodedata.decomposition(c)))


def _usable(character: str) -> bool:
    category = unicodedata.category(character)
    # Box drawing and blocks differ only in position; U+FFFD replaces other characters.
    unsuitable = 0x2500 <= ord(character) < 0x25A0 or ord(character) == 0xFFFD
    return category[0] not in "MZC" and category not in ("Lm", "Sk") and not unsuitable


def likeness(characters: list[str]) -> npt.NDArray[np.floating]:
    """Return the intersection over union of the ink of every pair, averaged over the faces."""
    total = np.zeros((len(characters), len(characters)), dtype=np.float32)
    faces = np.zeros_like(total)
    for face in FONTS:
        known = font_characters(face)
        font = load_font(face, 64)
        shapes = np.zeros((len(characters), SIDE * SIDE), dtype=np.float32)
        have = np.array([c in known for c in characters])
        for i in np.flatnonzero(have):
            shapes[i] = _shape(font, characters[i])
        shared = shapes @ shapes.T
        ink = np.diag(shared)
        both = have[:, None] & have[None]
        total += np.where(both, shared / np.maximum(ink[:, None] + ink[None] - shared, 1e-6), 0)
        faces += both
    return total / np.maximum(faces, 1)


def _shape(font: ImageFont.FreeTypeFont, character: str) -> npt.NDArray[np.floating]:
    mask = font.getmask(character, mode="L")
    image = Image.frombytes("L", mask.size, bytes(mask))
    image = image.crop(image.getbbox())
    scale = SIDE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    canvas = Image.new("L", (SIDE, SIDE))
    corner = ((SIDE - size[0]) // 2, (SIDE - size[1]) // 2)
    canvas.paste(image.resize(size, Image.Resampling.BOX), corner)
    return np.asarray(canvas, dtype=np.float32).ravel() / 255


def choose() -> list[str]:
    characters = candidates()
    alike = likeness(characters)
    places = {c: i for i, c in enumerate(characters)}
    taken: list[int] = []
    other_case: list[int] = []
    for i, character in enumerate(characters):
        # Also exclude lookalikes of a letter excluded for its case (Cyrillic c, after Latin C).
        if (alike[i, taken + other_case] >= LIMIT).any():
            continue
        twin = places.get(character.swapcase())
        if twin in taken and alike[i, twin] >= CASE_LIMIT:
            other_case.append(i)
        else:
            taken.append(i)
    return sorted(characters[i] for i in taken[:WANTED])


if __name__ == "__main__":
    chosen = choose()
    for start in range(0, len(chosen), 40):
        print("".join(chosen[start : start + 40]))
