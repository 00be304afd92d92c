"""Other programs and configurations for nodes that work: nothing that runs is harmed, and a node that is not well goes back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libdsec import DSecContainerRunArgs
from libdsec.sync import DSecClient, Process, Sandbox

from cluster import connect, control_of, machine
from platform_under_test import BIN, PATIENCE, Platform, made_inside, nodes_of_one_store, until
from previous_release import previous_release
from test_joining import CONTROL, configure, control_on, up
from test_shared_store import busybox

IMAGE = "tools"
PROGRAMS = ("dsec-aether", "dsec-edge", "dsec-fill")
#: Writes a numbered line twenty times a second until it is told to stop.
LINES = "i=0; while [ ! -e /stop ]; do i=$((i+1)); echo $i; sleep 0.05; done"


def args(**more: Any) -> DSecContainerRunArgs:
    """A sandbox that costs little."""
    return DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=64, cpu_cores_limit=0.5, **more)


def pids(control: Platform) -> dict[str, int]:
    """Process ids of the edges that answer, as their machines number them."""
    try:
        return {node["node"]: int(node["pid"]) for node in control.nodes()}
    except OSError:
        return {}


def build(directory: Path, mark: bytes) -> Path:
    """A release of these programs that is another build: each has some bytes more."""
    directory.mkdir()
    for program in PROGRAMS:
        shutil.copy2(BIN / program, directory / program)
        with (directory / program).open("ab") as file:
            file.write(mark)
    return directory


def broken(directory: Path, when_run: str) -> Path:
    """A release whose edge starts for everything but its work."""
    build(directory, when_run.encode())
    script = f'#!/bin/sh\ncase "$1" in run) {when_run};; *) exec {BIN}/dsec-edge "$@";; esac\n'
    (directory / "dsec-edge").write_text(script)
    return directory


def fleet(control: Platform, *arguments: str) -> list[dict[str, Any]]:
    """`dsec fleet status`, or the nodes of a rollout's report."""
    said = json.loads(control.dsec("fleet", *(arguments or ("status",)), "--json").stdout)
    nodes: list[dict[str, Any]] = said["nodes"] if arguments else said
    return nodes


@dataclass
class Load:
    """Sandboxes that write numbered lines, and callers that make, use and end others all the time."""

    client: DSecClient
    writers: list[tuple[Sandbox, Process]] = field(default_factory=list)
    made: int = 0
    commands: int = 0
    failures: list[BaseException] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def again_and_again(self, work: Callable[[], None]) -> None:
        while not self.over.is_set():
            try:
                work()
            except BaseException as error:
                self.failures.append(error)
                return

    def make_use_and_end(self) -> None:
        sandbox = self.client.run_container(args())
        assert sandbox.run_shell("echo made").stdout == "made\n"
        sandbox.stop()
        self.made += 1

    def use(self) -> None:
        for sandbox, _ in self.writers:
            number = self.commands
            # In one request, and in several.
            for limit in (20, 60):
                assert sandbox.run_shell(f"sleep 0.02; echo {number}", timeout=limit).stdout == f"{number}\n"
            self.commands += 1

    def use_slowly(self) -> None:
        """A command that takes longer than an edge waits for it."""
        for sandbox, _ in self.writers:
            assert sandbox.run_shell("sleep 4; echo slow", timeout=20).stdout == "slow\n"

    @contextmanager
    def callers(self) -> Iterator[None]:
        """Callers from here to there, none of whom may see a failure."""
        self.over.clear()
        works = (self.make_use_and_end, self.use, self.use_slowly)
        threads = [threading.Thread(target=self.again_and_again, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        try:
            self.goes_on()
            yield
            self.goes_on()
        finally:
            self.over.set()
            for thread in threads:
                thread.join()
        assert not self.failures, self.failures

    def goes_on(self) -> None:
        """More is made and used than until now, without a failure."""
        made, commands = self.made, self.commands
        until(
            lambda: self.failures or (self.made > made + 2 and self.commands > commands + 6),
            "the load to go on",
            60,
        )
        assert not self.failures, self.failures


@contextmanager
def load(control: Platform, writers: int) -> Iterator[Load]:
    """Sandboxes that write all the time; in the end every line that was written must have been kept."""
    running = Load(control.client(timeout=120))
    for _ in range(writers):
        sandbox = running.client.run_container(args(), keep=True)
        running.writers.append((sandbox, sandbox.start(shell=LINES)))
    yield running
    for sandbox, process in running.writers:
        assert sandbox.run_shell("echo > /stop").ok
        result = process.wait(timeout=60 * PATIENCE)
        lines = result.stdout.splitlines()
        assert result.exit_code == 0 and len(lines) > 40
        assert lines == [str(number) for number in range(1, len(lines) + 1)], "a line was lost"
        sandbox.stop()


@contextmanager
def three_nodes(tmp_path: Path) -> Iterator[tuple[Platform, list[Platform]]]:
    """Three nodes in namespaces of their own behind one control."""
    with ExitStack() as stack:
        machines = [stack.enter_context(machine()) for _ in range(3)]
        store: dict[str, str | bool] = {"url": str(tmp_path / "store"), "create": True}
        nodes = stack.enter_context(nodes_of_one_store(3, store, [node.inside() for node in machines]))
        control = stack.enter_context(control_of(nodes))
        control.client().images.import_(IMAGE, busybox())
        yield control, nodes


def test_upgrades_under_load_lose_nothing_and_a_broken_one_ends_at_the_first_node(tmp_path: Path) -> None:
    good, crashes = build(tmp_path / "good", b"good"), broken(tmp_path / "crashes", "exit 1")
    stands_still = broken(tmp_path / "stands-still", "exec sleep 1000")
    dead = broken(tmp_path / "dead", "exit 1")
    (dead / "dsec-fill").write_text("#!/bin/sh\nexit 1\n")
    with three_nodes(tmp_path) as (control, nodes), load(control, 9) as running:
        assert {sandbox.info.node for sandbox, _ in running.writers} == {"n1", "n2", "n3"}
        before = pids(control)
        assert {node["running"] for node in fleet(control)} == {"installed"}
        would = fleet(control, "upgrade", str(good), "--dry-run")
        assert [node["outcome"] for node in would] == ["would_change"] * 3

        with running.callers():
            done = fleet(control, "upgrade", str(good), "--batch", "1")
        assert [node["outcome"] for node in done] == ["changed"] * 3, done
        [release] = {node["running"] for node in fleet(control)}
        assert release.startswith("0.1.0-")
        # The same process, so that whoever keeps it running has nothing to do with it.
        assert pids(control) == before
        for node in nodes:
            assert os.readlink(node.state / "run/dsec-fill") == f"{node.state}/releases/{release}/dsec-fill"
        assert [node["outcome"] for node in fleet(control, "upgrade", str(good))] == ["had"] * 3

        # One that does not start is not even begun; one that ends at once, or stands still, is gone back from.
        def is_gone_back_from(directory: Path, why: str, *options: str) -> None:
            refused = control.dsec("fleet", "upgrade", str(directory), "--batch", "1", *options, check=False)
            assert refused.returncode == 1, refused.stdout
            assert "node n1 did not take it" in refused.stderr and why in refused.stderr, refused.stderr
            assert "2 were not begun" in refused.stderr
            # A node that was silent for long is asked again within a second of being back.
            stands = until(lambda: len(seen := fleet(control)) == 3 and seen, "all three nodes")
            assert {node["running"] for node in stands} == {release}, directory
            assert [node.get("trial") for node in stands] == [None] * 3

        with running.callers():
            is_gone_back_from(dead, "dsec-fill")
            is_gone_back_from(crashes, "ended before it was known to be good")
        # Its node is away for longer than anybody waits for.
        is_gone_back_from(stands_still, "was not well within 3 s", "--health-timeout", "3s")
        # Over a start of the edge by its supervisor, and back to what was there before.
        killed = pids(control)["n1"]
        os.kill(host_pid(nodes[0], killed), signal.SIGKILL)
        until(lambda: pids(control).get("n1", killed) != killed, "another edge of n1")
        assert {node["running"] for node in fleet(control)} == {release}
        with running.callers():
            done = fleet(control, "rollback", "--batch", "2")
        assert [node["outcome"] for node in done] == ["changed"] * 3, done
        assert {node["running"] for node in fleet(control)} == {"installed"}
        log = control.dsec("audit", "--json").stdout
        assert "POST /v1/nodes/{node}/release/try" in log and "PUT /v1/nodes/{node}/releases/{release}" in log


def test_a_configuration_comes_to_all_nodes_and_a_bad_one_to_none(tmp_path: Path) -> None:
    change = tmp_path / "change.toml"
    with three_nodes(tmp_path) as (control, nodes):
        sandbox = control.client().run_container(args())
        process = sandbox.start(shell=LINES)
        texts = [(node.state / "edge.toml").read_text() for node in nodes]
        for text, why in (("max_sandboxes = 0", "max_sandboxes"), ('node = "x"', "node is the node's own"), ("nonsense = 1", "nonsense")):
            change.write_text(text)
            refused = control.dsec("fleet", "config", str(change), check=False)
            assert refused.returncode == 1 and why in refused.stderr + refused.stdout, refused.stderr
            assert [(node.state / "edge.toml").read_text() for node in nodes] == texts
        # An operator of nodes may do this, and may not send programs: whoever may is root on the nodes.
        iam = control.client().iam
        operator = iam.create_identity("operator", project="root").identity
        iam.grant(operator, permissions=["node.read", "node.manage"], project="root")
        key = ["--api-key", iam.create_key(operator, "test").key or ""]
        refused = control.dsec("fleet", "upgrade", str(build(tmp_path / "good", b"good")), *key, check=False)
        assert refused.returncode == 1 and "the key may not" in refused.stderr + refused.stdout, refused.stderr
        assert {(node["running"], len(node["stored"])) for node in fleet(control)} == {("installed", 0)}
        change.write_text("max_sandboxes = 77\n[labels]\npool = 'a'\n")
        done = fleet(control, "config", str(change), "--batch", "50%", *key)
        assert [node["outcome"] for node in done] == ["changed"] * 3, done
        listed = json.loads(control.dsec("node", "ls", "--json").stdout)
        assert {(node["sandboxes_max"], node["labels"]["pool"]) for node in listed} == {(77, "a")}
        assert sorted(node["labels"]["rack"] for node in listed) == ["r1", "r2", "r3"]
        assert [node["outcome"] for node in fleet(control, "config", str(change))] == ["had"] * 3
        sandbox.run_shell("echo > /stop")
        lines = process.wait(timeout=60).stdout.splitlines()
        assert lines == [str(number) for number in range(1, len(lines) + 1)]
        sandbox.stop()


def test_a_node_that_has_joined_over_the_network_is_upgraded(tmp_path: Path) -> None:
    good, crashes = build(tmp_path / "good", b"good"), broken(tmp_path / "crashes", "exit 1")
    with ExitStack() as stack:
        host, node_machine = (stack.enter_context(machine()) for _ in range(2))
        connect(host, node_machine, 1)
        control = stack.enter_context(control_on(host, tmp_path / "control"))
        [node] = stack.enter_context(made_inside([node_machine.inside()]))
        control.dsec("cluster", "init")
        configure(node, "n1", tmp_path / "store")
        up(node, "--join", control.dsec("cluster", "token").stdout.strip(), "--control", CONTROL)
        until(lambda: len(json.loads(control.dsec("node", "ls", "--json").stdout)) == 1, "the node")
        (tmp_path / "tools.tar").write_bytes(busybox())
        control.dsec("image", "import", IMAGE, str(tmp_path / "tools.tar"))
        sandbox = control.dsec("create", IMAGE).stdout.strip()
        [done] = fleet(control, "upgrade", str(good))
        assert done["outcome"] == "changed", done
        assert control.dsec("exec", sandbox, "--", "sh", "-c", "echo on").stdout == "on\n"
        refused = control.dsec("fleet", "upgrade", str(crashes), check=False)
        assert refused.returncode == 1 and "ended before it was known to be good" in refused.stderr, refused.stderr
        assert control.dsec("exec", sandbox, "--", "sh", "-c", "echo on").stdout == "on\n"
        assert (node.state / "releases").stat().st_mode & 0o777 == 0o700


def test_the_previous_release_works_with_this_control_and_is_taken_over_by_this_edge(tmp_path: Path) -> None:
    """A node of the release before this one behind this control; then its programs are replaced where they are installed."""
    installed = tmp_path / "installed"
    installed.mkdir()
    for program in ("dsec", "dsec-control", *PROGRAMS):
        shutil.copy2((previous_release() if program in PROGRAMS else BIN) / program, installed / program)
    with ExitStack() as stack:
        machines = [stack.enter_context(machine()) for _ in range(2)]
        old, new = stack.enter_context(made_inside([node.inside() for node in machines]))
        old.programs = installed
        for name, node in (("n1", old), ("n2", new)):
            configure(node, name, tmp_path / "store")
            node.up()
        control = stack.enter_context(control_of([old, new]))
        client = control.client()
        client.images.import_(IMAGE, busybox())
        sandboxes = on_both(client)
        processes = {name: sandbox.start(shell=LINES) for name, sandbox in sandboxes.items()}
        everything(client, sandboxes)
        stands = {node["node"]: node for node in fleet(control)}
        assert "error" in stands["n1"] and stands["n2"]["running"] == "installed"
        refused = control.dsec("fleet", "upgrade", str(build(tmp_path / "good", b"good")), check=False)
        assert refused.returncode == 1 and "cannot be changed from afar" in refused.stderr, refused.stderr

        # By hand, once. Its sandboxes keep the agent that they were started with.
        for program in PROGRAMS:
            shutil.copy2(BIN / program, installed / f"{program}.new")
            (installed / f"{program}.new").rename(installed / program)
        edge = pids(control)["n1"]
        os.kill(host_pid(old, edge), signal.SIGTERM)
        until(lambda: pids(control).get("n1", edge) != edge, "this edge in the place of the previous one")
        everything(client, sandboxes)
        done = fleet(control, "upgrade", str(tmp_path / "good"))
        assert [node["outcome"] for node in done] == ["changed"] * 2, done
        everything(client, sandboxes)
        for name, sandbox in sandboxes.items():
            sandbox.run_shell("echo > /stop")
            lines = processes[name].wait(timeout=60 * PATIENCE).stdout.splitlines()
            assert lines == [str(number) for number in range(1, len(lines) + 1)], name
        assert client.stop_task("both").ok


def host_pid(node: Platform, pid: int) -> int:
    """The process of a node's namespaces as this machine numbers it."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines, command = status.read_text().splitlines(), (status.parent / "cmdline").read_text()
        except OSError:
            continue
        numbers = [line.split()[-1] for line in lines if line.startswith("NSpid")]
        if str(node.state) in command and numbers == [str(pid)]:
            return int(status.parent.name)
    raise AssertionError(f"no process {pid} of {node.state}")


def on_both(client: DSecClient) -> dict[str, Sandbox]:
    """A sandbox on each of two nodes."""
    found: dict[str, Sandbox] = {}
    for _ in range(40):
        sandbox = client.run_container(args(task_id="both"), keep=True)
        found[sandbox.info.node] = sandbox
        if len(found) == 2:
            return found
    raise AssertionError(f"every sandbox went to {set(found)}")


def everything(client: DSecClient, sandboxes: dict[str, Sandbox]) -> None:
    """What a rollout does in a sandbox, in each of these, and new ones on both nodes."""
    fresh = {f"new-{name}": sandbox for name, sandbox in on_both(client).items()}
    for name, sandbox in {**sandboxes, **fresh}.items():
        assert sandbox.run_shell("echo $0; cat", stdin="in").stdout.endswith("in"), name
        sandbox.files.write("/file", name.encode())
        assert sandbox.files.read("/file") == name.encode()
        session = sandbox.session("work")
        session.run_shell("cd /bin && X=kept")
        assert session.run_shell("echo $PWD $X").stdout == "/bin kept\n"
        assert sandbox.info.node in name
    assert {node.node for node in client.nodes()} == {"n1", "n2"}
    for name in ("n1", "n2"):
        client.cordon_node(name)
        client.uncordon_node(name)
