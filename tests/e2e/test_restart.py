"""What outlives a process of the platform, and what does not outlive the platform."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

import libdsec
from libdsec import DSecClient, DSecContainerRunArgs
from platform_under_test import BIN, IMAGE, PATIENCE, Platform, leftovers, nothing_new, platform, until

pytestmark = pytest.mark.kernel


def test_kill_9_of_the_edge_during_100_commands_loses_nothing() -> None:
    """Commands that run over the kill are complete: every byte, every exit code."""

    async def scenario(running: Platform) -> None:
        async with DSecClient(running.url, running.key, timeout=60 * PATIENCE) as client:
            args = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=512, task_id="kill")
            sandboxes = await asyncio.gather(*(client.run_container(args) for _ in range(10)))
            # Pauses without a process for each: 30,000 of those take a quarter of an hour where they are emulated.
            line = "exec 9<> <(:); for ((i = 0; i < 300; i++)); do echo $0 $i; read -rt 0.02 -u 9; done; exit $0"
            started = await asyncio.gather(
                *(s.start(argv=["bash", "-c", line, str(n)]) for s in sandboxes for n in range(10))
            )
            session = await sandboxes[0].session("work")
            await session.run_shell("cd /usr && X=kept")
            await asyncio.to_thread(running.kill_edge)
            results = await asyncio.gather(*(process.wait(timeout=120 * PATIENCE) for process in started))
            for number, result in enumerate(results):
                n = number % 10
                assert result.exit_code == n
                assert result.stdout == "".join(f"{n} {i}\n" for i in range(300))
            assert (await session.run_shell("echo $PWD $X")).stdout == "/usr kept\n"
            assert (await sandboxes[0].run_shell("echo still")).stdout == "still\n"

    with platform() as running:
        asyncio.run(scenario(running))


def test_a_restart_keeps_records_and_a_dead_sandbox_is_reported() -> None:
    with platform() as running:
        client = running.client()
        alive = client.run_container(DSecContainerRunArgs(container_image=IMAGE, labels={"who": "alive"}))
        ended = client.run_container(DSecContainerRunArgs(container_image=IMAGE))
        dies = client.run_container(DSecContainerRunArgs(container_image=IMAGE))
        ended.stop()
        # The supervisor is stopped so that the edge stays away while a sandbox's agent is killed.
        supervisor = int((running.state / "run/up.pid").read_text().split()[0])
        edge = running.edge_pid()
        os.kill(supervisor, signal.SIGSTOP)
        os.kill(edge, signal.SIGKILL)
        for agent in _agents(running, dies.id):
            os.kill(agent, signal.SIGKILL)
        os.kill(supervisor, signal.SIGCONT)
        until(lambda: _answers(running, edge), "a new edge")
        assert client.get(alive.id).info.labels == {"who": "alive"}
        assert alive.run("true").ok
        assert client.get(ended.id).state == "stopped"
        info = dies.wait(timeout=30 * PATIENCE)
        assert info.state == "failed" and info.reason is not None and info.reason.code == "agent_lost"
        alive.stop()
        assert leftovers(running.state)["sandbox-files"] == 0


def _answers(running: Platform, old: int) -> bool:
    try:
        return running.edge_pid() != old
    except OSError:
        return False


def _agents(running: Platform, sandbox_id: str) -> list[int]:
    """Host pids of a sandbox's first process, found through the record the edge keeps."""
    record = running.state / "sandboxes" / sandbox_id.rsplit("-", 1)[1] / "record.ndjson"
    return [json.loads(record.read_text().splitlines()[-1])["anchor"]["pid"]]


def test_a_lost_agent_fails_its_sandbox_alone_and_leaves_nothing() -> None:
    with platform() as running:
        client = running.client()
        one = client.run_container(DSecContainerRunArgs(container_image=IMAGE))
        other = client.run_container(DSecContainerRunArgs(container_image=IMAGE))
        for agent in _agents(running, one.id):
            os.kill(agent, signal.SIGKILL)
        assert one.wait(timeout=30 * PATIENCE).state == "failed"
        with pytest.raises(libdsec.Conflict):
            one.run("true")
        assert other.run("true").ok
        other.stop()
        assert leftovers(running.state)["sandbox-files"] == 0


def test_control_may_end_and_nothing_is_lost() -> None:
    with platform() as running:
        client = running.client()
        sandbox = client.run_container(DSecContainerRunArgs(container_image=IMAGE))
        process = sandbox.start(shell="sleep 1; echo after")
        pids = subprocess.run(["pgrep", "-x", "dsec-control"], capture_output=True, text=True, check=True).stdout.split()
        ours = [int(p) for p in pids if str(running.state) in Path(f"/proc/{p}/cmdline").read_text()]
        assert len(ours) == 1
        os.kill(ours[0], signal.SIGKILL)
        until(client.healthy, "control is back")
        assert process.wait(timeout=60 * PATIENCE).stdout == "after\n"


def test_down_ends_everything_even_after_the_supervisor_was_killed() -> None:
    with platform() as running:
        client = running.client()
        sandboxes = [client.run_container(DSecContainerRunArgs(container_image=IMAGE)) for _ in range(3)]
        sandboxes[0].start(shell="sleep 1000")
        supervisor = int((running.state / "run/up.pid").read_text().split()[0])
        os.kill(supervisor, signal.SIGKILL)
        # `platform` now calls `dsec down` and compares the machine with what it was.


@pytest.mark.bulk
def test_200_sandboxes_leave_the_machine_as_it_was() -> None:
    """`bench/thousand` does the same with 1,000."""
    with platform() as running:
        before = leftovers(running.state)
        done = running.dsec(
            "bench", "create", "--image", IMAGE, "--count", "200", "--concurrency", "16", "--json"
        )
        assert '"failed":0' in done.stdout.replace(" ", ""), done.stdout
        nothing_new(before, running.state, limit_s=30)
        assert leftovers(running.state)["sandbox-files"] == 0


def test_down_with_nothing_running_is_fine(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(BIN / "dsec"), "down", "--state-dir", str(tmp_path / "none")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
