"""Two processes of torchrun print the same results as one."""

import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from proximetry import cli
from tests.faces.small import lfw, mean_color
from tests.faces.test_ijb import write_ijb

SCRIPT = """
import json, os, sys
import torch.distributed as dist
from proximetry.cli import main

dist.init_process_group("gloo")  # which the commands find and leave alone
codes = [main(words) for words in json.loads(sys.argv[1])]
print(codes, file=sys.stderr)
dist.barrier()
sys.stdout.flush()
os._exit(codes != [0, 0, 0, 0, 0, 0, 1])  # leaving a gloo group may abort the process
"""


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    rng = np.random.default_rng(0)
    faces, model = tmp_path / "faces", mean_color(tmp_path / "m.onnx")
    lfw(faces, {f"P{n}": rng.integers(0, 256, (1 + n % 4, 3)) for n in range(40)})
    several = [n for n in range(40) if n % 4]
    lines = ["10 3"]
    for _ in range(10):
        chosen = rng.choice(several, 4, replace=False)
        lines += [f"P{n} 1 2" for n in chosen[:3]]
        lines += [f"P{a} 1 P{b} 1" for a, b in pairwise(chosen)]
    (tmp_path / "pairs.txt").write_text("\n".join(lines))
    np.save(tmp_path / "crowd.npy", rng.normal(size=(501, 6)).astype(np.float32))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.png").write_bytes(b"nonsense")
    verify = ["verify", model, faces, tmp_path / "pairs.txt"]
    identify = ["identify", model, faces]
    commands = {
        "verify": verify,
        "quality": [*verify, "--quality", "--flip", "sum"],
        "ijb": [
            "verify",
            mean_color(tmp_path / "n.onnx", shape=(3, 112, 112)),
            write_ijb(tmp_path),
        ],
        "folder": identify,
        "vectors": [*identify, "--distractors", tmp_path / "crowd.npy"],
        "images": [*identify, "--distractors", faces.parent / "others"],
        "error": [*identify, "--distractors", tmp_path / "bad"],
    }
    lfw(tmp_path / "others", {"x": rng.integers(0, 256, (21, 3))})
    size = ["--batch-size", "4", "--json", "--out"]
    words = {
        out: [
            list(map(str, ["faces", *command, *size, tmp_path / f"{out}-{name}.json"]))
            for name, command in commands.items()
        ]
        for out in ("one", "two")
    }
    (tmp_path / "script.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    run += [str(tmp_path / "script.py"), json.dumps(words["two"])]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count('"tar_at_far"') == 6, "one of two processes prints"
    assert "process 0: " in done.stderr
    for one in words["one"][:6]:
        assert cli.main(one) == 0
        name = one[-1].rpartition("-")[2]
        figures = [json.loads((tmp_path / f"{out}-{name}").read_text()) for out in ("one", "two")]
        assert figures[0] == figures[1], name
    assert cli.main(words["one"][6]) == 1
