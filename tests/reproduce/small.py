"""A small dataset, a small table, and the command line on it."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import yaml
from PIL import Image

from proximetry.reproduce import Table
from tests.training.tiny import tiny_values


def make_data(root, side=24):
    """Ten classes to train on and six others to test on, hard to tell apart."""
    draw = np.random.default_rng(0)
    for number in range(16):
        folder = root / "data" / ("train" if number < 10 else "test") / f"class{number:02d}"
        folder.mkdir(parents=True)
        colour = draw.integers(100, 150, 3)
        for i in range(6):
            image = draw.normal(colour, 10, (side, side, 3)) + draw.normal(0, 12, 3)
            Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
    return root / "data"


def table_values(cache, **changes):
    """Two rows that train in a second each; ``changes`` replace keys of the table."""
    base = tiny_values(
        cache,
        data={"batch_size": 12},
        training={"epochs": 2},
    )
    base["evaluation"] = {"protocol": "last", "watch_test": True, "every": 1}
    values = {
        "name": "small",
        "title": "Two losses on coloured squares",
        "source": "Nobody: Table 1.",
        "published": {"backbone": "a large network", "protocol": "not stated", "note": "A note."},
        "metrics": ["recall@1", "recall@4", "map@r"],
        "selection": True,
        "base": base,
        "rows": [
            {
                "name": "Proxy-Anchor",
                "changes": {"loss.name": "proxy_anchor"},
                "published": {"recall@1": 68.6},
                "x": 1,
            },
            {
                "name": "MPA, K = 2",
                "changes": {"loss.name": "mpa", "loss.settings": {"proxies_per_class": 2}},
                "published": {"recall@1": 69.2, "map@r": 26.6},
                "x": 2,
            },
        ],
        "claims": [{"better": "MPA, K = 2", "worse": "Proxy-Anchor"}],
        "figure": {"kind": "sweep", "label": "proxies per class K"},
        "differences": ["Squares instead of birds."],
    }
    return {**values, **changes}


def make_table(cache, **changes):
    return Table.from_dict(table_values(cache, **changes))


def with_base(values, section, **keys):
    base = {**values["base"], section: {**values["base"][section], **keys}}
    return {**values, "base": base}


def write_table(path, values):
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def start(*words):
    """`proximetry reproduce` as a process, with as many threads as the tests have."""
    return subprocess.Popen(
        [sys.executable, "-m", "proximetry.cli", "reproduce", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def page_of(home):
    """README.md without date and commit, which may change while tests run, and runs at once."""
    text = (home / "README.md").read_text()
    text = re.sub(r"\| runs at once \| .* \|", "| runs at once |", text)
    text = re.sub(r"\| date \| .* \|", "| date |", text)
    return re.sub(r", code at [0-9a-f, witchanges]*", "", text)


def numbers(home):
    """What must not depend on how the runs were made: metrics and losses by run."""
    found = {}
    for path in sorted(home.glob("*.json")):
        record = json.loads(path.read_text())
        curve = [
            {k: v for k, v in line.items() if not k.endswith("seconds")} for line in record["curve"]
        ]
        found[path.name] = (record["last"], record["chosen_epoch"], curve)
    return found
