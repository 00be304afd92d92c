"""How the API behaves on the wire, through both hops: refusals, ids, redirects, and what errors may say."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from libdsec.sync import DSecClient, Sandbox
from platform_under_test import IMAGE, PATIENCE, Platform, platform, until

MIB = 1 << 20


def _api(shared: Platform) -> httpx.Client:
    return httpx.Client(
        base_url=shared.url,
        headers={"authorization": f"Bearer {shared.key}"},
        timeout=30 * PATIENCE,
    )


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file far larger than any socket's buffer."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(96 * MIB)
    return path


def test_a_refused_upload_keeps_its_error(
    start: Callable[..., Sandbox], shared: Platform, large: Path
) -> None:
    stopped, running = start(), start()
    stopped.stop()
    with _api(shared) as api:
        for path, status, code in [
            (f"/v1/sandboxes/{stopped.id}/files?path=/x", 409, "conflict"),
            (f"/v1/sandboxes/{stopped.id}/archive?path=/x", 409, "conflict"),
            (
                f"/v1/sandboxes/{running.id}/files?path=/x&mode=9",
                400,
                "invalid_argument",
            ),
            ("/v1/images/Bad%20Name", 400, "invalid_argument"),
            ("/v1/sandboxes/sb-n1-nothing/files?path=/x", 404, "not_found"),
        ]:
            with large.open("rb") as body:
                answer = api.put(path, content=body)
            assert (answer.status_code, answer.json()["code"]) == (status, code), (
                path,
                answer.text,
            )
            for expect in ("expect:", "expect: 100-continue"):
                done = subprocess.run(
                    [
                        "curl",
                        "-sS",
                        "-T",
                        str(large),
                        "-H",
                        f"authorization: Bearer {shared.key}",
                        "-H",
                        expect,
                        shared.url + path,
                    ],
                    check=False,
                    capture_output=True,
                    text=True,
                    timeout=60 * PATIENCE,
                )
                assert done.returncode == 0, (path, expect, done.stderr)
                assert json.loads(done.stdout)["code"] == code, (path, expect)
    done = shared.dsec("cp", str(large), f"{stopped.id}:/x", check=False)
    assert done.returncode != 0 and "is stopped" in done.stderr, done.stderr


def test_what_makes_and_ends_sandboxes_is_found_in_both_logs(shared: Platform) -> None:
    with _api(shared) as api:
        made = api.post(
            "/v1/sandboxes",
            json={"container_image": IMAGE},
            headers={"x-request-id": "find-me-1"},
        )
        assert made.headers["location"] == f"/v1/sandboxes/{made.json()['id']}"
        api.delete(made.headers["location"], headers={"x-request-id": "find-me-2"})
    for name in ("edge", "control"):
        log = (shared.state / "log" / f"{name}.log").read_text()
        for request in ("find-me-1", "find-me-2"):
            lines = [line for line in log.splitlines() if request in line]
            assert lines and made.json()["id"] in lines[0], (name, request, lines)


def test_disk_in_use_is_what_was_just_written(
    sandbox: Sandbox, shared: Platform
) -> None:
    sandbox.run_shell(
        "head -c 67108864 /dev/urandom > /root/data", timeout=60 * PATIENCE
    )
    with _api(shared) as api:
        used = api.get(f"/v1/sandboxes/{sandbox.id}").json()["usage"]["disk_bytes"]
    assert used >= 64 * MIB, used


def test_a_session_at_its_time_limit_says_so_without_our_paths(
    sandbox: Sandbox, shared: Platform
) -> None:
    with _api(shared) as api:
        body = {
            "shell": "sleep 1000",
            "session_id": "s",
            "timeout_ms": 300,
            "wait": True,
        }
        killed = api.post(f"/v1/sandboxes/{sandbox.id}/execs", json=body).json()
        missing = api.post(
            f"/v1/sandboxes/{sandbox.id}/execs",
            json={"shell": "nosuchprogram", "session_id": "s", "wait": True},
        ).json()
    assert killed["timed_out"] and "/proc/self/fd" not in killed["stderr"], killed
    assert missing["exit_code"] == 127 and "nosuchprogram" in missing["stderr"], missing
    assert "/proc/self/fd" not in missing["stderr"], missing


def test_no_error_names_the_state_directory(sandbox: Sandbox, shared: Platform) -> None:
    base, texts = f"/v1/sandboxes/{sandbox.id}", []
    with _api(shared) as api:
        for method, path, body in [
            ("GET", "/v1/images/nope", None),
            ("PUT", "/v1/images/x", b"no archive"),
            ("PUT", "/v1/images/x", b"\x1f\x8b\x08\x00 damaged"),
            ("PUT", "/v1/images/x", b"\x28\xb5\x2f\xfd damaged"),
            ("GET", f"{base}/files?path=/nope", None),
            ("PUT", f"{base}/files?path=/nope/x", b"x"),
            ("PUT", f"{base}/archive?path=/root/a", b"no archive"),
            ("PUT", f"{base}/archive?path=/root/a", b"\x1f\x8b\x08\x00 damaged"),
            ("GET", f"{base}/execs/ex-nope/stdout", None),
            ("GET", f"{base}/ports/1/http/", None),
            ("POST", f"{base}/execs", b'{"argv": ["/no/such"]}'),
            ("POST", f"{base}/execs", b'{"shell": "x", "user": "ghost"}'),
            ("POST", "/v1/sandboxes", b'{"container_image": "nope"}'),
            ("POST", "/v1/sandboxes", b'{"container_image": "base", "cwd": "/nope"}'),
            ("DELETE", f"/v1/images/{IMAGE}", None),
            ("PATCH", "/v1/images", None),
        ]:
            answer = api.request(method, path, content=body)
            texts.append(answer.text)
            assert '"code"' in answer.text, (method, path, answer.text)
        texts.append(api.get("/v1/images").text)
        texts.append(api.get("/v1/sandboxes").text)
    for text in texts:
        assert str(shared.state) not in text and "/uploads/" not in text, text


def test_redirects_of_a_server_inside_come_back_to_it(
    client: DSecClient, sandbox: Sandbox, shared: Platform
) -> None:
    server = (
        "from http.server import *\n"
        "class H(BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        if self.path == '/':\n"
        "            self.send_response(302)\n"
        "            self.send_header('location', 'http://' + self.headers['host'] + '/in')\n"
        "            self.send_header('content-length', '0')\n"
        "            self.end_headers()\n"
        "            return\n"
        "        body = self.headers['x-forwarded-prefix'].encode()\n"
        "        self.send_response(200)\n"
        "        self.send_header('content-length', str(len(body)))\n"
        "        self.end_headers()\n"
        "        self.wfile.write(body)\n"
        "HTTPServer(('127.0.0.1', 8000), H).serve_forever()\n"
    )
    sandbox.files.write("/root/server.py", server.encode())
    sandbox.start(["python3", "/root/server.py"])
    prefix = f"/v1/sandboxes/{sandbox.id}/ports/8000/http"
    with _api(shared) as api:

        def answered() -> Any:
            answer = api.get(f"{prefix}/", follow_redirects=True)
            return answer if answer.status_code == 200 else None

        assert until(answered, "the server inside").text == prefix


def test_settings_of_the_operator_survive_a_restart() -> None:
    with platform(image=False) as own:
        edge = own.state / "edge.toml"
        edge.write_text(
            edge.read_text()
            + "max_sandboxes = 3 # mine\n[defaults]\nmemory_limit_mb = 777\n"
        )
        own.down()
        listen = own.url.removeprefix("http://")
        own.dsec("up", "--detach", "--state-dir", str(own.state))
        assert "max_sandboxes = 3 # mine" in edge.read_text()
        assert f'"{listen}"' in (own.state / "control.toml").read_text()
        request = urllib.request.Request(
            f"{own.url}/v1/nodes", headers={"authorization": f"Bearer {own.key}"}
        )
        with urllib.request.urlopen(request, timeout=30 * PATIENCE) as answer:
            assert answer.status == 200
