"""`proximetry serve`: a web page and an HTTP API for a gallery."""

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from proximetry.cli.options import GALLERY
from proximetry.cli.output import echo


def serve(
    gallery: str = GALLERY,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8000,
    token: str | None = None,
) -> None:
    """Serve a page with image search and a map of a gallery.

    Args:
        gallery: folder of the gallery.
        host: name or address to listen on; the default is reachable only from this machine.
        port: port to listen on; 0 chooses a free one.
        token: access token for page and API, required unless the host is a loopback address;
            default: the environment variable PROXIMETRY_TOKEN.
    """
    from proximetry.web import serve as run

    run(gallery, host, port, token, report=echo)
