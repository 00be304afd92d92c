"""Arguments of a create and of a command, with the names of the API."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import InvalidArgument

#: How a sandbox stands to others on a busy node.
CpuClass = Literal["latency_sensitive", "best_effort"]

#: Bytes of each stream that an answer carries inline; the rest is fetched. The API's own default.
INLINE_LIMIT = 1 << 20


def millis(name: str, seconds: float) -> int:
    """Seconds as the API's milliseconds, rounded up so that no limit becomes none."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidArgument(f"{name} is {seconds!r}; it must be a number of seconds above 0")
    return math.ceil(seconds * 1000)


def set_only(**fields: Any) -> dict[str, Any]:
    """The fields that were given: the API has its own defaults for the others."""
    return {name: value for name, value in fields.items() if value is not None}


@dataclass(kw_only=True)
class DSecExecArgs:
    """A command: `argv`, or `shell` (a line for a shell), not both."""

    argv: Sequence[str] | None = None
    shell: str | None = None
    #: Over the sandbox's environment.
    env: Mapping[str, str] | None = None
    cwd: str | None = None
    #: By name or `uid[:gid]`.
    user: str | None = None
    #: Its whole standard input.
    stdin: str | bytes | None = None
    #: Seconds until its whole process tree is killed.
    timeout: float | None = None
    #: Bytes kept of each stream.
    output_limit: int | None = None
    #: Runs the line in this session's shell.
    session: str | None = None
    #: Rows and columns of its terminal.
    pty: tuple[int, int] | None = None

    def body(self, *, wait: bool, stream_stdin: bool = False) -> dict[str, Any]:
        """The request's JSON."""
        if (self.argv is None) == (self.shell is None):
            raise InvalidArgument("a command needs argv or shell, and not both")
        if isinstance(self.argv, (str, bytes)):
            raise InvalidArgument("argv is a list of arguments; for a line of text use shell")
        body = set_only(
            argv=[str(word) for word in self.argv] if self.argv is not None else None,
            shell=self.shell,
            env=dict(self.env) if self.env else None,
            cwd=self.cwd,
            user=self.user,
            timeout_ms=None if self.timeout is None else millis("timeout", self.timeout),
            output_limit_bytes=self.output_limit,
            session_id=self.session,
            pty=None if self.pty is None else {"rows": self.pty[0], "cols": self.pty[1]},
        )
        if stream_stdin:
            body["stdin_mode"] = "stream"
        elif isinstance(self.stdin, str):
            body["stdin"] = self.stdin
        elif self.stdin is not None:
            body["stdin_base64"] = base64.b64encode(self.stdin).decode()
        if wait:
            body["wait"] = True
            body["inline_limit_bytes"] = INLINE_LIMIT
        return body


@dataclass(frozen=True, kw_only=True)
class RegistryCredentials:
    """What a registry is shown when it asks: a user and a password, or one of the tokens."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    #: What a log-in gave in place of a password, for the registry's token service.
    identity_token: str | None = field(default=None, repr=False)
    #: A token for the registry itself.
    registry_token: str | None = field(default=None, repr=False)

    def body(self) -> dict[str, str]:
        """The request's JSON."""
        names = ("username", "password", "identity_token", "registry_token")
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(kw_only=True)
class DSecContainerRunArgs:
    """A container sandbox. What is left out gets the node's default."""

    #: Name of an imported image.
    container_image: str
    #: A workspace, as a layer over the image: `name`, `name:tag` or `name@version`; or a snapshot, as
    #: `snapshot/name`, which lies over the toolkits.
    workspace: str | None = None
    #: Toolkits over both, each over the one before it.
    toolkits: Sequence[str] = ()
    #: Memory, MiB.
    memory_limit_mb: int | None = None
    #: Cores; fractions are allowed.
    cpu_cores_limit: float | None = None
    #: CPU time, ms, that it saves up while it uses less than its cores and may use later: at most what they
    #: give in 100 ms. Default: as much, up to 200.
    cpu_burst_ms: int | None = None
    #: Share of CPU among those of its class under contention, 1 to 10,000; 100 is the usual one.
    cpu_weight: int | None = None
    #: `latency_sensitive`: it gets its share of a busy node at once. `best_effort`: it gets what the others
    #: leave. Default: the node's.
    cpu_class: CpuClass | None = None
    #: Processes and threads.
    pids_limit: int | None = None
    #: Open files a process.
    open_files_limit: int | None = None
    #: Writable layer, MiB.
    disk_limit_mb: int | None = None
    #: Files and directories in the writable layer.
    disk_files_limit: int | None = None
    #: Seconds without a request or an attached session until it is stopped. 0: never.
    ttl_running_stop: int | None = None
    #: Pause it then, instead of stopping it. Whoever uses it resumes it.
    auto_pause: bool | None = None
    #: Seconds paused until it is stopped. 0: never.
    ttl_paused_stop: int | None = None
    #: Seconds from running until it is stopped, whatever it does. Time paused does not count.
    max_lifetime: int | None = None
    #: User of its commands, by name or `uid[:gid]`. Default: the image's user, else root.
    init_user: str | None = None
    #: Environment of every command, over the image's.
    env: Mapping[str, str] = field(default_factory=dict)
    #: Working directory of every command. Default: the image's, else `/`.
    cwd: str | None = None
    #: Host name inside.
    hostname: str | None = None
    #: Services that may be reached, by name. This version has no network but loopback: a rule that is True is
    #: refused (`Unsupported`), one that is False holds.
    network_rules: Mapping[str, bool] = field(default_factory=dict)
    #: Lets setuid programs such as `sudo` work.
    allow_setuid: bool = False
    #: The job it belongs to.
    task_id: str | None = None
    #: The pool of nodes that it is to run in. Default: any but the one that takes over when the others are
    #: full, and that one too when they are and it has all of the layers.
    pool: str | None = None
    #: The architecture of its node's processors, `x86_64` or `aarch64`. Default: any.
    architecture: str | None = None
    #: Labels that its node must have, and kernel features that must work there: `client.nodes` names them.
    node_labels: Mapping[str, str] = field(default_factory=dict)
    node_features: Sequence[str] = ()
    #: Free labels to filter by.
    labels: Mapping[str, str] = field(default_factory=dict)
    #: A command to run as soon as the sandbox runs (a string is a shell line); how it went is in
    #: `Sandbox.first_result`. Saves a round trip.
    exec: str | DSecExecArgs | None = None

    def body(self) -> dict[str, Any]:
        """The request's JSON."""
        if not self.container_image:
            raise InvalidArgument("container_image is empty; it must name an imported image")
        command = DSecExecArgs(shell=self.exec) if isinstance(self.exec, str) else self.exec
        return set_only(
            backend="container",
            container_image=self.container_image,
            workspace=self.workspace,
            toolkits=list(self.toolkits) or None,
            memory_limit_mb=self.memory_limit_mb,
            cpu_cores_limit=self.cpu_cores_limit,
            cpu_burst_ms=self.cpu_burst_ms,
            cpu_weight=self.cpu_weight,
            cpu_class=self.cpu_class,
            pids_limit=self.pids_limit,
            open_files_limit=self.open_files_limit,
            disk_limit_mb=self.disk_limit_mb,
            disk_files_limit=self.disk_files_limit,
            ttl_running_stop=self.ttl_running_stop,
            auto_pause=self.auto_pause,
            ttl_paused_stop=self.ttl_paused_stop,
            max_lifetime=self.max_lifetime,
            init_user=self.init_user,
            env=dict(self.env) or None,
            cwd=self.cwd,
            hostname=self.hostname,
            network_rules=dict(self.network_rules) or None,
            allow_setuid=self.allow_setuid or None,
            task_id=self.task_id,
            labels=dict(self.labels) or None,
            pool=self.pool,
            architecture=self.architecture,
            node_labels=dict(self.node_labels) or None,
            node_features=list(self.node_features) or None,
            exec=command.body(wait=True) if command is not None else None,
        )
