"""Several nodes behind one control: what is done with layers goes to any of them, and shows all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from libdsec import DSecContainerRunArgs, InvalidArgument, NotFound

from cluster import cluster, cluster_of_machines, control_of
from platform_under_test import Platform, nodes_of_one_store
from test_shared_store import busybox, contents, sums, workspace

#: Sandboxes of the burst: enough that each of three nodes has some.
BURST = 24


def nodes_with(control: Platform, image: str) -> dict[str, int]:
    """Bytes of an image's content on each node."""
    layer = json.loads(control.dsec("image", "inspect", image).stdout)
    return {on["node"]: on["content"]["here_bytes"] for on in layer["nodes"]}


def test_layers_are_looked_after_through_any_of_two_nodes(tmp_path: Path) -> None:
    with cluster(2, {"url": str(tmp_path / "store"), "create": True}) as (control, nodes):
        client = control.client()
        # Each call goes to the other node, and each sees at once what the one before did.
        for number in range(1, 5):
            digest = client.workspaces.import_(f"repo:{number}", workspace(contents(number))).digest
            client.workspaces.tag(f"repo:{number}", "newest")
            for _ in range(2):
                assert client.workspaces.get("repo:newest").digest == digest
        for _ in range(2):
            names = [layer.name for layer in client.workspaces.list()]
            assert names == ["repo:1", "repo:2", "repo:3", "repo:4", "repo:newest"]
        client.workspaces.remove("repo:3")
        for _ in range(2):
            with pytest.raises(NotFound):
                client.workspaces.get("repo:3")
            assert not client.workspaces.exists("repo:3", node="n2")
        size = client.images.import_("tools", busybox(), node="n1").content_bytes
        here = nodes_with(control, "tools")
        assert here["n1"] >= size and here["n2"] == 0, "an import brought it to another node than the one named"
        # Prefetching goes to the nodes named, else to all.
        control.dsec("image", "prefetch", "tools", "--node", "n2")
        assert min(nodes_with(control, "tools").values()) >= size
        whole = {on.node: on.content for on in client.workspaces.prefetch("repo:1")}
        assert sorted(whole) == ["n1", "n2"]
        assert all(content and content.here_bytes == content.size_bytes > 0 for content in whole.values())
        for call in (["verify"], ["gc", "--grace", "0s"], ["trace", "workspace", "repo:1"]):
            control.dsec("layer", *call)
        control.dsec("layer", "export", "workspace", "repo:1", str(tmp_path / "layout"))
        # A sandbox of each is seen through both; a node that is away is named and fails nothing.
        args = DSecContainerRunArgs(container_image="tools", workspace="repo:1", memory_limit_mb=128)
        made = [client.run_container(args) for _ in range(12)]
        assert {sandbox.info.node for sandbox in made} == {"n1", "n2"}
        for _ in range(2):
            assert sorted(client.images.get("tools").used_by) == sorted(sandbox.id for sandbox in made)
            assert [(on.node, on.mounted) for on in client.images.get("tools").nodes] == [("n1", True), ("n2", True)]
        for sandbox in made:
            sandbox.stop()
        nodes[1].down()
        for _ in range(2):
            listed = control.dsec("image", "ls", "--json")
            assert [layer["name"] for layer in json.loads(listed.stdout)] == ["tools"]
            assert "do not answer: n2" in listed.stderr
            client.workspaces.tag("repo:1", "still")
        failed = control.dsec("image", "prefetch", "tools", check=False)
        assert failed.returncode == 1 and "1 of 2 nodes do not have all of it; n2" in failed.stderr
        with pytest.raises(InvalidArgument, match="there is no node"):
            client.images.list(node="n3")


def test_nodes_with_stores_of_their_own_are_asked_by_name(tmp_path: Path) -> None:
    one, other = ({"url": str(tmp_path / name), "create": True} for name in ("one", "other"))
    with nodes_of_one_store(1, one) as [first], nodes_of_one_store(1, other) as [second]:
        with control_of([first, second]) as control:
            client = control.client()
            for call in (lambda: client.images.import_("tools", busybox()), client.images.list):
                with pytest.raises(InvalidArgument, match="2 layer stores"):
                    call()
            client.images.import_("tools", busybox(), node="n2")
            assert [image.name for image in client.images.list(node="n2")] == ["tools"]
            assert client.images.list(node="n1") == ()


def test_three_cold_machines_run_one_burst_and_what_one_packs_all_have(tmp_path: Path) -> None:
    files = contents(1)
    with nodes_of_one_store(1, {"url": str(tmp_path / "store"), "create": True}) as [maker]:
        maker.client().images.import_("tools", busybox())
        maker.client().workspaces.import_("repo", workspace(files))
    with cluster_of_machines(3, tmp_path / "store", latency_ms=2, mb_per_s=500) as (control, _):
        client = control.client()
        assert [node.usage.content.fetched_bytes for node in client.nodes()] == [0, 0, 0]
        args = DSecContainerRunArgs(container_image="tools", workspace="repo", memory_limit_mb=128)
        made = [client.run_container(args) for _ in range(BURST)]
        assert {sandbox.info.node for sandbox in made} == {"n1", "n2", "n3"}
        for sandbox in made:
            assert sandbox.run_shell("md5sum /work/*").stdout == sums(files)
        content_bytes = sum(map(len, files.values()))
        for node in client.nodes():
            counts = node.usage.content
            assert counts.fetched_bytes >= content_bytes, f"{node.node} did not fetch for itself: {counts}"
            assert counts.asked_bytes >= content_bytes and counts.failed_reads == 0
        # Packed on the first node, run on the two others.
        worker = next(sandbox for sandbox in made if sandbox.info.node == "n1")
        worker.run_shell("rm /work/f01; echo changed > /work/f00; echo new > /work/new")
        worker.pack_diff("built")
        packed = DSecContainerRunArgs(container_image="tools", workspace="built", memory_limit_mb=128)
        changed = {**files, "f00": b"changed\n", "new": b"new\n"}
        del changed["f01"]
        ran = set()
        for _ in range(BURST):
            sandbox = client.run_container(packed)
            made.append(sandbox)
            ran.add(sandbox.info.node)
            assert sandbox.run_shell("md5sum /work/*").stdout == sums(changed)
        assert ran == {"n1", "n2", "n3"}
        for sandbox in made:
            sandbox.stop()
