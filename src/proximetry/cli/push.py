"""`proximetry push`: an embedder to the Hugging Face Hub."""

from proximetry.cli.inputs import load_embedder
from proximetry.cli.options import EmbedderFolder, Flag
from proximetry.cli.output import echo


def push(
    embedder: EmbedderFolder, repo: str, *, license: str | None = None, private: Flag = False
) -> None:
    """Upload an embedder, with a model card, to a repository of the Hugging Face Hub.

    Its class names, metrics and recipe are included. Commands that take an embedder then take
    hub:owner/name as well.

    Args:
        repo: the repository, owner/name; created if it does not exist.
        license: the license of the embedder, by the hub's name, such as apache-2.0.
        private: make a new repository private.
    """
    address = load_embedder(embedder, "cpu").push_to_hub(repo, license=license, private=private)
    echo(f"{address}: use it as hub:{repo}")
