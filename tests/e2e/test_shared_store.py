"""Several nodes on one layer store, each with nothing of the content on it."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from libdsec import Conflict, DSecContainerRunArgs

from platform_under_test import Platform, nodes_of_one_store, tar, until
from test_layers import erofs_mounts

#: Files of the workspace, each of which takes some groups.
FILES, FILE_BYTES = 24, 700_000


def busybox() -> bytes:
    """An image of one program."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.add("/bin/busybox", "bin/busybox")
        for applet in ("sh", "cat", "md5sum", "sleep", "true"):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    return made.getvalue()


def contents(seed: int) -> dict[str, bytes]:
    source = random.Random(seed)
    return {f"f{number:02}": source.randbytes(FILE_BYTES) for number in range(FILES)}


def workspace(files: dict[str, bytes]) -> bytes:
    return tar({f"work/{name}": data for name, data in files.items()})


def sums(files: dict[str, bytes]) -> str:
    return "".join(f"{hashlib.md5(data).hexdigest()}  /work/{name}\n" for name, data in sorted(files.items()))


ARGS = DSecContainerRunArgs(container_image="tools", workspace="repo", memory_limit_mb=256)


def packs(directory: Path) -> int:
    return sum(path.is_file() for path in (directory / "store/packs").rglob("*"))


def read_all(running: Platform) -> str:
    with running.client().run_container(ARGS) as sandbox:
        return sandbox.run_shell("md5sum /work/*").stdout


def test_three_cold_nodes_run_the_same_burst_and_one_collects_under_them(tmp_path: Path) -> None:
    files = contents(1)
    with nodes_of_one_store(3, {"url": str(tmp_path / "store"), "create": True}) as nodes:
        first, second, third = nodes
        first.client().images.import_("tools", busybox())
        first.client().workspaces.import_("repo", workspace(files))
        # What one made, all have; the two others have none of its content.
        with ThreadPoolExecutor(18) as pool:
            for seen in pool.map(read_all, nodes * 6):
                assert seen == sums(files)
        # Started on the second node, which has read nothing of a new version of it; then the name goes.
        others = contents(2)
        newer = first.client().workspaces.import_("repo", workspace(others)).digest
        # A look asks the store, and creates that follow know what it found.
        assert second.client().workspaces.get("repo").digest == newer
        with second.client().run_container(ARGS) as late:
            assert late.run_shell("md5sum /work/f00").stdout == sums(others).splitlines()[0] + "\n"
            # What one node uses, no other removes; what nobody uses goes, and takes nothing with it that is used.
            with pytest.raises(Conflict, match="n2"):
                third.client().workspaces.remove("repo")
            third.client().workspaces.import_("spare", workspace(contents(3)))
            before = packs(tmp_path)
            third.client().workspaces.remove("spare")
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(lambda node: node.dsec("layer", "gc", "--grace", "0s"), nodes))
            assert packs(tmp_path) < before, "nothing was collected"
            assert late.run_shell("md5sum /work/*").stdout == sums(others), "collected under a sandbox that uses it"
        assert read_all(third) == sums(others)


def test_what_one_node_only_keeps_mounted_may_lose_its_name_on_another(tmp_path: Path) -> None:
    files = contents(4)
    with nodes_of_one_store(2, {"url": str(tmp_path / "store"), "create": True}) as [first, second]:
        first.client().images.import_("tools", busybox())
        digest = first.client().workspaces.import_("repo", workspace(files)).digest
        assert read_all(second) == sums(files)
        assert any(digest in line for line in erofs_mounts(second)), "it stays mounted for the next"

        def remove() -> bool:
            try:
                first.client().workspaces.remove("repo")
            except Conflict:
                return False
            return True

        # The other node says within moments that nobody uses it.
        until(remove, "the name can be removed")
        before = packs(tmp_path)
        second.dsec("layer", "gc", "--grace", "0s")
        assert packs(tmp_path) < before
        assert not any(digest in line for line in erofs_mounts(second)), "nobody can ask for it any more"


def test_a_directory_that_is_no_store_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    with nodes_of_one_store(1, {"url": str(tmp_path / "mount")}) as [running]:
        refused = running.dsec("image", "ls", check=False)
        assert refused.returncode != 0 and "see whether it is mounted" in refused.stderr, refused
    assert not list((tmp_path / "mount").iterdir())


def store_of(running: Platform) -> str:
    """How the node says its store is."""
    return next((str(it["state"]) for node in running.nodes() for it in node["features"] if it["name"] == "store"), "")


def test_a_node_whose_store_is_away_serves_what_runs_and_takes_it_up_again(tmp_path: Path) -> None:
    store, away, files = tmp_path / "store", tmp_path / "away", contents(5)
    with nodes_of_one_store(1, {"url": str(store), "create": True}) as [running]:
        client = running.client()
        client.images.import_("tools", busybox())
        client.workspaces.import_("repo", workspace(files))
        edge = running.state / "edge.toml"
        edge.write_text(edge.read_text().replace("create = true", "create = false"))
        with client.run_container(ARGS) as sandbox:
            store.rename(away)
            running.kill_edge()
            assert sandbox.run_shell("md5sum /work/*").stdout == sums(files)
            refused = running.dsec("image", "ls", check=False)
            assert refused.returncode != 0 and str(store) in refused.stderr, refused
            until(lambda: store_of(running) == "missing", "the node says that its store is away")
            assert "1 missing" in running.dsec("status").stdout
            doctor = running.dsec("doctor", "--state-dir", str(running.state), check=False)
            assert doctor.returncode == 1 and f"{store} is away" in doctor.stdout, doctor
            away.rename(store)
            until(lambda: store_of(running) == "works", "the node takes its store up")
            with client.run_container(ARGS) as later:
                assert later.run_shell("md5sum /work/*").stdout == sums(files)
            assert "answers" in running.dsec("doctor", "--state-dir", str(running.state)).stdout
