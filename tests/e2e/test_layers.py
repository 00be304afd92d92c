"""Layers composed into a sandbox's root: image, workspace, toolkits."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from libdsec import Conflict, DSecContainerRunArgs, InvalidArgument, NotFound

from platform_under_test import IMAGE, Platform, tar


def erofs_mounts(platform: Platform) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if str(platform.state) in line and " - erofs " in line]


def test_toolkits_lie_over_the_workspace_and_an_upgrade_touches_what_starts_later(shared: Platform) -> None:
    client = shared.client()
    client.workspaces.import_("repo", tar({"work/README": "repo", "opt/who": "workspace"}))
    client.toolkits.import_("tool", tar({"opt/who": "tool 1", "opt/tool/run": "#!/bin/sh\necho one\n"}))
    client.toolkits.import_("late", tar({"opt/late": "late"}))
    args = DSecContainerRunArgs(container_image=IMAGE, workspace="repo", toolkits=["tool", "late"])
    first = client.run_container(args)
    try:
        seen = first.run_shell("cat /work/README /opt/who; /opt/tool/run; cat /opt/late; ls -d /usr/bin")
        assert seen.stdout == "repotool 1one\nlate/usr/bin\n"
        kinds = [(layer.kind, layer.name) for layer in (first.refresh()).layers]
        assert kinds == [("base", IMAGE), ("workspace", "repo"), ("toolkit", "tool"), ("toolkit", "late")]
        # What is written stays in the sandbox.
        first.run_shell("echo mine > /opt/who; rm /work/README")
        before = (client.workspaces.get("repo")).digest
        client.toolkits.import_("tool", tar({"opt/who": "tool 2", "opt/tool/run": "#!/bin/sh\necho two\n"}))
        assert (client.workspaces.get("repo")).digest == before
        with client.run_container(args) as second:
            seen = second.run_shell("cat /work/README /opt/who; /opt/tool/run")
            assert seen.stdout == "repotool 2two\n"
        seen = first.run_shell("cat /opt/who; /opt/tool/run; ls /work")
        assert seen.stdout == "mine\none\n"
        with pytest.raises(Conflict, match=first.id):
            client.workspaces.remove("repo")
    finally:
        first.stop()
    for layers, name in ((client.workspaces, "repo"), (client.toolkits, "tool"), (client.toolkits, "late")):
        layers.remove(name)
        assert not layers.exists(name)
    digest = before
    assert not [line for line in erofs_mounts(shared) if digest in line], "the mount of a removed layer stays"


def test_the_same_archive_is_the_same_layer(shared: Platform) -> None:
    client = shared.client()
    one = client.toolkits.import_("same", tar({"opt/x": "x"}), description="x")
    two = client.toolkits.import_("same:2", tar({"opt/x": "x"}), description="x")
    other = client.toolkits.import_("same:3", tar({"opt/x": "y"}), description="x")
    assert one.digest == two.digest != other.digest
    assert {info.name for info in client.toolkits.list()} >= {"same", "same:2", "same:3"}
    for name in ("same", "same:2", "same:3"):
        client.toolkits.remove(name)


def docker_archive(layers: list[bytes]) -> bytes:
    """An image as `docker save` writes it."""
    ids = [hashlib.sha256(layer).hexdigest() for layer in layers]
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{it}" for it in ids]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}).encode()
    config_name, names = f"{hashlib.sha256(config).hexdigest()}.json", [f"{it}/layer.tar" for it in ids]
    manifest = json.dumps([{"Config": config_name, "RepoTags": [], "Layers": names}]).encode()
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in zip([config_name, "manifest.json", *names], [config, manifest, *layers], strict=True):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def test_an_image_of_127_layers_runs(shared: Platform) -> None:
    programs = io.BytesIO()
    with tarfile.open(fileobj=programs, mode="w") as archive:
        archive.add("/bin/busybox", "bin/busybox")
        for applet in ("sh", "head"):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    # Long enough not to lie beside its inode: each layer's content is a device of the mount.
    long = [f"{number}\n" * 3000 for number in range(126)]
    layers = [programs.getvalue(), *(tar({f"own/{n}": text, "shared/last": text}) for n, text in enumerate(long))]
    client = shared.client()
    client.images.import_("many", docker_archive(layers))
    assert len(json.loads(shared.dsec("image", "inspect", "many").stdout)["blobs"]) == 127
    with client.run_container(DSecContainerRunArgs(container_image="many")) as sandbox:
        seen = sandbox.run_shell("for f in /own/0 /own/64 /own/125 /shared/last; do head -n 1 $f; done")
        assert seen.stdout == "0\n64\n125\n125\n"
    client.images.remove("many")


def test_a_layer_that_is_not_there_is_named_and_nothing_is_left(shared: Platform) -> None:
    mounts = erofs_mounts(shared)
    client = shared.client()
    for args, found in (
        ({"workspace": "none"}, "no workspace 'none'|no workspace \"none\""),
        ({"toolkits": ["none:7"]}, "no toolkit"),
    ):
        with pytest.raises(NotFound, match=found):
            client.run_container(DSecContainerRunArgs(container_image=IMAGE, **args))
    client.toolkits.import_("twice", tar({"opt/x": "x"}))
    with pytest.raises(InvalidArgument, match="same layer"):
        client.run_container(DSecContainerRunArgs(container_image=IMAGE, toolkits=["twice", "twice:latest"]))
    client.toolkits.remove("twice")
    assert erofs_mounts(shared) == mounts
    assert not os.listdir(shared.state / "layers/work")
