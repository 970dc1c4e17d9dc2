"""Runs on images whose classes and files have hostile names."""

import csv
import re
import shutil
from html.parser import HTMLParser

import pytest

from proximetry.reports import RunRecord, evaluate_run
from proximetry.training import Recipe, train
from tests.training.tiny import make_images, tiny_values

HOSTILE = "</script><script>alert('class')</script>&amp;\"'"
FILE = "<img src=x onerror=alert(1)>.png"
VOID = {"meta", "img", "br", "col", "input"}


def make_table(home, seed=0):
    """Ten training and six test classes, one of them with a hostile name."""
    images = make_images(home / "images", classes=16, seed=seed)
    (images / "class12" / "0.png").rename(images / "class12" / FILE)
    rows = []
    for number, folder in enumerate(sorted(images.iterdir())):
        label = HOSTILE if number == 12 else folder.name
        split = "train" if number < 10 else "test"
        rows += [(file, label, split) for file in sorted(folder.iterdir())]
    with (home / "images.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "split"])
        writer.writerows([f"images/{path.parent.name}/{path.name}", *rest] for path, *rest in rows)
    return home / "images.csv"


def make_recipe(table, cache, **changes):
    values = tiny_values(
        cache,
        data={"dataset": "csv", "root": str(table), **changes.pop("data", {})},
        loss={"name": "soft_triple", "settings": {"proxies_per_class": 3}},
        training={"epochs": 2, **changes.pop("training", {})},
        **changes,
    )
    return Recipe.load(values)


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="session")
def table(home):
    return make_table(home)


@pytest.fixture(scope="session")
def runs(home, table):
    """Two runs that differ by their seed."""
    for seed in (0, 1):
        recipe = make_recipe(table, home / "cache", training={"seed": seed})
        train(recipe, home / f"seed{seed}")
    return home / "seed0", home / "seed1"


@pytest.fixture
def run(runs, tmp_path):
    """A copy of the first run."""
    return shutil.copytree(runs[0], tmp_path / "run")


@pytest.fixture(scope="session")
def records(runs):
    return [RunRecord.read(path) for path in runs]


@pytest.fixture(scope="session")
def evaluations(records):
    return [evaluate_run(record) for record in records]


class Page(HTMLParser):
    """Elements of a page, and tables by caption; elements must be closed in order."""

    def __init__(self, content):
        super().__init__(convert_charrefs=True)
        self.elements, self.tables, self.text = [], {}, ""
        self._open, self._row, self._caption = [], None, None
        self.feed(content.decode())
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "caption":
            self._caption = ""
        elif tag == "tr":
            self._row = []
            self.tables[self._caption].append(self._row)
        elif tag in ("th", "td"):
            self._row.append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        if tag == "caption":
            self.tables[self._caption] = []

    def handle_data(self, data):
        if self._open and self._open[-1] in ("script", "style"):
            return
        if "pre" not in self._open:
            data = re.sub(r"\s+", " ", data)
        self.text += data
        if "caption" in self._open[-1:]:
            self._caption += data
        elif {"th", "td"} & set(self._open):
            self._row[-1] += data

    def table(self, beginning):
        """Return the rows of a table without its head."""
        (matches,) = [rows for name, rows in self.tables.items() if name.startswith(beginning)]
        return matches[1:]

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]
