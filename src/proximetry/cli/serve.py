"""`proximetry serve`: a web page and an HTTP API for a gallery or a folder of images."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from proximetry.cli.output import echo, progress_bar
from proximetry.search.manifest import GALLERY, LOCK, MANIFEST


def serve(
    source: str | None = None,
    /,
    *,
    gallery: str = GALLERY,
    model: Path | None = None,
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8000,
    token: str | None = None,
    root_path: str = "",
    rate_limit: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    access_log: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
) -> None:
    """Serve a web page with image search and a map for a gallery or your images.

    Args:
        source: folder of a gallery or its address on Milvus (default: --gallery), or images to
            index first, as for `proximetry index`.
        gallery: folder of the gallery; new images are added to it.
        model: embedder of the images, as for `proximetry index`; required on Milvus.
        host: name or address to listen on; the default is reachable only from this machine.
        port: port to listen on; 0 chooses a free one.
        token: access token of page and API, or several separated by commas; required unless the
            host is a loopback address; default: the environment variable PROXIMETRY_TOKEN.
        root_path: path of the page on a reverse proxy, such as /birds.
        rate_limit: searches per minute of each token, or of each client if there is no token;
            0: no limit.
        access_log: file for one line of JSON per request; - is the standard output.
    """
    if source is not None and _holds_images(Path(source).expanduser()):
        from proximetry.search import index

        with progress_bar("indexing") as progress:
            index(source, gallery, model, progress=progress, report=echo)
        source = None
    from proximetry.search.manifest import is_milvus
    from proximetry.web import serve as run

    served: Any = source or gallery
    if is_milvus(served) and model is not None:
        from proximetry.cli.inputs import open_gallery

        served = open_gallery(served, model)
    run(
        served,
        host,
        port,
        token,
        root_path=root_path,
        rate_limit=rate_limit,
        access_log=access_log,
        report=echo,
    )


def _holds_images(path: Path) -> bool:
    """Return whether a path is neither a gallery nor an embedder."""
    if not path.exists() or (path / MANIFEST).exists() or (path / LOCK).exists():
        return False
    from proximetry.models.storage import DESCRIPTION, find_embedder  # imports torch

    return not (find_embedder(path) / DESCRIPTION).exists()
