"""Galleries on Milvus: the same calls, for more images than one machine holds.

    milvus://host:19530/collection     a server or a cluster; milvuss:// over TLS
    milvus:file.db/collection          a file of Milvus Lite; its collection "gallery" by default

Milvus proposes images; the stored vectors decide, as everywhere. The place of a row is its id,
which Milvus gives, once: so any number of processes may write.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from proximetry._util.errors import Steps, UsageError, closest, need, shown, some, spaced
from proximetry._util.files import cache_folder, writing
from proximetry._util.machine import override
from proximetry._util.tensors import chunks
from proximetry.metrics._search.inputs import IntArray
from proximetry.models import Embedder
from proximetry.models.names import LARGEST_DIM, SIMILARITIES
from proximetry.search import indexes, rows
from proximetry.search.exact import SPARE, FloatArray, Found, Part, Scores, Store
from proximetry.search.gallery import (
    EmbeddedImages,
    Gallery,
    NewImages,
    as_ids,
    describe_index,
)
from proximetry.search.manifest import STAGING, Manifest, Report, locked
from proximetry.search.snapshot import all_pairs, proposed_pairs

MOST = 16_384
"""How many images Milvus finds for a query at the most."""
TOKEN = "MILVUS_TOKEN"
_PATIENCE = 10.0
_VERSION = "1"
# What is kept in the properties of a collection begins so.
_OURS, _COLUMN = "proximetry.", "proximetry.column."
# Fields beside the vector; what else is known of an image is in one of JSON, under any name.
_TEXTS, _OTHERS = ("path", "label"), "columns"
_LONGEST_TEXT = 65_535
# A message may have 64 MB: this many numbers take 16 MB, and rows take some kilobytes each.
_NUMBERS, _ROWS = 1 << 22, 4096
# Similarities that are asked for at once.
_FOUND = 1 << 20

_SERVER = re.compile(r"milvus(s?)://([^/\s]+)/([A-Za-z_][A-Za-z0-9_]*)")
_FILE = re.compile(r"milvus:(?!//[^/])(?://)?(.+\.db)(?:/([A-Za-z_][A-Za-z0-9_]*))?")
_PORT = re.compile(r":\d+$")


@dataclass(frozen=True)
class Address:
    """Where a collection is, as it was written.

    Attributes:
        text: the address, which holds no secret.
        uri: of the server, or the file.
        collection: its name there.
        local: whether it is a file.
    """

    text: str
    uri: str
    collection: str
    local: bool

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, path: str | os.PathLike[str]) -> Address:
        """Read an address; refuses anything else."""
        text = os.fspath(path)
        if "@" in text.partition("://")[2].partition("/")[0]:
            raise UsageError(
                f"the address of a gallery on Milvus has no user in it; set {TOKEN}=user:password"
            )
        if server := _SERVER.fullmatch(text):
            secure, host, collection = server.groups()
            port = "" if _PORT.search(host) else ":19530"
            return cls(text, f"http{secure}://{host}{port}", collection, local=False)
        if file := _FILE.fullmatch(text):
            return cls(text, os.path.abspath(file[1]), file[2] or "gallery", local=True)
        raise UsageError(
            f"{text} is no address of a gallery on Milvus: write milvus://host:19530/collection or "
            "milvus:file.db/collection; a collection's name has letters, digits and _"
        )

    @property
    def folder(self) -> Path:
        """What this machine keeps for the gallery: embedded images that are not there yet."""
        where = f"{self.uri}/{self.collection}"
        return cache_folder() / "milvus" / hashlib.sha256(where.encode()).hexdigest()[:32]

    @property
    def building(self) -> str:
        """The collection that this machine builds, until it is whole and gets its name."""
        builder = f"{socket.gethostname()}:{self.folder}"
        return f"{self.collection}_building_{hashlib.sha256(builder.encode()).hexdigest()[:8]}"


@contextmanager
def _answered(address: Address) -> Iterator[None]:
    """Name the gallery in errors of Milvus, which are then not logged as well."""
    exceptions = need("pymilvus.exceptions", "milvus", "A gallery on Milvus")
    loggers = [logging.getLogger(name) for name in ("pymilvus", "milvus_lite", "grpc")]
    silent = logging.CRITICAL + 1
    with override(loggers, silent, lambda log: log.level, lambda log, level: log.setLevel(level)):
        try:
            yield
        except exceptions.MilvusException as error:
            raise MilvusError(f"{address}: Milvus says: {error.message}") from error


class MilvusError(ValueError):
    """Milvus does not answer, or cannot do what it is asked for."""


def _connect(address: Address) -> Any:
    pymilvus = need("pymilvus", "milvus", "A gallery on Milvus")
    if address.local:
        need("milvus_lite", None, "A gallery in a file of Milvus")
        if not Path(address.uri).parent.is_dir():
            raise UsageError(f"{address}: there is no folder {Path(address.uri).parent}")
    token = os.environ.get(TOKEN, "")
    for again in (True, False):
        try:
            with _answered(address):
                return pymilvus.MilvusClient(address.uri, token=token, timeout=_PATIENCE)
        except MilvusError as error:
            if again:  # a line that was idle for long may be dead, which this has ended
                continue
            if address.local:
                why = "cannot be opened: another process has it open, or it is something else"
            else:
                why = f"no answer: is Milvus running there, and is {TOKEN} right if it needs one?"
            raise MilvusError(f"{address}: {why}") from error
    raise AssertionError


class Index(NamedTuple):
    """An index of Milvus, with what it is built with."""

    kind: str
    settings: Mapping[str, int]

    @classmethod
    def choose(cls, index: str, count: int) -> Index:
        """The index that a factory string means; for many images the one Milvus chooses."""
        if index == "auto" and count > indexes.MOST_EXACT:
            return cls("AUTOINDEX", {})
        if index in ("auto", indexes.EXACT):
            return cls("FLAT", {})
        if found := re.fullmatch(r"HNSW(\d+)", index):
            return cls("HNSW", {"M": int(found[1]), "efConstruction": 200})
        if found := re.fullmatch(r"IVF(\d+),(?:Flat|PQ(\d+))", index):
            lists = {"nlist": int(found[1])}
            if found[2] is None:
                return cls("IVF_FLAT", lists)
            return cls("IVF_PQ", {**lists, "m": int(found[2]), "nbits": 8})
        raise UsageError(
            f"index {shown(index)} is none that galleries on Milvus have; write auto, Flat, "
            "HNSW32, IVF1024,Flat or IVF1024,PQ64"
        )

    @property
    def exact(self) -> bool:
        """Whether it finds the nearest images, up to rounding."""
        return self.kind == "FLAT"

    def candidates(self, k: int) -> int:
        """How many images to ask for: more where codes are coarse, or the order is in doubt."""
        wanted = k + SPARE if self.exact else indexes.compressed(k) if self.kind == "IVF_PQ" else k
        return min(wanted, MOST)

    def depth(self, count: int) -> dict[str, int]:
        """How thoroughly to search."""
        if self.kind == "HNSW":
            return {"ef": max(indexes.DEPTH, 2 * count)}
        if "nlist" in self.settings:
            return {"nprobe": indexes.probes(self.settings["nlist"])}
        return {}

    def __str__(self) -> str:
        return indexes.EXACT if self.exact else self.kind


# Milvus keeps text in UTF-8, which names of files need not be. Bytes that are not become U+FFFF,
# which is no character, and four digits.
_ODD = re.compile("[\udc80-\udcff\uffff]")
_KEPT_ODD = re.compile("\uffff([0-9a-f]{4})")


def _to_utf8(text: str) -> str:
    return _ODD.sub(lambda odd: f"\uffff{ord(odd[0]):04x}", text)


def _from_utf8(value: Any) -> Any:
    if isinstance(value, str) and "\uffff" in value:
        return _KEPT_ODD.sub(lambda odd: chr(int(odd[1], 16)), value)
    return value


_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def _quoted(text: str) -> str:
    """A text as it stands in a filter expression, in which no text can end the quotation."""
    return f'"{_to_utf8(text).translate(_ESCAPES)}"'


def _literals(value: Any) -> list[str]:
    """What a value may be in JSON: words of the command line may mean numbers."""
    text = str(value)
    found = [_quoted(text)]
    if text.lower() in ("true", "false"):
        found.append(text.lower())
    with suppress(ValueError, OverflowError):
        number = float(text)
        if math.isfinite(number):
            found.append(str(int(text)) if re.fullmatch(r"[+-]?\d+", text) else repr(number))
    return found


def _condition(column: str, wanted: Sequence[Any]) -> str:
    """The filter expression for a column to have one of these values."""
    values = [one for one in wanted if one is not None]
    terms = []
    if column in _TEXTS:
        if values:
            terms.append(f"{column} in [{', '.join(_quoted(str(one)) for one in values)}]")
        if len(values) < len(wanted):
            terms.append(f"{column} is null")
    else:
        field = f"{_OTHERS}[{_quoted(column)}]"
        terms += [f"{field} == {literal}" for one in values for literal in _literals(one)]
        if len(values) < len(wanted):
            terms.append(f"not exists {field}")
    return f"({' or '.join(terms)})"


def _kept(value: Any) -> Any:
    """A value as JSON has it; None for what it has no word for."""
    if isinstance(value, bytes):
        return _to_utf8(value.decode("utf-8", "surrogateescape"))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else str(value)


class Vectors:
    """The vectors of a collection, by id."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection

    def nearby(self, places: IntArray) -> tuple[Store, IntArray, IntArray]:
        """The vectors at places as a store, the ids of its rows, and the places in it."""
        manifest = self._collection.manifest
        ids = np.unique(places[places >= 0])
        found = self._collection.fields(ids, ["vector"])
        ids = np.array([one for one in ids.tolist() if one in found], np.int64)
        vectors = np.empty((len(ids), manifest.dim), np.float32)
        for place, one in enumerate(ids.tolist()):
            vectors[place] = found[one]["vector"]
        store = Store([vectors], np.array([0, len(ids)]), manifest.similarity, 0.0)
        if not len(ids):
            return store, ids, np.full(places.shape, -1, np.int64)
        row = np.searchsorted(ids, places).clip(max=len(ids) - 1)
        return store, ids, np.where(ids[row] == places, row, -1)

    def take(self, places: IntArray) -> FloatArray:
        """The vectors at places, [n, dim]."""
        store, _, near = self.nearby(places)
        if (near < 0).any():
            gone = some([str(one) for one in places[near < 0]])
            raise MilvusError(
                f"{self._collection.address}: removed meanwhile: {gone}; search again"
            )
        return store.take(near)

    def scores(self, queries: FloatArray, places: IntArray) -> Scores:
        """The similarity of each query to the rows at its places, [queries, n]."""
        store, ids, near = self.nearby(places)
        if not len(ids):
            return np.full(places.shape, -np.inf)
        return store.scores(queries, near)


class Collection:
    """A gallery on Milvus, always as it is there now: a `Version` without a past.

    Attributes:
        manifest: what made the vectors, and how they are compared; without segments.
        columns: the names of all columns, as they were when it was opened.
        index: the index of the vectors.
    """

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
        kind, settings = json.loads(properties[f"{_OURS}kind"])
        self.index = Index(kind, settings)
        further = sorted(key.removeprefix(_COLUMN) for key in properties if _COLUMN in key)
        self.columns = [*_TEXTS, *map(_from_utf8, further)]

    @classmethod
    def open(cls, address: Address, client: Any = None) -> Collection:
        """Open a gallery that is whole."""
        if client is None and address.local and not Path(address.uri).exists():
            raise UsageError(f"there is no gallery {address}; `proximetry index` makes one")
        client = client or _connect(address)
        with _answered(address):
            if not client.has_collection(address.collection):
                raise UsageError(f"there is no gallery {address}; `proximetry index` makes one")
            properties = client.describe_collection(address.collection).get("properties") or {}
        version = properties.get(f"{_OURS}version")
        if version is None:
            raise UsageError(f"{address} is a collection of Milvus, but not a gallery")
        if version != _VERSION:
            raise ValueError(
                f"{address} has format version {shown(version)}; this Proximetry reads version "
                f"{_VERSION}: install the one that wrote it"
            )
        try:
            found = cls(address, client, address.collection, properties)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the properties of {address} are damaged: {error}") from error
        with _answered(address):
            client.load_collection(found.name)
        return found

    @classmethod
    def create(cls, address: Address, client: Any, manifest: Manifest, index: Index) -> Collection:
        """Begin a gallery under a name of its own; `finish` gives it its name."""
        pymilvus = need("pymilvus", "milvus", "A gallery on Milvus")
        kinds = pymilvus.DataType
        schema = client.create_schema(auto_id=True, enable_dynamic_field=False)
        schema.add_field("id", kinds.INT64, is_primary=True)
        schema.add_field("vector", kinds.FLOAT_VECTOR, dim=manifest.dim)
        for name in _TEXTS:
            schema.add_field(name, kinds.VARCHAR, max_length=_LONGEST_TEXT, nullable=name != "path")
        schema.add_field(_OTHERS, kinds.JSON)
        metric = "IP" if manifest.similarity == "cosine" else "L2"
        wanted = client.prepare_index_params()
        wanted.add_index(
            "vector", index_type=index.kind, metric_type=metric, params=dict(index.settings)
        )
        for name in () if address.local else _TEXTS:  # a file is small, and looked through at once
            wanted.add_index(name, index_type="INVERTED")
        properties = {
            f"{_OURS}embedder": manifest.embedder,
            f"{_OURS}similarity": manifest.similarity,
            f"{_OURS}dim": str(manifest.dim),
            f"{_OURS}index": manifest.index,
            f"{_OURS}kind": json.dumps(index),
        }
        found = cls(address, client, address.building, properties)
        with _answered(address):
            client.drop_collection(found.name)  # what an earlier build has left behind
            client.create_collection(
                found.name,
                schema=schema,
                index_params=wanted,
                properties=properties,
                consistency_level="Strong",
            )
        return found

    def finish(self) -> None:
        """Make a gallery that is whole be there."""
        with _answered(self.address):
            self.client.alter_collection_properties(self.name, {f"{_OURS}version": _VERSION})
            self.client.rename_collection(self.name, self.address.collection)

    def drop(self) -> None:
        """Remove the whole collection."""
        with _answered(self.address):
            self.client.drop_collection(self.name)

    def __len__(self) -> int:
        with _answered(self.address):
            found = self.client.query(self.name, filter="", output_fields=["count(*)"])
        return int(found[0]["count(*)"])

    @property
    def store(self) -> Vectors:
        """The vectors."""
        return Vectors(self)

    def select(self, where: rows.Where) -> str:
        """The filter expression for all conditions, each of which some image meets."""
        terms = []
        for name, value in where.items():
            if name not in self.columns:
                raise UsageError(
                    f"the gallery has no column {shown(name)}{closest(name, self.columns)}"
                )
            wanted = rows.wanted_values(name, value)
            terms.append(_condition(name, wanted))
            with _answered(self.address):
                met = self.client.query(self.name, filter=terms[-1], limit=1, output_fields=["id"])
            if not met:
                raise UsageError(f"no image of the gallery has {name} {some(map(shown, wanted))}")
        return " and ".join(terms)

    def _all(self, field: str, allowed: str = "") -> Iterator[list[dict[str, Any]]]:
        """Id and this field of the rows that are meant, some after others, in the order of ids."""
        with _answered(self.address):
            found = self.client.query_iterator(
                self.name,
                batch_size=min(_ROWS, max(1, _NUMBERS // self.manifest.dim)),
                filter=allowed,
                output_fields=["id", field],
            )
        try:
            while True:
                with _answered(self.address):
                    batch = found.next()
                if not batch:
                    return
                yield batch
        finally:
            found.close()

    def blocks(self) -> Iterator[tuple[IntArray, FloatArray]]:
        """Ids and vectors of all rows, some after others."""
        for batch in self._all("vector"):
            ids = np.array([row["id"] for row in batch], np.int64)
            yield ids, np.array([row["vector"] for row in batch], np.float32)

    def chosen(self, allowed: str) -> IntArray:
        """The ids of the allowed rows."""
        found = [row["id"] for batch in self._all("id", allowed) for row in batch]
        return np.sort(np.array(found, np.int64))

    def ids(self, places: IntArray) -> IntArray:
        """Places are ids."""
        return places

    def places(self, ids: IntArray) -> IntArray:
        """The ids that are there; −1 for all others."""
        there = self.fields(ids, ["id"])
        return np.array([one if one in there else -1 for one in ids.tolist()], np.int64)

    def fields(self, ids: IntArray, fields: Iterable[str]) -> dict[int, dict[str, Any]]:
        """Fields of rows by their ids, less those that are not there."""
        found: dict[int, dict[str, Any]] = {}
        wanted, names = np.unique(ids).tolist(), ["id", *fields]
        size = max(1, _NUMBERS // self.manifest.dim) if "vector" in names else _ROWS
        for part in chunks(len(wanted), min(_ROWS, size)):
            with _answered(self.address):
                batch = self.client.get(self.name, ids=wanted[part], output_fields=names)
            found |= {row["id"]: row for row in batch}
        return found

    def take(self, places: IntArray, columns: Iterable[str]) -> dict[str, list[Any]]:
        """Columns of rows, None where they are gone."""
        names = list(columns)
        fields = {name if name in _TEXTS else _OTHERS for name in names}
        found = self.fields(places, fields)
        known = [found.get(one, {}) for one in places.tolist()]
        return {
            name: [
                _from_utf8(row.get(name) if name in _TEXTS else row.get(_OTHERS, {}).get(name))
                for row in known
            ]
            for name in names
        }

    def search(self, queries: FloatArray, k: int, allowed: str) -> Found:
        """The k nearest of the allowed rows, by id."""
        if k > MOST:
            raise UsageError(f"Milvus finds up to {spaced(MOST)} images for a query, got k = {k}")
        found = Found(
            np.full((len(queries), k), -1, np.int64),
            np.full((len(queries), k), -np.inf),
        )
        waiting, count = np.arange(len(queries)), self.index.candidates(k)
        while len(waiting):
            unsure = []
            for part in chunks(len(waiting), max(1, _FOUND // (count * self.manifest.dim))):
                some_of = waiting[part]
                now, sure = self._search(queries[some_of], k, count, allowed)
                found.places[some_of], found.scores[some_of] = now
                unsure.append(some_of[~sure])
            # Beyond this limit Milvus itself decides between images that are equally near.
            waiting = np.concatenate(unsure) if count < MOST else waiting[:0]
            count = min(4 * count, MOST)
        return found

    def _search(
        self, queries: FloatArray, k: int, count: int, allowed: str
    ) -> tuple[Found, npt.NDArray[np.bool_]]:
        """The k nearest of so many candidates, and whether no other row can be among them."""
        with _answered(self.address):
            hits = self.client.search(
                self.name,
                data=list(queries),
                anns_field="vector",
                filter=allowed,
                limit=count,
                output_fields=["id"],
                search_params={"params": self.index.depth(count)},
            )
        places = np.full((len(queries), count), -1, np.int64)
        least = np.full(len(queries), -np.inf)
        sign = 1 if self.manifest.similarity == "cosine" else -1
        for row, found in enumerate(hits):
            places[row, : len(found)] = [hit["id"] for hit in found]
            if len(found) == count:  # else that is all there is
                least[row] = sign * found[-1]["distance"]
        store, ids, near = self.store.nearby(places)
        if not len(ids):
            empty = np.full((len(queries), k), -1, np.int64)
            return Found(empty, np.full(empty.shape, -np.inf)), least == -np.inf
        nearest = store.settle(queries, near, k)
        named = np.where(nearest.places >= 0, ids[nearest.places], -1)
        sure = (least == -np.inf) | (not self.index.exact)
        return Found(named, nearest.scores), sure | (self._limits(queries, nearest) > least)

    def _limits(self, queries: FloatArray, found: Found) -> npt.NDArray[np.float64]:
        """What Milvus gives at least, in float32, to a row that is as near as the last one."""
        last = found.scores[:, -1]
        size = np.ones(len(queries))
        if self.manifest.similarity == "euclidean":
            lengths = np.linalg.norm(queries.astype(np.float64), axis=1)
            size = (2 * lengths + np.sqrt(-last)) ** 2
        dim = self.manifest.dim
        return np.asarray(last - 2 * (dim + 8) * 2.0**-24 * size - dim * 2.0**-140)

    def similar_pairs(self, least: float, steps: Steps) -> tuple[IntArray, Scores]:
        """All pairs that are so similar or, if the index is approximate, those that it finds."""
        if not self.index.exact:
            return proposed_pairs(self, self.blocks(), "", least, steps, MOST)
        with tempfile.TemporaryFile() as file:
            known, longest, total = [np.empty(0, np.int64)], 0.0, len(self)
            for ids, vectors in self.blocks():
                file.write(vectors.tobytes())
                known.append(ids)
                longest = max(longest, float(np.square(vectors.astype(np.float64)).sum(1).max()))
                steps("reading vectors", sum(map(len, known)), total)
            every = np.concatenate(known)
            if not len(every):
                return np.empty((0, 2), np.int64), np.empty(0)
            file.flush()
            shape = len(every), self.manifest.dim
            vectors = np.asarray(np.memmap(file, np.float32, "c", shape=shape))
            squares = None
            if self.manifest.similarity == "euclidean":
                squares = np.square(vectors.astype(np.float64)).sum(1).astype(np.float32)
            longest = math.sqrt(longest) * (1 + 1e-6)
            store = Store([vectors], np.array([0, len(every)]), self.manifest.similarity, longest)
            pairs, scores = all_pairs(store, [Part(vectors, squares, 0)], least, steps)
            return every[pairs], scores

    def paths_there(self, table: Any) -> dict[bytes, int]:
        """Those of the table's paths that are in the gallery, and an id of each."""
        there: dict[bytes, int] = {}
        paths = rows.values(table["path"])
        for part in chunks(len(paths), 512):
            with _answered(self.address):
                found = self.client.query(
                    self.name,
                    filter=_condition("path", paths[part]),
                    output_fields=["id", "path"],
                )
            there |= {os.fsencode(_from_utf8(row["path"])): row["id"] for row in found}
        return there

    def check_fits(self, table: Any) -> None:
        """Any column may hold anything."""

    def ids_of(self, table: Any) -> IntArray:
        """All ids of the table's paths."""
        paths = rows.values(table["path"])
        parts = [self.chosen(_condition("path", paths[part])) for part in chunks(len(paths), 512)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def insert(self, embedded: EmbeddedImages, steps: Steps) -> IntArray:
        """Add rows, all or, unless this process is killed meanwhile, none; return their ids."""
        new = [name for name in embedded.table.column_names if name not in self.columns]
        if new:  # before there is anything in them
            keys = {f"{_COLUMN}{_to_utf8(name)}": "1" for name in new}
            with _answered(self.address):
                self.client.alter_collection_properties(self.name, keys)
            self.columns += new
        ids: list[int] = []
        try:
            for block in embedded.blocks(self.manifest):
                size = min(_ROWS, max(1, _NUMBERS // self.manifest.dim))
                for part in chunks(len(block), size):
                    some_rows = embedded.table.slice(len(ids), part.stop - part.start)
                    data = _records(some_rows, block[part])
                    with _answered(self.address):
                        ids += self.client.insert(self.name, data)["ids"]
                    steps("writing to Milvus", len(ids), len(embedded.table))
        except BaseException:
            with suppress(ValueError):
                self.delete(np.array(ids, np.int64))
            raise
        return np.array(ids, np.int64)

    def delete(self, ids: IntArray) -> None:
        """Remove rows."""
        for part in chunks(len(ids), _ROWS):
            with _answered(self.address):
                self.client.delete(self.name, ids=ids[part].tolist())


def _records(table: Any, vectors: FloatArray) -> list[dict[str, Any]]:
    """Rows as Milvus takes them."""
    columns = {name: list(map(_kept, table[name].to_pylist())) for name in table.column_names}
    texts = {name: columns.pop(name) for name in _TEXTS}
    return [
        {
            "vector": vector,
            **{name: values[row] for name, values in texts.items()},
            _OTHERS: {
                name: values[row] for name, values in columns.items() if values[row] is not None
            },
        }
        for row, vector in enumerate(vectors)
    ]


class MilvusGallery(Gallery):
    """A gallery on Milvus. Made and opened by `Gallery.build` and `Gallery.open`.

    Everybody sees every change at once, and nobody waits for others who write. Ids are Milvus's
    own; the embedder is not kept there.
    """

    _now: Collection

    def __init__(self, collection: Collection, embedder: Embedder | None) -> None:
        super().__init__(collection.address.folder, collection, embedder)
        self.name = str(collection.address)

    @classmethod
    def make(
        cls, embedder: Embedder, new: NewImages, path: str | os.PathLike[str], index: str
    ) -> MilvusGallery:
        """See `Gallery.build`."""
        address = Address.parse(path)
        Index.choose(index, len(new.table))
        client = _connect(address)
        _check_new(address, client)
        folder, fingerprint = address.folder, embedder.fingerprint()
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, new.report):
            embedded = new.embed(embedder, fingerprint, folder)
            count = len(embedded.table)
            chosen = Index.choose(index, count)
            new.report(describe_index(f"{chosen} of Milvus", count, exact=chosen.exact))
            manifest = Manifest(fingerprint, embedder.architecture.similarity, embedder.dim, index)
            found = Collection.create(address, client, manifest, chosen)
            try:
                found.insert(embedded, new.steps)
                _check_new(address, client)  # another machine may have built it meanwhile
                found.finish()
            except BaseException:
                with suppress(ValueError):
                    found.drop()
                raise
            shutil.rmtree(folder / STAGING, ignore_errors=True)
            return cls(Collection.open(address, client), embedder)

    @classmethod
    def open(cls, path: str | os.PathLike[str], embedder: Embedder | None = None) -> MilvusGallery:
        """See `Gallery.open`."""
        found = cls(Collection.open(Address.parse(path)), None)
        found.use(embedder)
        return found

    def _newest(self) -> Collection:
        return Collection.open(self._now.address, self._now.client)

    def _indexes(self) -> list[str]:
        return [str(self._now.index)]

    @property
    def embedder(self) -> Embedder:
        """The embedder that made the vectors, if it was given."""
        if self._embedder is None:
            raise UsageError(
                f"the gallery {self.name} keeps no embedder: give the one that built it, as "
                "--model RUN or Gallery.open(address, embedder), or search with vectors"
            )
        return self._embedder

    def _write(self, new: NewImages, embedded: EmbeddedImages, *, renew: bool) -> IntArray:
        now = self._newest()
        self._check_same(now)
        if not renew:
            self._refuse_known(now, embedded.table)
        old = now.ids_of(embedded.table) if renew else np.empty(0, np.int64)
        ids = now.insert(embedded, new.steps)
        now.delete(old)
        embedded.discard()
        self._now = now
        return ids

    def remove(self, ids: Sequence[int] | IntArray, *, report: Report | None = None) -> None:
        """Remove images by their ids; `ids(where)` finds them."""
        wanted = np.unique(as_ids(ids))
        self._places(self._now, wanted)
        self._now.delete(wanted)

    def compact(self, *, steps: Steps | None = None, report: Report | None = None) -> None:
        """Ask Milvus to clear away what is removed, which it does by itself now and then."""
        with _answered(self._now.address):
            self._now.client.compact(self._now.name)

    @property
    def needs_compaction(self) -> bool:
        """Milvus sees to that itself."""
        return False

    def verify(self, steps: Steps | None = None) -> None:
        """Read every vector; raises ValueError for one that no embedder has made."""
        for ids, vectors in self._now.blocks():
            squares = np.square(vectors.astype(np.float64)).sum(1)
            fine = np.isfinite(squares)
            if self.similarity == "cosine":  # zero vectors have no direction, and stay zero
                fine &= (np.abs(squares - 1) < 1e-3) | (squares == 0)
            if not fine.all():
                told = some([str(one) for one in ids[~fine]])
                raise ValueError(f"vectors in {self.name} are damaged: those of the ids {told}")


def exists(path: str) -> bool:
    """Whether there is a collection at an address."""
    address = Address.parse(path)
    if address.local and not Path(address.uri).exists():
        return False
    client = _connect(address)
    with _answered(address):
        return bool(client.has_collection(address.collection))


def _check_new(address: Address, client: Any) -> None:
    with _answered(address):
        there = client.has_collection(address.collection)
    if there:
        raise UsageError(
            f"{address} is there already; Gallery.open({str(address)!r}).add(…) adds to a gallery"
        )
