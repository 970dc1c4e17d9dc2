"""A rank that is stopped, killed or hangs: the others end too, say so, and nothing is lost."""

import random
import re
import signal
import socket
import threading

import pytest
import yaml

from proximetry.training.distributed import RankError, join_processes
from tests.training.ranks import (
    DIE,
    EPOCH,
    EVALUATION,
    FREEZE,
    LEFT,
    MIDST,
    STEP,
    TRAIN,
    Ranks,
    happens,
)
from tests.training.runs import assert_same_run, state_of
from tests.training.tiny import tiny_values


@pytest.fixture(scope="module")
def begin(server, images, cache):
    """Start ranks that train below a folder; what is still there in the end is killed."""
    begun = []

    def begin(home, code=TRAIN, size=2, missing=0, **training):
        # Batch norm and the annealing of this loss advance in the midst of a step.
        values = tiny_values(
            cache,
            data={"root": str(images), "batch_size": 6},
            loss={"name": "sphereface"},
            training={"epochs": 3, **training},
        )
        home.mkdir(exist_ok=True)
        (home / "recipe.yaml").write_text(yaml.safe_dump(values))
        paths = home / "recipe.yaml", home / "run"
        begun.append(Ranks(server, home, code, *paths, size=size, missing=missing))
        return begun[-1]

    yield begin
    for ranks in begun:
        ranks.kill()


def saved_step(home):
    return state_of(home / "run" / "checkpoints" / "last.safetensors")["state"]["step"]


def last_line(ranks, rank):
    assert "Traceback" not in ranks.said(rank)
    return ranks.said(rank).splitlines()[-1]


@pytest.mark.slow
def test_a_run_that_loses_ranks_again_and_again_ends_like_any_other(begin, tmp_path):
    home, steps = tmp_path / "unlucky", 6  # of an epoch

    # Killed in the midst of a step: the other rank saves the step before it.
    ranks = begin(home, happens(DIE, 1, MIDST, 3))
    assert ranks.ended() == [1, -9]
    assert "proximetry: rank 1 has ended unexpectedly; stopped after step 2, saved in " in (
        last_line(ranks, 0)
    )
    assert saved_step(home) == 2

    # Frozen: given up after so many seconds without a sign of life.
    ranks = begin(home, happens(FREEZE, 1, MIDST, 3), rank_timeout=2)
    assert ranks.ended(0) == [1]
    assert last_line(ranks, 0) == (
        "proximetry: rank 1 has not answered for 2 s (training.rank_timeout); "
        f"stopped after step 4, saved in {home / 'run'}; the same command continues it"
    )
    ranks.kill()
    assert saved_step(home) == 4

    # A rank that waits for a frozen one obeys a signal; what was trained is not evaluated yet.
    ranks = begin(home, happens(FREEZE, 1, EVALUATION, 1, "heartbeat.GRACE = 1.0"))
    ranks.until(lambda: saved_step(home) == 4 and ranks.is_frozen(1))
    ranks.send(0, signal.SIGTERM)
    assert ranks.ended(0) == [130]
    assert f"proximetry: stopped after step {steps}, saved in " in last_line(ranks, 0)
    ranks.kill()
    assert saved_step(home) == steps

    # Without the rank that saves, what it has saved before stands.
    ranks = begin(home, happens(DIE, 0, MIDST, 3))
    assert ranks.ended() == [-9, 1]
    assert last_line(ranks, 1) == (
        "proximetry: rank 0 has ended unexpectedly; the same command continues the run in "
        f"{home / 'run'}"
    )
    assert saved_step(home) == steps

    assert begin(home).ended() == [0, 0]
    assert begin(tmp_path / "lucky").ended() == [0, 0]
    assert_same_run(home / "run", tmp_path / "lucky" / "run")


@pytest.mark.slow
def test_a_frozen_first_rank_is_given_up_too(begin, tmp_path):
    ranks = begin(tmp_path, happens(FREEZE, 0, STEP, 2), rank_timeout=2)
    assert ranks.ended(1) == [1]
    assert "proximetry: rank 0 has not answered for 2 s" in last_line(ranks, 1)


@pytest.mark.slow
def test_every_rank_says_which_one_is_gone(begin, tmp_path):
    ranks = begin(tmp_path, happens(DIE, 2, MIDST, 2), size=3)
    assert ranks.ended() == [1, 1, -9]
    for rank in (0, 1):
        assert "proximetry: rank 2 has ended unexpectedly" in last_line(ranks, rank)
    assert saved_step(tmp_path) == 1


@pytest.mark.slow
def test_an_error_on_one_rank_is_told_by_all(begin, tmp_path):
    ranks = begin(tmp_path, happens("raise OSError('the disk is gone')", 1, EPOCH, 1))
    assert ranks.ended() == [1, 1]
    assert last_line(ranks, 1) == "proximetry: the disk is gone"
    assert "rank 1 failed: the disk is gone; stopped after step 6" in last_line(ranks, 0)


@pytest.mark.slow
def test_a_rank_that_is_at_work_is_waited_for(begin, tmp_path):
    """However long rank 0 takes: it gives signs of life."""
    assert begin(tmp_path, happens("time.sleep(3)", 0, EPOCH, 1), rank_timeout=1).ended() == [0, 0]


@pytest.mark.slow
def test_two_ranks_that_are_stopped_end(begin, tmp_path):
    """Gloo's threads may be freeing tensors just then."""
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
def test_the_process_group_is_gone_when_training_has_been_stopped(begin, tmp_path):
    """Nothing may free it later, while the interpreter is held that gloo's threads may need."""
    ranks = begin(tmp_path, LEFT, epochs=500)
    ranks.until((tmp_path / "run" / "checkpoints" / "last.safetensors").exists)
    ranks.send(0, signal.SIGTERM)
    assert ranks.ended() == [0, 0]
    for rank in (0, 1):
        assert re.fullmatch(r"Stopped stopped after step .* False", last_line(ranks, rank))


@pytest.mark.slow
def test_ranks_that_cannot_watch_each_other_train_all_the_same(begin, tmp_path):
    alone = "heartbeat.CONNECT, heartbeat._call = 0.2, lambda *where: []"
    ranks = begin(tmp_path, happens(DIE, 1, MIDST, 8, alone))
    assert ranks.ended() == [1, -9]
    assert "proximetry: another rank has ended unexpectedly (" in last_line(ranks, 0)
    assert saved_step(tmp_path) == 7


def test_a_rank_that_waits_for_the_others_to_come_can_be_stopped(begin, tmp_path):
    code = "from proximetry.training import heartbeat\nheartbeat.GRACE = 0.5\n" + TRAIN
    ranks = begin(tmp_path, code, missing=1)
    ranks.until(ranks.meets)
    ranks.send(0, signal.SIGINT)
    assert ranks.ended() == [130]
    assert last_line(ranks, 0) == "proximetry: stopped"


def test_ranks_that_cannot_meet_say_where(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", **address}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            RankError, match=r"^the ranks cannot meet at 127\.0\.0\.1:\d+: The server"
        ):
            join_processes("cpu")
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())
