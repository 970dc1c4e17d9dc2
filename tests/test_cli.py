"""The command line as people use it: real processes, exit codes, one sentence per mistake."""

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from proximetry.cli.commands import COMMANDS

from proximetry import cli
from proximetry.cli import cache, faces, train_plan
from proximetry.data import Catalog
from proximetry.models import Embedder
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
    assert (
        "there is no folder or file 'nonsense' and no recipe or dataset of that name; images"
        in done.stderr
    )
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
    assert "pip install '.[train]'" in done.stderr


def test_help_of_every_command_needs_no_torch():
    code = """
import sys
from proximetry.cli import main
for words in (["--help"], *([*name.split(), "--help"] for name in sys.argv[1:])):
    assert main(words) == 0
heavy = {"torch", "numpy", "timm", "PIL"} & set(sys.modules)
assert not heavy, heavy
"""
    commands = COMMANDS | {f"faces {name}": one for name, one in faces.COMMANDS.items()}
    commands |= {f"cache {name}": one for name, one in cache.COMMANDS.items()}
    done = subprocess.run(
        [sys.executable, "-c", code, *commands], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, function in commands.items():
        assert name in done.stdout
        assert " ".join(function.__doc__.split("\n")[0].split()) in " ".join(done.stdout.split())
    assert "--optimizer.lr" in done.stdout
    assert "--recall-at" in done.stdout


def help_of(capsys, monkeypatch, *words, width=80):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = call(capsys, *words, "--help")
    assert code == 0
    return out


def test_help_of_a_key_tells_no_default_where_the_recipe_decides(capsys, monkeypatch):
    out = help_of(capsys, monkeypatch, "train").partition("Keys of the recipe")[2]
    assert "What is not given is as the recipe has it" in out
    assert "--training.epochs" in out
    assert "default:" not in out


@pytest.mark.parametrize("width", [80, 120])
def test_help_fills_its_lines(capsys, monkeypatch, width):
    out = help_of(capsys, monkeypatch, "train", width=width)
    text = out.partition("IMAGES  ")[2].partition("OUT")[0]
    lines = [line.strip(" │*") for line in text.splitlines()]
    lines = lines[: next(i for i, line in enumerate(lines) if "--data.root." in line)]
    assert min(map(len, lines)) > width - 35, lines


def test_help_writes_defaults_as_they_are_typed(capsys, monkeypatch):
    out = " ".join(help_of(capsys, monkeypatch, "evaluate", width=250).split())
    assert "[default: error]" in out
    assert "[default: False]" not in out
    assert "[default: ()]" not in out


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
        (["--model.tta-crops", "0.9", "0.8"], {"model.tta_crops": [0.9, 0.8]}),
        (["--model.tta-crops", "[]", "--evaluation.eval-dims", "null"], {"model.tta_crops": []}),
        (["--data.no-flip"], {"data.flip": False}),
        (["--data.root", "12"], {"data.root": "12"}),
        (["--data.crop-scale", "0.2", "1"], {"data.crop_scale": [0.2, 1]}),
        (["--data.crop-scale", "0.2,1"], {"data.crop_scale": [0.2, 1]}),
        (["--data.crop_scale=0.2,1"], {"data.crop_scale": [0.2, 1]}),
        (["--evaluation.metrics.recall-at", "1", "10"], {"evaluation.metrics.recall_at": [1, 10]}),
        (["--evaluation.metrics.map-at", "5"], {"evaluation.metrics.map_at": [5]}),
        (["--loss.settings.alpha", "16"], {"loss.settings.alpha": 16}),
        (
            ["--loss.name", "mpa", "--loss.settings.tau=0"],
            {"loss.name": "mpa", "loss.settings.tau": 0},
        ),
        (["--loss", "arcface"], {"loss.name": "arcface"}),
        (
            ["--loss", "arcface", "--loss.settings.margin", "0.3"],
            {"loss": {"name": "arcface", "settings": {"margin": 0.3}}},
        ),
        (["--optimizer=sgd", "--optimizer.lr", "0.1"], {"optimizer": {"name": "sgd", "lr": 0.1}}),
        (["--optimizer.clip-value", "null"], {"optimizer.clip_value": None}),
    ],
    ids=str,
)
def test_every_key_is_an_option(capsys, words, changes):
    expected = Recipe.load("cub-proxy-anchor", changes).to_dict()
    assert config(capsys, "cub-proxy-anchor", "runs/x", *words) == expected
    assert config(capsys, *words, "--device", "cpu", "cub-proxy-anchor", "runs/x") == expected


def test_list_with_commas_ends_before_a_numeric_path(capsys):
    code, _, err = call(capsys, "evaluate", "--recall-at", "1,10", "2024", "runs/x")
    assert code == 2
    assert "no folder or file 'runs/x'" in err, "so 2024 is the embedder"


def test_list_before_a_word_is_ambiguous(capsys):
    words = ["evaluate", "--recall-at", "1", "10", "2024", "runs/x"]
    code, _, err = call(capsys, *words)
    assert code == 2
    assert "--recall-at 1,10,2024" in err


def test_train_with_overrides_and_again(capsys, run, images):
    words = ["train", run / "tiny.yaml", run / "cli", "--optimizer.lr", "5e-4"]
    words += ["--loss.name", "mpa", "--loss.settings.proxies_per_class", "2"]
    code, out, err = call(capsys, *words)
    assert code == 0, err
    assert "held-out R@1" in out
    assert "protocol held_out: epoch" in out
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
    assert code == 2
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
        (["train", "glyphs", "out", "--lr", "1"], 2, "Did you mean --optimizer.lr?"),
        (["train", "glyphs", "out", "--lr=1"], 2, "Did you mean --optimizer.lr?"),
        (["train", "glyphs", "out", "-lr", "1"], 2, "Did you mean --optimizer.lr?"),
        (["train", "glyphs", "out", "--learning-rate", "1"], 2, "Did you mean --optimizer.lr?"),
        (
            ["train", "glyphs", "out", "--batch_size", "8"],
            2,
            "Did you mean --data.batch-size or --evaluation.batch-size?",
        ),
        (["train", "glyphs", "out", "lr=1"], 2, "there is no place for lr=1;"),
        (
            ["train", "glyphs", "out", "--loss.settings", "alpha=3"],
            2,
            "given key by key, as --loss.settings.KEY VALUE",
        ),
        (["train"], 2, "IMAGES is missing; see: proximetry train --help"),
        (
            ["train", "cub-proxy-anchor", "OUT", "--model.weights", "none"],
            2,
            "data.root is missing",
        ),
        (["train", "glyphs", "OUT", "--device", "gpu"], 2, "there is no device 'gpu'"),
        (["train", "glyphs", "OUT", "--schedule.at", "-3"], 2, "must be greater than or equal to"),
        (["train", "glyphs", "OUT", "--schedule.at", "-3,5"], 2, "must be greater than or equal"),
        (["train", "glyphs", "--out", "OUT"], 2, "OUT is a word of its own, without an option"),
        (["train", "glyphs", "OUT", "--schedule.at"], 2, "--schedule.at requires an argument"),
        (["train", "glyphs", "OUT", "--config", "missing.yaml"], 2, "missing.yaml cannot be read"),
        (["export", "EMBEDDER"], 2, "OUT is missing; see: proximetry export --help"),
        (["push"], 2, "EMBEDDER is missing; see: proximetry push --help"),
        (["metrics", "recall"], 2, "no place for recall; see: proximetry metrics --help"),
        (["evaluate", "nowhere", "glyphs"], 2, "nowhere"),
        (["evaluate", "nowhere", "glyphs", "--recall-at"], 2, "--recall-at requires an argument"),
        (["evaluate", "EMBEDDER", "IMAGES", "--out", "x.csv"], 2, "--out x.csv must end in .json"),
        (["evaluate", "nowhere", "glyphs", "--recall-at", "1,2.5"], 2, "whole numbers, got 2.5"),
        (["reproduce", "--rows", "MPA", "mpa-table4"], 2, "Name it before the options"),
        (["reproduce", "--rows=MPA", "mpa-tabel4"], 2, "did you mean 'mpa-table4'"),
        (["evaluate", "EMBEDDER", "cubs"], 2, "no folder or file 'cubs', did you mean 'cub'?"),
        (["evaluate", "EMBEDDER", "folder"], 2, "needs its folder"),
        (["recipes", "cub-proxy-ancor"], 2, "did you mean 'cub-proxy-anchor'"),
        (["datasets", "cubs", "."], 2, "cub"),
        (["embed", "EMBEDDER", "missing.jpg"], 2, "no image or folder missing.jpg"),
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
    words = ["evaluate", "--recall-at", "1,5", run / "out", "folder", "--root", images]
    words += ["--split", "all", "--precision-at", "3", "--map-at", "3", "--clustering"]
    code, out, err = call(capsys, *words, "--out", run / "scores.json", "--eval-dims", "2")
    assert code == 0, err
    for name in ("recall@5", "precision@3", "map@3", "first 2 dimensions"):
        assert name in out
    assert {"nmi", "nmi_geometric", "ami", "f1"} <= set(out.split())
    scores = json.loads((run / "scores.json").read_text())["metrics"]
    assert scores["queries"] == 48
    assert 0 < scores["nmi"] <= 1
    assert 0 < scores["dims"]["2"]["recall@1"] <= 1
    words = ["evaluate", run / "out" / "embedder", images, "--split", "test"]
    code, _, err = call(capsys, *words)
    assert code == 2
    assert "no rows of split 'test'" in err


def test_a_folder_without_test_images_and_held_out_classes(capsys, run):
    words = ["train", run / "tiny.yaml", run / "last", "--evaluation.protocol", "last"]
    code, out, err = call(capsys, *words)
    assert code == 0, err
    assert "protocol last: epoch" in out


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


# Each with what it says, and followed by a word that must not be taken for its value.
OPTIONS = [
    (["--name", "cub-mpa"], {"name": "cub-mpa"}),
    (["--device", "cpu"], {}),
    (["--recipe", "glyphs"], {}),
    (["--optimizer.lr", "0.5"], {"optimizer.lr": 0.5}),
    (["--schedule.at", "3,5"], {"schedule.at": [3, 5]}),
    (["--model.flip-tta"], {"model.flip_tta": True}),
    (["--data.flip", "false"], {"data.flip": False}),
    (["--training.cuda-graph", "auto"], {"training.cuda_graph": "auto"}),
    (["--data.dataset", "faces"], {"data.dataset": "faces"}),
]


@settings(max_examples=15)
@given(order=st.permutations([*OPTIONS, (["WORD"], {}), (["WORD"], {})]))
def test_no_value_is_taken_for_a_word_in_any_order(images, order):
    positional = iter([str(images), "runs/x"])
    words = [word for group, _ in order for word in group]
    words = [next(positional) if word == "WORD" else word for word in words]
    changes = {key: value for _, said in OPTIONS for key, value in said.items()}
    expected = Recipe.load("glyphs", {"data.root": str(images), **changes}).to_dict()
    with redirect_stdout(StringIO()) as out:
        assert cli.main(["train", *words, "--print-config"]) == 0
    assert yaml.safe_load(out.getvalue()) == expected


def test_an_empty_word_is_a_variable_that_is_not_set(capsys, run, tmp_path, monkeypatch):
    """As a path it would be the folder one is in."""
    monkeypatch.chdir(tmp_path)
    for words in (["train", ""], ["train", "glyphs", ""], ["evaluate", run / "out", ""]):
        code, _, err = call(capsys, *words)
        assert code == 2
        assert "one of the words is empty" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["foo", "cuda:7", "CUDA", "mps", "meta", "cpu:5", "hpu", "cpu "])
def test_devices_that_are_not_there(capsys, run, images, tmp_path, device):
    for words in (
        ["train", run / "tiny.yaml", tmp_path / "out"],
        ["evaluate", run / "out", images],
        ["embed", run / "out", images, "--out", tmp_path / "v.npz"],
        ["reproduce", "mpa-table4", "--data", images, "--out", tmp_path / "out"],
    ):
        code, _, err = call(capsys, *words, "--device", device)
        assert code == 2
        assert f"there is no device '{device}'; there is cpu" in err
    assert not list(tmp_path.iterdir())


def test_a_recipe_cannot_choose_where_its_run_goes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("../../elsewhere", "/etc/x", "..", "a/b", 300 * "x", "..."):
        (tmp_path / "r.yaml").write_text(yaml.safe_dump({"base": "glyphs", "name": name}))
        plan = train_plan.make_plan("r.yaml", None, None, {}, "cpu")
        assert plan.out.parent == Path("runs")
        assert plan.out.name not in ("", ".", "..")
        assert len(plan.out.name) <= 100


# Places where nothing can be written, seen from a folder that holds `kept`, a folder, and `file`.
BLOCKED = {
    "no folder": "none/out",
    "a folder": "kept",
    "no folder but a file": "file/out",
    "a device": "/dev/null",
    "too long": 300 * "x",
    "of the kernel": "/proc/self/out",
}


@pytest.mark.parametrize("kind", BLOCKED)
@pytest.mark.parametrize(
    ("words", "suffix"),
    [
        (["embed", "RUN", "IMAGES", "--out"], ".npz"),
        (["embed", "RUN", "IMAGES", "--out"], ".npy"),
        (["evaluate", "RUN", "IMAGES", "--out"], ".json"),
        (["export", "RUN"], ".onnx"),
    ],
    ids=str,
)
def test_out_is_tried_before_the_work(
    capsys, run, images, tmp_path, monkeypatch, words, suffix, kind
):
    monkeypatch.setattr(Embedder, "load", lambda *_, **__: pytest.fail("the work has begun"))
    (tmp_path / f"kept{suffix}").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.iterdir())
    out = tmp_path / BLOCKED[kind]
    if kind != "a device":
        out = out.with_name(f"{out.name}{suffix}")
    places = {"RUN": run / "out", "IMAGES": images}
    code, _, err = call(capsys, *[places.get(word, word) for word in words], out)
    assert code == 2
    assert str(out) in err
    assert sorted(tmp_path.iterdir()) == before


def test_out_is_not_what_is_read(capsys, run, images, tmp_path):
    table = tmp_path / "t.parquet"
    Catalog.from_folder(images).to_parquet(table)
    before = table.read_bytes()
    code, _, err = call(capsys, "embed", run / "out", table, "--out", table)
    assert code == 2
    assert "is read by this command" in err
    assert table.read_bytes() == before


class FullDisk(StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device", "standard output")


def test_what_cannot_be_printed_is_still_written(run, images, tmp_path):
    words = ["evaluate", run / "out", images, "--out", tmp_path / "e.json"]
    with redirect_stdout(FullDisk()):
        assert cli.main([str(word) for word in words]) == 1
    assert json.loads((tmp_path / "e.json").read_text())["images"] == 48


def test_an_embedder_tells_nothing_about_the_machine_it_was_trained_on(run, images):
    text = (run / "out" / "embedder" / "embedder.json").read_text()
    assert '"batch_size": 8' in text
    for place in (images, run, Path.home(), Path.cwd()):
        assert str(place) not in text


def test_work_that_fails_leaves_no_file(capsys, run, tmp_path):
    images = make_images(tmp_path / "images", classes=1, each=1)
    (images / "class00" / "0.png").write_bytes(b"no image")
    code, _, _ = call(capsys, "embed", run / "out", images, "--out", tmp_path / "v.npz")
    assert code == 1
    assert not list(tmp_path.glob("*v.npz*"))


STREAMS = """
import sys
from proximetry.cli.streams import open_streams
open_streams()
print("α → \\udcff 😀")
print("ß", file=sys.stderr)
"""


@pytest.mark.parametrize("encoding", ["ascii:strict", "latin-1:strict", "utf-8:strict"])
@pytest.mark.parametrize("buffered", ["", "1"])
def test_no_character_stops_a_command(encoding, buffered):
    name = encoding.partition(":")[0]
    done = subprocess.run(
        [sys.executable, "-c", STREAMS],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUNBUFFERED": buffered},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "α → \udcff 😀\n".encode(name, "backslashreplace")
    assert done.stderr == "ß\n".encode(name, "backslashreplace")


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("| true; exit ${PIPESTATUS[0]}", 0),
        ("| head -1; exit ${PIPESTATUS[0]}", 0),
        (">&-", 0),
        ("<&- >&- 2>&-", 0),
        (">/dev/full", 1),
        ("nonsense 2>&-", 2),
        ("nonsense >&- 2>&-", 2),
    ],
)
def test_the_exit_code_of_a_list_is_true_wherever_it_goes(ending, code):
    command = f"'{sys.executable}' -m proximetry recipes {ending}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code
    expected = ["proximetry: standard output: No space left on device"] if code == 1 else []
    assert done.stderr.splitlines() == expected


@pytest.mark.slow
def test_training_that_nobody_watches_goes_on_to_its_end(run, tmp_path):
    words = [sys.executable, "-m", "proximetry", "train", run / "tiny.yaml", tmp_path / "r"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
    assert json.loads((tmp_path / "r" / "results.json").read_text())["epochs"] == 1
    assert Embedder.load(tmp_path / "r").dim == 8


def test_json_is_json_whatever_the_encoding(tmp_path):
    images = make_images(tmp_path / "Bär 😀", classes=2, each=1)
    done = subprocess.run(
        [sys.executable, "-m", "proximetry", "datasets", str(images), "--json"],
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii:strict"},
    )
    assert json.loads(done.stdout)["root"] == str(images)


def test_sentences_are_bounded_and_fill_the_terminal(capsys, monkeypatch):
    code, _, err = call(capsys, "train", "x" * 100_000)
    assert code > 0
    assert len(err) < 3000
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    code, _, err = call(capsys, "losses", "nonsense")
    assert code == 2
    assert len(err.splitlines()) > 3
    assert max(map(len, err.splitlines())) <= 60
