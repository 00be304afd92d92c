"""All sandboxes of a job, or of a project, as one: what is known of them, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from ._records import Json, _flat
from ._transport import Retry, Transport
from .errors import DeadlineExceeded, DSecError, error_of_body

#: Seconds that one request waits for the end of many sandboxes; it is asked again.
_WAIT_EACH = 30.0


@dataclass(frozen=True, slots=True)
class StateCounts:
    """Sandboxes by state. Those that ended are counted for an hour."""

    creating: int = 0
    running: int = 0
    pausing: int = 0
    paused: int = 0
    resuming: int = 0
    stopping: int = 0
    stopped: int = 0
    failed: int = 0
    #: On nodes that are lost: they had not ended when those were last heard of.
    lost: int = 0


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """A task: all sandboxes that have it as `task_id`."""

    task_id: str
    sandboxes: StateCounts
    #: Those that have not ended, by node.
    nodes: Mapping[str, int]
    #: When the first and the last of them was created, Unix ms.
    first_created_ms: int
    last_created_ms: int

    @property
    def living(self) -> int:
        """Those that have not ended."""
        counts = self.sandboxes
        paused = counts.pausing + counts.paused + counts.resuming
        return counts.creating + counts.running + paused + counts.stopping

    @classmethod
    def of(cls, data: Json) -> TaskStatus:
        """From the API's JSON."""
        return cls(
            task_id=data["task_id"],
            sandboxes=_flat(StateCounts, data.get("sandboxes") or {}),
            nodes=data.get("nodes") or {},
            first_created_ms=data.get("first_created_ms", 0),
            last_created_ms=data.get("last_created_ms", 0),
        )


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """The sandboxes of a node."""

    #: `well`, `suspect` or `lost`.
    health: str
    #: `counted`; `gathering`: it has not said since the server started; `untold`: its version does not say.
    known: str
    #: When it was last heard of, Unix ms; None: not since the server started.
    heard_ms: int | None
    sandboxes: StateCounts


@dataclass(frozen=True, slots=True)
class Counts:
    """How many sandboxes there are, of those that the key sees."""

    #: Some node has not said yet what it has, since the server started: the counts are too low.
    gathering: bool
    #: Nodes whose sandboxes are in no count.
    uncounted: tuple[str, ...]
    sandboxes: StateCounts
    backends: Mapping[str, StateCounts]
    nodes: Mapping[str, NodeCounts]
    #: Each without those that are in it; of these and of tasks the 1,000 that have most.
    projects: Mapping[str, StateCounts]
    tasks: Mapping[str, StateCounts]
    #: Projects and tasks that are left out.
    left_out: int

    @classmethod
    def of(cls, data: Json) -> Counts:
        """From the API's JSON."""

        def groups(name: str) -> dict[str, StateCounts]:
            return {key: _flat(StateCounts, counts) for key, counts in (data.get(name) or {}).items()}

        return cls(
            gathering=data.get("gathering", False),
            uncounted=tuple(data.get("uncounted") or ()),
            sandboxes=_flat(StateCounts, data.get("sandboxes") or {}),
            backends=groups("backends"),
            nodes={
                name: NodeCounts(
                    health=node.get("health", ""),
                    known=node.get("known", ""),
                    heard_ms=node.get("heard_ms"),
                    sandboxes=_flat(StateCounts, node.get("sandboxes") or {}),
                )
                for name, node in (data.get("nodes") or {}).items()
            },
            projects=groups("projects"),
            tasks=groups("tasks"),
            left_out=data.get("left_out", 0),
        )


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """What could not be done with a sandbox of a task, or on a node."""

    node: str
    #: None: the node could not be asked, so that nothing is known of those it has.
    sandbox_id: str | None
    error: DSecError


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What became of something that was asked of all sandboxes of a task."""

    #: Sandboxes that it was for, and with how many it was done.
    matched: int
    done: int
    #: With how many, or on how many nodes, it could not be done; the first 1,000 of those.
    failed: int
    failures: tuple[TaskFailure, ...]

    @property
    def ok(self) -> bool:
        """Whether it was done with all."""
        return self.failed == 0

    def check(self) -> TaskOutcome:
        """Raises the first failure, if there is one."""
        if self.failures:
            raise self.failures[0].error
        return self

    @classmethod
    def of(cls, data: Json) -> TaskOutcome:
        """From the API's JSON."""
        return cls(
            matched=data.get("matched", 0),
            done=data.get("done", 0),
            failed=data.get("failed", 0),
            failures=tuple(
                TaskFailure(each["node"], each.get("sandbox_id"), error_of_body(each["error"]))
                for each in data.get("failures") or ()
            ),
        )


async def stop_all(transport: Transport, path: str, grace: float, timeout: float) -> TaskOutcome:
    """Has the sandboxes that a path is about ended, and waits until nothing is left of them."""
    data = await transport.json(
        "POST", path, body={"grace_ms": int(grace * 1000)}, timeout=timeout + grace, retry=Retry.SAFE
    )
    return TaskOutcome.of(data)


async def tell_all(transport: Transport, path: str, timeout: float) -> TaskOutcome:
    """Has the sandboxes that a path is about paused or resumed."""
    return TaskOutcome.of(await transport.json("POST", path, timeout=timeout, retry=Retry.SAFE))


async def wait_for_end(transport: Transport, path: str, timeout: float) -> int:
    """Asks again and again, for as long as that is, until no sandbox is known to live.

    Returns how many are lost.
    """
    end = asyncio.get_running_loop().time() + timeout
    while True:
        left = end - asyncio.get_running_loop().time()
        each = max(0.0, min(left, _WAIT_EACH))
        try:
            data = await transport.json(
                "POST",
                path,
                body={"timeout_ms": int(each * 1000)},
                timeout=each + transport.timeout,
                retry=Retry.SAFE,
            )
            lost: int = data.get("lost", 0)
            return lost
        except DeadlineExceeded:
            if left <= each:
                raise
