"""Evaluate the epoch that held-out classes select on unseen classes.

    for seed in 0 1 2; do proximetry train IMAGES runs/cub-$seed --training.seed $seed \
        --evaluation.watch-test; done
    python -m benchmarks.selection runs/cub-* --out selection.json

IMAGES has train/ and test/ with different classes. The test set is evaluated only for the curve;
`lost` is the difference between its MAP@R at the selected epoch and at its best epoch.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from proximetry._util.files import atomic_write
from proximetry.reproduce.table_page import grid
from proximetry.training.run_folder import RunFolder

METRIC = "map@r"


def summarize(folder: RunFolder) -> dict[str, Any]:
    """Return the curves of a run, its selected epoch, and the best epoch on the test set."""
    evaluated = [line for line in folder.history() if "test" in line]
    curves = {
        split: {line["epoch"]: line[split][METRIC] for line in evaluated}
        for split in ("held_out", "test")
    }
    curves["with_distractors"] = {
        line["epoch"]: line["held_out"]["with_distractors"][METRIC] for line in evaluated
    }
    selected = folder.read_results()["selected"]["epoch"]
    trained = {epoch: value for epoch, value in curves["test"].items() if epoch > 0}
    best = max(trained, key=lambda epoch: trained[epoch])
    return {
        "run": folder.path.name,
        "selected_epoch": selected,
        "best_epoch": best,
        "lost": trained[best] - trained[selected],
        **curves,
    }


def table(runs: Iterable[dict[str, Any]]) -> str:
    """Return the runs as a Markdown table."""
    heads = ["run", "untrained", "selected", "test MAP@R", "best", "test MAP@R", "lost"]
    lines = []
    for run in runs:
        # JSON has made text of the epochs.
        test = {int(epoch): 100 * value for epoch, value in run["test"].items()}
        cells = [
            run["run"],
            f"{test[0]:.1f}" if 0 in test else None,
            f"epoch {run['selected_epoch']}",
            f"{test[run['selected_epoch']]:.1f}",
            f"epoch {run['best_epoch']}",
            f"{test[run['best_epoch']]:.1f}",
            f"{100 * run['lost']:.2f}",
        ]
        lines.append(cells)
    return grid(heads, lines)


def main() -> None:
    """Summarize run folders, or print the summary of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.runs:
        summaries = [summarize(RunFolder(path)) for path in options.runs]
        atomic_write(options.out, (json.dumps(summaries, indent=1) + "\n").encode())
    print(table(json.loads(options.out.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
