"""Tasks: all sandboxes of a job, wherever they are, as one; and many made in one call."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from libdsec import DeadlineExceeded, DSecContainerRunArgs, DSecError, DSecExecArgs, InvalidArgument, NotFound
from libdsec.sync import DSecClient, Sandbox

from cluster import cluster
from platform_under_test import BIN, IMAGE, Platform
from test_shared_store import busybox

Start = Callable[..., Sandbox]


def post(running: Platform, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Status and JSON of a request, lines of JSON as a list."""
    request = urllib.request.Request(
        running.url + path,
        data=json.dumps(body).encode() if body is not None else b"",
        headers={"authorization": f"Bearer {running.key}", **(headers or {})},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            if answer.headers["content-type"] == "application/x-ndjson":
                return answer.status, [json.loads(line) for line in answer]
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def test_a_task_is_counted_and_stopped_as_one(client: DSecClient, start: Start) -> None:
    mine = [start(task_id="rl/job:1") for _ in range(3)]
    other = start(task_id="rl/job:10")
    mine[0].stop()
    status = client.task("rl/job:1")
    assert (status.sandboxes.running, status.sandboxes.stopped, status.living) == (2, 1, 2)
    assert sum(status.nodes.values()) == 2
    assert {task.task_id for task in client.tasks()} >= {"rl/job:1", "rl/job:10"}
    done = client.stop_task("rl/job:1")
    assert (done.matched, done.done, done.failed, done.ok) == (2, 2, 0, True)
    assert [sandbox.refresh().state for sandbox in mine] == ["stopped"] * 3
    assert other.run_shell("true").ok
    # Safe to repeat: there is nothing left.
    assert client.stop_task("rl/job:1").matched == 0
    client.wait_task("rl/job:1", timeout=5)


def test_a_grace_holds_for_all(client: DSecClient, start: Start) -> None:
    stubborn = [start(task_id="graceful") for _ in range(2)]
    for sandbox in stubborn:
        sandbox.start(argv=["sh", "-c", "trap 'echo asked > /tmp/asked' TERM; while :; do sleep 0.1; done"])
    time.sleep(0.5)
    began = time.monotonic()
    assert client.stop_task("graceful", grace=1.5).done == 2
    assert 1.4 < time.monotonic() - began < 30


def test_waiting_for_a_task_ends_with_it(shared: Platform, client: DSecClient, start: Start) -> None:
    sandbox = start(task_id="waits")
    with pytest.raises(DeadlineExceeded, match="1 sandboxes of task waits") as late:
        client.wait_task("waits", timeout=0.2)
    assert late.value.detail == {"task_id": "waits", "left": 1}
    assert "did not end" in shared.dsec("task", "wait", "waits", "--timeout", "1s", check=False).stderr
    waiting = subprocess.Popen([str(BIN / "dsec"), "task", "wait", "waits"], env=shared.env)
    time.sleep(1)
    assert waiting.poll() is None
    sandbox.stop()
    assert waiting.wait(timeout=30) == 0


def test_what_is_wrong_about_tasks_is_said(shared: Platform, client: DSecClient, start: Start) -> None:
    with pytest.raises(NotFound, match="no sandbox belongs to task nothing"):
        client.task("nothing")
    assert client.stop_task("nothing").matched == 0
    assert post(shared, "/v1/tasks/-x/stop")[1]["detail"]["field"] == "task_id"
    status, refused = post(shared, "/v1/tasks/x/stop", {"grace": 1})
    assert status == 400 and "grace" in refused["message"]
    start(task_id="here")
    assert "TASK" in shared.dsec("task", "ls").stdout
    stopped = shared.dsec("task", "stop", "here", "nothing")
    assert stopped.stdout == "here: 1 of 1 ended\nnothing: 0 of 0 ended\n"


def test_many_are_made_in_one_call(shared: Platform, client: DSecClient) -> None:
    args = DSecContainerRunArgs(container_image=IMAGE, task_id="many", exec="echo ready")
    made = list(client.run_containers(args, 20))
    try:
        assert len({sandbox.id for sandbox in made}) == 20
        assert all(sandbox.first_result and sandbox.first_result.stdout == "ready\n" for sandbox in made)
        assert client.task("many").sandboxes.running == 20
    finally:
        assert client.stop_task("many").done == 20
    ids = shared.dsec("create", IMAGE, "--count", "5", "--task", "many-cli").stdout.split()
    assert len(set(ids)) == 5 and client.stop_task("many-cli").done == 5


def test_a_failure_that_all_would_meet_is_not_met_by_all(shared: Platform, client: DSecClient) -> None:
    status, lines = post(shared, "/v1/sandboxes/batch", {"count": 1000, "at_once": 4, "sandbox": {"container_image": "none"}})
    failed = [line for line in lines if line["event"] == "failed"]
    assert status == 200 and 1 <= len(failed) <= 4 and {line["error"]["code"] for line in failed} == {"not_found"}
    assert lines[-1] == {"event": "done", "created": 0, "failed": len(failed), "left": 1000 - len(failed)}
    none = DSecContainerRunArgs(container_image="none")
    with pytest.raises(NotFound) as refused:
        list(client.run_containers(none, 10, at_once=2))
    assert 1 <= refused.value.detail["failed"] <= 2
    failures: list[DSecError] = []
    assert not list(client.run_containers(none, 10, at_once=2, failures=failures))
    assert all(isinstance(failure, NotFound) for failure in failures) and failures
    cli = shared.dsec("create", "none", "--count", "7", check=False)
    assert cli.returncode == 1 and " of 7: " in cli.stderr and cli.stdout == ""
    assert not os.listdir(shared.state / "layers/work")


def test_nonsense_about_many_is_refused(shared: Platform, client: DSecClient) -> None:
    for body, why in (
        ({"count": 0, "sandbox": {"container_image": IMAGE}}, "count is 0; it must be 1 to 100000"),
        ({"count": 1, "at_once": 2000, "sandbox": {"container_image": IMAGE}}, "at_once is 2000"),
        ({"count": 1, "sandbox": {"container_image": IMAGE, "memry": 1}}, "memry"),
        ({"count": 1}, "sandbox"),
    ):
        status, refused = post(shared, "/v1/sandboxes/batch", body)
        assert status == 400 and why in refused["message"], refused
    with pytest.raises(InvalidArgument):
        list(client.run_containers(DSecContainerRunArgs(container_image=IMAGE), 0))


def test_a_first_command_that_cannot_be_started_is_told_and_nothing_stays(shared: Platform) -> None:
    failures: list[DSecError] = []
    with DSecClient(shared.url, shared.key) as client:
        args = DSecContainerRunArgs(container_image=IMAGE, task_id="no-program", exec=DSecExecArgs(argv=["no-such-program"]))
        assert not list(client.run_containers(args, 3, at_once=1, failures=failures))
        # Each is tried: it is not the sandbox that cannot be made.
        assert len(failures) == 3 and all(failure.detail["sandbox_id"] for failure in failures)
        assert client.task("no-program").living == 3
    assert shared.client().task("no-program").living == 0


def test_output_of_many_first_commands_is_whole(client: DSecClient) -> None:
    args = DSecContainerRunArgs(container_image=IMAGE, task_id="loud", exec="head -c 300000 /dev/zero | tr '\\0' x")
    for sandbox in client.run_containers(args, 3):
        assert sandbox.first_result is not None and sandbox.first_result.stdout == "x" * 300_000
    assert client.stop_task("loud").done == 3


def test_what_a_caller_has_is_not_made_again(shared: Platform, client: DSecClient) -> None:
    body = {"count": 6, "skip": [[0, 2], [5, 5]], "sandbox": {"container_image": IMAGE, "task_id": "rest"}}
    _, lines = post(shared, "/v1/sandboxes/batch", body)
    assert sorted(line["index"] for line in lines[:-1]) == [3, 4]
    assert lines[-1] == {"event": "done", "created": 2, "failed": 0, "left": 0}
    assert client.stop_task("rest").done == 2


def test_the_same_call_again_finds_the_same_sandboxes(shared: Platform, client: DSecClient) -> None:
    body = {"count": 6, "sandbox": {"container_image": IMAGE, "task_id": "again"}}

    def ids(attempt: int) -> dict[int, str]:
        headers = {"idempotency-key": "batch-7", "idempotency-attempt": str(attempt)}
        _, lines = post(shared, "/v1/sandboxes/batch", body, headers)
        return {line["index"]: line["sandbox"]["id"] for line in lines[:-1]}

    first = ids(1)
    assert ids(2) == first and len(set(first.values())) == 6
    assert client.stop_task("again").done == 6
    status, refused = post(shared, "/v1/sandboxes/batch", body, {"idempotency-key": "x" * 122})
    assert status == 400 and "121 is the most" in refused["message"]


def test_a_task_spreads_over_nodes_and_ends_on_all_of_them(tmp_path: Path) -> None:
    with cluster(3, {"url": str(tmp_path / "store"), "create": True}) as (control, nodes):
        client = control.client()
        client.images.import_("tools", busybox())
        args = DSecContainerRunArgs(container_image="tools", memory_limit_mb=64, task_id="wide")
        made = Counter(sandbox.info.node for sandbox in client.run_containers(args, 30, keep=True))
        assert made.keys() == {"n1", "n2", "n3"} and made.total() == 30
        status = client.task("wide")
        assert status.nodes == made and status.living == 30
        # Those for which there is no room are told with the reasons.
        for name in ("n1", "n2", "n3"):
            client.cordon_node(name)
        failures: list[DSecError] = []
        assert not list(client.run_containers(args, 3, failures=failures))
        assert len(failures) == 3 and all("3 cordoned" in str(failure) for failure in failures)
        # A node that cannot be asked is a failure that is named, and keeps nobody else's from ending.
        nodes[2].down()
        done = client.stop_task("wide")
        assert (done.done, done.failed, done.ok) == (status.nodes["n1"] + status.nodes["n2"], 1, False)
        assert [(failure.node, failure.sandbox_id) for failure in done.failures] == [("n3", None)]
        assert control.dsec("task", "stop", "wide", check=False).returncode == 1
        assert client.tasks()[0].sandboxes.stopped == done.done

