"""A small dataset, a small table, and runs that train in this process."""

import re
import traceback
from dataclasses import dataclass

import numpy as np
import yaml
from PIL import Image

from proximetry.reproduce import ReproduceOptions, Table, reproduce
from proximetry.reproduce.records import read_records, write_records
from proximetry.training import Recipe, Stopped, train
from tests.training.tiny import tiny_values


def make_data(root, side=24):
    """Ten training and six similar test classes."""
    draw = np.random.default_rng(0)
    for number in range(16):
        folder = root / "data" / ("train" if number < 10 else "test") / f"class{number:02d}"
        folder.mkdir(parents=True)
        color = draw.integers(100, 150, 3)
        for i in range(6):
            image = draw.normal(color, 10, (side, side, 3)) + draw.normal(0, 12, 3)
            Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
    return root / "data"


def table_values(cache, **changes):
    """A table of two rows that train in a second each; ``changes`` replace its keys."""
    base = tiny_values(cache, data={"batch_size": 12}, training={"epochs": 2})
    base["evaluation"] = {"every": 1}
    del base["name"]
    values = {
        "name": "small",
        "title": "Two losses on colored squares",
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
    return Table.load(table_values(cache, **changes))


def with_base(values, section, **keys):
    base = {**values["base"], section: {**values["base"][section], **keys}}
    return {**values, "base": base}


def write_table(path, values):
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


@dataclass
class Ended:
    """A finished run in place of a process."""

    code: int

    def poll(self):
        return self.code

    def terminate(self):
        pass

    def wait(self):
        return self.code


def train_here(job, *callbacks):
    """Train in this process, as `start_process` does in a child."""
    try:
        train(Recipe.load(job.file), job.folder.path, device=job.device, callbacks=callbacks)
    except Stopped as stopped:  # the signal is for this process
        raise KeyboardInterrupt from stopped
    except Exception:
        job.log.write_text(traceback.format_exc())
        return Ended(1)
    return Ended(0)


def no_training(job):
    raise AssertionError("nothing was to be trained")


def run_table(table, data, out, report=lambda line: None, start=train_here, **options):
    """Call `reproduce` on the CPU, without child processes."""
    chosen = ReproduceOptions(**{"device": "cpu", **options})
    return reproduce(table, data, out, chosen, report=report, start=start)


def page_of(home):
    """Return README.md without date, commit and number of concurrent runs."""
    text = (home / "README.md").read_text()
    text = re.sub(r"\| concurrent runs \| .* \|", "| concurrent runs |", text)
    text = re.sub(r"\| date \| .* \|", "| date |", text)
    return re.sub(r", code at [0-9a-f, witchanges]*", "", text)


def numbers(home):
    """Return metrics and losses by run, which are the same however the runs were started."""
    results = {}
    for name, record in read_records(home).items():
        curve = [
            {k: v for k, v in line.items() if not k.endswith("seconds")} for line in record.curve
        ]
        results[name] = (record.last, record.selected_epoch, curve)
    return results


def remove_runs(home, *names):
    write_records(home, [r for name, r in read_records(home).items() if name not in names])


def edit_run(home, name, **fields):
    read_records(home)[name].model_copy(update=fields).write(home)
