"""Embedders on the Hugging Face Hub: a repository contains a saved embedder and a model card.

A push is one commit, so a repository is never half updated. Only `embedder.json` and the
safetensors file that it names are downloaded; no code from a repository is run.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    EvalResult,
    HfApi,
    ModelCardData,
    get_token,
)
from huggingface_hub.errors import HfHubHTTPError

from proximetry import __version__
from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_int, format_value, shorten
from proximetry.models import weights
from proximetry.models.embedder import Embedder, versions
from proximetry.models.storage import (
    DESCRIPTION,
    MAX_DESCRIPTION_BYTES,
    is_embedder_file,
    named_weights,
    read_description,
)

_MAX_WEIGHTS_BYTES = 16_000_000_000  # the largest networks of timm have 8 GB
_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_LOGIN = "Log in with `hf auth login` or set HF_TOKEN."

TASK = "image-feature-extraction"
_TAGS = ["embeddings", "image-retrieval", "metric-learning", "proximetry", "timm"]
# Entries that `train` saves with the metrics.
_COUNTS = ("epoch", "queries", "queries_without_positive")
_PROTOCOLS = {
    "held_out": "The epoch was selected on classes held out of training, not on the test set.",
    "last": "The last epoch was used, without selection.",
    "paper": "The epoch was selected on the test set, as in many papers: its metrics are "
    "optimistic.",
}
_SPLITS = {"held_out": "classes held out of training", "test": "test set"}


def push(embedder: Embedder, repo_id: str, license: str | None, private: bool) -> str:
    """Upload an embedder and its card in one commit; return the address of the repository."""
    if get_token() is None:
        raise UsageError(f"no hub token for a push to {repo_id}. {_LOGIN}")
    api = HfApi(library_name="proximetry", library_version=__version__)
    with TemporaryDirectory() as temporary, _translate_errors(repo_id):
        folder = embedder.save(temporary)
        card = make_card(embedder, repo_id, license).encode()
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        before = api.model_info(repo_id)
        files = {path.name: path for path in folder.iterdir()}
        others = {file.rfilename for file in before.siblings or ()} - files.keys()
        changes: list[Any] = [CommitOperationAdd("README.md", card)]
        changes += [CommitOperationAdd(name, str(path)) for name, path in files.items()]
        changes += [CommitOperationDelete(n) for n in sorted(others) if is_embedder_file(Path(n))]
        message, parent = "Save the embedder", before.sha  # another parent is an error
        api.create_commit(repo_id, changes, commit_message=message, parent_commit=parent)
    return str(address)


def download(repo_id: str, revision: str | None) -> Path:
    """Return a folder with the embedder of a repository, from the cache if the hub is offline."""
    with _translate_errors(repo_id):
        description = weights.download(repo_id, DESCRIPTION, revision, MAX_DESCRIPTION_BYTES)
        folder = description.parent  # snapshots/<commit>
        name, size = named_weights(read_description(folder), description)
        weights.download(repo_id, name, folder.name, min(size, _MAX_WEIGHTS_BYTES))
    return folder


@contextmanager
def _translate_errors(repo_id: str) -> Iterator[None]:
    """Check the name of a repository; turn errors of the hub's client into short messages."""
    if not isinstance(repo_id, str) or not _NAME.fullmatch(repo_id):
        raise UsageError(f"repo_id must be owner/name, got {format_value(repo_id)}")
    try:
        yield
    except HfHubHTTPError as error:
        reason = shorten(" ".join(str(error).split()), 300)
        raise UsageError(f"the hub rejected {repo_id}: {reason}. {_LOGIN}") from error
    except (OSError, ValueError):  # raised by this package, or by the client for the model card
        raise
    except Exception as error:  # network error
        raise ConnectionError(f"{weights.offline_reason()} for {repo_id}: {error}") from error


def make_card(embedder: Embedder, repo_id: str, license: str | None) -> str:
    """Return the README.md of the embedder's repository."""
    network, pixels = embedder.architecture, embedder.preprocessing
    recipe, metrics = embedder.recipe, embedder.metrics or {}
    name = _recipe(recipe, "data", "dataset")
    dataset = "a folder of images" if name in ("", "folder") else name
    metric_rows = list(_metric_rows(metrics))
    results = [
        EvalResult(
            task_type=TASK,
            task_name="Image retrieval",
            dataset_type=name or "folder",
            dataset_name=dataset,
            dataset_config=part or None,
            dataset_split=split or None,
            metric_type=metric,
            metric_name=metric,
            metric_value=value,
        )
        for split, part, metric, value in metric_rows
    ]
    front = ModelCardData(
        license=license,
        library_name="proximetry",
        pipeline_tag=TASK,
        tags=_TAGS,
        model_name=repo_id.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )
    measured = f"Measured on {dataset}; metrics are fractions." if metric_rows else "Not measured."
    evaluation = [("images", "metric", "value")]
    for split, part, metric, value in metric_rows:
        images = ", ".join(filter(None, (_SPLITS.get(split, split), part)))
        evaluation.append((images, metric, f"{value:.4f}"))
    training = {
        "setting": "value",
        **{key: value for key, value in network.to_json().items() if value is not False},
        "dim": embedder.dim,
        "preprocessing": pixels,
        "initial weights": embedder.weights.origin,
        "recipe": _recipe(recipe, "name"),
        "dataset": dataset if recipe else "",
        "loss": _recipe(recipe, "loss", "name"),
        "epochs": _recipe(recipe, "training", "epochs"),
        "seed": _recipe(recipe, "training", "seed"),
        "fingerprint": embedder.fingerprint(),
        "saved with": ", ".join(" ".join(pair) for pair in versions().items()),
    }
    what = "images" if embedder.takes_images else str(pixels)
    classes, bits = embedder.class_names, embedder.bits
    trained = f", trained on {format_int(len(classes))} classes" if classes else ""
    codes = f" Its signs are {bits}-bit codes for Hamming distance." if bits else ""
    return f"""---
{front.to_yaml()}
---

# {repo_id}

An embedder of {what}: {_plain_text(network.backbone)}, {embedder.dim} dimensions{trained}.

**Intended use**: retrieving {what} of the same class by {network.similarity} similarity. Evaluate \
it first on {what} that differ from its training data.{codes}

```python
from proximetry.models import Embedder

embedder = Embedder.from_hub("{repo_id}")
vectors = embedder.encode({'["one.jpg", "other.jpg"]' if embedder.takes_images else "arrays"})
```

Command line: `proximetry evaluate hub:{repo_id} FOLDER`.

## Evaluation

{measured} {_PROTOCOLS.get(str(metrics.get("protocol")), "")}

{_table(evaluation)}

## Training

{_table(training.items())}
"""


def _table(rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table, without the rows that end in ""; the first is the header."""
    lines = [f"| {' | '.join(map(_plain_text, row))} |" for row in rows if row[-1] != ""]
    return "\n".join([lines[0], "|---" * (lines[0].count("|") - 1) + "|", *lines[1:]])


def _metric_rows(
    metrics: Mapping[str, Any], split: str = "", part: str = ""
) -> Iterator[tuple[str, str, str, float]]:
    """Yield split, part of the split, name and value of every metric."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            deeper = f"{part} {name}".strip() if split else ""
            yield from _metric_rows(value, split or str(name), deeper)
        elif name in _COUNTS or isinstance(value, bool):
            continue
        elif isinstance(value, Real) and isfinite(value):
            yield split, part, str(name), float(value)


def _recipe(recipe: Any, *keys: str) -> str:
    """Return a value of the recipe as text, "" if it is missing."""
    for key in keys:
        recipe = recipe.get(key) if isinstance(recipe, Mapping) else None
    return "" if recipe is None else _plain_text(recipe)


def _plain_text(value: object) -> str:
    """Return one line of text without markup, for a table."""
    line = " ".join(str(value).split())
    return shorten("".join(c for c in line if c not in "`|<>[]\\"), 200)
