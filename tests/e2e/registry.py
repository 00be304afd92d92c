"""A registry of the test's own: Debian's `docker-registry` on loopback, a pusher, and a proxy that cuts connections."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from platform_under_test import free_address, until

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


def digest_of(data: bytes) -> str:
    """SHA-256 as registries write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Layer:
    """A layer as it is stored, and what it unpacks to."""

    stored: bytes
    diff_id: str
    media_type: str

    @classmethod
    def of(cls, plain: bytes, compression: str = "gzip") -> Layer:
        """A tar as a layer: `gzip`, `zstd`, `none`, or docker's own `gzip`."""
        diff_id = digest_of(plain)
        match compression:
            case "none":
                return cls(plain, diff_id, OCI_LAYER)
            case "zstd":
                stored = subprocess.run(["zstd", "-q", "-c"], input=plain, capture_output=True, check=True).stdout
                return cls(stored, diff_id, f"{OCI_LAYER}+zstd")
            case "docker":
                return cls(gzip.compress(plain, 1, mtime=0), diff_id, DOCKER_LAYER)
        return cls(gzip.compress(plain, 1, mtime=0), diff_id, f"{OCI_LAYER}+gzip")

    @property
    def digest(self) -> str:
        """Of it as it is stored."""
        return digest_of(self.stored)


@dataclass
class Registry:
    """A running registry."""

    address: str
    root: Path
    log: Path
    scheme: str = "http"
    authorization: str | None = None
    trust: ssl.SSLContext | None = None
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def ask(self, method: str, url: str, data: bytes | None = None, content_type: str | None = None) -> Any:
        """One request; the answer's headers."""
        request = urllib.request.Request(urljoin(f"{self.scheme}://{self.address}", url), data, method=method)
        if content_type:
            request.add_header("content-type", content_type)
        if self.authorization:
            request.add_header("authorization", self.authorization)
        with urllib.request.urlopen(request, timeout=30, context=self.trust) as answer:
            answer.read()
            return answer.headers

    def push_blob(self, repository: str, data: bytes) -> str:
        """Puts a blob in, and gives its digest."""
        digest = digest_of(data)
        place = self.ask("POST", f"/v2/{repository}/blobs/uploads/", b"")["location"]
        separator = "&" if "?" in place else "?"
        self.ask("PUT", f"{place}{separator}digest={digest}", data, "application/octet-stream")
        return digest

    def push_document(self, repository: str, name: str, document: dict[str, Any]) -> dict[str, Any]:
        """Puts a manifest or an index in, under a tag or `""`; gives its descriptor."""
        data = json.dumps(document).encode()
        self.ask("PUT", f"/v2/{repository}/manifests/{name or digest_of(data)}", data, document["mediaType"])
        return {"mediaType": document["mediaType"], "digest": digest_of(data), "size": len(data)}

    def push(
        self, repository: str, tag: str, layers: list[Layer], architecture: str = "amd64", **run: Any
    ) -> dict[str, Any]:
        """Pushes an image and gives its manifest's descriptor. `run`: fields of its configuration's `config`."""
        is_docker = any(layer.media_type == DOCKER_LAYER for layer in layers)
        config = json.dumps({
            "architecture": architecture,
            "os": "linux",
            "config": run,
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        }).encode()
        described = [
            {"mediaType": layer.media_type, "digest": self.push_blob(repository, layer.stored), "size": len(layer.stored)}
            for layer in layers
        ]
        config_type = DOCKER_CONFIG if is_docker else OCI_CONFIG
        return self.push_document(repository, tag, {
            "schemaVersion": 2,
            "mediaType": DOCKER_MANIFEST if is_docker else OCI_MANIFEST,
            "config": {"mediaType": config_type, "digest": self.push_blob(repository, config), "size": len(config)},
            "layers": described,
        })

    def push_layout(self, repository: str, tag: str, layout: Path) -> None:
        """Pushes the one image of an OCI layout."""
        def blob(digest: str) -> bytes:
            return (layout / "blobs" / digest.replace(":", "/")).read_bytes()

        (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
        manifest = json.loads(blob(entry["digest"]))
        for described in (manifest["config"], *manifest["layers"]):
            assert self.push_blob(repository, blob(described["digest"])) == described["digest"]
        self.ask("PUT", f"/v2/{repository}/manifests/{tag}", blob(entry["digest"]), entry["mediaType"])

    def gets_of(self, digest: str) -> list[int]:
        """Statuses of the GETs of a blob so far."""
        lines = re.findall(rf'"GET /v2/[^ ]*/blobs/{digest}[^"]*" (\d+)', self.log.read_text(errors="replace"))
        return [int(status) for status in lines]

    def blob_file(self, digest: str) -> Path:
        """Where the registry keeps a blob."""
        hexadecimal = digest.removeprefix("sha256:")
        return self.root / f"docker/registry/v2/blobs/sha256/{hexadecimal[:2]}/{hexadecimal}/data"

    def _answers(self) -> bool:
        try:
            self.ask("GET", "/v2/")
        except urllib.error.HTTPError as error:
            return error.code == 401
        except OSError:
            return False
        return True


@contextmanager
def registry(user: str | None = None, password: str = "", tls: bool = False) -> Iterator[Registry]:
    """A registry with nothing in it; with a user it wants a password, with TLS its certificate is in `cert.pem`."""
    work = Path(tempfile.mkdtemp(prefix="dsec-e2e-registry-"))
    address = free_address()
    config: dict[str, Any] = {
        "version": 0.1,
        "log": {"accesslog": {"disabled": False}, "level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(work / "data")}},
        "http": {"addr": address},
    }
    made = Registry(address, work / "data", work / "log")
    if user is not None:
        file = work / "htpasswd"
        subprocess.run(["htpasswd", "-Bbc", str(file), user, password], check=True, capture_output=True)
        config["auth"] = {"htpasswd": {"realm": "tests", "path": str(file)}}
        made.authorization = "Basic " + b64encode(f"{user}:{password}".encode()).decode()
    if tls:
        certificate, key = work / "cert.pem", work / "key.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
            + ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=registry"]
            # Not one that signs others, which openssl makes by itself and no strict client takes for a server's.
            + ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"],
            check=True,
            capture_output=True,
        )
        config["http"]["tls"] = {"certificate": str(certificate), "key": str(key)}
        made.scheme, made.trust = "https", ssl.create_default_context(cafile=str(certificate))
    # JSON is YAML.
    (work / "config.yml").write_text(json.dumps(config))
    with made.log.open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(work / "config.yml")], stdout=log, stderr=log)
    try:
        until(lambda: made._answers() or process.poll() is not None, "the registry's first answer")
        assert process.poll() is None, made.log.read_text()
        yield made
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(work)


@contextmanager
def cutting(upstream: str, after: int, cuts: int) -> Iterator[tuple[str, list[int]]]:
    """A proxy that ends connections after so many bytes of answers, so many times; its address, and bytes of each cut one."""
    host, port = upstream.rsplit(":", 1)
    server = socket.create_server(("127.0.0.1", 0))
    cut: list[int] = []
    lock = threading.Lock()

    def serve(client: socket.socket) -> None:
        with client, socket.create_connection((host, int(port))) as behind:
            up = threading.Thread(target=pump_up, args=(client, behind), daemon=True)
            up.start()
            passed = 0
            while data := behind.recv(65536):
                with lock:
                    is_cut = passed + len(data) > after and len(cut) < cuts
                    if is_cut:
                        data = data[: after - passed]
                        cut.append(passed + len(data))
                try:
                    client.sendall(data)
                except OSError:
                    break
                passed += len(data)
                if is_cut:
                    break
            for end in (client, behind):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            up.join()

    def pump_up(client: socket.socket, behind: socket.socket) -> None:
        try:
            while data := client.recv(65536):
                behind.sendall(data)
            behind.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def accept() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}", cut
    finally:
        # A close alone leaves a thread in `accept`.
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        accepting.join()
