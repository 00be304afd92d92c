"""The client."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any

from ._args import DSecContainerRunArgs, set_only
from ._cleanup import shielded
from ._config import resolve
from ._iam import Iam
from ._images import Images, events
from ._records import NodeStatus, SandboxInfo
from ._sandbox import Sandbox, sandbox_path
from ._tasks import Counts, TaskOutcome, TaskStatus, stop_all, tell_all, wait_for_end
from ._transport import Backoff, Retry, Transport, segment
from ._version import __version__
from .errors import ConnectionFailed, DSecError, InvalidArgument, Unavailable, error_of_body

log = logging.getLogger("libdsec")

#: Stops at once of many sandboxes: enough to keep a node busy, few enough to leave it connections.
_STOPS_AT_ONCE = 32
#: Seconds that `open` goes on trying: a wrong address should be told soon.
_OPEN_RETRY = 2.0
_LIVE = ("creating", "running", "pausing", "paused", "resuming", "stopping")


def _ranges(numbers: set[int]) -> list[list[int]]:
    """Numbers as ranges with both ends."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def _task_path(task_id: str) -> str:
    return f"/v1/tasks/{segment(task_id)}"


def _node_path(name: str) -> str:
    return f"/v1/nodes/{segment(name)}"


class DSecClient:
    """A client of one platform, for one event loop.

    ::

        async with DSecClient() as client:
            args = DSecContainerRunArgs(container_image="debian", ttl_running_stop=300)
            async with await client.run_container(args) as sb:
                print((await sb.run_shell("uname -a")).stdout)

    - `base_url`, `api_key`: default `DSEC_URL` and `DSEC_API_KEY`, else what `dsec up` wrote to
      `$DSEC_CONFIG` or `~/.config/dsec/config.toml`.
    - `timeout`: seconds that each call may take, unless it is given its own.
    - `command_timeout`: seconds that a command of `run_shell` and `run` may take, unless it is given its own;
      None: no limit.
    - `retry_for`: seconds that a call which is safe to repeat is repeated while the platform is away.
    - `ca_file`: PEM file of certificates to trust beside the system's, for https.
    - `stop_timeout`: seconds that stopping a sandbox may take at the end of an `async with`.
    - `project`: the project to act in: sandboxes belong to it, and lists show what is in it. Default:
      `DSEC_PROJECT`, else that of the key.

    Closing the client stops the sandboxes that it made and that still run, also when the program is
    cancelled or interrupted; those made with `keep=True` stay.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 60.0,
        *,
        command_timeout: float | None = 3600.0,
        retry_for: float = 30.0,
        max_connections: int = 1000,
        stop_timeout: float = 30.0,
        ca_file: str | None = None,
        project: str | None = None,
    ) -> None:
        if not timeout > 0:
            raise InvalidArgument(f"timeout is {timeout!r}; it must be a number of seconds above 0")
        target = resolve(base_url, api_key, ca_file)
        self._transport = Transport(
            target.base_url,
            target.api_key or "",
            timeout=timeout,
            retry_for=retry_for,
            max_connections=max_connections,
            user_agent=f"libdsec/{__version__}",
            ca_file=target.ca_file,
            project=project or os.environ.get("DSEC_PROJECT") or None,
        )
        self._command_timeout = command_timeout
        self._stop_timeout = stop_timeout
        self._iam = Iam(self._transport)
        self._images = Images(self._transport)
        self._workspaces = Images(self._transport, "/v1/layers/workspace")
        self._toolkits = Images(self._transport, "/v1/layers/toolkit")
        self._snapshots = Images(self._transport, "/v1/layers/snapshot")
        # Sandboxes to stop at the close.
        self._owned: dict[str, Sandbox] = {}
        # Clean-ups of creates that nobody waits for any more.
        self._discards: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<DSecClient {self.base_url}>"

    @property
    def base_url(self) -> str:
        """Where the platform is."""
        return self._transport.base_url

    @property
    def auth_headers(self) -> dict[str, str]:
        """The headers that show the key and name the project, for other HTTP clients."""
        return self._transport.auth_headers

    @property
    def command_timeout(self) -> float | None:
        """Seconds that a command may take unless it is given its own."""
        return self._command_timeout

    @property
    def iam(self) -> Iam:
        """Projects, identities, keys, and what they may do."""
        return self._iam

    @property
    def images(self) -> Images:
        """The platform's images."""
        return self._images

    @property
    def workspaces(self) -> Images:
        """Workspaces: layers over an image."""
        return self._workspaces

    @property
    def toolkits(self) -> Images:
        """Toolkits: layers over image and workspace."""
        return self._toolkits

    @property
    def snapshots(self) -> Images:
        """What sandboxes wrote, as layers."""
        return self._snapshots

    # Life

    async def open(self) -> None:
        """Checks that the platform answers and the key is good. Again does nothing."""
        if self._transport.is_open:
            return
        self._transport.open()
        try:
            await self._transport.json("GET", "/v1/whoami", retry=Retry.SAFE, retry_for=_OPEN_RETRY)
        except BaseException:
            await self._transport.close()
            raise

    async def close(self) -> None:
        """Stops the sandboxes that it made and that still run, then closes the connections."""
        if not self._transport.is_open:
            return
        await shielded(self._close())

    async def _close(self) -> None:
        try:
            if self._discards:
                await asyncio.wait(self._discards, timeout=self._stop_timeout)
                left = list(self._discards)
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)
            failures = await self._stop_each(list(self._owned.values()))
            for sandbox_id, failure in failures.items():
                log.warning(
                    "sandbox %s was not stopped and stays until its ttl_running_stop: %s", sandbox_id, failure
                )
        finally:
            self._owned.clear()
            await self._transport.close()

    async def _stop_each(self, sandboxes: Sequence[Sandbox]) -> dict[str, DSecError]:
        """Stops them, some at once; returns what failed."""
        failures: dict[str, DSecError] = {}
        gate = asyncio.Semaphore(_STOPS_AT_ONCE)

        async def stop(sandbox: Sandbox) -> None:
            async with gate:
                try:
                    await sandbox._stop_if_there(self._stop_timeout)
                except DSecError as error:
                    failures[sandbox.id] = error

        await asyncio.gather(*(stop(sandbox) for sandbox in sandboxes))
        return failures

    async def __aenter__(self) -> DSecClient:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _forget(self, sandbox_id: str) -> None:
        self._owned.pop(sandbox_id, None)

    # Sandboxes

    async def run_container(
        self,
        args: DSecContainerRunArgs,
        timeout: float = 120.0,
        *,
        idempotency_key: str | None = None,
        keep: bool = False,
    ) -> Sandbox:
        """Makes a container sandbox and returns it running.

        The create carries a key (drawn when not given) under which the platform makes one sandbox however
        often it is asked, so it is tried again when a connection fails. When this call is cancelled or its
        time is over, the sandbox that may come of it is stopped; with a key of your own it is left to you.
        With `keep`, closing the client leaves it running.
        """
        key = uuid.uuid4().hex if idempotency_key is None else idempotency_key
        # Counted where the key is ours alone: another holder of it may be at its first attempt too.
        numbers = itertools.count(1) if idempotency_key is None else None
        create = partial(self._create, args.body(), key, numbers)
        work = asyncio.ensure_future(create(timeout))
        try:
            data = await asyncio.shield(work)
        except asyncio.CancelledError:
            if idempotency_key is None:
                self._discard(create, work)
            else:
                work.cancel()
            raise
        except DSecError as error:
            if idempotency_key is None and error.maybe_sent:
                self._discard(create, None)
            raise
        return await self._made(data, keep)

    async def _create(
        self, body: Mapping[str, Any], key: str, numbers: Iterator[int] | None, timeout: float
    ) -> dict[str, Any]:
        data: dict[str, Any] = await self._transport.json(
            "POST",
            "/v1/sandboxes",
            body=body,
            headers={"idempotency-key": key},
            numbers=numbers,
            timeout=timeout,
            retry=Retry.SAFE,
        )
        return data

    def _discard(
        self,
        create: Callable[[float], Awaitable[dict[str, Any]]],
        work: asyncio.Future[dict[str, Any]] | None,
    ) -> None:
        """Stops, in the background, the sandbox of a create that nobody waits for any more."""

        async def discard() -> None:
            try:
                # The key finds the sandbox of a create whose answer was lost.
                data = await (create(self._stop_timeout) if work is None else work)
                await Sandbox(self, SandboxInfo.of(data))._stop_if_there(self._stop_timeout)
            except DSecError as error:
                log.warning("the sandbox of a cancelled create may stay until its ttl: %s", error)

        task = asyncio.ensure_future(discard())
        self._discards.add(task)
        task.add_done_callback(self._discards.discard)

    @asynccontextmanager
    async def container(
        self, args: DSecContainerRunArgs, timeout: float = 120.0, *, idempotency_key: str | None = None
    ) -> AsyncIterator[Sandbox]:
        """A container sandbox for the length of an `async with` block."""
        async with await self.run_container(args, timeout, idempotency_key=idempotency_key) as sandbox:
            yield sandbox

    async def run_containers(
        self,
        args: DSecContainerRunArgs,
        count: int,
        *,
        at_once: int | None = None,
        failures: list[DSecError] | None = None,
        timeout: float = 300.0,
        keep: bool = False,
    ) -> AsyncIterator[Sandbox]:
        """Makes many container sandboxes that are alike, in one call, and gives each as soon as it runs.

        ::

            async for sb in client.run_containers(args, 1000):
                ...

        One that cannot be made does not keep the others: when all have been tried, the first failure is
        raised, with the number of all in `detail["failed"]`. With `failures`, a list of yours, nothing is
        raised and they are put there. What all would meet (no such image) ends it early. `at_once` are made
        at a time (64 when not given); `timeout` limits the wait for the next. A loop that is left early
        leaves those that are being made until their `ttl_running_stop`; `stop_task` of their task ends them.
        With `keep`, closing the client leaves all running.
        """
        sandbox, key, attempt = args.body(), uuid.uuid4().hex, 0
        made: set[int] = set()
        failed: dict[int, DSecError] = {}
        backoff = Backoff(self._transport.retry_for)
        broken: ConnectionFailed | None = None
        while attempt == 0 or broken is not None:
            if broken is not None:
                await backoff.sleep_or_raise(broken)
            attempt, broken = attempt + 1, None
            # The same key finds what was being made when it broke; what was given is not asked for.
            body = set_only(count=count, at_once=at_once, skip=_ranges(made) or None, sandbox=sandbox)
            told = self._batch(body, key, attempt, timeout)
            while True:
                try:
                    event = await anext(told)
                except StopAsyncIteration:
                    break
                except ConnectionFailed as error:
                    broken = error
                    break
                backoff.reset()
                match event:
                    case {"event": "created", "index": int(index)}:
                        made.add(index)
                        failed.pop(index, None)
                        yield await self._made(event["sandbox"], keep)
                    case {"event": "failed", "index": int(index)}:
                        failed[index] = await self._not_made(event["error"], keep)
        found = list(failed.values())
        if failures is not None:
            failures.extend(found)
        elif found:
            first = found[0]
            first.detail = {**first.detail, "failed": len(found)}
            raise first

    async def _not_made(self, body: Mapping[str, Any], keep: bool) -> DSecError:
        """Why one failed. One that runs, since its first command alone failed, is ours like the others."""
        error = error_of_body(body)
        sandbox_id = error.detail.get("sandbox_id")
        if sandbox_id is not None and not keep:
            try:
                self._owned[sandbox_id] = await self.get(sandbox_id)
            except DSecError as why:
                log.warning("sandbox %s may stay until its ttl: %s", sandbox_id, why)
        return error

    async def _batch(
        self, body: Mapping[str, Any], key: str, attempt: int, timeout: float
    ) -> AsyncIterator[dict[str, Any]]:
        """Events of many creates, of which the last is `done`."""
        headers = {
            "content-type": "application/json",
            "idempotency-key": key,
            "idempotency-attempt": str(attempt),
        }
        async with self._transport.stream(
            "POST", "/v1/sandboxes/batch", content=json.dumps(body).encode(), headers=headers, idle=timeout
        ) as answer:
            async for event in events(answer):
                if event.get("event") == "done":
                    return
                yield event
        raise ConnectionFailed("the platform broke off the making of sandboxes", maybe_sent=True)

    async def _made(self, data: Mapping[str, Any], keep: bool) -> Sandbox:
        """A sandbox that was made just now, and how its first command went."""
        sandbox = Sandbox(self, SandboxInfo.of(data))
        if not keep:
            self._owned[sandbox.id] = sandbox
        first = data.get("first_exec")
        if first is not None:
            try:
                sandbox._first_result = await sandbox._commands.result(first)
            except BaseException:
                await shielded(sandbox._stop_if_there(self._stop_timeout))
                raise
        return sandbox

    async def get(self, sandbox_id: str) -> Sandbox:
        """A sandbox by its id. It is not stopped when the client closes."""
        path = sandbox_path(sandbox_id)
        return Sandbox(self, SandboxInfo.of(await self._transport.json("GET", path, retry=Retry.SAFE)))

    async def list(
        self,
        *,
        state: str | Sequence[str] | None = None,
        task_id: str | None = None,
        project: str | None = None,
        labels: Mapping[str, str] | None = None,
        usage: bool = False,
        page: int = 100,
    ) -> AsyncIterator[Sandbox]:
        """The sandboxes, newest first: of any of these states, with all of these labels.

        `project`: only those of it and of all in it. `page`: how many are asked for at once. Ended sandboxes
        stay listed for an hour.
        """
        states = [state] if isinstance(state, str) else list(state or ())
        cursor: str | None = None
        while True:
            data = await self._transport.json(
                "GET",
                "/v1/sandboxes",
                query={
                    "state": states,
                    "task_id": task_id,
                    "project": project,
                    "label": [f"{name}={value}" for name, value in (labels or {}).items()],
                    "usage": "true" if usage else None,
                    "limit": page,
                    "cursor": cursor,
                },
                retry=Retry.SAFE,
            )
            for record in data["sandboxes"]:
                yield Sandbox(self, SandboxInfo.of(record))
            cursor = data.get("next_cursor")
            if cursor is None:
                return

    async def stop_all(
        self, *, task_id: str | None = None, labels: Mapping[str, str] | None = None
    ) -> tuple[str, ...]:
        """Stops every sandbox of a task, or with these labels, and returns their ids.

        One that cannot be stopped does not keep the others; the first failure is raised at the end, with
        the ids and messages of all in `detail["failed"]`.
        """
        if task_id is None and not labels:
            raise InvalidArgument("stop_all needs a task_id or labels", hint="it does not stop everything")
        found = [sandbox async for sandbox in self.list(state=_LIVE, task_id=task_id, labels=labels)]
        failures = await self._stop_each(found)
        if failures:
            first = next(iter(failures.values()))
            first.detail = {**first.detail, "failed": {name: str(error) for name, error in failures.items()}}
            raise first
        return tuple(sandbox.id for sandbox in found)

    # Tasks

    async def tasks(self) -> tuple[TaskStatus, ...]:
        """The tasks that have sandboxes, or had some within the hour."""
        data = await self._transport.json("GET", "/v1/tasks", retry=Retry.SAFE)
        return tuple(TaskStatus.of(task) for task in data["tasks"])

    async def task(self, task_id: str) -> TaskStatus:
        """One task: how many sandboxes it has, by state and node."""
        return TaskStatus.of(await self._transport.json("GET", _task_path(task_id), retry=Retry.SAFE))

    async def stop_task(self, task_id: str, *, grace: float = 0.0, timeout: float = 120.0) -> TaskOutcome:
        """Ends all sandboxes of a task, on whatever nodes, and waits until nothing is left of them.

        `grace`: seconds between SIGTERM and SIGKILL. It is safe to repeat, and then ends those that are left:
        failures are in the result and not raised, see `TaskOutcome.check`.
        """
        return await stop_all(self._transport, f"{_task_path(task_id)}/stop", grace, timeout)

    async def pause_task(self, task_id: str, *, timeout: float = 120.0) -> TaskOutcome:
        """Pauses all sandboxes of a task, on whatever nodes. Failures are in the result and not raised."""
        return await tell_all(self._transport, f"{_task_path(task_id)}/pause", timeout)

    async def resume_task(self, task_id: str, *, timeout: float = 120.0) -> TaskOutcome:
        """Resumes all paused sandboxes of a task. Failures are in the result and not raised."""
        return await tell_all(self._transport, f"{_task_path(task_id)}/resume", timeout)

    async def wait_task(self, task_id: str, *, timeout: float = 3600.0) -> int:
        """Waits until no sandbox of a task is known to live.

        Those that are lost with their nodes are not waited for: returns how many there are.
        :class:`DeadlineExceeded` when some still live after `timeout` seconds.
        """
        return await wait_for_end(self._transport, f"{_task_path(task_id)}/wait", timeout)

    # Platform

    async def counts(
        self, *, project: str | None = None, task_id: str | None = None, node: str | None = None
    ) -> Counts:
        """How many sandboxes there are, by state, backend, node, project and task, as the server knows.

        `project`: only those of it and of all in it. What is counted is some second old; `gathering` says
        that a server has just started and does not know all nodes yet.
        """
        query = {"project": project, "task_id": task_id, "node": node}
        return Counts.of(await self._transport.json("GET", "/v1/counts", query=query, retry=Retry.SAFE))

    async def nodes(self) -> tuple[NodeStatus, ...]:
        """The nodes: what they are, can do and do now."""
        data = await self._transport.json("GET", "/v1/nodes", retry=Retry.SAFE)
        return tuple(NodeStatus.of(node) for node in data["nodes"])

    async def node(self, name: str) -> NodeStatus:
        """One node."""
        return NodeStatus.of(await self._transport.json("GET", _node_path(name), retry=Retry.SAFE))

    async def cordon_node(self, name: str, *, reason: str = "") -> NodeStatus:
        """Keeps new sandboxes away from a node. Those it has stay."""
        return await self._schedule(name, "cordon", {"reason": reason})

    async def uncordon_node(self, name: str) -> NodeStatus:
        """Lets a node take sandboxes again, after a cordon or a drain."""
        return await self._schedule(name, "uncordon", {})

    async def drain_node(self, name: str, *, stop_after: float | None = None, reason: str = "") -> NodeStatus:
        """Keeps new sandboxes away from a node and lets those it has end; it does not wait for that.

        What is left after `stop_after` seconds is stopped; None: nothing is. The node is drained when
        `(await client.node(name)).sandboxes` is 0.
        """
        body: dict[str, Any] = {"reason": reason}
        if stop_after is not None:
            body["stop_after"] = math.ceil(stop_after)
        return await self._schedule(name, "drain", body)

    async def _schedule(self, name: str, what: str, body: dict[str, Any]) -> NodeStatus:
        said = await self._transport.json("POST", f"{_node_path(name)}/{what}", body=body, retry=Retry.SAFE)
        return NodeStatus.of(said)

    async def healthy(self) -> bool:
        """Whether the platform can be reached and a node answers."""
        try:
            await self._transport.call("GET", "/healthz", retry_for=0.0)
        except (ConnectionFailed, Unavailable):
            return False
        return True
