"""Hostile requests: authentication, limits, uploads, path traversal, load."""

import asyncio
import io
import os
import pickle
from concurrent.futures import Future
from threading import Event

import httpx
import pytest
import torch
from fastapi import HTTPException
from PIL import Image

from proximetry._util.errors import UsageError
from proximetry.search import Gallery
from proximetry.web import make_app, middleware
from proximetry.web.middleware import AccessMiddleware
from proximetry.web.searcher import QueryImage, _Job
from tests.web.conftest import TOKEN, bomb, client_of, png

FORM = {"content-type": "multipart/form-data; boundary=b"}


def upload(client, content, name="x.png", kind="image/png"):
    return client.post("/search", files={"image": (name, content, kind)})


def async_client(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def rejected(answer, code, token):
    assert answer.status_code == code, answer.text
    detail = answer.json()["detail"]
    assert token in detail
    assert "\n" not in detail
    assert answer.headers["x-content-type-options"] == "nosniff"
    return True


# Admission


@pytest.mark.parametrize("path", ["/", "/gallery", "/items/0/image", "/map", "/static/app.js"])
def test_dns_rebinding_is_rejected(client, path):
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "", "127.0.0.1.x"):
        rejected(client.get(path, headers={"host": host}), 421, "unknown host")
    for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"):
        assert client.get("/gallery", headers={"host": host}).status_code == 200


def test_cross_site_requests_are_rejected(client):
    for site in ("cross-site", "same-site"):
        answer = client.post("/search", data={"id": 0}, headers={"sec-fetch-site": site})
        rejected(answer, 403, "other sites")
    for origin in ("http://evil.example", "http://localhost:81", "null", "http://localhost.evil"):
        answer = client.post("/search", data={"id": 0}, headers={"origin": origin})
        rejected(answer, 403, "other sites")
    for same_origin in (
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "same-origin", "origin": "https://proxy.example"},
        {"origin": "http://localhost"},
        {},
    ):
        assert client.post("/search", data={"id": 0}, headers=same_origin).status_code == 200


@pytest.mark.parametrize(
    "path", ["/", "/gallery", "/items/0", "/items/0/image", "/map", "/nothing"]
)
def test_token_is_required_everywhere(shared, path):
    with client_of(shared.path, TOKEN) as client:
        wrong = [
            {},
            {"authorization": "Bearer wrong-horse-battery-staple"},
            {"authorization": f"Bearer {TOKEN}x"},
            {"authorization": f"Basic {TOKEN}"},
            {"authorization": "Bearer "},
            {"authorization": "Bearer \xff".encode("latin-1")},
            {"cookie": f"token={TOKEN}"},
            {"cookie": f"{client.app._cookie}={TOKEN}x"},
            {"cookie": f"{client.app._cookie}="},
        ]
        for headers in wrong:
            answer = client.get(path, headers=headers)
            rejected(answer, 401, "authentication required")
            assert answer.headers["www-authenticate"] == "Bearer"
        rejected(client.get(f"{path}?token=wrong"), 401, "authentication required")
        if path != "/":  # only the page's URL accepts it
            rejected(client.get(f"{path}?token={TOKEN}"), 401, "authentication required")
        right = client.get(path, headers={"authorization": f"Bearer {TOKEN}"})
        assert right.status_code == (404 if path == "/nothing" else 200)
        assert client.get("/healthz").json() == {"status": "ok"}


def test_cross_site_requests_with_a_token_are_rejected(shared):
    with client_of(shared.path, TOKEN) as client:
        for origin, status in (("http://localhost", 200), ("http://evil.example", 403)):
            headers = {"origin": origin, "cookie": f"{client.app._cookie}={TOKEN}"}
            answer = client.post("/search", data={"id": 0}, headers=headers)
            assert answer.status_code == status


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_cookie_is_secure_under_https(shared, scheme):
    with client_of(shared.path, TOKEN, follow_redirects=False) as client:
        cookie = client.get(f"{scheme}://localhost/?token={TOKEN}").headers["set-cookie"]
    assert ("Secure" in cookie) == (scheme == "https")


def test_websockets_are_rejected():
    async def app(scope, receive, send):
        pytest.fail("passed to the application")

    scope = {"type": "websocket", "path": "/", "headers": [(b"host", b"localhost")]}
    asyncio.run(AccessMiddleware(app)(scope, None, None))


def test_token_in_the_url_sets_a_cookie_and_redirects(shared):
    with client_of(shared.path, TOKEN, follow_redirects=False) as client:
        answer = client.get(f"/?token={TOKEN}", headers={"host": "any.example"})
        assert (answer.status_code, answer.headers["location"]) == (303, "./")
        assert answer.headers["cache-control"] == "no-store"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        headers = {"cookie": f"a=b; {cookie.split(';')[0]}"}
        assert client.get("/gallery", headers=headers).status_code == 200
        again = client.get(f"/?token={TOKEN}", headers=headers)
        assert again.status_code == 303  # the token leaves the address bar every time


@pytest.mark.parametrize(
    "token", ["short", "x" * 15, "with space in the middle", "ä" * 20, "a;" * 9]
)
def test_weak_tokens_are_rejected(token):
    with pytest.raises(UsageError, match="16 to 200"):
        AccessMiddleware(make_app, token)


# Uploads


@pytest.mark.parametrize(
    ("name", "content", "token"),
    [
        ("bomb.png", bomb(), "too large"),
        ("large.png", bomb(10_000, 5_001), "the limit is 50000000"),
        ("x.svg", b"<svg xmlns='http://www.w3.org/2000/svg'><script/></svg>", "not an image"),
        ("x.html", b"<script>alert(1)</script>", "not an image"),
        ("x.png", pickle.dumps({"a": 1}), "not an image"),
        ("x.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        ("x.png", b"", "not an image"),
        ("cut.png", png()[:200], "damaged or truncated"),
        ("../../../etc/cron.d/x", b"* * * * * root true", "not an image"),
    ],
)
def test_uploads_that_are_not_images_are_rejected(client, name, content, token):
    rejected(upload(client, content, name), 415, token)
    assert upload(client, png()).status_code == 200


def test_large_endless_and_mislabeled_uploads_are_rejected(client, monkeypatch):
    monkeypatch.setattr(middleware, "MAX_BYTES", 50_000)
    rejected(upload(client, bytes(60_000)), 413, "50 kB")
    assert upload(client, png()).status_code == 200
    head = b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n'

    def endless():
        yield head
        for _ in range(1000):
            yield bytes(10_000)

    answer = client.post("/search", content=endless(), headers=FORM)
    rejected(answer, 413, "too large")
    assert answer.headers["connection"] == "close"
    headers = {**FORM, "content-length": "10"}
    answer = client.post("/search", content=head + bytes(60_000), headers=headers)
    rejected(answer, 413, "too large")


def test_incomplete_request_times_out(shared, monkeypatch):
    monkeypatch.setattr(middleware, "_SECONDS", 0.05)
    app = AccessMiddleware(make_app(shared.path))

    async def never():
        yield b"--b\r\n"
        await asyncio.sleep(60)

    async def ask():
        async with async_client(app) as client:
            return await client.post("/search", content=never(), headers=FORM)

    rejected(asyncio.run(ask()), 408, "within")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        b"--b\r\n\r\n\r\n--b--\r\n",
        b'--b\r\nContent-Disposition: form-data; name="image"\r\n\r\nno file\r\n--b--\r\n',
        b'--b\r\nContent-Disposition: form-data; name="k"\r\n\r\n\xff\r\n--b--\r\n',
        b"".join(
            b'--b\r\nContent-Disposition: form-data; name="k"\r\n\r\n1\r\n' for _ in range(1500)
        )
        + b"--b--\r\n",
    ],
)
def test_malformed_forms_are_rejected(client, body):
    answer = client.post("/search", content=body, headers=FORM)
    assert answer.status_code in (400, 422)
    assert isinstance(answer.json()["detail"], str)


# Files


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/%2e%2e/__init__.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/items/../../etc/passwd",
        "/items/..%2f..%2fetc%2fpasswd/image",
        "/items/0/image/../../../etc/passwd",
        "/items/0%00/image",
        "/items/-1/image",
        "/items/1e3/image",
        "/items/0x1/image",
        "//etc/passwd",
        "/gallery.json",
    ],
)
def test_path_traversal_is_rejected(client, path):
    answer = client.get(path)
    assert answer.status_code in (404, 422), answer.text
    assert isinstance(answer.json()["detail"], str)
    assert "root:" not in answer.text
    assert "import" not in answer.text


def test_replaced_files_are_never_sent_raw(editable, editable_client):
    paths = [os.fsencode(path) for path in editable.rows(range(6))["path"]]
    os.unlink(paths[0])
    secret = editable.path.parent / "secret.txt"
    secret.write_text("the secret")
    for path in paths[1:3]:
        os.unlink(path)
    os.symlink(secret, paths[1])
    os.mkfifo(paths[2])
    with open(paths[3], "w") as file:
        file.write("<html><script>alert(1)</script>")
    with open(paths[4], "wb") as file:
        file.write(bomb())
    reasons = ["no such file", "not an image", "a named pipe", "not an image", "too large"]
    for item, token in enumerate(reasons):
        answer = editable_client.get(f"/items/{item}/image")
        rejected(answer, 410, token)
        assert "secret" not in answer.text
        assert str(editable.path.parent) not in answer.text
    # Trailing bytes of an image are not sent.
    with open(paths[5], "ab") as file:
        file.write(b"<script>alert(1)</script>")
    answer = editable_client.get("/items/5/image")
    assert answer.status_code == 200
    assert b"<script>" not in answer.content
    assert Image.open(io.BytesIO(answer.content)).size == (24, 24)


def test_security_headers(client):
    for path in ("/", "/static/app.js", "/gallery", "/items/0/image", "/nothing", "/openapi.json"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
    answer = client.options(
        "/search", headers={"origin": "http://evil", "access-control-request-method": "POST"}
    )
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


# Load


@pytest.mark.parametrize(
    ("limit", "value"),
    [("MAX_SEARCHES", 3), ("MAX_REQUESTS", 3), ("MAX_TOTAL_BYTES", 3 * len("id=0"))],
)
def test_overload_is_answered_503(shared, monkeypatch, limit, value):
    monkeypatch.setattr(middleware, limit, value)
    release, plain = Event(), Gallery.search

    def slow(*arguments, **options):
        release.wait(3)
        return plain(*arguments, **options)

    monkeypatch.setattr(Gallery, "search", slow)
    app = AccessMiddleware(make_app(shared.path))

    async def ask():
        async with async_client(app) as client:

            async def search():
                return await client.post("/search", data={"id": 0})

            waiting = [asyncio.create_task(search()) for _ in range(3)]
            await asyncio.sleep(0.05)
            busy = await asyncio.gather(*(search() for _ in range(20)))
            health = await client.get("/healthz")
            release.set()
            done = await asyncio.gather(*waiting)
            return busy, health, done, await search()

    busy, health, done, after = asyncio.run(ask())
    for answer in busy:
        rejected(answer, 503, "busy")
        assert answer.headers["retry-after"] == "1"
    assert health.status_code == after.status_code == 200
    assert [answer.status_code for answer in done] == [200] * 3


def test_failed_search_does_not_stop_the_server(shared, monkeypatch):
    plain, failed = Gallery.search, Event()

    def once(*arguments, **options):
        if not failed.is_set():
            failed.set()
            raise RuntimeError("a mistake of ours")
        return plain(*arguments, **options)

    monkeypatch.setattr(Gallery, "search", once)
    with client_of(shared.path, raise_server_exceptions=False) as client:
        answer = client.post("/search", data={"id": 0})
        rejected(answer, 500, "internal error")
        assert "mistake" not in answer.text
        assert client.post("/search", data={"id": 0}).status_code == 200


def test_batched_searches_equal_single_ones(shared, monkeypatch):
    sizes, plain = [], Gallery.search

    def counted(gallery, queries, k, **options):
        sizes.append(len(queries))
        return plain(gallery, queries, k, **options)

    monkeypatch.setattr(Gallery, "search", counted)
    app = AccessMiddleware(make_app(shared.path))

    async def ask():
        async with async_client(app) as client:

            async def search(number):
                if number % 3:
                    data = {"id": number, "k": 4 + number % 2}
                    return await client.post("/search", data=data)
                content = png((number * 6, 90, 90))
                files = {"image": ("x.png", content)}
                return await client.post("/search", files=files, data={"k": 5})

            alone = [await search(number) for number in range(36)]
            sizes.clear()
            return alone, await asyncio.gather(*(search(number) for number in range(36)))

    alone, together = asyncio.run(ask())
    assert max(sizes) > 1
    for one, other in zip(alone, together, strict=True):
        assert one.status_code == other.status_code == 200
        near = [[(m["id"]) for m in answer.json()["results"]] for answer in (one, other)]
        assert near[0] == near[1]


def test_cancelled_search(shared):
    app = make_app(shared.path)
    queue = app.state.service.searcher

    async def leave():
        task = asyncio.create_task(queue.search([QueryImage(item=0)], 3, {}))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await queue.search([QueryImage(item=1)], 3, {})

    assert len(asyncio.run(leave()).results) == 3
    app.state.service.close()
    assert not queue.alive


def test_failing_query_does_not_fail_its_batch(shared, monkeypatch, caplog):
    """Such as one whose search has a bug, or whose pixels have another shape."""
    service = make_app(shared.path).state.service
    search = Gallery.search

    def fail(self, queries, k=10, *, where=None, **options):
        if where:
            raise RuntimeError("a bug")
        return search(self, queries, k, where=where, **options)

    monkeypatch.setattr(Gallery, "search", fail)
    embedder = service.gallery.current().embedder

    def job(item=None, size=24, where=None):
        if item is not None:
            return _Job(Future(), 0.0, None, [None], [item], "mean", 3, where or {})
        pixels = torch.zeros(3, size, size, dtype=torch.uint8)
        return _Job(Future(), 0.0, embedder, [pixels], [None], "mean", 3, {})

    jobs = [job(0), job(1, where={"year": 2001}), job(), job(size=25), job(999), job(2)]
    service.searcher._answer(jobs)
    errors = [type(one.future.exception()) for one in jobs]
    none = type(None)
    assert errors == [none, RuntimeError, none, none, HTTPException, none]
    assert [len(jobs[number].future.result().results) for number in (0, 2, 5)] == [3, 3, 3]
    assert caplog.text.count("a search failed") == 1
    service.close()
