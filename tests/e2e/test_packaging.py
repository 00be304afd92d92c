"""Units and the manifest say what the programs understand."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from platform_under_test import BIN, ROOT

UNITS = sorted((ROOT / "packaging/systemd").glob("*.service"))
PROGRAMS = {path.name for path in BIN.iterdir()}


@cache
def help_of(*command: str) -> str:
    done = subprocess.run([str(BIN / command[0]), *command[1:], "--help"], capture_output=True, text=True, check=True)
    return done.stdout


def understood(command: list[str], variables: list[str]) -> None:
    """The program has such a command with such options, and reads such variables of its environment."""
    program, rest = Path(command[0]).name, command[1:]
    assert program in PROGRAMS, f"{program} is none of {sorted(PROGRAMS)}"
    words: list[str] = []
    for word in rest:
        if word.startswith("-"):
            break
        words.append(word)
    said = help_of(program, *words)
    for option in (word.split("=")[0] for word in rest if word.startswith("--")):
        assert re.search(rf"{option}\b", said), f"{program} has no {option}"
    for variable in variables:
        # Not shown by the help: the filter of logs is every program's.
        assert variable in said or variable in ("DSEC_LOG", "DSEC_CONFIG"), f"{program} does not read {variable}"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_a_program_as_it_is(unit: Path) -> None:
    text = unit.read_text()
    [command] = re.findall(r"^ExecStart=(.*)$", text, re.M)
    variables = [word.split("=")[0] for line in re.findall(r"^Environment=(.*)$", text, re.M) for word in shlex.split(line)]
    # Those of the files that the unit names are in its comment.
    variables += re.findall(r"^#.*?\b(DSEC_[A-Z_]+)", text, re.M)
    understood(shlex.split(command), variables)
    checked = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    # The programs are not installed here, and that is all that it may find.
    wrong = [line for line in checked.stderr.splitlines() if unit.name in line and "is not executable" not in line]
    assert not wrong, wrong


def manifest() -> dict[tuple[str, str], dict[str, Any]]:
    documents = yaml.safe_load_all((ROOT / "packaging/kubernetes/dsec.yaml").read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for (kind, name), document in manifest().items():
        if kind in ("Deployment", "DaemonSet"):
            yield name, document["spec"]


def containers() -> Iterator[dict[str, Any]]:
    for _, spec in pods():
        pod = spec["template"]["spec"]
        yield from (*pod.get("initContainers", ()), *pod["containers"])


def test_the_manifest_starts_the_programs_as_they_are() -> None:
    started = []
    handed_on = [name for each in containers() for name in re.findall(r"\b(DSEC_JOIN_[A-Z]+)=", each["args"][0])]
    assert len(handed_on) == 2
    for container in containers():
        variables = [each["name"] for each in container.get("env", ()) if each["name"].startswith("DSEC_")]
        if container["command"][0] != "sh":
            commands = [[*container["command"], *container["args"]]]
        else:
            [script] = container["args"]
            subprocess.run(["sh", "-n", "-c", script], check=True)
            commands = [shlex.split(line) for line in re.findall(r"(?:exec |\$\()(dsec[^\n)]*)", script)]
        for command in commands:
            understood(command, handed_on if command[0] == "dsec-edge" else variables)
            started.append(command[0])
    assert started == ["dsec-control", "dsec", "dsec-edge"]


def test_what_the_manifest_refers_to_is_there() -> None:
    said = (ROOT / "docs/operations/kubernetes.md").read_text()
    for name, spec in pods():
        pod = spec["template"]["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"] == {"app": name}
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            for variable in container.get("env", ()):
                secret = variable.get("valueFrom", {}).get("secretKeyRef")
                assert secret is None or (secret["name"] == "dsec" and secret["key"] in said), variable
    service = manifest()["Service", "dsec"]["spec"]
    assert service["selector"] == {"app": "dsec-control"}
    [port] = service["ports"]
    control = manifest()["Deployment", "dsec-control"]["spec"]["template"]["spec"]["containers"][0]
    assert port["targetPort"] in {each["name"] for each in control["ports"]}


def test_the_configuration_of_the_manifest_and_of_the_guide_is_taken(tmp_path: Path) -> None:
    guide = (ROOT / "docs/operations/cluster.md").read_text()
    edges = [manifest()["ConfigMap", "dsec"]["data"]["edge.toml"]]
    edges += re.findall(r"edge\.toml <<'END'\n(.*?)END", guide, re.S)
    assert len(edges) == 2
    for number, text in enumerate(edges):
        path = tmp_path / f"edge{number}.toml"
        text = text.replace("NODE_NAME", "n1").replace("HOST_IP", "10.0.0.1").replace("/var/lib/dsec", str(tmp_path / "state"))
        path.write_text(text)
        done = subprocess.run([str(BIN / "dsec-edge"), "doctor", "--config", str(path)], capture_output=True, text=True)
        assert "unknown field" not in done.stderr and "is not" not in done.stderr, done.stderr
        path.write_text(text + "\nodd = 1\n")
        odd = subprocess.run([str(BIN / "dsec-edge"), "doctor", "--config", str(path)], capture_output=True, text=True)
        assert "odd" in odd.stderr, "a setting that there is none of is taken"
    [control] = re.findall(r"control\.toml <<'END'\n(.*?)END", guide, re.S)
    path = tmp_path / "control.toml"
    path.write_text(control)
    command = [str(BIN / "dsec-control"), "--config", str(path), "--database", "postgres://dsec@db/dsec", "--check"]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0 and 'listen = "0.0.0.0:7420"' in checked.stdout, checked.stderr
