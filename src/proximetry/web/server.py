"""The server: address, port, printed URL, and limits per connection."""

import asyncio
import errno
import ipaddress
import logging
import os
import re
import secrets
import socket
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_value, pluralize
from proximetry._util.imports import import_optional
from proximetry.search.manifest import is_milvus, read_manifest
from proximetry.web.middleware import AccessMiddleware, check_tokens
from proximetry.web.middleware import access_log as requests

if TYPE_CHECKING:
    from proximetry.search import Gallery

TOKEN = "PROXIMETRY_TOKEN"  # an environment variable, since `ps` shows options to other users
SECONDS = 30.0  # to send the headers of a request, and to read a response
MAX_HEAD_BYTES, MAX_PIPELINED = 64_000, 8
"""Limits per connection: bytes besides bodies, and waiting requests."""
_MAX_CONNECTIONS = 1000  # uvicorn answers more with 503
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+/?")
_SWITCH_INTERVAL = 0.0005
_SHUTDOWN_SECONDS = 5  # for requests that are being answered


def serve(
    gallery: "str | os.PathLike[str] | Gallery",
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    *,
    root_path: str = "",
    rate_limit: int = 0,
    access_log: str | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Serve the search page of a gallery until Ctrl-C.

    Without a token, only this machine can reach the server, and the page shows full paths.

    Args:
        gallery: folder of the gallery, or an open one, on Milvus or a GPU.
        host: name or address to listen on; all but loopback addresses require a token.
        port: 0 chooses a free one.
        token: access token, or several separated by commas; default: $PROXIMETRY_TOKEN.
        root_path: path of the page on a reverse proxy, such as "/birds".
        rate_limit: searches per minute of each token, or of each client without one; 0: no limit.
        access_log: a file for one line of JSON per request; "-": standard output.
        report: called with messages.
    """
    source = _check(gallery) if isinstance(gallery, str | os.PathLike) else gallery
    for package in ("uvicorn", "python_multipart", "fastapi", "httptools"):
        import_optional(package, "web", "The search page")
    from PIL import Image

    from proximetry.web.app import make_app

    token = token or os.environ.get(TOKEN) or None
    if token is not None:
        check_tokens(token)
    if root_path and not _ROOT_PATH.fullmatch(root_path):
        raise UsageError(f"invalid root path {format_value(root_path)}. Write it as /birds.")
    if access_log is not None:
        _open_access_log(access_log)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"unknown host {format_value(host)}") from error
    family, _, _, _, address = addresses[0]
    ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if not ip.is_loopback and token is None:
        raise UsageError(
            f"a token is required, since other machines can reach {host}. Pass --token, or set "
            f"{TOKEN}, for example to {secrets.token_urlsafe(24)}"
        )
    with _listen(family, address, host) as listening:
        app = make_app(source, full_paths=token is None, wait=False)
        loading, opened = app.state.service.loading, app.state.service.gallery.current()
        port = listening.getsockname()[1]
        name = f"[{host}]" if ":" in host else host.lower()
        host_name = socket.gethostname() if ip.is_unspecified else name
        url, note = f"http://{host_name}:{port}{root_path.rstrip('/')}/", ""
        if token and sys.stdout.isatty():
            url += f"?token={token.partition(',')[0]}"
        elif token:
            url += "?token=TOKEN"
            note = "The token is printed on terminals only.\n"
        images = pluralize(len(opened), "image")
        report(f"{opened.name}: {images}. Serving at\n\n  {url}\n\n{note}Press Ctrl-C to stop.")
        # open_image limits sizes, and clients must not flood the log.
        warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
        config = uvicorn.Config(
            AccessMiddleware(
                app,
                token,
                [name],
                root_path=root_path,
                rate_limit=rate_limit,
            ),
            access_log=False,  # URLs may contain the token
            log_config=None,
            server_header=False,
            ws="none",
            http=LimitedProtocol,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        # Keep the event loop responsive while other threads compute.
        sys.setswitchinterval(_SWITCH_INTERVAL)
        server = uvicorn.Server(config)

        def stop_on_failure(future: Future[None]) -> None:
            server.should_exit |= not future.cancelled() and future.exception() is not None

        loading.add_done_callback(stop_on_failure)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
        if loading.done() and not loading.cancelled():
            loading.result()  # raises if the gallery could not be loaded
        report("stopped")


def _open_access_log(file: str) -> None:
    handler: logging.Handler
    try:  # a watched file may be rotated
        handler = logging.StreamHandler(sys.stdout) if file == "-" else WatchedFileHandler(file)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}. Choose another file.") from error
    handler.setFormatter(logging.Formatter("%(message)s"))
    requests.handlers[:] = [handler]
    requests.setLevel(logging.INFO)
    requests.propagate = False


def _check(gallery: str | os.PathLike[str]) -> Path:
    """Return the folder of a gallery; raise if it cannot be served."""
    if is_milvus(gallery):
        raise UsageError(f"{gallery} stores no embedder. Pass the one that built it: --model RUN")
    read_manifest(Path(gallery))  # reports a missing gallery before torch is imported
    return Path(gallery)


def _listen(family: socket.AddressFamily, address: Any, host: str) -> socket.socket:
    try:
        return socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        hints = {
            errno.EADDRINUSE: f"port {address[1]} of {host} is in use. Choose another --port.",
            errno.EACCES: f"no permission for port {address[1]}. Choose one of at least 1024.",
        }
        other = f"cannot listen on {host}: {error.strerror}. Choose another --host."
        raise UsageError(hints.get(error.errno or 0, other)) from error


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on bytes and time, before a request reaches the application.

    A connection may send MAX_HEAD_BYTES of URLs, headers, chunk sizes and trailers until a response
    is complete. Bodies do not count: `AccessMiddleware` limits them, and uvicorn reads them no
    faster than the application does.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer."""
        super().connection_made(transport)
        self._unanswered = 0  # bytes
        self._timer = self.loop.call_later(SECONDS, self._time_out)

    def data_received(self, data: bytes) -> None:
        """Parse data; disconnect a client that sends too much."""
        self._unanswered += len(data)
        super().data_received(data)
        if self._unanswered > MAX_HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Start a request, unless too many are waiting for their response."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")  # uvicorn answers with 400
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """Add a part of a body; those of pipelined requests count."""
        if not self.pipeline:
            self._unanswered -= len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Reset the count and the timer."""
        super().on_response_complete()
        if not self.pipeline:
            self._unanswered = 0
        self._timer.cancel()
        self._timer = self.loop.call_later(SECONDS, self._time_out)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _time_out(self) -> None:
        """Disconnect a client that sends no request or does not read the response."""
        working = self.cycle is not None and not self.cycle.response_complete
        if self.transport.get_write_buffer_size() or not working:
            self.transport.abort()
