"""Galleries on Milvus: the same calls, for more images than one machine can store.

    milvus://host:19530/collection     a server or a cluster; milvuss:// over TLS
    milvus:file.db/collection          a file of Milvus Lite; the default collection is "gallery"

Milvus returns candidates; they are re-scored with the full vectors. The position of a row is its
id, which Milvus assigns once, so any number of processes may write.
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
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from proximetry._util.errors import UsageError, need, shown, some, spaced
from proximetry._util.files import cache_folder, writing
from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Progress
from proximetry.models import Embedder
from proximetry.models.names import LARGEST_DIM, SIMILARITIES
from proximetry.search import indexes, rows
from proximetry.search.exact import SPARE, FloatArray, Hits, Scores, exact_scores, merge_hits
from proximetry.search.gallery import Gallery, describe_index
from proximetry.search.manifest import STAGING, Manifest, Report, locked
from proximetry.search.staging import NewImages

MOST = 16_384
"""The largest number of results of a query on Milvus."""
TOKEN = "MILVUS_TOKEN"
_TIMEOUT = 10.0
_VERSION = "1"
# Prefixes of our properties of a collection.
_OURS, _COLUMN = "proximetry.", "proximetry.column."
# Fields beside the vector; other columns are in a field of JSON, under any name.
_TEXTS, _OTHERS = ("path", "label"), "columns"
_LONGEST_TEXT = 65_535
# A message may have 64 MB: this many numbers take 16 MB, and rows take some kilobytes each.
_NUMBERS, _ROWS = 1 << 22, 4096

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
                f"user in the address of a gallery on Milvus. Set {TOKEN}=user:password instead."
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
    def building(self) -> str:
        """The name of the collection while this machine builds it."""
        builder = f"{socket.gethostname()}:{self.folder}"
        return f"{self.collection}_building_{hashlib.sha256(builder.encode()).hexdigest()[:8]}"


@contextmanager
def _milvus_errors(address: Address) -> Iterator[None]:
    """Add the address to errors of Milvus."""
    exceptions = need("pymilvus.exceptions", "milvus", "A gallery on Milvus")
    try:
        yield
    except exceptions.MilvusException as error:
        raise ValueError(f"{address}: Milvus reports: {error.message}") from error


class _Client:
    """A MilvusClient whose errors name the gallery."""

    def __init__(self, address: Address) -> None:
        pymilvus = need("pymilvus", "milvus", "A gallery on Milvus")
        if address.local:
            need("milvus_lite", None, "A gallery in a file of Milvus")
            if not Path(address.uri).parent.is_dir():
                raise UsageError(f"{address}: no folder {Path(address.uri).parent}")
        self._address, token = address, os.environ.get(TOKEN, "")
        for attempt in range(2):
            try:
                self._client = pymilvus.MilvusClient(address.uri, token=token, timeout=_TIMEOUT)
                return
            except pymilvus.MilvusException as error:
                if attempt == 0:  # an idle connection may be dead, and is closed now
                    continue
                reason = f"no answer. Is Milvus running there, and is {TOKEN} correct?"
                if address.local:
                    reason = "cannot be opened: another process uses it, or it is not a Milvus file"
                raise ValueError(f"{address}: {reason}") from error

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*arguments: Any, **options: Any) -> Any:
            with _milvus_errors(self._address):
                return method(*arguments, **options)

        return call


class Index(NamedTuple):
    """An index of Milvus and its build settings."""

    kind: str
    settings: Mapping[str, int]

    @classmethod
    def choose(cls, index: str, count: int) -> Index:
        """Return the index of a factory string; "auto" of many images is Milvus's AUTOINDEX."""
        if index == "auto" and count > indexes.MOST_EXACT:
            return cls("AUTOINDEX", {})
        if index in ("auto", indexes.EXACT):
            return cls("FLAT", {})
        if match := re.fullmatch(r"HNSW(\d+)", index):
            return cls("HNSW", {"M": int(match[1]), "efConstruction": 200})
        if match := re.fullmatch(r"IVF(\d+),(?:Flat|PQ(\d+))", index):
            lists = {"nlist": int(match[1])}
            if match[2] is None:
                return cls("IVF_FLAT", lists)
            return cls("IVF_PQ", {**lists, "m": int(match[2]), "nbits": 8})
        raise UsageError(
            f"unknown index on Milvus: {shown(index)}. Use auto, Flat, HNSW32, IVF1024,Flat or "
            "IVF1024,PQ64."
        )

    def candidates(self, k: int) -> int:
        """Return the number of candidates for k results: more for coarser codes."""
        return indexes.compressed(k) if self.kind == "IVF_PQ" else k + SPARE

    def depth(self, count: int) -> dict[str, int]:
        """Return the search parameters."""
        if self.kind == "HNSW":
            return {"ef": max(indexes.DEPTH, 2 * count)}
        if "nlist" in self.settings:
            return {"nprobe": indexes.probes(self.settings["nlist"])}
        return {}

    def __str__(self) -> str:
        return indexes.EXACT if self.kind == "FLAT" else self.kind


# Milvus stores text in UTF-8, which names of files need not be. Other bytes become U+FFFF, which
# is no character, and four digits.
_NOT_UTF8 = re.compile("[\udc80-\udcff\uffff]")


def _to_utf8(text: str) -> str:
    return _NOT_UTF8.sub(lambda match: f"\uffff{ord(match[0]):04x}", text)


def _from_utf8(value: Any) -> Any:
    if isinstance(value, str) and "\uffff" in value:
        return re.sub("\uffff([0-9a-f]{4})", lambda match: chr(int(match[1], 16)), value)
    return value


_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def _quoted(text: str) -> str:
    """Quote a text for a filter expression."""
    return f'"{_to_utf8(text).translate(_ESCAPES)}"'


def _literals(value: Any) -> list[str]:
    """Return the literals that match a value: words of the command line may be numbers."""
    text = str(value)
    literals = [_quoted(text)]
    if text.lower() in ("true", "false"):
        literals.append(text.lower())
    with suppress(ValueError, OverflowError):
        number = float(text)
        if math.isfinite(number):
            literals.append(str(int(text)) if re.fullmatch(r"[+-]?\d+", text) else repr(number))
    return literals


def _condition(column: str, targets: Sequence[Any]) -> str:
    """Return the filter expression for a column to have one of these values."""
    values = [one for one in targets if one is not None]
    terms = []
    if column in _TEXTS:
        if values:
            terms.append(f"{column} in [{', '.join(_quoted(str(one)) for one in values)}]")
        if len(values) < len(targets):
            terms.append(f"{column} is null")
    else:
        field = f"{_OTHERS}[{_quoted(column)}]"
        terms += [f"{field} == {literal}" for one in values for literal in _literals(one)]
        if len(values) < len(targets):
            terms.append(f"not exists {field}")
    return f"({' or '.join(terms)})"


def _to_json(value: Any) -> Any:
    """Return a value as JSON; None for NaN and infinity."""
    if isinstance(value, bytes):
        return _to_utf8(value.decode("utf-8", "surrogateescape"))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else str(value)


class Collection:
    """A gallery on Milvus in its current state, with the methods of a `Snapshot`."""

    largest_k = MOST

    def __init__(
        self, address: Address, client: Any, name: str, properties: Mapping[str, str]
    ) -> None:
        self.address, self.client, self.name = address, client, name
        similarity: Any = properties[f"{_OURS}similarity"]
        dim = int(properties[f"{_OURS}dim"])
        if similarity not in SIMILARITIES or not 1 <= dim <= LARGEST_DIM:
            raise ValueError(f"{shown(similarity)} in {dim} dimensions")
        embedder, index = properties[f"{_OURS}embedder"], properties[f"{_OURS}index"]
        self.manifest = Manifest(embedder, similarity, dim, index)
        self.index = Index(*json.loads(properties[f"{_OURS}kind"]))
        further = sorted(key.removeprefix(_COLUMN) for key in properties if _COLUMN in key)
        self.columns = [*_TEXTS, *map(_from_utf8, further)]

    @classmethod
    def open(cls, address: Address, client: Any) -> Collection:
        """Open a complete gallery."""
        properties = client.describe_collection(address.collection).get("properties") or {}
        version = properties.get(f"{_OURS}version")
        if version is None:
            raise UsageError(f"{address} is a collection of Milvus, but not a gallery")
        if version != _VERSION:
            raise ValueError(
                f"{address} has format version {shown(version)}; this Proximetry reads version "
                f"{_VERSION}. Install the version that wrote it."
            )
        try:
            opened = cls(address, client, address.collection, properties)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the properties of {address} are damaged: {error}") from error
        client.load_collection(opened.name)
        return opened

    @classmethod
    def create(cls, address: Address, client: Any, manifest: Manifest, index: Index) -> Collection:
        """Create a gallery under a temporary name; `finish` renames it."""
        kinds = need("pymilvus", "milvus", "A gallery on Milvus").DataType
        schema = client.create_schema(auto_id=True, enable_dynamic_field=False)
        schema.add_field("id", kinds.INT64, is_primary=True)
        schema.add_field("vector", kinds.FLOAT_VECTOR, dim=manifest.dim)
        for name in _TEXTS:
            schema.add_field(name, kinds.VARCHAR, max_length=_LONGEST_TEXT, nullable=name != "path")
        schema.add_field(_OTHERS, kinds.JSON)
        params = client.prepare_index_params()
        params.add_index(
            "vector",
            index_type=index.kind,
            metric_type="IP" if manifest.similarity == "cosine" else "L2",
            params=dict(index.settings),
        )
        for name in () if address.local else _TEXTS:  # a file is small, and scanned
            params.add_index(name, index_type="INVERTED")
        properties = {
            f"{_OURS}embedder": manifest.embedder,
            f"{_OURS}similarity": manifest.similarity,
            f"{_OURS}dim": str(manifest.dim),
            f"{_OURS}index": manifest.index,
            f"{_OURS}kind": json.dumps(index),
        }
        created = cls(address, client, address.building, properties)
        client.drop_collection(created.name)  # of an interrupted build
        client.create_collection(
            created.name,
            schema=schema,
            index_params=params,
            properties=properties,
            consistency_level="Strong",
        )
        return created

    def finish(self) -> None:
        """Rename a complete gallery."""
        self.client.alter_collection_properties(self.name, {f"{_OURS}version": _VERSION})
        self.client.rename_collection(self.name, self.address.collection)

    def drop(self) -> None:
        """Remove the whole collection."""
        self.client.drop_collection(self.name)

    def _query(self, condition: str, fields: Sequence[str], **options: Any) -> Any:
        return self.client.query(self.name, filter=condition, output_fields=[*fields], **options)

    def __len__(self) -> int:
        return int(self._query("", ["count(*)"])[0]["count(*)"])

    def select(self, where: rows.Where) -> Any:
        """Return the filter expression of all conditions, each of which some image meets."""
        terms = []
        for name, value in where.items():
            targets = rows.condition_values(name, value, self.columns)
            terms.append(_condition(name, targets))
            if not self._query(terms[-1], ["id"], limit=1):
                raise UsageError(f"no image has {name} {some(map(shown, targets))}")
        return " and ".join(terms)

    def _iterate(self, field: str, allowed: str = "") -> Iterator[dict[str, Any]]:
        """Yield rows with id and this field, in the order of ids."""
        batches = self.client.query_iterator(
            self.name, batch_size=self._batch, filter=allowed, output_fields=["id", field]
        )
        with closing(batches), _milvus_errors(self.address):
            while batch := batches.next():
                yield from batch

    @property
    def _batch(self) -> int:
        """Rows with vectors per message."""
        return min(_ROWS, max(1, _NUMBERS // self.manifest.dim))

    def blocks(self) -> Iterator[tuple[IntArray, FloatArray]]:
        """Yield ids and vectors of all rows."""
        records = self._iterate("vector")
        while batch := list(islice(records, self._batch)):
            ids = np.array([row["id"] for row in batch], np.int64)
            yield ids, np.array([row["vector"] for row in batch], np.float32)

    def chosen(self, allowed: Any) -> IntArray:
        """Return the ids of the allowed rows."""
        return np.sort(np.array([row["id"] for row in self._iterate("id", allowed)], np.int64))

    def ids(self, positions: IntArray) -> IntArray:
        """Return positions, which are ids."""
        return positions

    def positions(self, ids: IntArray) -> IntArray:
        """Return the ids that are there; −1 for others."""
        known = self._get(ids, ["id"])
        return np.array([one if one in known else -1 for one in ids.tolist()], np.int64)

    def _get(self, ids: IntArray, fields: Iterable[str]) -> dict[int, dict[str, Any]]:
        """Return fields of rows by their ids, without missing rows."""
        known: dict[int, dict[str, Any]] = {}
        targets, names = np.unique(ids).tolist(), ["id", *fields]
        for part in chunks(len(targets), self._batch if "vector" in names else _ROWS):
            batch = self.client.get(self.name, ids=targets[part], output_fields=names)
            known |= {row["id"]: row for row in batch}
        return known

    def take(self, positions: IntArray, columns: Iterable[str]) -> dict[str, list[Any]]:
        """Return columns of rows, None for rows that were removed meanwhile."""
        names = list(columns)
        known = self._get(positions, {name if name in _TEXTS else _OTHERS for name in names})
        records = [known.get(one, {}) for one in positions.tolist()]
        return {
            name: [
                _from_utf8(row.get(name) if name in _TEXTS else row.get(_OTHERS, {}).get(name))
                for row in records
            ]
            for name in names
        }

    def vectors(self, positions: IntArray) -> FloatArray:
        """Return the vectors of rows, [n, dim]; zeros for rows that were removed meanwhile."""
        vectors = np.zeros((len(positions), self.manifest.dim), np.float32)
        known = self._get(positions, ["vector"])
        for row, one in enumerate(positions.tolist()):
            if one in known:
                vectors[row] = known[one]["vector"]
        return vectors

    def scores(self, queries: FloatArray, positions: IntArray) -> Scores:
        """Return the scores of each query with the rows at its positions; −inf at −1."""
        vectors = self.vectors(positions.ravel()).reshape(*positions.shape, -1)
        near = exact_scores(queries, vectors, self.manifest.similarity)
        return np.where(positions >= 0, near, -np.inf)

    def search(self, queries: FloatArray, k: int, allowed: Any) -> Hits:
        """Return the k nearest of the allowed rows: candidates of Milvus, scored in float64."""
        if k > MOST:
            raise UsageError(f"Milvus returns up to {spaced(MOST)} images per query, got k = {k}")
        count = min(self.index.candidates(k), MOST)
        parts = [Hits(np.empty((0, k), np.int64), np.empty((0, k)))]
        for part in chunks(len(queries), max(1, _NUMBERS // (count * self.manifest.dim))):
            lists = self.client.search(
                self.name,
                data=list(queries[part]),
                anns_field="vector",
                filter=allowed,
                limit=count,
                output_fields=["vector"],
                search_params={"params": self.index.depth(count)},
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
        """Return those of a table's paths that are in the gallery, and an id of each."""
        known: dict[bytes, int] = {}
        paths = rows.values(table["path"])
        for part in chunks(len(paths), 512):
            for row in self._query(_condition("path", paths[part]), ["id", "path"]):
                known[os.fsencode(_from_utf8(row["path"]))] = row["id"]
        return known

    def check_fits(self, table: Any) -> None:
        """Accept any column: it may have values of any type."""

    def insert(self, new: NewImages) -> IntArray:
        """Add rows and return their ids; removes them again on an error."""
        missing = [name for name in new.table.column_names if name not in self.columns]
        if missing:
            keys = {f"{_COLUMN}{_to_utf8(name)}": "1" for name in missing}
            self.client.alter_collection_properties(self.name, keys)
            self.columns += missing
        ids: list[int] = []
        try:
            for block in new.blocks(self.manifest):
                for part in chunks(len(block), self._batch):
                    data = _records(new.table.slice(len(ids), part.stop - part.start), block[part])
                    ids += self.client.insert(self.name, data)["ids"]
                    new.progress(len(ids), len(new.table))
        except BaseException:
            with suppress(ValueError):
                self.delete(np.array(ids, np.int64))
            raise
        return np.array(ids, np.int64)

    def delete(self, ids: IntArray) -> None:
        """Remove rows."""
        for part in chunks(len(ids), _ROWS):
            self.client.delete(self.name, ids=ids[part].tolist())


def _records(table: Any, vectors: FloatArray) -> list[dict[str, Any]]:
    """Return rows as Milvus accepts them."""
    columns = {name: list(map(_to_json, table[name].to_pylist())) for name in table.column_names}
    texts = {name: columns.pop(name) for name in _TEXTS}
    return [
        {
            "vector": vector,
            **{name: values[row] for name, values in texts.items()},
            _OTHERS: {n: values[row] for n, values in columns.items() if values[row] is not None},
        }
        for row, vector in enumerate(vectors)
    ]


class MilvusGallery(Gallery):
    """A gallery on Milvus. Created and opened by `Gallery.build` and `Gallery.open`.

    Every change is visible immediately to all, and writers do not wait for each other. Ids are
    assigned by Milvus; the embedder is not stored there.
    """

    _now: Collection

    @classmethod
    def create(
        cls, embedder: Embedder, new: NewImages, path: str | os.PathLike[str], index: str
    ) -> MilvusGallery:
        """See `Gallery.build`."""
        address = Address.parse(path)
        Index.choose(index, len(new.table))  # raises for an unknown index
        client = _Client(address)
        _check_new(address, client)
        folder, fingerprint = address.folder, embedder.fingerprint()
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, new.report):
            new.embed(embedder, fingerprint, folder, required=True)
            count = len(new.table)
            chosen = Index.choose(index, count)
            new.report(describe_index(str(chosen), count, prefix="Milvus "))
            manifest = Manifest(fingerprint, embedder.architecture.similarity, embedder.dim, index)
            collection = Collection.create(address, client, manifest, chosen)
            try:
                collection.insert(new)
                _check_new(address, client)  # another machine may have built it meanwhile
                collection.finish()
            except BaseException:
                with suppress(ValueError):
                    collection.drop()
                raise
            shutil.rmtree(folder / STAGING, ignore_errors=True)
            built = cls(folder, str(address), Collection.open(address, client))
            built._embedder, built.skipped = embedder, new.skipped
            return built

    @classmethod
    def connect(cls, path: str | os.PathLike[str]) -> MilvusGallery:
        """See `Gallery.open`."""
        address = Address.parse(path)
        client = _find(address)
        if client is None:
            raise UsageError(f"no gallery {address}. `proximetry index` builds one.")
        return cls(address.folder, str(address), Collection.open(address, client))

    def _newest(self) -> Collection:
        return Collection.open(self._now.address, self._now.client)

    def _indexes(self) -> list[str]:
        return [str(self._now.index)]

    @property
    def embedder(self) -> Embedder:
        """The embedder that built the gallery, if it was passed."""
        if self._embedder is None:
            raise UsageError(
                f"the gallery {self.name} stores no embedder. Pass the one that built it: --model "
                "RUN or Gallery.open(address, embedder); or search with vectors."
            )
        return self._embedder

    def _write(self, new: NewImages, *, renew: bool) -> IntArray:
        now = self._newest()
        self._check_same(now)
        old = np.empty(0, np.int64)
        if renew:
            paths = rows.values(new.table["path"])
            parts = chunks(len(paths), 512)
            old = np.concatenate([now.chosen(_condition("path", paths[part])) for part in parts])
        else:
            self._check_unknown(now, new.table)
        ids = now.insert(new)
        now.delete(old)
        new.discard()
        self._now = now
        return ids

    def remove(self, ids: Sequence[int] | IntArray, *, report: Report | None = None) -> None:
        """Remove images by their ids; `ids(where)` returns them."""
        self._now.delete(self._positions(self._now, ids))

    def compact(self, *, progress: Progress | None = None, report: Report | None = None) -> None:
        """Ask Milvus to reclaim the space of removed rows, which it also does on its own."""
        self._now.client.compact(self._now.name)

    def verify(self, progress: Progress | None = None) -> None:
        """Read every vector; raises ValueError for invalid ones."""
        for ids, vectors in self._now.blocks():
            squares = np.square(vectors.astype(np.float64)).sum(1)
            valid = np.isfinite(squares)
            if self.similarity == "cosine":  # zero vectors have no direction, and stay zero
                valid &= (np.abs(squares - 1) < 1e-3) | (squares == 0)
            if not valid.all():
                names = some([str(one) for one in ids[~valid]])
                raise ValueError(f"vectors in {self.name} are damaged: ids {names}")


def exists(path: str) -> bool:
    """Return whether there is a collection at an address."""
    return _find(Address.parse(path)) is not None


def _find(address: Address) -> _Client | None:
    """Connect to Milvus if the collection is there."""
    if address.local and not Path(address.uri).exists():
        return None
    client = _Client(address)
    return client if client.has_collection(address.collection) else None


def _check_new(address: Address, client: Any) -> None:
    if client.has_collection(address.collection):
        raise UsageError(
            f"{address} already exists. Add to it: Gallery.open({str(address)!r}).add(…)"
        )
