"""Every feature on a real platform: `pytest -m live` with DSEC_URL, DSEC_API_KEY and DSEC_TEST_IMAGE.

The image needs a POSIX shell with the usual tools (sha256sum, head, stat, tar are those of busybox too).
Tests of ports need python3 in it, and of sessions bash or sh.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import tarfile
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import libdsec.sync
from libdsec import (
    AlreadyExists,
    CommandFailed,
    Conflict,
    DSecClient,
    DSecContainerRunArgs,
    DSecError,
    DSecExecArgs,
    InvalidArgument,
    NotFound,
    RequestTimeout,
    Sandbox,
    Unauthenticated,
)

# A hang is a failure: no test takes three minutes.
pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

MIB = 1 << 20
#: All that this run makes; whatever a failed test leaves is stopped by it.
TASK = f"sdk-live/{uuid.uuid4().hex[:12]}"


def setting(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        pytest.fail(f"live tests need {name} in the environment")
    return value


def args(**more: object) -> DSecContainerRunArgs:
    given: dict[str, object] = {
        "container_image": setting("DSEC_TEST_IMAGE"),
        "memory_limit_mb": 512,
        "ttl_running_stop": 300,
        "max_lifetime": 1800,
        "task_id": TASK,
        "init_user": "root",
        **more,
    }
    return DSecContainerRunArgs(**given)  # type: ignore[arg-type]


@pytest.fixture
async def client() -> AsyncIterator[DSecClient]:
    async with DSecClient(setting("DSEC_URL"), setting("DSEC_API_KEY")) as client:
        yield client
        await client.stop_all(task_id=TASK)


@pytest.fixture
async def sb(client: DSecClient) -> AsyncIterator[Sandbox]:
    async with await client.run_container(args()) as sandbox:
        yield sandbox


@pytest.fixture
async def work(sb: Sandbox) -> str:
    """A fresh directory in the sandbox."""
    path = f"/tmp/live-{uuid.uuid4().hex[:12]}"
    await sb.files.mkdir(path)
    return path


# Sandboxes


async def test_a_sandbox_from_create_to_stop(client: DSecClient) -> None:
    labels = {"suite": "live", "n": "1"}
    sb = await client.run_container(args(labels=labels, env={"LIVE": "yes"}, cwd="/tmp", hostname="live"))
    assert sb.state == "running"
    assert sb.info.task_id == TASK
    assert dict(sb.info.labels) == labels
    assert sb.info.limits.memory_limit_mb == 512
    assert sb.info.limits.ttl_running_stop == 300
    assert sb.info.launch_phases
    result = await sb.run_shell("echo $LIVE; pwd; id -u; hostname")
    assert result.stdout == "yes\n/tmp\n0\nlive\n"
    await sb.refresh()
    assert sb.usage is not None
    assert sb.usage.memory_bytes > 0
    assert sb.usage.pids == 0, "a sandbox with no command has no process of its own"
    assert await sb.logs()
    waiting = asyncio.create_task(sb.wait(timeout=30))
    info = await sb.stop()
    assert info.state == "stopped"
    assert info.reason is not None
    assert info.reason.code == "asked"
    assert (await waiting).state == "stopped"
    assert (await sb.stop()).state == "stopped"
    with pytest.raises(Conflict):
        await sb.run_shell("true")
    with pytest.raises(Conflict):
        await sb.wait("running", timeout=5)


async def test_the_first_command_comes_with_the_create(client: DSecClient) -> None:
    async with await client.run_container(args(exec="echo first; exit 3")) as sb:
        assert sb.first_result is not None
        assert (sb.first_result.exit_code, sb.first_result.stdout) == (3, "first\n")
    command = DSecExecArgs(argv=["head", "-c", "3000000", "/dev/zero"], timeout=20)
    async with await client.run_container(args(exec=command)) as sb:
        assert sb.first_result is not None
        assert sb.first_result.stdout_bytes == bytes(3_000_000)


async def test_one_key_makes_one_sandbox(client: DSecClient) -> None:
    key = uuid.uuid4().hex
    made = await asyncio.gather(*(client.run_container(args(), idempotency_key=key) for _ in range(5)))
    assert len({each.id for each in made}) == 1
    with pytest.raises(AlreadyExists):
        await client.run_container(args(cwd="/tmp"), idempotency_key=key)


async def test_listing_filters_and_stopping_a_task(client: DSecClient) -> None:
    task = f"{TASK}/list"
    made = await asyncio.gather(
        *(client.run_container(args(task_id=task, labels={"n": str(n)})) for n in range(7))
    )
    ids = {each.id for each in made}
    assert {each.id async for each in client.list(task_id=task, page=3)} == ids
    listed = [each async for each in client.list(task_id=task, page=2)]
    assert len(listed) == 7
    one = [each async for each in client.list(task_id=task, labels={"n": "4"}, usage=True)]
    assert [each.id for each in one] == [made[4].id]
    assert one[0].usage is not None
    await made[0].stop()
    running = {each.id async for each in client.list(task_id=task, state="running")}
    assert running == ids - {made[0].id}
    assert (await client.get(made[1].id)).info.task_id == task
    assert set(await client.stop_all(task_id=task)) == ids - {made[0].id}
    final = {each.state async for each in client.list(task_id=task)}
    assert final == {"stopped"}


async def test_the_blocks_stop_and_keep_does_not(client: DSecClient) -> None:
    async with DSecClient(setting("DSEC_URL"), setting("DSEC_API_KEY")) as other:
        async with other.container(args()) as first:
            pass
        second = await other.run_container(args())
        kept = await other.run_container(args(), keep=True)
    assert (await client.get(first.id)).state == "stopped"
    assert (await client.get(second.id)).state == "stopped"
    found = await client.get(kept.id)
    assert found.state == "running"
    await found.stop(grace=0.2)


async def test_a_cancelled_create_leaves_nothing() -> None:
    task = f"{TASK}/cancelled"
    async with DSecClient(setting("DSEC_URL"), setting("DSEC_API_KEY")) as client:
        creates = [asyncio.create_task(client.run_container(args(task_id=task))) for _ in range(5)]
        await asyncio.sleep(0.002)
        for create in creates:
            create.cancel()
        await asyncio.gather(*creates, return_exceptions=True)
    async with DSecClient(setting("DSEC_URL"), setting("DSEC_API_KEY")) as client:
        left = [each async for each in client.list(task_id=task, state=["creating", "running", "stopping"])]
        assert left == []


async def test_idleness_ends_a_sandbox(client: DSecClient) -> None:
    sb = await client.run_container(args(ttl_running_stop=1))
    info = await sb.wait(timeout=30)
    assert info.reason is not None
    assert info.reason.code == "idle"


# Errors


async def test_errors_by_kind(client: DSecClient, sb: Sandbox) -> None:
    with pytest.raises(Unauthenticated) as refused:
        await DSecClient(setting("DSEC_URL"), "no-such-key").open()
    assert refused.value.status == 401
    with pytest.raises(NotFound) as missing:
        await client.run_container(args(container_image="no-such-image-here"))
    assert missing.value.request_id
    assert "no-such-image-here" in str(missing.value)
    with pytest.raises((NotFound, InvalidArgument)):
        await client.get("sb-n1-000000000000")
    for bad in (args(memory_limit_mb=1), args(cpu_cores_limit=100_000.0), args(pids_limit=1)):
        with pytest.raises(InvalidArgument):
            await client.run_container(bad)
    for call in (
        sb.run("no-such-program-here"),
        sb.run_shell("true", cwd="/no/such/directory"),
        sb.run_shell("true", user="no-such-user"),
    ):
        with pytest.raises(InvalidArgument):
            await call
    with pytest.raises(NotFound):
        await sb.attach("ex-0000000000")
    with pytest.raises(NotFound):
        await sb.files.read("/no/such/file")
    with pytest.raises(DSecError):
        await sb.connect(1)
    with pytest.raises(CommandFailed) as failed:
        await sb.run_shell("echo because >&2; exit 9", check=True)
    assert failed.value.result.exit_code == 9
    assert "because" in str(failed.value)


# Commands


async def test_a_command_and_how_it_went(sb: Sandbox) -> None:
    for timeout in (10, 60, None):
        result = await sb.run_shell("printf out; printf err >&2; exit 3", timeout=timeout)
        assert (result.exit_code, result.stdout, result.stderr) == (3, "out", "err")
    result = await sb.run("printf", "%s|", "a b", "$HOME", "ä")
    assert result.stdout == "a b|$HOME|ä|"
    result = await sb.run_shell("echo $X; pwd; id -u", env={"X": "1"}, cwd="/usr", user="65534:65534")
    assert result.stdout == "1\n/usr\n65534\n"
    result = await sb.run_shell("kill -KILL $$")
    assert (result.exit_code, result.signal) == (137, "SIGKILL")
    result = await sb.run_shell("sleep 0.3")
    assert 0.25 < result.duration < 5


async def test_a_hundred_commands_at_once(sb: Sandbox) -> None:
    results = await asyncio.gather(
        *(sb.run_shell(f"sleep 0.{n % 5}; echo {n}; exit {n}", timeout=29 + n % 3) for n in range(100))
    )
    assert [(result.exit_code, result.stdout) for result in results] == [(n, f"{n}\n") for n in range(100)]


async def test_stdin_of_every_size(sb: Sandbox) -> None:
    for size in (0, 1, 70_000, 300_000, 20 * MIB):
        data = random.Random(size).randbytes(size)
        result = await sb.run_shell("sha256sum", stdin=data, timeout=60)
        assert result.stdout.split()[0] == hashlib.sha256(data).hexdigest(), size
    assert (await sb.run("cat", stdin="text ä")).stdout == "text ä"
    assert (await sb.run("head", "-c", "3", stdin=b"abc" * MIB)).stdout == "abc"
    assert (await sb.run("cat")).stdout == ""


async def test_bytes_are_exact(sb: Sandbox) -> None:
    data = bytes(range(256)) * 5000
    result = await sb.run("cat", stdin=data)
    assert result.stdout_bytes == data
    result = await sb.run_shell(r"printf '\303'; printf '\244' >&2")
    assert (result.stdout_bytes, result.stderr_bytes) == (b"\xc3", b"\xa4")


async def test_output_past_the_inline_part_is_whole(sb: Sandbox) -> None:
    line = "i=0; while [ $i -lt 200000 ]; do echo line-$i; i=$((i+1)); done; echo end >&2"
    result = await sb.run_shell(line, timeout=120)
    assert result.stdout == "".join(f"line-{n}\n" for n in range(200_000))
    assert result.stderr == "end\n"
    assert not result.truncated


async def test_output_over_64_mib_is_truncated_and_the_command_goes_on(sb: Sandbox) -> None:
    result = await sb.run_shell("head -c 80000000 /dev/zero; echo done >&2", timeout=120)
    assert result.ok
    assert result.stderr == "done\n"
    assert result.stdout_truncated
    assert not result.stderr_truncated
    assert result.stdout_total == 80_000_000
    assert len(result.stdout_bytes) == 64 * MIB
    few = await sb.run_shell("head -c 5000 /dev/zero; head -c 5000 /dev/zero >&2", output_limit=1000)
    assert (len(few.stdout_bytes), len(few.stderr_bytes), few.truncated) == (1000, 1000, True)


async def test_a_time_limit_kills_the_whole_tree(sb: Sandbox) -> None:
    mark = f"4{random.randrange(10**5, 10**6)}"
    line = f"(setsid sleep {mark} & sleep {mark} & wait) & sleep {mark}"
    begin = time.monotonic()
    result = await sb.run_shell(f"echo before; {line}", timeout=1)
    assert time.monotonic() - begin < 10
    assert result.timed_out
    assert not result.ok
    assert result.stdout == "before\n"
    left = await sb.run_shell(
        "for d in /proc/[0-9]*; do tr '\\0' ' ' < $d/cmdline 2>/dev/null; echo; done"
        f" | grep -x 'sleep {mark} '; true"
    )
    assert left.stdout == ""


async def test_a_background_server_does_not_hold_its_command(sb: Sandbox) -> None:
    begin = time.monotonic()
    result = await sb.run_shell("sleep 60 & echo started", timeout=20)
    assert result.stdout == "started\n"
    assert time.monotonic() - begin < 10


async def test_memory_kills_are_told(client: DSecClient) -> None:
    async with await client.run_container(args(memory_limit_mb=64)) as sb:
        result = await sb.run_shell("head -c 400000000 /dev/zero | tail -c 300000000 | wc -c", timeout=60)
        assert result.oom_kills
        assert (await sb.run_shell("echo alive")).stdout == "alive\n"


async def test_a_stream_and_its_end(sb: Sandbox) -> None:
    process = await sb.start("echo a; sleep 0.3; echo b >&2; sleep 0.3; echo c; exit 7")
    pieces = [piece async for piece in process.stream()]
    assert pieces == [("stdout", b"a\n"), ("stderr", b"b\n"), ("stdout", b"c\n")]
    assert process.exit_code == 7
    assert (await process.wait()).stdout == "a\nc\n"
    out, err = await asyncio.gather(collect(process.stdout()), collect(process.stderr()))
    assert (out, err) == (b"a\nc\n", b"b\n")


async def collect(stream: AsyncIterator[bytes]) -> bytes:
    return b"".join([data async for data in stream])


async def test_many_readers_get_the_same_and_a_slow_one_delays_nobody(sb: Sandbox) -> None:
    step = "head -c 300000 /dev/zero | tr '\\0' $((i%10)); i=$((i+1)); sleep 0.02"
    process = await sb.start(f"i=0; while [ $i -lt 30 ]; do {step}; done")
    slow = (await sb.attach(process.id)).stream()
    await anext(slow)
    readers = [await sb.attach(process.id) for _ in range(4)]
    whole = await asyncio.gather(*(collect(reader.stdout()) for reader in readers))
    attached = b"".join([data async for _, data in process.stream()])
    want = b"".join(str(n % 10).encode() * 300_000 for n in range(30))
    assert all(each == want for each in whole)
    assert attached == want
    await slow.aclose()  # type: ignore[attr-defined]


async def test_reattach_by_id_from_an_offset(client: DSecClient, sb: Sandbox) -> None:
    process = await sb.start(
        "i=0; while [ $i -lt 300 ]; do echo $i; echo e$i >&2; i=$((i+1)); sleep 0.005; done"
    )
    got: dict[str, bytes] = {"stdout": b"", "stderr": b""}
    async for name, data in process.stream():
        got[name] += data
        if len(got["stdout"]) > 100:
            break
    async with DSecClient(setting("DSEC_URL"), setting("DSEC_API_KEY")) as other:
        out, err = process.offsets
        again = await (await other.get(sb.id)).attach(process.id, stdout_offset=out, stderr_offset=err)
        async for name, data in again.stream():
            got[name] += data
        assert again.exit_code == 0
    assert got["stdout"] == "".join(f"{n}\n" for n in range(300)).encode()
    assert got["stderr"] == "".join(f"e{n}\n" for n in range(300)).encode()
    assert process.id in [each.id for each in await sb.execs()]


async def test_streamed_stdin(sb: Sandbox) -> None:
    process = await sb.start("while read line; do echo got $line; done; echo end", stdin=True)
    stream = process.stream()
    for n in range(20):
        await process.write(f"{n}\n")
        assert await anext(stream) == ("stdout", f"got {n}\n".encode())
    await process.close_stdin()
    assert await anext(stream) == ("stdout", b"end\n")
    assert (await process.wait(timeout=10)).ok
    data = random.Random(1).randbytes(10 * MIB)
    process = await sb.start(["sha256sum"], stdin=True)
    for start in range(0, len(data), 3 * MIB):
        await process.write(data[start : start + 3 * MIB])
    await process.close_stdin()
    assert (await process.wait(timeout=30)).stdout.split()[0] == hashlib.sha256(data).hexdigest()


async def test_signals_and_kill(sb: Sandbox) -> None:
    process = await sb.start("trap 'echo got; exit 5' INT; echo ready; while :; do sleep 0.05; done")
    async for _ in process.stdout():
        break
    await process.signal("SIGINT")
    result = await process.wait(timeout=10)
    assert (result.exit_code, result.stdout) == (5, "ready\ngot\n")
    with pytest.raises(RequestTimeout):
        await (await sb.start("sleep 60")).wait(timeout=0.3)
    async with await sb.start("sleep 60 & sleep 60") as process:
        pass
    result = await process.wait(timeout=10)
    assert result.signal == "SIGKILL"
    with pytest.raises(InvalidArgument):
        await (await sb.start("sleep 1")).signal("SIGNONSENSE")


async def test_a_terminal(sb: Sandbox) -> None:
    async with await sb.pty(rows=30, cols=100, argv=["/bin/sh"]) as term:
        await term.write("stty size; tty; echo ma''rk1\n")
        seen, resized = b"", False
        async for name, data in term.stream():
            assert name == "stdout"
            seen += data
            if b"mark1" in seen and not resized:
                resized = True
                await term.resize(40, 120)
                await term.write("stty size; echo ma''rk2; exit 3\n")
        assert b"30 100" in seen
        assert b"40 120" in seen
        assert b"/dev/pts/" in seen
        assert term.exit_code == 3


async def test_a_shell_on_a_terminal_is_left_and_found_again(client: DSecClient, sb: Sandbox) -> None:
    first = await sb.pty(name="term", rows=24, cols=80)
    await first.write("X=found\n")
    again = await (await client.get(sb.id)).pty(name="term")
    assert again.id == first.id
    assert again.session_id == "term"
    await again.write("echo $X-again; exit\n")
    result = await again.wait(timeout=10)
    assert "found-again" in result.stdout


# Sessions


async def test_a_session_keeps_cwd_environment_and_jobs(sb: Sandbox, work: str) -> None:
    async with await sb.session("main", env={"GIVEN": "1"}, cwd=work) as session:
        assert (await session.run_shell("pwd; echo $GIVEN")).stdout == f"{work}\n1\n"
        await session.run_shell("cd /usr; export X=5; Y=6; f() { echo called $1; }", check=True)
        assert (await session.run_shell("pwd; echo $X$Y; f me", timeout=10)).stdout == "/usr\n56\ncalled me\n"
        await session.run_shell("sleep 300 & job=$!", check=True)
        assert (await session.run_shell("kill -0 $job && echo alive")).stdout == "alive\n"
        assert (await session.run_shell("echo err >&2; (exit 4)")).exit_code == 4
        assert (await sb.run_shell("echo $Y", session=session)).stdout == "6\n"
        assert (await sb.run_shell('echo "[$Y]"')).stdout == "[]\n"
        assert [each.id for each in await sb.sessions()] == ["main"]
        assert (await sb.session("main")).info.pid == session.info.pid
        slow, quick = await asyncio.gather(
            session.run_shell("sleep 0.5; echo slow", timeout=10),
            session.run_shell("echo quick", timeout=0.3),
        )
        assert (slow.stdout, quick.stdout) == ("slow\n", "quick\n")
        job = (await session.run_shell("echo $job")).stdout.strip()
    assert await sb.sessions() == []
    assert not (await sb.run_shell(f"kill -0 {job}")).ok
    ended = await sb.session("ended")
    result = await ended.run_shell("exit 9")
    assert (result.exit_code, result.session_ended) == (9, True)
    late = await sb.session("late")
    result = await late.run_shell("sleep 60", timeout=0.5)
    assert result.timed_out
    with pytest.raises(InvalidArgument):
        await sb.run_shell("true", session="main", cwd="/")


# Files


async def test_files(sb: Sandbox, work: str) -> None:
    files = sb.files
    odd = f"{work}/a b + ä %20 'q' \"d\" ?&#"
    info = await files.write(odd, "0123456789", mode=0o640, owner="65534:65534")
    assert (info.size, info.mode, info.uid, info.gid) == (10, 0o640, 65534, 65534)
    assert await files.read_text(odd) == "0123456789"
    assert [each.path for each in await files.list(work)] == [odd.rsplit("/", 1)[1]]
    await files.write(odd, b"ab", offset=4)
    assert await files.read(odd, offset=3, length=4) == b"3ab6"
    assert await collect(files.stream(odd, offset=8)) == b"89"
    await files.write(f"{work}/deep/er/file", [b"a", b"b"])
    assert (await sb.run("cat", f"{work}/deep/er/file")).stdout == "ab"
    with pytest.raises(NotFound):
        await files.write(f"{work}/no/parent", b"", parents=False)
    (await sb.run("ln", "-s", "er/file", f"{work}/deep/link")).check()
    link = await files.stat(f"{work}/deep/link")
    assert (link.kind, link.target) == ("symlink", "er/file")
    assert await files.read(f"{work}/deep/link") == b"ab"
    assert [each.path for each in await files.list(f"{work}/deep", depth=2)] == ["er", "er/file", "link"]
    few = await files.list(f"{work}/deep", limit=1)
    assert (len(few), few.truncated) == (1, True)
    made = await files.mkdir(f"{work}/made", mode=0o700)
    assert (made.is_dir, made.mode) == (True, 0o700)
    with pytest.raises(AlreadyExists):
        await files.mkdir(f"{work}/made", parents=False)
    await files.move(odd, f"{work}/moved")
    assert not await files.exists(odd)
    await files.write(f"{work}/other", "x")
    with pytest.raises(AlreadyExists):
        await files.move(f"{work}/moved", f"{work}/other")
    await files.move(f"{work}/moved", f"{work}/other", overwrite=True)
    with pytest.raises(DSecError):
        await files.remove(f"{work}/deep")
    await files.remove(f"{work}/deep", recursive=True)
    await files.remove(f"{work}/other")
    with pytest.raises(NotFound):
        await files.remove(f"{work}/other")
    assert [each.path for each in await files.list(work)] == ["made"]
    with pytest.raises(DSecError):
        await files.read(work)
    with pytest.raises(DSecError):
        await files.write("/root/forbidden", "x", user="65534:65534")


async def test_a_directory_of_many_files_is_listed_whole(sb: Sandbox, work: str) -> None:
    (await sb.run_shell("i=0; while [ $i -lt 10050 ]; do : > f$i; i=$((i+1)); done", cwd=work)).check()
    assert len(await sb.files.list(work)) == 10_050


async def test_200_mib_both_ways(sb: Sandbox, work: str, tmp_path: Path) -> None:
    block = random.Random(2).randbytes(MIB)
    local, digest = tmp_path / "big", hashlib.sha256()
    with local.open("wb") as file:
        for n in range(200):
            piece = n.to_bytes(4, "big") + block[4:]
            digest.update(piece)
            file.write(piece)
    local.chmod(0o755)
    begin = time.monotonic()
    moved = await sb.files.upload(local, f"{work}/big")
    up = time.monotonic() - begin
    assert moved.bytes == 200 * MIB
    result = await sb.run_shell("sha256sum big; stat -c %a big", cwd=work, timeout=60)
    assert result.stdout.split()[0] == digest.hexdigest()
    assert result.stdout.split()[-1] == "755"
    begin = time.monotonic()
    await sb.files.download(f"{work}/big", tmp_path / "back")
    down = time.monotonic() - begin
    assert hashlib.sha256((tmp_path / "back").read_bytes()).hexdigest() == digest.hexdigest()
    assert (tmp_path / "back").stat().st_mode & 0o777 == 0o755
    assert up < 60
    assert down < 60


def tree(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = "dir"
        else:
            found[name] = (path.stat().st_mode & 0o777, path.read_bytes())
    return found


async def test_a_directory_both_ways(sb: Sandbox, work: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a/b/c").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "a/run").write_text("#!/bin/sh\necho ran\n")
    (source / "a/run").chmod(0o755)
    (source / "a/link").symlink_to("run")
    (source / "ä ö").write_text("x")
    (source / ("long" * 50)).write_text("x")
    (source / "big").write_bytes(random.Random(3).randbytes(30 * MIB))
    for n in range(500):
        (source / "a/b/c" / f"file{n}").write_text(str(n))
    moved = await sb.files.upload(source, f"{work}/tree")
    assert moved.files == 505
    result = await sb.run_shell("a/link && find . -type f | wc -l", cwd=f"{work}/tree", check=True)
    assert result.stdout.split() == ["ran", "504"]
    moved = await sb.files.download(f"{work}/tree", tmp_path / "back")
    assert (moved.files, moved.skipped) == (505, ())
    assert tree(tmp_path / "back") == tree(source)
    await sb.run("ln", "-s", "/etc/passwd", f"{work}/tree/absolute")
    with pytest.raises(InvalidArgument, match="not safe"):
        await sb.files.download(f"{work}/tree", tmp_path / "unsafe")
    moved = await sb.files.download(f"{work}/tree", tmp_path / "unsafe", skip_unsafe=True)
    assert moved.skipped == ("absolute",)
    assert tree(tmp_path / "unsafe") == tree(source)


async def test_a_watch(sb: Sandbox, work: str) -> None:
    await sb.files.mkdir(f"{work}/sub")
    async with sb.files.watch(work, recursive=True) as events:

        async def until(kind: str, path: str) -> None:
            seen: list[object] = []
            while True:
                try:
                    event = await events.next(timeout=10)
                except RequestTimeout:
                    pytest.fail(f"no {kind} of {path}; seen: {seen}")
                assert event is not None
                seen.append(event)
                if (event.kind, event.path) == (kind, path):
                    return

        await sb.run_shell("echo x > one", cwd=work)
        await until("created", "one")
        await sb.run_shell("echo y >> sub/../one; echo z > sub/two", cwd=work)
        await until("modified", "one")
        await until("created", "sub/two")
        await sb.files.remove(f"{work}/one")
        await until("removed", "one")
    with pytest.raises(NotFound):
        await sb.files.watch(f"{work}/nothing").next(timeout=10)


# Ports

SERVER = """
import http.server, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        status = 503 if self.path.startswith("/fail") else 200
        text = "%s %s %s %s" % (self.command, self.path, self.headers.get("authorization"), body.decode())
        self.send_response(status)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())
    do_GET = do_POST
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""

ECHO = """
import socketserver, sys
class H(socketserver.BaseRequestHandler):
    def handle(self):
        while (d := self.request.recv(65536)):
            if d == b"end": break
            self.request.sendall(d)
class S(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
S(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""


async def test_http_and_tcp_ports(sb: Sandbox, work: str) -> None:
    web, echo = 18_080, 18_081
    await sb.files.write(f"{work}/web.py", SERVER)
    await sb.files.write(f"{work}/echo.py", ECHO)
    async with (
        await sb.start(["python3", f"{work}/web.py", str(web)]),
        await sb.start(["python3", f"{work}/echo.py", str(echo)]),
    ):
        await sb.wait_for_port(web)
        await sb.wait_for_port(echo)
        answer = await sb.request("POST", web, "/a/b?c=d%20e", headers={"Authorization": "Basic x"}, json=[1])
        assert (answer.status_code, answer.text) == (200, "POST /a/b?c=d%20e Basic x [1]")
        answer = await sb.request("GET", web, "/fail")
        assert (answer.status_code, answer.text) == (503, "GET /fail None ")
        answers = await asyncio.gather(*(sb.request("GET", web, f"/{n}") for n in range(50)))
        assert [each.text for each in answers] == [f"GET /{n} None " for n in range(50)]
        async with await sb.connect(echo) as stream:
            await stream.write(b"line one\nrest")
            assert await stream.read_until() == b"line one\n"
            assert await stream.read_exactly(4) == b"rest"
            data = random.Random(4).randbytes(5 * MIB)
            got, _ = await asyncio.gather(stream.read_exactly(len(data)), stream.write(data))
            assert got == data
            await stream.write(b"end")
            assert await stream.read(timeout=10) == b""
    with pytest.raises(DSecError):
        await sb.request("GET", 18_999)


# Images, nodes


async def test_images_and_nodes(client: DSecClient, sb: Sandbox, tmp_path: Path) -> None:
    name = setting("DSEC_TEST_IMAGE")
    image = await client.images.get(name)
    assert image.name in {each.name for each in await client.images.list()}
    assert sb.id in image.used_by
    assert image.digest == sb.info.image_digest
    with pytest.raises(Conflict):
        await client.images.remove(name)
    with pytest.raises(NotFound):
        await client.images.get("no-such-image")
    rootfs = tmp_path / "rootfs"
    (rootfs / "etc").mkdir(parents=True)
    (rootfs / "etc/marker").write_text("x")
    tar = tmp_path / "rootfs.tar"
    with tarfile.open(tar, "w") as archive:
        archive.add(rootfs, arcname=".")
    made = f"live-{uuid.uuid4().hex[:8]}"
    imported = await client.images.import_(made, tar)
    assert imported.name == made
    assert await client.images.exists(made)
    await client.images.remove(made)
    assert not await client.images.exists(made)
    with pytest.raises(DSecError):
        await client.images.import_(made, b"this is no archive")
    assert not await client.images.exists(made)
    nodes = await client.nodes()
    assert sb.info.node in {node.node for node in nodes}
    assert all(node.capacity.memory_mib > 0 for node in nodes)
    assert await client.healthy()


# The synchronous twin


def test_the_synchronous_twin(tmp_path: Path) -> None:
    with libdsec.sync.DSecClient(setting("DSEC_URL"), setting("DSEC_API_KEY")) as client:
        with client.container(args()) as sb:
            assert sb.run_shell("echo hello", check=True).stdout == "hello\n"
            process = sb.start("read x; echo $x; echo e >&2", stdin=True)
            process.write("line\n")
            assert sorted(process.stream()) == [("stderr", b"e\n"), ("stdout", b"line\n")]
            assert process.wait(timeout=10).ok
            with sb.session("s") as session:
                session.run_shell("X=1")
                assert sb.run_shell("echo $X", session=session).stdout == "1\n"
            sb.files.write("/tmp/sync-file", b"x" * 3_000_000)
            assert sb.files.download("/tmp/sync-file", tmp_path / "file").bytes == 3_000_000
            with sb.files.watch("/tmp") as events:
                sb.run_shell("echo > /tmp/sync-new")
                for event in events:
                    if event.path == "sync-new":
                        break
            with pytest.raises(NotFound):
                sb.files.read("/no/such/file")
            assert sb.id in [each.id for each in client.list(task_id=TASK)]
        assert client.get(sb.id).state == "stopped"
        kept = client.run_container(args())
    with libdsec.sync.DSecClient(setting("DSEC_URL"), setting("DSEC_API_KEY")) as client:
        assert client.get(kept.id).state == "stopped"
