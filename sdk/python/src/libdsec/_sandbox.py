"""One sandbox and the sessions in it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx

from ._args import CpuClass, DSecExecArgs, set_only
from ._cleanup import shielded
from ._commands import Commands, Process
from ._files import Files
from ._ports import PortStream
from ._records import ExecInfo, ExecResult, PackResult, SandboxInfo, SessionInfo, Usage
from ._transport import Retry, segment
from .errors import Conflict, DeadlineExceeded, DSecError, InvalidArgument, NotFound, RequestTimeout

if TYPE_CHECKING:
    from ._client import DSecClient

log = logging.getLogger("libdsec")

#: Seconds one wait for a state asks for; the rest is asked again.
_STATE_WAIT = 25.0
#: Seconds that the last bytes to a port get to go before its stream is closed.
_PORT_CLOSE = 10.0


class _Default:
    """Where a time limit was not given, which is not the same as none."""

    def __repr__(self) -> str:
        return "DEFAULT"


#: The client's `command_timeout`.
DEFAULT = _Default()
Timeout = float | None | _Default

#: Headers of the API's own that a request to a port does not pass on as they are.
_FORWARDED = "x-dsec-forward-authorization"


def sandbox_path(sandbox_id: str) -> str:
    """Path of a sandbox."""
    return f"/v1/sandboxes/{segment(sandbox_id)}"


class Sandbox:
    """A sandbox; made by `DSecClient.run_container`, found by `DSecClient.get` and `list`.

    `async with` stops it at the end.
    """

    def __init__(self, client: DSecClient, info: SandboxInfo, first_result: ExecResult | None = None) -> None:
        self._client = client
        self._transport = client._transport
        self._info = info
        self._path = sandbox_path(info.id)
        self._commands = Commands(self._transport, self._path)
        self._files = Files(self._transport, self._path)
        self._first_result = first_result

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.state}>"

    @property
    def id(self) -> str:
        """Its id, for `DSecClient.get`."""
        return self._info.id

    @property
    def info(self) -> SandboxInfo:
        """Its record as last seen; `refresh` asks again."""
        return self._info

    @property
    def state(self) -> str:
        """Its state as last seen."""
        return self._info.state

    @property
    def usage(self) -> Usage | None:
        """What it used when it was last asked; `refresh` asks again."""
        return self._info.usage

    @property
    def first_result(self) -> ExecResult | None:
        """How the `exec` of the create's arguments went."""
        return self._first_result

    @property
    def files(self) -> Files:
        """Its files."""
        return self._files

    # Life

    async def refresh(self) -> SandboxInfo:
        """Asks for its record, with usage."""
        self._info = SandboxInfo.of(await self._transport.json("GET", self._path, retry=Retry.SAFE))
        return self._info

    async def wait(self, state: str | None = None, *, timeout: float = 60.0) -> SandboxInfo:
        """Waits until it is in a state; without one, until it has ended, however.

        Raises :class:`Conflict` when it ended in another state, and :class:`RequestTimeout` after `timeout`
        seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            wait = min(_STATE_WAIT, deadline - time.monotonic())
            if wait <= 0:
                raise RequestTimeout(
                    f"{self.id} was {self.state} and not {state or 'ended'} after {timeout:.3g} s"
                )
            query = {"wait_state": state or "stopped", "timeout_ms": max(1, int(wait * 1000))}
            try:
                data = await self._transport.json(
                    "GET", self._path, query=query, timeout=wait + self._transport.timeout, retry=Retry.SAFE
                )
            except DeadlineExceeded:
                continue
            self._info = SandboxInfo.of(data)
            if self.state == state or (state is None and self._info.ended):
                return self._info
            if self._info.ended:
                reason = self._info.reason
                why = f"{reason.code} {reason.message}".rstrip() if reason else "no reason"
                raise Conflict(f"{self.id} ended as {self.state} ({why}) and is not {state}")

    async def update(
        self, *, cpu_class: CpuClass | None = None, cpu_weight: int | None = None
    ) -> SandboxInfo:
        """Gives it other limits of CPU time while it runs, for what runs in it already too.

        `cpu_class` and `cpu_weight`: as in `DSecContainerRunArgs`; what is left out stays as it is.
        """
        body = set_only(cpu_class=cpu_class, cpu_weight=cpu_weight)
        data = await self._transport.json("PATCH", self._path, body=body, retry=Retry.SAFE)
        self._info = SandboxInfo.of(data)
        return self._info

    async def stop(self, *, grace: float = 0.0, timeout: float | None = None) -> SandboxInfo:
        """Ends it and returns when nothing of it is left; one that has ended answers its record.

        `grace`: seconds that its processes get between SIGTERM and SIGKILL.
        """
        if not grace >= 0:
            raise InvalidArgument(f"grace is {grace!r}; it must be a number of seconds, 0 or more")
        limit = (self._transport.timeout if timeout is None else timeout) + grace
        data = await self._transport.json(
            "POST",
            f"{self._path}/stop",
            body={"grace_ms": int(grace * 1000)},
            timeout=limit,
            retry=Retry.SAFE,
        )
        self._info = SandboxInfo.of(data)
        self._client._forget(self.id)
        return self._info

    async def pause(self, *, timeout: float = 120.0) -> SandboxInfo:
        """Has its processes stand still and its memory given back, and returns when that is done.

        Files, sockets, running commands and time limits go on where they were when it is resumed, which any
        call that needs it does. `SandboxInfo.pauses` says how much memory was given back.
        :class:`Conflict` when somebody used it meanwhile.
        """
        return await self._set_paused("pause", timeout)

    async def resume(self, *, timeout: float = 120.0) -> SandboxInfo:
        """Lets it go on, and returns when it runs."""
        return await self._set_paused("resume", timeout)

    async def _set_paused(self, what: str, timeout: float) -> SandboxInfo:
        data = await self._transport.json("POST", f"{self._path}/{what}", timeout=timeout, retry=Retry.SAFE)
        self._info = SandboxInfo.of(data)
        return self._info

    async def _stop_if_there(self, timeout: float) -> None:
        """Ends it as a clean-up does: one that is gone is no failure."""
        try:
            await self.stop(timeout=timeout)
        except NotFound:
            self._client._forget(self.id)

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._info.ended:
            return
        try:
            await shielded(self._stop_if_there(self._client._stop_timeout))
        except DSecError as failure:
            if error is None:
                raise
            # The body's own exception says more; the client's close tries again.
            log.warning("sandbox %s was not stopped: %s", self.id, failure)

    async def logs(self) -> list[dict[str, Any]]:
        """What happened to it: `{"time_ms": ..., "event": ..., ...}` each."""
        answer = await self._transport.call("GET", f"{self._path}/logs", retry=Retry.SAFE)
        return [json.loads(line) for line in answer.content.splitlines() if line.strip()]

    # Layers

    async def pack_diff(
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
        given = {"exclude": exclude, "scrub": scrub, "answers": answers, "deny": deny}
        for field, patterns in given.items():
            if isinstance(patterns, (str, bytes)):
                raise InvalidArgument(f"{field} is {patterns!r}; it must be a sequence, [{patterns!r}]")
        body = set_only(
            name=name,
            kind=kind,
            exclude=list(exclude) or None,
            scrub=None if scrub is True else [] if scrub is False else list(scrub),
            answers=list(answers) or None,
            deny=list(deny) or None,
            quiesce=quiesce,
        )
        data = await self._transport.json(
            "POST", f"{self._path}/pack", body=body, timeout=timeout, retry=Retry.UNSENT
        )
        return PackResult.of(data)

    # Commands

    def _timeout(self, timeout: Timeout) -> float | None:
        return self._client.command_timeout if isinstance(timeout, _Default) else timeout

    async def run_shell(
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
        result = await self._commands.run(
            DSecExecArgs(
                shell=line,
                env=env,
                cwd=cwd,
                user=user,
                stdin=stdin,
                timeout=self._timeout(timeout),
                session=session.id if isinstance(session, Session) else session,
                output_limit=output_limit,
            )
        )
        return result.check() if check else result

    async def run(
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
        result = await self._commands.run(
            DSecExecArgs(
                argv=argv,
                env=env,
                cwd=cwd,
                user=user,
                stdin=stdin,
                timeout=self._timeout(timeout),
                output_limit=output_limit,
            )
        )
        return result.check() if check else result

    async def start(
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
        if command is not None:
            if shell is not None or argv is not None:
                raise InvalidArgument("give one command: a line or arguments, or shell=, or argv=")
            shell, argv = (command, None) if isinstance(command, str) else (None, command)
        args = DSecExecArgs(
            shell=shell,
            argv=argv,
            env=env,
            cwd=cwd,
            user=user,
            stdin=None if isinstance(stdin, bool) else stdin,
            timeout=timeout,
            session=session.id if isinstance(session, Session) else session,
            output_limit=output_limit,
        )
        return Process(self._commands, await self._commands.start(args, stream_stdin=stdin is True))

    async def pty(
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
        if argv is not None:
            if name is not None:
                raise InvalidArgument("name is for a shell on a terminal; it does not go with argv")
            args = DSecExecArgs(argv=argv, env=env, cwd=cwd, user=user, timeout=timeout, pty=(rows, cols))
            return Process(self._commands, await self._commands.start(args, stream_stdin=True))
        if timeout is not None:
            raise InvalidArgument("timeout is for a command on a terminal; a shell lives until it is closed")
        info = await self._session(name, None, user, cwd, env, {"rows": rows, "cols": cols})
        if info.pty_exec_id is None:
            raise Conflict(f"session {info.id} of {self.id} is there and has no terminal")
        record = ExecInfo.of(await self._commands.record(info.pty_exec_id))
        return Process(self._commands, record, session_id=info.id)

    async def attach(self, exec_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0) -> Process:
        """A command that was started before, by whomever; `Process.stream` starts at the offsets."""
        record = ExecInfo.of(await self._commands.record(exec_id))
        return Process(self._commands, record, stdout_offset=stdout_offset, stderr_offset=stderr_offset)

    async def execs(self) -> list[ExecInfo]:
        """Its commands, newest first: those that run and the last ones that ended."""
        data = await self._transport.json("GET", self._commands.path, retry=Retry.SAFE)
        return [ExecInfo.of(record) for record in data["execs"]]

    # Sessions

    async def session(
        self,
        name: str | None = None,
        *,
        shell: str | None = None,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Session:
        """A shell whose cwd, variables and jobs stay between lines: a new one, or the one of that name."""
        return Session(self, await self._session(name, shell, user, cwd, env, None))

    async def _session(
        self,
        name: str | None,
        shell: str | None,
        user: str | None,
        cwd: str | None,
        env: Mapping[str, str] | None,
        pty: dict[str, int] | None,
    ) -> SessionInfo:
        body = set_only(
            # Drawn here, so that asking twice is asking once.
            id=name if name is not None else f"s-{uuid.uuid4().hex[:16]}",
            shell=shell,
            user=user,
            cwd=cwd,
            env=dict(env) if env else None,
            pty=pty,
        )
        data = await self._transport.json("POST", f"{self._path}/sessions", body=body, retry=Retry.SAFE)
        return SessionInfo.of(data)

    async def sessions(self) -> list[Session]:
        """Its open sessions."""
        data = await self._transport.json("GET", f"{self._path}/sessions", retry=Retry.SAFE)
        return [Session(self, SessionInfo.of(record)) for record in data["sessions"]]

    # Ports

    async def request(
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
        if content is not None and json is not None:
            raise InvalidArgument("give content or json, not both")
        given = {name.lower(): value for name, value in (headers or {}).items()}
        if "authorization" in given:
            given[_FORWARDED] = given.pop("authorization")
        return await self._transport.call(
            method.upper(),
            self._port_path(port, path),
            body=json,
            content=content.encode() if isinstance(content, str) else content,
            headers=given,
            timeout=timeout,
            pass_errors=True,
        )

    def port_url(self, port: int, path: str = "/") -> str:
        """The address of a port's HTTP server, for other clients; they need `DSecClient.auth_headers`."""
        return self._transport.url(self._port_path(port, path))

    def _port_path(self, port: int, path: str) -> str:
        return f"{self._path}/ports/{_port(port)}/http/{path.removeprefix('/')}"

    async def connect(self, port: int, *, timeout: float | None = None) -> PortStream:
        """A TCP connection to a port of the sandbox's loopback."""
        path = f"{self._path}/ports/{_port(port)}/tcp"
        socket = await self._transport.websocket(path, timeout=timeout, close_timeout=_PORT_CLOSE)
        return PortStream(self._transport, socket)

    async def wait_for_port(self, port: int, *, timeout: float = 30.0) -> None:
        """Waits until something listens on a port; raises :class:`RequestTimeout` when nothing does."""
        deadline = time.monotonic() + timeout
        # Asked inside, as a refused connection looks like many other failures from here. `/proc/net` is
        # there in every image; the port is its second column's end, in hex, state 0A.
        pattern = f":{_port(port):04X} [0-9A-F]*:0000 0A"
        line = f"cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep -q '{pattern}'"
        while True:
            left = deadline - time.monotonic()
            result = await self.run_shell(line, timeout=max(1.0, min(10.0, left)), cwd="/")
            if result.ok:
                return
            if result.exit_code != 1:
                result.check()
            if left <= 0:
                raise RequestTimeout(f"nothing listened on port {port} of {self.id} within {timeout:.3g} s")
            await asyncio.sleep(0.05)


def _port(port: int) -> int:
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65_535:
        raise InvalidArgument(f"{port!r} is not a port; it must be between 1 and 65,535")
    return port


class Session:
    """A shell whose cwd, variables and jobs stay between lines; made by `Sandbox.session`.

    Its lines run one after another. `async with` closes it at the end.
    """

    def __init__(self, sandbox: Sandbox, info: SessionInfo) -> None:
        self._sandbox = sandbox
        self._info = info
        self._path = f"{sandbox._path}/sessions/{segment(info.id)}"

    def __repr__(self) -> str:
        return f"<Session {self.id} of {self._sandbox.id}>"

    @property
    def id(self) -> str:
        """Its name."""
        return self._info.id

    @property
    def info(self) -> SessionInfo:
        """Its record as last seen."""
        return self._info

    async def refresh(self) -> SessionInfo:
        """Asks for its record."""
        data = await self._sandbox._transport.json("GET", self._path, retry=Retry.SAFE)
        self._info = SessionInfo.of(data)
        return self._info

    async def run_shell(
        self,
        line: str,
        *,
        timeout: Timeout = DEFAULT,
        check: bool = False,
        output_limit: int | None = None,
    ) -> ExecResult:
        """Runs a line in its shell; see `Sandbox.run_shell`."""
        return await self._sandbox.run_shell(
            line, timeout=timeout, session=self.id, check=check, output_limit=output_limit
        )

    async def start(
        self, line: str, *, timeout: float | None = None, output_limit: int | None = None
    ) -> Process:
        """Starts a line in its shell, or queues it; see `Sandbox.start`."""
        return await self._sandbox.start(line, timeout=timeout, session=self.id, output_limit=output_limit)

    async def close(self) -> None:
        """Ends its shell and everything that it started."""
        try:
            await self._sandbox._transport.call("DELETE", self._path, retry=Retry.SAFE)
        except NotFound as error:
            if error.attempts == 1:
                raise

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await shielded(self.close())
        except (NotFound, Conflict):
            # Its shell or the sandbox has ended by itself.
            return
        except DSecError:
            if error is None:
                raise
