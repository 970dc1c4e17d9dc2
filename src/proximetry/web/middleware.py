"""`AccessMiddleware`: authentication, limits, security headers, metrics and the access log."""

import asyncio
import hashlib
import hmac
import json
import logging
import math
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import parse_qs

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_value, readable_size
from proximetry.web.request_metrics import RequestMetrics

access_log = logging.getLogger("proximetry.access")

MAX_BYTES = 20_000_000  # of a request
MAX_REQUESTS, MAX_SEARCHES, MAX_TOTAL_BYTES = 256, 128, 400_000_000
"""Limits of all concurrent and waiting requests; others get 503."""
_MAX_CLIENTS = 10_000  # whose searches are counted
_SECONDS = 30.0  # to send a request
_STATIC = Path(__file__).parent / "static"
_TOKEN = re.compile("[A-Za-z0-9._~-]{16,200}")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

_CSP = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",  # the preview of an upload is a blob
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _CSP,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


def check_tokens(tokens: str) -> list[str]:
    """Return tokens separated by commas; raise UsageError for one that is short or not valid."""
    names = tokens.split(",")
    if not all(map(_TOKEN.fullmatch, names)):
        raise UsageError("the token must have 16 to 200 characters: letters, digits and . _ ~ -")
    return names


def error_response(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as JSON."""
    content = json.dumps({"detail": detail})  # escapes lone surrogates
    return Response(content, status, headers, "application/json")


class RateLimit:
    """Limits each client to a number of searches per minute, and to bursts of this number."""

    def __init__(self, per_minute: int) -> None:
        self._rate, self._capacity = per_minute / 60, per_minute
        self._left: dict[str, tuple[float, float]] = {}  # searches, and when they were counted

    def check(self, client: str) -> None:
        """Count a search; raise HTTPException 429 if the client has none left."""
        now = time.monotonic()
        left, counted = self._left.pop(client, (self._capacity, now))
        left = min(self._capacity, left + (now - counted) * self._rate)
        self._left[client] = (left - 1 if left >= 1 else left, now)  # the last one in order
        while len(self._left) > _MAX_CLIENTS:
            del self._left[next(iter(self._left))]
        if left < 1:
            seconds = math.ceil((1 - left) / self._rate)
            raise HTTPException(
                429, f"too many searches; try again in {seconds} s", {"Retry-After": str(seconds)}
            )


class AccessMiddleware:
    """Passes allowed requests to an application, and limits their number and size.

    Without a token, only loopback host names are accepted. Otherwise a web site could resolve its
    own name to this server and read the gallery in a visitor's browser (DNS rebinding).

    Args:
        app: the application.
        token: required in every request, as a bearer token or as the cookie of the page; several
            are separated by commas.
        hosts: host names to accept besides the loopback names.
        root_path: path of the application on the host, such as "/birds", with which the paths of
            all requests begin.
        rate_limit: searches per minute of each token, or of each client without one; 0: no limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None = None,
        hosts: Iterable[str] = (),
        *,
        root_path: str = "",
        rate_limit: int = 0,
    ) -> None:
        self._app = app
        self._tokens = [] if token is None else check_tokens(token)
        self._hosts = {*_LOOPBACK, *hosts}
        self._root = root_path.rstrip("/")
        self._rate = RateLimit(rate_limit) if rate_limit else None
        self._metrics = RequestMetrics()
        # Cookies are shared by all ports of a host, so names must differ.
        self._cookie = f"proximetry-{hashlib.sha256((token or '').encode()).hexdigest()[:8]}"
        self._requests = self._searches = self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers, started = Headers(scope=scope), time.perf_counter()
        scope["proximetry.metrics"] = self._metrics
        status, size = 499, 0  # until the response: the client has disconnected

        async def send_with_headers(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                response_headers = MutableHeaders(scope=message)
                response_headers.update(_HEADERS)
                response_headers.setdefault("Cache-Control", "no-store")
            size += len(message.get("body", b""))
            await send(message)

        try:
            if self._root:
                self._remove_root(scope)
            client = self._check(scope, headers)
            await self._admit(scope, headers, receive, send_with_headers, client)
        except HTTPException as error:
            response = error_response(error.status_code, error.detail, error.headers)
            is_page = scope["path"] == "/" and "text/html" in headers.get("accept", "")
            if error.status_code == 401 and is_page:
                page = (_STATIC / "sign-in.html").read_bytes()
                response = Response(page, 401, error.headers, "text/html")
            await response(scope, receive, send_with_headers)
        finally:
            seconds = time.perf_counter() - started
            self._metrics.count(_route(scope), scope["method"], status, seconds)
            if access_log.isEnabledFor(logging.INFO):
                _log(scope, status, seconds, size)

    def _remove_root(self, scope: Scope) -> None:
        """Remove the path of the application from that of the request."""
        path = scope["path"]
        if path == self._root and scope["method"] == "GET":  # relative URLs need "/"
            query = scope["query_string"].decode("latin-1")
            location = f"{self._root}/" + (f"?{query}" if query else "")
            raise HTTPException(308, "moved", {"Location": location})
        if not path.startswith(self._root + "/"):
            raise HTTPException(404, f"not found; the page is at {self._root}/")
        scope["path"] = path[len(self._root) :]
        scope["raw_path"] = None

    def _check(self, scope: Scope, headers: Headers) -> str:
        """Return the client of a request; reject or redirect it if it must not pass."""
        host = headers.get("host", "")
        name = re.sub(r":\d*$", "", host).lower()
        if not self._tokens and name not in self._hosts:
            raise HTTPException(
                421,
                f"unknown host {format_value(host)}; this server accepts "
                f"{', '.join(sorted(self._hosts))}. Start it with a token for other names.",
            )
        if scope["method"] not in ("GET", "HEAD") and not _same_origin(headers):
            raise HTTPException(403, "requests from other sites are not allowed")
        client: str = (scope.get("client") or ("unknown",))[0]
        # A health check reveals nothing, and the static files are public.
        if self._tokens and not scope["path"].startswith(("/healthz", "/static/")):
            client = self._check_token(scope, headers)
        return client

    def _check_token(self, scope: Scope, headers: Headers) -> str:
        """Return the token of a request."""
        if scope["path"] == "/" and scope["method"] == "GET":
            tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
            if token := next(filter(self._is_token, tokens), None):
                cookie = {"Location": "./", "Set-Cookie": self._make_cookie(scope, token)}
                raise HTTPException(303, "signed in", cookie)  # a proxy may have a path
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(bearer.strip()):
            if scope["path"] == "/sign-in" and scope["method"] == "POST":
                cookie = {"Set-Cookie": self._make_cookie(scope, bearer.strip())}
                raise HTTPException(200, "signed in", cookie)
            return bearer.strip()
        for pair in headers.get("cookie", "").split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self._cookie and self._is_token(value):
                return value
        raise HTTPException(
            401,
            "authentication required: open this page with ?token=TOKEN, or send the header "
            "Authorization: Bearer TOKEN",
            {"WWW-Authenticate": "Bearer"},
        )

    def _make_cookie(self, scope: Scope, token: str) -> str:
        # With SameSite=Strict, links on other sites would lead to the sign-in page.
        cookie = f"{self._cookie}={token}; Path={self._root}/; HttpOnly; SameSite=Lax"
        return cookie + ("; Secure" if scope["scheme"] == "https" else "")

    def _is_token(self, value: str) -> bool:
        return any(hmac.compare_digest(value.encode(), token.encode()) for token in self._tokens)

    async def _admit(
        self, scope: Scope, headers: Headers, receive: Receive, send: Send, client: str
    ) -> None:
        """Pass a request on, unless it is too large or there are too many."""
        searches, size = scope["path"] in ("/search", "/explain"), 0
        if scope["method"] not in ("GET", "HEAD"):
            length = headers.get("content-length", "")
            size = int(length) if length.isdigit() else MAX_BYTES
        if size > MAX_BYTES:
            raise _too_large()
        if self._rate and searches:
            self._rate.check(client)
        full = self._requests >= MAX_REQUESTS or self._bytes + size > MAX_TOTAL_BYTES
        if (full or (searches and self._searches >= MAX_SEARCHES)) and scope["path"] != "/healthz":
            raise HTTPException(503, "the server is busy; try again soon", {"Retry-After": "1"})
        self._requests += 1
        self._searches += searches
        self._bytes += size
        try:
            await self._app(scope, _limit(receive), send)
        finally:
            self._requests -= 1
            self._searches -= searches
            self._bytes -= size


def _route(scope: Scope) -> str:
    """Return the route of a request without its parameters, so that there are few."""
    route = getattr(scope.get("route"), "path", "")
    return route or ("/static" if scope["path"].startswith("/static/") else "other")


def _log(scope: Scope, status: int, seconds: float, size: int) -> None:
    """Log a request as a line of JSON, without its query, which may contain the token."""
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client": (scope.get("client") or ("unknown",))[0],
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "milliseconds": round(1000 * seconds, 1),
        "bytes": size,
    }
    access_log.info("%s", json.dumps(line))


def _limit(receive: Receive) -> Receive:
    """Limit the size and the duration of a request, whatever its headers declare."""
    loop = asyncio.get_running_loop()
    deadline, count, complete = loop.time() + _SECONDS, 0, False

    async def limited() -> Message:
        nonlocal count, complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise HTTPException(
                408, f"the request did not arrive within {_SECONDS:g} s", {"Connection": "close"}
            ) from None
        count += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if count > MAX_BYTES:
            raise _too_large({"Connection": "close"})  # the body may be endless
        return message

    return limited


def _too_large(headers: dict[str, str] | None = None) -> HTTPException:
    limit = readable_size(MAX_BYTES)
    return HTTPException(413, f"the request is too large; the limit is {limit}", headers)


def _same_origin(headers: Headers) -> bool:
    """Return whether a request comes from a page of this server or from no page.

    Browsers send Sec-Fetch-Site to HTTPS and loopback addresses only, but Origin to all.
    """
    if "sec-fetch-site" in headers:
        return headers["sec-fetch-site"] in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")
