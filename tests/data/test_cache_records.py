"""`proximetry cache` as people use it: stores that are used, written, forgotten or half-written."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from functools import partial

import pytest

from proximetry.data import Catalog, PixelCache
from proximetry.data.cache import EncodedCache, check_files
from tests.training.tiny import make_images

HOLD = """
import sys
from proximetry.data import Catalog, PixelCache
cache = PixelCache.build(Catalog.from_folder(sys.argv[1]), 16)
print("open", flush=True)
sys.stdin.read(1)
assert cache[0].shape == (16, 16, 3)
"""
BUILD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read(1)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Two stores of one set of images and one of another."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROXIMETRY_CACHE", str(home / "cache"))
        for name, sides in (("first", (16, 20)), ("second", (16,))):
            make_images(home / name, classes=2, each=2, seed=len(name))
            for side in sides:
                PixelCache.build(Catalog.from_folder(home / name), side)
    return home


@pytest.fixture
def home(built, tmp_path, monkeypatch):
    shutil.copytree(built, tmp_path / "home")
    monkeypatch.setenv("PROXIMETRY_CACHE", str(tmp_path / "home" / "cache"))
    return tmp_path / "home"


@pytest.fixture
def call(call):
    return partial(call, "cache")


def listed(call):
    found = json.loads(call("list", "--json"))["caches"]
    return {one["name"]: one for one in found if one["data"]}


def ago(home, name, days):
    """Make a store look as if it had not been used for so many days."""
    file = home / "cache" / f"{name}.used"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"used": time.time() - 86_400 * days}))


def running(script, *words):
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline()
    return process


def test_list_tells_for_which_images_a_store_was_made(home, built, call):
    found = listed(call)
    made_of = sorted((one["data"][0], one["images"], one["about"]) for one in found.values())
    assert made_of == [
        (str(built / "first"), 4, "short side 16, bicubic"),
        (str(built / "first"), 4, "short side 20, bicubic"),
        (str(built / "second"), 4, "short side 16, bicubic"),
    ]
    for one in found.values():
        files = list((home / "cache" / one["name"]).iterdir())
        assert one["bytes"] == sum(file.stat().st_size for file in files)
    text = call("list")
    assert f"{home / 'cache'}: 5 caches" in text  # with the digests of both sets
    assert f"{built / 'second'}; 4 images; short side 16, bicubic" in text
    assert text.count("checksums of image files") == 2
    # The same images in another place use the same store.
    PixelCache.build(Catalog.from_folder(home / "second"), 16)
    again = listed(call)
    assert again.keys() == found.keys()
    (second,) = [one for one in again.values() if len(one["data"]) > 1]
    assert second["data"] == [str(home / "second"), str(built / "second")]


def test_encoded_stores_say_so_and_each_check_is_a_cache(home, call):
    catalog = Catalog.from_folder(home / "second")
    EncodedCache.build(catalog, 16)
    abouts = sorted(one["about"] for one in listed(call).values())
    assert abouts.count("short side 16, bicubic, encoded") == 1
    for side in (16, 20):
        check_files(catalog, side)
    checks = sorted((home / "cache" / "pixels" / "checked").iterdir())
    found = {one["name"] for one in json.loads(call("list", "--json"))["caches"]}
    assert {name for name in found if "checked" in name} == {
        f"pixels/checked/{file.name}" for file in checks
    }
    call("clean", f"pixels/checked/{checks[0].name}")
    assert sorted((home / "cache" / "pixels" / "checked").iterdir()) == checks[1:]


def test_stores_of_before_are_listed_and_found(home, call):
    for file in (home / "cache" / "pixels").glob("*.used"):
        file.unlink()
    assert json.loads(call("list", "--json"))["caches"][0]["data"] == []
    before = {file: file.stat().st_mtime_ns for file in home.glob("cache/pixels/*/pixels.bin")}
    PixelCache.build(Catalog.from_folder(home / "first"), 16)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert len(listed(call)) == 1


def test_clean_by_name_by_age_and_by_size(home, call):
    names = sorted(listed(call))
    for days, name in enumerate(names):
        ago(home, name, 10 * days + 1)
    text = call("clean", "--unused-for", "2w", "--dry-run")
    assert f"would remove pixels/{names[2][7:19]}" in text
    assert "would free" in text
    assert sorted(listed(call)) == names
    done = json.loads(call("clean", "--unused-for", "2w", "--json"))
    assert [one["name"] for one in done["removed"]] == [names[2]]
    assert not (home / "cache" / names[2]).exists()
    sizes = {name: one["bytes"] for name, one in listed(call).items()}
    rest = json.loads(call("list", "--json"))["bytes"]
    text = call("clean", "--keep", f"{(rest - 1) / 1000:.3f}kB")
    assert f"removed pixels/{names[1][7:19]}" in text  # used before the other
    assert sorted(listed(call)) == names[:1]
    text = call("clean", names[0][7:15])
    assert text.startswith(f"removed pixels/{names[0][7:19]}")
    assert sizes[names[0]] > 0
    assert not listed(call)
    assert not list((home / "cache" / "pixels").glob(".*"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "which caches? Name some of `proximetry cache list`, or give --unused-for 30d"),
        (["nothing"], "nothing is meant to be one cache, but none begins so"),
        (["pixels/"], "pixels/ is meant to be one cache, but several: pixels/"),
        (
            ["--unused-for", "30"],
            "--unused-for takes a number and one of h, d, w, as 30d; got '30'",
        ),
        (["--keep", "lots"], "--keep takes a number and one of kB, MB, GB, TB, as 20GB"),
    ],
)
def test_mistakes_remove_nothing(home, call, words, told):
    before = sorted(home.rglob("*"))
    assert told in call("clean", *words, code=2)
    assert sorted(home.rglob("*")) == before


def test_what_is_used_or_written_stays(home, call):
    (name,) = [n for n, one in listed(call).items() if one["data"][0].endswith("second")]
    other = next(n for n in listed(call) if n != name)
    reader = running(HOLD, home / "second")
    writer = running(BUILD, home / "cache" / f"{other}.lock")
    try:
        for more in (["--dry-run"], []):
            text = call("clean", name, other, *more)
            assert text.count("is in use and stays") == 2
            assert "nothing to remove" in text
        assert "is in use and stays" in call("clean", "--keep", "0kB")
        assert {name, other} <= listed(call).keys()
    finally:
        assert reader.communicate(b"x") == (b"", None)
        writer.communicate(b"x")
    assert reader.returncode == 0
    assert "removed" in call("clean", name, other)
    assert not {name, other} & listed(call).keys()


def test_a_copy_in_another_process_holds_it_too(home, call):
    cache = PixelCache.build(Catalog.from_folder(home / "second"), 16)
    copy = pickle.loads(pickle.dumps(cache))
    (name,) = [n for n, one in listed(call).items() if len(one["data"]) > 1]
    for _ in range(2):
        assert "is in use and stays" in call("clean", name)
        cache, copy = copy, None
    cache = copy
    assert "removed" in call("clean", name)


def test_leftovers_of_killed_processes_go(home, call):
    pixels = home / "cache" / "pixels"
    (name,) = [n for n, one in listed(call).items() if one["data"][0].endswith("second")]
    key = name.removeprefix("pixels/")
    dead, alive = (f".{one}.{32 * 'a'}.part" for one in (key, "beingbuilt"))
    for part in (dead, alive):
        (pixels / part).mkdir()
        (pixels / part / "pixels.bin").write_bytes(bytes(1000))
    old, new = (pixels / "contents" / f".proximetry-{32 * c}-x.part" for c in "ab")
    for file in (old, new):
        file.write_bytes(bytes(10))
    os.utime(old, (0, 0))
    writer = running(BUILD, pixels / "beingbuilt.lock")
    try:
        assert "1 kB were left by processes that were killed" in call("list")
        call("clean", "--keep", "1TB")
        assert not (pixels / dead).exists()
        assert not old.exists()
        assert (pixels / alive).exists()
        assert new.exists()
    finally:
        writer.communicate(b"x")
    assert len(listed(call)) == 3
