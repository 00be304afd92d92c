"""Two servers on one PostgreSQL, three machines that have joined, and a load of real sandboxes while parts are cut off, killed, started again and upgraded."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster import Machine, connect, machine, most
from platform_under_test import BIN, PATIENCE, Platform, made_inside, until
from postgres import postgres
from test_fleet import build
from test_shared_store import busybox

#: Where the servers listen; each cable has this end.
HOST, PORTS = "10.77.0.1", (7420, 7430)
KEY = "dsec_of-this-test"
QUOTA = 10


@dataclass
class Servers:
    """Two servers that share all they keep, and their nodes."""

    host: Machine
    work: Path
    database: str
    nodes: list[Platform]
    processes: dict[int, subprocess.Popen[bytes]]

    def start(self, port: int) -> None:
        command = ["nsenter", "--target", str(self.host.pid), "--net", "--", str(BIN / "dsec-control")]
        options = [f"--listen={HOST}:{port}", f"--keys-file={self.work}/keys.json", f"--database={self.database}"]
        with (self.work / f"control-{port}.log").open("a") as log:
            process = subprocess.Popen([*command, *options], stdin=subprocess.DEVNULL, stderr=log)
        self.processes[port] = process
        # With nodes or, before they have joined, without.
        until(lambda: self.at(port).dsec("whoami", check=False).returncode == 0, f"the server at {port}")

    def kill(self, port: int) -> None:
        self.processes[port].kill()
        self.processes[port].wait(timeout=10)

    def at(self, port: int, key: str = KEY) -> Platform:
        """One of them, to ask."""
        url = f"http://{HOST}:{port}"
        env = {**os.environ, "NO_COLOR": "1", "DSEC_URL": url, "DSEC_API_KEY": key}
        return Platform(self.work, env, url, key, inside=self.host.inside())

    def cut(self, number: int) -> None:
        self.host.run("ip", "link", "set", f"node{number}", "down")

    def mend(self, number: int) -> None:
        self.host.run("ip", "link", "set", f"node{number}", "up")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    """Nodes n1, n2 and n3 have joined; a project of `QUOTA` sandboxes is there."""
    with postgres(over_socket=True) as database, ExitStack() as stack:
        host = stack.enter_context(machine())
        machines = [stack.enter_context(machine()) for _ in range(3)]
        for number, node in enumerate(machines, 1):
            connect(host, node, number)
        work = tmp_path / "control"
        work.mkdir(mode=0o700)
        sha256 = hashlib.sha256(KEY.encode()).hexdigest()
        key = {"id": "k", "project": "root", "name": "t", "sha256": sha256, "created_ms": 1}
        (work / "keys.json").write_text(json.dumps({"keys": [key]}))
        nodes = stack.enter_context(made_inside([node.inside() for node in machines]))
        made = Servers(host, work, database, nodes, {})
        try:
            for port in PORTS:
                made.start(port)
            first, second = (made.at(port) for port in PORTS)
            first.dsec("cluster", "init")
            for number, node in enumerate(nodes, 1):
                node.state.mkdir(mode=0o700)
                store = f'[store]\nurl = "{tmp_path}/store"\ncreate = true\n'
                (node.state / "edge.toml").write_text(f'node = "n{number}"\n{store}')
                # A token of one server is good at the other.
                token = second.dsec("cluster", "token", "--node", f"n{number}").stdout.strip()
                join = ("--join", token, "--control", f"https://{HOST}:{PORTS[0]}")
                node.dsec("up", "--detach", "--state-dir", str(node.state), *join)
            for server in (first, second):
                until(lambda server=server: names(server) == {"n1", "n2", "n3"}, "the nodes, at either server")  # type: ignore[misc]
            (tmp_path / "tools.tar").write_bytes(busybox())
            first.dsec("image", "import", "tools", str(tmp_path / "tools.tar"))
            yield made
        finally:
            for process in made.processes.values():
                process.terminate()
                process.wait(timeout=30)


def names(server: Platform) -> set[str]:
    """The nodes that answer a server."""
    return {node["node"] for node in json.loads(server.dsec("node", "ls", "--json", check=False).stdout or "[]")}


def team(servers: Servers) -> str:
    """A key of a project with a quota."""
    root = servers.at(PORTS[0])
    root.dsec("project", "create", "root/rl", "--quota", f"sandboxes={QUOTA}")
    identity = root.dsec("--project", "root/rl", "identity", "create", "trainer").stdout.strip()
    root.dsec("--project", "root/rl", "grant", "add", identity, "--role", "runtime")
    return root.dsec("key", "create", identity, "--name", "load").stdout.strip()


@contextmanager
def load(servers: Servers, key: str, workers: int) -> Iterator[Callable[[], dict]]:  # type: ignore[type-arg]
    """Workers through both servers. Gives what ends them and says what came of it."""
    stop = servers.work / "stop"
    urls = [f"http://{HOST}:{port}" for port in PORTS]
    command = [sys.executable, str(Path(__file__).with_name("load.py")), str(stop), str(workers), *urls]
    inside = ["nsenter", "--target", str(servers.host.pid), "--net", "--"]
    env = {**os.environ, "DSEC_API_KEY": key}
    with subprocess.Popen([*inside, *command], stdout=subprocess.PIPE, env=env, text=True) as running:

        def end() -> dict:  # type: ignore[type-arg]
            stop.touch()
            out, _ = running.communicate(timeout=300 * PATIENCE)
            said: dict = json.loads(out.splitlines()[-1])  # type: ignore[type-arg]
            return said

        try:
            yield end
        finally:
            stop.touch()
            running.kill()


def live() -> int:
    """Sandboxes that this machine's kernel has cgroups of."""
    return len({path.name for path in Path("/sys/fs/cgroup").glob("pids/dsec-*/*/")})


def test_a_load_of_sandboxes_outlives_cuts_kills_restarts_and_an_upgrade(servers: Servers, tmp_path: Path) -> None:
    key = team(servers)
    first, second = PORTS
    with most(live) as most_live, load(servers, key, workers=14) as end:
        time.sleep(4)
        # A machine is cut off for longer than it takes to be avoided, and comes back before it is given up.
        servers.cut(3)
        time.sleep(9)
        servers.mend(3)
        time.sleep(2)
        # A server dies in the midst of it; the other takes what is its.
        servers.kill(second)
        time.sleep(3)
        servers.start(second)
        # An edge dies; what its sandboxes run goes on.
        edges = [node["pid"] for node in json.loads(servers.at(first).dsec("node", "ls", "--json").stdout)]
        assert len(edges) == 3
        edge = edge_of(servers.nodes[0])
        os.kill(edge, signal.SIGKILL)
        until(lambda: edge_of(servers.nodes[0]) not in (0, edge), "a new edge after kill -9")
        time.sleep(2)
        # All nodes become another release, one after the other.
        report = servers.at(second).dsec("fleet", "upgrade", str(build(tmp_path / "good", b"good")), "--batch", "1", "--json").stdout
        assert [node["outcome"] for node in json.loads(report)["nodes"]] == ["changed"] * 3, report
        time.sleep(2)
        done = end()
    assert done["wrong"] == []
    assert done["whole"] == len(done["made"]) >= 3 * QUOTA, done
    assert done["refused"] > 0, "the quota was never used up"
    assert QUOTA // 2 < most_live() <= QUOTA, f"{most_live()} sandboxes on a quota of {QUOTA}"
    # One sandbox a create, and none left.
    ended = json.loads(servers.at(first).dsec("ps", "--all", "--json").stdout)
    of_load = [(each["labels"]["load"], each["id"]) for each in ended if "load" in each["labels"]]
    assert sorted(of_load) == sorted(done["made"].items())
    until(lambda: json.loads(servers.at(second).dsec("ps", "--json").stdout) == [], "no sandbox lives")


def edge_of(node: Platform) -> int:
    """Process id of a node's edge, as this machine sees it; 0: there is none."""
    found = subprocess.run(["pgrep", "-f", f"dsec-edge run .*{node.state}"], capture_output=True, text=True)
    return int(found.stdout.split()[0]) if found.stdout else 0
