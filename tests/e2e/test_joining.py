"""Machines that join a control over the network: each in namespaces of its own, with a cable to the machine of control."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cluster import Machine, connect, machine
from platform_under_test import BIN, Platform, made_inside, until
from test_shared_store import busybox

#: Where control listens; each cable has this end.
CONTROL = "https://10.77.0.1:7420"
KEY = "dsec_of-this-test"
#: Sandboxes until each of two nodes has one.
TRIES = 40


@contextmanager
def control_on(host: Machine, work: Path) -> Iterator[Platform]:
    """A `dsec-control` without a node of its own, with a cluster that others may join."""
    work.mkdir(mode=0o700)
    sha256 = hashlib.sha256(KEY.encode()).hexdigest()
    key = {"id": "k", "project": "root", "name": "t", "sha256": sha256, "created_ms": 1}
    (work / "keys.json").write_text(json.dumps({"keys": [key]}))
    options = [f"--listen={CONTROL.removeprefix('https://')}", f"--keys-file={work}/keys.json"]
    options += [f"--cluster-dir={work}/cluster", f"--tls-self-made={work}/tls"]
    env = {**os.environ, "NO_COLOR": "1", "DSEC_URL": CONTROL, "DSEC_API_KEY": KEY, "DSEC_CA_FILE": f"{work}/tls/ca.pem"}
    running = Platform(work, env, CONTROL, KEY, inside=host.inside())
    with (work / "control.log").open("w") as log:
        command = ["nsenter", "--target", str(host.pid), "--net", "--", str(BIN / "dsec-control"), *options]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log) as process:
            try:
                until(lambda: "no node answers" in running.dsec("status", check=False).stdout, "a control without nodes")
                yield running
            finally:
                process.terminate()


def configure(node: Platform, name: str, store: Path) -> None:
    """What the operator of a node writes before it joins."""
    node.state.mkdir(mode=0o700)
    lines = [f'node = "{name}"', "[store]", f'url = "{store}"', "create = true"]
    (node.state / "edge.toml").write_text("\n".join(lines) + "\n")


def up(node: Platform, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return node.dsec("up", "--detach", "--state-dir", str(node.state), *arguments, check=check)


def readable_by_others(root: Path) -> list[Path]:
    """Files with private keys in them that are not their owner's alone."""
    files = [path for path in root.rglob("*") if path.is_file() and path.stat().st_size < 1 << 20]
    return [path for path in files if path.stat().st_mode & 0o077 and b"PRIVATE KEY" in path.read_bytes()]


def test_machines_join_run_sandboxes_and_leave(tmp_path: Path) -> None:
    with ExitStack() as stack:
        host = stack.enter_context(machine())
        machines = [stack.enter_context(machine()) for _ in range(3)]
        for number, node in enumerate(machines, 1):
            connect(host, node, number)
        control = stack.enter_context(control_on(host, tmp_path / "control"))
        first, second, third = stack.enter_context(made_inside([node.inside() for node in machines]))
        tokens: list[str] = []

        def token(*arguments: str) -> str:
            tokens.append(control.dsec("cluster", "token", *arguments).stdout.strip())
            return tokens[-1]

        assert "no cluster yet" in control.dsec("cluster", "token", check=False).stderr
        control.dsec("cluster", "init")
        for name, node in (("n1", first), ("n2", second)):
            configure(node, name, tmp_path / "store")
            said = up(node, "--join", token("--node", name), "--control", CONTROL)
            assert f"node {name} is up, of the cluster at {CONTROL}" in said.stdout
        until(lambda: len(json.loads(control.dsec("node", "ls", "--json").stdout)) == 2, "both nodes")
        members = json.loads(control.dsec("cluster", "nodes", "--json").stdout)
        assert [(member["node"], member["address"]) for member in members] == [("n1", "10.77.0.2:7421"), ("n2", "10.77.0.3:7421")]

        # Sandboxes on both, over the network.
        (tmp_path / "tools.tar").write_bytes(busybox())
        control.dsec("image", "import", "tools", str(tmp_path / "tools.tar"))
        ran: dict[str, str] = {}
        for _ in range(TRIES):
            made = json.loads(control.dsec("create", "tools", "--json").stdout)
            ran[made["node"]] = made["id"]
            if len(ran) == 2:
                break
        assert set(ran) == {"n1", "n2"}
        for name, sandbox in ran.items():
            assert control.dsec("exec", sandbox, "--", "sh", "-c", f"echo {name}").stdout == f"{name}\n"

        # A token is good once; a copy is refused while the original lives.
        configure(third, "n3", tmp_path / "store")
        refused = up(third, "--join", tokens[1], "--control", CONTROL, check=False)
        assert refused.returncode == 1 and "used already" in refused.stderr
        shutil.rmtree(third.state)
        third.state.mkdir(mode=0o700)
        for name in ("member.json", "edge.toml"):
            text = (second.state / name).read_text().replace(str(second.state), str(third.state))
            (third.state / name).write_text(text)
        (third.state / "member.json").chmod(0o600)
        refused = up(third, check=False)
        assert refused.returncode == 1 and "two edges that live have the identity of node n2" in refused.stderr
        # And so is one that is called otherwise than its certificate.
        refused = up(third, "--node", "n3", check=False)
        assert refused.returncode == 1 and "that of node n2 of a cluster" in refused.stderr
        assert control.dsec("exec", ran["n2"], "--", "sh", "-c", "echo on").stdout == "on\n"

        # A node that is forgotten is none any more, and hears it.
        control.dsec("cluster", "forget", "n1")
        assert [node["node"] for node in json.loads(control.dsec("node", "ls", "--json").stdout)] == ["n2"]
        assert "there is no node n1" in control.dsec("exec", ran["n1"], "--", "true", check=False).stderr
        edge_log = first.state / "log/edge.log"
        until(lambda: "it was forgotten" in edge_log.read_text(), "the forgotten node's word for it")
        assert control.dsec("run", "tools", "--", "sh", "-c", "echo still").stdout == "still\n"

        log = (tmp_path / "control/control.log").read_text()
        for reason in ("used_token", "cloned", "forgotten"):
            assert f'reason="{reason}"' in log, f"control does not log {reason}"
        logs = log + "".join(path.read_text() for node in (first, second, third) for path in node.state.glob("log/*.log"))
        assert "PRIVATE KEY" not in logs and not any(made in logs for made in tokens)
        for root in (tmp_path / "control", first.state, second.state):
            assert not readable_by_others(root)
