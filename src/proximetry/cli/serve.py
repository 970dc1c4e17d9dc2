"""The command that serves the search page of a gallery."""

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from proximetry.cli.output import say
from proximetry.cli.search import GALLERY


def serve(
    gallery: str = GALLERY,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8000,
    token: str | None = None,
) -> None:
    """Open a page to search a gallery by image and to look at its map.

    Args:
        gallery: folder of the gallery.
        host: name or address to listen on; by default nobody but this machine can reach the page.
        port: port to listen on; 0 takes one that is free.
        token: access token for page and API, required unless the server listens on the loopback
            only; default: the environment variable PROXIMETRY_TOKEN.
    """
    from proximetry.web import serve as run

    run(gallery, host, port, token, report=say)
