"""A built-in dataset: a thousand characters in the sixteen fonts that ship with matplotlib.

A class is a character, an image is that character in one font, of varying size, slant and position.
No two characters look alike.
"""

import hashlib
import io
import math
import os
import tarfile
import unicodedata
from functools import cache
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from proximetry._util.files import atomic_path, cache_folder
from proximetry._util.imports import import_optional
from proximetry.data.catalog import Catalog
from proximetry.data.datasets.readers import split_by_class
from proximetry.data.folders import SEPARATOR, shard_members

try:
    from PIL import Image, ImageFont, features
except ModuleNotFoundError:
    import_optional("PIL", "glyphs", "Drawing glyphs")

_DEJAVU = ("", "-Bold", "-Oblique", "-BoldOblique")
FONTS = (
    *(f"DejaVuSans{style}" for style in _DEJAVU),
    *(f"DejaVuSansMono{style}" for style in _DEJAVU),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
)

# Increased when the drawing changes.
_DRAWING = 1


def glyphs(
    cache: str | os.PathLike[str] | None = None,
    *,
    side: int = 48,
    train_fraction: float = 0.5,
    seed: int = 0,
) -> Catalog:
    """Return the catalog of the glyphs, drawn on the first call and then cached.

    Args:
        cache: folder of the images; $PROXIMETRY_CACHE or ~/.cache/proximetry by default.
        side: width and height of the images in pixels.
        train_fraction: the fraction of the characters marked "train"; the others are "test".
        seed: seed of the drawing and of the split.
    """
    if not 16 <= side <= 256:
        raise ValueError(f"side must be from 16 to 256 pixels, got {side}")
    folder = cache_folder() / "glyphs" if cache is None else Path(cache)
    shard = folder / f"glyphs-{_key(side, seed)}.tar"
    try:
        members = shard_members(shard)
    except (OSError, ValueError):  # missing or damaged
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(shard) as part:
            _draw_all(part, side, seed)
        members = shard_members(shard)
    labels = tuple(chr(int(name[2:].split("/")[0], 16)) for name in members)
    catalog = Catalog(
        paths=tuple(f"{shard.name}{SEPARATOR}{name}" for name in members),
        labels=labels,
        splits=("all",) * len(labels),
        root=folder,
        groups=tuple(map(script, labels)),
    )
    train, _ = catalog.split_classes(train_fraction, seed=seed)
    return split_by_class(catalog, set(train.labels))


def characters() -> tuple[str, ...]:
    """Return the characters of the set in the order of their code points."""
    text = resources.files(__package__).joinpath("characters.txt").read_text(encoding="utf-8")
    return tuple(text.replace("\n", ""))


def script(character: str) -> str:
    """Return the script of a letter ("latin", "greek", …), "number" or "sign"."""
    kind = unicodedata.category(character)[0]
    if kind == "L":
        return unicodedata.name(character).split()[0].lower()
    return "number" if kind == "N" else "sign"


@cache
def font_characters(face: str) -> frozenset[str]:
    """Return the characters that a face has an outline for."""
    fonts = import_optional("fontTools.ttLib", "glyphs", "Drawing glyphs")
    with fonts.TTFont(_font_file(face), lazy=True) as font:
        return frozenset(map(chr, font.getBestCmap()))


@cache
def load_font(face: str, size: int) -> ImageFont.FreeTypeFont:
    """Return a face at a size in pixels."""
    # The basic layout: the other one depends on system libraries.
    return ImageFont.truetype(_font_file(face), size, layout_engine=ImageFont.Layout.BASIC)


def _font_file(face: str) -> str:
    # matplotlib itself is not imported: only its files are needed.
    spec = find_spec("matplotlib")
    origin = spec.origin if spec else None
    home = Path(origin or import_optional("matplotlib", "glyphs", "Drawing glyphs").__file__).parent
    return os.fspath(home / "mpl-data" / "fonts" / "ttf" / f"{face}.ttf")


def _key(side: int, seed: int) -> str:
    """Return a digest of everything that the pixels depend on."""
    _font_file(FONTS[0])  # without matplotlib, the error names what to install
    pillow, fonts = metadata.version("pillow"), metadata.version("matplotlib")
    freetype = features.version("freetype2")
    facts = (_DRAWING, side, seed, pillow, freetype, fonts, characters(), FONTS)
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def _draw_all(file: Path, side: int, seed: int) -> None:
    with tarfile.open(file, "w") as tar:
        for character in characters():
            for number, face in enumerate(FONTS):
                if character in font_characters(face):
                    rng = np.random.default_rng([seed, ord(character), number])
                    buffer = io.BytesIO()
                    _draw(character, face, side, rng).save(buffer, "PNG", compress_level=4)
                    info = tarfile.TarInfo(f"U+{ord(character):04X}/{face}.png")
                    info.size = buffer.tell()
                    buffer.seek(0)
                    tar.addfile(info, buffer)


def _draw(character: str, face: str, side: int, rng: np.random.Generator) -> Image.Image:
    """Draw black on white: a centered glyph, then rotated, scaled and moved a little."""
    size, angle, right, down = rng.uniform(
        (0.5 * side, -15, -0.1 * side, -0.1 * side), (0.85 * side, 15, 0.1 * side, 0.1 * side)
    )
    ink = _ink(character, face, round(size), angle)
    room = side - 2
    if max(ink.size) > room:
        size = math.floor(round(size) * room / max(ink.size))
        ink = _ink(character, face, size, angle)
    ink.thumbnail((room, room))
    left = min(max(round((side - ink.width) / 2 + right), 0), side - ink.width)
    top = min(max(round((side - ink.height) / 2 + down), 0), side - ink.height)
    canvas = Image.new("L", (side, side), 255)
    canvas.paste(0, (left, top), ink)
    return canvas


def _ink(character: str, face: str, size: int, angle: float) -> Image.Image:
    mask = load_font(face, size).getmask(character, mode="L")
    image = Image.frombytes("L", mask.size, bytes(mask))
    image = image.rotate(angle, Image.Resampling.BICUBIC, expand=True)
    return image.crop(image.getbbox())
