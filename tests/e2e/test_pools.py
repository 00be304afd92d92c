"""A pool of nodes that takes over from another: what is brought there ahead of time, and only what is there."""

from __future__ import annotations

import io
import json
import random
import tarfile
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from libdsec import DSecContainerRunArgs, Unsupported
from libdsec.sync import Sandbox

from cluster import cluster_of_machines, control_of, server_of
from platform_under_test import Platform, nodes_of_one_store, until
from postgres import postgres
from test_nodes import nodes_with
from test_shared_store import busybox

#: Sandboxes that each node takes, and how many fill the home pool above the usual 80 %.
SANDBOXES_MAX, ABOVE = 10, 9
#: What each image has beside a shell, bytes: a budget of this and half as much again is enough for one of them.
CONTENT_BYTES = 6 << 20


def image(seed: int) -> bytes:
    """A shell, and content that no other image has."""
    made = io.BytesIO(busybox())
    with tarfile.open(fileobj=made, mode="a") as archive:
        data = tarfile.TarInfo("data")
        data.size = CONTENT_BYTES
        archive.addfile(data, io.BytesIO(random.Random(seed).randbytes(CONTENT_BYTES)))
    return made.getvalue()


def pools(control: Platform) -> dict[str, dict]:
    return {pool["name"]: pool for pool in json.loads(control.dsec("pool", "ls", "--json").stdout)}


def burst(control: Platform, name: str) -> int:
    """One of the counters of the server."""
    headers = {"authorization": f"Bearer {control.key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{control.url}/metrics", headers=headers)) as answer:
        lines = answer.read().decode().splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith(f'dsec_burst_{name}_total{{pool="cloud"}}')]
    return int(value)


def until_home_is(control: Platform, sandboxes: int) -> None:
    """Waits until the server has heard that so many live there."""
    until(lambda: pools(control)["onprem"]["sandboxes"] == sandboxes, f"{sandboxes} sandboxes at home")


def test_above_the_threshold_the_cloud_takes_over_what_was_brought_there(tmp_path: Path) -> None:
    with nodes_of_one_store(1, {"url": str(tmp_path / "store"), "create": True}) as [maker]:
        for seed, name in enumerate(("often", "seldom")):
            maker.client().images.import_(name, image(seed))
    settings = [f"max_sandboxes = {SANDBOXES_MAX}\npool = {json.dumps(pool)}" for pool in ("onprem", "cloud")]
    with cluster_of_machines(
        2, tmp_path / "store", 2, 500, settings, '[burst]\npool = "cloud"\nshare = 1.0\n'
    ) as (control, _):
        client = control.client()
        assert {node.node: node.pool for node in client.nodes()} == {"n1": "onprem", "n2": "cloud"}

        def made(name: str, pool: str | None = None) -> Sandbox:
            return client.run_container(DSecContainerRunArgs(container_image=name, memory_limit_mb=64, pool=pool))

        def places(name: str, count: int) -> Counter[str]:
            """Where so many go that do not stay."""
            found: Counter[str] = Counter()
            for _ in range(count):
                sandbox = made(name)
                found[sandbox.info.node] += 1
                sandbox.stop()
            return found

        assert places("often", 5) == {"n1": 5} and places("seldom", 3) == {"n1": 3}
        # The budget is enough for one of the two: the one that more creates asked for.
        budget = f"{CONTENT_BYTES * 3 // 2}b"
        sync = ("pool", "sync", "cloud", "--budget", budget)
        trial = json.loads(control.dsec(*sync, "--dry-run", "--json").stdout)
        assert [layer["layer"] for layer in trial["layers"]] == ["base/often"]
        assert nodes_with(control, "often")["n2"] == 0 and "synced" not in pools(control)["cloud"]
        told = control.dsec(*sync).stdout
        assert "cloud has 1 layers" in told and "covers 62.5 % of 8 creates (0.0 % before)" in told, told
        assert nodes_with(control, "often")["n2"] >= CONTENT_BYTES
        assert nodes_with(control, "seldom")["n2"] == 0
        synced = pools(control)["cloud"]["synced"]
        assert (synced["layers"], synced["accesses"], synced["covered"]) == (1, 8, 5)
        assert CONTENT_BYTES <= synced["bytes"] <= CONTENT_BYTES * 3 // 2

        until_home_is(control, 0)
        fetched = next(node for node in client.nodes() if node.node == "n2").usage.content.fetched_bytes
        kept = [made("often") for _ in range(ABOVE)]
        assert {sandbox.info.node for sandbox in kept} == {"n1"}, "there was room at home"
        over = [made("often") for _ in range(5)]
        assert {sandbox.info.node for sandbox in over} == {"n2"}, "the home pool is full enough"
        assert places("seldom", 3) == {"n1": 3}, "it is not in the cloud"
        for sandbox in over:
            assert sandbox.run_shell("md5sum /data").exit_code == 0
        now = next(node for node in client.nodes() if node.node == "n2").usage.content.fetched_bytes
        assert now == fetched, "what was brought ahead of time was fetched again"
        assert [burst(control, name) for name in ("eligible", "diverted", "refused")] == [ABOVE + 5, 5, 0]

        # Who asks for a pool is there, whatever is in it.
        asked = made("seldom", "cloud")
        assert asked.info.node == "n2"
        with pytest.raises(Unsupported, match="2 of another pool"):
            made("often", "moon")
        # What the cloud does not take stays at home.
        client.cordon_node("n2")
        until(lambda: pools(control)["cloud"]["utilisation"] == 1, "the server knows that the cloud takes none")
        assert places("often", 1) == {"n1": 1}
        assert burst(control, "refused") == 1
        client.uncordon_node("n2")
        for sandbox in [*kept, *over, asked]:
            sandbox.stop()
        until_home_is(control, 0)
        assert places("often", 3) == {"n1": 3}, "there is room at home again"


def test_a_sync_needs_a_pool_and_one_store(tmp_path: Path) -> None:
    one, other = ({"url": str(tmp_path / name), "create": True} for name in ("one", "other"))
    with (
        nodes_of_one_store(1, one) as [first],
        nodes_of_one_store(1, other, settings=['pool = "cloud"']) as [second],
    ):
        with control_of([first, second]) as control:
            refused = control.dsec("pool", "sync", "cloud", "--budget", "1g", check=False)
            assert refused.returncode == 1 and "do not share a layer store" in refused.stderr
            refused = control.dsec("pool", "sync", "moon", "--budget", "1g", check=False)
            assert refused.returncode == 1 and "there are: cloud, onprem" in refused.stderr


def test_what_one_server_syncs_the_other_sends_there(tmp_path: Path) -> None:
    settings = '[burst]\npool = "cloud"\nabove = 0.0\nshare = 1.0\n'
    with (
        postgres() as database,
        nodes_of_one_store(2, {"url": str(tmp_path / "store"), "create": True}, settings=["", 'pool = "cloud"']) as nodes,
        server_of(nodes, database, settings) as one,
        server_of(nodes, database, settings) as other,
    ):
        first, second = one.running, other.running
        first.client().images.import_("tools", busybox())

        def place(server: Platform) -> str:
            args = DSecContainerRunArgs(container_image="tools", memory_limit_mb=64)
            with server.client().run_container(args) as sandbox:
                return sandbox.info.node

        def sync(server: Platform, *more: str) -> dict:
            return json.loads(server.dsec("pool", "sync", "cloud", "--json", *more).stdout)

        assert [place(first), place(second)] == ["n1", "n1"]
        trial = ("--budget", "1g", "--dry-run")
        until(lambda: sync(first, *trial)["accesses"] == 2, "the other server has written down what it was asked for")
        assert sync(first, "--budget", "1g")["covered"] == 2
        assert place(first) == "n2", "who did it knows at once"
        until(lambda: place(second) == "n2", "the other server knows what is in the pool")
        sync(second, "--budget", "1k")
        until(lambda: place(first) == "n1", "the other server knows that nothing is in the pool any more")
