"""`proximetry push`: upload an embedder to the Hugging Face Hub."""

from proximetry.cli.inputs import load_embedder
from proximetry.cli.options import EmbedderFolder, Flag
from proximetry.cli.output import echo


def push(
    embedder: EmbedderFolder, repo: str, *, license: str | None = None, private: Flag = False
) -> None:
    """Upload an embedder with a model card to the Hugging Face Hub.

    Class names, metrics and recipe are included. Commands then accept hub:owner/name as the
    embedder.

    Args:
        repo: the repository, owner/name; created if it does not exist.
        license: license of the embedder by its Hub identifier, such as apache-2.0.
        private: make a new repository private.
    """
    address = load_embedder(embedder, "cpu").push_to_hub(repo, license=license, private=private)
    echo(f"{address}: use it as hub:{repo}")
