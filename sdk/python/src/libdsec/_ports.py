"""A byte stream to a port of a sandbox."""

from __future__ import annotations

from types import TracebackType

from ._transport import Transport, WebSocket

#: Bytes of one message sent.
_MESSAGE = 256 << 10


class PortStream:
    """A TCP connection to a port of the sandbox's loopback; made by `Sandbox.connect`.

    `timeout` limits the wait for bytes to come or go; default the client's.
    """

    def __init__(self, transport: Transport, socket: WebSocket) -> None:
        self._transport = transport
        self._socket = socket
        self._buffer = bytearray()
        self._ended = False

    async def read(self, size: int = -1, *, timeout: float | None = None) -> bytes:
        """Up to `size` bytes as soon as there are any, empty at the end; -1: everything until the end."""
        while not self._ended and (size < 0 or not self._buffer):
            if size == 0:
                break
            await self._fill(timeout)
        taken = len(self._buffer) if size < 0 else size
        data = bytes(self._buffer[:taken])
        del self._buffer[:taken]
        return data

    async def read_exactly(self, size: int, *, timeout: float | None = None) -> bytes:
        """Exactly `size` bytes; raises :class:`EOFError` when fewer come."""
        while len(self._buffer) < size:
            if self._ended:
                raise EOFError(f"{len(self._buffer)} of {size} bytes came")
            await self._fill(timeout)
        return await self.read(size)

    async def read_until(self, end: bytes = b"\n", *, timeout: float | None = None) -> bytes:
        """Bytes up to and with `end`, or what there is when the stream ends before."""
        start = 0
        while (found := self._buffer.find(end, start)) < 0 and not self._ended:
            start = max(0, len(self._buffer) - len(end) + 1)
            await self._fill(timeout)
        return await self.read(len(self._buffer) if found < 0 else found + len(end))

    async def _fill(self, timeout: float | None) -> None:
        message = await self._socket.receive(self._transport.timeout if timeout is None else timeout)
        if message is None:
            self._ended = True
        else:
            self._buffer += message if isinstance(message, bytes) else message.encode()

    async def write(self, data: bytes, *, timeout: float | None = None) -> None:
        """Sends all of `data`; returns when it is on its way."""
        limit = self._transport.timeout if timeout is None else timeout
        view = memoryview(data)
        for start in range(0, len(view), _MESSAGE):
            await self._socket.send(bytes(view[start : start + _MESSAGE]), limit)

    async def write_eof(self) -> None:
        """Ends what this side writes; what the server still says can be read."""
        await self._socket.send(b"", self._transport.timeout)

    async def close(self) -> None:
        """Closes both directions."""
        await self._socket.close()

    async def __aenter__(self) -> PortStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
