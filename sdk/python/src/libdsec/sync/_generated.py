"""Written by tools/gen_sync.py from the asynchronous classes. Do not edit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from .. import _client, _commands, _files, _iam, _images, _ports, _sandbox
from .._args import CpuClass, DSecContainerRunArgs, RegistryCredentials
from .._bodies import Data
from .._commands import StreamName
from .._files import LocalPath, RemotePath
from .._iam import AuditEntry, Grant, Identity, Key, Project, WhoAmI
from .._images import OnPrefetch, OnProgress
from .._records import (
    BlobTrace,
    ExecInfo,
    ExecResult,
    FileEvent,
    FileInfo,
    FileList,
    Gap,
    ImageInfo,
    LayerOnNode,
    NodeStatus,
    PackResult,
    SandboxInfo,
    SessionInfo,
    Transfer,
    Usage,
)
from .._sandbox import DEFAULT, Timeout
from .._tasks import Counts, TaskOutcome, TaskStatus
from ..errors import DSecError
from ._portal import Portal, close_at_exit


def _session(given: str | Session | None) -> str | None:
    return given.id if isinstance(given, Session) else given


class Files:
    """The files of one sandbox, at `Sandbox.files`.

    `user`, everywhere: acts with that user's rights; default the sandbox's user. `timeout` of a transfer is
    the longest wait without progress, as nobody can say how long the whole may take.
    """

    def __init__(self, portal: Portal, inner: _files.Files) -> None:
        self._portal = portal
        self._inner = inner

    def read(
        self,
        path: RemotePath,
        *,
        offset: int | None = None,
        length: int | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> bytes:
        """A file's content, or `length` bytes of it from `offset`."""
        return self._portal.call(
            self._inner.read(path, offset=offset, length=length, user=user, timeout=timeout)
        )

    def read_text(
        self,
        path: RemotePath,
        *,
        encoding: str = "utf-8",
        errors: str = "strict",
        user: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """A file's content as text."""
        return self._portal.call(
            self._inner.read_text(path, encoding=encoding, errors=errors, user=user, timeout=timeout)
        )

    def stream(
        self,
        path: RemotePath,
        *,
        offset: int = 0,
        length: int | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> Iterator[bytes]:
        """A file's content in chunks of 1 MiB, for one too large for memory."""
        return self._portal.iterate(
            self._inner.stream(path, offset=offset, length=length, user=user, timeout=timeout)
        )

    def write(
        self,
        path: RemotePath,
        data: Data,
        *,
        mode: int | None = None,
        owner: str | None = None,
        parents: bool = True,
        offset: int | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> FileInfo:
        """Writes a file whole and atomically; with `offset`, the bytes go there in the file as it is.

        `data` is bytes, text, a file opened for reading bytes, or an iterator of bytes. `owner` is
        `user[:group]`.
        """
        return self._portal.call(
            self._inner.write(
                path, data, mode=mode, owner=owner, parents=parents, offset=offset, user=user, timeout=timeout
            )
        )

    def upload(
        self,
        local: LocalPath,
        remote: RemotePath,
        *,
        mode: int | None = None,
        owner: str | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> Transfer:
        """Copies a local file to the path `remote`, or a local directory's content into the directory
        `remote`, which is made when missing.

        A file keeps its permission bits unless `mode` is given. `mode` and `owner` are for a file.
        """
        return self._portal.call(
            self._inner.upload(local, remote, mode=mode, owner=owner, user=user, timeout=timeout)
        )

    def download(
        self,
        remote: RemotePath,
        local: LocalPath,
        *,
        user: str | None = None,
        skip_unsafe: bool = False,
        timeout: float | None = None,
    ) -> Transfer:
        """Copies a file of the sandbox to the path `local`, or a directory's content into the directory
        `local`, which is made when missing.

        Nothing is seen at `local` before it is whole. A directory may hold what must not be unpacked on
        this side (devices, links to absolute paths or out of it): that is refused, or left out and named in
        the result with `skip_unsafe`.
        """
        return self._portal.call(
            self._inner.download(remote, local, user=user, skip_unsafe=skip_unsafe, timeout=timeout)
        )

    def stat(self, path: RemotePath, *, user: str | None = None) -> FileInfo:
        """A file's facts; of a symbolic link, the link's own."""
        return self._portal.call(self._inner.stat(path, user=user))

    def exists(self, path: RemotePath, *, user: str | None = None) -> bool:
        """Whether something is at the path, be it a link that leads nowhere."""
        return self._portal.call(self._inner.exists(path, user=user))

    def list(
        self, path: RemotePath = ".", *, depth: int = 1, limit: int | None = None, user: str | None = None
    ) -> FileList:
        """A directory's content; `depth` levels of it.

        Without `limit` everything is listed, and more than a million entries raise :class:`TooLarge`; with
        it, see `truncated` of the result.
        """
        return self._portal.call(self._inner.list(path, depth=depth, limit=limit, user=user))

    def mkdir(
        self, path: RemotePath, *, parents: bool = True, mode: int | None = None, user: str | None = None
    ) -> FileInfo:
        """Makes a directory; with `parents`, also those above it, and it may be there already."""
        return self._portal.call(self._inner.mkdir(path, parents=parents, mode=mode, user=user))

    def move(
        self, source: RemotePath, target: RemotePath, *, overwrite: bool = False, user: str | None = None
    ) -> FileInfo:
        """Moves a file or directory to the path `target` itself."""
        return self._portal.call(self._inner.move(source, target, overwrite=overwrite, user=user))

    def remove(self, path: RemotePath, *, recursive: bool = False, user: str | None = None) -> None:
        """Removes a file, or a directory: an empty one, or with `recursive` whatever is in it."""
        self._portal.call(self._inner.remove(path, recursive=recursive, user=user))

    def watch(self, path: RemotePath, *, recursive: bool = False, user: str | None = None) -> Watch:
        """What happens to a file or in a directory::

        with sb.files.watch("/work") as events:   # in place from here on
            for event in events: ...
        """
        return Watch(self._portal, self._inner.watch(path, recursive=recursive, user=user))


class Watch:
    """Events of a watched path; made by `Files.watch`.

    When the connection breaks it is made again, and an event of kind `overflow` tells that some may have
    been lost: look again.
    """

    def __init__(self, portal: Portal, inner: _files.Watch) -> None:
        self._portal = portal
        self._inner = inner

    def next(self, timeout: float | None = None) -> FileEvent | None:
        """The next event; None when the watch is closed. With `timeout`, raises :class:`RequestTimeout`."""
        return self._portal.call(self._inner.next(timeout))

    def __iter__(self) -> Iterator[FileEvent]:
        return self

    def __next__(self) -> FileEvent:
        try:
            return self._portal.call(self._inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Ends the watch."""
        self._portal.call(self._inner.close())

    def __enter__(self) -> Watch:
        self._portal.call(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._portal.is_open:
            self._portal.call(self._inner.__aexit__(kind, error, trace))


class PortStream:
    """A TCP connection to a port of the sandbox's loopback; made by `Sandbox.connect`.

    `timeout` limits the wait for bytes to come or go; default the client's.
    """

    def __init__(self, portal: Portal, inner: _ports.PortStream) -> None:
        self._portal = portal
        self._inner = inner

    def read(self, size: int = -1, *, timeout: float | None = None) -> bytes:
        """Up to `size` bytes as soon as there are any, empty at the end; -1: everything until the end."""
        return self._portal.call(self._inner.read(size, timeout=timeout))

    def read_exactly(self, size: int, *, timeout: float | None = None) -> bytes:
        """Exactly `size` bytes; raises :class:`EOFError` when fewer come."""
        return self._portal.call(self._inner.read_exactly(size, timeout=timeout))

    def read_until(self, end: bytes = b"\n", *, timeout: float | None = None) -> bytes:
        """Bytes up to and with `end`, or what there is when the stream ends before."""
        return self._portal.call(self._inner.read_until(end, timeout=timeout))

    def write(self, data: bytes, *, timeout: float | None = None) -> None:
        """Sends all of `data`; returns when it is on its way."""
        self._portal.call(self._inner.write(data, timeout=timeout))

    def write_eof(self) -> None:
        """Ends what this side writes; what the server still says can be read."""
        self._portal.call(self._inner.write_eof())

    def close(self) -> None:
        """Closes both directions."""
        self._portal.call(self._inner.close())

    def __enter__(self) -> PortStream:
        self._portal.call(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._portal.is_open:
            self._portal.call(self._inner.__aexit__(kind, error, trace))


class Iam:
    """Who may do what, and how much of it: `DSecClient.iam`.

    A call changes what its key may change, and gives no more than its key holds. When it returns, the change
    holds on every server.
    """

    def __init__(self, portal: Portal, inner: _iam.Iam) -> None:
        self._portal = portal
        self._inner = inner

    def whoami(self) -> WhoAmI:
        """Who the key belongs to."""
        return self._portal.call(self._inner.whoami())

    def projects(self) -> tuple[Project, ...]:
        """The project that the client acts in and all in it, in order."""
        return self._portal.call(self._inner.projects())

    def project(self, project: str) -> Project:
        """One project."""
        return self._portal.call(self._inner.project(project))

    def create_project(
        self, project: str, *, quota: Mapping[str, int] | None = None, ceiling: Sequence[str] | None = None
    ) -> Project:
        """Makes a project in another, which must be there."""
        return self._portal.call(self._inner.create_project(project, quota=quota, ceiling=ceiling))

    def set_quota(self, project: str, quota: Mapping[str, int]) -> Project:
        """Sets all of a project's quota; an empty one takes it away."""
        return self._portal.call(self._inner.set_quota(project, quota))

    def set_ceiling(self, project: str, ceiling: Sequence[str] | None) -> Project:
        """Sets what anybody may hold in a project at most; None takes it away."""
        return self._portal.call(self._inner.set_ceiling(project, ceiling))

    def remove_project(self, project: str) -> None:
        """Removes a project that nothing is in."""
        self._portal.call(self._inner.remove_project(project))

    def stop_project(self, project: str, *, grace: float = 0.0, timeout: float = 120.0) -> TaskOutcome:
        """Ends all sandboxes of a project and of those in it. Failures are in the result."""
        return self._portal.call(self._inner.stop_project(project, grace=grace, timeout=timeout))

    def pause_project(self, project: str, *, timeout: float = 120.0) -> TaskOutcome:
        """Pauses all sandboxes of a project and of those in it. Failures are in the result."""
        return self._portal.call(self._inner.pause_project(project, timeout=timeout))

    def resume_project(self, project: str, *, timeout: float = 120.0) -> TaskOutcome:
        """Resumes all paused sandboxes of a project and of those in it. Failures are in the result."""
        return self._portal.call(self._inner.resume_project(project, timeout=timeout))

    def wait_project(self, project: str, *, timeout: float = 3600.0) -> int:
        """Waits until no sandbox of a project, or of those in it, is known to live.

        Returns how many are lost with their nodes, which are not waited for.
        """
        return self._portal.call(self._inner.wait_project(project, timeout=timeout))

    def identities(self) -> tuple[Identity, ...]:
        """Those of the project that the client acts in and of all in it."""
        return self._portal.call(self._inner.identities())

    def identity(self, identity: int) -> Identity:
        """One of them, with what it was given and its keys."""
        return self._portal.call(self._inner.identity(identity))

    def create_identity(self, name: str, *, kind: str = "service", project: str | None = None) -> Identity:
        """Makes an identity, a `person`, `service` or `agent`, which holds nothing yet."""
        return self._portal.call(self._inner.create_identity(name, kind=kind, project=project))

    def remove_identity(self, identity: int) -> None:
        """Removes an identity, its keys and its grants. What it gave counts for nothing from then on."""
        self._portal.call(self._inner.remove_identity(identity))

    def create_key(
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
        return self._portal.call(
            self._inner.create_key(
                identity, name, expires_in=expires_in, project=project, role=role, permissions=permissions
            )
        )

    def revoke_key(self, key_id: str) -> None:
        """Revokes a key by its id: it works nowhere from then on."""
        self._portal.call(self._inner.revoke_key(key_id))

    def grants(self) -> tuple[Grant, ...]:
        """What was given in the project that the client acts in and in all in it, the oldest first."""
        return self._portal.call(self._inner.grants())

    def grant(
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
        return self._portal.call(
            self._inner.grant(identity, role=role, permissions=permissions, project=project)
        )

    def revoke_grant(self, grant: int) -> None:
        """Takes a grant back, and with it all that rests on it."""
        self._portal.call(self._inner.revoke_grant(grant))

    def audit(self, *, denied: bool | None = None) -> Iterator[AuditEntry]:
        """Who did what and who was not let, the latest first; with `denied`, one of both."""
        return self._portal.iterate(self._inner.audit(denied=denied))


class Images:
    """Layers of one kind: images at `DSecClient.images`, others at `workspaces`, `toolkits`, `snapshots`.

    `node` names the node that is to do it; without, any does, and all prefetch.
    """

    def __init__(self, portal: Portal, inner: _images.Images) -> None:
        self._portal = portal
        self._inner = inner

    def list(self, *, node: str | None = None) -> tuple[ImageInfo, ...]:
        """All of them, by name."""
        return self._portal.call(self._inner.list(node=node))

    def get(self, name: str, *, node: str | None = None) -> ImageInfo:
        """One of them."""
        return self._portal.call(self._inner.get(name, node=node))

    def import_(
        self,
        name: str,
        source: Path | Data,
        *,
        description: str | None = None,
        node: str | None = None,
        on_progress: OnProgress | None = None,
        timeout: float = 600.0,
    ) -> ImageInfo:
        """Imports a rootfs tar, an OCI layout or a `docker save` archive, compressed or not, or a directory.

        `source` is the path of a local file or directory (text or `Path`), a file opened for reading bytes,
        or an iterator of bytes. What is in a directory is root's in the layer. `timeout` limits each wait
        without progress. `description` is what the record says the image was made from; default the file's
        name.
        """
        return self._portal.call(
            self._inner.import_(
                name, source, description=description, node=node, on_progress=on_progress, timeout=timeout
            )
        )

    def pull(
        self,
        name: str,
        reference: str,
        *,
        platform: str | None = None,
        credentials: RegistryCredentials | None = None,
        plain_http: bool = False,
        ca_pem: str | None = None,
        node: str | None = None,
        on_progress: OnProgress | None = None,
        timeout: float = 600.0,
    ) -> ImageInfo:
        """Has a node get an image from a registry: `docker://HOST[:PORT]/REPOSITORY[:TAG|@DIGEST]`.

        Layers that the platform has are not fetched again. `platform` (`linux/arm64`) picks from an image for
        several; default the node's. Without `credentials` none are shown. `plain_http` speaks HTTP without
        TLS, which is done anyway with loopback addresses; `ca_pem` are certificates to trust beside the
        node's. `timeout` limits each wait without progress.
        """
        return self._portal.call(
            self._inner.pull(
                name,
                reference,
                platform=platform,
                credentials=credentials,
                plain_http=plain_http,
                ca_pem=ca_pem,
                node=node,
                on_progress=on_progress,
                timeout=timeout,
            )
        )

    def prefetch(
        self,
        name: str,
        *,
        trace: bool = False,
        node: str | Sequence[str] | None = None,
        on_progress: OnPrefetch | None = None,
        timeout: float = 600.0,
    ) -> tuple[LayerOnNode, ...]:
        """Brings its content to all nodes, or to those named, before anything runs; returns what each has.

        With `trace` only what runs were seen to begin with. `timeout` limits each wait without progress.
        :class:`Unavailable` when some of it does not come; `detail["nodes"]` says where, of several.
        """
        return self._portal.call(
            self._inner.prefetch(name, trace=trace, node=node, on_progress=on_progress, timeout=timeout)
        )

    def tag(self, name: str, tag: str, *, node: str | None = None) -> ImageInfo:
        """Puts a tag on the version that `name` means, wherever the tag was before."""
        return self._portal.call(self._inner.tag(name, tag, node=node))

    def trace(self, name: str, *, node: str | None = None) -> tuple[BlobTrace, ...]:
        """What first runs read of it, which later ones find prefetched."""
        return self._portal.call(self._inner.trace(name, node=node))

    def remove(self, name: str, *, node: str | None = None) -> None:
        """Removes one; :class:`Conflict` while sandboxes use it."""
        self._portal.call(self._inner.remove(name, node=node))

    def exists(self, name: str, *, node: str | None = None) -> bool:
        """Whether it is there."""
        return self._portal.call(self._inner.exists(name, node=node))


class Process:
    """A command that runs, or ran. Made by `Sandbox.start`, `Sandbox.pty` and `Sandbox.attach`.

    It runs in the sandbox whatever becomes of this object; `with` kills it at the end.
    """

    def __init__(self, portal: Portal, inner: _commands.Process) -> None:
        self._portal = portal
        self._inner = inner

    @property
    def id(self) -> str:
        """Its id, for `Sandbox.attach`."""
        return self._inner.id

    @property
    def info(self) -> ExecInfo:
        """Its record as last seen; `refresh` asks again."""
        return self._inner.info

    @property
    def exit_code(self) -> int | None:
        """Its exit code as last seen."""
        return self._inner.exit_code

    @property
    def session_id(self) -> str | None:
        """The terminal session whose shell it is: the name that finds it again."""
        return self._inner.session_id

    @property
    def offsets(self) -> tuple[int, int]:
        """Where `stream` is in stdout and stderr: what to give `attach` to go on from here."""
        return self._inner.offsets

    @property
    def gaps(self) -> list[Gap]:
        """What `stream` could not give because it was not kept."""
        return self._inner.gaps

    def __repr__(self) -> str:
        return repr(self._inner)

    def refresh(self) -> ExecInfo:
        """Asks for its record."""
        return self._portal.call(self._inner.refresh())

    def wait(self, timeout: float | None = None, *, check: bool = False) -> ExecResult:
        """Waits for its end and returns the result with all output that was kept.

        With `timeout`, raises :class:`RequestTimeout` when it has not ended by then; it goes on. `check`
        raises :class:`CommandFailed` as `ExecResult.check` does.
        """
        return self._portal.call(self._inner.wait(timeout, check=check))

    def stdout(self, offset: int = 0) -> Iterator[bytes]:
        """Standard output from `offset` on, as it comes, until the command ends."""
        return self._portal.iterate(self._inner.stdout(offset))

    def stderr(self, offset: int = 0) -> Iterator[bytes]:
        """Standard error from `offset` on, as it comes, until the command ends."""
        return self._portal.iterate(self._inner.stderr(offset))

    def stream(self) -> Iterator[tuple[StreamName, bytes]]:
        """Both streams as they come, until the command ends: `("stdout", b"...")`.

        Starts at `offsets` and moves them, so a second call goes on where the first one stopped. A lost
        connection is taken up again from there. A terminal's output is all on stdout.
        """
        return self._portal.iterate(self._inner.stream())

    def write(self, data: bytes | str, *, timeout: float | None = None) -> None:
        """Writes to its standard input; returns when it has been taken.

        `timeout` limits each wait for the command to read on. Never sent twice: a failure with
        `maybe_sent` may have written some of it.
        """
        self._portal.call(self._inner.write(data, timeout=timeout))

    def close_stdin(self) -> None:
        """Ends its standard input."""
        self._portal.call(self._inner.close_stdin())

    def signal(self, name: str = "SIGINT", *, tree: bool = False) -> None:
        """Sends a signal to its process group; with `tree`, to everything that it started."""
        self._portal.call(self._inner.signal(name, tree=tree))

    def kill(self) -> None:
        """Kills everything that it started."""
        self._portal.call(self._inner.kill())

    def resize(self, rows: int, cols: int) -> None:
        """Sets its terminal's size."""
        self._portal.call(self._inner.resize(rows, cols))

    def __enter__(self) -> Process:
        self._portal.call(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._portal.is_open:
            self._portal.call(self._inner.__aexit__(kind, error, trace))


class Session:
    """A shell whose cwd, variables and jobs stay between lines; made by `Sandbox.session`.

    Its lines run one after another. `with` closes it at the end.
    """

    def __init__(self, portal: Portal, inner: _sandbox.Session) -> None:
        self._portal = portal
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def id(self) -> str:
        """Its name."""
        return self._inner.id

    @property
    def info(self) -> SessionInfo:
        """Its record as last seen."""
        return self._inner.info

    def refresh(self) -> SessionInfo:
        """Asks for its record."""
        return self._portal.call(self._inner.refresh())

    def run_shell(
        self, line: str, *, timeout: Timeout = DEFAULT, check: bool = False, output_limit: int | None = None
    ) -> ExecResult:
        """Runs a line in its shell; see `Sandbox.run_shell`."""
        return self._portal.call(
            self._inner.run_shell(line, timeout=timeout, check=check, output_limit=output_limit)
        )

    def start(self, line: str, *, timeout: float | None = None, output_limit: int | None = None) -> Process:
        """Starts a line in its shell, or queues it; see `Sandbox.start`."""
        return Process(
            self._portal,
            self._portal.call(self._inner.start(line, timeout=timeout, output_limit=output_limit)),
        )

    def close(self) -> None:
        """Ends its shell and everything that it started."""
        self._portal.call(self._inner.close())

    def __enter__(self) -> Session:
        self._portal.call(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._portal.is_open:
            self._portal.call(self._inner.__aexit__(kind, error, trace))


class Sandbox:
    """A sandbox; made by `DSecClient.run_container`, found by `DSecClient.get` and `list`.

    `with` stops it at the end.
    """

    def __init__(self, portal: Portal, inner: _sandbox.Sandbox) -> None:
        self._portal = portal
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def id(self) -> str:
        """Its id, for `DSecClient.get`."""
        return self._inner.id

    @property
    def info(self) -> SandboxInfo:
        """Its record as last seen; `refresh` asks again."""
        return self._inner.info

    @property
    def state(self) -> str:
        """Its state as last seen."""
        return self._inner.state

    @property
    def usage(self) -> Usage | None:
        """What it used when it was last asked; `refresh` asks again."""
        return self._inner.usage

    @property
    def first_result(self) -> ExecResult | None:
        """How the `exec` of the create's arguments went."""
        return self._inner.first_result

    @property
    def files(self) -> Files:
        """Its files."""
        return Files(self._portal, self._inner.files)

    def refresh(self) -> SandboxInfo:
        """Asks for its record, with usage."""
        return self._portal.call(self._inner.refresh())

    def wait(self, state: str | None = None, *, timeout: float = 60.0) -> SandboxInfo:
        """Waits until it is in a state; without one, until it has ended, however.

        Raises :class:`Conflict` when it ended in another state, and :class:`RequestTimeout` after `timeout`
        seconds.
        """
        return self._portal.call(self._inner.wait(state, timeout=timeout))

    def update(self, *, cpu_class: CpuClass | None = None, cpu_weight: int | None = None) -> SandboxInfo:
        """Gives it other limits of CPU time while it runs, for what runs in it already too.

        `cpu_class` and `cpu_weight`: as in `DSecContainerRunArgs`; what is left out stays as it is.
        """
        return self._portal.call(self._inner.update(cpu_class=cpu_class, cpu_weight=cpu_weight))

    def stop(self, *, grace: float = 0.0, timeout: float | None = None) -> SandboxInfo:
        """Ends it and returns when nothing of it is left; one that has ended answers its record.

        `grace`: seconds that its processes get between SIGTERM and SIGKILL.
        """
        return self._portal.call(self._inner.stop(grace=grace, timeout=timeout))

    def pause(self, *, timeout: float = 120.0) -> SandboxInfo:
        """Has its processes stand still and its memory given back, and returns when that is done.

        Files, sockets, running commands and time limits go on where they were when it is resumed, which any
        call that needs it does. `SandboxInfo.pauses` says how much memory was given back.
        :class:`Conflict` when somebody used it meanwhile.
        """
        return self._portal.call(self._inner.pause(timeout=timeout))

    def resume(self, *, timeout: float = 120.0) -> SandboxInfo:
        """Lets it go on, and returns when it runs."""
        return self._portal.call(self._inner.resume(timeout=timeout))

    def __enter__(self) -> Sandbox:
        self._portal.call(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._portal.is_open:
            self._portal.call(self._inner.__aexit__(kind, error, trace))

    def logs(self) -> list[dict[str, Any]]:
        """What happened to it: `{"time_ms": ..., "event": ..., ...}` each."""
        return self._portal.call(self._inner.logs())

    def pack_diff(
        self,
        name: str,
        *,
        kind: str = "workspace",
        exclude: Sequence[str] = (),
        scrub: bool | Sequence[str] = True,
        answers: Sequence[str] = (),
        deny: Sequence[str] = (),
        quiesce: str = "freeze",
        timeout: float = 1800.0,
    ) -> PackResult:
        """Makes a layer of what it has written, which sandboxes start from with `workspace=`.

        `name` is `name`, `name:tag` or `name@version`. `kind`: `workspace` (what was written, with the
        workspace it started from), `snapshot` (that and its toolkits: its whole state, to branch from),
        `toolkit` (what was written, alone) or `base` (all of it, as an image). Packing again stores only
        what changed.

        `exclude`, `answers` and `deny` are patterns of paths, such as `*.o`, `build/` or `/data/**`: packed
        as though not touched; left out, as whoever uses the layer must not find them; :class:`Conflict` if
        one is there all the same. `scrub`: True leaves all known residue of work out (caches, history,
        keys, logs, temporary files), False none, names of rules (`["caches", "keys"]`) those.

        `quiesce`: its processes `"freeze"` meanwhile; `"refuse"`: and :class:`Conflict` while
        one of them has a file open for writing; `"none"`: they go on.

        Cancelling this call does not end the pack.
        """
        return self._portal.call(
            self._inner.pack_diff(
                name,
                kind=kind,
                exclude=exclude,
                scrub=scrub,
                answers=answers,
                deny=deny,
                quiesce=quiesce,
                timeout=timeout,
            )
        )

    def run_shell(
        self,
        line: str,
        *,
        timeout: Timeout = DEFAULT,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        session: str | Session | None = None,
        check: bool = False,
        output_limit: int | None = None,
    ) -> ExecResult:
        """Runs a line with the sandbox's shell, or in a session's shell, and returns how it went.

        After `timeout` seconds (default the client's `command_timeout`; None: no limit) the platform kills
        the command's whole process tree, and the result says `timed_out`. Cancelling this call does not end
        the command. With `check`, anything but exit code 0 raises :class:`CommandFailed`.

        A command is never run twice: when the connection fails at a moment that leaves open whether it was
        started, the exception's `maybe_sent` is true.
        """
        return self._portal.call(
            self._inner.run_shell(
                line,
                timeout=timeout,
                env=env,
                cwd=cwd,
                user=user,
                stdin=stdin,
                session=_session(session),
                check=check,
                output_limit=output_limit,
            )
        )

    def run(
        self,
        *argv: str,
        timeout: Timeout = DEFAULT,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        check: bool = False,
        output_limit: int | None = None,
    ) -> ExecResult:
        """Runs a program with arguments, no shell between; otherwise as `run_shell`."""
        return self._portal.call(
            self._inner.run(
                *argv,
                timeout=timeout,
                env=env,
                cwd=cwd,
                user=user,
                stdin=stdin,
                check=check,
                output_limit=output_limit,
            )
        )

    def start(
        self,
        command: str | Sequence[str] | None = None,
        *,
        shell: str | None = None,
        argv: Sequence[str] | None = None,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool | str | bytes = False,
        session: str | Session | None = None,
        output_limit: int | None = None,
    ) -> Process:
        """Starts a command (text: a shell line; a sequence: program and arguments) and returns at once.

        `shell=` and `argv=` are the two forms by name. `stdin`: all of it, or True to `write` to it until
        `close_stdin`.
        """
        return Process(
            self._portal,
            self._portal.call(
                self._inner.start(
                    command,
                    shell=shell,
                    argv=argv,
                    timeout=timeout,
                    env=env,
                    cwd=cwd,
                    user=user,
                    stdin=stdin,
                    session=_session(session),
                    output_limit=output_limit,
                )
            ),
        )

    def pty(
        self,
        *,
        rows: int = 24,
        cols: int = 80,
        argv: Sequence[str] | None = None,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> Process:
        """A command on a terminal; without `argv` an interactive shell.

        The shell is a session: the same `name` finds it again, from any client. Its output is all on stdout.
        """
        return Process(
            self._portal,
            self._portal.call(
                self._inner.pty(
                    rows=rows, cols=cols, argv=argv, name=name, env=env, cwd=cwd, user=user, timeout=timeout
                )
            ),
        )

    def attach(self, exec_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0) -> Process:
        """A command that was started before, by whomever; `Process.stream` starts at the offsets."""
        return Process(
            self._portal,
            self._portal.call(
                self._inner.attach(exec_id, stdout_offset=stdout_offset, stderr_offset=stderr_offset)
            ),
        )

    def execs(self) -> list[ExecInfo]:
        """Its commands, newest first: those that run and the last ones that ended."""
        return self._portal.call(self._inner.execs())

    def session(
        self,
        name: str | None = None,
        *,
        shell: str | None = None,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Session:
        """A shell whose cwd, variables and jobs stay between lines: a new one, or the one of that name."""
        return Session(
            self._portal,
            self._portal.call(self._inner.session(name, shell=shell, user=user, cwd=cwd, env=env)),
        )

    def sessions(self) -> list[Session]:
        """Its open sessions."""
        return [Session(self._portal, each) for each in self._portal.call(self._inner.sessions())]

    def request(
        self,
        method: str,
        port: int,
        path: str = "/",
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | str | None = None,
        json: Any = None,
        timeout: float | None = None,
    ) -> httpx.Response:
        """An HTTP request to a server on a port of the sandbox, and its answer whatever its status.

        `path` may carry a query. An `authorization` header reaches the server in the sandbox. Raises when
        the platform could not pass the request on.
        """
        return self._portal.call(
            self._inner.request(
                method, port, path, headers=headers, content=content, json=json, timeout=timeout
            )
        )

    def port_url(self, port: int, path: str = "/") -> str:
        """The address of a port's HTTP server, for other clients; they need `DSecClient.auth_headers`."""
        return self._inner.port_url(port, path)

    def connect(self, port: int, *, timeout: float | None = None) -> PortStream:
        """A TCP connection to a port of the sandbox's loopback."""
        return PortStream(self._portal, self._portal.call(self._inner.connect(port, timeout=timeout)))

    def wait_for_port(self, port: int, *, timeout: float = 30.0) -> None:
        """Waits until something listens on a port; raises :class:`RequestTimeout` when nothing does."""
        self._portal.call(self._inner.wait_for_port(port, timeout=timeout))


class DSecClient:
    """A client of one platform, whose calls wait.

    ::

        with DSecClient() as client:
            args = DSecContainerRunArgs(container_image="debian", ttl_running_stop=300)
            with client.run_container(args) as sb:
                print(sb.run_shell("uname -a").stdout)

    - `base_url`, `api_key`: default `DSEC_URL` and `DSEC_API_KEY`, else what `dsec up` wrote to
      `$DSEC_CONFIG` or `~/.config/dsec/config.toml`.
    - `timeout`: seconds that each call may take, unless it is given its own.
    - `command_timeout`: seconds that a command of `run_shell` and `run` may take, unless it is given its own;
      None: no limit.
    - `retry_for`: seconds that a call which is safe to repeat is repeated while the platform is away.
    - `ca_file`: PEM file of certificates to trust beside the system's, for https.
    - `stop_timeout`: seconds that stopping a sandbox may take at the end of an `with`.
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
        self._inner = _client.DSecClient(
            base_url,
            api_key,
            timeout,
            command_timeout=command_timeout,
            retry_for=retry_for,
            max_connections=max_connections,
            stop_timeout=stop_timeout,
            ca_file=ca_file,
            project=project,
        )
        self._portal = Portal()

    def open(self) -> None:
        """Checks that the platform answers and the key is good. Again does nothing."""
        self._portal.start()
        try:
            self._portal.call(self._inner.open())
        except BaseException:
            self._portal.stop()
            raise
        close_at_exit(self)

    def close(self) -> None:
        """Stops the sandboxes that it made and that still run, then closes the connections."""
        if not self._portal.is_open:
            return
        try:
            self._portal.call(self._inner.close())
        finally:
            self._portal.stop()

    def __enter__(self) -> DSecClient:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def base_url(self) -> str:
        """Where the platform is."""
        return self._inner.base_url

    @property
    def auth_headers(self) -> dict[str, str]:
        """The headers that show the key and name the project, for other HTTP clients."""
        return self._inner.auth_headers

    @property
    def command_timeout(self) -> float | None:
        """Seconds that a command may take unless it is given its own."""
        return self._inner.command_timeout

    @property
    def iam(self) -> Iam:
        """Projects, identities, keys, and what they may do."""
        return Iam(self._portal, self._inner.iam)

    @property
    def images(self) -> Images:
        """The platform's images."""
        return Images(self._portal, self._inner.images)

    @property
    def workspaces(self) -> Images:
        """Workspaces: layers over an image."""
        return Images(self._portal, self._inner.workspaces)

    @property
    def toolkits(self) -> Images:
        """Toolkits: layers over image and workspace."""
        return Images(self._portal, self._inner.toolkits)

    @property
    def snapshots(self) -> Images:
        """What sandboxes wrote, as layers."""
        return Images(self._portal, self._inner.snapshots)

    def run_container(
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
        return Sandbox(
            self._portal,
            self._portal.call(
                self._inner.run_container(args, timeout, idempotency_key=idempotency_key, keep=keep)
            ),
        )

    @contextmanager
    def container(
        self, args: DSecContainerRunArgs, timeout: float = 120.0, *, idempotency_key: str | None = None
    ) -> Iterator[Sandbox]:
        """A container sandbox for the length of an `with` block."""
        context = self._inner.container(args, timeout, idempotency_key=idempotency_key)
        value = Sandbox(self._portal, self._portal.call(_enter(context)))
        try:
            yield value
        except BaseException as error:
            if not self._portal.call(_leave(context, error)):
                raise
        else:
            self._portal.call(_leave(context, None))

    def run_containers(
        self,
        args: DSecContainerRunArgs,
        count: int,
        *,
        at_once: int | None = None,
        failures: list[DSecError] | None = None,
        timeout: float = 300.0,
        keep: bool = False,
    ) -> Iterator[Sandbox]:
        """Makes many container sandboxes that are alike, in one call, and gives each as soon as it runs.

        ::

            for sb in client.run_containers(args, 1000):
                ...

        One that cannot be made does not keep the others: when all have been tried, the first failure is
        raised, with the number of all in `detail["failed"]`. With `failures`, a list of yours, nothing is
        raised and they are put there. What all would meet (no such image) ends it early. `at_once` are made
        at a time (64 when not given); `timeout` limits the wait for the next. A loop that is left early
        leaves those that are being made until their `ttl_running_stop`; `stop_task` of their task ends them.
        With `keep`, closing the client leaves all running.
        """
        for each in self._portal.iterate(
            self._inner.run_containers(
                args, count, at_once=at_once, failures=failures, timeout=timeout, keep=keep
            )
        ):
            yield Sandbox(self._portal, each)

    def get(self, sandbox_id: str) -> Sandbox:
        """A sandbox by its id. It is not stopped when the client closes."""
        return Sandbox(self._portal, self._portal.call(self._inner.get(sandbox_id)))

    def list(
        self,
        *,
        state: str | Sequence[str] | None = None,
        task_id: str | None = None,
        project: str | None = None,
        labels: Mapping[str, str] | None = None,
        usage: bool = False,
        page: int = 100,
    ) -> Iterator[Sandbox]:
        """The sandboxes, newest first: of any of these states, with all of these labels.

        `project`: only those of it and of all in it. `page`: how many are asked for at once. Ended sandboxes
        stay listed for an hour.
        """
        for each in self._portal.iterate(
            self._inner.list(
                state=state, task_id=task_id, project=project, labels=labels, usage=usage, page=page
            )
        ):
            yield Sandbox(self._portal, each)

    def stop_all(
        self, *, task_id: str | None = None, labels: Mapping[str, str] | None = None
    ) -> tuple[str, ...]:
        """Stops every sandbox of a task, or with these labels, and returns their ids.

        One that cannot be stopped does not keep the others; the first failure is raised at the end, with
        the ids and messages of all in `detail["failed"]`.
        """
        return self._portal.call(self._inner.stop_all(task_id=task_id, labels=labels))

    def tasks(self) -> tuple[TaskStatus, ...]:
        """The tasks that have sandboxes, or had some within the hour."""
        return self._portal.call(self._inner.tasks())

    def task(self, task_id: str) -> TaskStatus:
        """One task: how many sandboxes it has, by state and node."""
        return self._portal.call(self._inner.task(task_id))

    def stop_task(self, task_id: str, *, grace: float = 0.0, timeout: float = 120.0) -> TaskOutcome:
        """Ends all sandboxes of a task, on whatever nodes, and waits until nothing is left of them.

        `grace`: seconds between SIGTERM and SIGKILL. It is safe to repeat, and then ends those that are left:
        failures are in the result and not raised, see `TaskOutcome.check`.
        """
        return self._portal.call(self._inner.stop_task(task_id, grace=grace, timeout=timeout))

    def pause_task(self, task_id: str, *, timeout: float = 120.0) -> TaskOutcome:
        """Pauses all sandboxes of a task, on whatever nodes. Failures are in the result and not raised."""
        return self._portal.call(self._inner.pause_task(task_id, timeout=timeout))

    def resume_task(self, task_id: str, *, timeout: float = 120.0) -> TaskOutcome:
        """Resumes all paused sandboxes of a task. Failures are in the result and not raised."""
        return self._portal.call(self._inner.resume_task(task_id, timeout=timeout))

    def wait_task(self, task_id: str, *, timeout: float = 3600.0) -> int:
        """Waits until no sandbox of a task is known to live.

        Those that are lost with their nodes are not waited for: returns how many there are.
        :class:`DeadlineExceeded` when some still live after `timeout` seconds.
        """
        return self._portal.call(self._inner.wait_task(task_id, timeout=timeout))

    def counts(
        self, *, project: str | None = None, task_id: str | None = None, node: str | None = None
    ) -> Counts:
        """How many sandboxes there are, by state, backend, node, project and task, as the server knows.

        `project`: only those of it and of all in it. What is counted is some second old; `gathering` says
        that a server has just started and does not know all nodes yet.
        """
        return self._portal.call(self._inner.counts(project=project, task_id=task_id, node=node))

    def nodes(self) -> tuple[NodeStatus, ...]:
        """The nodes: what they are, can do and do now."""
        return self._portal.call(self._inner.nodes())

    def node(self, name: str) -> NodeStatus:
        """One node."""
        return self._portal.call(self._inner.node(name))

    def cordon_node(self, name: str, *, reason: str = "") -> NodeStatus:
        """Keeps new sandboxes away from a node. Those it has stay."""
        return self._portal.call(self._inner.cordon_node(name, reason=reason))

    def uncordon_node(self, name: str) -> NodeStatus:
        """Lets a node take sandboxes again, after a cordon or a drain."""
        return self._portal.call(self._inner.uncordon_node(name))

    def drain_node(self, name: str, *, stop_after: float | None = None, reason: str = "") -> NodeStatus:
        """Keeps new sandboxes away from a node and lets those it has end; it does not wait for that.

        What is left after `stop_after` seconds is stopped; None: nothing is. The node is drained when
        `(client.node(name)).sandboxes` is 0.
        """
        return self._portal.call(self._inner.drain_node(name, stop_after=stop_after, reason=reason))

    def healthy(self) -> bool:
        """Whether the platform can be reached and a node answers."""
        return self._portal.call(self._inner.healthy())


async def _enter(context: Any) -> Any:
    return await context.__aenter__()


async def _leave(context: Any, error: BaseException | None) -> bool:
    if error is None:
        return bool(await context.__aexit__(None, None, None))
    return bool(await context.__aexit__(type(error), error, error.__traceback__))
