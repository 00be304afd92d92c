"""Pause and resume: a sandbox that stands still costs next to nothing, and comes back as if nothing had happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from libdsec import Conflict, DSecContainerRunArgs
from libdsec.sync import DSecClient, Sandbox

from platform_under_test import IMAGE, Platform, base_image, platform, until

Start = Callable[..., Sandbox]

pytestmark = pytest.mark.kernel


def events(sandbox: Sandbox) -> list[str]:
    """Names of what happened to it."""
    return [event["event"] for event in sandbox.logs()]


def test_what_runs_goes_on_where_it_was(start: Start) -> None:
    sandbox = start()
    count = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"
    line = sandbox.start(shell="echo before; until [ -e /tmp/go ]; do sleep 0.05; done; echo after")
    sandbox.start(shell=count)
    until(lambda: sandbox.run_shell("cat /tmp/count").ok, "the background job")
    info = sandbox.pause()
    assert info.state == "paused" and info.pauses and info.pauses.count == 1 and info.pauses.since_ms
    # To look is no use of it.
    assert sandbox.refresh().state == "paused" and sandbox.refresh().usage is not None
    assert sandbox.pause().pauses == info.pauses, "paused twice"
    before = int(sandbox.run_shell("cat /tmp/count").stdout)
    assert sandbox.refresh().state == "running", "a command resumed it"
    until(lambda: int(sandbox.run_shell("cat /tmp/count").stdout) > before, "the background job going on")
    sandbox.run_shell("touch /tmp/go")
    ended = line.wait(timeout=30)
    assert ended.ok and ended.stdout == "before\nafter\n"


#: Never waits.
BUSY = "while :; do :; done"


def stands_still(sandbox: Sandbox) -> bool:
    """Whether one in which something would always run uses no processor."""
    first = sandbox.refresh().usage
    time.sleep(0.5)
    second = sandbox.refresh().usage
    assert first and second
    return second.cpu_seconds == first.cpu_seconds


def test_nothing_runs_while_it_is_paused(start: Start) -> None:
    sandbox = start()
    sandbox.start(shell=BUSY)
    assert not stands_still(sandbox)
    sandbox.pause()
    assert stands_still(sandbox)


def test_time_limits_do_not_run_while_it_is_paused(start: Start) -> None:
    sandbox = start()
    command = sandbox.start(shell="sleep 0.2; sleep 0.2; echo whole", timeout=2.0)
    sandbox.pause()
    time.sleep(3)
    sandbox.resume()
    ended = command.wait(timeout=30)
    assert ended.ok and not ended.timed_out


def test_its_lifetime_does_not_run_while_it_is_paused(start: Start) -> None:
    sandbox = start(max_lifetime=3)
    sandbox.pause()
    time.sleep(3.5)
    assert sandbox.resume().state == "running"
    info = sandbox.wait(timeout=30)
    assert info.reason and info.reason.code == "lifetime"
    assert info.pauses and info.pauses.total_ms >= 3000
    assert info.ended_ms and info.running_ms
    assert info.ended_ms - info.running_ms - info.pauses.total_ms > 2500, info


def test_many_requests_resume_it_once(start: Start) -> None:
    sandbox = start()
    sandbox.pause()
    with ThreadPoolExecutor(24) as threads:
        results = list(threads.map(lambda _: sandbox.run_shell("echo here").stdout, range(48)))
    assert results == ["here\n"] * 48
    assert events(sandbox).count("resumed") == 1


def test_a_paused_one_is_stopped_with_and_without_grace(start: Start) -> None:
    at_once, asked = start(), start()
    asked.start(shell="trap 'echo asked > /tmp/asked; exit' TERM; while :; do sleep 0.05; done")
    for sandbox in (at_once, asked):
        sandbox.pause()
    began = time.monotonic()
    assert at_once.stop().state == "stopped"
    assert asked.stop(grace=30).state == "stopped"
    assert time.monotonic() - began < 20, "SIGTERM was not heard"


def test_it_stops_when_it_was_paused_for_too_long(start: Start) -> None:
    sandbox = start(ttl_paused_stop=1)
    sandbox.pause()
    info = sandbox.wait(timeout=30)
    assert info.state == "stopped" and info.reason and info.reason.code == "paused_too_long"


def test_an_idle_one_pauses_itself(start: Start) -> None:
    sandbox = start(ttl_running_stop=1, auto_pause=True)
    sandbox.run_shell("echo kept > /tmp/kept")
    assert sandbox.wait("paused", timeout=30).state == "paused"
    assert sandbox.run_shell("cat /tmp/kept").stdout == "kept\n"
    assert sandbox.wait("paused", timeout=30).pauses


def test_a_task_is_paused_and_resumed_as_one(shared: Platform, client: DSecClient, start: Start) -> None:
    for _ in range(4):
        start(task_id="pauses")
    other = start(task_id="others")
    done = client.pause_task("pauses")
    assert (done.matched, done.done, done.failed) == (4, 4, 0)
    assert client.task("pauses").sandboxes.paused == 4 and client.task("pauses").living == 4
    assert other.refresh().state == "running"
    assert client.resume_task("pauses").done == 4
    assert client.task("pauses").sandboxes.running == 4
    assert shared.dsec("pause", "--task", "pauses").stdout == "pauses: 4 of 4 paused\n"
    assert len(shared.dsec("ps", "--state", "paused", "-q").stdout.split()) >= 4
    assert shared.dsec("resume", "--task", "pauses").stdout == "pauses: 4 of 4 resumed\n"
    assert other.id in shared.dsec("pause", other.id).stdout


def test_a_paused_one_is_packed_and_stays_paused(start: Start) -> None:
    sandbox = start()
    sandbox.run_shell("mkdir -p /work; echo written > /work/file")
    sandbox.start(shell=BUSY)
    sandbox.pause()
    sandbox.pack_diff("of-a-pause")
    assert sandbox.refresh().state == "paused" and stands_still(sandbox)
    assert start(workspace="of-a-pause").run_shell("cat /work/file").stdout == "written\n"


def test_one_that_does_not_live_is_not_paused(start: Start) -> None:
    sandbox = start()
    sandbox.stop()
    with pytest.raises(Conflict, match="stopped"):
        sandbox.pause()
    with pytest.raises(Conflict, match="stopped"):
        sandbox.resume()


def with_swap(state: Path) -> None:
    """Settings of a node with swap of its own."""
    state.mkdir(mode=0o700)
    (state / "edge.toml").write_text("[swap]\nsize_mib = 512\n")


#: Holds 64 MiB that no compression makes smaller, says so, and a second time on SIGUSR1 whether they are what they were.
HOLDER = """
import hashlib, os, signal, time
held = os.urandom(64 << 20)
first = hashlib.sha256(held).hexdigest()
def say(what):
    with open("/tmp/said", "a") as said:
        print(what, file=said)
def check(*_):
    say(hashlib.sha256(held).hexdigest() == first)
signal.signal(signal.SIGUSR1, check)
say("held")
while True:
    time.sleep(0.1)
"""


def test_memory_comes_back_to_the_node_and_then_to_the_sandbox_and_an_edge_that_died_finds_it_paused() -> None:
    with platform(image=False, prepare=with_swap) as running:
        assert str(running.state / "swap") in Path("/proc/swaps").read_text()
        running.dsec("image", "import", IMAGE, str(base_image()))
        client = running.client()
        sandbox = client.run_container(DSecContainerRunArgs(container_image=IMAGE))
        holder = sandbox.start(argv=["python3", "-c", HOLDER])
        until(lambda: sandbox.run_shell("cat /tmp/said").stdout == "held\n", "the memory")
        sandbox.start(shell=BUSY)
        pauses = sandbox.pause().pauses
        assert pauses and pauses.resident_bytes > 64 << 20
        assert pauses.returned_bytes > 0.9 * pauses.resident_bytes, pauses
        usage = sandbox.refresh().usage
        assert usage and usage.memory_bytes < 8 << 20
        running.kill_edge()
        assert Path("/proc/swaps").read_text().count(str(running.state)) == 1
        assert sandbox.refresh().state == "paused" and stands_still(sandbox)
        holder.signal("SIGUSR1")
        until(lambda: sandbox.run_shell("cat /tmp/said").stdout == "held\nTrue\n", "what it held")
        assert sandbox.refresh().state == "running"
        sandbox.pause()
        sandbox.stop()
