"""Bad input gets a clear error that names what was wrong, and nothing is left of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import libdsec
from libdsec import DSecContainerRunArgs
from libdsec.sync import DSecClient, Sandbox
from platform_under_test import BIN, IMAGE, Platform, free_address, leftovers, nothing_new, stored_files, until


@pytest.mark.parametrize(
    "field, value",
    [
        ("memory_limit_mb", 0),
        ("memory_limit_mb", 10**9),
        ("cpu_cores_limit", 0),
        ("cpu_cores_limit", -1),
        ("cpu_cores_limit", 4096),
        ("pids_limit", 0),
        ("disk_limit_mb", 0),
        ("disk_limit_mb", 10**12),
        ("disk_files_limit", 1),
        ("open_files_limit", 0),
        ("max_lifetime", 0),
        ("cpu_weight", 0),
        ("hostname", "no spaces"),
        ("labels", {"": "x"}),
    ],
)
def test_a_value_out_of_range_is_named(client: DSecClient, shared: Platform, field: str, value: Any) -> None:
    before = leftovers(shared.state)
    with pytest.raises(libdsec.InvalidArgument) as caught:
        client.run_container(DSecContainerRunArgs(container_image=IMAGE, **{field: value}))
    assert field.replace("cpu_cores_limit", "cpu_")[:4] in caught.value.message
    nothing_new(before, shared.state)


def test_negative_and_unknown_fields_are_refused(shared: Platform) -> None:
    for body in ({"container_image": IMAGE, "memory_limit_mb": -5}, {"container_image": IMAGE, "colour": "red"}, [], 7):
        status, answer = _post(shared, "/v1/sandboxes", json.dumps(body).encode())
        assert (status, answer["code"]) == (400, "invalid_argument"), answer
        assert answer["message"]


def test_unknown_image_user_and_directory(client: DSecClient, shared: Platform) -> None:
    before = leftovers(shared.state)
    with pytest.raises(libdsec.NotFound, match="no-such-image"):
        client.run_container(DSecContainerRunArgs(container_image="no-such-image"))
    with pytest.raises(libdsec.InvalidArgument, match="nobody-here"):
        client.run_container(DSecContainerRunArgs(container_image=IMAGE, init_user="nobody-here"))
    with pytest.raises(libdsec.InvalidArgument, match="/no/such/place"):
        client.run_container(DSecContainerRunArgs(container_image=IMAGE, cwd="/no/such/place"))
    nothing_new(before, shared.state)


def test_commands_that_cannot_be_started(sandbox: Sandbox) -> None:
    for argv, word in (
        (["no-such-program"], "no-such-program"),
        (["/etc/passwd"], "/etc/passwd"),
        (["/tmp"], "/tmp"),
        (["true\0x"], "NUL"),
        (["x" * 200_000], "131"),
    ):
        with pytest.raises(libdsec.DSecError) as caught:
            sandbox.run(*argv)
        assert word in caught.value.message, caught.value
    with pytest.raises(libdsec.InvalidArgument, match="/nowhere"):
        sandbox.run("true", cwd="/nowhere")
    with pytest.raises(libdsec.InvalidArgument, match="ghost"):
        sandbox.run("true", user="ghost")
    with pytest.raises(libdsec.DSecError):
        sandbox.run("true", env={f"N{i}": "x" * 100_000 for i in range(40)})
    assert sandbox.run("true").ok


def test_hostile_paths_of_files(sandbox: Sandbox) -> None:
    sandbox.run_shell("mkfifo /root/pipe; ln -s ../../../../../../etc/passwd /root/up; ln -s loop /root/loop", check=True)
    host = Path("/etc/hostname").read_text()
    assert sandbox.files.read_text("../../../../../../etc/hostname") != host
    assert sandbox.files.read_text("/root/up") == sandbox.run("cat", "/etc/passwd").stdout
    for path in ("/root/pipe", "/dev/zero", "/root", "/root/loop", "/root/none", "/dev/pts/ptmx"):
        with pytest.raises(libdsec.DSecError) as caught:
            sandbox.files.read(path)
        assert path in caught.value.message
    for path in ("/root/pipe", "/dev/null", "/root", "/proc/version"):
        with pytest.raises(libdsec.DSecError):
            sandbox.files.write(path, b"x")


def test_an_upload_that_is_cut_off_changes_nothing(shared: Platform, sandbox: Sandbox) -> None:
    sandbox.files.write("/root/kept", "before")
    with _raw(shared) as connection:
        connection.sendall(
            f"PUT /v1/sandboxes/{sandbox.id}/files?path=/root/kept HTTP/1.1\r\nhost: x\r\n"
            f"authorization: Bearer {shared.key}\r\ncontent-length: 1000000\r\n\r\n".encode()
            + b"x" * 100_000
        )
        until(lambda: len(sandbox.files.list("/root")) > 3, "the unfinished file beside the old one")
    until(lambda: {f.path for f in sandbox.files.list("/root")} == {".bashrc", ".profile", "kept"}, "only the old file")
    assert sandbox.files.read_text("/root/kept") == "before"


def test_a_caller_that_hangs_up_mid_exec_does_not_end_the_command(shared: Platform, sandbox: Sandbox) -> None:
    body = json.dumps({"shell": "sleep 1; echo done > /root/finished", "wait": True}).encode()
    with _raw(shared) as connection:
        connection.sendall(
            f"POST /v1/sandboxes/{sandbox.id}/execs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {shared.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        until(lambda: len(sandbox.execs()) == 1, "the command has started")
    until(lambda: sandbox.files.exists("/root/finished"), "the command went on")


def test_a_caller_that_hangs_up_mid_create_leaves_a_whole_sandbox_or_none(client: DSecClient, shared: Platform) -> None:
    body = json.dumps({"container_image": IMAGE, "task_id": "hangup"}).encode()
    head = (
        f"POST /v1/sandboxes HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {shared.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    for _ in range(20):
        with _raw(shared) as connection:
            connection.sendall(head + body)
    until(
        lambda: all(s.state in ("running", "stopped") for s in client.list(task_id="hangup")), "no create is half done"
    )
    for sandbox in client.list(task_id="hangup", state="running"):
        assert sandbox.run("true").ok
    client.stop_all(task_id="hangup")


def test_the_same_idempotency_key_gives_one_sandbox(client: DSecClient) -> None:
    args = DSecContainerRunArgs(container_image=IMAGE, task_id="idempotent")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: client.run_container(args, idempotency_key="once").id, range(8)))
    assert len(set(made)) == 1
    with pytest.raises(libdsec.DSecError) as caught:
        other = DSecContainerRunArgs(container_image=IMAGE, task_id="idempotent", cpu_cores_limit=1)
        client.run_container(other, idempotency_key="once")
    assert caught.value.status == 409
    client.stop_all(task_id="idempotent")


def test_wrong_key_no_key_and_unknown_paths_have_the_one_error_shape(shared: Platform) -> None:
    for path, key, status, code in (
        ("/v1/sandboxes", None, 401, "unauthenticated"),
        ("/v1/sandboxes", "dsec_wrong", 401, "unauthenticated"),
        ("/v1/nothing", shared.key, 404, "not_found"),
        ("/v1/sandboxes/none", shared.key, 400, "invalid_argument"),
        ("/v1/sandboxes/sb-other-abcdefabcdef", shared.key, 404, "not_found"),
    ):
        got, answer = _get(shared, path, key)
        assert (got, answer["code"]) == (status, code), (path, answer)
        assert set(answer) == {"code", "message", "detail", "hint"}


def test_an_image_in_use_is_not_removed(shared: Platform, sandbox: Sandbox) -> None:
    done = shared.dsec("image", "rm", IMAGE, check=False)
    assert done.returncode == 1 and sandbox.id in done.stderr


def layer_files(platform: Platform) -> list[Path]:
    """All that the store and the node keep of layers."""
    return sorted(stored_files(platform) | set((platform.state / "layers").rglob("*")))


@pytest.mark.parametrize("content", [b"", b"garbage" * 1000, b"\x1f\x8b" + b"\0" * 100])
def test_corrupt_archives_are_refused_and_leave_nothing(shared: Platform, tmp_path: Path, content: bytes) -> None:
    archive = tmp_path / "bad.tar"
    archive.write_bytes(content)
    kept = layer_files(shared)
    done = shared.dsec("image", "import", "bad", str(archive), check=False)
    assert done.returncode == 1 and done.stderr.startswith("error:")
    assert layer_files(shared) == kept


def test_up_twice_and_a_port_in_use(shared: Platform, tmp_path: Path) -> None:
    done = shared.dsec("up", "--detach", "--state-dir", str(shared.state), check=False)
    assert done.returncode != 0 and "already" in done.stderr and any(c.isdigit() for c in done.stderr)
    before = leftovers()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = shared.dsec("up", "--detach", "--state-dir", str(tmp_path / "s"), "--listen", address, check=False)
    assert done.returncode != 0 and address in done.stderr
    nothing_new(before)


def test_not_root_is_told_so(tmp_path: Path) -> None:
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", str(BIN / "dsec"), "up"],
        capture_output=True,
        text=True,
        env={**os.environ, "DSEC_CONFIG": str(tmp_path / "c.toml")},
        timeout=60,
    )
    assert done.returncode != 0 and "root" in done.stderr


def test_a_full_state_disk_is_told_so_and_nothing_is_left(shared: Platform, tmp_path: Path) -> None:
    before = leftovers()
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=True)
    try:
        (small / "fill").write_bytes(b"x" * 900_000)
        env = {**shared.env, "DSEC_CONFIG": str(tmp_path / "c.toml")}
        done = subprocess.run(
            [str(BIN / "dsec"), "up", "--detach", "--state-dir", str(small / "s"), "--listen", free_address()],
            capture_output=True,
            text=True,
            env=env,
            timeout=60,
        )
        assert done.returncode != 0
        assert "full" in done.stderr and str(small) in done.stderr, done.stderr
    finally:
        subprocess.run(["umount", str(small)], check=True)
    nothing_new(before)


def _raw(platform: Platform) -> socket.socket:
    host, port = platform.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def _request(platform: Platform, path: str, key: str | None, body: bytes | None) -> tuple[int, Any]:
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(platform.url + path, headers=headers, data=body)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def _get(platform: Platform, path: str, key: str | None) -> tuple[int, Any]:
    return _request(platform, path, key, None)


def _post(platform: Platform, path: str, body: bytes) -> tuple[int, Any]:
    return _request(platform, path, platform.key, body)
