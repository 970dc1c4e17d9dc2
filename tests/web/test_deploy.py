"""The unit file and the Dockerfile are valid, and their commands have existing options."""

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest

from proximetry.cli import main

DEPLOY = Path(__file__).parents[2] / "deploy"
INSTRUCTIONS = {"FROM", "COPY", "RUN", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


def check_command(words, shared, capsys):
    """Run a `serve` command on a port that does not exist; only that is an error."""
    assert words[1] == "serve"
    words = [str(shared.path), *words[3:], "--port", "70000"]
    assert main(["serve", *words]) == 2
    error = capsys.readouterr().err
    assert "65535" in error
    assert "nknown option" not in error


def dockerfile():
    """Return the instructions of the Dockerfile with their arguments."""
    text = (DEPLOY / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]


def test_dockerfile(shared, capsys):
    lines = dockerfile()
    names = [name for name, _ in lines]
    assert set(names) <= INSTRUCTIONS
    assert names[0] == "FROM"
    values = {name: value for name, value in lines if name != "RUN"}
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    assert values["USER"] != "root"
    assert not re.search("TOKEN", values["ENV"])
    check = json.loads(values["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "HEALTHCHECK", "exec")
    assert f":{values['EXPOSE']}/healthz" in check[2]
    command = json.loads(values["ENTRYPOINT"]) + json.loads(values["CMD"])
    check_command(command, shared, capsys)
    extras = re.search(r"\[([a-z,]+)\]", next(value for name, value in lines if "pip" in value))[1]
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))


def test_unit_file(shared, capsys):
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str
    unit.read(DEPLOY / "proximetry.service")
    assert unit.sections() == ["Unit", "Service", "Install"]
    service = unit["Service"]
    check_command(shlex.split(service["ExecStart"]), shared, capsys)
    assert "token" not in service["ExecStart"].lower()
    assert service["DynamicUser"] == "yes"
    log = shlex.split(service["ExecStart"])[-1]
    assert log.startswith(f"/var/log/{service['LogsDirectory']}/")


@pytest.mark.parametrize("name", ["Dockerfile", "proximetry.service"])
def test_files_are_small(name):
    text = (DEPLOY / name).read_text()
    assert len(text.splitlines()) < 40
    assert "\t" not in text
