import subprocess
import sys
import unicodedata
from collections import Counter

import numpy as np
import pytest

from benchmarks.choose_characters import LIMIT, MIN_FACES, candidates, choose, likeness
from proximetry.data import glyphs, open_image
from proximetry.data.datasets.glyphs import FONTS, characters, font_characters, script


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("glyphs")


@pytest.fixture(scope="module")
def catalog(cache):
    return glyphs(side=32, cache=cache)


def test_a_thousand_characters_of_several_scripts():
    chosen = characters()
    assert len(chosen) == len(set(chosen)) == 1000
    assert list(chosen) == sorted(chosen)
    assert not any(unicodedata.combining(c) or c.isspace() for c in chosen)
    scripts = Counter(map(script, chosen))
    for name in ("latin", "greek", "cyrillic", "armenian", "georgian", "number", "sign"):
        assert scripts[name] >= 10
    assert len(FONTS) >= 12
    drawn = Counter(c for face in FONTS for c in font_characters(face))
    assert min(drawn[c] for c in chosen) >= MIN_FACES
    for alike in (
        "AΑА",
        "HΗН",
        "BΒВ",
        "oОՕΟOоο",
        "cCсС",
        "vV",
        "xXхХ",
        "zZ",
        "wW",
        ".·•●",
        "μµ",
        "ΩΩ",
    ):
        assert len({*chosen} & {*alike}) <= 1


def test_no_two_characters_look_alike():
    # A sample of pairs, for speed: every fourth character.
    some = list(characters())[::4]
    alike = likeness(some)
    np.fill_diagonal(alike, 0)
    assert alike.max() < LIMIT


@pytest.mark.slow
def test_characters_follow_their_rule():
    assert set(characters()) <= set(candidates())
    assert tuple(choose()) == characters()


def test_catalog(catalog):
    assert len(catalog.class_names) == 1000
    assert set(catalog.class_names) == set(characters())
    sizes = Counter(catalog.labels)
    assert min(sizes.values()) >= 12
    assert max(sizes.values()) == len(FONTS)
    train, test = (catalog.filter(split=s) for s in ("train", "test"))
    assert len(train.class_names) == len(test.class_names) == 500
    assert "share no class" in catalog.describe()
    assert catalog.missing_files() == []
    assert catalog.paths[0].endswith("U+0021/DejaVuSans.png")


def test_images_are_black_on_white_and_differ(catalog):
    seen = set()
    for i in range(0, len(catalog), 23):
        image = np.asarray(open_image(catalog.file(i)))
        assert image.shape == (32, 32, 3)
        assert image.max() == 255
        assert image.min() < 160
        assert 3 < (1 - image[..., 0] / 255).sum() < 800
        seen.add(image.tobytes())
    assert len(seen) == len(range(0, len(catalog), 23))


DRAW_SOME = """
import sys
from unittest.mock import patch
from proximetry.data import glyphs
with patch("proximetry.data.datasets.glyphs.characters", lambda: tuple("AЖ→ß9")):
    print(glyphs(side=32, cache=sys.argv[1]).codes.tolist())
"""


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr("proximetry.data.datasets.glyphs.characters", lambda: tuple("AЖ→ß9"))


def test_deterministic_in_another_process(few, catalog, tmp_path):
    subprocess.run([sys.executable, "-c", DRAW_SOME, str(tmp_path / "a")], check=True)
    drawn = glyphs(side=32, cache=tmp_path / "b")
    (one,), (two,) = ((tmp_path / name).glob("*.tar") for name in "ab")
    assert one.name == two.name
    assert one.read_bytes() == two.read_bytes()
    # An image does not depend on the other characters.
    place = {p.partition("::")[2]: i for i, p in enumerate(catalog.paths)}
    for i, path in enumerate(drawn.paths):
        whole = catalog.file(place[path.partition("::")[2]])
        assert open_image(drawn.file(i)).tobytes() == open_image(whole).tobytes()


def test_cached_and_repaired(few, tmp_path):
    catalog = glyphs(side=32, cache=tmp_path)
    (shard,) = tmp_path.glob("*.tar")
    data, stamp = shard.read_bytes(), shard.stat().st_mtime_ns
    assert glyphs(side=32, cache=tmp_path) == catalog
    assert shard.stat().st_mtime_ns == stamp
    shard.write_bytes(data[: len(data) // 2])
    assert glyphs(side=32, cache=tmp_path) == catalog
    assert shard.read_bytes() == data
    assert [p.name for p in tmp_path.iterdir()] == [shard.name]
    assert glyphs(side=32, seed=1, cache=tmp_path).paths != catalog.paths


def test_parameters(catalog, cache):
    train = set(catalog.filter(split="train").labels)
    more = glyphs(side=32, train_fraction=0.8, cache=cache)
    assert len(more.filter(split="train").class_names) == 800
    assert more.paths == catalog.paths
    assert train <= set(more.filter(split="train").labels)
    with pytest.raises(ValueError, match="from 16 to 256 pixels, got 8"):
        glyphs(side=8, cache=cache)


def test_missing_fonts_are_explained(monkeypatch, tmp_path):
    monkeypatch.setattr("proximetry.data.datasets.glyphs.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="extra 'glyphs'"):
        glyphs(cache=tmp_path)
