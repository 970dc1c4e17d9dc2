"""Which package may import which, and how light the light ones are."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import proximetry

SOURCE = Path(__file__).parents[1] / "src" / "proximetry"
ALLOWED = {
    "losses": set(),
    "metrics": set(),
    "recipe": {"losses", "metrics", "models", "data"},
    "kernels": set(),
    "data": {"kernels"},
    "models": {"data"},
    "faces": {"metrics", "models", "data"},
    "training": {"losses", "metrics", "models", "data", "kernels", "recipe"},
    "search": {"metrics", "models", "data"},
    "reports": {"losses", "metrics", "models", "data", "recipe", "training"},
    "reproduce": {"losses", "metrics", "models", "data", "recipe", "training"},
    "web": {"metrics", "models", "data", "search"},
    "cli": {
        *("losses", "metrics", "models", "data", "recipe", "training", "search"),
        *("faces", "reports", "reproduce", "web"),
    },
}


def imported_packages(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            names = [node.module or ""]
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "proximetry" and len(parts) > 1:
                yield parts[1]


def test_every_package_is_listed():
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(ALLOWED)


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_it_may(package):
    for path in (SOURCE / package).rglob("*.py"):
        reached = {name for name in imported_packages(path) if (SOURCE / name).is_dir()}
        assert reached <= ALLOWED[package] | {package}, path


@pytest.mark.parametrize("package", ["losses", "metrics"])
def test_losses_and_metrics_need_torch_and_numpy_alone(package):
    code = f"""
import sys
import tomllib
import torch, numpy
before = set(sys.modules)
import proximetry.{package} as package
for name in package.__all__:
    getattr(package, name)
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
third = new - set(sys.stdlib_module_names) - {{"proximetry", "torch", "numpy"}}
third = {{name for name in third if not name.startswith("_cython")}}  # of numpy's extensions
assert not third, third
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_helpers_for_all_packages_load_neither_torch_nor_numpy():
    code = """
import sys
import proximetry._util.errors, proximetry._util.files, proximetry._util.machine
assert not {'torch', 'numpy'} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_named_wrongly_is_found_before_slow_imports(tmp_path):
    code = """
import sys
from proximetry.cli import main
for words in (
    "train nope",
    "embed nope nope",
    "evaluate nope nope",
    "index nope --model run",
    "search nope.png",
    "search q.png",
    "search q.png --sheet sheet.pdf",
    "serve nope",
    "duplicates nope",
):
    assert main(words.split()) == 2, words
    assert "torch" not in sys.modules, words
for words in ("report nope", "export nope nope.onnx"):
    assert main(words.split()), words
    assert "timm" not in sys.modules, words
"""
    (tmp_path / "q.png").touch()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    told = ("no gallery gallery", "must end in .html", "no image or folder nope.png")
    for said in (*told, "no image or folder nope\n"):
        assert said in done.stderr
    assert done.stderr.count("there is no gallery nope") == 2


EXTRAS = ("PIL", "cyclopts", "filelock", "pydantic", "rich", "safetensors", "timm", "yaml")


@pytest.mark.parametrize(
    ("missing", "code", "extra"),
    [
        (EXTRAS, "from proximetry.data import PixelCache", "images"),
        (EXTRAS, "from proximetry.data import open_image", "images"),
        (EXTRAS, "from proximetry.models import Embedder", "images"),
        (EXTRAS, "import proximetry.training", "train"),
        (["PIL"], "from proximetry.training import train", "train"),
        (["timm"], "from proximetry.training import train", "train"),
    ],
)
def test_what_is_missing_is_one_sentence_that_names_the_extra(missing, code, extra):
    done = without(missing, code)
    assert done.returncode == 1
    last = done.stderr.strip().rpartition("\n")[2]
    assert re.fullmatch(
        rf"ModuleNotFoundError: .+ needs? \w+: install the extra '{extra}', .+", last
    )


@pytest.mark.parametrize(
    "code",
    [
        "from proximetry.data import Catalog; Catalog(('a.png',), ('a',), ('all',))",
        "from proximetry.data import list_datasets; assert list_datasets()",
        "import proximetry.data, proximetry.models",
        "import proximetry; assert proximetry.losses.ProxyAnchor",
        "from proximetry.cli import main; sys.exit(main(['--version']))",
        "from proximetry.cli import main; sys.exit(main(['-V']))",
    ],
)
def test_what_needs_no_extra_works_without(code):
    done = without(EXTRAS, code)
    assert done.returncode == 0, done.stderr
    if "main" in code:
        assert done.stdout == f"proximetry {proximetry.__version__}\n"


def without(missing, code):
    """Run code where these packages are not installed."""
    code = f"import sys; sys.modules.update(dict.fromkeys({missing!r})); {code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_packages_are_attributes_that_are_loaded_when_asked_for():
    code = """
import sys, proximetry
assert "torch" not in sys.modules
assert {"losses", "metrics", "data", "models", "training"} <= set(dir(proximetry))
assert proximetry.metrics.evaluate and proximetry.data.Catalog
assert not hasattr(proximetry, "lossses")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", ALLOWED)
def test_public_names_can_be_imported_from_their_package(package):
    module = import_module(f"proximetry.{package}")
    public = set(getattr(module, "__all__", ()))
    for name in public:
        assert getattr(module, name) is not None
    defined = {
        node.name
        for path in (SOURCE / package).rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    root = SOURCE.parents[1]
    pages = {root / "README.md", *(root / "docs").rglob("*.md")} - {root / "docs/architecture.md"}
    for page in pages:
        named = set(re.findall(r"`([A-Z]\w+)", page.read_text()))
        assert named & defined <= public, page


MODULES = {"PIL": "pillow", "yaml": "pyyaml", "huggingface_hub": "huggingface-hub"}
MODULES |= {"openTSNE": "opentsne", "python_multipart": "python-multipart"}
MODULES |= {"faiss": "faiss-cpu", "fontTools": "fonttools"}
MODULES |= {"pytorch_metric_learning": "pytorch-metric-learning"}
# Asked for by name where they are wanted, and not ours to install.
NOT_OURS = {"triton", "wandb", "tensorboard", "milvus_lite"}


def third_party_imports():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "need":
                names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            for name in names:
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names and top != "proximetry":
                    yield MODULES.get(top, top)


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_the_package = extras.keys() - {"dev", "docs"}  # which are for this repository
    listed = [line for name in of_the_package for line in extras[name]]
    listed += project["dependencies"]
    declared = {re.split(r"[\[<>=]", line)[0] for line in listed} - {"proximetry"}
    weights = {name for name in declared if name.endswith("-pytorch-model")}  # found by file
    asked_for_by_name = {"onnx", "onnxruntime", "onnxscript"}  # models/export.py
    asked_for_by_name |= {"httptools", "uvloop"}  # uvicorn takes them where they are
    imported = set(third_party_imports()) - NOT_OURS
    assert imported <= declared, imported - declared
    assert declared - weights - asked_for_by_name <= imported


def test_the_architecture_page_describes_the_packages_that_there_are():
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    section = page[page.index("## 6. The packages") : page.index("### One of each")]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(ALLOWED)
    for name in re.findall(r"`((?:\w+/)+\w+\.py)", page):
        assert (SOURCE / name).is_file() or (SOURCE.parents[1] / name).is_file(), name
