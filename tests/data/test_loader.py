"""Worker processes decode the same bytes as threads, and none of them outlives its parent."""

import multiprocessing
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import tarfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proximetry._util import machine
from proximetry.data import Catalog, ImageError, PixelCache, loader


@pytest.fixture
def catalog(tmp_path):
    """Images of several formats and modes, on disk and in a shard, some of them broken."""
    rng = np.random.default_rng(0)
    root = tmp_path / "images"
    (root / "a").mkdir(parents=True)
    paths = []
    for i in range(40):
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
    """The pixels that threads decode."""
    cache = PixelCache.build(catalog, 32, tmp_path / "threads", policy="skip")
    return cache.flat.clone(), cache.bad


@pytest.fixture
def workers(monkeypatch):
    """Use two workers even for few images; return the running ones."""
    monkeypatch.setattr(loader, "MIN_IMAGES", 10)
    monkeypatch.setattr(loader, "cores", lambda: 2)
    return multiprocessing.active_children


def test_workers_and_threads_decode_the_same_pixels(catalog, in_threads, workers, tmp_path):
    steps, running = [], []

    def progress(done, total):
        steps.append((done, total))
        running.append(len(workers()))

    cache = PixelCache.build(catalog, 32, tmp_path / "home", policy="skip", progress=progress)
    assert (cache.flat == in_threads[0]).all()
    assert cache.bad == in_threads[1]
    assert len(cache.bad) == BROKEN
    assert steps == [(i + 1, len(catalog)) for i in range(len(catalog))]
    assert running[0] == 2
    assert not workers()
    with pytest.raises(ImageError, match=r"3 of 41 .*no such file"):
        PixelCache.build(catalog, 32, tmp_path / "home")
    few, started = catalog.subset(range(3)), []
    PixelCache.build(few, 32, tmp_path / "home", progress=lambda *_: started.extend(workers()))
    assert not started


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(("number", "share"), [(1, 0), (1, 0.5), (3, 0.5)])
def test_killed_workers_are_replaced_by_threads(
    catalog, in_threads, tmp_path, monkeypatch, number, share
):
    """Killed before and in the middle of their n-th message."""
    test, sent, send = os.getpid(), [], Connection.send

    def send_or_die(self, message):
        sent.append(message)
        if os.getpid() != test and len(sent) == number:
            content = pickle.dumps(message)
            start = struct.pack("!i", len(content)) + content
            os.write(self.fileno(), start[: int(share * len(start))])
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, message)

    monkeypatch.setattr(Connection, "send", send_or_die)
    with pytest.warns(UserWarning, match="continues in threads"):
        cache = PixelCache.build(catalog, 32, tmp_path / "home", policy="skip")
    assert (cache.flat == in_threads[0]).all()
    assert cache.bad == in_threads[1]


@pytest.mark.usefixtures("workers")
def test_each_killed_worker_is_reported_once(tmp_path):
    test = os.getpid()

    def die(name):
        if os.getpid() != test:
            os.kill(os.getpid(), signal.SIGKILL)
        return name

    names = [f"{number}.png" for number in range(200)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(loader.parallel_map(die, names)) == names
    assert len(caught) == 2


@pytest.mark.usefixtures("workers")
def test_failed_fork_leaves_no_workers(monkeypatch):
    forks, fork = [], os.fork

    def fail_second():
        forks.append(1)
        if len(forks) == 2:
            raise BlockingIOError("no more processes")
        return fork()

    monkeypatch.setattr(os, "fork", fail_second)
    with pytest.raises(BlockingIOError):
        list(loader.parallel_map(str.upper, ["a.png"] * 30))
    assert not multiprocessing.active_children()


def test_threads_start_and_end_workers_at_once(workers):
    """Starting a process collects those of other threads that have ended."""
    names = [f"{number}.png" for number in range(30)]
    with ThreadPoolExecutor(6) as pool:
        results = pool.map(lambda _: list(loader.parallel_map(str.upper, names)), range(90))
        assert all(result == [name.upper() for name in names] for result in results)
    assert not workers()


@pytest.mark.parametrize("cause", ["full disk", "progress"])
def test_failure_stops_workers_and_leaves_no_files(catalog, workers, tmp_path, cause):
    def fail(*_):
        assert len(workers()) == 2
        if cause == "progress":
            raise ValueError("cannot be displayed")

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if cause == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises((ValueError, OSError), match=r"displayed|File too large") as caught:
            PixelCache.build(catalog, 32, tmp_path / "home", progress=fail)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not workers()
    assert not [path for path in (tmp_path / "home").iterdir() if path.is_dir()]
    del caught  # a notebook keeps the traceback, which must not keep workers alive


def test_errors_of_the_input_are_raised(workers):
    def files():
        yield from ["x.png"] * 30
        raise RuntimeError("the input failed")

    with pytest.raises(RuntimeError, match="the input failed"):
        list(loader.parallel_map(str.upper, files()))
    assert not multiprocessing.active_children()
    assert list(loader.parallel_map(str.upper, ["a"] * 30)) == ["A"] * 30


# Without `if __name__ == "__main__"`.
SCRIPT = """
import multiprocessing, sys, time
from proximetry.data import Catalog, PixelCache, loader

loader.cores = lambda: 2
loader.MIN_IMAGES = 10

def progress(done, total):
    if done == 1:
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    time.sleep(float(sys.argv[3]))

PixelCache.build(
    Catalog.from_folder(sys.argv[1]), 32, sys.argv[2], policy="skip", progress=progress
)
"""


def run_script(catalog, tmp_path, seconds):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, script, catalog.root, tmp_path / "home", str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_loader_works_in_a_script_without_main_guard(catalog, tmp_path):
    with run_script(catalog, tmp_path, 0) as script:
        output, errors = script.communicate(timeout=120)
    assert not errors
    assert len(output.split()) == 2


def ended(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_its_parent(catalog, tmp_path, number):
    with run_script(catalog, tmp_path, 0.2) as script:
        pids = [*map(int, script.stdout.readline().split())]
        assert len(pids) == 2
        assert not any(map(ended, pids))
        os.kill(script.pid, number)
        assert script.wait(60) == -number
        limit = time.monotonic() + 20
        while not all(map(ended, pids)) and time.monotonic() < limit:
            time.sleep(0.02)
        assert all(map(ended, pids))
        errors = script.stderr.read()
    assert errors.count("Traceback") == (number == signal.SIGINT)


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
