"""The documentation matches the code: generated tables, citations, commands."""

import os
import re
import shutil

import pytest
from huggingface_hub import constants

from benchmarks import scale
from docs import generate
from proximetry import cli
from proximetry.training import train
from tests.losses.cases import NAMES
from tests.training.tiny import make_images, make_recipe


def test_generated_parts_are_up_to_date():
    assert [page.name for page in generate.outdated_pages()] == []


def test_scale_page_has_the_estimates_of_the_benchmark():
    assert scale.table() in (generate.DOCS / "scale.md").read_text(encoding="utf-8")


def test_every_loss_has_a_page_with_its_settings():
    pages = [page.read_text(encoding="utf-8") for page in (generate.DOCS / "losses").glob("*.md")]
    for name in NAMES:
        (page,) = (page for page in pages if f"<!-- generated: signature {name} -->" in page)
        assert f"settings {name} -->" in page
        assert f"<!-- generated: use {name} -->" in page


def test_generated_part_is_replaced_and_the_rest_is_unchanged():
    text = "a\n<!-- generated: signature proxy_anchor -->\nold\n<!-- end -->\nb\n"
    assert generate.fill_parts(text) == (
        "a\n<!-- generated: signature proxy_anchor -->\n"
        "`ProxyAnchor(num_classes, dim, *, alpha=32.0, margin=0.1, …)`, in recipes `proxy_anchor`\n"
        "<!-- end -->\nb\n"
    )


def test_every_citation_is_in_the_bibliography():
    bibliography = (generate.DOCS / "bibliography.md").read_text(encoding="utf-8")
    cited = re.compile(r"[A-Z][\w-]+ (?:et al\.|& [A-Z]\w+) \d{4}")
    for root, pattern in ((generate.DOCS.parent / "src", "*.py"), (generate.DOCS, "*.md")):
        for page in root.rglob(pattern):
            text = " ".join(page.read_text(encoding="utf-8").split())
            for citation in cited.findall(text):
                assert f"{citation}.**" in bibliography, f"{page.name} cites {citation}"
            for key in re.findall(r"bibliography\.md#([\w-]+)", text):
                assert f'<a id="{key}"></a>' in bibliography, f"{page.name} links to {key}"


def test_reliability_page_names_existing_test_files():
    text = (generate.DOCS / "reliability.md").read_text(encoding="utf-8")
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and "guarantee |" not in line
    ]
    assert len(rows) > 40
    for row in rows:
        files = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert files, f"no test shows: {row}"
        for file in files:
            assert (generate.DOCS.parent / file).is_file(), file


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The working folder: the folders of images in the commands, another image, and a run."""
    place = tmp_path_factory.mktemp("home")
    folders = [make_images(place / name, seed=seed) for seed, name in enumerate(FOLDERS)]
    shutil.copy(next(folders[-1].rglob("*.png")), place / "query.png")
    recipe = make_recipe(folders[0], place / "cache", training={"epochs": 1})
    train(recipe, place / "runs" / "mine")
    return place


COMMAND = re.compile(r"^proximetry .+$", re.MULTILINE)
PAGES = [(generate.DOCS / page).read_text(encoding="utf-8") for page in ("folder.md", "faq.md")]
COMMANDS = list(dict.fromkeys(line for page in PAGES for line in COMMAND.findall(page)))
FOLDERS = sorted(set(re.findall(r"~/(\w+)(?!\.)\b", "\n".join(COMMANDS))))


@pytest.mark.slow
def test_documented_commands_work(home, monkeypatch, capsys):
    assert len(COMMANDS) >= 12
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("proximetry.web.serve", lambda *args, **options: None)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    for line in COMMANDS:
        words = [os.path.expanduser(word) for word in line.split()[1:]]
        if words[0] == "train" and words[-1] != "--print-config":  # training would take hours
            words.append("--print-config")
        code = cli.main(words)
        message = capsys.readouterr().err
        if words[0] == "push":
            assert "no hub token" in message
        else:
            assert code == 0, f"{line}: {message}"
    assert {"neighbors.html", "mine.onnx", "gallery", "trained"} <= set(os.listdir(home))
