"""Damaged files of vectors, and files with the wrong suffix."""

import io

import numpy as np
import pytest

from proximetry._util.errors import UsageError
from proximetry.data import VectorCatalog

VECTORS = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)


def content(save, *arrays, **named):
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()


NPY = content(np.save, VECTORS)
NPZ = content(np.savez_compressed, vectors=VECTORS, labels=np.zeros(40, int))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("v.npz", NPZ[:300], "is not a NumPy file"),
        ("v.npz", NPZ[:100] + bytes(100) + NPZ[200:], "an array cannot be read"),  # zlib.error
        ("v.npz", NPY, "is a .npy file. Rename it"),
        ("v.npy", NPZ, "is a .npz file. Rename it"),
        ("v.npy", NPY[:300], "is not a NumPy file"),
        ("v.npy", NPY.replace(b"}", b"{"), "is not a NumPy file"),  # tokenize.TokenError
        ("v.npy", b"", "is not a NumPy file"),
    ],
)
def test_damaged_files_raise_one_line_errors(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    (tmp_path / "v.npy.json").write_text('{"labels": []}')
    with pytest.raises(UsageError, match=message) as caught:
        VectorCatalog.read(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)
