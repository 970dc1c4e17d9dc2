"""Weights from the hub that timm publishes on: quick to say no when it is out of reach."""

import threading
import urllib.error
import urllib.request
from pathlib import Path

import timm
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

# Seconds. Without this question first, the hub's client tries again for a minute or more.
PATIENCE = 5.0


class HubError(ValueError):
    """The hub has no such weights, or cannot be reached."""


def hub_file(name: str) -> tuple[Path, str]:
    """Return the weights file of a timm model, downloaded unless cached, and where it is from."""
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id:
        elsewhere = f" (they are at {config.url}: give the file)" if config and config.url else ""
        raise HubError(f"the hub has no weights for {name}{elsewhere}")
    repository, _, revision = config.hf_hub_id.partition("@")
    given = config.hf_hub_filename
    names = (given,) if given else ("model.safetensors", "pytorch_model.bin")
    cached = _find(repository, names, revision or None, local=True)
    if cached is None:
        if not _reachable(constants.ENDPOINT):
            raise HubError(f"the hub at {constants.ENDPOINT} cannot be reached")
        cached = _find(repository, names, revision or None, local=False)
    if cached is None:
        raise HubError(f"{repository} holds none of {', '.join(names)}")
    return cached, f"{repository}: {cached.name}"


def _find(
    repository: str, names: tuple[str, ...], revision: str | None, *, local: bool
) -> Path | None:
    for name in names:
        try:
            return Path(
                hf_hub_download(
                    repository,
                    name,
                    revision=revision,
                    etag_timeout=PATIENCE,
                    local_files_only=local,
                )
            )
        except (EntryNotFoundError, LocalEntryNotFoundError):
            continue
        except Exception as error:
            # Whatever the client's transport raises (it has changed more than once).
            reason = str(error).strip().partition("\n")[0]
            raise HubError(f"{repository} cannot be downloaded: {reason}") from error
    return None


def _reachable(address: str) -> bool:
    """Ask the address for anything at all; any HTTP answer counts."""
    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []

    def ask() -> None:
        request = urllib.request.Request(address, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE):
                answers.append(True)
        except urllib.error.HTTPError:
            answers.append(True)
        except (OSError, ValueError):
            answers.append(False)

    # In a thread, because looking up a host name obeys no timeout.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return bool(answers and answers[0])
