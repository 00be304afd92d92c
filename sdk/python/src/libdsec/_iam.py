"""Projects and what they may use; identities, their keys and what they were given; the audit log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._args import set_only
from ._records import Json
from ._tasks import TaskOutcome, stop_all, tell_all, wait_for_end
from ._transport import Retry, Transport, segment

#: Entries of the audit log that are asked for at once.
_AUDIT_PAGE = 1000


@dataclass(frozen=True, slots=True)
class WhoAmI:
    """Who a key belongs to, and what it may do in the project that calls act in."""

    #: None: it is the cluster's own key.
    identity: int | None
    name: str
    key_id: str
    project: str
    permissions: tuple[str, ...]

    @classmethod
    def of(cls, data: Json) -> WhoAmI:
        """From the API's JSON."""
        permissions = tuple(data.get("permissions") or ())
        return cls(data.get("identity"), data["name"], data["key_id"], data["project"], permissions)


@dataclass(frozen=True, slots=True)
class Project:
    """A project.

    Amounts are by name: `sandboxes`, `cpu_millis`, `memory_mib`, `disk_mib`, `creates_per_s`, or one of these
    of a backend, such as `container.sandboxes`.
    """

    project: str
    #: What it and all in it may use, of its own.
    quota: Mapping[str, int]
    #: The least of its quota and those of the projects it is in, as far as the caller sees them.
    effective: Mapping[str, int]
    #: What sandboxes in it may use now.
    used: Mapping[str, int]
    #: What anybody may hold in it at most; None: whatever the projects it is in allow.
    ceiling: tuple[str, ...] | None
    #: Unix ms; None of the root.
    created_ms: int | None

    @classmethod
    def of(cls, data: Json) -> Project:
        """From the API's JSON."""
        ceiling = data.get("ceiling")
        return cls(
            data["project"],
            data.get("quota") or {},
            data.get("effective") or {},
            data.get("used") or {},
            None if ceiling is None else tuple(ceiling),
            data.get("created_ms"),
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """Something that an identity was given in a project and all in it."""

    grant: int
    identity: int
    project: str
    permissions: tuple[str, ...]
    #: What of it counts now: no more than its giver holds there.
    counts_for: tuple[str, ...]
    #: None: given with the cluster's own key.
    given_by: int | None
    created_ms: int

    @classmethod
    def of(cls, data: Json) -> Grant:
        """From the API's JSON."""
        return cls(
            data["grant"],
            data["identity"],
            data["project"],
            tuple(data["permissions"]),
            tuple(data["counts_for"]),
            data.get("given_by"),
            data["created_ms"],
        )


@dataclass(frozen=True, slots=True)
class Key:
    """A key. What it is, is in `key` of one that was just made and nowhere else."""

    id: str
    identity: int
    name: str
    project: str | None
    permissions: tuple[str, ...] | None
    created_ms: int
    #: Unix ms; None: never.
    expires_ms: int | None
    key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, data: Json) -> Key:
        """From the API's JSON."""
        permissions = data.get("permissions")
        return cls(
            data["id"],
            data["identity"],
            data["name"],
            data.get("project"),
            None if permissions is None else tuple(permissions),
            data["created_ms"],
            data.get("expires_ms"),
            data.get("key"),
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """A person, a service or an agent. `grants` and `keys`: of one that was asked for by its number."""

    identity: int
    name: str
    kind: str
    project: str
    created_ms: int
    grants: tuple[Grant, ...] = ()
    keys: tuple[Key, ...] = ()

    @classmethod
    def of(cls, data: Json) -> Identity:
        """From the API's JSON."""
        return cls(
            data["identity"],
            data["name"],
            data["kind"],
            data["project"],
            data["created_ms"],
            tuple(Grant.of(each) for each in data.get("grants") or ()),
            tuple(Key.of(each) for each in data.get("keys") or ()),
        )


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One line of the audit log."""

    id: str
    #: Unix ms; of several denials, the last.
    at_ms: int
    #: None: with the cluster's own key.
    identity: int | None
    name: str
    key_id: str
    project: str
    #: What was done, such as `grant.create`, or was to be, such as `PUT /v1/images/{name}`.
    action: str
    target: str
    denied: bool
    count: int
    detail: str
    request_id: str

    @classmethod
    def of(cls, data: Json) -> AuditEntry:
        """From the API's JSON."""
        return cls(
            data["id"],
            data["at_ms"],
            data.get("identity"),
            data["name"],
            data["key_id"],
            data["project"],
            data["action"],
            data["target"],
            data["denied"],
            data["count"],
            data["detail"],
            data["request_id"],
        )


class Iam:
    """Who may do what, and how much of it: `DSecClient.iam`.

    A call changes what its key may change, and gives no more than its key holds. When it returns, the change
    holds on every server.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def _get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        return await self._transport.json("GET", path, query=query, retry=Retry.SAFE)

    async def whoami(self) -> WhoAmI:
        """Who the key belongs to."""
        return WhoAmI.of(await self._get("/v1/whoami"))

    # Projects

    async def projects(self) -> tuple[Project, ...]:
        """The project that the client acts in and all in it, in order."""
        data = await self._get("/v1/projects")
        return tuple(Project.of(each) for each in data["projects"])

    async def project(self, project: str) -> Project:
        """One project."""
        return Project.of(await self._get(f"/v1/projects/{segment(project)}"))

    async def create_project(
        self,
        project: str,
        *,
        quota: Mapping[str, int] | None = None,
        ceiling: Sequence[str] | None = None,
    ) -> Project:
        """Makes a project in another, which must be there."""
        body = set_only(project=project, quota=quota, ceiling=None if ceiling is None else list(ceiling))
        return Project.of(await self._transport.json("POST", "/v1/projects", body=body))

    async def set_quota(self, project: str, quota: Mapping[str, int]) -> Project:
        """Sets all of a project's quota; an empty one takes it away."""
        path = f"/v1/projects/{segment(project)}"
        return Project.of(
            await self._transport.json("PATCH", path, body={"quota": dict(quota)}, retry=Retry.SAFE)
        )

    async def set_ceiling(self, project: str, ceiling: Sequence[str] | None) -> Project:
        """Sets what anybody may hold in a project at most; None takes it away."""
        path = f"/v1/projects/{segment(project)}"
        body = {"ceiling": None if ceiling is None else list(ceiling)}
        return Project.of(await self._transport.json("PATCH", path, body=body, retry=Retry.SAFE))

    async def remove_project(self, project: str) -> None:
        """Removes a project that nothing is in."""
        await self._transport.call("DELETE", f"/v1/projects/{segment(project)}")

    async def stop_project(self, project: str, *, grace: float = 0.0, timeout: float = 120.0) -> TaskOutcome:
        """Ends all sandboxes of a project and of those in it. Failures are in the result."""
        return await stop_all(self._transport, f"/v1/projects/{segment(project)}/stop", grace, timeout)

    async def pause_project(self, project: str, *, timeout: float = 120.0) -> TaskOutcome:
        """Pauses all sandboxes of a project and of those in it. Failures are in the result."""
        return await tell_all(self._transport, f"/v1/projects/{segment(project)}/pause", timeout)

    async def resume_project(self, project: str, *, timeout: float = 120.0) -> TaskOutcome:
        """Resumes all paused sandboxes of a project and of those in it. Failures are in the result."""
        return await tell_all(self._transport, f"/v1/projects/{segment(project)}/resume", timeout)

    async def wait_project(self, project: str, *, timeout: float = 3600.0) -> int:
        """Waits until no sandbox of a project, or of those in it, is known to live.

        Returns how many are lost with their nodes, which are not waited for.
        """
        return await wait_for_end(self._transport, f"/v1/projects/{segment(project)}/wait", timeout)

    # Identities

    async def identities(self) -> tuple[Identity, ...]:
        """Those of the project that the client acts in and of all in it."""
        data = await self._get("/v1/identities")
        return tuple(Identity.of(each) for each in data["identities"])

    async def identity(self, identity: int) -> Identity:
        """One of them, with what it was given and its keys."""
        return Identity.of(await self._get(f"/v1/identities/{identity}"))

    async def create_identity(
        self, name: str, *, kind: str = "service", project: str | None = None
    ) -> Identity:
        """Makes an identity, a `person`, `service` or `agent`, which holds nothing yet."""
        body = set_only(name=name, kind=kind, project=project)
        return Identity.of(await self._transport.json("POST", "/v1/identities", body=body))

    async def remove_identity(self, identity: int) -> None:
        """Removes an identity, its keys and its grants. What it gave counts for nothing from then on."""
        await self._transport.call("DELETE", f"/v1/identities/{identity}")

    async def create_key(
        self,
        identity: int,
        name: str,
        *,
        expires_in: float | None = None,
        project: str | None = None,
        role: str | None = None,
        permissions: Sequence[str] | None = None,
    ) -> Key:
        """Makes a key, which is in the result's `key` and cannot be read again.

        `expires_in`: seconds. `project`, `role` and `permissions` narrow it: it may do no more, whatever its
        identity may.
        """
        body = set_only(
            name=name,
            expires_in_s=None if expires_in is None else int(expires_in),
            project=project,
            role=role,
            permissions=None if permissions is None else list(permissions),
        )
        return Key.of(await self._transport.json("POST", f"/v1/identities/{identity}/keys", body=body))

    async def revoke_key(self, key_id: str) -> None:
        """Revokes a key by its id: it works nowhere from then on."""
        await self._transport.call("DELETE", f"/v1/keys/{segment(key_id)}")

    async def grants(self) -> tuple[Grant, ...]:
        """What was given in the project that the client acts in and in all in it, the oldest first."""
        data = await self._get("/v1/grants")
        return tuple(Grant.of(each) for each in data["grants"])

    async def grant(
        self,
        identity: int,
        *,
        role: str | None = None,
        permissions: Sequence[str] = (),
        project: str | None = None,
    ) -> Grant:
        """Gives an identity what a role may do, and permissions beside it.

        Roles: `owner`, `builder`, `runtime`, `viewer`.
        """
        body = set_only(identity=identity, role=role, permissions=list(permissions) or None, project=project)
        return Grant.of(await self._transport.json("POST", "/v1/grants", body=body))

    async def revoke_grant(self, grant: int) -> None:
        """Takes a grant back, and with it all that rests on it."""
        await self._transport.call("DELETE", f"/v1/grants/{grant}")

    async def audit(self, *, denied: bool | None = None) -> AsyncIterator[AuditEntry]:
        """Who did what and who was not let, the latest first; with `denied`, one of both."""
        before: str | None = None
        while True:
            query = {
                "before": before,
                "limit": _AUDIT_PAGE,
                "denied": None if denied is None else str(denied).lower(),
            }
            data = await self._get("/v1/audit", query)
            for entry in data["entries"]:
                yield AuditEntry.of(entry)
            before = data.get("next")
            if before is None:
                return
