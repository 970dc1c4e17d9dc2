"""Embedders on the Hugging Face Hub: a repository holds what `Embedder.save` writes, and a card.

A push is one commit, so a repository is always whole. Nothing of a repository is executed: of what
it holds, `embedder.json` and the safetensors file that this names are downloaded, and read as
those of a folder are.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_hf_file_metadata,
    get_token,
    hf_hub_download,
    hf_hub_url,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from proximetry import __version__
from proximetry._common import UsageError, readable_size, shorten, shown
from proximetry.models.card import make_card
from proximetry.models.embedder import Embedder
from proximetry.models.storage import (
    DESCRIPTION,
    LARGEST_DESCRIPTION,
    is_ours,
    named_weights,
    read_description,
)
from proximetry.models.weights import PATIENCE, reachable

PREFIX = "hub:"
"""What stands before owner/name where a folder may be named too."""
# The largest networks of timm have 8 GB.
_LARGEST_WEIGHTS = 16_000_000_000
_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_LOGIN = "log in with `hf auth login` or set HF_TOKEN"


def load_embedder(place: Path, device: str | torch.device) -> Embedder:
    """Read an embedder, given its folder, that of its run, or hub:owner/name[@revision]."""
    word = place.as_posix()
    if not word.startswith(PREFIX):
        return Embedder.load(place, device)
    repo_id, _, revision = word.removeprefix(PREFIX).partition("@")
    return Embedder.from_hub(repo_id, revision or None, device)


def push(embedder: Embedder, repo_id: str, license: str | None, private: bool) -> str:
    """Write an embedder and its card to a repository in one commit; return its address."""
    _check_name(repo_id)
    if get_token() is None:
        raise UsageError(f"a push to {repo_id} needs a token of the hub: {_LOGIN}")
    if not reachable(constants.ENDPOINT):
        raise ConnectionError(f"{_no_answer()}: nothing was pushed to {repo_id}")
    api = HfApi(library_name="proximetry", library_version=__version__)
    with TemporaryDirectory() as place, _told(repo_id, "pushed to"):
        folder = embedder.save(place)
        card = make_card(embedder, repo_id, license).encode()
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        before = api.model_info(repo_id)
        # In one commit, on top of what was there then: a repository is never half of one embedder.
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
            parent_commit=before.sha,
        )
    return str(address)


def download(repo_id: str, revision: str | None) -> Path:
    """Return a folder with the embedder of a repository, downloaded unless it is in the cache.

    Without an answer of the hub, what was downloaded before is taken.
    """
    _check_name(repo_id)
    local = not reachable(constants.ENDPOINT)
    with _told(repo_id, "downloaded", revision):
        description = _fetch(repo_id, DESCRIPTION, revision, LARGEST_DESCRIPTION, local)
        folder = description.parent  # snapshots/<commit>
        name, size = named_weights(read_description(folder), description)
        limit = min(size, _LARGEST_WEIGHTS)
        _fetch(repo_id, name, folder.name, limit, local)
    return folder


def _fetch(repo_id: str, file: str, revision: str | None, limit: int, local: bool) -> Path:
    """Download a file of at most so many bytes, unless it is in the cache."""
    if not local:
        url = hf_hub_url(repo_id, file, revision=revision)
        size = get_hf_file_metadata(url, timeout=PATIENCE).size
        if size is None or size > limit:
            told = "of unknown size" if size is None else readable_size(size)
            raise ValueError(
                f"{file} of {repo_id} is {told}, and {readable_size(limit)} at most can be right: "
                "it was not downloaded"
            )
    return Path(
        hf_hub_download(
            repo_id, file, revision=revision, etag_timeout=PATIENCE, local_files_only=local
        )
    )


def _check_name(repo_id: str) -> None:
    if not isinstance(repo_id, str) or not _NAME.fullmatch(repo_id):
        raise UsageError(f"a repository of the hub is called owner/name, got {shown(repo_id)}")


def _no_answer() -> str:
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so the hub is not asked"
    return f"the hub at {constants.ENDPOINT} cannot be reached"


@contextmanager
def _told(repo_id: str, what: str, revision: str | None = None) -> Iterator[None]:
    """Say in a sentence what the hub or its client has against a repository."""
    try:
        yield
    except (GatedRepoError, RepositoryNotFoundError) as error:
        raise UsageError(_not_found(repo_id, error)) from error
    except RevisionNotFoundError as error:
        raise UsageError(f"{repo_id} has no revision {shown(revision)}") from error
    except LocalEntryNotFoundError as error:
        raise ConnectionError(
            f"{_no_answer()}, and {repo_id} has not been downloaded before"
        ) from error
    except EntryNotFoundError as error:
        raise UsageError(
            f"{repo_id} holds no saved embedder: {DESCRIPTION}, or the weights that it names, are "
            "missing"
        ) from error
    except HfHubHTTPError as error:
        raise UsageError(_refused(repo_id, what, error)) from error
    except (UsageError, ConnectionError):
        raise
    except Exception as error:
        # Whatever the client's transport raises (it has changed more than once); or ours, which
        # says already what is damaged.
        if type(error) is ValueError:
            raise
        raise ConnectionError(f"{repo_id} cannot be {what}: {_reason(error)}") from error


def _not_found(repo_id: str, error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return f"{repo_id} is gated: ask for access on its page, then {_LOGIN}"
    if get_token() is None:
        return f"the hub has no repository {repo_id}, or it is private: {_LOGIN}"
    return f"the hub has no repository {repo_id}, or your token may not read it"


def _refused(repo_id: str, what: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code if error.response is not None else None
    if status == 401:
        return f"the hub does not accept your token: {_LOGIN}"
    if status == 403:
        return f"your token may not do this: {repo_id} cannot be {what}"
    if status == 412:
        return f"somebody else has changed {repo_id} meanwhile; push again"
    return f"{repo_id} cannot be {what}: {_reason(error)}"


def _reason(error: BaseException) -> str:
    error = error.__cause__ or error
    return shorten(" ".join(str(error).split()) or type(error).__name__, 300)
