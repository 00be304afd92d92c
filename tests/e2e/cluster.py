"""Several nodes behind one control: each an edge, on this machine's namespaces or in some of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from platform_under_test import BIN, ROOT, Platform, free_address, nodes_of_one_store, until

#: Settings of a layer store, as `edge.toml` has them.
Store = dict[str, str | bool]

#: The first process of a machine's namespaces: collects what ends in them, until whoever made them lets go.
INIT = """
import os, select
print(flush=True)
while not select.select([0], [], [], 0.05)[0]:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


@dataclass
class Machine:
    """Mount, network, process, IPC and host name namespaces of their own, as another machine has."""

    #: Its first process, as this machine sees it.
    pid: int

    def inside(self) -> list[str]:
        """What goes before a command that is to run in it."""
        return ["nsenter", "--target", str(self.pid), "--mount", "--net", "--pid", "--ipc", "--uts", "--"]

    def run(self, *command: str) -> None:
        subprocess.run([*self.inside(), *command], check=True, capture_output=True)


@contextmanager
def machine() -> Iterator[Machine]:
    """A machine, until nobody needs it; whatever still runs in it then is ended."""
    new = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--propagation", "private", "--mount-proc"]
    command = [*new, "--fork", "--kill-child", sys.executable, "-c", INIT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin and holder.stdout
        try:
            holder.stdout.readline()
            made = Machine(int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()))
            made.run("ip", "link", "set", "lo", "up")
            yield made
        finally:
            holder.stdin.close()
            holder.wait(timeout=30)


def connect(store: Machine, node: Machine, number: int) -> None:
    """A cable from a node to the machine of the store, which has the same address for all of them."""
    far, near = ("10.77.0.1", f"node{number}"), (f"10.77.0.{number + 1}", "eth0")
    ends = [far[1], "netns", str(store.pid), "type", "veth", "peer", "name", near[1], "netns", str(node.pid)]
    subprocess.run(["ip", "link", "add", *ends], check=True)
    for end, own, other in ((store, far, near), (node, near, far)):
        end.run("ip", "address", "add", own[0], "peer", other[0], "dev", own[1])
        end.run("ip", "link", "set", own[1], "up")


@contextmanager
def slow_store(host: Machine, directory: Path, latency_ms: float, mb_per_s: float) -> Iterator[Store]:
    """Serves a store's directory as a bucket on a machine's network, late and slowly; gives its settings there."""
    command = ["nsenter", "--target", str(host.pid), "--net", "--", str(ROOT / "bench/slow-store"), str(directory)]
    command += ["--host", "10.77.0.1", "--latency-ms", str(latency_ms), "--mb-per-s", str(mb_per_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            endpoint, url = server.stdout.readline().split()
            keys: Store = {"access_key_id": "any", "secret_access_key": "any", "allow_http": True}
            yield {"url": url, "endpoint": endpoint, **keys}
        finally:
            server.terminate()


@dataclass
class Server:
    """A `dsec-control` of several nodes, and a platform to ask through it."""

    running: Platform
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """`kill -9`, and waits until it is gone."""
        self.process.kill()
        self.process.wait(timeout=10)


@contextmanager
def server_of(nodes: list[Platform], database: str = "", settings: str = "") -> Iterator[Server]:
    """A `dsec-control` of all these nodes. `database`: default a file of its own. `settings`: lines of `control.toml`."""
    first, listen = nodes[0], free_address()
    sockets = [f"--node=n{number}={node.state}/run/edge.sock" for number, node in enumerate(nodes, 1)]
    database = f"--database={database or f'sqlite:{first.state}/cluster.db'}"
    command = [str(BIN / "dsec-control"), "--listen", listen, f"--keys-file={first.state}/keys.json", database, *sockets]
    if settings:
        config = first.state / "cluster.toml"
        config.write_text(settings)
        command.append(f"--config={config}")
    url = f"http://{listen}"
    running = Platform(first.state, {**first.env, "DSEC_URL": url, "DSEC_API_KEY": first.key}, url, first.key)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as control:
        try:
            until(lambda: running.dsec("status", check=False).returncode == 0, "the control of several nodes")
            yield Server(running, control)
        finally:
            running.close_clients()
            control.terminate()


@contextmanager
def control_of(nodes: list[Platform]) -> Iterator[Platform]:
    """A `dsec-control` of all these nodes, as a platform to ask through it."""
    with server_of(nodes) as server:
        yield server.running


@contextmanager
def cluster(count: int, store: Store) -> Iterator[tuple[Platform, list[Platform]]]:
    """Nodes n1, n2, ... of one store behind one control."""
    with nodes_of_one_store(count, store) as nodes, control_of(nodes) as control:
        yield control, nodes


@contextmanager
def cluster_of_machines(
    count: int,
    directory: Path,
    latency_ms: float,
    mb_per_s: float,
    settings: Sequence[str] = (),
    control_settings: str = "",
) -> Iterator[tuple[Platform, list[Platform]]]:
    """The same on machines of their own, each with a cable to one that serves the store's directory as a bucket. `settings`: more
    lines of `edge.toml` for each."""
    with ExitStack() as stack:
        host = stack.enter_context(machine())
        machines = [stack.enter_context(machine()) for _ in range(count)]
        for number, node in enumerate(machines, 1):
            connect(host, node, number)
        store = stack.enter_context(slow_store(host, directory, latency_ms, mb_per_s))
        inside = [node.inside() for node in machines]
        nodes = stack.enter_context(nodes_of_one_store(count, store, inside, settings))
        yield stack.enter_context(server_of(nodes, settings=control_settings)).running, nodes


@contextmanager
def most(count: Callable[[], int]) -> Iterator[Callable[[], int]]:
    """Counts again and again; gives the most that there was."""
    highest, over = 0, threading.Event()

    def look() -> None:
        nonlocal highest
        while not over.is_set():
            highest = max(highest, count())
            time.sleep(0.02)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield lambda: highest
    finally:
        over.set()
        watcher.join()
