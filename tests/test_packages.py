"""Import directions between packages, lazy imports, declared dependencies."""

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
# Every package may import `_util`.
ALLOWED = {
    "_util": set(),
    "losses": set(),
    "metrics": set(),
    "recipe": {"losses", "metrics", "models", "data"},
    "kernels": set(),
    "data": {"kernels"},
    "models": {"data", "metrics"},
    "faces": {"metrics", "models", "data"},
    "training": {"losses", "metrics", "models", "data", "kernels", "recipe"},
    "search": {"metrics", "models", "data"},
    "health": {"metrics", "models", "data", "search", "reports"},
    "reports": {"losses", "metrics", "models", "data", "recipe", "training"},
    "reproduce": {"losses", "metrics", "models", "data", "recipe", "training"},
    "web": {"metrics", "models", "data", "search"},
    "cli": {
        *("losses", "metrics", "models", "data", "recipe", "training", "search"),
        *("faces", "health", "reports", "reproduce", "web"),
    },
}


def imported_modules(path):
    """Return the modules that a file imports, also by `import_optional`, with the names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_optional":
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def test_every_package_is_listed():
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(ALLOWED)


@pytest.mark.parametrize("package", ALLOWED)
def test_package_imports_only_allowed_packages(package):
    for path in (SOURCE / package).rglob("*.py"):
        ours = [
            name.split(".") for name in imported_modules(path) if name.startswith("proximetry.")
        ]
        reached = {parts[1] for parts in ours if (SOURCE / parts[1]).is_dir() or parts[1] == "run"}
        assert reached <= ALLOWED[package] | {package, "_util"}, path


def test_source_never_unpickles_files():
    """Unpickling runs code, and files may be untrusted."""
    unpicklers = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
    for path in SOURCE.rglob("*.py"):
        imported = {name for name in imported_modules(path) if name.split(".")[0] in unpicklers}
        assert imported <= {"pickle.UnpicklingError"}, path
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if type(node) is ast.Call]
        for call in calls:
            options = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert options.get("allow_pickle", "False") == "False", path
            default = "missing" if ast.unparse(call.func) == "torch.load" else "True"
            assert options.get("weights_only", default) == "True", path


LIGHT = """
import sys, proximetry, proximetry._util.files, proximetry._util.machine, proximetry._util.types
from proximetry.metrics import Metrics
import proximetry.metrics.scores, proximetry.models.constants
assert not {"PIL", "numpy", "timm", "torch"} & set(sys.modules)
assert {"losses", "metrics", "data", "models", "training"} <= set(dir(proximetry))
assert not hasattr(proximetry, "lossses") and not hasattr(proximetry.models, "lossses")
import torch, numpy
before = set(sys.modules)
for package in (proximetry.losses, proximetry.metrics):
    for name in package.__all__:
        getattr(package, name)
new = {name.split(".")[0] for name in set(sys.modules) - before}
third = new - set(sys.stdlib_module_names) - {"proximetry", "torch", "numpy"}
third = {name for name in third if not name.startswith("_cython")}  # of numpy's extensions
assert not third, third
assert proximetry.metrics.evaluate and proximetry.data.Catalog
"""


def test_light_packages_import_little():
    subprocess.run([sys.executable, "-c", LIGHT], check=True)


DEFERRED = """
import sys
from proximetry._util.imports import defer_compiler
defer_compiler()
import timm, torch
from proximetry.training import train
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
assert not {"sympy", "torch._inductor", "torch._dynamo.convert_frame"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    "use",
    [
        "",
        "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)) == 2",
        "import torch._dynamo.config as c; assert c is torch._dynamo.config",
        "from torch._dynamo.utils import counters; assert torch._dynamo.utils.counters is counters",
        "from torchvision.ops.roi_align import is_compile_supported as f; assert f('cpu')",
    ],
)
def test_torch_compiler_is_imported_when_it_is_needed(use):
    subprocess.run([sys.executable, "-c", DEFERRED + use], check=True)


def test_missing_paths_are_reported_before_torch_is_imported(tmp_path):
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
    "check nope",
):
    assert main(words.split()) == 2, words
    assert "torch" not in sys.modules, words
for words in ("report nope", "export runs/nope nope.onnx"):
    assert main(words.split()), words
    assert "timm" not in sys.modules, words
"""
    (tmp_path / "q.png").touch()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for token in ("gallery", ".html", "nope.png", "no such embedder: runs/nope"):
        assert token in done.stderr


EXTRAS = ("PIL", "cyclopts", "filelock", "pydantic", "rich", "safetensors", "timm", "yaml")
# Packages that are not installed, code, and the extra that its error names; "" if it works.
WITHOUT = [
    (EXTRAS, "from proximetry.data import Catalog; Catalog(('a.png',), ('a',), ('all',))", ""),
    (EXTRAS, "from proximetry.data import list_datasets; assert list_datasets()", ""),
    (EXTRAS, "import proximetry.data, proximetry.models", ""),
    (EXTRAS, "import proximetry; assert proximetry.losses.ProxyAnchor", ""),
    (EXTRAS, "from proximetry.cli import main; assert main(['--version']) == 0", ""),
    (EXTRAS, "from proximetry.data import PixelCache", "images"),
    (EXTRAS, "from proximetry.data import open_image", "images"),
    (EXTRAS, "from proximetry.models import Embedder", "images"),
    (EXTRAS, "import proximetry.training", "train"),
    (["PIL"], "from proximetry.training import train", "train"),
    (["timm"], "from proximetry.training import train", "train"),
    (["pyarrow"], "from proximetry.search import Gallery", "search"),
    (
        ["openTSNE"],
        "import numpy; from proximetry.metrics import map_embeddings; "
        "map_embeddings(numpy.eye(64, dtype='float32'))",
        "map",
    ),
]


def test_missing_packages_raise_an_error_that_names_the_extra():
    code = f"""
import sys
for missing, code, extra in {WITHOUT!r}:
    modules = dict(sys.modules)
    for name in modules:
        if name.split(".")[0] in ("proximetry", *missing):
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(missing))
    try:
        exec(code)
        print(code, "works")
    except ModuleNotFoundError as error:
        print(code, error)
    for name in missing:
        del sys.modules[name]
    sys.modules.update({{n: m for n, m in modules.items() if n.split(".")[0] in missing}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"proximetry {proximetry.__version__}\n") == 1
    for _, code, extra in WITHOUT:
        error = rf".+ needs? \w+: install the extra '{extra}', .+"
        pattern = f"^{re.escape(code)} {error if extra else 'works'}$"
        assert re.search(pattern, done.stdout, re.MULTILINE), code


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


MODULES = {"PIL": "pillow", "pillow_heif": "pillow-heif", "yaml": "pyyaml", "faiss": "faiss-cpu"}
# Imported by name if installed; no extra installs them.
OPTIONAL = {"triton", "wandb", "mlflow", "sklearn", "tensorboard", "milvus_lite"}


def test_third_party_imports_are_declared():
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_the_package = extras.keys() - {"dev", "docs"}  # extras of the repository
    listed = [line for name in of_the_package for line in extras[name]]
    listed += project["dependencies"]
    declared = {re.split(r"[\[<>=]", line)[0] for line in listed} - {"proximetry"}
    indirect = {name for name in declared if name.endswith("-pytorch-model")}  # read as files
    indirect |= {"onnx", "onnxruntime", "onnxscript"}  # imported by name in models/onnx.py
    indirect |= {"httptools", "python-multipart", "uvloop"}  # used by uvicorn and FastAPI
    modules = {
        name.split(".")[0] for path in SOURCE.rglob("*.py") for name in imported_modules(path)
    }
    modules -= {*sys.stdlib_module_names, *OPTIONAL, "proximetry"}
    imported = {MODULES.get(name, name.lower().replace("_", "-")) for name in modules}
    assert imported <= declared, imported - declared
    assert declared - indirect <= imported


def test_architecture_page_lists_all_packages():
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    section = page[page.index("## 6. The packages") : page.index("### One of each")]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(ALLOWED)
    for name in re.findall(r"`((?:\w+/)+\w+\.py)", page):
        assert (SOURCE / name).is_file() or (SOURCE.parents[1] / name).is_file(), name
