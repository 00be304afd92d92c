"""Projects, identities and quotas, through the SDK, the command line and real sandboxes."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from libdsec import (
    Conflict,
    DSecContainerRunArgs,
    DSecError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from libdsec.sync import DSecClient

from platform_under_test import BIN, IMAGE, Platform, platform, tar, until

#: A sandbox that costs little.
ARGS = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=64, cpu_cores_limit=0.5, disk_limit_mb=64)


@contextmanager
def acting(running: Platform, key: str, **options: Any) -> Iterator[DSecClient]:
    """A client with another key."""
    with DSecClient(running.url, key, timeout=60, retry_for=2, **options) as client:
        yield client


def somebody(client: DSecClient, project: str, name: str, role: str, **more: Any) -> tuple[int, str]:
    """An identity of a project, with a role there, and a key of it."""
    identity = client.iam.create_identity(name, project=project).identity
    client.iam.grant(identity, role=role, project=project, **more)
    key = client.iam.create_key(identity, "test").key
    assert key is not None and key.startswith("dsec_")
    return identity, key


@pytest.fixture(scope="module")
def two(shared: Platform) -> Iterator[tuple[DSecClient, DSecClient]]:
    """Runtime clients of two projects that know nothing of each other."""
    root = shared.client()
    for project in ("root/one", "root/two"):
        root.iam.create_project(project)
    keys = [somebody(root, project, "trainer", "runtime")[1] for project in ("root/one", "root/two")]
    with acting(shared, keys[0]) as one, acting(shared, keys[1]) as two:
        yield one, two


def test_nobody_sees_touches_or_finds_out_about_anothers(shared: Platform, two: tuple[DSecClient, DSecClient]) -> None:
    one, other = two
    with one.run_container(DSecContainerRunArgs(**{**ARGS.__dict__, "task_id": "job"})) as mine:
        assert mine.info.project == "root/one"
        assert mine.run_shell("echo here").stdout == "here\n"
        assert [sandbox.id for sandbox in one.list(state="running")] == [mine.id]
        assert list(other.list()) == [] and other.tasks() == ()
        never = mine.id[:-4] + "zzzz"
        calls = [
            lambda name: other.get(name),
            lambda name: other._portal.call(other._inner._transport.call("POST", f"/v1/sandboxes/{name}/stop")),
            lambda name: other._portal.call(other._inner._transport.call("DELETE", f"/v1/sandboxes/{name}")),
            lambda name: other._portal.call(other._inner._transport.call("GET", f"/v1/sandboxes/{name}/logs")),
            lambda name: other._portal.call(
                other._inner._transport.call("POST", f"/v1/sandboxes/{name}/execs", body={"shell": "id"})
            ),
            lambda name: other._portal.call(
                other._inner._transport.call("GET", f"/v1/sandboxes/{name}/files", query={"path": "/etc/passwd"})
            ),
            lambda name: other._portal.call(
                other._inner._transport.call("GET", f"/v1/sandboxes/{name}/ports/80/http/")
            ),
        ]
        for call in calls:
            refusals = []
            for name in (mine.id, never):
                with pytest.raises(NotFound) as refused:
                    call(name)
                error = refused.value
                refusals.append(json.dumps([error.message, error.hint, error.detail]).replace(name, "X"))
            # One of another project and one that never was are the same.
            assert refusals[0] == refusals[1]
        assert other.stop_task("job").matched == 0
        with pytest.raises(NotFound):
            other.task("job")
        assert mine.refresh().state == "running"
        # The cluster's key sees both.
        assert mine.id in [sandbox.id for sandbox in shared.client().list(project="root/one")]
        assert mine.id not in [sandbox.id for sandbox in shared.client().list(project="root/two")]
        assert one.stop_task("job").done == 1


def test_a_role_may_do_what_it_says(shared: Platform, two: tuple[DSecClient, DSecClient]) -> None:
    runtime, root = two[0], shared.client()
    assert [image.name for image in runtime.images.list()] == [image.name for image in root.images.list()]
    with runtime.run_container(ARGS) as sandbox:
        for refused in (
            lambda: runtime.toolkits.import_("mine", tar({"opt/a": "a"})),
            lambda: runtime.images.remove(IMAGE),
            lambda: sandbox.pack_diff("mine"),
            lambda: runtime.nodes(),
            lambda: runtime.cordon_node("n1"),
            lambda: runtime.iam.create_project("root/one/sub"),
            lambda: runtime.iam.create_identity("me-too"),
        ):
            with pytest.raises(PermissionDenied) as why:
                refused()
            assert why.value.detail.get("missing"), why.value.detail
        # What looks at a sandbox does not use it.
        _, viewer = somebody(root, "root/one", "viewer", "viewer")
        with acting(shared, viewer) as looks:
            assert looks.get(sandbox.id).info.project == "root/one"
            for refused in (
                lambda: looks.get(sandbox.id).run_shell("id"),
                lambda: looks.get(sandbox.id).stop(),
                lambda: looks.run_container(ARGS),
                lambda: looks.stop_task("any"),
            ):
                with pytest.raises(PermissionDenied):
                    refused()
        assert sandbox.run_shell("true").ok
    # A builder may make what others start from.
    _, builder = somebody(root, "root/one", "builder", "builder")
    with acting(shared, builder) as builds, builds.run_container(ARGS) as sandbox:
        sandbox.run_shell("echo built > /built")
        sandbox.pack_diff("built")
        builds.workspaces.remove("built")
    with pytest.raises(Unauthenticated):
        with acting(shared, "dsec_nobody"):
            pass


def test_what_is_revoked_works_no_longer(shared: Platform) -> None:
    root = shared.client()
    root.iam.create_project("root/brief")
    identity, key = somebody(root, "root/brief", "ci", "runtime")
    narrow = root.iam.create_key(identity, "reads", permissions=["sandbox.read"], expires_in=3600)
    with acting(shared, key) as mine, mine.run_container(ARGS) as sandbox:
        with acting(shared, narrow.key or "") as reads:
            assert reads.get(sandbox.id).id == sandbox.id
            with pytest.raises(PermissionDenied):
                reads.get(sandbox.id).run_shell("id")
        root.iam.set_ceiling("root/brief", ["sandbox.read"])
        with pytest.raises(PermissionDenied):
            sandbox.run_shell("true")
        root.iam.set_ceiling("root/brief", None)
        assert sandbox.run_shell("true").ok
        [grant] = root.iam.identity(identity).grants
        root.iam.revoke_grant(grant.grant)
        with pytest.raises(PermissionDenied):
            sandbox.run_shell("true")
        root.iam.grant(identity, role="runtime", project="root/brief")
        assert sandbox.run_shell("true").ok
    [first] = [each for each in root.iam.identity(identity).keys if each.name == "test"]
    root.iam.revoke_key(first.id)
    with pytest.raises(Unauthenticated):
        with acting(shared, key):
            pass
    with pytest.raises(Conflict, match="identity ci is in root/brief"):
        root.iam.remove_project("root/brief")
    root.iam.remove_identity(identity)
    root.iam.remove_project("root/brief")
    with pytest.raises(NotFound):
        root.iam.project("root/brief")


def test_who_did_what_is_written_down(shared: Platform, two: tuple[DSecClient, DSecClient]) -> None:
    root = shared.client()
    for _ in range(3):
        with pytest.raises(PermissionDenied):
            two[1].cordon_node("n1")
    denied = [entry for entry in root.iam.audit(denied=True) if entry.action == "POST /v1/nodes/{node}/cordon"]
    assert sum(entry.count for entry in denied if entry.project == "root/two") >= 3
    assert denied[0].name == "trainer" and "node.manage" in denied[0].detail
    root.iam.create_project("root/told")
    root.iam.remove_project("root/told")
    done = [(entry.action, entry.target) for entry in root.iam.audit(denied=False)]
    assert done[:2] == [("project.remove", "root/told"), ("project.create", "root/told")]
    lines = json.loads(shared.dsec("audit", "--json", "--changes", "-n", "2").stdout)
    assert [line["action"] for line in lines] == ["project.create", "project.remove"], "the latest last"
    with pytest.raises(PermissionDenied):
        list(two[0].iam.audit())


def test_the_command_line_sets_up_a_team(shared: Platform) -> None:
    def dsec(*arguments: str, key: str | None = None, ok: bool = True) -> str:
        env = {**shared.env, **({"DSEC_API_KEY": key} if key else {})}
        done = subprocess.run([str(BIN / "dsec"), *arguments], env=env, capture_output=True, text=True, timeout=120)
        assert (done.returncode == 0) == ok, done
        return done.stdout if ok else done.stderr

    dsec("project", "create", "root/team", "--quota", "sandboxes=2", "--quota", "container.memory_mib=4096")
    lead = dsec("--project", "root/team", "identity", "create", "lead", "--kind", "person").strip()
    dsec("--project", "root/team", "grant", "add", lead, "--role", "owner")
    key = dsec("key", "create", lead, "--name", "laptop").strip()
    assert "lead (identity" in dsec("whoami", key=key) and "in root/team: everything" in dsec("whoami", key=key)
    # The lead sets up what is below, and nothing else.
    dsec("project", "create", "root/team/job", "--quota", "sandboxes=1", key=key)
    assert "sandboxes" in dsec("project", "create", "root/team/x", "--quota", "pods=1", key=key, ok=False)
    assert "may not" in dsec("project", "set", "root/team", "--quota", "sandboxes=99", key=key, ok=False)
    assert "may not" in dsec("project", "create", "root/others", key=key, ok=False)
    agent = dsec("--project", "root/team/job", "identity", "create", "agent", "--kind", "agent", key=key).strip()
    dsec("--project", "root/team/job", "grant", "add", agent, "--role", "runtime", key=key)
    agents = dsec("key", "create", agent, "--name", "rollout", "--expires-in", "1h", key=key).strip()
    made = dsec("create", IMAGE, "--memory", "64m", key=agents).strip()
    assert dsec("exec", made, "--", "echo", "in", key=agents) == "in\n"
    refused = dsec("create", IMAGE, "--memory", "64m", key=agents, ok=False)
    assert "root/team/job may use 1 sandboxes" in refused or "has no room" in refused, refused
    shown = json.loads(dsec("project", "inspect", "root/team/job", "--json", key=key))
    assert shown["used"]["sandboxes"] == 1 and shown["effective"]["sandboxes"] == 1
    assert "1 of 1" in dsec("project", "ls", key=key)
    assert made in dsec("--project", "root/team", "ps", key=key)
    assert "1 of 1 ended" in dsec("project", "stop", "root/team", key=key)
    dsec("project", "wait", "root/team", "--timeout", "20s", key=key)
    dsec("project", "set", "root/team/job", "--quota", "sandboxes=", key=key)
    assert json.loads(dsec("project", "inspect", "root/team/job", key=key))["quota"] == {}
    keys = json.loads(dsec("identity", "inspect", agent, key=key))["keys"]
    dsec("key", "revoke", keys[0]["id"], key=key)
    assert "revoked" in dsec("ps", key=agents, ok=False)


def test_a_quota_is_never_exceeded_and_can_be_used_up(shared: Platform) -> None:
    root = shared.client()
    root.iam.create_project("root/few", quota={"sandboxes": 5})
    with acting(shared, somebody(root, "root/few", "burst", "runtime")[1]) as mine:
        made, refused = [], []

        def one(_: int) -> None:
            try:
                made.append(mine.run_container(ARGS))
            except ResourceExhausted as error:
                refused.append(error)

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(one, range(12)))
        assert (len(made), len(refused)) == (5, 7)
        assert refused[0].detail["counted"] == "sandboxes", refused[0].detail
        assert sum(sandbox.state == "running" for sandbox in (each.info for each in mine.list())) == 5
        # One ends, and its place can be had at once.
        made.pop().stop()
        made.append(mine.run_container(ARGS))
        with pytest.raises(ResourceExhausted):
            mine.run_container(ARGS)
        # A quota that is lowered takes nothing away; one that is raised counts at once.
        root.iam.set_quota("root/few", {"sandboxes": 2})
        assert all(sandbox.refresh().state == "running" for sandbox in made)
        made.pop().stop()
        with pytest.raises(ResourceExhausted):
            mine.run_container(ARGS)
        root.iam.set_quota("root/few", {"sandboxes": 6})
        made += [mine.run_container(ARGS) for _ in range(2)]
        with pytest.raises(ResourceExhausted):
            mine.run_container(ARGS)
        assert root.iam.project("root/few").used["sandboxes"] == 6


def test_memory_cores_and_creates_are_counted_too(shared: Platform) -> None:
    root = shared.client()
    root.iam.create_project("root/sums", quota={"container.memory_mib": 200, "creates_per_s": 3, "disk_mib": 10_000})
    with acting(shared, somebody(root, "root/sums", "sums", "runtime")[1]) as mine:
        first = [mine.run_container(ARGS) for _ in range(3)]
        with pytest.raises(ResourceExhausted, match="memory|container.memory_mib") as why:
            time.sleep(1.2)
            mine.run_container(ARGS)
        assert why.value.detail["counted"] == "container.memory_mib"
        for sandbox in first:
            sandbox.stop()
        # What a sandbox gets that does not say is counted as well.
        with pytest.raises(ResourceExhausted):
            mine.run_container(DSecContainerRunArgs(container_image=IMAGE))
        root.iam.set_quota("root/sums", {"creates_per_s": 3})
        time.sleep(1.2)
        began, made, late = time.monotonic(), [], 0
        while time.monotonic() - began < 3:
            try:
                made.append((time.monotonic(), mine.run_container(ARGS)))
            except ResourceExhausted:
                late += 1
        assert late > 0
        # Counted when it is let in, which is before it is answered: no four of them within a second but for what an answer takes.
        times = [at for at, _ in made]
        assert len(times) <= 3 * 4, times
        for _, sandbox in made:
            sandbox.stop()
    with pytest.raises(InvalidArgument):
        root.iam.create_project("root/odd", quota={"pods": 1})


def test_quotas_and_keys_outlive_restarts_of_both_servers() -> None:
    with platform() as running:
        root = running.client()
        root.iam.create_project("root/kept", quota={"sandboxes": 3})
        _, key = somebody(root, "root/kept", "ci", "runtime")
        with acting(running, key) as mine:
            made = [mine.run_container(ARGS, keep=True) for _ in range(3)]
            running.kill_edge()
            with pytest.raises(ResourceExhausted):
                mine.run_container(ARGS)
            control = int((running.state / "control.pid").read_text()) if (running.state / "control.pid").exists() else 0
            if not control:
                listed = subprocess.run(["pgrep", "-f", f"dsec-control.*{running.state}"], capture_output=True, text=True)
                control = int(listed.stdout.split()[0])
            os.kill(control, 9)
            until(lambda: answers(mine), "control is back")
            assert all(mine.get(sandbox.id).run_shell("true").ok for sandbox in made)
            with pytest.raises(ResourceExhausted):
                mine.run_container(ARGS)
            mine.get(made[0].id).stop()
            mine.run_container(ARGS, keep=True)
            with pytest.raises(ResourceExhausted):
                mine.run_container(ARGS)
            assert root.iam.stop_project("root/kept").done == 3
            root.iam.wait_project("root/kept", timeout=20)


def answers(client: DSecClient) -> bool:
    try:
        client.iam.whoami()
    except DSecError:
        return False
    return True
