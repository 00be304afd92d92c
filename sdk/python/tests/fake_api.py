"""A fake of the API for faults that a real platform does not produce on demand.

Its one "sandbox" is this machine: commands are run here and paths are this machine's, so only harmless
commands and temporary directories go through it. `FakeApi.faults` says what goes wrong, and when.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import io
import json
import os
import pty
import shutil
import signal
import ssl
import struct
import sys
import tarfile
import termios
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import WSMsgType, web

import fake_layers
from fake_errors import ApiError
from fake_images import FakeImages, Handler

KEY = "good-key"


@dataclass
class Fault:
    """Something that goes wrong with the next `times` requests of a method whose path ends so."""

    method: str
    ends: str
    #: `drop_before`: the connection breaks before anything was done; `drop_after`: when all was done and
    #: nothing was answered; `hang`: no answer; `trickle`: one that never ends; `error`: an error body;
    #: `html`: an answer of something else.
    what: str
    times: int = 1
    code: str = "unavailable"
    status: int = 502


@dataclass
class Exec:
    id: str
    body: dict[str, Any]
    started_ms: int
    process: asyncio.subprocess.Process | None = None
    master: int | None = None
    state: str = "running"
    out: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    totals: Counter[str] = field(default_factory=Counter)
    exit_code: int | None = None
    signal: str | None = None
    timed_out: bool = False
    session_ended: bool = False
    ended_ms: int | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def limit(self) -> int:
        return int(self.body.get("output_limit_bytes") or 64 << 20)

    def note(self) -> None:
        event, self.changed = self.changed, asyncio.Event()
        event.set()

    def add(self, stream: str, data: bytes) -> None:
        self.totals[stream] += len(data)
        self.out[stream] += data[: max(0, self.limit - len(self.out[stream]))]
        self.note()

    def record(self, inline: int = 0) -> dict[str, Any]:
        data: dict[str, Any] = {
            "id": self.id,
            "state": self.state,
            "command": self.body.get("shell") or " ".join(self.body.get("argv", [])),
            "started_ms": self.started_ms,
            "stdout_bytes": self.totals["stdout"],
            "stderr_bytes": self.totals["stderr"],
            "cpu_us": 1000,
            "a_field_of_the_future": 1,
        }
        for name in ("exit_code", "signal", "ended_ms"):
            if getattr(self, name) is not None:
                data[name] = getattr(self, name)
        if self.timed_out:
            data["timed_out"] = True
        if self.session_ended:
            data["session_ended"] = True
        if "session_id" in self.body:
            data["session_id"] = self.body["session_id"]
        for name in ("stdout", "stderr"):
            if self.totals[name] > len(self.out[name]):
                data[f"{name}_truncated"] = True
            if inline:
                head = bytes(self.out[name][:inline])
                data[name] = head.decode("utf-8", "replace")
                if data[name].encode() != head:
                    data[f"{name}_base64"] = base64.b64encode(head).decode()
        return data


@dataclass
class Shell:
    id: str
    process: asyncio.subprocess.Process
    created_ms: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    pending: int = 0
    pty_exec_id: str | None = None

    def record(self) -> dict[str, Any]:
        data = {
            "id": self.id,
            "pid": self.process.pid,
            "user": "root",
            "pending": self.pending,
            "created_ms": self.created_ms,
        }
        if self.pty_exec_id:
            data["pty_exec_id"] = self.pty_exec_id
        return data


def now_ms() -> int:
    return int(time.time() * 1000)


class FakeApi:
    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, tuple[str, str]] = {}
        #: Which attempt each create with a key said it was.
        self.attempts: list[str | None] = []
        self.execs: dict[tuple[str, str], Exec] = {}
        self.shells: dict[tuple[str, str], Shell] = {}
        self.images = FakeImages()
        self.create_delay = 0.0
        self.stop_delay = 0.0
        #: Bytes after which each stream is cut, once each time; 0: never; negative: a followed stream's body
        #: ends in order there, as of an edge that goes down.
        self.cut_streams_after: list[int] = []
        self.url = ""
        self._count = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None

    def count(self, method: str, ends: str) -> int:
        return sum(1 for verb, path in self.requests if verb == method and path.endswith(ends))

    # Serving

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        app = web.Application(middlewares=[self._middleware], client_max_size=1 << 40)
        box = "/v1/sandboxes/{id}"
        ex = box + "/execs/{eid}"
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/healthz", self.health),
            ("POST", "/v1/sandboxes", self.create),
            ("GET", "/v1/sandboxes", self.list_sandboxes),
            ("GET", "/v1/whoami", self.whoami),
            ("GET", box, self.get),
            ("POST", box + "/stop", self.stop_sandbox),
            ("DELETE", box, self.stop_sandbox),
            ("GET", box + "/logs", self.logs),
            ("POST", box + "/execs", self.run),
            ("GET", box + "/execs", self.list_execs),
            ("GET", ex, self.get_exec),
            ("GET", ex + "/{stream:stdout|stderr}", self.output),
            ("GET", ex + "/attach", self.attach),
            ("PUT", ex + "/stdin", self.stdin),
            ("POST", ex + "/signal", self.signal),
            ("POST", ex + "/resize", self.resize),
            ("POST", box + "/sessions", self.make_session),
            ("GET", box + "/sessions", self.list_sessions),
            ("GET", box + "/sessions/{sid}", self.get_session),
            ("DELETE", box + "/sessions/{sid}", self.end_session),
            ("GET", box + "/files", self.read),
            ("PUT", box + "/files", self.write),
            ("DELETE", box + "/files", self.remove),
            ("GET", box + "/files/stat", self.stat),
            ("GET", box + "/files/list", self.list_files),
            ("POST", box + "/files/mkdir", self.mkdir),
            ("POST", box + "/files/move", self.move),
            ("GET", box + "/files/watch", self.watch),
            ("GET", box + "/archive", self.get_archive),
            ("PUT", box + "/archive", self.put_archive),
            ("*", box + "/ports/{port}/http/{path:.*}", self.port_http),
            ("GET", box + "/ports/{port}/tcp", self.port_tcp),
            *self.images.routes(),
            *fake_layers.ROUTES,
            ("GET", "/v1/nodes", self.nodes),
            ("GET", "/v1/counts", self.counts),
            ("POST", "/v1/tasks/{task}/wait", self.wait_task),
        ]
        for method, path, handler in routes:
            app.router.add_route(method, path, handler)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True, ssl_context=tls)
        await site.start()
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stops serving: what an edge's restart looks like. Commands go on."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def end(self) -> None:
        await self.stop()
        for run in self.execs.values():
            self._kill(run, signal.SIGKILL)
        for shell in self.shells.values():
            if shell.process.returncode is None:
                os.killpg(shell.process.pid, signal.SIGKILL)
                await shell.process.wait()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        if "idempotency-key" in request.headers:
            self.attempts.append(request.headers.get("idempotency-attempt"))
        try:
            for fault in self.faults:
                if fault.times and request.method == fault.method and request.path.endswith(fault.ends):
                    fault.times -= 1
                    return await self._fault(fault, request, handler)
            return await self._answer(request, handler)
        except ApiError as error:
            headers = {"x-request-id": request.headers.get("x-request-id", "made")}
            return web.json_response(error.body, status=error.status, headers=headers)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/healthz" and request.headers.get("authorization") != f"Bearer {KEY}":
            raise ApiError("unauthenticated", "no such key", hint="dsec key list")
        return await handler(request)

    async def _fault(self, fault: Fault, request: web.Request, handler: Handler) -> web.StreamResponse:
        if fault.what == "error":
            raise ApiError(fault.code, "a fault that the test asked for")
        if fault.what == "html":
            return web.Response(
                status=fault.status, text="<html>Bad Gateway</html>", content_type="text/html"
            )
        if fault.what == "hang":
            await asyncio.sleep(3600)
        if fault.what == "trickle":
            answer = web.StreamResponse()
            await answer.prepare(request)
            while True:
                await answer.write(b" ")
                await asyncio.sleep(0.05)
        if fault.what == "drop_after":
            await self._answer(request, handler)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Sandboxes

    def _sandbox(self, request: web.Request, running: bool = True) -> dict[str, Any]:
        record = self.sandboxes.get(request.match_info["id"])
        if record is None:
            raise ApiError("not_found", f"no sandbox {request.match_info['id']}")
        if running and record["state"] != "running":
            raise ApiError("conflict", f"the sandbox is {record['state']}")
        return record

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def create(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        body = json.loads(text)
        key = request.headers.get("idempotency-key")
        if key in self.keys:
            sandbox_id, first = self.keys[key]
            if first != text:
                raise ApiError("conflict", "the key was used with another body")
            return web.json_response(self.sandboxes[sandbox_id])
        if body["container_image"] == "missing":
            raise ApiError("not_found", "no image missing", {"image": "missing"}, "dsec image list")
        self._count += 1
        record = {
            "id": f"sb-n1-fake{self._count}",
            "state": "running",
            "backend": "container",
            "image": body["container_image"],
            "image_digest": "sha256:0",
            "node": "n1",
            "limits": {"memory_limit_mb": body.get("memory_limit_mb", 2048), "cpu_cores_limit": 2.0},
            "init_user": "root",
            "labels": body.get("labels", {}),
            "created_ms": now_ms(),
            "running_ms": now_ms(),
            "last_active_ms": now_ms(),
            "launch_phases": [{"name": "clone", "us": 900}],
        }
        if "task_id" in body:
            record["task_id"] = body["task_id"]
        self.sandboxes[str(record["id"])] = record
        if key:
            self.keys[key] = (str(record["id"]), text)
        await asyncio.sleep(self.create_delay)
        if "exec" in body:
            run = await self._launch(str(record["id"]), body["exec"])
            await self._until_end(run, 60)
            return web.json_response({**record, "first_exec": run.record(1 << 20)}, status=201)
        return web.json_response(record, status=201)

    async def whoami(self, request: web.Request) -> web.StreamResponse:
        project = request.headers.get("x-dsec-project", "root")
        who = {"name": "cluster", "key_id": "key-1", "project": project, "permissions": []}
        return web.json_response(who)

    async def list_sandboxes(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        found = list(reversed(self.sandboxes.values()))
        if "state" in query:
            found = [each for each in found if each["state"] in query.getall("state")]
        if "task_id" in query:
            found = [each for each in found if each.get("task_id") == query["task_id"]]
        for label in query.getall("label", []):
            name, _, value = label.partition("=")
            found = [each for each in found if each["labels"].get(name) == value]
        start, limit = int(query.get("cursor", "0")), int(query.get("limit", "100"))
        page: dict[str, Any] = {"sandboxes": found[start : start + limit]}
        if start + limit < len(found):
            page["next_cursor"] = str(start + limit)
        return web.json_response(page)

    async def get(self, request: web.Request) -> web.StreamResponse:
        record = self._sandbox(request, running=False)
        wanted = request.query.get("wait_state")
        deadline = time.monotonic() + int(request.query.get("timeout_ms", "60000")) / 1000
        while wanted and record["state"] not in (wanted, "stopped", "failed"):
            if time.monotonic() > deadline:
                raise ApiError("deadline_exceeded", f"still {record['state']}")
            await asyncio.sleep(0.01)
        usage = {"cpu_seconds": 0.5, "memory_bytes": 1 << 20, "pids": 2}
        return web.json_response({**record, "usage": usage})

    async def stop_sandbox(self, request: web.Request) -> web.StreamResponse:
        record = self._sandbox(request, running=False)
        await asyncio.sleep(self.stop_delay)
        if record["state"] == "running":
            record.update(state="stopped", reason={"code": "asked"}, ended_ms=now_ms())
            for (sandbox_id, _), run in self.execs.items():
                if sandbox_id == record["id"]:
                    self._kill(run, signal.SIGKILL)
        return web.json_response(record)

    async def logs(self, request: web.Request) -> web.StreamResponse:
        self._sandbox(request, running=False)
        return web.Response(text='{"time_ms": 1, "event": "created"}\n{"time_ms": 2, "event": "running"}\n')

    # Commands

    def _exec(self, request: web.Request) -> Exec:
        self._sandbox(request)
        run = self.execs.get((request.match_info["id"], request.match_info["eid"]))
        if run is None:
            raise ApiError("not_found", f"no exec {request.match_info['eid']}")
        return run

    def _kill(self, run: Exec, number: signal.Signals) -> None:
        if run.process is not None and run.process.returncode is None:
            try:
                os.killpg(run.process.pid, number)
            except ProcessLookupError:
                pass

    async def _launch(self, sandbox_id: str, body: dict[str, Any]) -> Exec:
        self._count += 1
        run = Exec(f"ex-{self._count}", body, now_ms())
        self.execs[sandbox_id, run.id] = run
        if "session_id" in body:
            shell = self.shells.get((sandbox_id, body["session_id"]))
            if shell is None:
                shell = await self._shell(sandbox_id, body["session_id"], {})
            run.state = "queued" if shell.lock.locked() else "running"
            self._spawn(self._line(shell, run))
            return run
        argv = body.get("argv") or ["/bin/sh", "-c", body["shell"]]
        if not shutil.which(argv[0]):
            del self.execs[sandbox_id, run.id]
            raise ApiError("invalid_argument", f"{argv[0]}: no such program")
        env = {**os.environ, **body.get("env", {})}
        given: bytes | None = None
        if "stdin" in body:
            given = body["stdin"].encode()
        elif "stdin_base64" in body:
            given = base64.b64decode(body["stdin_base64"])
        streamed = body.get("stdin_mode") == "stream"
        if "pty" in body:
            run.master, slave = pty.openpty()
            self._resize(run.master, body["pty"]["rows"], body["pty"]["cols"])
            run.process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                cwd=body.get("cwd"),
                env=env,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )
            os.close(slave)
        else:
            pipe = asyncio.subprocess.PIPE
            stdin = pipe if given is not None or streamed else asyncio.subprocess.DEVNULL
            run.process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=stdin,
                stdout=pipe,
                stderr=pipe,
                cwd=body.get("cwd"),
                env=env,
                start_new_session=True,
            )
        self._spawn(self._supervise(run, given))
        return run

    async def _supervise(self, run: Exec, given: bytes | None) -> None:
        assert run.process is not None
        process = run.process
        timer = None
        if run.body.get("timeout_ms"):

            def late() -> None:
                run.timed_out = True
                self._kill(run, signal.SIGKILL)

            timer = asyncio.get_running_loop().call_later(run.body["timeout_ms"] / 1000, late)
        readers: list[Any] = []
        if run.master is not None:
            readers.append(self._read_master(run))
        else:
            assert process.stdout is not None
            assert process.stderr is not None
            readers += [
                self._pump(run, "stdout", process.stdout),
                self._pump(run, "stderr", process.stderr),
            ]
        if given is not None:
            readers.append(self._feed(process, given))
        tasks = [asyncio.ensure_future(each) for each in readers]
        code = await process.wait()
        await asyncio.wait(tasks, timeout=0.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if timer is not None:
            timer.cancel()
        self._ended(run, code)

    async def _pump(self, run: Exec, name: str, reader: asyncio.StreamReader) -> None:
        while chunk := await reader.read(65536):
            run.add(name, chunk)

    async def _feed(self, process: asyncio.subprocess.Process, data: bytes) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(data)
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass
        process.stdin.close()

    async def _read_master(self, run: Exec) -> None:
        assert run.master is not None
        while True:
            try:
                chunk = await asyncio.to_thread(os.read, run.master, 65536)
            except OSError:
                return
            if not chunk:
                return
            run.add("stdout", chunk)

    def _ended(self, run: Exec, code: int) -> None:
        run.exit_code = code if code >= 0 else 128 - code
        run.signal = signal.Signals(-code).name if code < 0 else None
        run.state, run.ended_ms = "exited", now_ms()
        run.note()

    async def _until_end(self, run: Exec, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while run.state != "exited" and (left := deadline - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(run.changed.wait(), left)
            except asyncio.TimeoutError:
                return

    async def run(self, request: web.Request) -> web.StreamResponse:
        self._sandbox(request)
        body = await request.json()
        run = await self._launch(request.match_info["id"], body)
        if body.get("wait"):
            await self._until_end(run, 3600)
            return web.json_response(run.record(int(body.get("inline_limit_bytes", 1 << 20))))
        return web.json_response(run.record())

    async def list_execs(self, request: web.Request) -> web.StreamResponse:
        self._sandbox(request)
        mine = [run.record() for (box, _), run in self.execs.items() if box == request.match_info["id"]]
        return web.json_response({"execs": mine[::-1]})

    async def get_exec(self, request: web.Request) -> web.StreamResponse:
        run = self._exec(request)
        await self._until_end(run, int(request.query.get("wait_ms", "0")) / 1000)
        return web.json_response(run.record(int(request.query.get("inline_limit_bytes", "0"))))

    def _cut(self) -> int:
        return self.cut_streams_after.pop(0) if self.cut_streams_after else 0

    async def output(self, request: web.Request) -> web.StreamResponse:
        run, name = self._exec(request), request.match_info["stream"]
        offset = int(request.query.get("offset", "0"))
        end = offset + int(request.query["length"]) if "length" in request.query else 1 << 62
        follow = request.query.get("follow") == "true"
        answer = web.StreamResponse(headers={"x-dsec-stream-bytes": str(run.totals[name])})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        cut, sent = self._cut(), 0
        if cut < 0:
            end, cut = offset - cut, 0
        while True:
            changed, over = run.changed, run.state == "exited"
            while offset < min(end, len(run.out[name])):
                chunk = bytes(run.out[name][offset : min(end, offset + 65536)])
                if cut and sent + len(chunk) >= cut:
                    await answer.write(chunk[: cut - sent])
                    await asyncio.sleep(0.02)
                    assert request.transport is not None
                    request.transport.abort()
                    return answer
                await answer.write(chunk)
                offset += len(chunk)
                sent += len(chunk)
            if not follow or over or offset >= end:
                break
            await changed.wait()
        await answer.write_eof()
        return answer

    async def attach(self, request: web.Request) -> web.StreamResponse:
        run = self._exec(request)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        offsets = {name: int(request.query.get(f"{name}_offset", "0")) for name in ("stdout", "stderr")}
        cut, sent = self._cut(), 0
        while True:
            changed, over = run.changed, run.state == "exited"
            for kind, name in ((1, "stdout"), (2, "stderr")):
                while offsets[name] < len(run.out[name]):
                    chunk = bytes(run.out[name][offsets[name] :][: 256 << 10])
                    if cut and sent + len(chunk) >= cut:
                        await socket.send_bytes(bytes([kind]) + chunk[: cut - sent])
                        await asyncio.sleep(0.02)
                        assert request.transport is not None
                        request.transport.abort()
                        return socket
                    await socket.send_bytes(bytes([kind]) + chunk)
                    offsets[name] += len(chunk)
                    sent += len(chunk)
            if over:
                break
            await changed.wait()
        for name in ("stdout", "stderr"):
            if run.totals[name] > len(run.out[name]):
                gap = {"event": "skipped", "stream": name, "from": len(run.out[name]), "to": run.totals[name]}
                await socket.send_bytes(b"\x03" + json.dumps(gap).encode())
        event = {"event": "exited", "exec": run.record()}
        await socket.send_bytes(b"\x03" + json.dumps(event).encode())
        await socket.close()
        return socket

    async def stdin(self, request: web.Request) -> web.StreamResponse:
        run = self._exec(request)
        if run.process is None or (run.master is None and run.process.stdin is None):
            raise ApiError("conflict", "the stdin of this command is not streamed")
        try:
            async for chunk in request.content.iter_chunked(65536):
                if run.master is not None:
                    await asyncio.to_thread(os.write, run.master, chunk)
                else:
                    assert run.process.stdin is not None
                    run.process.stdin.write(chunk)
                    await run.process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise ApiError("conflict", "the command has closed its stdin") from None
        if request.query.get("close", "true") == "true" and run.process.stdin is not None:
            run.process.stdin.close()
        return web.Response(status=204)

    async def signal(self, request: web.Request) -> web.StreamResponse:
        run, body = self._exec(request), await request.json()
        name = body["signal"].upper()
        try:
            number = signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
        except KeyError:
            raise ApiError("invalid_argument", f"{name} is not a signal") from None
        self._kill(run, number)
        return web.json_response(run.record())

    def _resize(self, master: int, rows: int, cols: int) -> None:
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    async def resize(self, request: web.Request) -> web.StreamResponse:
        run, body = self._exec(request), await request.json()
        if run.master is None:
            raise ApiError("conflict", "no terminal")
        self._resize(run.master, body["rows"], body["cols"])
        return web.Response(status=204)

    # Sessions

    async def _shell(self, sandbox_id: str, name: str, body: dict[str, Any]) -> Shell:
        process = await asyncio.create_subprocess_exec(
            body.get("shell", "/bin/bash"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=body.get("cwd"),
            env={**os.environ, **body.get("env", {})},
            start_new_session=True,
            limit=1 << 26,
        )
        shell = Shell(name, process, now_ms())
        self.shells[sandbox_id, name] = shell
        return shell

    async def _line(self, shell: Shell, run: Exec) -> None:
        shell.pending += 1
        async with shell.lock:
            run.state, run.started_ms = "running", now_ms()
            run.note()
            end = f"--end-{run.id}-"
            assert shell.process.stdin is not None
            assert shell.process.stdout is not None
            shell.process.stdin.write(f"{run.body['shell']}\nprintf '%s%s\\n' '{end}' $?\n".encode())
            code = 0
            while True:
                line = await shell.process.stdout.readline()
                at = line.find(end.encode())
                if at >= 0:
                    run.add("stdout", line[:at])
                    code = int(line[at + len(end) :])
                    break
                if not line:
                    code = await shell.process.wait()
                    run.session_ended = True
                    for key in [key for key, each in self.shells.items() if each is shell]:
                        del self.shells[key]
                    break
                run.add("stdout", line)
            self._ended(run, code)
        shell.pending -= 1

    async def make_session(self, request: web.Request) -> web.StreamResponse:
        self._sandbox(request)
        body, box = await request.json(), request.match_info["id"]
        found = self.shells.get((box, body["id"]))
        if found is not None:
            return web.json_response(found.record())
        if "pty" in body:
            argv = ["/bin/bash", "--norc", "-i"]
            env = {**body.get("env", {}), "PS1": "$ "}
            run = await self._launch(box, {**body, "argv": argv, "env": env})
            assert run.process is not None
            shell = Shell(body["id"], run.process, now_ms(), pty_exec_id=run.id)
            self.shells[box, body["id"]] = shell
        else:
            shell = await self._shell(box, body["id"], body)
        return web.json_response(shell.record(), status=201)

    def _session(self, request: web.Request) -> Shell:
        self._sandbox(request)
        shell = self.shells.get((request.match_info["id"], request.match_info["sid"]))
        if shell is None:
            raise ApiError("not_found", f"no session {request.match_info['sid']}")
        return shell

    async def list_sessions(self, request: web.Request) -> web.StreamResponse:
        self._sandbox(request)
        mine = [shell.record() for (box, _), shell in self.shells.items() if box == request.match_info["id"]]
        return web.json_response({"sessions": mine})

    async def get_session(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._session(request).record())

    async def end_session(self, request: web.Request) -> web.StreamResponse:
        shell = self._session(request)
        del self.shells[request.match_info["id"], shell.id]
        if shell.process.returncode is None:
            os.killpg(shell.process.pid, signal.SIGKILL)
            await shell.process.wait()
        return web.Response(status=204)

    # Files

    def _path(self, request: web.Request) -> Path:
        self._sandbox(request)
        return Path(request.query["path"])

    def _info(self, path: Path, shown: str) -> dict[str, Any]:
        try:
            facts = path.lstat()
        except FileNotFoundError:
            raise ApiError("not_found", f"{path}: no such file") from None
        kind = "directory" if path.is_dir() else "file"
        info = {
            "path": shown,
            "kind": "symlink" if path.is_symlink() else kind,
            "size": facts.st_size,
            "mode": facts.st_mode & 0o7777,
            "uid": facts.st_uid,
            "gid": facts.st_gid,
            "modified_ms": int(facts.st_mtime * 1000),
        }
        if path.is_symlink():
            info["target"] = os.readlink(path)
        return info

    async def read(self, request: web.Request) -> web.StreamResponse:
        path = self._path(request)
        self._info(path, "")
        if path.is_dir():
            raise ApiError("invalid_argument", f"{path} is a directory")
        with path.open("rb") as file:
            file.seek(int(request.query.get("offset", "0")))
            data = file.read(int(request.query["length"])) if "length" in request.query else file.read()
        cut = self._cut()
        if cut:
            answer = web.StreamResponse(headers={"content-length": str(len(data))})
            await answer.prepare(request)
            await answer.write(data[:cut])
            await asyncio.sleep(0.02)
            assert request.transport is not None
            request.transport.abort()
            return answer
        return web.Response(body=data)

    async def write(self, request: web.Request) -> web.StreamResponse:
        path, query = self._path(request), request.query
        if query.get("parents") == "true":
            path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.is_dir():
            raise ApiError("not_found", f"{path.parent}: no such directory")
        if "offset" in query:
            with path.open("r+b") as file:
                file.seek(int(query["offset"]))
                file.write(await request.read())
            return web.json_response(self._info(path, str(path)))
        part = path.with_name(path.name + ".new")
        with part.open("wb") as file:
            async for chunk in request.content.iter_any():
                file.write(chunk)
        if "mode" in query:
            part.chmod(int(query["mode"], 8))
        part.rename(path)
        return web.json_response(self._info(path, str(path)))

    async def remove(self, request: web.Request) -> web.StreamResponse:
        path = self._path(request)
        if self._info(path, "")["kind"] != "directory":
            path.unlink()
        elif request.query.get("recursive") == "true":
            shutil.rmtree(path)
        else:
            try:
                path.rmdir()
            except OSError:
                raise ApiError("conflict", f"{path} is not empty") from None
        return web.Response(status=204)

    async def stat(self, request: web.Request) -> web.StreamResponse:
        path = self._path(request)
        return web.json_response(self._info(path, str(path)))

    async def list_files(self, request: web.Request) -> web.StreamResponse:
        root, depth = self._path(request), int(request.query.get("depth", "1"))
        self._info(root, "")
        if not root.is_dir():
            raise ApiError("invalid_argument", f"{root} is not a directory")
        names = sorted(each for each in root.rglob("*") if len(each.relative_to(root).parts) <= depth)
        limit = int(request.query.get("limit", "10000"))
        entries = [self._info(each, str(each.relative_to(root))) for each in names[:limit]]
        return web.json_response({"entries": entries, "truncated": len(names) > limit})

    async def mkdir(self, request: web.Request) -> web.StreamResponse:
        self._sandbox(request)
        body = await request.json()
        path = Path(body["path"])
        if path.exists() and not body["parents"]:
            raise ApiError("already_exists", f"{path} is there")
        path.mkdir(parents=body["parents"], exist_ok=True, mode=body.get("mode", 0o755))
        return web.json_response(self._info(path, str(path)))

    async def move(self, request: web.Request) -> web.StreamResponse:
        self._sandbox(request)
        body = await request.json()
        source, target = Path(body["from"]), Path(body["to"])
        self._info(source, "")
        if target.exists() and not body["overwrite"]:
            raise ApiError("already_exists", f"{target} is there")
        source.replace(target)
        return web.json_response(self._info(target, str(target)))

    async def watch(self, request: web.Request) -> web.StreamResponse:
        root = self._path(request)
        self._info(root, "")
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        seen = {each: each.stat().st_mtime_ns for each in root.rglob("*")}
        await socket.send_json({"kind": "ready", "path": ""})
        cut = self._cut()
        self._spawn(self._drain(socket))
        while not socket.closed:
            await asyncio.sleep(0.02)
            found = {each: each.stat().st_mtime_ns for each in root.rglob("*")}
            for each in sorted(found.keys() | seen.keys()):
                name = str(each.relative_to(root))
                if each not in seen:
                    await socket.send_json({"kind": "created", "path": name})
                elif each not in found:
                    await socket.send_json({"kind": "removed", "path": name})
                elif found[each] != seen[each]:
                    await socket.send_json({"kind": "modified", "path": name})
                else:
                    continue
                if cut:
                    assert request.transport is not None
                    await asyncio.sleep(0.02)
                    request.transport.abort()
                    return socket
            seen = found
        return socket

    async def _drain(self, socket: web.WebSocketResponse) -> None:
        async for _ in socket:
            pass

    async def get_archive(self, request: web.Request) -> web.StreamResponse:
        root = self._path(request)
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name in sorted(os.listdir(root)):
                tar.add(root / name, arcname=name)
        return web.Response(body=out.getvalue(), content_type="application/x-tar")

    async def put_archive(self, request: web.Request) -> web.StreamResponse:
        root = self._path(request)
        root.mkdir(parents=True, exist_ok=True)
        data = await request.read()
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            tar.extractall(root, filter="fully_trusted")
        return web.json_response({"files": 1, "bytes": len(data)})

    # Ports

    async def port_http(self, request: web.Request) -> web.StreamResponse:
        self._sandbox(request)
        target = f"http://127.0.0.1:{request.match_info['port']}/{request.match_info['path']}"
        skipped = {"authorization", "host", "content-length", "x-dsec-forward-authorization"}
        headers = {name: value for name, value in request.headers.items() if name.lower() not in skipped}
        if "x-dsec-forward-authorization" in request.headers:
            headers["authorization"] = request.headers["x-dsec-forward-authorization"]
        try:
            async with (
                aiohttp.ClientSession() as http,
                http.request(
                    request.method, target, params=request.query, headers=headers, data=await request.read()
                ) as answer,
            ):
                return web.Response(status=answer.status, body=await answer.read())
        except aiohttp.ClientConnectorError:
            raise ApiError("unavailable", f"nothing listens on port {request.match_info['port']}") from None

    async def port_tcp(self, request: web.Request) -> web.StreamResponse:
        self._sandbox(request)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(request.match_info["port"]))
        except OSError:
            raise ApiError("unavailable", f"nothing listens on port {request.match_info['port']}") from None
        socket = web.WebSocketResponse()
        await socket.prepare(request)

        async def inward() -> None:
            async for message in socket:
                if message.type is WSMsgType.BINARY and not message.data:
                    writer.write_eof()
                elif message.type is WSMsgType.BINARY:
                    writer.write(message.data)
                    await writer.drain()
            writer.close()

        self._spawn(inward())
        while chunk := await reader.read(65536):
            await socket.send_bytes(chunk)
        writer.close()
        await socket.close()
        return socket

    # Images, nodes

    async def counts(self, request: web.Request) -> web.StreamResponse:
        states = {"running": len(self.sandboxes), "lost": 2, "from_a_later_version": 1}
        node = {"health": "lost", "known": "counted", "heard_ms": 5, "sandboxes": {"lost": 2}}
        counted = {"gathering": True, "uncounted": ["n3"], "sandboxes": states, "nodes": {"n2": node}}
        return web.json_response({**counted, "tasks": {request.query.get("task_id", "job"): states}})

    async def wait_task(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"lost": 2} if request.match_info["task"] == "job" else {})

    async def nodes(self, request: web.Request) -> web.StreamResponse:
        node = {
            "node": "n1",
            "version": "0.1.0",
            "capacity": {"memory_mib": 1000, "cpu_millis": 2000, "disk_mib": 5000},
            "usage": {"running": len(self.sandboxes)},
            "backends": ["container"],
            "features": [{"name": "erofs", "purpose": "images", "state": "works", "found": "mounted"}],
        }
        return web.json_response({"nodes": [node]})


async def _serve() -> None:
    fake = FakeApi()
    await fake.start(int(os.environ.get("PORT", "0")))
    sys.stdout.write(f"DSEC_URL={fake.url} DSEC_API_KEY={KEY}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
