"""The command line as people use it: real processes, exit codes, one sentence per mistake."""

import json
import subprocess
import sys

import numpy as np
import pytest
import yaml

from proximetry import cli
from proximetry.cli.commands import COMMANDS
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


def process(*words):
    return subprocess.run(
        [sys.executable, "-m", "proximetry", *words], capture_output=True, text=True, check=False
    )


def test_a_real_process_knows_its_version_and_answers_a_mistake():
    done = process("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("proximetry 0.")
    done = process("train", "nonsense", "out")
    assert done.returncode == 2
    assert "'nonsense' is no folder or table of images, no recipe" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("cyclopts", "from proximetry.cli import main; sys.exit(main(['recipes']))"),
        ("pydantic", "import proximetry.training"),
    ],
)
def test_without_the_extra_it_says_what_to_install(missing, words):
    code = f"import sys; sys.modules[{missing!r}] = None; {words}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'proximetry[train]'" in done.stderr


def test_help_of_every_command_needs_no_torch():
    code = """
import sys
from proximetry.cli import main
for words in (["--help"], *([name, "--help"] for name in sys.argv[1:])):
    assert main(words) == 0
heavy = {"torch", "numpy", "timm", "PIL"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *COMMANDS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, function in COMMANDS.items():
        assert name in done.stdout
        assert " ".join(function.__doc__.split("\n")[0].split()) in " ".join(done.stdout.split())
    assert "--optimizer.lr" in done.stdout
    assert "--recall-at" in done.stdout


def config(capsys, *words):
    """The recipe that a command would train."""
    code, out, err = call(capsys, "train", *words, "--print-config")
    assert code == 0, err
    return yaml.safe_load(out)


def test_options_stand_before_or_after_the_words(capsys, tmp_path):
    expected = Recipe.load("cub-mpa", {"optimizer.lr": 0.5}).to_dict()
    (tmp_path / "my.yaml").write_text("optimizer: {lr: 0.5}\n")
    assert config(capsys, "cub-mpa", "runs/x", "--config", tmp_path / "my.yaml") == expected
    assert config(capsys, "--config", tmp_path / "my.yaml", "cub-mpa", "runs/x") == expected
    assert config(capsys, "--optimizer.lr", "0.5", "cub-mpa", "runs/x") == expected
    assert config(capsys, "--device", "cpu", "cub-mpa", "--optimizer.lr=0.5", "runs/x") == expected
    assert expected["model"]["pooling"] == "gem", "which is the recipe's, not the default"


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (["--data.batch_size", "8"], {"data.batch_size": 8}),
        (["--data.batch-size=8"], {"data.batch_size": 8}),
        (["--model.flip-tta"], {"model.flip_tta": True}),
        (["--data.no-flip"], {"data.flip": False}),
        (["--data.root", "12"], {"data.root": "12"}),
        (["--data.crop-scale", "0.2", "1"], {"data.crop_scale": [0.2, 1]}),
        (["--evaluation.metrics.recall-at", "1", "10"], {"evaluation.metrics.recall_at": [1, 10]}),
        (["--evaluation.metrics.map-at", "5"], {"evaluation.metrics.map_at": [5]}),
        (["--loss.settings.alpha", "16"], {"loss.settings.alpha": 16}),
        (
            ["--loss.name", "mpa", "--loss.settings.tau=0"],
            {"loss.name": "mpa", "loss.settings.tau": 0},
        ),
        (["--loss.name", "arcface"], {"loss.name": "arcface"}),
        (["--optimizer.clip-value", "null"], {"optimizer.clip_value": None}),
    ],
    ids=str,
)
def test_every_key_is_an_option(capsys, words, changes):
    expected = Recipe.load("cub-proxy-anchor", changes).to_dict()
    assert config(capsys, "cub-proxy-anchor", "runs/x", *words) == expected
    assert config(capsys, *words, "cub-proxy-anchor", "runs/x") == expected


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
    code, out, _ = call(capsys, *words, "--fresh")
    assert code == 0
    assert "is complete already" not in out


def test_a_typo_leaves_no_folder_and_the_corrected_command_runs(capsys, run, tmp_path):
    words = ["train", run / "tiny.yaml", tmp_path / "out", "--model.backbone"]
    code, _, err = call(capsys, *words, "small_convnett")
    assert code == 1
    assert "small_convnet" in err
    assert not (tmp_path / "out").exists()
    code, _, err = call(capsys, *words, "small_convnet")
    assert code == 0, err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["trian"], 2, "train"),
        (["train", "glyphs", "out", "--optimizer.lrr", "3"], 2, "--optimizer.lr"),
        (
            ["train", "glyphs", "out", "--training.epochs", "many"],
            2,
            "must be a valid integer, got 'many'",
        ),
        (["train", "glyphs", "out", "--optimizer.lr", "-1"], 2, "must be greater than 0"),
        (["train", "glyphs", "out", "--optimizer.lr", ".inf"], 2, "must be a finite number"),
        (["train", "glyphs", "out", "--model.pooling", "mean"], 2, "mean"),
        (["train", "glyphs", "out", "--loss.name", "pairs/nonsense"], 2, "nonsense"),
        (["train", "glyps", "out"], 2, "did you mean 'glyphs'"),
        (["train"], 2, "IMAGES requires an argument"),
        (
            ["train", "cub-proxy-anchor", "OUT", "--model.weights", "none"],
            2,
            "data.root is missing",
        ),
        (["train", "glyphs", "OUT", "--device", "gpu"], 1, "did you mean 'cuda'"),
        (["train", "glyphs", "OUT", "--schedule.at", "-3"], 2, "must be greater than or equal to"),
        (["train", "glyphs", "OUT", "--schedule.at"], 2, "--schedule.at requires an argument"),
        (["train", "glyphs", "OUT", "--config", "missing.yaml"], 2, "missing.yaml cannot be read"),
        (["evaluate", "nowhere", "glyphs"], 1, "nowhere"),
        (["evaluate", "nowhere", "glyphs", "--recall-at"], 2, "--recall-at requires an argument"),
        (["evaluate", "EMBEDDER", "cubs"], 1, "unknown dataset 'cubs', did you mean 'cub'"),
        (["evaluate", "EMBEDDER", "folder"], 1, "needs its folder"),
        (["recipes", "cub-proxy-ancor"], 2, "did you mean 'cub-proxy-anchor'"),
        (["datasets", "cubs", "."], 1, "cub"),
        (["embed", "EMBEDDER", "missing.jpg"], 1, "no image or folder missing.jpg"),
    ],
)
def test_mistakes_are_one_sentence(capsys, run, tmp_path, words, code, message):
    places = {"EMBEDDER": run / "out" / "embedder", "OUT": tmp_path / "out"}
    got, _, err = call(capsys, *[places.get(word, word) for word in words])
    assert got == code, err
    assert message in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_without_words_it_helps(capsys):
    code, out, _ = call(capsys)
    assert code == 2
    assert "Usage: proximetry" in out


def test_evaluate(capsys, run, images):
    words = ["evaluate", "--recall-at", "1", "5", run / "out", "folder", "--root", images]
    words += ["--split", "all", "--precision-at", "3", "--map-at", "3", "--clustering"]
    code, out, err = call(capsys, *words, "--out", run / "scores.json", "--eval-dims", "2")
    assert code == 0, err
    for name in ("recall@5", "precision@3", "map@3", "first 2 dimensions"):
        assert name in out
    scores = json.loads((run / "scores.json").read_text())["metrics"]
    assert scores["queries"] == 48
    assert 0 < scores["nmi"] <= 1
    assert 0 < scores["dims"]["2"]["recall@1"] <= 1
    words = ["evaluate", run / "out" / "embedder", images, "--split", "test"]
    code, _, err = call(capsys, *words)
    assert code == 1
    assert "no rows of split 'test'" in err


def test_a_folder_without_test_images_and_held_out_classes(capsys, run):
    words = ["train", run / "tiny.yaml", run / "last", "--evaluation.protocol", "last"]
    code, out, err = call(capsys, *words)
    assert code == 0, err
    assert "protocol: last" in out


def test_of_several_processes_one_prints(capsys, run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    code, out, _ = call(capsys, "train", run / "tiny.yaml", run / "out")
    assert code == 0
    assert "protocol" not in out


def test_the_folder_of_a_run_in_two_stages_can_be_evaluated(capsys, run, images):
    words = ["train", run / "tiny.yaml", run / "two", "--training.two-stages"]
    assert call(capsys, *words)[0] == 0
    words = ["evaluate", run / "two", "folder", "--root", images, "--split", "all"]
    code, out, err = call(capsys, *words)
    assert code == 0, err
    assert "folder (all)" in out


def test_embed(capsys, run, images):
    single = images / "class00" / "0.png"
    words = ["embed", run / "out" / "embedder", single, images / "class01"]
    code, out, err = call(capsys, *words, "--out", run / "v.npz")
    assert code == 0, err
    assert "wrote 5 embeddings (dim 8)" in out
    stored = np.load(run / "v.npz")
    assert stored["vectors"].shape == (5, 8)
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
    code, out, _ = call(capsys, "recipes", "glyphs")
    assert code == 0
    assert "backbone: small_convnet" in out
    code, out, _ = call(capsys, "datasets")
    assert code == 0
    assert "Cars196" in out
    code, out, _ = call(capsys, "datasets", images)
    assert code == 0
    assert "48" in out


def test_completion_can_be_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = cli.make_app().install_completion(shell="bash", output=tmp_path / "proximetry.bash")
    script = path.read_text()
    for word in ("train", "evaluate", "--recall-at", "--optimizer.lr"):
        assert word in script


def test_a_reader_that_leaves_early_is_no_mistake():
    """`proximetry recipes | head`: nothing is printed about the pipe."""
    words = "import sys; from proximetry.cli import main; sys.exit(main(['recipes']))"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
