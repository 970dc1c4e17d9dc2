"""`AccessMiddleware`: authentication, limits and security headers."""

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qs

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_value, readable_size

MAX_BYTES = 20_000_000  # of a request
MAX_REQUESTS, MAX_SEARCHES, MAX_TOTAL_BYTES = 256, 128, 400_000_000
"""Limits of all concurrent and waiting requests; others get 503."""
_SECONDS = 30.0  # to send a request
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


def check_token(token: str) -> str:
    """Raise UsageError for a token that is short or not valid in a URL."""
    if not _TOKEN.fullmatch(token):
        raise UsageError("the token must have 16 to 200 characters: letters, digits and . _ ~ -")
    return token


def error_response(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as JSON."""
    content = json.dumps({"detail": detail})  # escapes lone surrogates
    return Response(content, status, headers, "application/json")


class AccessMiddleware:
    """Passes allowed requests to an application, and limits their number and size.

    Without a token, only loopback host names are accepted. Otherwise a web site could resolve its
    own name to this server and read the gallery in a visitor's browser (DNS rebinding).

    Args:
        app: the application.
        token: required in every request, as a bearer token or as the cookie of the page.
        hosts: host names to accept besides the loopback names.
    """

    def __init__(self, app: ASGIApp, token: str | None = None, hosts: Iterable[str] = ()) -> None:
        self._app = app
        self._token = None if token is None else check_token(token)
        self._hosts = {*_LOOPBACK, *hosts}
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
        headers = Headers(scope=scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                response_headers = MutableHeaders(scope=message)
                response_headers.update(_HEADERS)
                response_headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            self._check(scope, headers)
            await self._admit(scope, headers, receive, send_with_headers)
        except HTTPException as error:
            response = error_response(error.status_code, error.detail, error.headers)
            await response(scope, receive, send_with_headers)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Reject a request that is not allowed; redirect one with the token in its URL."""
        host = headers.get("host", "")
        name = re.sub(r":\d*$", "", host).lower()
        if self._token is None and name not in self._hosts:
            raise HTTPException(
                421,
                f"unknown host {format_value(host)}; this server accepts "
                f"{', '.join(sorted(self._hosts))}. Start it with a token for other names.",
            )
        if scope["method"] not in ("GET", "HEAD") and not _same_origin(headers):
            raise HTTPException(403, "requests from other sites are not allowed")
        if self._token is not None:
            self._check_token(scope, headers)

    def _check_token(self, scope: Scope, headers: Headers) -> None:
        if scope["path"] == "/healthz":  # reveals nothing about the gallery
            return
        if scope["path"] == "/" and scope["method"] == "GET":
            tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
            if any(map(self._is_token, tokens)):
                raise HTTPException(303, "signed in", self._sign_in(scope["scheme"]))
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(bearer.strip()):
            return
        for pair in headers.get("cookie", "").split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self._cookie and self._is_token(value):
                return
        raise HTTPException(
            401,
            "authentication required: open this page with ?token=TOKEN, or send the header "
            "Authorization: Bearer TOKEN",
            {"WWW-Authenticate": "Bearer"},
        )

    def _sign_in(self, scheme: str) -> dict[str, str]:
        """Return headers that set the cookie and redirect to the page without the token."""
        # With SameSite=Strict, links on other sites would lead to the error page.
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Lax"
        secure = "; Secure" if scheme == "https" else ""
        return {"Location": "./", "Set-Cookie": cookie + secure}  # a proxy may have a path

    def _is_token(self, value: str) -> bool:
        return self._token is not None and hmac.compare_digest(value.encode(), self._token.encode())

    async def _admit(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Pass a request on, unless it is too large or there are too many."""
        searches, size = scope["path"] in ("/search", "/explain"), 0
        if scope["method"] not in ("GET", "HEAD"):
            length = headers.get("content-length", "")
            size = int(length) if length.isdigit() else MAX_BYTES
        if size > MAX_BYTES:
            raise _too_large()
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
