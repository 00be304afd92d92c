"""Commands in a sandbox: run one and get its output, or hold it while it runs."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal

from ._args import INLINE_LIMIT, DSecExecArgs
from ._bodies import CHUNK, slices
from ._records import ExecInfo, ExecResult, Gap, _bytes_of
from ._transport import Backoff, Retry, Transport, WebSocket, segment
from .errors import (
    Conflict,
    ConnectionFailed,
    DSecError,
    RequestTimeout,
    Unavailable,
    UnexpectedAnswer,
    error_of_body,
)

log = logging.getLogger("libdsec")

StreamName = Literal["stdout", "stderr"]

#: Header by which an answer may come before the command has ended.
TAKES_EARLY = "x-dsec-takes-early"
#: Seconds up to which a command is started and awaited in one request. A longer one is started first and
#: then polled by its id, so that a lost connection or a restarted edge does not lose it.
ONE_TRIP_MAX = 30.0
#: Seconds that the platform gets to end a command after its time limit, before this side gives up on it.
GRACE = 10.0
#: Seconds one poll waits for a command's end. Short enough for proxies that cut silent connections.
POLL_WAIT = 25.0
#: Largest standard input sent inside the request; a larger one is streamed. Below usual body limits.
STDIN_INLINE_MAX = 256 << 10
#: Seconds of silence after which a follower of a stream asks again from where it is.
FOLLOW_QUIET = 60.0

# Frames of `/attach`.
_STDOUT, _STDERR, _EVENT = 0x01, 0x02, 0x03


class Commands:
    """The command calls of one sandbox."""

    def __init__(self, transport: Transport, sandbox_path: str) -> None:
        self.transport = transport
        self.path = f"{sandbox_path}/execs"
        # Lines of this client that each session has in hand: a line that may queue is not awaited in one
        # request, as nobody can say how long it will take.
        self._lines: Counter[str] = Counter()

    def exec_path(self, exec_id: str) -> str:
        """Path of one command."""
        return f"{self.path}/{segment(exec_id)}"

    async def start(self, args: DSecExecArgs, *, stream_stdin: bool = False) -> ExecInfo:
        """Starts a command and returns when it runs. Never sent twice."""
        body = args.body(wait=False, stream_stdin=stream_stdin)
        return ExecInfo.of(await self.transport.json("POST", self.path, body=body))

    async def run(self, args: DSecExecArgs) -> ExecResult:
        """Runs a command to its end."""
        session = args.session
        if session is None:
            return await self._run(args, queues=False)
        self._lines[session] += 1
        try:
            return await self._run(args, queues=self._lines[session] > 1)
        finally:
            self._lines[session] -= 1
            if not self._lines[session]:
                del self._lines[session]

    async def _run(self, args: DSecExecArgs, *, queues: bool) -> ExecResult:
        stdin = args.stdin.encode() if isinstance(args.stdin, str) else args.stdin
        if stdin is not None and len(stdin) > STDIN_INLINE_MAX:
            info = await self.start(args, stream_stdin=True)
            return await self._feed_and_wait(info.id, stdin, args.timeout)
        if args.timeout is not None and args.timeout <= ONE_TRIP_MAX and not queues:
            body = args.body(wait=True)
            limit = args.timeout + GRACE
            data = await self.transport.json(
                "POST", self.path, body=body, headers={TAKES_EARLY: "1"}, timeout=limit
            )
            if data["state"] != "exited":
                # Its node is about to run another release: the command goes on there.
                return await self.wait(data["id"], limit)
            return await self.result(data)
        info = await self.start(args)
        return await self.wait(info.id, None if args.timeout is None else args.timeout + GRACE)

    async def _feed_and_wait(self, exec_id: str, stdin: bytes, timeout: float | None) -> ExecResult:
        """Streams a large standard input while waiting for the end, whichever comes first."""
        limit = None if timeout is None else timeout + GRACE
        waiting = asyncio.ensure_future(self.wait(exec_id, limit))
        feeding = asyncio.ensure_future(
            self.transport.call(
                "PUT",
                f"{self.exec_path(exec_id)}/stdin",
                query={"close": "true"},
                content=lambda: slices(stdin),
                # It takes as long as the command takes to read it; `waiting` bounds both.
                timeout=86_400.0 if limit is None else limit,
                progress=True,
            )
        )
        try:
            await asyncio.wait({waiting, feeding}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and feeding.exception() is not None:
                # A command that ends without reading everything breaks its stdin: that is no failure, and
                # neither is one that closes it and goes on.
                if not isinstance(feeding.exception(), Conflict):
                    await asyncio.wait({waiting}, timeout=2.0)
                if not waiting.done() and not isinstance(feeding.exception(), Conflict):
                    with suppress(DSecError):
                        await self.signal(exec_id, "SIGKILL", tree=True, retry=Retry.SAFE)
                    feeding.result()
            return await waiting
        finally:
            for task in (waiting, feeding):
                task.cancel()
            await asyncio.gather(waiting, feeding, return_exceptions=True)

    async def record(self, exec_id: str, *, wait: float | None = None, inline: int = 0) -> Mapping[str, Any]:
        """A command's JSON, after waiting up to `wait` seconds for its end."""
        query = {"wait_ms": None if wait is None else int(wait * 1000), "inline_limit_bytes": inline or None}
        data: Mapping[str, Any] = await self.transport.json(
            "GET",
            self.exec_path(exec_id),
            query=query,
            timeout=self.transport.timeout + (wait or 0.0),
            retry=Retry.SAFE,
        )
        return data

    async def exited(self, exec_id: str, limit: float | None, *, inline: int) -> Mapping[str, Any]:
        """A command's JSON once it has ended. `limit` seconds of running at most; waiting in a session's
        queue is not running."""
        deadline = None if limit is None else time.monotonic() + limit
        while True:
            wait = POLL_WAIT
            if deadline is not None:
                wait = max(0.0, min(wait, deadline - time.monotonic()))
            try:
                data = await self.record(exec_id, wait=wait, inline=inline)
            except DSecError as error:
                error.detail = {"exec_id": exec_id, **error.detail}
                raise
            if data["state"] == "exited":
                return data
            if limit is not None and deadline is not None:
                if data["state"] == "queued":
                    deadline = time.monotonic() + limit
                elif time.monotonic() >= deadline:
                    raise RequestTimeout(
                        f"command {exec_id} had not ended after {limit:.3g} s; it goes on",
                        detail={"exec_id": exec_id},
                        hint=f"take it up again with `attach({exec_id!r})`",
                        maybe_sent=True,
                    )

    async def wait(self, exec_id: str, limit: float | None) -> ExecResult:
        """A command's result once it has ended, with all its output."""
        return await self.result(await self.exited(exec_id, limit, inline=INLINE_LIMIT))

    async def result(self, data: Mapping[str, Any]) -> ExecResult:
        """The result of an ended command's JSON; fetches the output that it does not carry."""
        info = ExecInfo.of(data)
        stdout = await self._whole(info.id, "stdout", _bytes_of(data, "stdout"), info.stdout_bytes)
        stderr = await self._whole(info.id, "stderr", _bytes_of(data, "stderr"), info.stderr_bytes)
        result = ExecResult.of(info, stdout, stderr)
        if len(stdout) < info.stdout_bytes and not info.stdout_truncated:
            raise UnexpectedAnswer(f"{len(stdout)} of {info.stdout_bytes} bytes of stdout of {info.id} came")
        if len(stderr) < info.stderr_bytes and not info.stderr_truncated:
            raise UnexpectedAnswer(f"{len(stderr)} of {info.stderr_bytes} bytes of stderr of {info.id} came")
        return result

    async def _whole(self, exec_id: str, stream: StreamName, head: bytes, total: int) -> bytes:
        if len(head) >= total:
            return head
        whole = bytearray(head)
        backoff = Backoff(self.transport.retry_for)
        while len(whole) < total:
            before = len(whole)
            query = {"offset": before, "length": total - before}
            try:
                async with self.transport.stream(
                    "GET", f"{self.exec_path(exec_id)}/{stream}", query=query
                ) as answer:
                    async for chunk in answer.aiter_raw(CHUNK):
                        whole += chunk
                break
            except (ConnectionFailed, Unavailable) as error:
                if len(whole) > before:
                    backoff.reset()
                await backoff.sleep_or_raise(error)
        return bytes(whole)

    async def signal(
        self, exec_id: str, name: str, *, tree: bool = False, retry: Retry = Retry.UNSENT
    ) -> ExecInfo:
        """Sends a signal."""
        path = f"{self.exec_path(exec_id)}/signal"
        body = {"signal": name, "tree": tree}
        return ExecInfo.of(await self.transport.json("POST", path, body=body, retry=retry))


class Process:
    """A command that runs, or ran. Made by `Sandbox.start`, `Sandbox.pty` and `Sandbox.attach`.

    It runs in the sandbox whatever becomes of this object; `async with` kills it at the end.
    """

    def __init__(
        self,
        commands: Commands,
        info: ExecInfo,
        *,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
        session_id: str | None = None,
    ) -> None:
        self._commands = commands
        self._info = info
        self._offsets: dict[StreamName, int] = {"stdout": stdout_offset, "stderr": stderr_offset}
        self._gaps: list[Gap] = []
        self._session_id = session_id
        # Writes go one after another, or their bytes would come in any order.
        self._writing = asyncio.Lock()

    @property
    def id(self) -> str:
        """Its id, for `Sandbox.attach`."""
        return self._info.id

    @property
    def info(self) -> ExecInfo:
        """Its record as last seen; `refresh` asks again."""
        return self._info

    @property
    def exit_code(self) -> int | None:
        """Its exit code as last seen."""
        return self._info.exit_code

    @property
    def session_id(self) -> str | None:
        """The terminal session whose shell it is: the name that finds it again."""
        return self._session_id

    @property
    def offsets(self) -> tuple[int, int]:
        """Where `stream` is in stdout and stderr: what to give `attach` to go on from here."""
        return self._offsets["stdout"], self._offsets["stderr"]

    @property
    def gaps(self) -> list[Gap]:
        """What `stream` could not give because it was not kept."""
        return list(self._gaps)

    def __repr__(self) -> str:
        return f"<Process {self.id} {self._info.state} {self._info.command!r}>"

    async def refresh(self) -> ExecInfo:
        """Asks for its record."""
        self._info = ExecInfo.of(await self._commands.record(self.id))
        return self._info

    async def wait(self, timeout: float | None = None, *, check: bool = False) -> ExecResult:
        """Waits for its end and returns the result with all output that was kept.

        With `timeout`, raises :class:`RequestTimeout` when it has not ended by then; it goes on. `check`
        raises :class:`CommandFailed` as `ExecResult.check` does.
        """
        data = await self._commands.exited(self.id, timeout, inline=INLINE_LIMIT)
        self._info = ExecInfo.of(data)
        result = await self._commands.result(data)
        return result.check() if check else result

    def stdout(self, offset: int = 0) -> AsyncIterator[bytes]:
        """Standard output from `offset` on, as it comes, until the command ends."""
        return self._follow("stdout", offset)

    def stderr(self, offset: int = 0) -> AsyncIterator[bytes]:
        """Standard error from `offset` on, as it comes, until the command ends."""
        return self._follow("stderr", offset)

    async def _follow(self, name: StreamName, offset: int) -> AsyncIterator[bytes]:
        transport = self._commands.transport
        path = f"{self._commands.exec_path(self.id)}/{name}"
        backoff = Backoff(transport.retry_for)
        while True:
            before = offset
            try:
                async with transport.stream(
                    "GET", path, query={"offset": offset, "follow": "true"}, idle=FOLLOW_QUIET
                ) as answer:
                    async for chunk in answer.aiter_raw():
                        offset += len(chunk)
                        yield chunk
            except (ConnectionFailed, Unavailable) as error:
                if offset > before:
                    backoff.reset()
                await backoff.sleep_or_raise(error)
                continue
            except RequestTimeout as error:
                # Silence is usual. Asking again tells a quiet command from a dead connection.
                if not error.maybe_sent:
                    await backoff.sleep_or_raise(error)
                continue
            backoff.reset()
            # An orderly end of the body is either the command's end or an edge that goes down.
            info = await self.refresh()
            total = info.stdout_bytes if name == "stdout" else info.stderr_bytes
            if info.exited and (offset >= total or offset == before):
                return
            if offset == before:
                await asyncio.sleep(0.1)

    async def stream(self) -> AsyncIterator[tuple[StreamName, bytes]]:
        """Both streams as they come, until the command ends: `("stdout", b"...")`.

        Starts at `offsets` and moves them, so a second call goes on where the first one stopped. A lost
        connection is taken up again from there. A terminal's output is all on stdout.
        """
        backoff = Backoff(self._commands.transport.retry_for)
        while not (self._info.exited and self._is_read()):
            socket: WebSocket | None = None
            try:
                socket = await self._commands.transport.websocket(
                    f"{self._commands.exec_path(self.id)}/attach",
                    query={
                        "stdout_offset": self._offsets["stdout"],
                        "stderr_offset": self._offsets["stderr"],
                    },
                )
                while (message := await socket.receive()) is not None:
                    if not isinstance(message, bytes) or not message:
                        continue
                    kind, payload = message[0], message[1:]
                    if kind in (_STDOUT, _STDERR):
                        name: StreamName = "stdout" if kind == _STDOUT else "stderr"
                        self._offsets[name] += len(payload)
                        backoff.reset()
                        yield name, payload
                    elif kind == _EVENT and self._take_event(payload):
                        return
                raise ConnectionFailed(f"the stream of {self.id} was closed before the command ended")
            except (ConnectionFailed, Unavailable, RequestTimeout) as error:
                await backoff.sleep_or_raise(error)
            finally:
                if socket is not None:
                    await socket.close()

    def _is_read(self) -> bool:
        return (
            self._offsets["stdout"] >= self._info.stdout_bytes
            and self._offsets["stderr"] >= self._info.stderr_bytes
        )

    def _take_event(self, payload: bytes) -> bool:
        """Whether the event ends the stream."""
        event = json.loads(payload)
        match event.get("event"):
            case "exited":
                self._info = ExecInfo.of(event["exec"])
                return True
            case "skipped":
                gap = Gap(event["stream"], event["from"], event["to"])
                self._gaps.append(gap)
                name: StreamName = "stdout" if gap.stream == "stdout" else "stderr"
                self._offsets[name] = max(self._offsets[name], gap.end)
            case "error":
                raise error_of_body(event["error"])
        return False

    async def write(self, data: bytes | str, *, timeout: float | None = None) -> None:
        """Writes to its standard input; returns when it has been taken.

        `timeout` limits each wait for the command to read on. Never sent twice: a failure with
        `maybe_sent` may have written some of it.
        """
        if isinstance(data, str):
            data = data.encode()
        if data:
            await self._put_stdin(data, close=False, timeout=timeout)

    async def close_stdin(self) -> None:
        """Ends its standard input."""
        await self._put_stdin(b"", close=True, timeout=None)

    async def _put_stdin(self, data: bytes, *, close: bool, timeout: float | None) -> None:
        async with self._writing:
            await self._commands.transport.call(
                "PUT",
                f"{self._commands.exec_path(self.id)}/stdin",
                query={"close": "true" if close else "false"},
                content=data if len(data) <= CHUNK else lambda: slices(data),
                timeout=timeout,
                progress=True,
            )

    async def signal(self, name: str = "SIGINT", *, tree: bool = False) -> None:
        """Sends a signal to its process group; with `tree`, to everything that it started."""
        self._info = await self._commands.signal(self.id, name, tree=tree)

    async def kill(self) -> None:
        """Kills everything that it started."""
        self._info = await self._commands.signal(self.id, "SIGKILL", tree=True, retry=Retry.SAFE)

    async def resize(self, rows: int, cols: int) -> None:
        """Sets its terminal's size."""
        await self._commands.transport.call(
            "POST",
            f"{self._commands.exec_path(self.id)}/resize",
            body={"rows": rows, "cols": cols},
            retry=Retry.SAFE,
        )

    async def __aenter__(self) -> Process:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._info.exited:
            return
        try:
            await self.kill()
        except DSecError as failure:
            # It has ended, or the sandbox has; or the body's own exception says more than this one.
            log.debug("process %s was not killed: %s", self.id, failure)
