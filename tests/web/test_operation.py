"""Running the server: metrics, access log, rate limit, reverse proxies, reloads, load."""

import http.client
import http.server
import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import httpx
import pytest

from proximetry.cli import main
from proximetry.search import Gallery
from proximetry.web import make_app, middleware, service
from proximetry.web.middleware import AccessMiddleware, RateLimit
from tests.processes import Process
from tests.search.conftest import make_embedder
from tests.web.browser import Visit, needs_chromium, ranks
from tests.web.conftest import SERVE, TOKEN, TestClient, cache_map, client_of, png, start

OTHER, THIRD = "another-token-of-16-characters", "a-third-token-of-16-characters"


@pytest.fixture(scope="module")
def operated(server, shared, tmp_path_factory):
    """A server at a path, with two tokens, a rate limit and an access log."""
    folder = tmp_path_factory.mktemp("operated")
    around = {
        "PROXIMETRY_TOKEN": f"{TOKEN},{OTHER},{THIRD}",
        "PROXIMETRY_CACHE": str(cache_map(shared, folder)),
    }
    options = ["--root-path", "/birds", "--rate-limit", 4, "--access-log", folder / "access.log"]
    process, url = start(server, folder / "log", shared.path, *options, **around)
    yield url.partition("?")[0], folder / "access.log"
    process.send(signal.SIGINT)
    assert process.ended() == 0, process.output()
    assert TOKEN not in process.output()
    assert OTHER not in process.output()


def test_rate_limit_refills_and_removes_old_clients(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limit = RateLimit(60)

    def allowed(client):
        with suppress(middleware.HTTPException):
            limit.check(client)
            return True
        return False

    assert [allowed("a") for _ in range(61)] == [True] * 60 + [False]
    with pytest.raises(middleware.HTTPException) as error:
        limit.check("a")
    assert error.value.headers == {"Retry-After": "1"}
    assert allowed("b")
    now[0] = 2.0
    assert [allowed("a") for _ in range(3)] == [True, True, False]
    monkeypatch.setattr(middleware, "_MAX_CLIENTS", 2)
    assert allowed("c")
    assert len(limit._left) == 2


def test_rate_limit_of_clients_without_token(shared):

    app = AccessMiddleware(make_app(shared.path), rate_limit=2)
    with TestClient(app, base_url="http://localhost") as client:
        statuses = [client.post("/search", data={"id": 0}).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]


def test_metrics_in_the_format_of_prometheus(shared):
    with client_of(shared.path, TOKEN) as client:
        assert client.get("/metrics").status_code == 401
        client.headers["authorization"] = f"Bearer {TOKEN}"
        client.post("/search", files={"image": ("x.png", png())})
        client.get("/items/3/image")
        client.get("/items/99")
        client.get("/nothing/at/all")
        client.get("/static/app.js")
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {}
    for line in answer.text.splitlines():
        if not line.startswith("#"):
            assert re.fullmatch(r'proximetry_[a-z_]+(\{([a-z]+="[^"]*",?)+\})? [0-9.e+-]+', line)
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    requests = "proximetry_requests_total"
    assert values[f'{requests}{{route="/search",method="POST",status="200"}}'] == 1
    assert values[f'{requests}{{route="/items/{{item}}",method="GET",status="404"}}'] == 1
    assert values[f'{requests}{{route="/items/{{item}}/image",method="GET",status="200"}}'] == 1
    assert values[f'{requests}{{route="/static",method="GET",status="200"}}'] == 1
    assert values[f'{requests}{{route="other",method="GET",status="404"}}'] == 1
    buckets = [value for name, value in values.items() if 'bucket{route="/search"' in name]
    assert buckets == sorted(buckets)
    assert buckets[-1] == values['proximetry_request_seconds_count{route="/search"}'] == 1
    assert values['proximetry_request_seconds_sum{route="/search"}'] > 0
    assert values["proximetry_gallery_images"] == len(shared)
    assert values['proximetry_reloads_total{result="ok"}'] == 0


def test_access_log_has_json_lines_without_tokens(operated):
    url, log = operated
    httpx.get(f"{url}?token={TOKEN}")
    httpx.get(f"{url}items/3?size=9", headers={"Authorization": f"Bearer {TOKEN}"})
    httpx.get(f"{url}gallery")
    os.rename(log, log.with_suffix(".1"))  # as logrotate does
    httpx.get(f"{url}healthz")
    end = time.monotonic() + 10
    while not log.exists() or "healthz" not in log.read_text():  # written after the response
        assert time.monotonic() < end
        time.sleep(0.01)
    lines = (log.with_suffix(".1").read_text() + log.read_text()).splitlines()[-4:]
    requests = [json.loads(line) for line in lines]
    seen = [(one["method"], one["path"], one["status"]) for one in requests]
    assert seen == [
        ("GET", "/", 303),
        ("GET", "/items/3", 200),
        ("GET", "/gallery", 401),
        ("GET", "/healthz", 200),
    ]
    assert all(one["client"] == "127.0.0.1" for one in requests)
    assert all(one["milliseconds"] > 0 for one in requests)
    assert requests[1]["bytes"] > 50
    assert not re.search(f"{TOKEN}|{OTHER}", "".join(lines))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--root-path", "birds"], "invalid root path"),
        (["--root-path", "/a b"], "invalid root path"),
        (["--rate-limit", "-1"], "rate-limit"),
        (["--access-log", "/nowhere/at/all.log"], "cannot write /nowhere/at/all.log"),
        (["--token", f"{TOKEN},short"], "16 to 200"),
    ],
)
def test_invalid_options_are_rejected(capsys, shared, words, message):
    assert main(["serve", str(shared.path), "--port", "0", *words]) == 2
    assert message in capsys.readouterr().err


@contextmanager
def proxy(target, prefix, strips):
    """Forward requests below a path, which the proxy removes or not."""

    class Forward(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self):
            if not self.path.startswith(prefix.rstrip("/")):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            connection = http.client.HTTPConnection(target.hostname, target.port)
            path = self.path[len(prefix.rstrip("/")) :] if strips else self.path
            connection.request(self.command, path, body, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "content-length", "date"):
                    self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = forward  # noqa: N815 (names of http.server)

        def log_message(self, *arguments):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forward)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}{prefix}"
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


@needs_chromium
@pytest.mark.parametrize("strips", [True, False])
def test_page_behind_a_proxy_with_a_path(browser, live, operated, shared, strips):
    """A proxy that removes its path needs no option, the other one --root-path."""
    target = urlsplit(live if strips else operated[0])
    prefix = "/a/b/" if strips else "/birds/"
    with proxy(target, prefix, strips) as url:
        visit = Visit(browser, f"{url}?token={TOKEN if strips else THIRD}")
        page = visit.page
        assert page.url.rstrip("#search") == url
        page.evaluate("location.hash = 'item/0'")
        assert len(ranks(page)) == len(shared) - 1
        page.locator("#grid .card").first.click()
        page.wait_for_selector("#viewer[open]")
        (cookie,) = visit.context.cookies()
        assert cookie["path"] == ("/" if strips else "/birds/")
        if not strips:
            bare = httpx.get(url.rstrip("/"), headers={"Authorization": f"Bearer {TOKEN}"})
            assert (bare.status_code, bare.headers["location"]) == (308, "/birds/")
            direct = operated[0].replace("/birds", "")
            assert httpx.get(f"{direct}gallery").status_code == 404
        visit.end()


def test_requests_get_503_while_the_gallery_loads(shared, monkeypatch):

    release, warm_up = threading.Event(), service._warm_up

    def slow(gallery):
        assert release.wait(30)
        warm_up(gallery)

    monkeypatch.setattr(service, "_warm_up", slow)
    app = make_app(shared.path, wait=False)

    with TestClient(AccessMiddleware(app), base_url="http://localhost") as client:
        answer = client.get("/gallery")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert re.fullmatch(r"loading the gallery, \d+ s", answer.json()["detail"])
        assert client.get("/healthz").status_code == 503
        assert client.get("/").status_code == client.get("/static/app.js").status_code == 200
        release.set()
        app.state.service.loading.result()
        assert client.get("/gallery").json()["images"] == len(shared)


def test_server_stops_if_the_gallery_cannot_be_loaded(server, editable, tmp_path):
    (weights,) = (editable.path / "embedder").glob("*.safetensors")
    weights.write_bytes(b"damaged")
    process = Process(server, tmp_path / "log", SERVE, editable.path, "--port", 0)
    assert process.ended() != 0
    assert weights.name in process.output()
    assert "Traceback" not in process.output()


def test_rebuilt_gallery_is_loaded_while_the_old_one_is_served(editable, monkeypatch):

    with client_of(editable.path) as client:
        before = len(editable)
        release, warm_up = threading.Event(), service._warm_up

        def slow(gallery):
            assert release.wait(30)
            warm_up(gallery)

        monkeypatch.setattr(client.app._app.state.service.gallery, "_prepare", slow)
        images = editable.rows(range(9))["path"]
        os.rename(editable.path, editable.path.with_name("old"))
        Gallery.build(make_embedder(seed=5), images, editable.path)
        for _ in range(5):
            answer = client.post("/search", data={"id": 0, "k": 100})
            assert len(answer.json()["results"]) == before - 1
        release.set()
        end = time.monotonic() + 30
        while client.get("/gallery").json()["images"] != 9:
            assert time.monotonic() < end
        assert len(client.post("/search", data={"id": 0, "k": 100}).json()["results"]) == 8
        assert 'reloads_total{result="ok"} 1' in client.get("/metrics").text


def test_rate_limit_of_each_token(operated):
    url, _ = operated
    for token in (TOKEN, OTHER):
        headers = {"Authorization": f"Bearer {token}"}
        statuses = []
        for _ in range(6):
            answer = httpx.post(f"{url}search", data={"id": 0}, headers=headers)
            statuses.append(answer.status_code)
        assert statuses == [200] * 4 + [429] * 2
        assert 1 <= int(answer.headers["retry-after"]) <= 15
        assert "try again in" in answer.json()["detail"]
        assert httpx.get(f"{url}gallery", headers=headers).status_code == 200  # not limited


def resident(pid):
    with open(f"/proc/{pid}/status") as file:
        return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1]) / 1000


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_searches_are_answered_under_hostile_load(server, shared, tmp_path):
    """Header floods, connections without requests and readers that stop, concurrently."""
    cache = cache_map(shared, tmp_path / "cache")
    process, url = start(server, tmp_path / "log", shared.path, PROXIMETRY_CACHE=str(cache))
    place = ("127.0.0.1", urlsplit(url).port)
    before, stop = resident(process.pid), threading.Event()

    def flood():
        while not stop.is_set():
            try:
                with socket.create_connection(place, timeout=5) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nx: ")
                    for _ in range(100):
                        connection.sendall(b"a" * 65536)
            except OSError:
                pass

    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    idle = [socket.create_connection(place) for _ in range(150)]
    for connection in idle[50:]:  # they ask for much and read nothing
        connection.sendall(request * 7)
    floods = [threading.Thread(target=flood) for _ in range(4)]
    for thread in floods:
        thread.start()
    slowest = 0.0
    for number in range(30):
        started = time.perf_counter()
        answer = httpx.post(f"{url}search", data={"id": number, "k": 5}, timeout=20)
        slowest = max(slowest, time.perf_counter() - started)
        assert answer.status_code == 200
    stop.set()
    for thread in floods:
        thread.join()
    grown = resident(process.pid) - before
    for connection in idle:
        connection.close()
    assert slowest < 5
    assert grown < 150
    process.send(signal.SIGINT)
    assert process.ended() == 0, process.output()
    assert "Traceback" not in process.output()
