"""Two servers on one PostgreSQL before three nodes: what one lets in the other knows of, and one may die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from libdsec import DSecContainerRunArgs, DSecError, PermissionDenied, ResourceExhausted, Unauthenticated
from libdsec.sync import DSecClient

from cluster import Server, most, server_of
from platform_under_test import PATIENCE, Platform, nodes_of_one_store, until
from postgres import postgres
from test_shared_store import busybox

IMAGE = "tools"


def args(task: str = "job", **more: object) -> DSecContainerRunArgs:
    """A sandbox that costs little."""
    given = {"container_image": IMAGE, "memory_limit_mb": 64, "cpu_cores_limit": 0.5, "task_id": task, **more}
    return DSecContainerRunArgs(**given)  # type: ignore[arg-type]


@dataclass
class Replicas:
    """Two servers, their nodes and their database."""

    servers: list[Server]
    nodes: list[Platform]
    database: str

    @contextmanager
    def both(self, key: str) -> Iterator[list[DSecClient]]:
        """A client of each, with a key."""
        with ExitStack() as stack:
            clients = [DSecClient(it.running.url, key, timeout=60, retry_for=2) for it in self.servers]
            yield [stack.enter_context(client) for client in clients]

    def live(self, task: str) -> list[str]:
        """Ids of the sandboxes of a task that run, as the nodes themselves know them."""
        found = []
        for node in self.nodes:
            with DSecClient(node.url, node.key) as client:
                found += [sandbox.id for sandbox in client.list(state=("creating", "running"), task_id=task)]
        return found


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    store = {"url": str(tmp_path / "store"), "create": True}
    with postgres() as database, nodes_of_one_store(3, store) as nodes, ExitStack() as stack:
        servers = [stack.enter_context(server_of(nodes, database)) for _ in range(2)]
        servers[0].running.client().images.import_(IMAGE, busybox())
        yield Replicas(servers, nodes, database)


def team(replicas: Replicas, project: str, **quota: int) -> tuple[int, str]:
    """An identity of a project with this quota, and its key."""
    root = replicas.servers[0].running.client()
    root.iam.create_project(project, quota=quota)
    identity = root.iam.create_identity("trainer", project=project).identity
    root.iam.grant(identity, role="runtime", project=project)
    return identity, root.iam.create_key(identity, "test").key or ""


def test_a_quota_holds_over_both_and_can_be_used_up_by_either(replicas: Replicas) -> None:
    _, key = team(replicas, "root/rl", sandboxes=20)
    with replicas.both(key) as clients, most(lambda: len(replicas.live("job"))) as most_live:
        made: list[str] = []

        def one(number: int) -> bool:
            try:
                made.append(clients[number % 2].run_container(args(), keep=True).id)
            except ResourceExhausted:
                return False
            return True

        with ThreadPoolExecutor(16) as pool:
            outcomes = Counter(pool.map(one, range(44)))
        assert outcomes == {True: 20, False: 24}
        # What ended through one can be had through the other at once, to the last.
        for sandbox_id in made[:6]:
            clients[0].get(sandbox_id).stop()
        again = [clients[1].run_container(args(), keep=True) for _ in range(6)]
        for client in clients:
            with pytest.raises(ResourceExhausted):
                client.run_container(args())
        # All by one of them.
        clients[0].stop_task("job")
        alone = [clients[1].run_container(args(), keep=True) for _ in range(20)]
        assert len({sandbox.id for sandbox in (*again, *alone)}) == 26
        until(lambda: most_live() == 20, "the quota in full use")
        assert clients[0].stop_task("job").done == 20
        assert most_live() == 20, "the quota was exceeded"


def test_what_is_revoked_at_one_works_at_neither(replicas: Replicas) -> None:
    identity, key = team(replicas, "root/rl")
    root = replicas.servers[1].running.client()
    with replicas.both(key) as clients:
        sandbox = clients[0].run_container(args())
        assert clients[1].get(sandbox.id).run_shell("echo both").stdout == "both\n"
        root.iam.set_ceiling("root/rl", ["sandbox.read"])
        for client in clients:
            with pytest.raises(PermissionDenied):
                client.get(sandbox.id).run_shell("true")
        root.iam.set_ceiling("root/rl", None)
        [made] = root.iam.identity(identity).keys
        clients[0].stop_task("job")
        root.iam.revoke_key(made.id)
        for client in clients:
            with pytest.raises(Unauthenticated):
                client.tasks()


def test_a_server_that_is_killed_leaks_doubles_and_locks_nothing(replicas: Replicas) -> None:
    _, key = team(replicas, "root/rl", sandboxes=30)
    wanted = 24
    with replicas.both(key) as (dying, living):
        made: dict[int, str] = {}
        failed: list[int] = []
        lock = threading.Lock()

        def one(number: int) -> None:
            labels = {"number": str(number)}
            try:
                sandbox = dying.run_container(args(labels=labels), keep=True, idempotency_key=f"k{number}")
            except DSecError:
                # As a load balancer would: the same create, at the other server.
                while True:
                    try:
                        sandbox = living.run_container(args(labels=labels), keep=True, idempotency_key=f"k{number}")
                        break
                    except ResourceExhausted:
                        time.sleep(0.5)
                with lock:
                    failed.append(number)
            with lock:
                made[number] = sandbox.id
                if len(made) == wanted // 3 and replicas.servers[0].process.poll() is None:
                    replicas.servers[0].process.kill()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(wanted)))
        assert failed, "the server died too late to matter"
        assert sorted(made) == list(range(wanted)) and len(set(made.values())) == wanted
        assert sorted(replicas.live("job")) == sorted(made.values()), "one was doubled or leaked"
        # What the dead one was leased comes back: the quota can be used to the last, and no further.
        more = []

        def fill() -> bool:
            try:
                more.append(living.run_container(args(), keep=True))
            except ResourceExhausted:
                return len(more) == 30 - wanted
            return False

        until(fill, "the quota of the dead server", 60)
        assert len(replicas.live("job")) == 30
        with pytest.raises(ResourceExhausted):
            living.run_container(args())
        assert living.stop_task("job").done == 30
        assert living.run_container(args()).run_shell("echo on").stdout == "on\n"
        living.stop_task("job")


def test_a_node_that_hangs_keeps_its_sandboxes_and_holds_up_nobody(replicas: Replicas) -> None:
    _, key = team(replicas, "root/rl", sandboxes=40)
    with replicas.both(key) as clients:
        before = [clients[number % 2].run_container(args(), keep=True) for number in range(12)]
        hung = [sandbox for sandbox in before if sandbox.info.node == "n2"]
        assert hung, "none went to the node"
        count = ["sh", "-c", "i=0; while [ $i -lt 40 ]; do i=$((i+1)); echo $i; sleep 0.1; done"]
        commands = [sandbox.start(count) for sandbox in hung]
        edge = replicas.nodes[1].edge_pid()
        os.kill(edge, signal.SIGSTOP)
        try:
            # It is found out by two reports that do not come, of three seconds each, and passed over then.
            time.sleep(10 * PATIENCE)
            for number in range(6):
                began = time.monotonic()
                assert clients[number % 2].run_container(args(), keep=True).info.node != "n2"
                assert time.monotonic() - began < 10 * PATIENCE, "a node that hangs held a create up"
        finally:
            os.kill(edge, signal.SIGCONT)
        assert [command.wait().stdout.split()[-1] for command in commands] == ["40"] * len(hung)
        until(lambda: clients[1].run_container(args(), keep=True).info.node == "n2", "the node is used again", 60)
        assert clients[0].stop_task("job").ok
