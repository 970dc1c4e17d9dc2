import os
import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def ordinary_user():
    """A folder of somebody who, unlike root, may not read everything."""
    folder = Path(tempfile.mkdtemp(prefix="proximetry-"))
    root = os.geteuid() == 0
    try:
        if root:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        yield folder
    finally:
        if root:
            os.seteuid(0)
        for home, folders, _ in os.walk(folder):  # which comes to a folder after its parent
            for path in (Path(home, name) for name in folders):
                if not path.is_symlink():
                    path.chmod(0o700)
        shutil.rmtree(folder)
