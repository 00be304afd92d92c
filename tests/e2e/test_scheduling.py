"""Which node takes a sandbox: what its operator says, what a request wants, what a node has left."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from libdsec import DSecContainerRunArgs, ResourceExhausted, Unavailable, Unsupported
from libdsec.sync import DSecClient, Sandbox

from cluster import cluster
from platform_under_test import BIN, IMAGE, Platform, platform, until
from test_shared_store import busybox

Start = Callable[..., Sandbox]


@pytest.fixture
def node(shared: Platform, client: DSecClient) -> Iterator[str]:
    """The name of the only node, which is open again afterwards."""
    name = client.nodes()[0].node
    yield name
    shared.dsec("node", "uncordon", name)


def test_a_cordoned_node_takes_none_and_keeps_what_it_has(
    shared: Platform, client: DSecClient, node: str, start: Start
) -> None:
    sandbox = start()
    assert client.cordon_node(node, reason="a disk is replaced").scheduling.state == "cordoned"
    with pytest.raises(ResourceExhausted, match="cordoned.*a disk is replaced") as refused:
        start()
    assert refused.value.detail == {"short": "cordoned"} and f"dsec node uncordon {node}" in refused.value.hint
    assert sandbox.run_shell("echo still here").stdout == "still here\n"
    assert "cordoned" in shared.dsec("node", "ls").stdout and "cordoned" in shared.dsec("status").stdout
    # Who was sent away must not come back because of a restart.
    shared.kill_edge()
    kept = client.node(node).scheduling
    assert (kept.state, kept.reason) == ("cordoned", "a disk is replaced")
    with pytest.raises(ResourceExhausted):
        start()
    assert client.uncordon_node(node).scheduling.state == "open"
    assert not (shared.state / "scheduling.json").exists()
    assert start().run_shell("true").ok and sandbox.run_shell("true").ok


def test_a_drained_node_has_stopped_what_was_left_when_its_time_was_over(
    shared: Platform, client: DSecClient, node: str, start: Start
) -> None:
    ends, stays = start(), start()
    drain = subprocess.Popen([str(BIN / "dsec"), "node", "drain", node], env=shared.env, stdout=subprocess.PIPE, text=True)
    until(lambda: client.node(node).scheduling.state == "draining", "the drain began")
    ends.stop()
    with pytest.raises(ResourceExhausted, match="draining"):
        start()
    # Nothing ends by itself unless a time was given.
    time.sleep(3)
    assert drain.poll() is None and stays.run_shell("true").ok
    client.drain_node(node, stop_after=3600, reason="moves")
    kept = client.drain_node(node).scheduling
    assert kept.reason == "moves" and kept.stop_at_ms, "a drain that is asked for again lost its time"
    said = client.drain_node(node, stop_after=0)
    assert said.scheduling.stop_at_ms and said.sandboxes == 1
    assert drain.communicate(timeout=60)[0] == f"{node} is drained\n" and drain.returncode == 0
    reason = stays.refresh().reason
    assert reason is not None and reason.code == "drained"
    assert "drained" in shared.dsec("node", "ls").stdout


def test_a_drain_that_somebody_takes_back_says_so(shared: Platform, client: DSecClient, node: str, start: Start) -> None:
    start()
    drain = subprocess.Popen([str(BIN / "dsec"), "node", "drain", node], env=shared.env, stderr=subprocess.PIPE, text=True)
    until(lambda: client.node(node).scheduling.state == "draining", "the drain began")
    client.uncordon_node(node)
    assert "not draining any more" in drain.communicate(timeout=60)[1] and drain.returncode == 1


def test_nonsense_about_nodes_is_refused(shared: Platform, node: str) -> None:
    for arguments, why in (
        (("cordon", "nobody"), "no node nobody"),
        (("cordon", node, "--reason", "x" * 257), "at most 256 bytes"),
        (("cordon", node, "--reason", "two\nlines"), "in one line"),
        (("drain", node, "--detach", "--stop-after", "800h"), "stop_after is 2880000 s"),
    ):
        refused = shared.dsec("node", *arguments, check=False)
        assert refused.returncode == 1 and why in refused.stderr, refused
    assert shared.nodes()[0]["scheduling"]["state"] == "open"


def test_a_sandbox_that_wants_what_the_node_lacks_is_refused(client: DSecClient, node: str, start: Start) -> None:
    works = [feature.name for feature in client.node(node).features if feature.state == "works"]
    assert start(node_features=works[:2]).run_shell("true").ok
    with pytest.raises(Unsupported, match="'?\"?warp-drive\"? does not work"):
        start(node_features=["warp-drive"])
    with pytest.raises(Unsupported, match="does not have the label zone=a"):
        start(node_labels={"zone": "a"})


def test_a_node_refuses_by_what_it_has_left() -> None:
    # Each limit is set so that this machine, as it is, is beyond it; with the usual ones it takes sandboxes.
    with platform() as running:
        running.down()
        config = running.state / "edge.toml"
        usual = config.read_text() if config.exists() else ""
        for setting, short in (
            ("memory_reserve_mib = 100000000", "memory"),
            ("disk_reserve_mib = 100000000", "disk"),
            ("files_reserve = 1000000000000", "files"),
            ("processes_reserve = 100000000", "processes"),
        ):
            config.write_text(f"{usual}\n[admission]\n{setting}\n")
            running.up()
            with pytest.raises(ResourceExhausted) as refused:
                running.client().run_container(DSecContainerRunArgs(container_image=IMAGE))
            assert refused.value.detail == {"short": short}
            running.close_clients()
            running.down()
        config.write_text(f"{usual}\n[admission]\ncpu_overcommit = 1\n")
        running.up()
        cores = running.nodes()[0]["capacity"]["cpu_millis"] // 1000
        args = DSecContainerRunArgs(container_image=IMAGE, cpu_cores_limit=cores)
        with running.client().run_container(args):
            with pytest.raises(ResourceExhausted, match="cores would be promised") as refused:
                running.client().run_container(args)
            assert refused.value.detail == {"short": "cpu_promised"}
        running.client().run_container(args).stop()


def test_a_node_tells_which_layers_are_at_hand(tmp_path: Path) -> None:
    with cluster(2, {"url": str(tmp_path / "store"), "create": True}) as (control, nodes):
        client = control.client()
        for image in ("one", "other"):
            client.images.import_(image, busybox())

        def made(image: str, **arguments: object) -> str:
            args = DSecContainerRunArgs(container_image=image, memory_limit_mb=64, **arguments)
            with client.run_container(args) as sandbox:
                return sandbox.info.node

        for image, rack in (("one", "r1"), ("other", "r2"), ("one", "r1")):
            made(image, node_labels={"rack": rack})
        for node, names in zip(nodes, (["one"], ["other"]), strict=True):
            request = urllib.request.Request(f"{node.url}/v1/nodes?layers=true", headers={"authorization": f"Bearer {node.key}"})
            with urllib.request.urlopen(request) as answer:
                assert json.load(answer)["nodes"][0]["layers"] == names
        # It is a wish, among nodes that are as full: where there is no room it is not waited for.
        client.cordon_node("n1")
        assert made("one") == "n2"


def test_sandboxes_go_where_they_are_wanted(tmp_path: Path) -> None:
    with cluster(2, {"url": str(tmp_path / "store"), "create": True}) as (control, _):
        client = control.client()
        client.images.import_("tools", busybox())

        def made(count: int = 6, **arguments: object) -> Counter[str]:
            args = DSecContainerRunArgs(container_image="tools", memory_limit_mb=128, **arguments)
            sandboxes = [client.run_container(args) for _ in range(count)]
            for sandbox in sandboxes:
                sandbox.stop()
            return Counter(sandbox.info.node for sandbox in sandboxes)

        assert made(16).keys() == {"n1", "n2"}
        assert made(node_labels={"rack": "r2"}) == {"n2": 6}
        # A node refuses at once, before control has heard of it.
        client.cordon_node("n1")
        assert made() == {"n2": 6}
        with pytest.raises(Unsupported, match="2 without the labels"):
            made(node_labels={"rack": "r3"})
        # A key's order of nodes passes over those that will never do.
        for number in range(6):
            args = DSecContainerRunArgs(container_image="tools", memory_limit_mb=64, node_labels={"rack": "r2"})
            with client.run_container(args, idempotency_key=f"wants-r2-{number}") as sandbox:
                assert sandbox.info.node == "n2"
        client.drain_node("n2")
        with pytest.raises(Unavailable, match="no node takes the sandbox") as refused:
            made(1)
        assert refused.value.detail == {"refusals": {"cordoned": 1, "draining": 1}}
        client.uncordon_node("n1")
        until(lambda: client.node("n1").scheduling.state == "open", "n1 is open")
        time.sleep(2)
        assert made() == {"n1": 6}
        listed = {row.split()[0]: row.split()[1] for row in control.dsec("node", "ls").stdout.splitlines()[1:]}
        assert listed == {"n1": "open", "n2": "drained"}
