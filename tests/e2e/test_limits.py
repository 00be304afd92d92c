"""Limits hold, and say so."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from libdsec.sync import DSecClient, Sandbox
from platform_under_test import PATIENCE, until

pytestmark = pytest.mark.kernel


def test_a_memory_bomb_is_killed_and_named_and_the_sandbox_lives(start: Callable[..., Sandbox]) -> None:
    sandbox = start(memory_limit_mb=64)
    result = sandbox.run("python3", "-c", "b = bytearray(500 << 20); print(len(b))", timeout=60 * PATIENCE)
    assert result.signal == "SIGKILL" and result.exit_code == 137
    assert [kill.process for kill in result.oom_kills] == ["python3"]
    assert sandbox.run("true").ok
    usage = sandbox.refresh().usage
    assert usage is not None and usage.oom_kills >= 1
    assert usage.memory_peak_bytes <= 64 << 20


def test_memory_in_tmp_counts_and_is_bounded(start: Callable[..., Sandbox]) -> None:
    sandbox = start(memory_limit_mb=64)
    result = sandbox.run_shell("head -c 200M /dev/zero > /tmp/x; stat -c %s /tmp/x; rm /tmp/x")
    assert int(result.stdout) <= 32 << 20
    assert "No space left" in result.stderr


def test_an_upload_into_memory_counts_as_the_sandboxs(start: Callable[..., Sandbox]) -> None:
    sandbox = start(memory_limit_mb=256)
    content = bytes(range(256)) * (100 << 12)
    sandbox.files.write("/tmp/x", content)
    assert sandbox.files.read("/tmp/x") == content
    usage = sandbox.refresh().usage
    assert usage is not None and usage.memory_bytes >= 100 << 20


def test_a_fork_bomb_stays_within_its_sandbox(start: Callable[..., Sandbox]) -> None:
    bombed, other = start(pids_limit=64), start()
    endless = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    bomb = bombed.start(argv=["python3", "-c", endless], timeout=max(5, 2 * PATIENCE))
    usage = until(lambda: (u := bombed.refresh().usage) and u.pids > 30 and u, "the bomb's growth")
    assert usage.pids <= 64
    assert other.run("true").ok
    assert bomb.wait(timeout=60 * PATIENCE).exit_code is not None
    until(lambda: bombed.run("true").ok, "the sandbox is free after the time limit")


def test_the_disk_limit_is_exact_enough_and_removing_helps(start: Callable[..., Sandbox]) -> None:
    sandbox = start(disk_limit_mb=64)
    full = sandbox.run_shell("head -c 200M /dev/zero > /root/x; stat -c %s /root/x")
    assert int(full.stdout) <= 64 << 20
    assert "quota" in full.stderr.lower() or "No space" in full.stderr
    again = until(
        lambda: sandbox.run_shell("rm -f /root/x; sync; head -c 10M /dev/zero > /root/y").ok,
        "room after the file was removed",
    )
    assert again


def test_the_limit_of_files_holds(start: Callable[..., Sandbox]) -> None:
    sandbox = start(disk_files_limit=2000, disk_limit_mb=512)
    maker = (
        "import os\nos.mkdir('/root/d')\nn = 0\ntry:\n"
        "    while n < 2000000:\n        open(f'/root/d/{n}', 'w').close(); n += 1\n"
        "except OSError as error:\n    print(n, error.errno)\n"
    )
    result = sandbox.run("python3", "-c", maker, timeout=120 * PATIENCE)
    made, errno = map(int, result.stdout.split())
    assert errno == 122 and made < 2_000_000


def test_the_cpu_quota_holds(start: Callable[..., Sandbox]) -> None:
    sandbox = start(cpu_cores_limit=0.2)
    before, started = sandbox.refresh().usage, time.monotonic()
    sandbox.run_shell("while :; do :; done", timeout=3)
    after, wall = sandbox.refresh().usage, time.monotonic() - started
    assert before is not None and after is not None
    used = after.cpu_seconds - before.cpu_seconds
    # A period is 100 ms; the shell's start and end may touch one more each.
    assert 0.05 * wall < used < 0.2 * wall + 0.2, (used, wall)


def test_open_files_are_limited(start: Callable[..., Sandbox]) -> None:
    sandbox = start(open_files_limit=64)
    script = "fs = []\ntry:\n    while True: fs.append(open('/dev/null'))\nexcept OSError as e: print(len(fs), e.errno)"
    opened, errno = map(int, sandbox.run("python3", "-c", script).stdout.split())
    assert (opened, errno) == (61, 24)


def test_a_lifetime_ends_a_busy_sandbox_and_idle_ends_an_idle_one(
    client: DSecClient, start: Callable[..., Sandbox]
) -> None:
    limit_s = int(max(2, PATIENCE / 2))
    busy, idle = start(max_lifetime=limit_s), start(ttl_running_stop=limit_s)
    busy.start(shell="while :; do sleep 0.1; done")
    for sandbox, reason in ((busy, "lifetime"), (idle, "idle")):
        info = sandbox.wait("stopped", timeout=30 * PATIENCE)
        assert info.reason is not None and info.reason.code == reason


def test_a_time_limit_ends_the_whole_tree_daemons_too(sandbox: Sandbox) -> None:
    line = "setsid sh -c 'sleep 1000 & sleep 1000' & (sleep 1001 &) ; sleep 1000"
    result = sandbox.run_shell(line, timeout=1)
    assert result.timed_out and result.signal == "SIGKILL"
    # The word is put together so that the counter does not count itself.
    counter = "import os; print(sum(b'sle' + b'ep' in open(f'/proc/{p}/cmdline', 'rb').read() for p in os.listdir('/proc') if p.isdigit()))"
    until(lambda: sandbox.run("python3", "-c", counter).stdout == "0\n", "no sleep is left")


@pytest.mark.bulk
def test_a_gigabyte_with_no_reader_is_counted_cut_and_bounded(sandbox: Sandbox) -> None:
    result = sandbox.run("head", "-c", "1G", "/dev/zero", timeout=120 * PATIENCE)
    assert result.ok and result.truncated
    assert len(result.stdout_bytes) == 64 << 20
    assert not any(result.stdout_bytes)


def test_a_time_limit_holds_even_when_something_traces_the_command(sandbox: Sandbox) -> None:
    victim = sandbox.start(argv=["sleep", "1000"], timeout=max(3, PATIENCE))
    pid = victim.refresh().pid
    seize = (
        "import ctypes, time\n"
        f"libc = ctypes.CDLL(None, use_errno=True); print(libc.ptrace(0x4206, {pid}, None, None), flush=True)\n"
        "time.sleep(1000)\n"
    )
    tracer = sandbox.start(argv=["python3", "-c", seize])
    until(lambda: tracer.refresh().stdout_bytes > 0, "the tracer has tried")
    assert next(iter(tracer.stdout())) == b"0\n", "the command is not traced"
    result = victim.wait(timeout=30 * PATIENCE)
    assert result.timed_out and result.signal == "SIGKILL"
    tracer.kill()
    assert sandbox.run("true").ok
