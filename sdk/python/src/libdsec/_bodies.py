"""Bodies of transfers: what is sent, in chunks, and whether it can be sent again."""

from __future__ import annotations

import asyncio
import io
import os
import queue
import tarfile
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from .errors import InvalidArgument

#: Bytes a chunk. Per-chunk costs vanish at this size.
CHUNK = 1 << 20
#: Chunks that a tar thread may be ahead of the network, or behind it.
_TAR_QUEUE = 4


class Readable(Protocol):
    """A file opened for reading bytes."""

    def read(self, size: int = ..., /) -> bytes:
        """Up to `size` bytes; empty at the end."""
        ...


#: What can be written to a file of a sandbox: bytes, text (as UTF-8), a file opened for reading bytes, or
#: an iterator of bytes.
Data = bytes | bytearray | memoryview | str | Readable | Iterable[bytes] | AsyncIterable[bytes]


async def slices(data: bytes | memoryview) -> AsyncIterator[bytes]:
    """Bytes in chunks, so that a time limit on each chunk is not one on the whole."""
    view = memoryview(data)
    for start in range(0, len(view), CHUNK):
        yield bytes(view[start : start + CHUNK])


class Body:
    """A body of one request."""

    def __init__(
        self, opener: bytes | Callable[[], AsyncIterator[bytes]], length: int | None, replayable: bool
    ) -> None:
        #: What `Transport.call` takes.
        self.content = opener
        #: Bytes, where known.
        self.length = length
        #: Whether it can be sent a second time.
        self.replayable = replayable

    @property
    def headers(self) -> dict[str, str]:
        """Its length, so that the platform can refuse what is too large before it came."""
        return {} if self.length is None else {"content-length": str(self.length)}

    @classmethod
    def of(cls, data: Data) -> Body:
        """From any of the forms that data comes in."""
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, (bytes, bytearray, memoryview)):
            view = memoryview(data).cast("B")
            if len(view) <= CHUNK:
                return cls(bytes(view), len(view), True)
            return cls(lambda: slices(view), len(view), True)
        if hasattr(data, "read"):
            return cls._of_file(data)
        if isinstance(data, AsyncIterable):
            return cls(lambda: _checked(data), None, False)
        if isinstance(data, Iterable):
            return cls(lambda: _in_thread(iter(data)), None, False)
        raise InvalidArgument(f"a {type(data).__name__} cannot be sent; give bytes, text, a file or chunks")

    @classmethod
    def of_path(cls, path: Path) -> Body:
        """A local file, or a directory's content as a tar."""
        if path.is_dir():
            return cls(TarOf(path).content, None, True)

        async def read() -> AsyncIterator[bytes]:
            file = await asyncio.to_thread(path.open, "rb")
            try:
                async for chunk in _read_file(file, length):
                    yield chunk
            finally:
                file.close()

        length = path.stat().st_size
        return cls(read, length, True)

    @classmethod
    def _of_file(cls, file: Any) -> Body:
        if isinstance(file, io.TextIOBase):
            raise InvalidArgument("the file is open as text; open it in mode 'rb'")
        try:
            start = file.tell()
            end = file.seek(0, os.SEEK_END)
            file.seek(start)
        except (AttributeError, OSError, ValueError):
            return cls(lambda: _read_file(file, None), None, False)

        async def read() -> AsyncIterator[bytes]:
            file.seek(start)
            async for chunk in _read_file(file, end - start):
                yield chunk

        return cls(read, max(0, end - start), True)


async def _read_file(file: Any, length: int | None) -> AsyncIterator[bytes]:
    """A file's chunks: `length` bytes where given, even when it grows meanwhile."""
    left = length
    while left is None or left > 0:
        chunk = await asyncio.to_thread(file.read, CHUNK if left is None else min(CHUNK, left))
        if not isinstance(chunk, bytes):
            raise InvalidArgument(f"the file gave {type(chunk).__name__} and not bytes")
        if not chunk:
            if left:
                raise InvalidArgument(f"the file ended {left} bytes before its size when it was opened")
            return
        if left is not None:
            left -= len(chunk)
        yield chunk


async def _checked(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        if chunk:
            yield bytes(chunk)


async def _in_thread(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Chunks of an iterator that may block."""
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        if chunk:
            yield bytes(chunk)


class _Pipe:
    """Bytes between a thread that works on a tar and the event loop, with a bound."""

    def __init__(self) -> None:
        self._chunks: queue.Queue[bytes] = queue.Queue(_TAR_QUEUE)
        self._pending = bytearray()
        self.broken = threading.Event()

    def write(self, data: bytes) -> int:
        """Called by a tar writer."""
        self._pending += data
        if len(self._pending) >= CHUNK:
            self._flush()
        return len(data)

    def _flush(self) -> None:
        if self._pending:
            chunk, self._pending = bytes(self._pending), bytearray()
            self.put(chunk)

    def finish(self) -> None:
        """Ends the bytes."""
        self._flush()
        self.put(b"")

    def put(self, chunk: bytes) -> None:
        """Blocks while the other side is behind; raises when it is gone."""
        while not self.broken.is_set():
            try:
                return self._chunks.put(chunk, timeout=0.2)
            except queue.Full:
                continue
        raise BrokenPipeError("the other side of the transfer is gone")

    def get(self) -> bytes:
        """The next chunk, empty at the end."""
        while not self.broken.is_set():
            try:
                return self._chunks.get(timeout=0.2)
            except queue.Empty:
                continue
        raise BrokenPipeError("the other side of the transfer is gone")

    def read(self, size: int) -> bytes:
        """Called by a tar reader: exactly `size` bytes unless they end."""
        while len(self._pending) < size:
            chunk = self.get()
            if not chunk:
                self._chunks.put(b"")
                break
            self._pending += chunk
        head = bytes(self._pending[:size])
        del self._pending[:size]
        return head


class TarOf:
    """A local directory's content as a tar, made while it is sent."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.files = 0
        self.bytes = 0

    def content(self) -> AsyncIterator[bytes]:
        """The tar; each call reads the directory anew."""
        self.files = self.bytes = 0
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[bytes]:
        pipe = _Pipe()
        work = asyncio.ensure_future(asyncio.to_thread(self._make, pipe))
        try:
            while True:
                getting = asyncio.ensure_future(asyncio.to_thread(pipe.get))
                await asyncio.wait({getting, work}, return_when=asyncio.FIRST_COMPLETED)
                if work.done() and work.exception() is not None:
                    pipe.broken.set()
                    await asyncio.gather(getting, return_exceptions=True)
                    work.result()
                chunk = await getting
                if not chunk:
                    break
                yield chunk
            await work
        finally:
            pipe.broken.set()
            await asyncio.gather(work, return_exceptions=True)

    def _make(self, pipe: _Pipe) -> None:
        def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
            # This machine's users mean nothing inside.
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            if not member.isdir():
                self.files += 1
                self.bytes += member.size if member.isreg() else 0
            return member

        with tarfile.open(mode="w|", fileobj=pipe, bufsize=CHUNK, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
            for entry in sorted(os.listdir(self._directory)):
                tar.add(self._directory / entry, arcname=entry, filter=plain)
        pipe.finish()


class Untar:
    """Unpacks a tar from chunks into a directory, refusing what would reach outside of it."""

    def __init__(self, directory: Path, *, skip_unsafe: bool) -> None:
        self._directory = directory
        self._skip_unsafe = skip_unsafe
        self._pipe = _Pipe()
        self._work: asyncio.Future[None] | None = None
        self.files = 0
        self.bytes = 0
        self.skipped: list[str] = []

    async def feed(self, chunk: bytes) -> None:
        """Takes the next bytes."""
        if self._work is None:
            self._work = asyncio.ensure_future(asyncio.to_thread(self._unpack))
        putting = asyncio.ensure_future(asyncio.to_thread(self._pipe.put, chunk))
        await asyncio.wait({putting, self._work}, return_when=asyncio.FIRST_COMPLETED)
        if self._work.done():
            self._pipe.broken.set()
            await asyncio.gather(putting, return_exceptions=True)
            self._work.result()
        else:
            await putting

    async def finish(self) -> None:
        """Waits until everything is unpacked."""
        await self.feed(b"")
        assert self._work is not None
        await self._work

    async def abandon(self) -> None:
        """Stops the thread."""
        self._pipe.broken.set()
        if self._work is not None:
            await asyncio.gather(self._work, return_exceptions=True)

    def _unpack(self) -> None:
        """Links are made last: while files are written the tree has none to be led astray by, whatever
        the order of the archive and whatever the standard library's own checks miss."""
        directories: list[tuple[Path, int]] = []
        links: dict[PurePosixPath, tarfile.TarInfo] = {}
        with tarfile.open(mode="r|", fileobj=self._pipe, bufsize=CHUNK) as tar:  # type: ignore[call-overload]
            for member in tar:
                try:
                    self._take(tar, member, directories, links)
                except tarfile.FilterError as error:
                    if not self._skip_unsafe:
                        raise InvalidArgument(
                            f"the downloaded directory has a member that is not safe to unpack here: {error}",
                            hint="skip_unsafe=True leaves such members out and names them in the result",
                        ) from error
                    self.skipped.append(member.name)
        for name, member in links.items():
            os.symlink(member.linkname, self._directory / name)
            self.files += 1
        # Last, so that a directory without write permission can be filled.
        for path, mode in reversed(directories):
            os.chmod(path, mode)
        # What follows the end of the archive is read too, or the sender would wait for ever.
        while self._pipe.read(CHUNK):
            pass

    def _take(
        self,
        tar: tarfile.TarFile,
        member: tarfile.TarInfo,
        directories: list[tuple[Path, int]],
        links: dict[PurePosixPath, tarfile.TarInfo],
    ) -> None:
        safe = tarfile.data_filter(member, str(self._directory))
        name = PurePosixPath(safe.name)
        if ".." in name.parts or any(parent in links for parent in (name, *name.parents)):
            raise tarfile.OutsideDestinationError(member, str(self._directory / name))
        if safe.issym():
            if os.path.lexists(self._directory / name):
                raise tarfile.OutsideDestinationError(member, str(self._directory / name))
            (self._directory / name).parent.mkdir(parents=True, exist_ok=True)
            links[name] = safe
            return
        tar.extract(safe, self._directory, filter="fully_trusted", set_attrs=not safe.isdir())
        if safe.isdir():
            directories.append((self._directory / name, member.mode & 0o755 | 0o700))
        else:
            self.files += 1
            self.bytes += safe.size if safe.isreg() else 0
