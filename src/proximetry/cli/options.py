"""Options that commands share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from proximetry.models.constants import MAX_BATCH_SIZE

Flag = Annotated[bool, Parameter(negative=())]
AsJson = Annotated[Flag, Parameter(name="--json", help="print one JSON document, for scripts.")]
BatchSize = Annotated[
    int,
    Parameter(
        validator=Number(gte=1, lte=MAX_BATCH_SIZE),
        converter=lambda kind, tokens: int(tokens[0].value),  # cyclopts alone would round 2.5
        help="images per forward pass.",
    ),
]
MAX_K = 10_000
Neighbors = Annotated[int, Parameter(validator=Number(gte=0, lte=MAX_K))]
SearchEffort = Annotated[int | None, Parameter(validator=Number(gte=1))]
EmbedderFolder = Annotated[
    Path,
    Parameter(
        help="folder of a run or of a saved embedder, hub:owner/name, an ONNX file, or the name of "
        "a backbone with pretrained weights."
    ),
]
GalleryAddress = Annotated[str, Parameter(help="folder of the gallery, or its address on Milvus.")]
Conditions = Annotated[tuple[str, ...], Parameter(metavar="COLUMN=VALUE", consume_multiple=False)]
Device = Annotated[
    str | None, Parameter(help="cpu, cuda, cuda:1 or mps; default: the best available.")
]
Document = Annotated[
    Path | None, Parameter(help="also write the JSON document to this .json file.")
]

# Also under the names of recipe keys, so that every command accepts these options of `train`.
BadImages = Annotated[
    Literal["error", "skip"],
    Parameter(
        name=["--bad-images", "--data.bad-images"],
        help="stop at missing or unreadable images, or skip and list them.",
    ),
]


LabelsFromName = Annotated[
    str | None,
    Parameter(
        name=["--labels-from-name", "--data.labels-from-name"],
        help="take classes from file names, not folders: auto uses the part before the last "
        "separator and number; or a regular expression whose first group is the class.",
    ),
]


def read_columns(kind: Any, tokens: Sequence[Token]) -> dict[str, str]:
    """Parse pairs such as path=file,label=category."""
    columns: dict[str, str] = {}
    for pair in tokens[0].value.split(","):
        field, sign, column = (part.strip() for part in pair.partition("="))
        if not (field and sign and column) or field in columns:
            raise ValueError(f"expected pairs such as path=file,label=category, got {pair!r}")
        columns[field] = column
    return columns


ColumnPairs = Annotated[
    Any,
    Parameter(
        converter=read_columns, accepts_keys=False, n_tokens=1, metavar="path=COLUMN,label=COLUMN"
    ),
]
TableColumns = Annotated[
    ColumnPairs,
    Parameter(
        name=["--columns", "--data.columns"],
        help="names of table columns, if different: path=file,label=category.",
    ),
]
