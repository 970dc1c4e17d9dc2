"""`MilvusClient`: a connection to Milvus, and the addresses of collections there."""

from __future__ import annotations

import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proximetry._util.errors import UsageError, suggest
from proximetry._util.formatting import format_value
from proximetry._util.imports import import_optional

TOKEN = "MILVUS_TOKEN"
CONNECT_SECONDS, CALL_SECONDS, LOAD_SECONDS = 10.0, 60.0, 3600.0
"""Time limits: to connect, of one call, and to load or index a collection."""
RETRY_SECONDS = 120.0  # for which calls are repeated while a server is away or recovers
# Status of gRPC, and codes of Milvus: not ready, unavailable; collection, partition, replica,
# channel, segment or node not available.
_TRANSIENT = {"UNAVAILABLE", "DEADLINE_EXCEEDED", 1, 2, 101, 103, 201, 202, 400, 401}
_TRANSIENT |= {500, 501, 503, 600, 601, 602, 901, 902, 903, 904, 905}
_NAME = "[A-Za-z_][A-Za-z0-9_]*"
_SERVER = re.compile(rf"milvus(s?)://([^/?\s]+)/({_NAME})")
_FILE = re.compile(rf"milvus:(?!//[^/])(?://)?(.+\.db)(?:/({_NAME}))?")
_OPTIONS = {
    "db": (_NAME, "a name"),
    "consistency": ("Strong|Session|Bounded|Eventually", "Strong, Session, Bounded or Eventually"),
    "shards": ("[1-9][0-9]{0,2}", "an integer from 1 to 999"),
    "replicas": ("[1-9][0-9]{0,2}", "an integer from 1 to 999"),
    "partition": (_NAME, "a name"),
}


@dataclass(frozen=True)
class Address:
    """The address of a collection, and how to read and write it."""

    text: str  # as written, without secrets
    uri: str  # of the server, or the file
    collection: str  # its name there
    local: bool  # whether it is a file
    db: str = ""
    consistency: str = "Strong"  # of what is read
    shards: int = 1
    replicas: int = 0  # the number that is loaded, or 1, if 0
    partition: str = ""  # all if empty

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, path: str | os.PathLike[str]) -> Address:
        """Parse an address."""
        text = os.fspath(path)
        if "@" in text.partition("://")[2].partition("/")[0]:
            raise UsageError(
                f"credentials in an address on Milvus. Set {TOKEN}=user:password instead."
            )
        place, _, query = text.partition("?")
        options: dict[str, Any] = {}
        for name, _, value in (part.partition("=") for part in query.split("&") if part):
            if name not in _OPTIONS:
                raise UsageError(
                    f"{text}: unknown option {format_value(name)}{suggest(name, _OPTIONS)}"
                )
            pattern, kind = _OPTIONS[name]
            if not re.fullmatch(pattern, value):
                raise UsageError(f"{text}: {name} must be {kind}, got {format_value(value)}")
            options[name] = int(value) if value.isdigit() else value
        if server := _SERVER.fullmatch(place):
            secure, host, collection = server.groups()
            port = "" if re.search(r":\d+$", host) else ":19530"
            return cls(text, f"http{secure}://{host}{port}", collection, local=False, **options)
        if file := _FILE.fullmatch(place):
            uri, collection = os.path.abspath(file[1]), file[2] or "gallery"
            return cls(text, uri, collection, local=True, **options)
        raise UsageError(
            f"invalid address of a gallery on Milvus: {text}. Use milvus://host:19530/collection "
            "or milvus:file.db/collection; collection names have letters, digits and _."
        )


class MilvusError(ValueError):
    """An error that Milvus reports, or a server that does not answer."""


class MilvusClient:
    """A client of Milvus that waits for a restarted server, and whose errors name the gallery."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.call_seconds, self.retry_seconds = CALL_SECONDS, RETRY_SECONDS
        self.pymilvus = import_optional("pymilvus", "milvus", "A gallery on Milvus")
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # it logs errors that it raises
        if address.local:
            import_optional("milvus_lite", None, "A gallery in a file of Milvus")
            if not Path(address.uri).parent.is_dir():
                raise UsageError(f"{address}: no folder {Path(address.uri).parent}")
        token = os.environ.get(TOKEN, "")
        try:
            self._client = self.pymilvus.MilvusClient(
                address.uri, token=token, db_name=address.db, timeout=CONNECT_SECONDS
            )
        except self.pymilvus.MilvusException as error:
            reason = f"no answer. Is Milvus running there, and is {TOKEN} correct?"
            if address.local:
                reason = "cannot be opened: another process uses it, or it is not a Milvus file"
            elif address.db:
                reason += f" Does the database {address.db} exist?"
            raise MilvusError(f"{address}: {reason}") from error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` looks for special methods
            raise AttributeError(name)

        def call(*arguments: Any, timeout: float = self.call_seconds, **options: Any) -> Any:
            end = time.monotonic() + self.retry_seconds
            while True:
                try:
                    return getattr(self._client, name)(*arguments, timeout=timeout, **options)
                except Exception as error:
                    code = getattr(error, "code", None)
                    if code is None:  # neither of Milvus nor of gRPC
                        raise
                    code = code() if callable(code) else code
                    transient = getattr(code, "name", code) in _TRANSIENT
                    if not transient or time.monotonic() > end:
                        reason = getattr(error, "message", None) or error
                        message = f"{self.address}: Milvus reports: {reason}"
                        raise MilvusError(message) from error
                time.sleep(0.5)

        return call

    def close(self) -> None:
        """Disconnect."""
        self._client.close()
