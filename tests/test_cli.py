"""The command line: real processes, options, exit codes, one-line errors, output streams."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from proximetry import cli
from proximetry.data import Catalog
from proximetry.models import Embedder
from proximetry.training import Recipe, train
from proximetry.training.plan import make_plan
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


def run_python(code, *words):
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )


def test_process_prints_an_error_in_one_line():
    words = [sys.executable, "-m", "proximetry", "train", "nonsense", "out"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'nonsense'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_missing_extra_is_named():
    words = "from proximetry.cli import main; sys.exit(main(['recipes']))"
    done = run_python(f"import sys; sys.modules['cyclopts'] = None; {words}")
    assert done.returncode == 1
    assert "pip install '.[train]'" in done.stderr


def test_help_of_every_command_needs_no_torch():
    code = """
import sys
from proximetry.cli import main, make_app
app = make_app()
names = [name for name in app if not name.startswith("-")]
names += [f"{group} {name}" for group in ("faces", "cache") for name in app[group]]
for words in (["--help"], *([*name.split(), "--help"] for name in names)):
    assert main(words) == 0, words
assert not {"torch", "numpy", "timm", "PIL"} & set(sys.modules)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    for word in ("train", "faces verify", "--optimizer.lr", "--recall-at"):
        assert word in done.stdout, word


def test_train_help_starts_with_the_common_options(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    boxes = re.split(r"╭─ ([A-Z][\w ]+) ", call("train", "--help"))[1:]
    assert boxes[::2] == ["Arguments", "Common", "Configuration and output", "Recipe keys"]
    options = dict(zip(boxes[::2], boxes[1::2], strict=True))
    for name in ("--recipe", "--loss.name", "--training.epochs", "--training.max-time", "--fresh"):
        assert f"│ {name} " in options["Common"]
    assert "--schedule.warmup-steps" in options["Recipe keys"]
    assert len(re.findall("^│ --", options["Common"], re.MULTILINE)) <= 12


def test_help_shows_defaults_of_options_but_not_of_recipe_keys(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    keys = call("train", "--help").partition("Recipe keys")[2]
    assert "--schedule.every" in keys
    assert "[default:" not in keys
    out = " ".join(call("evaluate", "--help").split())
    assert "[default: error]" in out
    assert "[default: False]" not in out
    assert call("help", "evaluate") == call("evaluate", "-h")


def config(call, *words):
    """Return the recipe that a command would train."""
    return yaml.safe_load(call("train", *words, "--print-config"))


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (["--data.batch_size", "8"], {"data.batch_size": 8}),
        (["--model.tta-crops", "0.9", "0.8"], {"model.tta_crops": [0.9, 0.8]}),
        (["--model.tta-crops", "[]", "--evaluation.eval-dims", "null"], {"model.tta_crops": []}),
        (["--data.no-flip"], {"data.flip": False}),
        (["--data.root", "12"], {"data.root": "12"}),
        (["--data.crop-scale", "0.2", "1"], {"data.crop_scale": [0.2, 1]}),
        (["--data.crop-scale", "0.2,1"], {"data.crop_scale": [0.2, 1]}),
        (["--data.crop_scale=0.2,1"], {"data.crop_scale": [0.2, 1]}),
        (["--evaluation.metrics.recall-at", "1", "10"], {"evaluation.metrics.recall_at": [1, 10]}),
        (["--loss.settings.alpha=16"], {"loss.settings.alpha": 16}),
        (
            ["--loss", "arcface", "--loss.settings.margin", "0.3"],
            {"loss": {"name": "arcface", "settings": {"margin": 0.3}}},
        ),
        (
            ["--loss.settings.sampled_negatives", "0.1", "--loss.settings.ignore_above=0.4"],
            {"loss.settings": {"sampled_negatives": 0.1, "ignore_above": 0.4}},
        ),
        (["--optimizer=sgd", "--optimizer.lr", "0.1"], {"optimizer": {"name": "sgd", "lr": 0.1}}),
        (["--optimizer.clip-value", "null"], {"optimizer.clip_value": None}),
        (["--training.project=null", "--data.cache-dir", "12"], {"data.cache_dir": "12"}),
        (["--training.cuda-graph", "true"], {"training.cuda_graph": True}),
    ],
    ids=str,
)
def test_every_key_is_an_option(call, words, changes):
    expected = Recipe.load("cub-proxy-anchor", changes).to_dict()
    assert config(call, "cub-proxy-anchor", "runs/x", *words) == expected
    assert config(call, *words, "--device", "cpu", "cub-proxy-anchor", "runs/x") == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recall-at", "1,10", "2024", "runs/x"], "'runs/x'"),  # 2024 is the embedder
        (["--recall-at=1,10", "2024", "runs/x"], "'runs/x'"),
        (["2024", "runs/x", "--recall-at", "1", "10"], "'runs/x'"),
        (["--recall-at", "1", "10", "2024", "runs/x"], "EMBEDDER is missing"),
    ],
)
def test_list_option_never_takes_a_path(call, words, message):
    assert message in call("evaluate", *words, code=2)


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ("trian", ["train"]),
        ("train", ["IMAGES is missing", "train --help"]),
        ("train missing", ["'missing'", "`proximetry datasets`"]),
        ("train FULL", ["full", "<class>/<image>.jpg"]),
        ("train IMAGES FULL", ["full", "Choose another folder"]),
        ("train IMAGES --recipe nonsense", ["'nonsense'", "`proximetry recipes`"]),
        ("train IMAGES --loss nonsense", ["'nonsense'", "proxy_anchor"]),
        ("train IMAGES --loss.settings.sampled_negatives 2", ["sampled_negatives", "at most 1"]),
        ("train IMAGES --lr 1", ["--lr", "Did you mean --optimizer.lr?"]),
        ("train glyphs out --batch_size 8", ["--data.batch-size or --evaluation"]),
        ("train glyphs out more", ["more. See proximetry train --help"]),
        ("train glyphs out --loss.settings alpha=3", ["--loss.settings.KEY VALUE"]),
        ("train glyphs ''", ["is empty"]),
        ("train cub-proxy-anchor out --model.weights none", ["data.root is missing"]),
        ("train glyphs --out out", ["OUT is a positional argument"]),
        ("train glyphs out --config missing.yaml", ["missing.yaml"]),
        ("export EMBEDDER", ["OUT is missing"]),
        ("export EMBEDDER FULL", ["full", ".onnx"]),
        ("evaluate EMBEDDER", ["embedder", "proximetry evaluate EMBEDDER IMAGES"]),
        ("evaluate EMBEDDER missing", ["'missing'", "`proximetry datasets`"]),
        ("evaluate EMBEDDER folder", ["needs its folder"]),
        ("evaluate EMBEDDER FULL", ["full", "<class>/<image>.jpg"]),
        ("evaluate EMBEDDER IMAGES --out x.csv", ["x.csv", ".json"]),
        ("evaluate EMBEDDER IMAGES --split nonsense", ["nonsense", '"train"']),
        ("evaluate EMBEDDER IMAGES --similarity cosine", ["embedder", "Omit"]),
        ("evaluate nowhere glyphs", ["nowhere"]),
        ("embed EMBEDDER missing.jpg", ["missing.jpg", "Check the path"]),
        ("embed EMBEDDER TABLE --out TABLE", ["t.parquet", "Choose another file"]),
        ("embed nowhere nothing.png --out v.zip", ["must end in .npz or .npy or", "v.zip"]),
        ("index missing --model EMBEDDER", ["missing", "Check the path"]),
        ("report missing", ["missing", "Pass the folder of a run"]),
        ("backbones nonsense", ["'nonsense'", "Try a shorter part"]),
        ("cache clean --keep lots", ["'lots'", "--keep 20GB"]),
    ],
)
def test_errors_name_the_value_and_the_remedy(
    run, images, tmp_path, monkeypatch, capsys, words, texts
):
    """Errors are one line, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    Catalog.from_folder(images).to_parquet(tmp_path / "t.parquet")
    shutil.copytree(images / "class00", tmp_path / "full")
    before = sorted(tmp_path.rglob("*"))
    paths = {"EMBEDDER": run / "out" / "embedder", "IMAGES": images}
    paths |= {"FULL": tmp_path / "full", "TABLE": tmp_path / "t.parquet"}
    assert cli.main([str(paths.get(word, word)) for word in shlex.split(words)]) in (1, 2)
    (message,) = capsys.readouterr().err.splitlines()
    assert [text for text in texts if text not in message] == []
    assert sorted(tmp_path.rglob("*")) == before


def test_no_arguments_prints_help(capsys):
    assert cli.main([]) == 2
    assert "Usage: proximetry" in capsys.readouterr().out


def test_evaluate_options_choose_the_metrics(call, run, images):
    words = ["evaluate", "--recall-at", "1,5", run / "out", "folder", "--root", images]
    out = call(*words, "--precision-at", "3", "--map-at", "3", "--clustering", "--eval-dims", "2")
    for name in ("recall@5", "precision@3", "map@3", "first 2 dimensions", "nmi_geometric"):
        assert name in out


def test_only_the_first_of_several_processes_prints(call, run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    out = call("train", run / "tiny.yaml", run / "out")
    assert "protocol" not in out


def test_export_writes_onnx(call, run):
    out = call("export", run / "out" / "embedder", run / "m.onnx")
    assert "verified" in out
    assert (run / "m.onnx").stat().st_size > 1000


def test_completion_script_lists_options(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = cli.make_app().install_completion(shell="bash", output=tmp_path / "proximetry.bash")
    script = path.read_text()
    for word in ("train", "evaluate", "--recall-at", "--optimizer.lr"):
        assert word in script


# Options with the keys they set, each followed by a word that is not its value.
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
def test_option_values_are_not_taken_for_arguments_in_any_order(images, order):
    positional = iter([str(images), "runs/x"])
    words = [word for group, _ in order for word in group]
    words = [next(positional) if word == "WORD" else word for word in words]
    changes = {key: value for _, keys in OPTIONS for key, value in keys.items()}
    expected = Recipe.load("glyphs", {"data.root": str(images), **changes}).to_dict()
    with redirect_stdout(StringIO()) as out:
        assert cli.main(["train", *words, "--print-config"]) == 0
    assert yaml.safe_load(out.getvalue()) == expected


@pytest.mark.parametrize("device", ["foo", "cuda:7", "meta", "cpu "])
def test_unknown_devices_are_rejected(call, run, images, tmp_path, device):
    for words in (
        ["train", run / "tiny.yaml", tmp_path / "out"],
        ["evaluate", run / "out", images],
        ["embed", run / "out", images, "--out", tmp_path / "v.npz"],
        ["reproduce", "mpa-table4", "--data", images, "--out", tmp_path / "out"],
    ):
        err = call(*words, "--device", device, code=2)
        assert f"'{device}'" in err
    assert not list(tmp_path.iterdir())


def test_recipe_name_cannot_leave_the_runs_folder(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("../../elsewhere", "/etc/x", "..", "a/b", 300 * "x", "..."):
        (tmp_path / "r.yaml").write_text(yaml.safe_dump({"base": "glyphs", "name": name}))
        plan = make_plan("r.yaml", None, None, {}, "cpu")
        assert plan.out.parent == Path("runs")
        assert plan.out.name not in ("", ".", "..")
        assert len(plan.out.name) <= 100


# Files that cannot be written, in a folder with a folder `existing` and a file `file`.
BLOCKED = ["none/out", "existing", "file/out", "/dev/null", 300 * "x", "/proc/self/out"]


@pytest.mark.parametrize("place", BLOCKED, ids=lambda place: place[:20])
@pytest.mark.parametrize(
    ("words", "suffix"),
    [
        (["embed", "RUN", "IMAGES", "--out"], ".npy"),
        (["evaluate", "RUN", "IMAGES", "--out"], ".json"),
        (["export", "RUN"], ".onnx"),
    ],
    ids=str,
)
def test_unwritable_output_is_rejected_before_the_work(
    call, run, images, tmp_path, monkeypatch, words, suffix, place
):
    monkeypatch.setattr(Embedder, "load", lambda *_, **__: pytest.fail("the work has begun"))
    (tmp_path / f"existing{suffix}").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.iterdir())
    out = tmp_path / (place if place == "/dev/null" else f"{place}{suffix}")
    places = {"RUN": run / "out", "IMAGES": images}
    err = call(*[places.get(word, word) for word in words], out, code=2)
    assert str(out) in err
    assert sorted(tmp_path.iterdir()) == before


class FullDisk(StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device", "standard output")


def test_full_disk_at_standard_output_keeps_the_document(run, images, tmp_path):
    words = ["evaluate", run / "out", images, "--out", tmp_path / "e.json"]
    with redirect_stdout(FullDisk()):
        assert cli.main([str(word) for word in words]) == 1
    assert json.loads((tmp_path / "e.json").read_text())["images"] == 48


def test_saved_embedder_holds_no_paths(run, images):
    text = (run / "out" / "embedder" / "embedder.json").read_text()
    assert '"batch_size": 8' in text
    for place in (images, run, Path.home(), Path.cwd()):
        assert str(place) not in text


STREAMS = """
import sys
from proximetry.cli import app
app.main = lambda: 0
sys.exit = lambda code: None
app.entry()
print("α → \\udcff 😀")
print("ß", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("encoding", "buffered"), [("ascii:strict", ""), ("latin-1:strict", "1"), ("utf-8:strict", "")]
)
def test_characters_missing_in_the_encoding_are_escaped(encoding, buffered):
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
        (">&-", 0),
        (">/dev/full", 1),
        ("nonsense >&- 2>&-", 2),
    ],
)
def test_exit_code_with_closed_or_full_streams(ending, code):
    command = f"'{sys.executable}' -m proximetry recipes {ending}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code
    expected = ["proximetry: standard output: No space left on device"] if code == 1 else []
    assert done.stderr.splitlines() == expected


@pytest.mark.slow
def test_training_continues_after_a_broken_pipe(run, tmp_path):
    words = [sys.executable, "-m", "proximetry", "train", run / "tiny.yaml", tmp_path / "r"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
    assert json.loads((tmp_path / "r" / "results.json").read_text())["epochs"] == 1
    assert Embedder.load(tmp_path / "r").dim == 8


def test_error_messages_are_bounded(capsys):
    assert cli.main(["train", "x" * 100_000]) == 2
    assert len(capsys.readouterr().err) < 3000
