import os
import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def ordinary_user():
    """A folder of an unprivileged user, who cannot read every file, unlike root."""
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
        for home, folders, _ in os.walk(folder):  # parents first
            for path in (Path(home, name) for name in folders):
                if not path.is_symlink():
                    path.chmod(0o700)
        shutil.rmtree(folder)
