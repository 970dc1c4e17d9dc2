"""Two ranks build the gallery and the embeddings of a single process."""

import json
import shutil

import numpy as np
import pytest

from proximetry import cli
from proximetry.search import Gallery, new_images
from tests.search.conftest import make_embedder
from tests.training.ranks import Ranks

# Seven images make a chunk, and each process embeds every second one.
COMMAND = """
import os, signal, sys
from proximetry.cli import main
from proximetry.search import new_images

new_images.CHUNK = 7
write, written = new_images._write, []

def count(*arguments):
    written.append(write(*arguments))
    if (os.environ["RANK"], str(len(written))) == ("1", os.environ.get("DIES")):
        os.kill(os.getpid(), signal.SIGKILL)
    print("staged", file=sys.stderr)
    return written[-1]

new_images._write = count
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def home(images, tmp_path, monkeypatch):
    """A folder with images, one unreadable file and an embedder."""
    shutil.copytree(images, tmp_path / "images")
    (tmp_path / "images/class01/bad.png").write_bytes(b"nonsense")
    make_embedder().save(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new_images, "CHUNK", 7)
    return tmp_path


def content(folder):
    gallery = Gallery.open(folder)
    gallery.verify()
    ids = gallery.ids()
    return ids.tolist(), gallery.rows(ids), gallery.vectors(ids).tobytes()


@pytest.mark.slow
def test_two_ranks_build_and_add_as_one(home, server, capsys):
    options = ["--model", home / "model", "--batch-size", "3", "--device", "cpu"]
    options += ["--bad-images", "skip", "--json", "--gallery"]
    steps = [["index", *(home / "images" / name for name in ("class00", "class01", "class02"))]]
    steps += [["index", home / "images"]]
    # The first time, one process is killed.
    dies = f'import os; os.environ["DIES"] = "1"\n{COMMAND}'
    lost = Ranks(server, home / "lost", dies, *steps[0], *options, home / "two")
    assert lost.ended() == [1, -9]
    assert "lost another rank" in lost.output(0).splitlines()[-1]
    with pytest.raises(ValueError, match="not finished"):
        Gallery.open(home / "two")
    for number, words in enumerate(steps):
        assert cli.main([*map(str, [*words, *options]), "one"]) == 0
        expected = json.loads(capsys.readouterr().out)
        ranks = Ranks(server, home / f"both{number}", COMMAND, *words, *options, home / "two")
        assert ranks.ended() == [0, 0]
        staged = [ranks.output(rank).count("staged") for rank in range(2)]
        printed = [ranks.output(rank).replace("staged\n", "") for rank in range(2)]
        assert printed[1] == ""
        two = printed[0].replace(str(home / "two"), "one")
        assert json.loads(two) == expected
        assert len(expected["skipped"]) == 1
        assert content("two") == content("one")
        if number == 0:
            staged[0] += sum(lost.output(rank).count("staged") for rank in range(2))
            assert sum(staged) < 2 + 3, "nearly nothing was embedded twice"
        else:
            assert min(staged) > 0


def test_one_rank_reports_errors(home, server):
    bad = ["index", home / "images", "--model", home / "model", "--gallery", home / "g"]
    ranks = Ranks(server, home / "bad", COMMAND, *bad, "--device", "cpu")
    assert ranks.ended() == [1, 0]
    assert "bad.png" in ranks.output(0)
    assert ranks.output(1).replace("staged\n", "") == ""


def test_two_ranks_embed_as_one(home, server, capsys):
    words = ["embed", home / "model", home / "images", "--batch-size", "5", "--device", "cpu"]
    skip = ["--bad-images", "skip", "--json", "--out"]
    assert cli.main([*map(str, words), *skip, "one.npz"]) == 0
    expected = json.loads(capsys.readouterr().out)
    ranks = Ranks(server, home / "both", COMMAND, *words, *skip, home / "two.npz")
    assert ranks.ended() == [0, 0]
    assert ranks.output(1) == ""
    assert json.loads(ranks.output(0)) == {**expected, "out": str(home / "two.npz")}
    one, two = (np.load(name) for name in ("one.npz", "two.npz"))
    assert one["vectors"].tobytes() == two["vectors"].tobytes()
    assert one["paths"].tolist() == two["paths"].tolist()
    ranks = Ranks(server, home / "bad", COMMAND, *words, "--out", home / "bad.npz")
    assert ranks.ended() == [1, 1]
    assert "bad.png" in ranks.output(0)
    assert not (home / "bad.npz").exists()
