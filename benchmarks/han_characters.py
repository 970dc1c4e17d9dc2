"""Draw Han characters in the fonts of Debian's CJK packages: thousands of classes of five images.

    apt-get install fonts-noto-cjk fonts-wqy-microhei fonts-wqy-zenhei fonts-arphic-uming \
        fonts-arphic-ukai fonts-droid-fallback fonts-hanazono
    python -m benchmarks.han_characters DATA/han

A class is a character, an image is that character in one of `FACES`, of varying size, slant and
position. `CLASSES` random characters are for training and as many as in Stanford Online Products
for test. Writes train.tar and test.tar; unpack them, or read them as the dataset `shards`.
"""

import argparse
import io
import tarfile
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
from fontTools.ttLib import TTFont  # type: ignore[import-untyped]
from PIL import Image, ImageFont

from proximetry._util.files import atomic_path

FONTS = Path("/usr/share/fonts")
FACES = (
    "opentype/noto/NotoSansCJK-Regular.ttc",
    "opentype/noto/NotoSansCJK-Bold.ttc",
    "opentype/noto/NotoSerifCJK-Regular.ttc",
    "opentype/noto/NotoSerifCJK-Bold.ttc",
    "truetype/arphic/ukai.ttc",
    "truetype/arphic/uming.ttc",
    "truetype/droid/DroidSansFallbackFull.ttf",
    "truetype/hanazono/HanaMinA.ttf",
    "truetype/wqy/wqy-microhei.ttc",
    "truetype/wqy/wqy-zenhei.ttc",
)
BLOCKS = range(0x3400, 0x4DC0), range(0x4E00, 0xA000)  # extension A and the unified ideographs
CLASSES = {"train": 11_318, "test": 11_316}
IMAGES = 5
GRAYS = 16  # smaller files


def characters(face: str) -> set[str]:
    """Return the Han characters of a face."""
    with TTFont(FONTS / face, fontNumber=0, lazy=True) as font:
        codes = font.getBestCmap().keys()
    return {chr(code) for block in BLOCKS for code in block if code in codes}


@cache
def load_font(face: str, size: int) -> ImageFont.FreeTypeFont:
    """Return a face at a size in pixels."""
    return ImageFont.truetype(FONTS / face, size, layout_engine=ImageFont.Layout.BASIC)


def draw(character: str, face: str, side: int, rng: np.random.Generator) -> Image.Image:
    """Draw black on white: a centered character, then rotated, scaled and moved a little."""
    size, angle, right, down = rng.uniform((0.7, -8, -0.06, -0.06), (0.9, 8, 0.06, 0.06))
    mask = load_font(face, round(size * side)).getmask(character, mode="L")
    ink = Image.frombytes("L", mask.size, bytes(mask))
    ink = ink.rotate(angle, Image.Resampling.BICUBIC, expand=True)
    ink.thumbnail((side, side))
    corner = (
        min(max(round((side - length) / 2 + shift * side), 0), side - length)
        for length, shift in zip(ink.size, (right, down), strict=True)
    )
    canvas = Image.new("L", (side, side), 255)
    canvas.paste(0, tuple(corner), ink)
    return canvas.quantize(GRAYS)


def write_shard(file: Path, split: str, faces_of: dict[str, list[str]], side: int) -> None:
    """Write the images of a split, <split>/U+4E00/<face>.png."""
    with atomic_path(file) as part, tarfile.open(part, "w") as tar:
        for character, faces in sorted(faces_of.items()):
            rng = np.random.default_rng(ord(character))
            for face in sorted(rng.permutation(faces)[:IMAGES]):
                buffer = io.BytesIO()
                draw(character, face, side, rng).save(buffer, "PNG", optimize=True)
                name = f"{split}/U+{ord(character):04X}/{Path(face).stem}.png"
                info = tarfile.TarInfo(name)
                info.size = buffer.tell()
                buffer.seek(0)
                tar.addfile(info, buffer)


def main() -> None:
    """Draw the characters."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--side", type=int, default=48, help="width and height in pixels")
    parser.add_argument("--fraction", type=float, default=1.0, help="of the characters")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    drawn_by = {face: characters(face) for face in FACES}
    faces_of = {
        character: [face for face, drawn in drawn_by.items() if character in drawn]
        for character in sorted(set().union(*drawn_by.values()))
    }
    names = [character for character, faces in faces_of.items() if len(faces) >= IMAGES]
    order = iter(np.random.default_rng(0).permutation(names).tolist())
    for split, count in CLASSES.items():
        chosen = {name: faces_of[name] for name in islice(order, round(arguments.fraction * count))}
        write_shard(arguments.out / f"{split}.tar", split, chosen, arguments.side)


if __name__ == "__main__":
    main()
