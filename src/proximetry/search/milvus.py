"""`MilvusGallery`: a gallery on Milvus, for more images than fit on one machine.

    milvus://host:19530/collection     a server or a cluster; milvuss:// over TLS
    milvus:file.db/collection          a file of Milvus Lite; the default collection is "gallery"

All state is in the collection: rows, the index, and as properties the manifest, the names of
columns and whether the build is complete. The id of a row is a hash of its path, so any number of
processes may write, and writing an image again replaces it. Positions of rows are ids.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from proximetry._util.errors import UsageError
from proximetry._util.files import cache_folder
from proximetry._util.formatting import format_int, format_value, pluralize
from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Progress
from proximetry.models import Embedder
from proximetry.search import indexes, metadata
from proximetry.search.conditions import Where, parse_where
from proximetry.search.effort import DEFAULT_EFFORT, Effort
from proximetry.search.exact import FloatArray, Hits, Scores, exact_scores, merge_hits
from proximetry.search.gallery import Gallery
from proximetry.search.manifest import Manifest, Report, ignore
from proximetry.search.milvus_client import LOAD_SECONDS, Address, MilvusClient
from proximetry.search.milvus_filters import NO_TEXT, OTHERS, TEXTS, expression, restore, store
from proximetry.search.new_images import NewImages

MAX_K = 16_384  # the largest number of results of a query on Milvus
_VERSION, _MANIFEST = 3, ("embedder", "similarity", "dim", "index")
# Properties of a collection: the gallery as JSON, one for each column besides path and label, and
# one for each partition that is complete.
_GALLERY, _COLUMN, _COMPLETE = "proximetry", "proximetry.column.", "proximetry.complete."
_MAX_TEXT = 65_535
# Per message, which may have 64 MB: numbers take 16 MB, and metadata some kilobytes per row.
_MAX_NUMBERS, _MAX_ROWS = 1 << 22, 4096
_SORTED = {"iterator": "True", "reduce_stop_for_best": "True"}  # returns the smallest ids


def find(path: str | os.PathLike[str]) -> Collection | None:
    """Connect to Milvus; return None if there is no gallery, or its build is not finished."""
    address = Address.parse(path)
    if address.local and not Path(address.uri).exists():
        return None
    client = MilvusClient(address)
    if not client.has_collection(address.collection):
        return None
    collection = Collection(client)
    return collection if collection.complete else None


def choose_index(index: str, count: int) -> tuple[str, dict[str, int]]:
    """Return Milvus's index for a factory string and a number of rows, and its settings."""
    if index == "auto":  # each segment of about 1 GB has an index, so lists do not grow further
        index = indexes.resolve(index, min(count, indexes.MAX_GRAPH_ROWS + 1)) or indexes.EXACT
    if index in (indexes.EXACT, "AUTOINDEX"):
        return index.upper(), {}
    if match := re.fullmatch(r"HNSW(\d+)", index):
        return "HNSW", {"M": int(match[1]), "efConstruction": 200}
    if match := re.fullmatch(r"IVF(\d+),(Flat|SQ8)", index):
        return f"IVF_{match[2].upper()}", {"nlist": int(match[1])}
    raise UsageError(
        f"unknown index on Milvus: {format_value(index)}. Use auto, Flat, HNSW32, IVF1024,Flat, "
        "IVF1024,SQ8 or AUTOINDEX."
    )


def ids_of(table: Any) -> IntArray:
    """Return the ids of images: 63 bits of the hash of each path."""
    paths = table["path"].to_pylist()
    digests = [hashlib.blake2b(path, digest_size=8).digest() for path in paths]
    return np.frombuffer(b"".join(digests), "<i8") & np.int64(2**63 - 1)


class Collection:
    """The current state of a gallery on Milvus, with the methods of a `Snapshot`."""

    max_k = MAX_K
    class_share = 0.0  # unknown

    def __init__(self, client: MilvusClient) -> None:
        self.client, self.address, self.name = client, client.address, client.address.collection
        self.records: dict[int, dict[str, Any]] | None = None  # metadata of results, by id
        properties = client.describe_collection(self.name).get("properties") or {}
        if _GALLERY not in properties:
            raise UsageError(f"{self.address} is not a gallery. Choose another collection.")
        description = json.loads(properties[_GALLERY])
        if description["version"] != _VERSION:
            raise ValueError(
                f"{self.address} has format version {format_value(description['version'])}; this "
                f"Proximetry reads version {_VERSION}. Install the version that wrote it."
            )
        self.manifest = Manifest(*(description[name] for name in _MANIFEST))
        others = sorted(key.removeprefix(_COLUMN) for key in properties if _COLUMN in key)
        self.columns = [*TEXTS, *map(restore, others)]
        partition = f"{self.address.partition}." if self.address.partition else ""
        self.completed = f"{_COMPLETE}{partition}"
        self.complete = any(key.startswith(self.completed) for key in properties)
        self.kind, self.nlist = "", 0  # of the index
        # Rows with vectors per message.
        self._batch = min(_MAX_ROWS, max(1, _MAX_NUMBERS // self.manifest.dim))
        self._reading: dict[str, Any] = {"consistency_level": self.address.consistency}
        if self.address.partition:
            self._reading["partition_names"] = [self.address.partition]

    @classmethod
    def create(cls, client: MilvusClient, manifest: Manifest, count: int) -> Collection:
        """Create an empty gallery, or open one whose build was interrupted."""
        address, types = client.address, client.pymilvus.DataType
        choose_index(manifest.index, count)  # raises for an unknown one
        if not client.has_collection(address.collection):
            schema = client.pymilvus.MilvusClient.create_schema(auto_id=False)
            schema.add_field("id", types.INT64, is_primary=True)
            schema.add_field("vector", types.FLOAT_VECTOR, dim=manifest.dim)
            for name in TEXTS:
                schema.add_field(name, types.VARCHAR, max_length=_MAX_TEXT)
            schema.add_field(OTHERS, types.JSON)
            description = {"version": _VERSION}
            description |= {name: getattr(manifest, name) for name in _MANIFEST}
            client.create_collection(
                address.collection,
                schema=schema,
                properties={_GALLERY: json.dumps(description)},
                consistency_level="Strong",
                num_shards=address.shards,
            )
        created = cls(client)
        if created.complete:
            raise UsageError(
                f"{address} already exists. Add to it: Gallery.open({str(address)!r}).add(…)"
            )
        if created.manifest != manifest:
            raise UsageError(
                f"{address} has an interrupted build with another embedder or index. Repeat that "
                "one, or choose another collection."
            )
        if address.partition and not client.has_partition(created.name, address.partition):
            client.create_partition(created.name, address.partition)
        return created.load(count)

    def load(self, count: int | None = None) -> Collection:
        """Load the rows on the server; index them before if they are not.

        The server chooses the index of text.
        """
        client, name, replicas = self.client, self.name, self.address.replicas
        if "vector" not in client.list_indexes(name):
            rows = int(client.get_collection_stats(name)["row_count"]) if count is None else count
            kind, settings = choose_index(self.manifest.index, rows)
            metric = "IP" if self.manifest.similarity == "cosine" else "L2"
            params = client.pymilvus.MilvusClient.prepare_index_params()
            params.add_index("vector", kind, "vector", metric_type=metric, params=settings)
            for text in () if self.address.local else TEXTS:  # Milvus Lite scans its file
                params.add_index(text, index_name=text)
            client.create_index(name, params, timeout=LOAD_SECONDS)
        if replicas or client.get_load_state(name)["state"].name != "Loaded":
            client.load_collection(name, replica_number=replicas or 1, timeout=LOAD_SECONDS)
        index = client.describe_index(name, "vector")
        self.kind, self.nlist = index["index_type"], int(index.get("nlist", 0))
        return self

    def __len__(self) -> int:
        (answer,) = self._query(filter="", output_fields=["count(*)"])
        return int(answer["count(*)"])

    def _query(self, **options: Any) -> list[dict[str, Any]]:
        return list(self.client.query(self.name, **options, **self._reading))

    def select(self, where: Where) -> Any:
        """Return the filter expression of each condition."""
        return {str(one): expression(one) for one in parse_where(where, self.columns)}

    def _check_found(self, allowed: Mapping[str, str]) -> None:
        """Raise if no image matches one of the conditions; called if there are no results."""
        for condition, term in allowed.items():
            if not self._query(filter=term, output_fields=["id"], limit=1):
                raise UsageError(f"no image has {condition}")

    def allowed_positions(self, allowed: Mapping[str, str]) -> IntArray:
        """Return the ids of the allowed rows, in ascending order."""
        last, ids, terms = -1, [np.empty(0, np.int64)], [*allowed.values()]
        options = {"output_fields": ["id"], "limit": MAX_K, **_SORTED}
        # A batch may be shorter although there are more rows.
        while rows := self._query(filter=" and ".join([f"id > {last}", *terms]), **options):
            ids.append(np.sort([row["id"] for row in rows]))
            last = int(ids[-1][-1])
        if last < 0:
            self._check_found(allowed)
        return np.concatenate(ids)

    def _sample(self, field: str, count: int) -> list[Any]:
        """Return a field of up to `count` rows; ids are hashes, so the first rows are a sample."""
        rows = self._query(filter="id >= 0", output_fields=[field], limit=min(count, MAX_K))
        return [restore(row[field]) for row in rows]

    def sample_ids(self, count: int) -> IntArray:
        """Return the ids of up to `count` random images."""
        return np.array(self._sample("id", count), np.int64)

    def count_labels(self) -> dict[str, int]:
        """Return the number of images of each class, in a sample if there are more than 16 384."""
        return dict(Counter(filter(None, self._sample("label", MAX_K))))

    @property
    def index_kinds(self) -> list[str]:
        """The index."""
        return [indexes.EXACT if self.kind == "FLAT" else self.kind]

    @property
    def needs_compaction(self) -> bool:
        """Whether another kind of index fits the number of images."""
        kinds = {choose_index(self.manifest.index, len(self))[0], self.kind}
        return len(kinds) > 1 and "AUTOINDEX" not in kinds

    def view(self) -> Collection:
        """Return a copy for one search, which keeps the metadata of its results."""
        viewed = copy(self)
        viewed.records = {}
        return viewed

    def ids(self, positions: IntArray) -> IntArray:
        """Return positions, which are ids."""
        return positions

    def positions(self, ids: IntArray) -> IntArray:
        """Return the ids that exist; −1 for others."""
        return np.where(np.isin(ids, [*self._get(ids, [])]), ids, -1)

    def _get(self, ids: IntArray, fields: Iterable[str]) -> dict[int, dict[str, Any]]:
        """Return fields of the existing rows by id."""
        rows: dict[int, dict[str, Any]] = {}
        targets, names = np.unique(ids[ids >= 0]).tolist(), ["id", *fields]
        for part in chunks(len(targets), self._batch):
            options = {"ids": targets[part], "output_fields": names, **self._reading}
            rows |= {row["id"]: row for row in self.client.get(self.name, **options)}
        return rows

    def take(self, positions: IntArray, columns: Iterable[str]) -> dict[str, list[Any]]:
        """Return columns of rows; None for −1 and for rows removed since the search."""
        names, known = list(columns), self.records or {}
        fields = {name if name in TEXTS else OTHERS for name in names}
        unknown = positions[~np.isin(positions, [*known])]
        by_id = known | self._get(unknown, fields)
        rows = [by_id.get(position, {}) for position in positions.tolist()]
        others = [row.get(OTHERS, {}) for row in rows]
        return {
            name: [restore(row.get(name)) for row in (rows if name in TEXTS else others)]
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

    def search(
        self,
        queries: FloatArray,
        k: int,
        allowed: Mapping[str, str],
        effort: Effort = DEFAULT_EFFORT,
    ) -> Hits:
        """Return the k nearest of the allowed rows."""
        if effort != DEFAULT_EFFORT:
            raise UsageError("nprobe, ef, refine and exact are not supported on Milvus")
        if k > MAX_K:
            raise UsageError(f"k must be at most {format_int(MAX_K)} on Milvus, got {k}")
        compressed = self.kind == "IVF_SQ8"
        count = min(indexes.compressed_candidates(k), MAX_K) if compressed else k
        params = {"ef": min(max(indexes.EF_SEARCH, 2 * count), 2 * MAX_K)}
        if self.kind.startswith("IVF"):
            params = {"nprobe": indexes.choose_nprobe(self.nlist)}
        fields = ["vector"] * compressed + [*TEXTS, OTHERS] * (self.records is not None)
        parts = [Hits(np.empty((0, k), np.int64), np.empty((0, k)))]
        for part in chunks(len(queries), max(1, self._batch // count)):
            lists = self.client.search(
                self.name,
                data=list(queries[part]),
                anns_field="vector",
                filter=" and ".join(allowed.values()),
                limit=count,
                output_fields=fields,
                search_params={"params": params if self.kind[:3] in ("IVF", "HNS") else {}},
                **self._reading,
            )
            parts.append(merge_hits([self._read(queries[part], lists, count)], k))
        positions, scores = map(np.concatenate, zip(*parts, strict=True))
        if allowed and not (positions >= 0).any():
            self._check_found(allowed)
        width = max(1, int((positions >= 0).sum(1).max(initial=0)))
        return Hits(positions[:, :width], scores[:, :width])

    def _read(self, queries: FloatArray, lists: Any, count: int) -> Hits:
        """Return the hits of an answer of Milvus; score them here if the index is compressed."""
        similarity = self.manifest.similarity
        positions = np.full((len(lists), count), -1, np.int64)
        scores = np.full(positions.shape, -np.inf)
        for row, hits in enumerate(lists):
            entities = [hit["entity"] for hit in hits]
            values = np.array([hit["distance"] for hit in hits], np.float64)
            if self.kind == "IVF_SQ8" and hits:
                vectors = np.array([[one.pop("vector") for one in entities]], np.float32)
                values = exact_scores(queries[row : row + 1], vectors, similarity)[0]
            elif similarity == "euclidean":  # Milvus squares distances, too
                values = np.minimum(-values, 0.0)
            ids = [hit["id"] for hit in hits]
            positions[row, : len(ids)], scores[row, : len(ids)] = ids, values
            if self.records is not None:
                self.records |= zip(ids, entities, strict=True)
        return Hits(positions, scores)

    def find_paths(self, table: Any) -> dict[bytes, int]:
        """Return the paths of a table that are in the gallery, and their ids."""
        paths, ids = table["path"].to_pylist(), self.positions(ids_of(table)).tolist()
        return {path: number for path, number in zip(paths, ids, strict=True) if number >= 0}

    def write(self, new_images: NewImages) -> IntArray:
        """Add or replace rows, and return their ids."""
        missing = [name for name in new_images.table.column_names if name not in self.columns]
        if missing:
            keys = {f"{_COLUMN}{store(name)}": "1" for name in missing}
            self.client.alter_collection_properties(self.name, keys)
            self.columns += missing
        done = 0
        for block in new_images.blocks(self.manifest):
            for part in chunks(len(block), self._batch):
                table = new_images.table.slice(done, part.stop - part.start)
                rows = _rows(table, block[part])
                self.client.upsert(self.name, rows, partition_name=self.address.partition)
                done += len(rows)
        return ids_of(new_images.table)


def _rows(table: Any, vectors: FloatArray) -> list[dict[str, Any]]:
    """Return images in the form of Milvus."""
    columns = [[*map(store, metadata.values(table[name]))] for name in table.column_names]
    rows: list[dict[str, Any]] = []
    for item, vector, *values in zip(ids_of(table).tolist(), vectors, *columns, strict=True):
        others = dict(zip(table.column_names, values, strict=True))
        path, label = others.pop("path"), others.pop("label")
        others = {name: value for name, value in others.items() if value is not None}
        label = NO_TEXT if label is None else label
        rows.append({"id": item, "vector": vector, "path": path, "label": label, OTHERS: others})
    return rows


class MilvusGallery(Gallery):
    """A gallery on Milvus, built by `Gallery.build` and opened by `Gallery.open`.

    Every change is immediately visible to all processes, and several may write. Adding an image
    again replaces it. Milvus does not store the embedder.
    """

    _snapshot: Collection

    @classmethod
    def create(
        cls, embedder: Embedder, new_images: NewImages, path: str | os.PathLike[str], index: str
    ) -> MilvusGallery:
        """See `Gallery.build`."""
        client, fingerprint = MilvusClient(Address.parse(path)), embedder.fingerprint()
        manifest = Manifest(fingerprint, embedder.architecture.similarity, embedder.dim, index)
        count = len(new_images.table)
        collection = Collection.create(client, manifest, count)
        built = cls(collection)
        built._embedder = embedder
        new_images.report(indexes.describe(collection.index_kinds[0], count, prefix="Milvus "))
        if not new_images.embedded:  # continue an interrupted build
            new_images.exclude(collection.positions(ids_of(new_images.table)) >= 0)
        built._add(new_images, collection, replace=True)
        if len(built.skipped) == count:
            raise ValueError(f"{pluralize(count, 'image')} cannot be read: {built.skipped[0]}")
        client.alter_collection_properties(collection.name, {collection.completed: "1"})
        return built

    @classmethod
    def connect(cls, path: str | os.PathLike[str]) -> MilvusGallery:
        """See `Gallery.open`."""
        collection = find(path)
        if collection is None:
            raise UsageError(
                f"no gallery {path}, or its build is not finished. Build it with `proximetry "
                "index`."
            )
        return cls(collection.load())

    def __init__(self, collection: Collection) -> None:
        super().__init__(cache_folder() / "milvus", str(collection.address), collection)
        self._version = uuid4().hex

    def limit_calls(self, seconds: float) -> MilvusGallery:
        """Return a copy that raises MilvusError if the server does not answer a call in time."""
        limited, collection = copy(self), copy(self._snapshot)
        limited._snapshot, collection.client = collection, copy(collection.client)
        collection.client.call_seconds, collection.client.retry_seconds = seconds, 0.0
        return limited

    def close(self) -> None:
        """Disconnect from the server; the gallery cannot be used afterwards."""
        if isinstance(self._snapshot, Collection):  # not yet closed
            self._snapshot.client.close()
        super().close()

    @property
    def version(self) -> str:
        """An identifier of this object, since the rows may change at any time."""
        return self._version

    def _read_snapshot(self) -> Collection:
        return Collection(self._snapshot.client).load()

    @property
    def embedder(self) -> Embedder:
        """The embedder that built the gallery, if it was passed."""
        if self._embedder is None:
            raise UsageError(
                f"the gallery {self.name} stores no embedder. Pass the one that built it (--model "
                "RUN or Gallery.open(address, embedder)), or search with vectors."
            )
        return self._embedder

    def _add(self, new_images: NewImages, snapshot: Any, *, replace: bool) -> IntArray:
        """Embed and write one part after the other; existing images are replaced."""
        ids, self.skipped = [np.empty(0, np.int64)], new_images.skipped
        self._snapshot = snapshot  # `write` adds new columns to it
        for part in new_images.parts():
            if not part.embedded:
                part.embed(self.embedder, snapshot.manifest.embedder, self.path)
            ids.append(snapshot.write(part))
            part.discard()
            part.progress(len(part.table), len(part.table))
        return np.concatenate(ids)

    def remove(self, ids: Sequence[int] | IntArray, *, report: Report | None = None) -> None:
        """Remove images by their ids; `ids(where)` returns them."""
        collection = self._snapshot
        positions, partition = self._positions(collection, ids), collection.address.partition
        for part in chunks(len(positions), _MAX_ROWS):
            targets = positions[part].tolist()
            collection.client.delete(collection.name, targets, partition_name=partition or None)

    def compact(self, *, progress: Progress | None = None, report: Report | None = None) -> None:
        """Reclaim the space of removed rows, and build the index that fits the number of images.

        While another index is built, searches wait.
        """
        self.refresh()  # another process may have built an index
        outdated, count = self.needs_compaction, len(self)
        client, name = self._snapshot.client, self._snapshot.name
        client.flush(name, timeout=LOAD_SECONDS)
        client.compact(name)
        if outdated:
            client.release_collection(name)
            client.drop_index(name, "vector")
        self._snapshot.load(count)
        (report or ignore)(indexes.describe(self._snapshot.index_kinds[0], count, prefix="Milvus "))
