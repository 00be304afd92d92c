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

from platform_under_test import Platform, nodes_of_one_store, tar

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


def test_a_directory_that_is_no_store_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    with pytest.raises(AssertionError, match="see whether it is mounted"):
        with nodes_of_one_store(1, {"url": str(tmp_path / "mount")}):
            pass
    assert not list((tmp_path / "mount").iterdir())
