"""Decoding in processes: the same bytes as in threads, and nothing left behind."""

import os
import resource
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proximetry._util import machine
from proximetry.data import Catalog, ImageError, PixelCache, decoding


@pytest.fixture
def catalog(tmp_path):
    """Images of several formats and modes, on disk and in a shard, some of them broken."""
    rng = np.random.default_rng(0)
    root = tmp_path / "images"
    (root / "a").mkdir(parents=True)
    paths = []
    for i in range(30):
        ending = ("jpg", "webp", "png", "gif", "tif")[i % 5]
        coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))
        image = coarse.resize((40 + i, 50 - i // 2), Image.Resampling.BICUBIC)
        mode = {"gif": "P", "png": "RGBA", "tif": "L"}.get(ending, "RGB")
        paths.append(f"a/{'ü ' * (i % 2)}{i}.{ending}")
        image.convert(mode).save(root / paths[-1])
    (root / paths[3]).write_bytes(b"no image")
    (root / paths[10]).write_bytes((root / paths[10]).read_bytes()[:-100])
    (root / paths[12]).unlink()
    with tarfile.open(root / "shard.tar", "w") as shard:
        shard.add(root / paths[1], "a/1.webp")
    paths.append("shard.tar::a/1.webp")
    return Catalog(tuple(paths), ("a",) * len(paths), ("all",) * len(paths), root)


BROKEN = 3


@pytest.fixture
def in_threads(catalog, tmp_path):
    """Return the files of the cache as threads make it."""
    PixelCache.build(catalog, 32, tmp_path / "threads", policy="skip")
    return stored(tmp_path / "threads")


def stored(home):
    """Return name and bytes of every file in the stores of a folder of caches."""
    found = (file for folder in home.iterdir() if folder.is_dir() for file in folder.iterdir())
    return {file.relative_to(home): file.read_bytes() for file in found}


@pytest.fixture
def processes(monkeypatch):
    """Have images decoded in two processes, and list them."""
    started = []

    class Listed(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Listed)
    monkeypatch.setattr(decoding, "IMAGES_PER_PROCESS", 10)
    monkeypatch.setattr(decoding, "cores", lambda: 2)
    return started


def test_processes_make_the_same_cache_as_threads(
    catalog, in_threads, processes, tmp_path, monkeypatch
):
    here = []
    decode = decoding.decode
    monkeypatch.setattr(decoding, "decode", lambda *a, **o: (here.append(a), decode(*a, **o))[1])
    steps = []
    cache = PixelCache.build(
        catalog, 32, tmp_path / "home", policy="skip", progress=lambda *step: steps.append(step)
    )
    assert stored(tmp_path / "home") == in_threads
    assert len(cache.bad) == BROKEN
    assert len(here) == BROKEN - 1  # only to say why; one is not there
    assert steps == [(i + 1, len(catalog) - 1) for i in range(len(catalog) - 1)]
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


def test_few_images_start_no_process(catalog, processes, tmp_path):
    PixelCache.build(catalog.subset(range(3)), 32, tmp_path / "home")
    assert not processes


@pytest.mark.parametrize("moment", [1, 9])
def test_processes_that_are_killed_are_done_without(
    catalog, in_threads, processes, tmp_path, moment
):
    def kill(done, _):
        if done == moment:
            for process in processes:
                os.kill(process.pid, signal.SIGKILL)

    with pytest.warns(UserWarning, match="decodes images ended with status -9; its images are"):
        PixelCache.build(catalog, 32, tmp_path / "home", policy="skip", progress=kill)
    assert stored(tmp_path / "home") == in_threads


@pytest.mark.parametrize(
    ("python", "message"),
    [("/no/such/python", "could not be started"), ("/bin/false", "ended with status")],
)
def test_processes_that_do_not_start_are_done_without(
    catalog, in_threads, processes, tmp_path, monkeypatch, python, message
):
    monkeypatch.setattr(sys, "executable", python)
    with pytest.warns(UserWarning, match=message):
        PixelCache.build(catalog, 32, tmp_path / "home", policy="skip")
    assert stored(tmp_path / "home") == in_threads


@pytest.fixture
def small_disk():
    """Have writes fail after some bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_nothing_is_left(processes, home):
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
    assert not [path for path in stored(home) if path.parts[0] != "contents"]


# The traceback that a notebook keeps, as `caught` does here, must not keep processes alive.
@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_ends_the_processes(catalog, processes, tmp_path):
    with pytest.raises(OSError, match="File too large") as caught:
        PixelCache.build(catalog, 32, tmp_path / "home")
    check_nothing_is_left(processes, tmp_path / "home")
    del caught


def test_a_display_that_fails_ends_the_processes(catalog, processes, tmp_path):
    def fail(*_):
        raise ValueError("cannot be displayed")

    with pytest.raises(ValueError, match="displayed") as caught:
        PixelCache.build(catalog, 32, tmp_path / "home", progress=fail)
    check_nothing_is_left(processes, tmp_path / "home")
    del caught


# As a user writes it: without a guard against being imported.
SCRIPT = """
import subprocess, sys, time
from proximetry.data import Catalog, PixelCache, decoding

decoding.cores = lambda: 2
decoding.IMAGES_PER_PROCESS = 10
start = subprocess.Popen

def told(*arguments, **options):
    process = start(*arguments, **options)
    print(process.pid, flush=True)
    return process

subprocess.Popen = told
PixelCache.build(
    Catalog.from_folder(sys.argv[1]), 32, sys.argv[2], policy="skip",
    progress=lambda done, total: (print("done", flush=True), time.sleep(float(sys.argv[3]))),
)
"""


def run_script(catalog, tmp_path, seconds):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, script, catalog.root, tmp_path / "home", str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=tmp_path / "elsewhere",
    )


def test_works_in_a_plain_script(catalog, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    # Files where the script was started must not stand in for modules.
    (tmp_path / "elsewhere" / "json.py").write_text("raise SystemExit('not the standard library')")
    with run_script(catalog, tmp_path, 0) as script:
        output, errors = script.communicate(timeout=120)
    assert not errors
    first, second, *steps = output.split()
    assert first.isdigit()
    assert second.isdigit()
    assert set(steps) == {"done"}


def ended(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_one_that_started_it(catalog, tmp_path, how):
    with run_script(catalog, tmp_path, 0.2) as script:
        pids = [int(script.stdout.readline()) for _ in range(2)]
        assert script.stdout.readline() == "done\n"
        assert not any(map(ended, pids))
        os.killpg(script.pid, how)  # as Ctrl-C does it
        assert script.wait(60) == -how
        limit = time.monotonic() + 60
        while not all(map(ended, pids)) and time.monotonic() < limit:
            time.sleep(0.02)
        assert all(map(ended, pids))
        errors = script.stderr.read()
    assert errors.count("Traceback") == (how == signal.SIGINT)
    if how == signal.SIGINT:
        assert not [path for path in stored(tmp_path / "home") if path.parts[0] != "contents"]


def test_decoding_imports_no_torch():
    code = "import sys, proximetry.data.decoding; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_settings_of_this_process_alone_are_used(catalog, processes, tmp_path, monkeypatch):
    # The processes know no such setting, so they refuse the truncated image; this one reads it.
    monkeypatch.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", True)
    cache = PixelCache.build(catalog, 32, tmp_path / "home", policy="skip")
    assert processes
    assert len(cache.bad) == BROKEN - 1


def test_errors_name_images_as_without_processes(catalog, processes, tmp_path):
    with pytest.raises(ImageError, match=r"3 of 31 .*no such file"):
        PixelCache.build(catalog, 32, tmp_path / "home")
    assert processes


def test_cores_are_those_this_process_may_use(tmp_path, monkeypatch):
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(machine, "_CPU_QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert machine.cores() == 6
    for text, count in [("max 100000", 6), ("250000 100000", 2), ("50000 100000", 1)]:
        quota.write_text(text)
        assert machine.cores() == count
    quota.write_text("900000 100000")
    assert machine.cores() == 6


@pytest.mark.parametrize(
    ("limit", "usage", "cache"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_available_memory_honors_cgroup_limit(tmp_path, monkeypatch, limit, usage, cache):
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    host = machine.available_memory()
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).with_name("memory.stat").write_text(f"anon 5\n{cache} 2000\nslab 7\n")
    (tmp_path / usage).write_text("6000\n")
    for text, free in [("10000\n", 6000), ("3000\n", 0)]:
        (tmp_path / limit).write_text(text)
        assert machine.available_memory() == free
    for unlimited in ("max\n", f"{2**63 - 4096}\n"):
        (tmp_path / limit).write_text(unlimited)
        assert machine.available_memory() > host // 2 > 6000
