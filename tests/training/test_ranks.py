"""A missing, stopped, killed or hanging rank ends the others, and the run resumes."""

import random
import re
import signal
import socket

import pytest
import yaml

from proximetry._util.errors import UsageError
from proximetry.training.distributed import RANK_TIMEOUT, RankError, join_processes
from tests.training.ranks import (
    DIE,
    EPOCH,
    EVALUATION,
    FREEZE,
    REPORT_THREADS,
    SETUP,
    STEP,
    TRAIN,
    Ranks,
    with_failure,
)
from tests.training.runs import assert_same_run, state_of
from tests.training.tiny import tiny_values


@pytest.fixture(scope="module")
def begin(server, images, cache):
    """Start ranks that train in a folder; kill the remaining ones at the end."""
    started = []

    def begin(home, code=TRAIN, size=2, missing=(), timeout=60, **training):
        # Batch norm and the annealing of this loss advance within a step.
        values = tiny_values(
            cache,
            data={"root": str(images), "batch_size": 6},
            loss={"name": "sphereface"},
            training={"epochs": 3, **training},
        )
        home.mkdir(exist_ok=True)
        (home / "recipe.yaml").write_text(yaml.safe_dump(values))
        paths = home / "recipe.yaml", home / "run"
        started.append(
            Ranks(server, home, code, *paths, size=size, missing=missing, timeout=timeout)
        )
        return started[-1]

    yield begin
    for ranks in started:
        ranks.kill()


def saved_step(home):
    return state_of(home / "run" / "checkpoints" / "last.safetensors")["state"]["step"]


def last_line(ranks, rank):
    assert "Traceback" not in ranks.output(rank)
    return ranks.output(rank).splitlines()[-1]


@pytest.mark.slow
def test_resume_after_killed_ranks_is_bit_exact(begin, tmp_path):
    home = tmp_path / "killed"
    ranks = begin(home, with_failure(DIE, 1, STEP, 3), checkpoint_steps=2)
    assert ranks.ended() == [1, -9]
    assert "lost another rank" in last_line(ranks, 0)
    assert saved_step(home) == 2
    ranks = begin(home, with_failure(DIE, 0, EVALUATION, 2), checkpoint_steps=2)
    assert ranks.ended() == [-9, 1]
    assert "lost another rank" in last_line(ranks, 1)
    assert begin(home).ended() == [0, 0]
    assert begin(tmp_path / "whole").ended() == [0, 0]
    assert_same_run(home / "run", tmp_path / "whole" / "run")


@pytest.mark.parametrize("missing", [0, 1])
def test_rank_that_never_starts_ends_the_other(begin, tmp_path, missing):
    ranks = begin(tmp_path, missing=(missing,), timeout=2)
    assert ranks.ended() == [1]
    assert "the ranks cannot connect" in last_line(ranks, 1 - missing)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_fails_in_setup_ends_the_other(begin, tmp_path, rank):
    ranks = begin(tmp_path, with_failure("raise OSError('no such folder')", rank, SETUP, 1))
    assert ranks.ended() == [1, 1]
    assert last_line(ranks, rank) == "proximetry: no such folder"
    assert "lost another rank" in last_line(ranks, 1 - rank)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_frozen_rank_ends_the_other_within_the_timeout(begin, tmp_path, rank):
    ranks = begin(tmp_path, with_failure(FREEZE, rank, STEP, 3), timeout=3)
    assert ranks.ended(1 - rank) == [1]
    assert "lost another rank" in last_line(ranks, 1 - rank)
    assert RANK_TIMEOUT in last_line(ranks, 1 - rank)


@pytest.mark.slow
def test_error_on_one_rank_ends_the_other(begin, tmp_path):
    ranks = begin(tmp_path, with_failure("raise OSError('the disk is gone')", 1, EPOCH, 1))
    assert ranks.ended() == [1, 1]
    assert last_line(ranks, 1) == "proximetry: the disk is gone"
    assert "lost another rank" in last_line(ranks, 0)


@pytest.mark.slow
def test_stopped_ranks_end(begin, tmp_path):
    """Gloo's threads may be freeing tensors at that time."""
    draw = random.Random(0)
    for number in range(3):
        home = tmp_path / str(number)
        ranks = begin(home, epochs=500)
        ranks.until((home / "run" / "checkpoints" / "last.safetensors").exists)
        for rank in draw.choice([(0,), (1,), (0, 1)]):
            ranks.send(rank, draw.choice([signal.SIGTERM, signal.SIGINT]))
        assert ranks.ended() == [130, 130]
        for rank in (0, 1):
            assert "proximetry: stopped after step" in last_line(ranks, rank)


@pytest.mark.slow
def test_process_group_is_destroyed_after_a_stop(begin, tmp_path):
    """Freeing it later could deadlock with gloo's threads, which need the interpreter lock."""
    ranks = begin(tmp_path, REPORT_THREADS, epochs=500)
    ranks.until((tmp_path / "run" / "checkpoints" / "last.safetensors").exists)
    ranks.send(0, signal.SIGTERM)
    assert ranks.ended() == [0, 0]
    for rank in (0, 1):
        assert re.fullmatch(r"Stopped stopped after step .* False", last_line(ranks, rank))


def test_taken_port_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", **address}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RankError, match=r"127\.0\.0\.1:\d+: The server"):
            join_processes("cpu")


@pytest.mark.parametrize("value", ["soon", "nan", "1e99"])
def test_rank_timeout_is_validated(monkeypatch, value):
    for name, setting in {"RANK": "0", "WORLD_SIZE": "2", RANK_TIMEOUT: value}.items():
        monkeypatch.setenv(name, setting)
    with pytest.raises(UsageError, match=RANK_TIMEOUT):
        join_processes("cpu")
