"""`MilvusGallery`: a gallery on Milvus, for more images than fit on one machine.

    milvus://host:19530/collection     a server or a cluster; milvuss:// over TLS
    milvus:file.db/collection          a file of Milvus Lite; the default collection is "gallery"

Milvus returns candidates; they are re-scored with the full vectors. The id of an image is a hash of
its path, so any number of processes may write, and writing an image again replaces it. Positions
of rows are ids.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from proximetry._util.errors import UsageError
from proximetry._util.files import cache_folder, name_write_errors
from proximetry._util.formatting import format_int, format_value, join_first
from proximetry._util.imports import import_optional
from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Progress
from proximetry.models import Embedder
from proximetry.search import indexes, metadata
from proximetry.search.conditions import Where, parse_where
from proximetry.search.exact import SPARE, FloatArray, Hits, Scores, exact_scores, merge_hits
from proximetry.search.gallery import Gallery
from proximetry.search.manifest import STAGING, Manifest, Report, write_lock
from proximetry.search.new_images import NewImages

MAX_K = 16_384  # the largest number of results of a query on Milvus
TOKEN = "MILVUS_TOKEN"
_TIMEOUT = 10.0  # seconds
_VERSION = 2
# Properties of a collection: the gallery as JSON, and one for each column besides path and label.
_GALLERY, _COLUMN = "proximetry", "proximetry.column."
# Fields besides the vector; other columns are in a field of JSON.
_TEXTS, _OTHERS = ("path", "label"), "columns"
_MAX_TEXT = 65_535
# Per message, which may have 64 MB: numbers take 16 MB, and metadata some kilobytes per row.
_MAX_NUMBERS, _MAX_ROWS = 1 << 22, 4096

_SERVER = re.compile(r"milvus(s?)://([^/\s]+)/([A-Za-z_][A-Za-z0-9_]*)")
_FILE = re.compile(r"milvus:(?!//[^/])(?://)?(.+\.db)(?:/([A-Za-z_][A-Za-z0-9_]*))?")


@dataclass(frozen=True)
class Address:
    """The address of a collection."""

    text: str  # as written, without secrets
    uri: str  # of the server, or the file
    collection: str  # its name there
    local: bool  # whether it is a file

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
        if server := _SERVER.fullmatch(text):
            secure, host, collection = server.groups()
            port = "" if re.search(r":\d+$", host) else ":19530"
            return cls(text, f"http{secure}://{host}{port}", collection, local=False)
        if file := _FILE.fullmatch(text):
            return cls(text, os.path.abspath(file[1]), file[2] or "gallery", local=True)
        raise UsageError(
            f"invalid address of a gallery on Milvus: {text}. Use milvus://host:19530/collection "
            "or milvus:file.db/collection; collection names have letters, digits and _."
        )

    @property
    def folder(self) -> Path:
        """The local folder of staged vectors."""
        where = f"{self.uri}/{self.collection}"
        return cache_folder() / "milvus" / hashlib.sha256(where.encode()).hexdigest()[:32]

    @property
    def temporary_name(self) -> str:
        """The name of the collection while this machine builds it."""
        builder = f"{socket.gethostname()}:{self.folder}"
        return f"{self.collection}_building_{hashlib.sha256(builder.encode()).hexdigest()[:8]}"


class _Client:
    """A MilvusClient whose errors name the gallery."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._pymilvus = import_optional("pymilvus", "milvus", "A gallery on Milvus")
        if address.local:
            import_optional("milvus_lite", None, "A gallery in a file of Milvus")
            if not Path(address.uri).parent.is_dir():
                raise UsageError(f"{address}: no folder {Path(address.uri).parent}")
        try:
            token = os.environ.get(TOKEN, "")
            self._client = self._pymilvus.MilvusClient(address.uri, token=token, timeout=_TIMEOUT)
        except self._pymilvus.MilvusException as error:
            reason = f"no answer. Is Milvus running there, and is {TOKEN} correct?"
            if address.local:
                reason = "cannot be opened: another process uses it, or it is not a Milvus file"
            raise ValueError(f"{address}: {reason}") from error

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Add the address to errors of Milvus."""
        try:
            yield
        except self._pymilvus.MilvusException as error:
            raise ValueError(f"{self.address}: Milvus reports: {error.message}") from error

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            with self.errors():
                return getattr(self._client, name)(*arguments, **options)

        return call


def find(path: str | os.PathLike[str]) -> _Client | None:
    """Connect to Milvus; return None if the collection does not exist."""
    address = Address.parse(path)
    if address.local and not Path(address.uri).exists():
        return None
    client = _Client(address)
    return client if client.has_collection(address.collection) else None


def choose_index(index: str, count: int) -> tuple[str, dict[str, int]]:
    """Return Milvus's index for a factory string, and its settings.

    "auto" is AUTOINDEX for many images.
    """
    if index == "auto" and count > indexes.MAX_FLAT_ROWS:
        return "AUTOINDEX", {}
    if index in ("auto", indexes.EXACT):
        return "FLAT", {}
    if match := re.fullmatch(r"HNSW(\d+)", index):
        return "HNSW", {"M": int(match[1]), "efConstruction": 200}
    if match := re.fullmatch(r"IVF(\d+),Flat", index):
        return "IVF_FLAT", {"nlist": int(match[1])}
    if match := re.fullmatch(r"IVF(\d+),PQ(\d+)", index):
        return "IVF_PQ", {"nlist": int(match[1]), "m": int(match[2]), "nbits": 8}
    raise UsageError(
        f"unknown index on Milvus: {format_value(index)}. Use auto, Flat, HNSW32, IVF1024,Flat or "
        "IVF1024,PQ64."
    )


# Milvus stores UTF-8 text, and names of files may have other bytes, which are lone surrogates in
# Python. They are stored as the last private-use characters.
_TO_PRIVATE = {0xDC00 + byte: 0x10FF00 + byte for byte in range(0x80, 0x100)}
_FROM_PRIVATE = {private: surrogate for surrogate, private in _TO_PRIVATE.items()}
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def _store(value: Any) -> Any:
    """Return a value as Milvus stores it; None for NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return str(value).translate(_TO_PRIVATE)


def _restore(value: Any) -> Any:
    return value.translate(_FROM_PRIVATE) if isinstance(value, str) else value


def _quoted(value: Any) -> str:
    return f'"{_store(str(value)).translate(_ESCAPES)}"'


def _literals(value: Any) -> list[str]:
    """Return the literals that match a value: text of the command line may be a number."""
    literals = [_quoted(value)]
    with suppress(ValueError):
        parsed = json.loads(str(value).lower())
        if isinstance(parsed, bool | int | float):
            literals.append(json.dumps(parsed))
    return literals


def _condition(column: str, targets: Sequence[Any]) -> str:
    """Return the filter expression of a condition: a column has one of these values."""
    values = [value for value in targets if value is not None]
    if column in _TEXTS:
        terms = [f"{column} in [{', '.join(map(_quoted, values))}]"] if values else []
        missing = f"{column} is null"
    else:
        field = f"{_OTHERS}[{_quoted(column)}]"
        terms = [f"{field} == {literal}" for value in values for literal in _literals(value)]
        missing = f"not exists {field}"
    if len(values) < len(targets):
        terms.append(missing)
    return f"({' or '.join(terms)})"


def ids_of(table: Any) -> IntArray:
    """Return the ids of images: 63 bits of the hash of each path."""
    paths = table["path"].to_pylist()
    digests = [hashlib.blake2b(path, digest_size=8).digest() for path in paths]
    return np.frombuffer(b"".join(digests), "<i8") & np.int64(2**63 - 1)


class Collection:
    """The current state of a gallery on Milvus, with the methods of a `Snapshot`."""

    max_k = MAX_K
    class_share = 0.0  # unknown

    def __init__(self, client: _Client, name: str, properties: Mapping[str, str]) -> None:
        self.client, self.name = client, name
        description = json.loads(properties[_GALLERY])
        if description["version"] != _VERSION:
            raise ValueError(
                f"{client.address} has format version {format_value(description['version'])}; this "
                f"Proximetry reads version {_VERSION}. Install the version that wrote it."
            )
        self.kind, self.manifest = description["index"], Manifest(**description["manifest"])
        others = sorted(key.removeprefix(_COLUMN) for key in properties if _COLUMN in key)
        self.columns = [*_TEXTS, *map(_restore, others)]
        # Rows with vectors per message.
        self._batch = min(_MAX_ROWS, max(1, _MAX_NUMBERS // self.manifest.dim))

    @classmethod
    def open(cls, client: _Client) -> Collection:
        """Open a gallery."""
        name = client.address.collection
        properties = client.describe_collection(name).get("properties") or {}
        if _GALLERY not in properties:
            raise UsageError(f"{client.address} is not a gallery. Choose another collection.")
        opened = cls(client, name, properties)
        client.load_collection(name)
        return opened

    @classmethod
    def create(
        cls, client: _Client, manifest: Manifest, kind: str, settings: dict[str, int]
    ) -> Collection:
        """Create an empty gallery under a temporary name."""
        types = import_optional("pymilvus", "milvus", "A gallery on Milvus").DataType
        schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", types.INT64, is_primary=True)
        schema.add_field("vector", types.FLOAT_VECTOR, dim=manifest.dim)
        for name in _TEXTS:
            schema.add_field(name, types.VARCHAR, max_length=_MAX_TEXT, nullable=name != "path")
        schema.add_field(_OTHERS, types.JSON)
        metric = "IP" if manifest.similarity == "cosine" else "L2"
        params = client.prepare_index_params()
        params.add_index("vector", index_type=kind, metric_type=metric, params=settings)
        for name in () if client.address.local else _TEXTS:  # Milvus Lite scans its file
            params.add_index(name, index_type="INVERTED")
        description = {"version": _VERSION, "index": kind, "manifest": asdict(manifest)}
        name, properties = client.address.temporary_name, {_GALLERY: json.dumps(description)}
        client.drop_collection(name)  # of an interrupted build
        client.create_collection(
            name,
            schema=schema,
            index_params=params,
            properties=properties,
            consistency_level="Strong",
        )
        return cls(client, name, properties)

    def __len__(self) -> int:
        (answer,) = self.client.query(self.name, filter="", output_fields=["count(*)"])
        return int(answer["count(*)"])

    def select(self, where: Where) -> Any:
        """Return the filter expression of all conditions; raise if no image matches one of them."""
        terms = []
        for condition in parse_where(where, self.columns):
            if condition.operator != "=":
                raise UsageError(f"operator {condition.operator} is not supported on Milvus")
            terms.append(_condition(condition.column, condition.values))
            if not self.client.query(self.name, filter=terms[-1], output_fields=["id"], limit=1):
                raise UsageError(f"no image has {condition}")
        return " and ".join(terms)

    def _iterate(self, field: str, allowed: str = "") -> Iterator[list[dict[str, Any]]]:
        """Yield batches of rows with id and this field, in the order of ids."""
        batches = self.client.query_iterator(
            self.name, batch_size=self._batch, filter=allowed, output_fields=["id", field]
        )
        with closing(batches), self.client.errors():
            while batch := batches.next():
                yield batch

    def blocks(self) -> Iterator[tuple[IntArray, FloatArray]]:
        """Yield ids and vectors of all rows."""
        for batch in self._iterate("vector"):
            ids = np.array([row["id"] for row in batch], np.int64)
            yield ids, np.array([row["vector"] for row in batch], np.float32)

    def allowed_positions(self, allowed: Any) -> IntArray:
        """Return the ids of the allowed rows."""
        batches = self._iterate("id", allowed)
        return np.sort(np.array([row["id"] for batch in batches for row in batch], np.int64))

    def ids(self, positions: IntArray) -> IntArray:
        """Return positions, which are ids."""
        return positions

    def positions(self, ids: IntArray) -> IntArray:
        """Return the ids that exist; −1 for others."""
        return np.where(np.isin(ids, [*self._get(ids, [])]), ids, -1)

    def _get(self, ids: IntArray, fields: Iterable[str]) -> dict[int, dict[str, Any]]:
        """Return fields of the existing rows by id."""
        records: dict[int, dict[str, Any]] = {}
        targets, names = np.unique(ids).tolist(), ["id", *fields]
        for part in chunks(len(targets), self._batch):
            batch = self.client.get(self.name, ids=targets[part], output_fields=names)
            records |= {row["id"]: row for row in batch}
        return records

    def take(self, positions: IntArray, columns: Iterable[str]) -> dict[str, list[Any]]:
        """Return columns of rows; None for −1 and for rows removed since the search."""
        names = list(columns)
        by_id = self._get(positions, {name if name in _TEXTS else _OTHERS for name in names})
        records = [by_id.get(position, {}) for position in positions.tolist()]
        others = [row.get(_OTHERS, {}) for row in records]
        return {
            name: [_restore(row.get(name)) for row in (records if name in _TEXTS else others)]
            for name in names
        }

    def vectors(self, positions: IntArray) -> FloatArray:
        """Return the vectors of rows, [n, dim]; zeros for rows removed since the search."""
        by_id, zeros = self._get(positions, ["vector"]), {"vector": [0.0] * self.manifest.dim}
        vectors = [by_id.get(position, zeros)["vector"] for position in positions.tolist()]
        return np.array(vectors, np.float32).reshape(-1, self.manifest.dim)

    def scores(self, queries: FloatArray, positions: IntArray) -> Scores:
        """Return the scores of each query with the rows at its positions; −inf at −1."""
        vectors = self.vectors(positions.ravel()).reshape(*positions.shape, -1)
        scores = exact_scores(queries, vectors, self.manifest.similarity)
        return np.where(positions >= 0, scores, -np.inf)

    def search(self, queries: FloatArray, k: int, allowed: Any) -> Hits:
        """Return the k nearest of the allowed rows: candidates of Milvus, scored in float64."""
        if k > MAX_K:
            raise UsageError(f"k must be at most {format_int(MAX_K)} on Milvus, got {k}")
        count = min(indexes.compressed_candidates(k) if self.kind == "IVF_PQ" else k + SPARE, MAX_K)
        effort = {}
        if self.kind == "HNSW":
            effort = {"ef": max(indexes.EF_SEARCH, 2 * count)}
        elif self.kind.startswith("IVF"):
            nlist = choose_index(self.manifest.index, 0)[1]["nlist"]
            effort = {"nprobe": indexes.choose_nprobe(nlist)}
        parts = [Hits(np.empty((0, k), np.int64), np.empty((0, k)))]
        for part in chunks(len(queries), max(1, _MAX_NUMBERS // (count * self.manifest.dim))):
            lists = self.client.search(
                self.name,
                data=list(queries[part]),
                anns_field="vector",
                filter=allowed,
                limit=count,
                output_fields=["vector"],
                search_params={"params": effort},
            )
            positions = np.full((len(lists), count), -1, np.int64)
            vectors = np.zeros((*positions.shape, self.manifest.dim), np.float32)
            for row, hits in enumerate(lists):
                for rank, hit in enumerate(hits):
                    positions[row, rank], vectors[row, rank] = hit["id"], hit["entity"]["vector"]
            scores = exact_scores(queries[part], vectors, self.manifest.similarity)
            scores[positions < 0] = -np.inf
            parts.append(merge_hits([Hits(positions, scores)], k))
        positions, scores = map(np.concatenate, zip(*parts, strict=True))
        width = max(1, int((positions >= 0).sum(1).max(initial=0)))
        return Hits(positions[:, :width], scores[:, :width])

    def find_paths(self, table: Any) -> dict[bytes, int]:
        """Return the paths of a table that are in the gallery, and their ids."""
        paths, ids = table["path"].to_pylist(), self.positions(ids_of(table)).tolist()
        return {path: number for path, number in zip(paths, ids, strict=True) if number >= 0}

    def write(self, new_images: NewImages) -> IntArray:
        """Add or replace rows, and return their ids."""
        missing = [name for name in new_images.table.column_names if name not in self.columns]
        if missing:
            keys = {f"{_COLUMN}{_store(name)}": "1" for name in missing}
            self.client.alter_collection_properties(self.name, keys)
            self.columns += missing
        ids, done = ids_of(new_images.table), 0
        for block in new_images.blocks(self.manifest):
            for part in chunks(len(block), self._batch):
                vectors = block[part]
                table = new_images.table.slice(done, len(vectors))
                self.client.upsert(self.name, _records(table, vectors))
                done += len(vectors)
                new_images.progress(done, len(ids))
        return ids


def _records(table: Any, vectors: FloatArray) -> list[dict[str, Any]]:
    columns = {name: [*map(_store, metadata.values(table[name]))] for name in table.column_names}
    texts = {name: columns.pop(name) for name in _TEXTS}
    records: list[dict[str, Any]] = []
    for row, number in enumerate(ids_of(table).tolist()):
        others = {name: column[row] for name, column in columns.items() if column[row] is not None}
        record = {name: column[row] for name, column in texts.items()}
        records.append({"id": number, "vector": vectors[row], _OTHERS: others, **record})
    return records


class MilvusGallery(Gallery):
    """A gallery on Milvus, built by `Gallery.build` and opened by `Gallery.open`.

    Every change is immediately visible to all processes, and several may write. Milvus does not
    store the embedder.
    """

    _snapshot: Collection

    @classmethod
    def create(
        cls, embedder: Embedder, new_images: NewImages, path: str | os.PathLike[str], index: str
    ) -> MilvusGallery:
        """See `Gallery.build`."""
        client = _Client(Address.parse(path))
        kind, settings = choose_index(index, len(new_images.table))
        address, fingerprint = client.address, embedder.fingerprint()
        if client.has_collection(address.collection):
            raise UsageError(
                f"{address} already exists. Add to it: Gallery.open({str(address)!r}).add(…)"
            )
        folder = address.folder
        with name_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with write_lock(folder, new_images.report):
            new_images.embed(embedder, fingerprint, folder, required=True)
            manifest = Manifest(fingerprint, embedder.architecture.similarity, embedder.dim, index)
            collection = Collection.create(client, manifest, kind, settings)
            built = cls(folder, str(address), collection)
            built._embedder, built.skipped = embedder, new_images.skipped
            message = indexes.describe(built._indexes()[0], len(new_images.table), prefix="Milvus ")
            new_images.report(message)
            try:
                collection.write(new_images)
                client.rename_collection(collection.name, address.collection)
            except BaseException:
                with suppress(ValueError):
                    client.drop_collection(collection.name)
                raise
            shutil.rmtree(folder / STAGING, ignore_errors=True)
            built.refresh()
            return built

    @classmethod
    def connect(cls, path: str | os.PathLike[str]) -> MilvusGallery:
        """See `Gallery.open`."""
        client = find(path)
        if client is None:
            raise UsageError(f"no gallery {path}. Build one with `proximetry index`.")
        return cls(client.address.folder, str(client.address), Collection.open(client))

    def _read_snapshot(self) -> Collection:
        return Collection.open(self._snapshot.client)

    def _indexes(self) -> list[str]:
        return [indexes.EXACT if self._snapshot.kind == "FLAT" else self._snapshot.kind]

    @property
    def embedder(self) -> Embedder:
        """The embedder that built the gallery, if it was passed."""
        if self._embedder is None:
            raise UsageError(
                f"the gallery {self.name} stores no embedder. Pass the one that built it (--model "
                "RUN or Gallery.open(address, embedder)), or search with vectors."
            )
        return self._embedder

    def _write(self, new_images: NewImages, *, replace: bool) -> IntArray:
        collection = self._read_snapshot()
        self._check_not_rebuilt(collection)
        ids = collection.write(new_images)
        new_images.discard()
        self._snapshot = collection
        return ids

    def remove(self, ids: Sequence[int] | IntArray, *, report: Report | None = None) -> None:
        """Remove images by their ids; `ids(where)` returns them."""
        collection = self._snapshot
        positions = self._positions(collection, ids)
        for part in chunks(len(positions), _MAX_ROWS):
            collection.client.delete(collection.name, ids=positions[part].tolist())

    def compact(self, *, progress: Progress | None = None, report: Report | None = None) -> None:
        """Make Milvus reclaim the space of removed rows, which it also does automatically."""
        self._snapshot.client.compact(self._snapshot.name)

    def verify(self, progress: Progress | None = None) -> None:
        """Read every vector; raise ValueError for invalid ones."""
        for ids, vectors in self._snapshot.blocks():
            squares = np.square(vectors.astype(np.float64)).sum(1)
            valid = np.isfinite(squares)
            if self.similarity == "cosine":  # zero vectors cannot be normalized
                valid &= (np.abs(squares - 1) < 1e-3) | (squares == 0)
            if not valid.all():
                names = join_first(map(str, ids[~valid]))
                raise ValueError(f"vectors in {self.name} are damaged: ids {names}")
