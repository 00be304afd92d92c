"""HTTP and WebSocket with time limits, retries and error mapping. Nothing here knows of sandboxes.

What is tried again, and when:

- A request that certainly never left (no connection was made) is tried again, whatever it is.
- A request that may have been acted on is tried again only where doing it twice is the same as doing
  it once (`Retry.SAFE`): reads, deletes, stops, creates that carry a key.
- A retry never goes past the time limit of its call, nor past `retry_for` seconds of failing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import random
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import anyio
import httpx
import websockets
from websockets.asyncio.client import ClientConnection, connect

from .errors import (
    ClientNotOpen,
    ConnectionFailed,
    DSecError,
    InvalidArgument,
    RequestTimeout,
    Unavailable,
    UnexpectedAnswer,
    error_of_body,
    error_of_status,
    is_error_body,
)

log = logging.getLogger("libdsec")

#: Seconds one attempt may take to connect: a platform is near, so more means it is not there.
CONNECT_LIMIT = 10.0
#: First and longest pause between attempts, seconds.
_PAUSE_FIRST = 0.05
_PAUSE_MOST = 2.0
#: Seconds an unused connection is kept.
_KEEPALIVE = 30.0
#: Largest WebSocket message taken: 64 times the API's largest frame, as ports pass on what servers send.
_WS_MESSAGE_MAX = 16 << 20
#: Messages buffered for a reader before the server is slowed down: 4 MiB of output.
_WS_QUEUE = 16
#: Seconds without a frame after which the peer of a WebSocket has to prove that it lives.
_WS_QUIET = 30.0
_WS_PONG = 15.0
#: Bytes of a failed answer that are read.
_ERROR_BODY_MAX = 1 << 20

#: Header that names the project to act in.
PROJECT = "x-dsec-project"
#: Header that names the nodes without which an answer is.
UNREACHABLE_NODES = "x-dsec-unreachable-nodes"

#: Query parameters; None is left out, a sequence is repeated.
Query = Mapping[str, "str | int | Sequence[str] | None"]
#: A body, or something that makes one for each attempt.
Content = bytes | Callable[[], AsyncIterator[bytes]]


class Retry(Enum):
    """When a failed request may be sent again."""

    #: Doing it twice is the same as doing it once.
    SAFE = "safe"
    #: Only when it certainly never left.
    UNSENT = "unsent"


class Backoff:
    """Pauses between attempts: doubling, with jitter so that a thousand clients do not come back at once."""

    def __init__(self, retry_for: float) -> None:
        self._retry_for = retry_for
        self._since: float | None = None
        self._pause = _PAUSE_FIRST

    def reset(self) -> None:
        """Something worked."""
        self._since = None
        self._pause = _PAUSE_FIRST

    def next(self, deadline: float | None = None) -> float | None:
        """Seconds to pause, or None when it is time to give up."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        pause = self._pause * random.uniform(0.5, 1.0)
        self._pause = min(self._pause * 2, _PAUSE_MOST)
        if now + pause > self._since + self._retry_for:
            return None
        if deadline is not None and now + pause >= deadline:
            return None
        return pause

    async def sleep_or_raise(self, error: DSecError) -> None:
        """Pauses before the next attempt, or raises `error` when there is none."""
        pause = self.next()
        if pause is None:
            raise error
        log.debug("trying again after %s", error)
        await asyncio.sleep(pause)


def segment(text: str) -> str:
    """A text as one segment of a path."""
    if text in ("", ".", ".."):
        raise InvalidArgument(f"{text!r} is not a name")
    return quote(text, safe="")


def _encode_query(query: Query) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    return urlencode(given, doseq=True, quote_via=quote, safe="/", errors="surrogateescape") if given else ""


async def _read_start(response: httpx.Response) -> bytes:
    """A failed answer's body, whatever it claims to be, up to a limit."""
    start = bytearray()
    async for chunk in response.aiter_raw():
        start += chunk
        if len(start) > _ERROR_BODY_MAX:
            break
    return bytes(start)


def _failure(
    response: httpx.Response, content: bytes, what: str, request_id: str, *, strict: bool
) -> DSecError | None:
    """What a failed answer means; strictly: None unless it is exactly the API's error body."""
    request_id = response.headers.get("x-request-id") or request_id
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    if is_error_body(body, strict=strict):
        return error_of_body(body, request_id=request_id, status=response.status_code)
    if strict:
        return None
    text = content[:1000].decode("utf-8", "replace")
    return error_of_status(response.status_code, what, request_id=request_id, text=text)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _trust(ca_file: str | None) -> ssl.SSLContext:
    """The system's roots, and a file of more. Loaded once: it takes tens of milliseconds."""
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(cafile=ca_file)
        except OSError as error:
            raise InvalidArgument(f"the certificates in {ca_file} cannot be used: {error}") from error
    return context


class Transport:
    """One pool of connections to one platform."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        timeout: float,
        retry_for: float,
        max_connections: int,
        user_agent: str,
        ca_file: str | None = None,
        project: str | None = None,
    ) -> None:
        self.base_url = base_url
        self._tls = _trust(ca_file) if base_url.startswith("https://") else None
        self.timeout = timeout
        self.retry_for = retry_for
        self._auth = {"authorization": f"Bearer {api_key}"}
        if project is not None:
            self._auth[PROJECT] = project
        self._headers = {**self._auth, "user-agent": user_agent, "accept-encoding": "identity"}
        self._max_connections = max_connections
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        # A proxy from the environment cannot reach this machine's loopback.
        self._use_proxies = not _is_loopback(urlsplit(base_url).hostname or "")

    @property
    def auth_headers(self) -> dict[str, str]:
        """The headers that show the key and name the project."""
        return dict(self._auth)

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._http is not None

    def open(self) -> None:
        """Makes the pool; connects to nothing yet."""
        if self._http is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._http = httpx.AsyncClient(
            headers=self._headers,
            limits=httpx.Limits(
                max_connections=self._max_connections,
                max_keepalive_connections=self._max_connections,
                keepalive_expiry=_KEEPALIVE,
            ),
            verify=True if self._tls is None else self._tls,
            trust_env=self._use_proxies,
            follow_redirects=False,
        )

    async def close(self) -> None:
        """Closes every pooled connection."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            raise ClientNotOpen("the client is not open", hint="`await client.open()`, or `async with`")
        if self._pid != os.getpid():
            raise ClientNotOpen("the client was opened in another process", hint="make one in each process")
        if self._loop is not asyncio.get_running_loop():
            raise ClientNotOpen("the client was opened in another event loop", hint="make one in each loop")
        return self._http

    def url(self, path: str, query: Query | None = None) -> str:
        """The whole address of an API path."""
        text = _encode_query(query) if query else ""
        return f"{self.base_url}{path}?{text}" if text else self.base_url + path

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Mapping[str, Any] | None = None,
        content: Content | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        progress: bool = False,
        retry: Retry = Retry.UNSENT,
        retry_for: float | None = None,
        pass_errors: bool = False,
        numbers: Iterator[int] | None = None,
    ) -> httpx.Response:
        """One request and its whole answer; failures are raised as :class:`DSecError`.

        `timeout` limits the whole call with its retries; with `progress` it limits each wait for bytes to
        go or come, for transfers whose size nobody can tell. With `pass_errors`, answers of a failure
        that do not have exactly the shape of the API's errors are returned. With `numbers` each attempt of a
        create says which it is.
        """
        limit = self.timeout if timeout is None else timeout
        if not limit > 0:
            raise InvalidArgument(f"timeout is {limit!r}; it must be a number of seconds above 0")
        deadline = None if progress else time.monotonic() + limit
        backoff = Backoff(self.retry_for if retry_for is None else retry_for)
        request_id = uuid.uuid4().hex
        sent = {**(headers or {}), "x-request-id": request_id}
        if body is not None:
            content = json.dumps(body).encode()
            sent["content-type"] = "application/json"
        url = self.url(path, query)
        attempts = 0
        while True:
            attempts += 1
            if numbers is not None:
                sent["idempotency-attempt"] = str(next(numbers))
            try:
                remaining = limit if deadline is None else max(0.001, deadline - time.monotonic())
                response = await self._once(
                    method, url, content, sent, remaining, limit, deadline is not None
                )
                if response.status_code >= 400:
                    error = _failure(
                        response, response.content, f"{method} {path}", request_id, strict=pass_errors
                    )
                    if error is not None:
                        raise error
            except DSecError as error:
                error.attempts = attempts
                if isinstance(error, RequestTimeout) and error.maybe_sent:
                    error.detail = {"timeout": limit, **error.detail}
                again = (
                    (not error.maybe_sent and isinstance(error, (ConnectionFailed, RequestTimeout)))
                    or (retry is Retry.SAFE and isinstance(error, (ConnectionFailed, Unavailable)))
                ) and not isinstance(error, UnexpectedAnswer)
                pause = backoff.next(deadline) if again else None
                if pause is None:
                    raise
                log.debug("trying %s %s again in %.2f s after %s", method, path, pause, error)
                await asyncio.sleep(pause)
            else:
                if away := response.headers.get(UNREACHABLE_NODES):
                    log.warning("%s %s: these nodes do not answer: %s", method, path, away)
                return response

    async def json(self, method: str, path: str, **options: Any) -> Any:
        """One request whose answer is JSON."""
        response = await self.call(method, path, **options)
        try:
            return json.loads(response.content)
        except ValueError:
            raise UnexpectedAnswer(
                f"{method} {path} was answered with something that is not JSON: {response.text[:100]!r}",
                hint="is the address that of a dsec platform?",
                request_id=response.request.headers.get("x-request-id"),
                status=response.status_code,
            ) from None

    async def _once(
        self,
        method: str,
        url: str,
        content: Content | None,
        headers: Mapping[str, str],
        remaining: float,
        limit: float,
        total: bool,
    ) -> httpx.Response:
        """One attempt with what is left (`remaining`) of the call's `limit`."""
        http = self._client()
        request = http.build_request(
            method,
            url,
            content=content() if callable(content) else content,
            headers=headers,
            timeout=httpx.Timeout(remaining, connect=min(remaining, CONNECT_LIMIT)),
        )
        with anyio.move_on_after(remaining if total else None) as scope:
            try:
                return await http.send(request)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise self._translated(error, request, limit) from error
        assert scope.cancelled_caught
        raise self._too_late(request, limit, maybe_sent=True)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        content: Content | None = None,
        headers: Mapping[str, str] | None = None,
        idle: float | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """An answer whose body is read as it comes. One attempt: the caller knows how to go on.

        `idle` limits each wait for bytes. Failures inside the block are translated too.
        """
        limit = self.timeout if idle is None else idle
        http = self._client()
        request_id = uuid.uuid4().hex
        request = http.build_request(
            method,
            self.url(path, query),
            content=content() if callable(content) else content,
            headers={**(headers or {}), "x-request-id": request_id},
            timeout=httpx.Timeout(limit, connect=min(limit, CONNECT_LIMIT)),
        )
        try:
            response = await http.send(request, stream=True)
            try:
                if response.status_code >= 400:
                    start = await _read_start(response)
                    error = _failure(response, start, f"{method} {path}", request_id, strict=False)
                    assert error is not None
                    raise error
                yield response
            finally:
                await response.aclose()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._translated(error, request, limit) from error

    def _too_late(self, request: httpx.Request, limit: float, *, maybe_sent: bool) -> RequestTimeout:
        return RequestTimeout(
            f"{request.method} {request.url.path} was not answered within {limit:.3g} s",
            request_id=request.headers.get("x-request-id"),
            maybe_sent=maybe_sent,
        )

    def _translated(self, error: Exception, request: httpx.Request, limit: float) -> DSecError:
        request_id = request.headers.get("x-request-id")
        if isinstance(error, (httpx.InvalidURL, httpx.LocalProtocolError)):
            return InvalidArgument(f"{request.method} {request.url}: {error}", request_id=request_id)
        if isinstance(error, httpx.PoolTimeout):
            return RequestTimeout(
                f"all {self._max_connections} connections of this client were busy for {limit:.3g} s",
                hint="give DSecClient more with max_connections=",
                request_id=request_id,
            )
        if isinstance(error, httpx.ConnectTimeout):
            return self._too_late(request, min(limit, CONNECT_LIMIT), maybe_sent=False)
        if isinstance(error, httpx.TimeoutException):
            return self._too_late(request, limit, maybe_sent=True)
        reason = str(error) or type(error).__name__
        if isinstance(error, (httpx.ConnectError, httpx.ProxyError, httpx.UnsupportedProtocol)):
            return self._unreachable(reason, request_id)
        return ConnectionFailed(
            f"the connection broke during {request.method} {request.url.path}: {reason}",
            request_id=request_id,
            maybe_sent=True,
        )

    def _unreachable(self, reason: str, request_id: str | None) -> ConnectionFailed:
        return ConnectionFailed(
            f"{self.base_url} cannot be reached: {reason}",
            hint="is the platform up, and DSEC_URL its address?",
            request_id=request_id,
        )

    async def websocket(
        self,
        path: str,
        *,
        query: Query | None = None,
        timeout: float | None = None,
        close_timeout: float = 0.3,
    ) -> WebSocket:
        """Opens a WebSocket. One attempt.

        `close_timeout`: seconds that its close waits for the other side. A reader needs little: with a full
        queue the answer cannot be read anyway. A writer needs enough for its last bytes to go.
        """
        self._client()
        limit = min(self.timeout if timeout is None else timeout, CONNECT_LIMIT)
        request_id = uuid.uuid4().hex
        url = "ws" + self.url(path, query).removeprefix("http")
        try:
            connection = await connect(
                url,
                additional_headers={**self._auth, "x-request-id": request_id},
                user_agent_header=self._headers["user-agent"],
                ssl=self._tls,
                compression=None,
                max_size=_WS_MESSAGE_MAX,
                max_queue=_WS_QUEUE,
                # Kept out of the library's hands: with a full queue it would take a slow reader for a dead
                # peer. `WebSocket.receive` asks for a sign of life when it waits.
                ping_interval=None,
                open_timeout=limit,
                close_timeout=close_timeout,
                proxy=True if self._use_proxies else None,
            )
        except websockets.InvalidStatus as error:
            answer = error.response
            request_id = answer.headers.get("x-request-id") or request_id
            try:
                body = json.loads(answer.body or b"")
            except ValueError:
                body = None
            if is_error_body(body):
                failure = error_of_body(body, request_id=request_id, status=answer.status_code)
            else:
                text = bytes(answer.body or b"")[:1000].decode("utf-8", "replace")
                what = f"the WebSocket {path}"
                failure = error_of_status(answer.status_code, what, request_id=request_id, text=text)
            raise failure from error
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise RequestTimeout(
                f"the WebSocket {path} did not open within {limit:.3g} s", request_id=request_id
            ) from error
        except websockets.InvalidURI as error:
            raise InvalidArgument(f"{url}: {error}", request_id=request_id) from error
        except (OSError, websockets.WebSocketException, EOFError) as error:
            raise self._unreachable(str(error) or type(error).__name__, request_id) from error
        return WebSocket(connection, path, request_id)


class WebSocket:
    """A WebSocket whose waits end: a silent peer has to prove that it lives."""

    def __init__(self, connection: ClientConnection, path: str, request_id: str) -> None:
        self._connection = connection
        self._path = path
        self._request_id = request_id

    def _broken(self, reason: str) -> ConnectionFailed:
        return ConnectionFailed(
            f"the WebSocket {self._path} broke: {reason}", request_id=self._request_id, maybe_sent=True
        )

    async def receive(self, timeout: float | None = None) -> bytes | str | None:
        """The next message; None when the server closed in order.

        Cancelling it loses nothing. `timeout` (default: none, as long as the peer lives) raises
        :class:`RequestTimeout`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                wait = _WS_QUIET if deadline is None else min(_WS_QUIET, deadline - time.monotonic())
                with anyio.move_on_after(max(0.0, wait)):
                    return await self._connection.recv()
                if deadline is not None and time.monotonic() >= deadline:
                    raise RequestTimeout(
                        f"nothing came from {self._path} within {timeout:.3g} s", request_id=self._request_id
                    )
                pong = await self._connection.ping()
                with anyio.move_on_after(_WS_PONG):
                    await pong
                    continue
                raise self._broken(f"no sign of life for {_WS_QUIET + _WS_PONG:.0f} s")
        except websockets.ConnectionClosedOK:
            return None
        except websockets.ConnectionClosed as error:
            raise self._broken(str(error)) from error

    async def send(self, message: bytes, timeout: float) -> None:
        """Sends one message; returns when it fits the send buffer."""
        try:
            with anyio.move_on_after(timeout):
                await self._connection.send(message)
                return
        except websockets.ConnectionClosed as error:
            raise self._broken(str(error)) from error
        raise RequestTimeout(
            f"{self._path} took nothing within {timeout:.3g} s", request_id=self._request_id, maybe_sent=True
        )

    async def close(self) -> None:
        """Closes it, waiting `close_timeout` at most for the peer."""
        await self._connection.close()
