"""The command `serve`, and real servers in their own processes."""

import asyncio
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn

from proximetry.cli import main
from proximetry.web import server as serving
from tests.web.conftest import TOKEN, bomb, cache_map, png, start


@pytest.mark.parametrize(
    ("words", "token"),
    [
        (["nowhere"], "no gallery nowhere"),
        (["milvus://host:19530/birds"], "stores no embedder"),
        (["GALLERY", "--port", "PORT"], "is in use"),
        (["GALLERY", "--host", "0.0.0.0"], "PROXIMETRY_TOKEN"),
        (["GALLERY", "--host", "::"], "PROXIMETRY_TOKEN"),
        (["GALLERY", "--host", "192.0.2.7"], "PROXIMETRY_TOKEN"),
        (["GALLERY", "--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["GALLERY", "--host", "192.0.2.7", "--token", TOKEN], "192.0.2.7"),
        (["GALLERY", "--token", "short"], "16 to 200"),
        (["GALLERY", "--port", "70000"], "65535"),
    ],
)
def test_invalid_arguments_are_rejected(capsys, shared, words, token):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"GALLERY": str(shared.path), "PORT": str(taken.getsockname()[1])}
        assert main(["serve", *(values.get(word, word) for word in words)]) == 2
    assert token in capsys.readouterr().err


@pytest.mark.slow
def test_missing_packages_name_the_extra(shared):
    missing = ["uvicorn", "python_multipart", "fastapi", "httptools"]
    code = f"""
import sys
from proximetry.cli import main
for name in {missing}:
    sys.modules[name] = None
    assert main(["serve", {str(shared.path)!r}]) == 1
    del sys.modules[name]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, line in zip(missing, done.stderr.splitlines(), strict=True):
        assert f"needs {name}: install the extra 'web'" in line


def raw(address, request):
    """Send bytes without a client library; return the answer."""
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        connection.sendall(request)
        content = b""
        while block := connection.recv(65536):
            content += block
    return content


def test_server_from_start_to_ctrl_c(server, shared, tmp_path):
    # The map is still being computed.
    process, url = start(server, tmp_path / "log", shared.path, PROXIMETRY_CACHE=str(tmp_path))
    try:
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}healthz").json() == {"status": "ok"}
        answer = httpx.post(f"{url}search", files={"image": ("x.png", png())}, data={"k": 3})
        assert len(answer.json()["results"]) == 3
        assert "server" not in answer.headers
        address = urlsplit(url)
        head = f"Host: localhost:{address.port}\r\nConnection: close\r\n\r\n".encode()
        for path in (b"/../../../../etc/passwd", b"/static/../../app.py", b"//etc/passwd"):
            answer = raw(address, b"GET " + path + b" HTTP/1.1\r\n" + head)
            assert answer.startswith(b"HTTP/1.1 404"), answer
            assert b"root:" not in answer
        rebound = raw(address, b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        assert rebound.startswith(b"HTTP/1.1 421")
        # A large upload is rejected by its Content-Length.
        large = b"POST /search HTTP/1.1\r\nContent-Length: 99999999999\r\nContent-Type: "
        answer = raw(address, large + b"multipart/form-data; boundary=b\r\n" + head)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"20 MB" in answer
        assert httpx.get(f"{url}gallery").status_code == 200
    finally:
        process.send(signal.SIGINT)
        code = process.ended()
    assert code == 0, process.output()
    assert process.output().endswith("stopped\n")
    assert "Traceback" not in process.output()


@asynccontextmanager
async def run_server(app):
    config = uvicorn.Config(app, http=serving.LimitedProtocol, lifespan="off", log_config=None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[listening]))
        yield server, listening.getsockname()
        server.should_exit = True
        await running


def test_idle_connections_are_closed(monkeypatch):
    monkeypatch.setattr(serving, "SECONDS", 0.2)

    async def slow(scope, receive, send):
        await asyncio.sleep(0.5)  # longer than the limit for headers
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def talk():
        async with run_server(slow) as (_, address):
            request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
            for sent in (b"", request[:9], request, request + request + b"G"):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(sent)
                answer = await asyncio.wait_for(reader.read(), 3)  # keep-alive alone lasts 5 s
                assert answer.count(b"204 No Content") == sent.count(b"Host")
                writer.close()

    asyncio.run(talk())


def test_slow_readers_are_disconnected(monkeypatch):
    monkeypatch.setattr(serving, "SECONDS", 0.3)

    async def large(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(20_000_000)})

    async def talk():
        async with run_server(large) as (server, address):
            loop = asyncio.get_running_loop()
            request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
            for requests in (1, 2):  # the answer to a second one waits for the first
                with socket.socket() as client:
                    client.setblocking(False)
                    await loop.sock_connect(client, address)
                    await loop.sock_sendall(client, request * requests)
                    async with asyncio.timeout(10):
                        while not server.server_state.connections:
                            await asyncio.sleep(0.01)
                        while server.server_state.connections:
                            await asyncio.sleep(0.01)

    asyncio.run(talk())


@pytest.fixture(scope="module")
def token_server(server, shared, tmp_path_factory):
    """A server with a token: its process and address."""
    folder = tmp_path_factory.mktemp("token_server")
    around = {"PROXIMETRY_TOKEN": TOKEN, "PROXIMETRY_CACHE": str(cache_map(shared, folder))}
    process, url = start(server, folder / "log", shared.path, "--host", "0.0.0.0", **around)
    assert url.endswith("/?token=TOKEN")
    yield process, urlsplit(f"http://127.0.0.1:{urlsplit(url).port}")
    process.send(signal.SIGINT)
    assert process.ended() == 0, process.output()
    assert "Traceback" not in process.output()
    assert TOKEN not in process.output()


GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /search HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
FLOODS = {
    "URL": (b"GET /", b"a" * 6),
    "header line": (GET + b"x: ", b"a" * 6),
    "trailer line": (POST + b"0\r\nx: ", b"a" * 6),
    "small chunks": (POST, b"1\r\na\r\n"),
    "chunk extension": (POST + b"1;", b"a" * 6),
    "pipelined requests": (b"", GET + b"\r\n"),
    "pipelined bodies": (b"", GET + b"Content-Length: 6000\r\n\r\n" + bytes(6000)),
}


def send_until_closed(connection, block, other):
    for _ in range(8_000_000 // len(block)):
        connection.sendall(block)
        assert other.get("/healthz").status_code == 200


@pytest.mark.parametrize("name", FLOODS)
def test_floods_are_disconnected(token_server, name):
    head, unit = FLOODS[name]
    place = token_server[1].hostname, token_server[1].port
    with (
        httpx.Client(base_url=token_server[1].geturl(), timeout=10) as other,
        socket.socket() as connection,
    ):
        connection.settimeout(10)
        connection.connect(place)
        connection.sendall(head)
        with pytest.raises(ConnectionError):
            send_until_closed(connection, unit * (2**18 // len(unit)), other)
        assert other.get("/healthz").status_code == 200


def test_log_stays_empty_after_disconnects_and_bombs(token_server):
    process, address = token_server
    place, before = (address.hostname, address.port), process.output()
    bearer = {"authorization": f"Bearer {TOKEN}"}
    head = f"Host: localhost\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    form = b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 9999\r\n\r\n"
    for request in (
        b"POST /search HTTP/1.1\r\n" + head + form,
        b"POST /search HTTP/1.1\r\n" + head + form + b"--b\r\n",
        b"GET /gallery HTTP/1.1\r\n" + head + b"\r\n",
        b"GET /items/0/image HTTP/1.1\r\n" + head + b"\r\n",
    ):
        for _ in range(10):
            with socket.create_connection(place) as connection:
                connection.sendall(request)
    for size in ((10_000, 9_500), (20_000, 9_000)):  # Pillow warns about one and rejects the other
        files = {"image": ("x.png", bomb(*size))}
        answer = httpx.post(f"{address.geturl()}/search", files=files, headers=bearer)
        assert answer.status_code == 415
        assert "too large" in answer.json()["detail"]
    assert process.output() == before


@pytest.mark.parametrize("terminal", [True, False])
def test_token_is_printed_to_terminals_only(shared, monkeypatch, terminal):
    printed = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    serving.serve(shared.path, port=0, token=TOKEN, report=printed.append)
    assert (TOKEN in printed[0]) == terminal
