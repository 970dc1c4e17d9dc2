"""Embedders on the Hugging Face Hub: a repository contains a saved embedder and a model card.

A push is one commit, so a repository is never half updated. Only `embedder.json` and the
safetensors file that it names are downloaded; no code of a repository is run.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError

from proximetry import __version__
from proximetry._util.errors import UsageError, shorten, shown
from proximetry.models import weights
from proximetry.models.card import make_card
from proximetry.models.embedder import Embedder
from proximetry.models.storage import (
    DESCRIPTION,
    LARGEST_DESCRIPTION,
    is_ours,
    named_weights,
    read_description,
)

PREFIX = "hub:"
"""Prefix of owner/name where a folder is expected."""
_LARGEST_WEIGHTS = 16_000_000_000  # bytes; the largest networks of timm have 8 GB
_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_LOGIN = "Log in with `hf auth login` or set HF_TOKEN."


def load_embedder(place: Path, device: str | torch.device) -> Embedder:
    """Load an embedder from its folder, its run's folder or hub:owner/name[@revision]."""
    name = place.as_posix()
    if not name.startswith(PREFIX):
        return Embedder.load(place, device)
    repo_id, _, revision = name.removeprefix(PREFIX).partition("@")
    return Embedder.from_hub(repo_id, revision or None, device)


def push(embedder: Embedder, repo_id: str, license: str | None, private: bool) -> str:
    """Upload an embedder and its card in one commit; return the address of the repository."""
    if get_token() is None:
        raise UsageError(f"no token of the hub for a push to {repo_id}. {_LOGIN}")
    api = HfApi(library_name="proximetry", library_version=__version__)
    with TemporaryDirectory() as temporary, _explained(repo_id):
        folder = embedder.save(temporary)
        card = make_card(embedder, repo_id, license).encode()
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        before = api.model_info(repo_id)
        files = {path.name: path for path in folder.iterdir()}
        stale = {file.rfilename for file in before.siblings or ()} - files.keys()
        api.create_commit(
            repo_id,
            [
                CommitOperationAdd("README.md", card),
                *(CommitOperationAdd(name, str(path)) for name, path in files.items()),
                *(CommitOperationDelete(name) for name in sorted(stale) if is_ours(Path(name))),
            ],
            commit_message="Save the embedder",
            parent_commit=before.sha,  # fails if another commit happened
        )
    return str(address)


def download(repo_id: str, revision: str | None) -> Path:
    """Return a folder with the embedder of a repository; uses the cache if the hub is offline."""
    with _explained(repo_id):
        description = weights.download(repo_id, DESCRIPTION, revision, LARGEST_DESCRIPTION)
        folder = description.parent  # snapshots/<commit>
        name, size = named_weights(read_description(folder), description)
        weights.download(repo_id, name, folder.name, min(size, _LARGEST_WEIGHTS))
    return folder


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Check the name of a repository; turn errors of the hub's client into short messages."""
    if not isinstance(repo_id, str) or not _NAME.fullmatch(repo_id):
        raise UsageError(f"repo_id must be owner/name, got {shown(repo_id)}")
    try:
        yield
    except HfHubHTTPError as error:
        reason = shorten(" ".join(str(error).split()), 300)
        raise UsageError(
            f"the hub rejected the request for {repo_id}: {reason}. {_LOGIN}"
        ) from error
    except (OSError, ValueError):  # messages of ours, or of the client about the model card
        raise
    except Exception as error:  # of the client's transport
        raise ConnectionError(f"{weights.offline_reason()} for {repo_id}: {error}") from error
