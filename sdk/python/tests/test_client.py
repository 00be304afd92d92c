"""Configuration, errors, retries, time limits and clean-up."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import libdsec
from conftest import ARGS
from fake_api import KEY, FakeApi, Fault
from libdsec import (
    ClientNotOpen,
    CommandFailed,
    Conflict,
    ConnectionFailed,
    DSecClient,
    DSecContainerRunArgs,
    DSecError,
    DSecExecArgs,
    Internal,
    InvalidArgument,
    NotFound,
    RequestTimeout,
    ResourceExhausted,
    Sandbox,
    Unauthenticated,
    Unavailable,
    UnexpectedAnswer,
    _config,
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# Where the platform is


def test_the_environment_comes_before_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('url = "http://file:1"\napi_key = "file-key"\n')
    monkeypatch.setenv("DSEC_CONFIG", str(file))
    client = DSecClient()
    assert client.base_url == "http://file:1"
    assert client.auth_headers == {"authorization": "Bearer file-key"}
    monkeypatch.setenv("DSEC_URL", "http://env:2/v1/")
    monkeypatch.setenv("DSEC_API_KEY", "env-key")
    client = DSecClient()
    assert client.base_url == "http://env:2"
    assert client.auth_headers == {"authorization": "Bearer env-key"}
    assert DSecClient("http://arg:3").base_url == "http://arg:3"


def test_the_files_key_is_not_shown_to_another_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_text('url = "http://file:1"\napi_key = "file-key"\n')
    monkeypatch.setenv("DSEC_CONFIG", str(file))
    with pytest.raises(Unauthenticated, match="no key for http://other:2"):
        DSecClient("http://other:2")


def cases(kind: str) -> list[dict[str, Any]]:
    file = Path(__file__).parents[3] / "tests/configuration.json"
    found: list[dict[str, Any]] = json.loads(file.read_text())[kind]
    return found


@pytest.mark.parametrize("case", cases("paths"), ids=lambda case: str(case["name"]))
def test_the_file_is_where_the_cases_say(case: dict[str, Any]) -> None:
    assert _config.locate(case["env"], case.get("root", False), case["homes"].get) == Path(case["path"])


@pytest.mark.parametrize("case", cases("targets"), ids=lambda case: str(case["name"]))
def test_the_target_is_what_the_cases_say(case: dict[str, Any]) -> None:
    env = case.get("env", {})
    given = (env.get("DSEC_URL"), env.get("DSEC_API_KEY"), env.get("DSEC_CA_FILE"), case.get("file", {}))
    if "error" in case:
        with pytest.raises(InvalidArgument, match=case["error"]):
            _config.join(*given)
        return
    wanted = _config.Target(case["url"], case.get("api_key"), case.get("ca_file"))
    assert _config.join(*given) == wanted


@pytest.mark.parametrize("case", cases("files"), ids=lambda case: str(case["name"]))
def test_a_file_that_is_none_is_refused_as_the_cases_say(case: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(case["text"])
    with pytest.raises(InvalidArgument, match=case["error"]):
        _config.read(file)


def test_no_key_says_what_to_do() -> None:
    with pytest.raises(Unauthenticated, match=r"no key for http://127.0.0.1:7420"):
        DSecClient()


async def test_tls_is_by_the_system_and_a_file_of_certificates(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    fake = FakeApi()
    await fake.start(tls=context)
    try:
        with pytest.raises(ConnectionFailed, match=r"(?i)certificate"):
            async with DSecClient(fake.url, KEY, retry_for=0):
                pass
        async with (
            DSecClient(fake.url, KEY, ca_file=str(certificate)) as client,
            client.container(ARGS) as sb,
        ):
            process = await sb.start("echo hello")
            assert [piece async for piece in process.stream()] == [("stdout", b"hello\n")]
    finally:
        await fake.end()
    with pytest.raises(InvalidArgument, match="cannot be used"):
        DSecClient("https://h", KEY, ca_file=str(key))


async def test_a_proxy_of_the_environment_is_not_used_for_loopback(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with DSecClient(api.url, KEY) as client, client.container(ARGS) as sb:
        process = await sb.start("echo hello")
        assert [piece async for piece in process.stream()] == [("stdout", b"hello\n")]


# Errors


async def test_open_tells_a_bad_key_and_an_absent_platform(api: FakeApi) -> None:
    with pytest.raises(Unauthenticated) as caught:
        await DSecClient(api.url, "bad-key").open()
    assert caught.value.status == 401
    assert caught.value.hint == "dsec key list"
    begin = time.monotonic()
    with pytest.raises(ConnectionFailed, match="cannot be reached") as absent:
        await DSecClient(f"http://127.0.0.1:{free_port()}", KEY).open()
    assert not absent.value.maybe_sent
    assert isinstance(absent.value, ConnectionError)
    assert time.monotonic() - begin < 5


async def test_errors_come_by_kind_with_what_the_platform_said(api: FakeApi, client: DSecClient) -> None:
    with pytest.raises(NotFound) as caught:
        await client.run_container(DSecContainerRunArgs(container_image="missing"))
    error = caught.value
    assert (error.code, error.status, error.hint) == ("not_found", 404, "dsec image list")
    assert error.detail == {"image": "missing"}
    assert error.request_id
    assert len(error.request_id) == 32
    assert "no image missing" in str(error)
    for code, kind in (
        ("resource_exhausted", ResourceExhausted),
        ("internal", Internal),
        ("conflict", Conflict),
    ):
        api.faults = [Fault("GET", "/nodes", "error", code=code)]
        with pytest.raises(kind):
            await client.nodes()
    assert api.count("GET", "/nodes") == 3


async def test_an_answer_that_is_not_the_apis_is_said_to_be_so(api: FakeApi, client: DSecClient) -> None:
    api.faults = [Fault("GET", "/nodes", "html", status=404)]
    with pytest.raises(UnexpectedAnswer, match="HTTP 404"):
        await client.nodes()
    api.faults = [Fault("GET", "/nodes", "html", status=200)]
    with pytest.raises(UnexpectedAnswer, match="not JSON"):
        await client.nodes()


async def test_every_exception_survives_pickling(sb: Sandbox) -> None:
    with pytest.raises(CommandFailed) as caught:
        await sb.run_shell("echo out; echo why >&2; exit 3", check=True)
    assert "exit code 3" in str(caught.value)
    assert "why" in str(caught.value)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, CommandFailed)
    assert copy.result == caught.value.result
    plain = pickle.loads(pickle.dumps(NotFound("gone", hint="look", request_id="r", status=404)))
    assert (plain.hint, plain.request_id, plain.status, plain.code) == ("look", "r", 404, "not_found")


def test_each_kind_has_its_own_code() -> None:
    kinds = [
        value
        for name in libdsec.__all__
        if isinstance(value := getattr(libdsec, name), type) and issubclass(value, DSecError)
    ]
    assert len({kind.code for kind in kinds}) == len(kinds) == 18


async def test_use_without_open_is_refused(api: FakeApi) -> None:
    client = DSecClient(api.url, KEY)
    with pytest.raises(ClientNotOpen, match="not open"):
        await client.nodes()


def test_use_in_another_event_loop_is_refused(api_thread: str) -> None:
    client = DSecClient(api_thread, KEY)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(client.open())
    with pytest.raises(ClientNotOpen, match="another event loop"):
        asyncio.run(client.nodes())
    loop.run_until_complete(client.close())
    loop.close()


# Retries


async def test_a_read_is_tried_again_and_a_refused_one_is_not(api: FakeApi, client: DSecClient) -> None:
    api.faults = [
        Fault("GET", "/nodes", "drop_before", times=2),
        Fault("GET", "/nodes", "error", times=2),
        Fault("GET", "/nodes", "html", times=1, status=502),
    ]
    assert (await client.nodes())[0].node == "n1"
    assert api.count("GET", "/nodes") == 6
    api.faults = [Fault("GET", "/nodes", "error", times=99, code="invalid_argument")]
    with pytest.raises(InvalidArgument):
        await client.nodes()
    assert api.count("GET", "/nodes") == 7


async def test_retries_end(api: FakeApi) -> None:
    async with DSecClient(api.url, KEY, retry_for=0.5) as client:
        api.faults = [Fault("GET", "/nodes", "error", times=10_000)]
        begin = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            await client.nodes()
        assert time.monotonic() - begin < 2
        assert caught.value.attempts > 2


async def test_a_create_whose_answer_is_lost_makes_one_sandbox(api: FakeApi, client: DSecClient) -> None:
    api.faults = [Fault("POST", "/sandboxes", "drop_after"), Fault("POST", "/sandboxes", "error")]
    sb = await client.run_container(ARGS)
    assert list(api.sandboxes) == [sb.id]
    assert api.count("POST", "/sandboxes") == 3
    assert api.attempts == ["1", "2", "3"]


async def test_the_same_key_gives_the_same_sandbox(api: FakeApi, client: DSecClient) -> None:
    first = await client.run_container(ARGS, idempotency_key="k")
    second = await client.run_container(ARGS, idempotency_key="k")
    assert first.id == second.id
    assert api.attempts == [None, None], "who else holds the key is not known"
    with pytest.raises(Conflict):
        await client.run_container(DSecContainerRunArgs(container_image="other"), idempotency_key="k")


@pytest.mark.parametrize("what", ["drop_before", "drop_after", "error"])
@pytest.mark.parametrize("timeout", [10, None])
async def test_a_command_that_may_have_started_is_not_run_again(
    api: FakeApi, sb: Sandbox, what: str, timeout: float | None, tmp_path: Path
) -> None:
    api.faults = [Fault("POST", "/execs", what)]
    with pytest.raises((ConnectionFailed, Unavailable)) as caught:
        await sb.run_shell(f"echo x >> {tmp_path}/ran", timeout=timeout)
    assert caught.value.maybe_sent == (what != "error")
    assert api.count("POST", "/execs") == 1


async def test_a_command_waits_for_a_platform_that_is_not_there_yet(api: FakeApi, sb: Sandbox) -> None:
    port = int(api.url.rsplit(":", 1)[1])
    await api.stop()

    async def back() -> None:
        await asyncio.sleep(0.3)
        await api.start(port)

    returning = asyncio.create_task(back())
    result = await sb.run_shell("echo hello", timeout=5)
    await returning
    assert result.stdout == "hello\n"


async def test_a_running_command_survives_a_restart_of_the_platform(api: FakeApi, sb: Sandbox) -> None:
    running = asyncio.create_task(sb.run_shell("sleep 0.8; echo done", timeout=None))
    await asyncio.sleep(0.2)
    port = int(api.url.rsplit(":", 1)[1])
    await api.stop()
    await asyncio.sleep(0.2)
    await api.start(port)
    assert (await running).stdout == "done\n"
    assert api.count("POST", "/execs") == 1


async def test_polls_go_on_through_lost_answers(api: FakeApi, sb: Sandbox) -> None:
    api.faults = [Fault("GET", f"/execs/ex-{n}", "drop_after", times=1) for n in range(1, 5)]
    assert (await sb.run_shell("echo hello", timeout=None)).stdout == "hello\n"
    assert api.count("POST", "/execs") == 1


async def test_a_removal_whose_answer_is_lost_has_removed(api: FakeApi, sb: Sandbox, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    api.faults = [Fault("DELETE", "/files", "drop_after")]
    await sb.files.remove(str(file))
    assert not file.exists()
    with pytest.raises(NotFound):
        await sb.files.remove(str(file))


# Time limits


@pytest.mark.parametrize("what", ["hang", "trickle"])
async def test_no_call_waits_longer_than_its_limit(api: FakeApi, what: str) -> None:
    async with DSecClient(api.url, KEY, timeout=1) as client:
        await client.nodes()
        api.faults = [Fault("GET", "/nodes", what, times=99)]
        begin = time.monotonic()
        with pytest.raises(RequestTimeout, match="within 1 s") as caught:
            await client.nodes()
        assert time.monotonic() - begin < 3
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.maybe_sent


async def test_a_platform_that_accepts_and_says_nothing_does_not_hang(tmp_path: Path) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.read()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = DSecClient(f"http://127.0.0.1:{port}", KEY, timeout=0.3)
    with pytest.raises(RequestTimeout):
        await client.open()
    client._transport.open()
    with pytest.raises(RequestTimeout):
        await client._transport.websocket("/v1/x")
    await client._transport.close()
    server.close()
    for writer in writers:
        writer.close()
        await writer.wait_closed()


async def test_bad_arguments_are_refused_before_anything_is_sent(api: FakeApi, sb: Sandbox) -> None:
    sent = len(api.requests)
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match="timeout"):
            await sb.run_shell("true", timeout=bad)
    with pytest.raises(InvalidArgument):
        await sb.files.read("")
    with pytest.raises(InvalidArgument):
        await sb.request("GET", 0)
    with pytest.raises(InvalidArgument):
        DSecExecArgs(argv=["a"], shell="b").body(wait=True)
    with pytest.raises(InvalidArgument):
        await sb.stop(grace=-1)
    assert len(api.requests) == sent


# Life and clean-up


async def test_listing_pages_through_and_filters(client: DSecClient) -> None:
    made = [
        await client.run_container(
            DSecContainerRunArgs(container_image="debian", task_id="job/1", labels={"n": str(n), "all": "y"})
        )
        for n in range(5)
    ]
    await client.run_container(ARGS)
    found = [each.id async for each in client.list(task_id="job/1", page=2)]
    assert found == [each.id for each in reversed(made)]
    one = [each async for each in client.list(labels={"n": "3", "all": "y"}, state=["running", "failed"])]
    assert [each.id for each in one] == [made[3].id]
    assert set(await client.stop_all(task_id="job/1")) == {each.id for each in made}
    assert [each async for each in client.list(task_id="job/1", state="running")] == []
    with pytest.raises(InvalidArgument):
        await client.stop_all()


async def test_the_record_the_usage_and_the_wait(api: FakeApi, client: DSecClient, sb: Sandbox) -> None:
    assert sb.usage is None
    info = await sb.refresh()
    assert sb.usage is not None
    assert sb.usage.memory_bytes == 1 << 20
    assert info.limits.cpu_cores_limit == 2.0
    assert (await client.get(sb.id)).id == sb.id
    assert [each["event"] for each in await sb.logs()] == ["created", "running"]
    with pytest.raises(RequestTimeout):
        await sb.wait("stopped", timeout=0.1)
    waiting = asyncio.create_task(sb.wait(timeout=5))
    await asyncio.sleep(0.05)
    await (await client.get(sb.id)).stop()
    assert (await waiting).state == "stopped"
    with pytest.raises(Conflict, match=r"ended as stopped \(asked\)"):
        await sb.wait("running")
    assert (await sb.stop()).ended


async def test_the_first_command_comes_with_the_create(api: FakeApi, client: DSecClient) -> None:
    sb = await client.run_container(DSecContainerRunArgs(container_image="debian", exec="echo first"))
    assert sb.first_result is not None
    assert sb.first_result.stdout == "first\n"
    assert api.count("POST", "/execs") == 0


def states(api: FakeApi) -> list[str]:
    return [record["state"] for record in api.sandboxes.values()]


async def test_the_end_of_the_blocks_stops_what_was_made(api: FakeApi) -> None:
    async with DSecClient(api.url, KEY) as client:
        async with await client.run_container(ARGS):
            pass
        assert states(api) == ["stopped"]
        async with client.container(ARGS):
            pass
        assert states(api) == ["stopped"] * 2
        await client.run_container(ARGS)
        await client.run_container(ARGS, keep=True)
    assert states(api) == ["stopped"] * 3 + ["running"]


async def test_an_exception_in_the_block_is_the_one_that_comes_out(api: FakeApi, client: DSecClient) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.container(ARGS):
            api.faults = [Fault("POST", "/stop", "error", code="internal")]
            raise ZeroDivisionError
    assert states(api) == ["running"]
    await client.close()
    assert states(api) == ["stopped"]


async def test_a_failed_stop_at_the_end_of_the_block_is_told(api: FakeApi, client: DSecClient) -> None:
    with pytest.raises(Internal):
        async with client.container(ARGS):
            api.faults = [Fault("POST", "/stop", "error", code="internal")]


async def test_cancellation_stops_what_was_made_however_often_it_comes(api: FakeApi) -> None:
    inside = asyncio.Event()
    api.stop_delay = 0.2
    outer = DSecClient(api.url, KEY)
    await outer.open()

    async def in_sandbox() -> None:
        async with outer.container(ARGS) as sb:
            inside.set()
            await sb.run_shell("sleep 30", timeout=None)

    async def in_client() -> None:
        async with DSecClient(api.url, KEY) as client:
            sb = await client.run_container(ARGS)
            inside.set()
            await sb.run_shell("sleep 30", timeout=None)

    for work in (in_sandbox, in_client):
        api.sandboxes.clear()
        inside.clear()
        task = asyncio.create_task(work())
        await inside.wait()
        await asyncio.sleep(0.1)
        for _ in range(4):
            task.cancel()
            await asyncio.sleep(0.03)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert states(api) == ["stopped"]
    await outer.close()


async def test_a_cancelled_create_leaves_nothing(api: FakeApi) -> None:
    api.create_delay = 0.3
    async with DSecClient(api.url, KEY) as client:
        task = asyncio.create_task(client.run_container(ARGS))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert states(api) == ["running"]
    assert states(api) == ["stopped"]


async def test_a_create_that_ran_out_of_time_leaves_nothing(api: FakeApi) -> None:
    api.create_delay = 0.3
    async with DSecClient(api.url, KEY) as client:
        with pytest.raises(RequestTimeout):
            await client.run_container(ARGS, timeout=0.1)
    assert states(api) == ["stopped"]


async def test_ctrl_c_stops_what_was_made(api: FakeApi, tmp_path: Path) -> None:
    for module, lines in (
        (
            "async",
            "import asyncio\nfrom libdsec import *\nasync def main():\n"
            " async with DSecClient() as client:\n"
            "  sb = await client.run_container(DSecContainerRunArgs(container_image='debian'))\n"
            "  print('ready', flush=True)\n  await sb.run_shell('sleep 60')\nasyncio.run(main())\n",
        ),
        (
            "sync",
            "from libdsec import *\nfrom libdsec.sync import DSecClient\nwith DSecClient() as client:\n"
            " sb = client.run_container(DSecContainerRunArgs(container_image='debian'))\n"
            " print('ready', flush=True)\n sb.run_shell('sleep 60')\n",
        ),
        (
            "sync at exit",
            "from libdsec import *\nfrom libdsec.sync import DSecClient\n"
            "client = DSecClient()\nclient.open()\n"
            "sb = client.run_container(DSecContainerRunArgs(container_image='debian'))\n"
            "print('ready', flush=True)\nsb.run_shell('sleep 60')\n",
        ),
    ):
        api.sandboxes.clear()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            lines,
            stdout=-1,
            stderr=-1,
            env={**os.environ, "DSEC_URL": api.url, "DSEC_API_KEY": KEY},
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n", module
        await asyncio.sleep(0.2)
        process.send_signal(2)
        _, err = await asyncio.wait_for(process.communicate(), 20)
        assert b"KeyboardInterrupt" in err, err.decode()
        assert states(api) == ["stopped"], (module, err.decode())


async def test_counts_say_what_is_lost_and_what_is_not_known_yet(client: DSecClient) -> None:
    counts = await client.counts(task_id="rl/1")
    assert (counts.gathering, counts.uncounted, counts.sandboxes.lost) == (True, ("n3",), 2)
    node = counts.nodes["n2"]
    assert (node.health, node.known, node.heard_ms, node.sandboxes.lost) == ("lost", "counted", 5, 2)
    assert counts.tasks["rl/1"].lost == 2
    assert (await client.wait_task("job"), await client.wait_task("other")) == (2, 0)
