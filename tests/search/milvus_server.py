"""A Milvus server, started like a user would: `milvus-server --data DIR`."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path


def executable():
    """Return the server's program, or None: $MILVUS_SERVER, or the one on PATH."""
    return shutil.which(os.environ.get("MILVUS_SERVER") or "milvus-server")


class MilvusServer:
    """A running server on a free port, in a process group of its own."""

    def __init__(self, home: Path):
        self.home = home
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.start()

    def address(self, name):
        return f"milvus://127.0.0.1:{self.port}/{name}"

    def start(self):
        # A short lease: a new process waits for the lease of a killed one.
        # Unlike --proxy-port, proxy.port does not fall back to another port after a restart.
        options = ["--data", self.home / "data", "--extra-config", f"proxy.port={self.port}"]
        options += ["--extra-config", "common.session.ttl=5"]
        with (self.home / "log.txt").open("a") as log:
            self._process = subprocess.Popen(
                [executable(), *map(str, options)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self):
        """Kill the server; return when its port is free."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        end = time.monotonic() + 30
        while self._listens() and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.3)

    def wait(self, seconds=60):
        """Wait until it answers; return whether it does."""
        from grpc import RpcError
        from pymilvus import MilvusClient, MilvusException

        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if self._listens():
                    client = MilvusClient(f"http://127.0.0.1:{self.port}", timeout=5)
                    client.list_collections(timeout=5)
                    return True
            except (MilvusException, RpcError):
                pass
            time.sleep(0.2)
        return False

    def log(self):
        return (self.home / "log.txt").read_text()[-500:]

    def _listens(self):
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0
