"""The documentation builds as a site that needs no other host, and broken links fail."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
API = [page.stem for page in sorted((ROOT / "docs" / "api").glob("*.md"))]
LOADED = re.compile(r"<(?:script|img|iframe)[^>]* src=\"?([^\s\">]+)|<link[^>]*href=\"?([^\s\">]+)")

TAGS = {*"abhp", "article", "code", "div", "em", "li", "ol", "pre", "small", "span", "strong", "ul"}


def build(folder, site):
    """Build the site of a folder as `make docs` does."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site; pages, links, anchors and docstrings are checked as it is built."""
    place = tmp_path_factory.mktemp("site")
    done = build(ROOT, place)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.mark.slow
def test_site_loads_nothing_from_other_hosts(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for link in LOADED.findall(page.read_text(encoding="utf-8")):
            assert not re.match(r"(https?:)?//", "".join(link)), f"{page.name} loads {link}"
    notebook = (site / "examples" / "own_folder.html").read_text(encoding="utf-8")
    assert '<h2 id="4-search">' in notebook


@pytest.mark.slow
@pytest.mark.parametrize("name", API)
def test_api_reference_lists_every_public_name(site, name):
    package = importlib.import_module(f"proximetry.{name}")
    page = (site / "api" / f"{name}.html").read_text(encoding="utf-8")
    missing = [one for one in package.__all__ if f'id="proximetry.{name}.{one}"' not in page]
    assert missing == []
    # Unintended tags in docstrings, and several names in one entry, render badly.
    inside = page[page.index("<article") : page.index("</article")]
    assert set(re.findall(r"<([a-z]+)", inside)) <= TAGS
    assert re.findall(r">\w+,<", inside) == []


@pytest.mark.slow
def test_generated_signatures_are_documented(site):
    shown = {name: (site / "api" / f"{name}.html").read_text() for name in ("losses", "metrics")}
    text = {name: re.sub(r"<[^>]+>|\s", "", page) for name, page in shown.items()}
    assert "ArcFace(num_classes:int,dim:int,*,scale:float=64.0," in text["losses"]
    assert "marginminradians" in text["losses"]
    assert "evaluate(embeddings:Embeddings,labels:Labels,*,queries:" in text["metrics"]


@pytest.fixture
def project(tmp_path):
    """A small repository with this site's settings and hook: one page, and a file beside docs/."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    (tmp_path / "docs").mkdir()
    for name in ("site_hooks.py", "site.css"):
        (tmp_path / "docs" / name).symlink_to(ROOT / "docs" / name)
    (tmp_path / "README.md").write_text("# Home\n\n[Page](docs/page.md#a-part)\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n")
    (tmp_path / "code.py").write_text("pass\n")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "README.md").write_text("# Results\n\n[Home](../README.md)\n")
    return tmp_path


def test_links_resolve_to_repository_files(project):
    page = project / "docs" / "page.md"
    page.write_text("# Page\n\n## A part\n\n[code](../code.py), [results](../results)\n")
    done = build(project, project / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    built = (project / "site" / "page.html").read_text(encoding="utf-8")
    assert 'href="code.py"' in built
    assert 'href="results/' in built
    assert (project / "site" / "code.py").is_file()
    assert 'href="../index.html"' in next((project / "site" / "results").glob("*.html")).read_text()


def test_broken_links_fail(project):
    page = project / "docs" / "page.md"
    page.write_text("# Page\n\n## Other part\n\n[a](gone.md) [b](../gone.py) [c](page.md#gone)\n")
    done = build(project, project / "site")
    assert done.returncode == 1
    for broken in ("gone.md", "../gone.py", "page.md#gone", "page.md#a-part"):
        assert f"'{broken}'" in done.stderr
