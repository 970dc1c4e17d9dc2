"""`proximetry search`: find the images of a gallery that are most similar to queries."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from proximetry._util.errors import UsageError
from proximetry._util.formatting import shorten
from proximetry.cli.inputs import open_gallery
from proximetry.cli.options import (
    MAX_K,
    AsJson,
    Conditions,
    Flag,
    GalleryAddress,
    Neighbors,
    SearchEffort,
)
from proximetry.cli.output import (
    check_out,
    format_bound,
    print_result,
    progress_bar,
    relative_path,
)
from proximetry.search.manifest import GALLERY

if TYPE_CHECKING:
    from proximetry.search import SearchResult

_SHOWN = ("id", "similarity", "score", "probability", "match", "path", "label")


def search(
    *queries: Path,
    k: Annotated[int, Parameter(name=["-k", "--k"], validator=Number(gte=1, lte=MAX_K))] = 10,
    gallery: GalleryAddress = GALLERY,
    model: Path | None = None,
    where: Conditions = (),
    ids: Annotated[tuple[int, ...], Parameter(name="--id", consume_multiple=False)] = (),
    combine: Literal["mean", "max"] | None = None,
    box: tuple[int, int, int, int] | None = None,
    expand: Neighbors = 0,
    rerank: Flag = False,
    nprobe: SearchEffort = None,
    ef: SearchEffort = None,
    refine: SearchEffort = None,
    exact: Flag = False,
    predict: Flag = False,
    sheet: Path | None = None,
    explain: Flag = False,
    as_json: AsJson = False,
) -> None:
    """Search a gallery for the images most similar to yours.

    Args:
        queries: image files; or one .parquet, .npz or .npy file of vectors.
        k: number of results per query.
        model: the run or embedder that built the gallery; required on Milvus, which does not
            store it.
        where: search only images with this value in a column, such as label=jay. Other operators
            are != < <= > >= and ^= (prefix); quote them. Can be repeated: values of one column
            with = are combined with OR, everything else with AND.
        ids: search with an image of the gallery instead of QUERIES; results have their ids in the
            JSON document (--json). Can be repeated.
        combine: search with all queries as one: by the mean of their vectors, or by the maximum
            similarity to any of them.
        box: search with a rectangle of the only image: left,top,right,bottom in pixels.
        expand: query expansion with this number of neighbors.
        rerank: reorder the nearest images by k-reciprocal re-ranking.
        nprobe: number of lists of an IVF index to search.
        ef: number of candidates that an HNSW index keeps (efSearch).
        refine: number of candidates per result to score with the full vectors, for indexes of
            compressed vectors.
        exact: scan all vectors instead of using the index.
        predict: also print the most frequent class of the results.
        sheet: also write a contact sheet: a self-contained .html page, or a .png.
        explain: color the results in the contact sheet by what makes them similar to the query.
    """
    from proximetry.data.folders import split_shard_path
    from proximetry.data.image_files import check_exists
    from proximetry.search.conditions import parse_conditions
    from proximetry.search.manifest import MANIFEST

    if bool(queries) == bool(ids):
        raise UsageError(
            "pass image files or --id, not both" if ids else "QUERIES is missing. Pass image files."
        )
    for query in queries:
        if (query / MANIFEST).exists():
            raise UsageError(f"{query} is a gallery. Use proximetry search IMAGE --gallery {query}")
    check_out(sheet, [".html", ".png"], queries, "--sheet")
    if explain and sheet is None:
        raise UsageError("--explain needs a contact sheet. Pass --sheet FILE.html.")
    for query in queries:  # before torch is imported
        check_exists(Path(split_shard_path(str(query))[0]))
    opened, conditions = open_gallery(gallery, model), parse_conditions(where)
    from proximetry.data.vectors import holds_vectors
    from proximetry.search.vector_files import read_queries

    targets: Any = list(ids or queries)
    names = [str(query) for query in queries]
    if len(queries) == 1 and holds_vectors(queries[0]):
        targets, names = read_queries(opened, queries[0])
    with progress_bar("embedding") as progress:
        result = opened.search(
            targets,
            k,
            where=conditions,
            combine=combine,
            box=box,
            expand=expand,
            rerank=rerank,
            nprobe=nprobe,
            ef=ef,
            refine=refine,
            exact=exact,
            progress=progress,
        )
    names = names or [str(path) for path in result.queries]
    if combine is not None:
        names = [f"{combine} of {', '.join(names if queries else map(str, ids))}"]
    columns = {name: result.column(name) for name in result.columns}
    lists = [(name, _list_results(result, columns, row)) for row, name in enumerate(names)]
    predictions = result.predictions
    tables = [_table(name, images, result.similarity) for name, images in lists]
    if result.threshold is not None:
        tables = [
            table if len(images) and images[0]["match"] else f"{table}\n  {_no_match(result)}"
            for table, (_, images) in zip(tables, lists, strict=True)
        ]
    if predict:
        tables = [
            f"{table}\n  class: {one}" for table, one in zip(tables, predictions, strict=True)
        ]
    if sheet is not None:
        from proximetry.search import contact_sheet

        contact_sheet(sheet, result.queries, result, opened.embedder if explain else None)
        tables.append(f"contact sheet: {sheet}")
    document = {
        "gallery": gallery,
        "images": len(opened),
        "similarity": result.similarity,
        "queries": [
            {"query": name, "prediction": prediction._asdict(), "results": images}
            for (name, images), prediction in zip(lists, predictions, strict=True)
        ],
    }
    print_result(as_json, document, "\n\n".join(tables))


def _list_results(
    result: "SearchResult", columns: Mapping[str, Any], row: int
) -> list[dict[str, Any]]:
    """Return the results of one query, with their scores if these differ from the similarities."""
    images = list[dict[str, Any]]()
    for rank, image in enumerate(result.ids[row]):
        if image < 0:
            break
        similarity = round(float(result.similarities[row, rank]), 6)
        images.append({"id": int(image), "similarity": similarity})
        if result.scores is not None:
            images[-1]["score"] = round(float(result.scores[row, rank]), 6)
        if result.probabilities is not None:
            images[-1]["probability"] = round(float(result.probabilities[row, rank]), 4)
            images[-1]["match"] = bool(result.is_match[row, rank])
        images[-1] |= {name: column[row, rank] for name, column in columns.items()}
    return images


def _no_match(result: "SearchResult") -> str:
    """Explain that the nearest image of a query is below the threshold."""
    assert result.threshold is not None
    assert result.calibration is not None
    point = max(result.calibration.gallery, key=lambda one: one.target)
    bound = format_bound(result.threshold, result.similarity)
    return (
        f"no match: {bound} is needed, which {100 * point.target:g} % of unknown and "
        f"{100 * point.true_accepts:.0f} % of known queries reach"
    )


def _table(name: str, images: Sequence[Mapping[str, Any]], similarity: str) -> str:
    """Return the results of one query, one per line; rows of vectors with all columns."""
    from proximetry.search.vector_files import is_row

    if not images:
        return f"{name}\n  no results"
    labels = [image["label"] or "" for image in images]
    width = min(24, max([len("class"), *map(len, labels)])) if any(labels) else 0
    heading, sign = ("cosine", 1) if similarity == "cosine" else ("distance", -1)
    header = f"  {'':>4}  {heading:>8}  "
    header += f"{'score':>8}  " if "score" in images[0] else ""
    header += f"{'same':>5}  " if "probability" in images[0] else ""
    header += f"{'class':{width}}  " if width else ""
    lines = [name, f"{header}image"]
    for rank, (image, label) in enumerate(zip(images, labels, strict=True), 1):
        line = f"  {rank:>4}  {sign * image['similarity']:8.4f}  "
        line += f"{image['score']:8.4f}  " if "score" in image else ""
        if "probability" in image:
            line += f"{100 * image['probability']:3.0f} %  "
        line += f"{shorten(label, width):{width}}  " if width else ""
        line += relative_path(image["path"])
        if image["path"] and is_row(image["path"]):
            others = [value for name, value in image.items() if name not in _SHOWN]
            line += "".join(f"  {shorten(str(value), 60)}" for value in others if value is not None)
        lines.append(line)
    return "\n".join(lines)
