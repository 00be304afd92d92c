"""A node that hangs until it is lost: what is said of its sandboxes meanwhile, and that they are what they were when it is back."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from libdsec import DSecContainerRunArgs, Unavailable
from libdsec.sync import DSecClient

from cluster import cluster
from platform_under_test import BIN, PATIENCE, Platform, free_address, until
from test_shared_store import busybox

#: 15 reports of a node that hangs, of some seconds each.
LOST_S = 120


@contextmanager
def hung(edge: int) -> Iterator[None]:
    """Has an edge take connections and answer nothing, as a machine that was cut off would."""
    os.kill(edge, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(edge, signal.SIGCONT)


@contextmanager
def another_server(nodes: list[Platform], database: Path) -> Iterator[DSecClient]:
    """A server of the same nodes that starts now; nothing is waited for."""
    listen, first = free_address(), nodes[0]
    sockets = [f"--node=n{number}={node.state}/run/edge.sock" for number, node in enumerate(nodes, 1)]
    command = [str(BIN / "dsec-control"), "--listen", listen, f"--keys-file={first.state}/keys.json"]
    command += [f"--database=sqlite:{database}", *sockets]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as server:
        try:
            with DSecClient(f"http://{listen}", first.key, retry_for=30) as client:
                yield client
        finally:
            server.terminate()


def test_sandboxes_of_a_lost_node_are_told_and_are_there_when_it_is_back(tmp_path: Path) -> None:
    with cluster(2, {"url": str(tmp_path / "store"), "create": True}) as (control, nodes):
        control.client().images.import_("tools", busybox())
        args = DSecContainerRunArgs(
            container_image="tools", memory_limit_mb=64, cpu_cores_limit=0.5, task_id="job", ttl_running_stop=3600
        )
        made = [control.client().run_container(args, keep=True) for _ in range(10)]
        there = {sandbox.id: sandbox.info.node for sandbox in made}
        theirs = sorted(name for name, node in there.items() if node == "n2")
        assert 0 < len(theirs) < 10
        one = theirs[0]
        command = control.client().get(one).start(["sh", "-c", "sleep 5; echo through"])

        client = DSecClient(control.url, control.key, timeout=30, retry_for=1)
        with ExitStack() as stack:
            stack.enter_context(client)
            other = stack.enter_context(another_server(nodes, tmp_path / "other.db"))
            for server in (client, other):
                until(lambda: server.counts(task_id="job").sandboxes.running == 10, "the servers heard of all")  # noqa: B023
            stack.enter_context(hung(nodes[1].edge_pid()))
            # Silent is not lost: they are listed as they were.
            listed = {sandbox.id: sandbox.state for sandbox in client.list(task_id="job")}
            assert listed == dict.fromkeys(there, "running")
            assert client.counts().sandboxes.lost == 0

            until(lambda: client.counts().nodes["n2"].health == "lost", "the node is lost", LOST_S)
            began = time.monotonic()
            states = {sandbox.id: sandbox.state for sandbox in client.list(task_id="job", page=3)}
            assert states == {name: "lost" if node == "n2" else "running" for name, node in there.items()}
            assert sorted(sandbox.id for sandbox in client.list(state="lost")) == theirs
            lost = client.get(one).info
            assert (lost.state, lost.image, lost.task_id) == ("lost", "tools", "job")
            assert lost.lost and lost.lost.last_state == "running"
            assert time.time() - LOST_S * PATIENCE < lost.lost.heard_ms / 1000 < time.time()
            counts = client.counts(task_id="job")
            assert (counts.sandboxes.lost, counts.tasks["job"].lost) == (len(theirs), len(theirs))
            assert (counts.sandboxes.running, counts.gathering) == (10 - len(theirs), False)
            assert client.task("job").sandboxes.lost == len(theirs)
            for act in (lambda: client.get(one).run_shell("true"), lambda: client.get(one).stop()):
                with pytest.raises(Unavailable, match="node n2 is lost"):
                    act()
            # What lives is ended; for what is lost nobody waits.
            stopped = client.stop_task("job")
            assert (stopped.done, [failure.node for failure in stopped.failures]) == (10 - len(theirs), ["n2"])
            assert client.wait_task("job", timeout=20) == len(theirs)
            assert time.monotonic() - began < 30 * PATIENCE, "what hangs held up what does not"
            shown = control.dsec("ps", "--state", "lost", "--quiet")
            assert sorted(shown.stdout.split()) == theirs and "do not answer: n2" in shown.stderr
            status = control.dsec("status").stdout
            assert f"{len(theirs)} lost" in status and "node n2 is lost: last heard of" in status

            # Another server heard of the node before it hung; one that starts now did not.
            heard = other.counts(node="n2").sandboxes
            assert heard.running + heard.lost == len(theirs)
            with another_server(nodes, tmp_path / "fresh.db") as fresh:
                gathering = fresh.counts()
                assert (gathering.gathering, gathering.uncounted) == (True, ("n2",))
                assert gathering.nodes["n2"].sandboxes.lost == 0

        # Back: they are what they were, and what ran in them has gone on.
        with DSecClient(control.url, control.key, timeout=60) as client:
            wanted = {"running": len(theirs), "stopped": 10 - len(theirs)}
            states = lambda: Counter(sandbox.state for sandbox in client.list(task_id="job"))  # noqa: E731
            until(lambda: states() == wanted, "the sandboxes of the node that is back", 60)
            assert client.counts().sandboxes.lost == 0
            assert client.get(one).info.lost is None
            assert client.get(one).run_shell("echo on").stdout == "on\n"
            assert command.wait().stdout == "through\n"
            assert client.stop_task("job").done == len(theirs)
            assert client.wait_task("job", timeout=30) == 0
