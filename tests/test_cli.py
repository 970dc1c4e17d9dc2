"""The command line as people use it: real processes, exit codes, one sentence per mistake."""

import json
import subprocess
import sys

import numpy as np
import pytest

from proximetry import cli
from proximetry.training import Recipe, train
from tests.training.tiny import make_images, make_recipe


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    home = tmp_path_factory.mktemp("run")
    recipe = make_recipe(images, home / "cache", training={"epochs": 1})
    recipe.save(home / "tiny.yaml")
    train(recipe, home / "out")
    return home


def call(capsys, *words):
    code = cli.main([str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_real_process_knows_its_version_and_helps():
    done = subprocess.run(
        [sys.executable, "-m", "proximetry.cli", "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("proximetry 0.")
    assert done.stdout.count("proximetry") == 1
    done = subprocess.run(
        [sys.executable, "-m", "proximetry.cli", "train", "nonsense", "out"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no recipe 'nonsense'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(capsys, command):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert (cli.COMMANDS[command].__doc__ or "").split("\n")[0] in " ".join(out.split())
    assert "usage: proximetry" in out


def test_train_with_overrides_and_again(capsys, run, images):
    words = ["train", run / "tiny.yaml", run / "cli", "--optimizer.lr", "5e-4"]
    words += ["--loss.name", "mpa", "--loss.settings.proxies_per_class", "2"]
    code, out, err = call(capsys, *words)
    assert code == 0, err
    assert "held-out R@1" in out
    assert "protocol: held_out" in out
    recipe = Recipe.load(run / "cli" / "recipe.yaml")
    assert recipe.optimizer.lr == 5e-4
    assert recipe.loss.settings == {"proxies_per_class": 2}
    assert recipe.data.root == str(images)
    code, out, _ = call(capsys, *words)
    assert code == 0
    assert "is complete already" in out
    code, _, err = call(capsys, *words, "--fresh", "true")
    assert code == 1
    assert "already holds a run" in err


def test_print_config_shows_the_resolved_recipe(capsys):
    code, out, _ = call(
        capsys, "train", "cub-proxy-anchor", "out", "--model.dim", "64", "--print_config"
    )
    assert code == 0
    assert "dim: 64" in out
    assert "backbone: bn_inception" in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["trian"], 2, "trian"),
        (["train", "glyphs", "out", "--optimizer.lrr", "3"], 2, "did you mean --optimizer.lr"),
        (["train", "glyphs", "out", "--training.epochs", "many"], 2, "many"),
        (["train", "glyphs", "out", "--optimizer.lr", "-1"], 2, "must be positive"),
        (["train", "glyps", "out"], 2, "did you mean 'glyphs'"),
        (
            ["train", "cub-proxy-anchor", "OUT", "--model.weights", "none"],
            1,
            "data.root is missing",
        ),
        (["evaluate", "nowhere", "glyphs"], 1, "nowhere"),
        (["recipes", "--show", "cub-proxy-ancor"], 1, "did you mean 'cub-proxy-anchor'"),
        (["datasets", "--describe", "cubs", "--root", "."], 1, "cub"),
        (["embed", "EMBEDDER", "missing.jpg"], 1, "no image or folder missing.jpg"),
    ],
)
def test_mistakes_are_one_sentence(capsys, run, tmp_path, words, code, message):
    places = {"EMBEDDER": run / "out" / "embedder", "OUT": tmp_path / "out"}
    got, _, err = call(capsys, *[places.get(word, word) for word in words])
    assert got == code
    assert message in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_without_words_it_helps(capsys):
    code, out, _ = call(capsys)
    assert code == 2
    assert "usage: proximetry" in out


def test_evaluate(capsys, run, images):
    words = ["evaluate", run / "out" / "embedder", "folder", "--root", images, "--split", "all"]
    words += ["--recall_at", "[1,5]", "--clustering", "true", "--out", run / "numbers.json"]
    code, out, err = call(capsys, *words)
    assert code == 0, err
    assert "recall@5" in out
    numbers = json.loads((run / "numbers.json").read_text())
    assert numbers["queries"] == 48
    assert 0 < numbers["nmi"] <= 1
    code, _, err = call(capsys, *words[:5], "--split", "test")
    assert code == 1
    assert "no rows of split 'test'" in err


def test_embed(capsys, run, images):
    single = images / "class00" / "0.png"
    words = ["embed", run / "out" / "embedder", single, images / "class01"]
    code, out, err = call(capsys, *words, "--out", run / "v.npz")
    assert code == 0, err
    assert "7 vectors of 8 numbers" in out
    stored = np.load(run / "v.npz")
    assert stored["vectors"].shape == (7, 8)
    assert stored["paths"][0] == str(single)
    np.testing.assert_allclose(np.linalg.norm(stored["vectors"], axis=1), 1, rtol=1e-5)


def test_export(capsys, run):
    code, out, err = call(capsys, "export", run / "out" / "embedder", run / "m.onnx")
    assert code == 0, err
    assert "checked" in out
    assert (run / "m.onnx").stat().st_size > 1000


def test_recipes_and_datasets(capsys, images):
    code, out, _ = call(capsys, "recipes")
    assert code == 0
    assert "cub-proxy-anchor" in out
    code, out, _ = call(capsys, "recipes", "--show", "glyphs")
    assert code == 0
    assert "backbone: small_convnet" in out
    code, out, _ = call(capsys, "datasets")
    assert code == 0
    assert "Cars196" in out
    code, out, _ = call(capsys, "datasets", "--describe", "folder", "--root", images)
    assert code == 0
    assert "48" in out


def test_a_reader_that_leaves_early_is_no_mistake():
    """`proximetry recipes | head`: nothing is printed about the pipe."""
    words = "import sys; from proximetry.cli import main; sys.exit(main(['recipes']))"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
