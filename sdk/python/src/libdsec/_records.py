"""What the platform answers, as typed records. Fields that this version does not know are ignored, so a
newer platform can be talked to."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .errors import CommandFailed

Json = Mapping[str, Any]


def _bytes_of(data: Json, name: str) -> bytes:
    """A stream's inline bytes: exact from base64 where they are not UTF-8."""
    exact = data.get(f"{name}_base64")
    if exact is not None:
        return base64.b64decode(exact)
    text: str = data.get(name) or ""
    return text.encode()


@dataclass(frozen=True, slots=True)
class EndReason:
    """Why a sandbox ended or is ending."""

    #: `asked`, `idle`, `lifetime`, `paused_too_long`, `socket_memory`, `node_down`, `launch_failed`,
    #: `agent_lost`, `rebooted`.
    code: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits in force, with the units of the create request."""

    memory_limit_mb: int = 0
    cpu_cores_limit: float = 0.0
    cpu_burst_ms: int = 0
    cpu_weight: int = 0
    #: `latency_sensitive` or `best_effort`.
    cpu_class: str = ""
    pids_limit: int = 0
    open_files_limit: int = 0
    disk_limit_mb: int = 0
    disk_files_limit: int = 0
    ttl_running_stop: int = 0
    auto_pause: bool = False
    ttl_paused_stop: int = 0
    max_lifetime: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a sandbox uses."""

    #: CPU time of all its processes so far.
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    disk_bytes: int = 0
    #: Processes and threads now.
    pids: int = 0
    #: Bytes that callers sent into it.
    bytes_in: int = 0
    #: Bytes that callers read from it.
    bytes_out: int = 0
    #: Processes the kernel killed because its memory was full.
    oom_kills: int = 0


@dataclass(frozen=True, slots=True)
class LaunchPhase:
    """One phase of a launch; together they add up to it."""

    name: str
    us: int


@dataclass(frozen=True, slots=True)
class SandboxLayer:
    """One read-only layer of a sandbox."""

    #: `base`, `workspace`, `toolkit` or `snapshot`.
    kind: str
    #: As it was asked for.
    name: str
    id: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Of a sandbox whose node is lost: what was last heard. Whether it still runs nobody knows."""

    #: Its state of then.
    last_state: str
    #: When its node was last heard of, Unix ms.
    heard_ms: int


@dataclass(frozen=True, slots=True)
class Pauses:
    """The pauses of a sandbox."""

    count: int = 0
    #: Of one that is paused: since when, Unix ms.
    since_ms: int | None = None
    #: How long it was paused in all, the pause that it is in not counted.
    total_ms: int = 0
    #: Memory that it had when it was last paused, and what of that its node had back.
    resident_bytes: int = 0
    returned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """The record of a sandbox."""

    id: str
    #: `creating`, `running`, `pausing`, `paused`, `resuming`, `stopping`, `stopped`, `failed`; or `lost`:
    #: its node does not answer, and may come back with it.
    state: str
    reason: EndReason | None
    backend: str
    image: str
    image_digest: str
    #: All read-only layers, the lowest first.
    layers: tuple[SandboxLayer, ...]
    node: str
    limits: SandboxLimits
    init_user: str
    task_id: str | None
    labels: Mapping[str, str]
    created_ms: int
    running_ms: int | None
    ended_ms: int | None
    last_active_ms: int
    #: Only where it was asked for.
    usage: Usage | None
    launch_phases: tuple[LaunchPhase, ...]
    #: The project it belongs to.
    project: str = "root"
    #: Of one in the state `lost`.
    lost: Lost | None = None
    #: None for one that was never paused.
    pauses: Pauses | None = None

    @property
    def ended(self) -> bool:
        """Whether it has ended; nothing leaves that state."""
        return self.state in FINAL_STATES

    @classmethod
    def of(cls, data: Json) -> SandboxInfo:
        """From the API's JSON."""
        reason = data.get("reason")
        usage = data.get("usage")
        return cls(
            id=data["id"],
            state=data["state"],
            reason=EndReason(reason["code"], reason.get("message", "")) if reason else None,
            backend=data.get("backend", ""),
            image=data.get("image", ""),
            image_digest=data.get("image_digest", ""),
            layers=tuple(_flat(SandboxLayer, layer) for layer in data.get("layers") or ()),
            node=data.get("node", ""),
            limits=_flat(SandboxLimits, data.get("limits") or {}),
            init_user=data.get("init_user", ""),
            task_id=data.get("task_id"),
            labels=data.get("labels") or {},
            created_ms=data.get("created_ms", 0),
            running_ms=data.get("running_ms"),
            ended_ms=data.get("ended_ms"),
            last_active_ms=data.get("last_active_ms", 0),
            usage=_flat(Usage, usage) if usage is not None else None,
            launch_phases=tuple(LaunchPhase(p["name"], p["us"]) for p in data.get("launch_phases") or ()),
            project=data.get("project", "root"),
            lost=_flat(Lost, lost) if (lost := data.get("lost")) else None,
            pauses=_flat(Pauses, pauses) if (pauses := data.get("pauses")) else None,
        )


#: States that nothing leaves.
FINAL_STATES = frozenset({"stopped", "failed"})


def _flat(cls: type[Any], data: Json) -> Any:
    """A record whose fields are the JSON's."""
    return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


@dataclass(frozen=True, slots=True)
class OomKill:
    """A process that the kernel killed because the sandbox's memory was full."""

    process: str
    pid: int | None = None
    rss_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ExecInfo:
    """A command as the platform has it, without its output."""

    id: str
    #: `queued`, `running`, `exited`.
    state: str
    command: str
    session_id: str | None
    pid: int | None
    exit_code: int | None
    signal: str | None
    timed_out: bool
    oom_kills: tuple[OomKill, ...]
    session_ended: bool
    started_ms: int
    ended_ms: int | None
    #: Bytes written so far, kept or not.
    stdout_bytes: int
    stderr_bytes: int
    stdout_truncated: bool
    stderr_truncated: bool
    cpu_us: int

    @property
    def exited(self) -> bool:
        """Whether it has ended."""
        return self.state == "exited"

    @classmethod
    def of(cls, data: Json) -> ExecInfo:
        """From the API's JSON."""
        return cls(
            id=data["id"],
            state=data["state"],
            command=data.get("command", ""),
            session_id=data.get("session_id"),
            pid=data.get("pid"),
            exit_code=data.get("exit_code"),
            signal=data.get("signal"),
            timed_out=data.get("timed_out", False),
            oom_kills=tuple(_flat(OomKill, kill) for kill in data.get("oom_kills") or ()),
            session_ended=data.get("session_ended", False),
            started_ms=data.get("started_ms", 0),
            ended_ms=data.get("ended_ms"),
            stdout_bytes=data.get("stdout_bytes", 0),
            stderr_bytes=data.get("stderr_bytes", 0),
            stdout_truncated=data.get("stdout_truncated", False),
            stderr_truncated=data.get("stderr_truncated", False),
            cpu_us=data.get("cpu_us", 0),
        )


@dataclass(frozen=True)
class ExecResult:
    """How a command went, with all of its output that the platform kept."""

    exec_id: str
    command: str
    #: Of a command that a signal ended: 128 + the signal, as shells have it. -1: not known.
    exit_code: int
    #: Name of the signal that ended it.
    signal: str | None
    #: Its time limit ended it.
    timed_out: bool
    #: Exactly what it wrote.
    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    #: Bytes it wrote in all, kept or not.
    stdout_total: int
    stderr_total: int
    #: Some of it was not kept.
    stdout_truncated: bool
    stderr_truncated: bool
    #: Processes of the sandbox that the kernel killed for memory while it ran.
    oom_kills: tuple[OomKill, ...]
    #: It ended the shell of its session.
    session_ended: bool
    #: Seconds from its start to its end, by the platform's clock.
    duration: float
    #: CPU time of it and its reaped children.
    cpu_seconds: float

    @property
    def ok(self) -> bool:
        """Exit code 0, and not at its time limit."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def truncated(self) -> bool:
        """Some of its output was not kept."""
        return self.stdout_truncated or self.stderr_truncated

    @cached_property
    def stdout(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @cached_property
    def stderr(self) -> str:
        """Standard error as text; bytes that are not UTF-8 are replaced."""
        return self.stderr_bytes.decode("utf-8", "replace")

    def check(self) -> ExecResult:
        """Itself when :attr:`ok`; else raises :class:`CommandFailed`."""
        if not self.ok:
            raise CommandFailed(self)
        return self

    @classmethod
    def of(cls, info: ExecInfo, stdout: bytes, stderr: bytes) -> ExecResult:
        """From a record and the output."""
        ended_ms = info.ended_ms if info.ended_ms is not None else info.started_ms
        return cls(
            exec_id=info.id,
            command=info.command,
            exit_code=-1 if info.exit_code is None else info.exit_code,
            signal=info.signal,
            timed_out=info.timed_out,
            stdout_bytes=stdout,
            stderr_bytes=stderr,
            stdout_total=info.stdout_bytes,
            stderr_total=info.stderr_bytes,
            stdout_truncated=info.stdout_truncated,
            stderr_truncated=info.stderr_truncated,
            oom_kills=info.oom_kills,
            session_ended=info.session_ended,
            duration=max(0, ended_ms - info.started_ms) / 1000,
            cpu_seconds=info.cpu_us / 1e6,
        )


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes of a stream that were not kept and so never came."""

    stream: str
    #: First byte that is missing.
    start: int
    #: First byte after the gap.
    end: int


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A shell session."""

    id: str
    pid: int
    user: str
    pty_exec_id: str | None
    #: Lines that run or wait.
    pending: int
    created_ms: int

    @classmethod
    def of(cls, data: Json) -> SessionInfo:
        """From the API's JSON."""
        return cls(
            id=data["id"],
            pid=data.get("pid", 0),
            user=data.get("user", ""),
            pty_exec_id=data.get("pty_exec_id"),
            pending=data.get("pending", 0),
            created_ms=data.get("created_ms", 0),
        )


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file; of a symbolic link, the link's own facts."""

    #: As asked in a stat, relative to the listed directory in a list. Bytes that are not UTF-8 are kept as
    #: surrogates (as in `os.fsdecode`), so the path can be given back.
    path: str
    #: `file`, `directory`, `symlink`, `fifo`, `socket`, `device`.
    kind: str
    size: int
    #: Permission bits with setuid, setgid and sticky.
    mode: int
    uid: int
    gid: int
    modified_ms: int
    #: Where a symbolic link points.
    target: str | None

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.kind == "directory"

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return self.kind == "file"

    @classmethod
    def of(cls, data: Json) -> FileInfo:
        """From the API's JSON."""
        exact = data.get("path_base64")
        path = base64.b64decode(exact).decode("utf-8", "surrogateescape") if exact else data["path"]
        return cls(
            path=path,
            kind=data["kind"],
            size=data.get("size", 0),
            mode=data.get("mode", 0),
            uid=data.get("uid", 0),
            gid=data.get("gid", 0),
            modified_ms=data.get("modified_ms", 0),
            target=data.get("target"),
        )


@dataclass(frozen=True, slots=True)
class FileList:
    """A directory's content, by name."""

    entries: tuple[FileInfo, ...]
    #: There are more than were asked for.
    truncated: bool

    def __iter__(self) -> Iterator[FileInfo]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> FileInfo:
        return self.entries[index]


@dataclass(frozen=True, slots=True)
class FileEvent:
    """What happened to a watched file."""

    #: `created`, `modified`, `attributes`, `removed`, `renamed`; `overflow`: events were lost, look again.
    kind: str
    #: Relative to the watched path; empty for the watched one itself.
    path: str
    #: Old path of a rename.
    renamed_from: str | None = None

    @classmethod
    def of(cls, data: Json) -> FileEvent:
        """From the API's JSON."""
        return cls(data["kind"], data.get("path", ""), data.get("from"))


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a transfer of files moved."""

    files: int
    bytes: int
    #: Members of a downloaded directory that were left out as unsafe (only with `skip_unsafe`).
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ContentCounts:
    """What was done for content on a node since its fill worker began."""

    #: Bytes that the kernel asked for, and those of them that were in the node's cache.
    asked_bytes: int = 0
    cached_bytes: int = 0
    #: Bytes that came from the store, as they are compressed there, and how often some were fetched.
    fetched_bytes: int = 0
    fetches: int = 0
    failed_reads: int = 0
    #: Milliseconds that readers waited, added up over all of them.
    waited_ms: int = 0


@dataclass(frozen=True, slots=True)
class LayerContent:
    """The content of a layer on a node."""

    size_bytes: int
    #: Of these, bytes that are on the node.
    here_bytes: int
    counts: ContentCounts

    @classmethod
    def of(cls, data: Json) -> LayerContent:
        """From the API's JSON."""
        return cls(data.get("size_bytes", 0), data.get("here_bytes", 0), _flat(ContentCounts, data))


@dataclass(frozen=True, slots=True)
class LayerOnNode:
    """A layer on one node."""

    node: str
    #: Whether it is mounted there, once for all sandboxes that use it.
    mounted: bool
    #: None in lists.
    content: LayerContent | None

    @classmethod
    def of(cls, data: Json) -> LayerOnNode:
        """From the API's JSON."""
        content = data.get("content")
        return cls(data["node"], data.get("mounted", False), LayerContent.of(content) if content else None)


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """An imported image."""

    name: str
    #: `base` (an image), `workspace`, `toolkit` or `snapshot`.
    kind: str
    digest: str
    size_bytes: int
    content_bytes: int
    files: int
    created_ms: int
    source: str
    architecture: str
    env: tuple[str, ...]
    working_dir: str | None
    user: str | None
    #: Ids of the sandboxes that use it now.
    used_by: tuple[str, ...]
    #: It on the nodes; a list names only those that have it at hand.
    nodes: tuple[LayerOnNode, ...]

    @classmethod
    def of(cls, data: Json) -> ImageInfo:
        """From the API's JSON."""
        return cls(
            name=data["name"],
            kind=data.get("kind", "base"),
            digest=data.get("digest", ""),
            size_bytes=data.get("size_bytes", 0),
            content_bytes=data.get("content_bytes", 0),
            files=data.get("files", 0),
            created_ms=data.get("created_ms", 0),
            source=data.get("source", ""),
            architecture=data.get("architecture", ""),
            env=tuple(data.get("env") or ()),
            working_dir=data.get("working_dir"),
            user=data.get("user"),
            used_by=tuple(data.get("used_by") or ()),
            nodes=tuple(LayerOnNode.of(on) for on in data.get("nodes") or ()),
        )


@dataclass(frozen=True, slots=True)
class BlobTrace:
    """What first runs read of a blob."""

    id: str
    size_bytes: int = 0
    #: Runs that were recorded, and when the last was, in Unix milliseconds.
    runs: int = 0
    recorded_ms: int | None = None
    #: Bytes that are brought in when a run begins.
    traced_bytes: int = 0
    #: The groups of 256 KiB that they are, in the order in which they are wanted.
    groups: tuple[int, ...] = ()

    @classmethod
    def of(cls, data: Json) -> BlobTrace:
        """From the API's JSON."""
        trace: BlobTrace = _flat(cls, {**data, "groups": tuple(data.get("groups") or ())})
        return trace


@dataclass(frozen=True, slots=True)
class PrefetchProgress:
    """How far a prefetch is."""

    #: Bytes that are wanted, and those that are not on the node yet.
    wanted_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What one rule left out of a layer."""

    #: The rule's name, or the pattern.
    rule: str
    #: Files, directories and links.
    files: int
    #: Bytes of files.
    bytes: int
    #: The first paths that matched; what is in a directory that matched is counted and not listed.
    paths: tuple[str, ...]

    @classmethod
    def of(cls, data: Json) -> LeftOut:
        """From the API's JSON."""
        return cls(data["rule"], data.get("files", 0), data.get("bytes", 0), tuple(data.get("paths") or ()))


@dataclass(frozen=True, slots=True)
class PackResult:
    """A layer that was made of a sandbox."""

    layer: ImageInfo
    #: Bytes of content that no layer had before.
    new_bytes: int
    #: Bytes that were added to the store: that content compressed, and metadata.
    stored_bytes: int
    #: Residue of work that was left out.
    scrubbed: tuple[LeftOut, ...]
    #: What was left out as asked.
    excluded: tuple[LeftOut, ...]
    #: Of a workspace that was packed over toolkits: what was changed in the toolkits' own paths. It is in the
    #: layer, and where the same toolkits lie over it again, theirs shows.
    under_toolkits: LeftOut | None
    #: How long each step took.
    phases: tuple[LaunchPhase, ...]

    @property
    def name(self) -> str:
        """What `DSecContainerRunArgs.workspace` takes to start from it; of an image, its name."""
        return f"snapshot/{self.layer.name}" if self.layer.kind == "snapshot" else self.layer.name

    @classmethod
    def of(cls, data: Json) -> PackResult:
        """From the API's JSON."""
        under = data.get("under_toolkits")
        return cls(
            layer=ImageInfo.of(data["layer"]),
            new_bytes=data.get("new_bytes", 0),
            stored_bytes=data.get("stored_bytes", 0),
            scrubbed=tuple(LeftOut.of(left_out) for left_out in data.get("scrubbed") or ()),
            excluded=tuple(LeftOut.of(left_out) for left_out in data.get("excluded") or ()),
            under_toolkits=LeftOut.of(under) if under else None,
            phases=tuple(LaunchPhase(p["name"], p["us"]) for p in data.get("phases") or ()),
        )


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """How far an import is."""

    #: Files and bytes of content taken in so far.
    files: int
    bytes: int
    #: Of a pull: bytes that came from the registry so far, and those that are to come in all.
    fetched_bytes: int | None = None
    fetch_bytes_total: int | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """All that a node has."""

    memory_mib: int = 0
    cpu_millis: int = 0
    disk_mib: int = 0
    #: Processes and threads that its kernel takes.
    processes: int = 0


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """What a node uses now."""

    creating: int = 0
    running: int = 0
    #: Paused ones, and those on the way there or back.
    paused: int = 0
    stopping: int = 0
    memory_promised_mib: int = 0
    memory_available_mib: int = 0
    cpu_promised_millis: int = 0
    #: Share of the last ten seconds, 0 to 1, in which all its processes waited for memory, or some for a
    #: processor.
    memory_pressure: float = 0.0
    cpu_pressure: float = 0.0
    disk_free_mib: int = 0
    #: Files that can still be made where it keeps its state; None where there is no such limit.
    files_free: int | None = None
    processes: int = 0
    #: Content of layers on the node's disk, and what was done for it.
    content_cache_bytes: int = 0
    content: ContentCounts = ContentCounts()

    @classmethod
    def of(cls, data: Json) -> NodeUsage:
        """From the API's JSON."""
        usage: NodeUsage = _flat(cls, {**data, "content": _flat(ContentCounts, data.get("content") or {})})
        return usage


@dataclass(frozen=True, slots=True)
class Feature:
    """A kernel feature or tool of a node."""

    name: str
    purpose: str = ""
    #: `works`, `degraded`, `missing`.
    state: str = ""
    found: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class NodeScheduling:
    """Whether a node takes new sandboxes, as its operator said."""

    #: `open`, `cordoned`, `draining`.
    state: str = "open"
    reason: str = ""
    #: Since when, Unix ms; None of a node that was always open.
    since_ms: int | None = None
    #: When what is left on a draining node is stopped, Unix ms; None: it ends when it ends.
    stop_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node: what it is, can do and does now."""

    node: str
    version: str
    pid: int
    started_ms: int
    capacity: Capacity
    usage: NodeUsage
    backends: tuple[str, ...]
    features: tuple[Feature, ...]
    #: Its layer store: nodes that say the same share their layers.
    store: str
    #: Of its processors, such as `x86_64`.
    architecture: str
    #: Most sandboxes it takes.
    sandboxes_max: int
    #: The pool that it is of: what `DSecContainerRunArgs.pool` can ask for.
    pool: str
    #: What `DSecContainerRunArgs.node_labels` can ask for.
    labels: Mapping[str, str]
    scheduling: NodeScheduling

    @property
    def sandboxes(self) -> int:
        """Sandboxes it has, whatever their state: a draining node is drained when it has none."""
        return self.usage.creating + self.usage.running + self.usage.stopping

    @classmethod
    def of(cls, data: Json) -> NodeStatus:
        """From the API's JSON."""
        return cls(
            node=data["node"],
            version=data.get("version", ""),
            pid=data.get("pid", 0),
            started_ms=data.get("started_ms", 0),
            capacity=_flat(Capacity, data.get("capacity") or {}),
            usage=NodeUsage.of(data.get("usage") or {}),
            backends=tuple(data.get("backends") or ()),
            features=tuple(_flat(Feature, f) for f in data.get("features") or ()),
            store=data.get("store", ""),
            architecture=data.get("architecture", ""),
            sandboxes_max=data.get("sandboxes_max", 0),
            pool=data.get("pool", "onprem"),
            labels=data.get("labels") or {},
            scheduling=_flat(NodeScheduling, data.get("scheduling") or {}),
        )
