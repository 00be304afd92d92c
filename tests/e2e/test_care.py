"""What is done with layers beyond composing them: measures, traces, prefetching, tags, exports, the care of the store."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from libdsec import DSecContainerRunArgs

from platform_under_test import IMAGE, Platform, platform, stored_files, until
from test_layers import tar
from test_shared_store import busybox


def holder(running: Platform) -> int:
    """Process id of the fill holder."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if "hold" in line and str(running.state / "run/fill.toml") in line:
                return int(entry.name)
    return 0


def test_a_layer_is_tagged_exported_verified_and_its_store_cleared(shared: Platform, tmp_path: Path) -> None:
    client = shared.client()
    first = client.toolkits.import_("cared", tar({"opt/v": "1"}))
    second = client.toolkits.import_("cared", tar({"opt/v": "2"}))
    assert client.toolkits.tag(f"cared@{first.digest[:16]}", "old").digest == first.digest
    assert shared.dsec("layer", "tag", "toolkit", "cared:old", "latest").stdout == "cared\n"
    assert client.toolkits.get("cared").digest == first.digest
    layout = tmp_path / "layout"
    shared.dsec("layer", "export", "toolkit", f"cared@{second.digest[:16]}", str(layout))
    assert json.loads((layout / "index.json").read_text())["schemaVersion"] == 2
    refused = shared.dsec("layer", "export", "toolkit", "cared", str(layout), check=False)
    assert refused.returncode == 1 and "is there already" in refused.stderr
    # The way out is a way in.
    again = shared.dsec("--json", "layer", "import", "toolkit", "back", str(layout))
    assert json.loads(again.stdout)["files"] == second.files
    found = json.loads(shared.dsec("--json", "layer", "verify", "toolkit", "cared").stdout)
    assert (found["layers"], found["findings"]) == (1, [])
    assert "all is well" in shared.dsec("layer", "verify").stdout
    for name in ("cared:old", "cared", f"cared@{second.digest[:16]}", "back"):
        client.toolkits.remove(name)
    manifest = next(shared.state.glob(f"store/**/*{second.digest}*"), None)
    assert manifest is not None
    collected = json.loads(shared.dsec("--json", "layer", "gc", "--grace", "0s").stdout)
    assert collected["layers"] >= 2 and not manifest.exists()
    assert not os.listdir(shared.state / "layers/work")


def test_damage_in_the_store_is_found_and_named(shared: Platform) -> None:
    client = shared.client()
    client.toolkits.import_("damaged", tar({"opt/d": "x" * 300_000}))
    before = stored_files(shared)
    made = client.toolkits.import_("damaged:2", tar({"opt/d": "".join(map(str, range(60_000)))}))
    pack = next(path for path in stored_files(shared) - before if "packs" in path.parts)
    whole = pack.read_bytes()
    try:
        pack.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        found = shared.dsec("layer", "verify", "toolkit", "damaged:2", check=False)
        assert found.returncode == 1 and "its content is another" in found.stdout, found
        assert "all is well" in shared.dsec("layer", "verify", "toolkit", "damaged").stdout
    finally:
        pack.write_bytes(whole)
    assert made.files == 3
    for name in ("damaged", "damaged:2"):
        client.toolkits.remove(name)


def test_content_comes_when_it_is_read_or_asked_for_and_is_counted() -> None:
    with platform() as running:
        # Another platform's content is not here: its cache goes, the store stays.
        running.down()
        for cached in (running.state / "layers/cache").iterdir():
            cached.unlink()
        running.up()
        client = running.client()
        size = json.loads(running.dsec("image", "inspect", IMAGE).stdout)["nodes"][0]["content"]
        assert size["here_bytes"] == 0
        with client.run_container(DSecContainerRunArgs(container_image=IMAGE)) as sandbox:
            # A shell that goes on after a command needs more of itself than one that becomes it.
            known = "sha256sum /bin/ls; true"
            digest = sandbox.run_shell(known).stdout
            assert "/bin/ls" in digest
            read = json.loads(running.dsec("--json", "stats", sandbox.id).stdout)[0]["layers"][0]["content"]
            assert 0 < read["fetched_bytes"] and read["asked_bytes"] <= read["here_bytes"] < read["size_bytes"]
            assert " / " in running.dsec("stats", sandbox.id).stdout
            metrics = running.metrics()
            assert any(
                line.startswith("dsec_content_fetched_bytes_total{") and not line.endswith(" 0")
                for line in metrics.splitlines()
            )
            # Its holder gone, what is in memory and what starts later goes on.
            old = holder(running)
            os.kill(old, signal.SIGKILL)
            until(lambda: holder(running) not in (0, old), "a new holder")
            with client.run_container(DSecContainerRunArgs(container_image=IMAGE)) as later:
                assert later.run_shell("sha256sum /usr/bin/* | wc -l").exit_code == 0
            assert sandbox.run_shell(known).stdout == digest
            lost = sandbox.run_shell("sha256sum /usr/bin/*")
            # A read says so; a program whose own pages are not in memory ends by SIGBUS.
            assert lost.exit_code != 0
            assert "Input/output error" in lost.stderr or lost.signal == "SIGBUS", lost
        seen: list[int] = []
        client.images.prefetch(IMAGE, on_progress=lambda progress: seen.append(progress.left_bytes))
        assert seen and seen == sorted(seen, reverse=True) and seen[-1] == 0
        now = json.loads(running.dsec("image", "inspect", IMAGE).stdout)["nodes"][0]["content"]
        assert now["here_bytes"] == now["size_bytes"] == size["size_bytes"]
        # What starts now reads without the fill worker: it is not even asked.
        with client.run_container(DSecContainerRunArgs(container_image=IMAGE)) as whole:
            assert whole.run_shell("cat /usr/bin/* | wc -c").exit_code == 0
        after = json.loads(running.dsec("image", "inspect", IMAGE).stdout)["nodes"][0]["content"]
        assert after["asked_bytes"] == now["asked_bytes"]


def test_what_a_first_run_read_is_shown_and_brought_in_again() -> None:
    with platform() as running:
        running.down()
        for cached in (running.state / "layers/cache").iterdir():
            cached.unlink()
        running.up()
        client = running.client()
        assert all(blob.runs == 0 for blob in client.images.trace(IMAGE))
        with client.run_container(DSecContainerRunArgs(container_image=IMAGE)) as sandbox:
            sandbox.run_shell("sha256sum /bin/ls")
            until(lambda: any(blob.runs for blob in client.images.trace(IMAGE)), "a recorded trace", 60)
        traced = [blob for blob in client.images.trace(IMAGE) if blob.runs]
        assert all(blob.groups and 0 < blob.traced_bytes < blob.size_bytes for blob in traced)
        shown = running.dsec("image", "trace", IMAGE).stdout
        assert traced[0].id[:12] in shown and " ago" in shown
        running.down()
        for cached in (running.state / "layers/cache").iterdir():
            cached.unlink()
        running.up()
        running.dsec("image", "prefetch", "--trace", IMAGE)
        here = json.loads(running.dsec("image", "inspect", IMAGE).stdout)["nodes"][0]["content"]["here_bytes"]
        assert here == sum(blob.traced_bytes for blob in traced)


def test_a_name_that_is_none_is_refused_at_once(shared: Platform) -> None:
    for arguments in (
        ("image", "prefetch", "none"),
        ("image", "trace", "none"),
        ("image", "export", "none", "/nowhere/at/all"),
        ("image", "tag", "none", "x"),
        ("layer", "verify", "toolkit", "none"),
    ):
        refused = shared.dsec(*arguments, check=False)
        assert refused.returncode == 1 and "none" in refused.stderr, arguments
    wrong = shared.dsec("image", "tag", IMAGE, "no/tag", check=False)
    assert wrong.returncode == 1 and "tag" in wrong.stderr
    assert shared.dsec("layer", "verify", "toolkit", check=False).returncode == 2


def test_idle_layers_are_let_go_of_when_the_disk_is_nearly_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    subprocess.run(["truncate", "--size", "3G", str(disk)], check=True)
    subprocess.run(["mkfs.ext4", "-q", str(disk)], check=True)

    def on_its_own_disk(state: Path) -> None:
        (state / "layers").mkdir(parents=True, mode=0o700)
        subprocess.run(["mount", "-o", "loop", str(disk), str(state / "layers")], check=True)
        (state / "layers/lost+found").rmdir()

    with platform(image=False, prepare=on_its_own_disk) as running:
        try:
            client = running.client()
            layers = running.state / "layers"
            client.images.import_("tools", busybox())
            args = DSecContainerRunArgs(container_image="tools", memory_limit_mb=64)
            client.run_container(args).stop()
            client.images.prefetch("tools")

            def here() -> tuple[bool, int]:
                [on] = client.images.get("tools").nodes
                return on.mounted, on.content.here_bytes if on.content else 0

            mounted, whole = here()
            assert mounted and whole > 0
            # An idle layer keeps its mount for as long as there is room.
            time.sleep(12)
            assert here() == (True, whole)
            used = client.run_container(args)
            ballast = layers / "ballast"
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(layers).free - (900 << 20))
            time.sleep(12)
            assert here() == (True, whole), "a layer that is used was let go of"
            used.stop()
            until(lambda: here() == (False, 0), "the idle layer went", 30)
            ballast.unlink()
            assert client.run_container(args).run("busybox", "true").ok
        finally:
            running.close_clients()
            running.down()
            subprocess.run(["umount", str(running.state / "layers")], check=True)
