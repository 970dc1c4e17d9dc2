"""Two ranks build the gallery and the embeddings of a single process."""

import json
import shutil

import numpy as np
import pytest

from proximetry import cli
from proximetry.search import Gallery, staging
from tests.search.conftest import make_embedder
from tests.training.ranks import Ranks

# Seven images make a chunk, and each process embeds every second one.
COMMAND = """
import os, signal, sys
from proximetry.cli import main
from proximetry.search import staging

staging.CHUNK = 7
write, written = staging._write, []

def count(*arguments):
    written.append(write(*arguments))
    if (os.environ["RANK"], str(len(written))) == ("1", os.environ.get("DIES")):
        os.kill(os.getpid(), signal.SIGKILL)
    print("staged", file=sys.stderr)
    return written[-1]

staging._write = count
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def home(images, tmp_path, monkeypatch):
    """A folder with images, one unreadable file and an embedder."""
    shutil.copytree(images, tmp_path / "pictures")
    (tmp_path / "pictures/class01/bad.png").write_bytes(b"nonsense")
    make_embedder().save(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(staging, "CHUNK", 7)
    return tmp_path


def content(folder):
    found = Gallery.open(folder)
    found.verify()
    ids = found.ids()
    return ids.tolist(), found.rows(ids), found.vectors(ids).tobytes()


@pytest.mark.slow
def test_two_ranks_build_the_gallery_of_one(home, server, capsys):
    words = ["index", home / "pictures", "--model", home / "model", "--batch-size", "3"]
    words += ["--device", "cpu", "--gallery"]
    skip = ["--bad-images", "skip", "--json"]
    assert cli.main([*map(str, words), "one", *skip]) == 0
    wanted = json.loads(capsys.readouterr().out)
    # The first time a process is killed.
    lost = Ranks(
        server,
        home / "lost",
        f'import os; os.environ["DIES"] = "2"\n{COMMAND}',
        *words,
        home / "two",
        *skip,
    )
    codes = lost.ended()
    assert codes[1] == -9
    assert codes[0] == 1
    assert "lost another rank" in lost.output(0).splitlines()[-1]
    with pytest.raises(ValueError, match="not finished"):
        Gallery.open(home / "two")
    ranks = Ranks(server, home / "both", COMMAND, *words, home / "two", *skip)
    assert ranks.ended() == [0, 0]
    printed = [ranks.output(rank).replace("staged\n", "") for rank in range(2)]
    assert printed[1] == ""
    assert json.loads(printed[0]) == {**wanted, "gallery": str(home / "two")}
    assert len(wanted["skipped"]) == 1
    assert content("two") == content("one")
    chunks = [
        lost.output(rank).count("staged") + ranks.output(rank).count("staged") for rank in (0, 1)
    ]
    assert sum(chunks) < 7 + 3, "nearly nothing was embedded twice"
    for name in ("class00", "class02", "class03"):
        shutil.copytree(home / "pictures" / name, home / "more" / name)
    added = ["index", home / "more", "--device", "cpu", "--batch-size", "3", "--gallery"]
    assert cli.main([*map(str, added), "one"]) == 0
    more = Ranks(server, home / "more-ranks", COMMAND, *added, home / "two")
    assert more.ended() == [0, 0]
    assert "12 new" in more.output(0)
    assert "staged" in more.output(1)
    assert content("two") == content("one")


def test_one_rank_reports_errors(home, server):
    bad = ["index", home / "pictures", "--model", home / "model", "--gallery", home / "g"]
    ranks = Ranks(server, home / "bad", COMMAND, *bad, "--device", "cpu")
    assert ranks.ended() == [1, 0]
    assert "bad.png" in ranks.output(0)
    assert ranks.output(1).replace("staged\n", "") == ""
    ranks = Ranks(
        server, home / "none", COMMAND, "index", home / "pictures", "--gallery", home / "h"
    )
    assert ranks.ended() == [2, 0]
    assert "--model RUN" in ranks.output(0)
    assert ranks.output(1) == ""


def test_two_ranks_embed_as_one(home, server, capsys):
    words = ["embed", home / "model", home / "pictures", "--batch-size", "5", "--device", "cpu"]
    skip = ["--bad-images", "skip", "--json", "--out"]
    assert cli.main([*map(str, words), *skip, "one.npz"]) == 0
    wanted = json.loads(capsys.readouterr().out)
    ranks = Ranks(server, home / "both", COMMAND, *words, *skip, home / "two.npz")
    assert ranks.ended() == [0, 0]
    assert ranks.output(1) == ""
    assert json.loads(ranks.output(0)) == {**wanted, "out": str(home / "two.npz")}
    one, two = (np.load(name) for name in ("one.npz", "two.npz"))
    assert one["vectors"].tobytes() == two["vectors"].tobytes()
    assert one["paths"].tolist() == two["paths"].tolist()
    ranks = Ranks(server, home / "bad", COMMAND, *words, "--out", home / "bad.npz")
    assert ranks.ended() == [1, 1]
    assert "bad.png" in ranks.output(0)
    assert not (home / "bad.npz").exists()
