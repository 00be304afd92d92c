"""Images out of registries, against a real one."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from libdsec import ImportProgress, NotFound, PermissionDenied, RegistryCredentials, Unsupported

from platform_under_test import IMAGE, Platform, base_image, free_address, platform, tar
from registry import OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST, Layer, Registry, cutting, digest_of, registry

USER, PASSWORD = "ann", "a:pass word"


@pytest.fixture(scope="module")
def plain() -> Iterator[Registry]:
    """A registry that lets everybody pull."""
    with registry() as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_waits(shared: Platform) -> Iterator[None]:
    """Whatever happens, nothing of what was fetched is left where it was put."""
    yield
    assert list((shared.state / "layers/work").iterdir()) == []


def pull(shared: Platform, name: str, reference: str, *options: str) -> dict[str, Any]:
    done = shared.dsec("image", "import", name, f"docker://{reference}", *options, "--json")
    image: dict[str, Any] = json.loads(done.stdout)
    return image


def refused(shared: Platform, reference: str, *options: str, stdin: str | None = None) -> dict[str, Any]:
    """The error of a pull that fails, after which no image has the name."""
    done = shared.dsec("image", "import", "refused", f"docker://{reference}", *options, "--json", check=False, input=stdin)
    assert done.returncode == 1, done
    error: dict[str, Any] = json.loads(done.stderr)
    with pytest.raises(NotFound):
        shared.client().images.get("refused")
    return error


def random_layer(size: int, name: str = "data") -> Layer:
    return Layer.of(tar({name: os.urandom(size)}), "none")


def test_a_pulled_image_runs_as_its_configuration_says(shared: Platform, plain: Registry) -> None:
    below = Layer.of(base_image().read_bytes())
    above = Layer.of(tar({"opt/hello": b"#!/bin/sh\necho hello $WHO from $PWD\n", "etc/.wh.debian_version": b""}), "zstd")
    manifest = plain.push("team/real", "1", [below, above], Env=["WHO=you", "PATH=/usr/bin:/bin"], WorkingDir="/opt")
    seen: list[ImportProgress] = []
    client = shared.client()
    reference = f"docker://{plain.address}/team/real:1"
    image = client.images.pull("real:1", reference, on_progress=seen.append)
    assert (image.name, image.source, image.env[0]) == ("real:1", reference, "WHO=you")
    last = seen[-1]
    assert last.fetch_bytes_total == len(below.stored) + len(above.stored)
    assert last.fetched_bytes is not None and 0 < last.fetched_bytes <= last.fetch_bytes_total
    ran = shared.dsec("run", "real:1", "--", "sh", "-c", "./hello; ls /etc/debian_version", check=False)
    assert ran.stdout == "hello you from /opt\n" and "No such file" in ran.stderr
    # The same by digest is the same.
    same = pull(shared, "real:2", f"{plain.address}/team/real@{manifest['digest']}")
    assert same["parents"] == json.loads(shared.dsec("image", "inspect", "real:1").stdout)["parents"]
    client.images.remove("real:1")
    client.images.remove("real:2")


def test_what_was_exported_comes_back_as_it_was(shared: Platform, plain: Registry, tmp_path: Path) -> None:
    shared.dsec("image", "export", IMAGE, str(tmp_path / "layout"))
    plain.push_layout("back", "1", tmp_path / "layout")
    back = pull(shared, "back", f"{plain.address}/back:1")
    client = shared.client()
    before = client.images.get(IMAGE)
    assert (back["files"], back["content_bytes"]) == (before.files, before.content_bytes)
    # Not what a sandbox puts there itself.
    find = "cd / && find bin etc lib opt root sbin srv usr var -xdev ! -path etc/host\\* ! -path etc/resolv.conf"
    names = find + r" \( -type d -printf '%p %m %U:%G\n' -o -printf '%p %y %m %U:%G %s %T@ %l\n' \)"
    bytes_of = find + " -type f -print0 | xargs -0 sha256sum"
    for line in (names, bytes_of):
        seen = [set(shared.dsec("run", name, "--", "sh", "-c", line).stdout.splitlines()) for name in (IMAGE, "back")]
        assert sorted(seen[0] ^ seen[1])[:10] == [] and seen[0]
    client.images.remove("back")


def test_a_layer_that_is_here_is_not_fetched_again(shared: Platform, plain: Registry) -> None:
    common, one, two = random_layer(300_000), random_layer(1000, "one"), random_layer(1000, "two")
    plain.push("first", "1", [common, one])
    plain.push("second", "1", [common, two, one])
    first = pull(shared, "first", f"{plain.address}/first:1")
    second = pull(shared, "second", f"{plain.address}/second:1")
    assert [plain.gets_of(layer.digest) for layer in (common, one, two)] == [[200], [200], [200]]
    assert first["parents"] == [second["parents"][0], second["parents"][2]]
    # Whatever it is compressed with: what it unpacks to counts.
    repacked = Layer.of(common.stored, "gzip")
    plain.push("third", "1", [repacked])
    pull(shared, "third", f"{plain.address}/third:1")
    assert plain.gets_of(repacked.digest) == []
    # Also from an archive.
    for name in ("first", "second", "third"):
        shared.client().images.remove(name)


def test_a_layer_that_an_image_has_twice_is_fetched_once(shared: Platform, plain: Registry) -> None:
    layer = random_layer(1000)
    plain.push("twice", "1", [layer, random_layer(10, "x"), layer])
    image = pull(shared, "twice", f"{plain.address}/twice:1")
    assert plain.gets_of(layer.digest) == [200]
    assert image["parents"][0] == image["parents"][2] and image["files"] == 3
    shared.client().images.remove("twice")


def test_a_damaged_blob_is_refused(shared: Platform, plain: Registry) -> None:
    good, bad = random_layer(1000, "good"), random_layer(200_000, "bad")
    plain.push("damaged", "1", [good, bad])
    file = plain.blob_file(bad.digest)
    data = bytearray(file.read_bytes())
    data[100_000] ^= 1
    file.write_bytes(data)
    error = refused(shared, f"{plain.address}/damaged:1")
    assert error["code"] == "invalid_argument"
    assert bad.digest in error["message"] and digest_of(bytes(data)) in error["message"]
    data[100_000] ^= 1
    file.write_bytes(data)
    pull(shared, "damaged", f"{plain.address}/damaged:1")
    shared.client().images.remove("damaged")


def test_a_layer_that_is_not_what_its_diff_id_says_is_refused(shared: Platform, plain: Registry) -> None:
    lying = Layer(random_layer(1000).stored, digest_of(b"other"), OCI_LAYER)
    plain.push("lying", "1", [lying])
    error = refused(shared, f"{plain.address}/lying:1")
    assert digest_of(b"other") in error["message"]


def test_connections_that_are_cut_are_taken_up_where_they_were(shared: Platform, plain: Registry) -> None:
    layer = random_layer(3_000_000)
    plain.push("cut", "1", [layer])
    with cutting(plain.address, 1_000_000, 2) as (address, cuts):
        pull(shared, "cut", f"{address}/cut:1")
        assert cuts == [1_000_000, 1_000_000]
    assert plain.gets_of(layer.digest) == [200, 206, 206]
    shared.client().images.remove("cut")


def test_credentials_are_shown_when_they_are_wanted(shared: Platform, tmp_path: Path) -> None:
    layer = random_layer(1000)
    with registry(USER, PASSWORD) as closed:
        closed.push("private", "1", [layer])
        reference = f"{closed.address}/private:1"
        error = refused(shared, reference)
        assert error["code"] == "permission_denied" and "without credentials" in error["message"]
        assert "--creds" in error["hint"]
        error = refused(shared, reference, "--creds", f"{USER}:wrong")
        assert error["code"] == "permission_denied" and "wrong" not in json.dumps(error)
        error = refused(shared, reference, "--creds-stdin", stdin=f"{USER}:{PASSWORD}x\n")
        assert error["code"] == "permission_denied"
        auth = b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        for options, stdin, written in (
            (["--creds", f"{USER}:{PASSWORD}"], None, None),
            (["--creds-stdin"], f"{USER}:{PASSWORD}\n", None),
            (["--authfile", str(tmp_path / "auth.json")], None, tmp_path / "auth.json"),
            ([], None, tmp_path / "config.json"),
        ):
            if written:
                written.write_text(json.dumps({"auths": {closed.address: {"auth": auth}}}))
            shared.env.pop("DOCKER_CONFIG", None)
            if not options:
                shared.env["DOCKER_CONFIG"] = str(tmp_path)
            shared.dsec("image", "import", "private", f"docker://{reference}", *options, input=stdin)
            shared.client().images.remove("private")
        del shared.env["DOCKER_CONFIG"]
        client = shared.client()
        with pytest.raises(PermissionDenied):
            client.images.pull("private", f"docker://{reference}")
        client.images.pull("private", reference, credentials=RegistryCredentials(username=USER, password=PASSWORD))
        kept = client.images.get("private")
        client.images.remove("private")
        assert PASSWORD not in repr(kept)
    for log in (shared.state / "log").iterdir():
        text = log.read_text(errors="replace")
        assert PASSWORD not in text and auth not in text, f"{log} has the password"


def test_an_image_for_several_platforms(shared: Platform, plain: Registry) -> None:
    entries = []
    for architecture in ("arm64", "amd64"):
        layer = Layer.of(tar({"arch": architecture.encode()}))
        entry = plain.push("multi", "", [layer], architecture)
        entries.append({**entry, "platform": {"os": "linux", "architecture": architecture}})
    attestation = plain.push("multi", "", [Layer.of(tar({"in-toto": b""}))], "unknown")
    unknown = {"os": "unknown", "architecture": "unknown"}
    entries.insert(0, {**attestation, "platform": unknown, "annotations": {"vnd.docker.reference.type": "attestation-manifest"}})
    plain.push_document("multi", "1", {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries})
    reference = f"{plain.address}/multi:1"
    assert pull(shared, "multi", reference)["architecture"] == "amd64"
    assert pull(shared, "multi", reference, "--platform", "linux/arm64")["architecture"] == "arm64"
    error = refused(shared, reference, "--platform", "linux/s390x")
    assert error["code"] == "unsupported" and "it has: linux/arm64, linux/amd64" in error["message"]
    with pytest.raises(Unsupported):
        shared.client().images.pull("multi", reference, platform="linux/riscv64")
    error = refused(shared, reference, "--platform", "plan9/amd64")
    assert error["detail"]["field"] == "platform"
    shared.client().images.remove("multi")


def test_documents_and_layers_of_docker_and_uncompressed_ones(shared: Platform, plain: Registry) -> None:
    layers = [Layer.of(tar({f"file-{kind}": b"x"}), kind) for kind in ("docker", "none", "zstd")]
    layers[1].media_type = "application/vnd.docker.image.rootfs.diff.tar"
    layers[2].media_type = "application/vnd.docker.image.rootfs.diff.tar.zstd"
    plain.push("docker", "1", layers)
    assert pull(shared, "docker", f"{plain.address}/docker:1")["files"] == 4
    shared.client().images.remove("docker")


def test_what_is_no_image_is_refused_by_name(shared: Platform, plain: Registry) -> None:
    layer = random_layer(1000)
    foreign = Layer(layer.stored, layer.diff_id, "application/vnd.oci.image.layer.v1.squashfs")
    plain.push("foreign", "1", [foreign])
    error = refused(shared, f"{plain.address}/foreign:1")
    assert "squashfs" in error["message"] and layer.digest in error["message"]
    assert plain.gets_of(layer.digest) == []
    chart = {"mediaType": "application/vnd.cncf.helm.config.v1+json", "digest": plain.push_blob("chart", b"{}"), "size": 2}
    plain.push_document(
        "chart", "1", {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": chart, "layers": []}
    )
    assert "helm" in refused(shared, f"{plain.address}/chart:1")["message"]
    config = b'{"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}'
    described = {"mediaType": OCI_CONFIG, "digest": plain.push_blob("odd", config), "size": len(config)}
    stored = {"mediaType": OCI_LAYER, "digest": plain.push_blob("odd", layer.stored), "size": len(layer.stored)}
    plain.push_document(
        "odd", "1", {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": described, "layers": [stored]}
    )
    assert "1 layers and its configuration 0 diff ids" in refused(shared, f"{plain.address}/odd:1")["message"]


def test_what_is_not_there_is_said_to_be(shared: Platform, plain: Registry) -> None:
    plain.push("there", "1", [random_layer(10)])
    for reference, code, word in (
        (f"{plain.address}/there:2", "not_found", "there:2"),
        (f"{plain.address}/there@{digest_of(b'no')}", "not_found", digest_of(b"no")),
        (f"{plain.address}/nowhere:1", "not_found", "nowhere:1"),
        (f"{free_address()}/there:1", "unavailable", "Connection refused"),
        ("registry.invalid/there:1", "unavailable", "registry.invalid"),
        ("169.254.169.254/latest", "permission_denied", "link-local"),
        ("[fe80::1]:5000/x", "permission_denied", "link-local"),
        ("debian:12", "invalid_argument", "names no host"),
        (f"{plain.address}/There:1", "invalid_argument", "lower case"),
    ):
        error = refused(shared, reference)
        assert error["code"] == code and word in error["message"], (reference, error)


def test_tls_is_trusted_where_its_certificate_is_given(shared: Platform, tmp_path: Path) -> None:
    with registry(tls=True) as secure:
        secure.push("tls", "1", [random_layer(1000)])
        reference = f"{secure.address}/tls:1"
        certificate = str(secure.root.parent / "cert.pem")
        pull(shared, "tls", reference, "--cacert", certificate)
        shared.client().images.remove("tls")
        # Spoken to in the clear it says so; with another certificate it is not trusted.
        assert "400" in refused(shared, reference)["message"]
        with registry(tls=True) as other:
            error = refused(shared, reference, "--cacert", str(other.root.parent / "cert.pem"))
            assert "no trusted TLS" in error["message"]
    with registry() as plain:
        error = refused(shared, f"{plain.address}/x:1", "--cacert", certificate_of(tmp_path))
        assert "no trusted TLS" in error["message"]


def certificate_of(work: Path) -> str:
    """Some certificate, of nobody who is here."""
    with registry(tls=True) as gone:
        file = work / "gone.pem"
        file.write_bytes((gone.root.parent / "cert.pem").read_bytes())
    return str(file)


def test_options_of_registries_are_for_registries(shared: Platform) -> None:
    done = shared.dsec("image", "import", "x", str(base_image()), "--plain-http", check=False)
    assert done.returncode == 1 and "--plain-http is for sources that begin with docker://" in done.stderr


def test_only_listed_registries_are_pulled_from() -> None:
    with registry() as listed, registry() as other, platform(image=False) as running:
        for each in (listed, other):
            each.push("app", "1", [random_layer(1000)])
        config = running.state / "edge.toml"
        config.write_text(f'{config.read_text()}\n[registries]\nallow = ["{listed.address}", "*.example"]\n')
        running.kill_edge()
        pull(running, "app", f"{listed.address}/app:1")
        error = refused(running, f"{other.address}/app:1")
        assert error["code"] == "permission_denied" and "not among the registries" in error["message"]
        assert '"GET ' not in other.log.read_text().split("PUT /v2/app/manifests")[-1], "it was connected to"


