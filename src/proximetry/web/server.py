"""The server: addresses, ports and the printed URLs."""

import errno
import ipaddress
import logging
import os
import secrets
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from proximetry._util.errors import UsageError, need, shown
from proximetry.search.manifest import is_milvus, read_manifest
from proximetry.web.guard import Guard, check_token

TOKEN = "PROXIMETRY_TOKEN"
"""The environment variable for the token, which `ps` does not show to other users."""
# Connections, most of them idle; beyond, uvicorn answers 503 without asking us.
_CONNECTIONS = 1000
_SWITCH = 0.0005
_PATIENCE = 5  # seconds for what is being answered when the server ends


def serve(
    gallery: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Serve the search page of a gallery until it is interrupted.

    Args:
        gallery: its folder.
        host: a name or address of this machine. Any but those of the loopback need a token.
        port: 0 takes one that is free.
        token: access token; default: $PROXIMETRY_TOKEN, if it is set.
        report: called with what there is to say.
    """
    if is_milvus(gallery):
        raise UsageError(
            f"{gallery} is on Milvus, and the page shows galleries in folders; search it with: "
            f"proximetry search IMAGE --gallery {gallery} --model RUN"
        )
    read_manifest(Path(gallery))  # reports a wrong name before torch is imported
    uvicorn = need("uvicorn", "web", "The search page")
    need("python_multipart", "web", "The search page")
    need("fastapi", "web", "The search page")
    need("httptools", "web", "The search page")
    from PIL import Image

    from proximetry.web.app import make_app
    from proximetry.web.protocol import LimitedProtocol

    token = token or os.environ.get(TOKEN) or None
    if token is not None:
        check_token(token)
    family, address = _resolve(host, port)
    loopback = ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
    if not loopback and token is None:
        raise UsageError(
            f"others can reach {host}, so a token is needed: give --token, or set {TOKEN}, for "
            f"example to {secrets.token_urlsafe(24)}"
        )
    with _listen(family, address, host) as listening:
        app = make_app(Path(gallery))
        port = listening.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        if ipaddress.ip_address(address[0].partition("%")[0]).is_unspecified:
            name = socket.gethostname()
        url, note = f"http://{name}:{port}/", ""
        if token and sys.stdout.isatty():
            url += f"?token={token}"
        elif token:
            url += "?token=TOKEN"
            note = "TOKEN is the access token; only a terminal is shown it.\n"
        images = len(app.state.service.view.current())
        report(f"{gallery}: {images} images. The page is at\n\n  {url}\n\n{note}Ctrl-C ends it.")
        # open_image has limits of its own; the log is not for clients to fill.
        warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
        config = uvicorn.Config(
            Guard(app, token, [f"[{host}]" if ":" in host else host.lower()]),
            access_log=False,  # addresses may hold the token
            log_config=None,
            server_header=False,
            ws="none",
            http=LimitedProtocol,
            limit_concurrency=_CONNECTIONS,
            timeout_graceful_shutdown=_PATIENCE,
        )
        # A thread that has something to answer waits no longer for one that computes.
        sys.setswitchinterval(_SWITCH)
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
        report("stopped")


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"there is no address {shown(host)} to listen on") from error
    family, _, _, _, address = found[0]
    return family, address


def _listen(family: socket.AddressFamily, address: Any, host: str) -> socket.socket:
    try:
        return socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        port = address[1]
        if error.errno == errno.EADDRINUSE:
            problem = f"port {port} of {host} is in use, perhaps by another `proximetry serve`"
            raise UsageError(f"{problem}; choose another one with --port") from error
        if error.errno == errno.EACCES:
            raise UsageError(f"port {port} needs more rights; take one from 1024 up") from error
        problem = f"this machine cannot listen on {host}: {error.strerror}"
        raise UsageError(f"{problem}; choose one of its addresses with --host") from error
