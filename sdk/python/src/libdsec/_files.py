"""Files of a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from types import TracebackType

from ._bodies import CHUNK, Body, Data, TarOf, Untar
from ._records import FileEvent, FileInfo, FileList, Transfer
from ._transport import Backoff, Retry, Transport, WebSocket
from .errors import (
    AlreadyExists,
    Conflict,
    ConnectionFailed,
    DSecError,
    InvalidArgument,
    NotFound,
    RequestTimeout,
    TooLarge,
    Unavailable,
    Unsupported,
)

#: A path inside a sandbox; a relative one starts at the sandbox's working directory.
RemotePath = str | PurePath
LocalPath = str | os.PathLike[str]

#: Entries of one listing at most: the API's limit.
_LIST_MAX = 1_000_000


def _text(path: RemotePath) -> str:
    text = path if isinstance(path, str) else path.as_posix()
    if not text or "\0" in text:
        raise InvalidArgument(f"{text!r} is not a path")
    return text


def _octal(mode: int | None) -> str | None:
    return None if mode is None else format(mode, "o")


class Files:
    """The files of one sandbox, at `Sandbox.files`.

    `user`, everywhere: acts with that user's rights; default the sandbox's user. `timeout` of a transfer is
    the longest wait without progress, as nobody can say how long the whole may take.
    """

    def __init__(self, transport: Transport, sandbox_path: str) -> None:
        self._transport = transport
        self._sandbox = sandbox_path
        self._path = f"{sandbox_path}/files"
        self._archive = f"{sandbox_path}/archive"

    async def read(
        self,
        path: RemotePath,
        *,
        offset: int | None = None,
        length: int | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> bytes:
        """A file's content, or `length` bytes of it from `offset`."""
        query = {"path": _text(path), "offset": offset, "length": length, "user": user}
        answer = await self._transport.call(
            "GET", self._path, query=query, timeout=timeout, progress=True, retry=Retry.SAFE
        )
        return answer.content

    async def read_text(
        self,
        path: RemotePath,
        *,
        encoding: str = "utf-8",
        errors: str = "strict",
        user: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """A file's content as text."""
        return (await self.read(path, user=user, timeout=timeout)).decode(encoding, errors)

    def stream(
        self,
        path: RemotePath,
        *,
        offset: int = 0,
        length: int | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[bytes]:
        """A file's content in chunks of 1 MiB, for one too large for memory."""
        return self._chunks(_text(path), offset, length, user, timeout)

    async def _chunks(
        self, path: str, offset: int, length: int | None, user: str | None, timeout: float | None
    ) -> AsyncIterator[bytes]:
        query = {"path": path, "offset": offset or None, "length": length, "user": user}
        async with self._transport.stream("GET", self._path, query=query, idle=timeout) as answer:
            async for chunk in answer.aiter_raw(CHUNK):
                yield chunk

    async def write(
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
        body = await asyncio.to_thread(Body.of, data) if hasattr(data, "read") else Body.of(data)
        return await self._put(
            _text(path),
            body,
            {"mode": _octal(mode), "owner": owner, "parents": _yes(parents), "offset": offset, "user": user},
            timeout,
        )

    async def _put(
        self, path: str, body: Body, query: Mapping[str, str | int | None], timeout: float | None
    ) -> FileInfo:
        data = await self._transport.json(
            "PUT",
            self._path,
            query={"path": path, **query},
            content=body.content,
            headers=body.headers,
            timeout=timeout,
            progress=True,
            # The same bytes in the same place: twice is once.
            retry=Retry.SAFE if body.replayable else Retry.UNSENT,
        )
        return FileInfo.of(data)

    async def upload(
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
        source = Path(local)
        if await asyncio.to_thread(source.is_dir):
            if mode is not None or owner is not None:
                raise InvalidArgument("mode and owner are for a file; a directory's files keep their modes")
            tar = TarOf(source)
            await self._transport.json(
                "PUT",
                self._archive,
                query={"path": _text(remote), "user": user},
                content=tar.content,
                headers={"content-type": "application/x-tar"},
                timeout=timeout,
                progress=True,
                retry=Retry.SAFE,
            )
            return Transfer(tar.files, tar.bytes)
        stat = await asyncio.to_thread(source.stat)
        body = Body.of_path(source)
        bits = stat.st_mode & 0o777 if mode is None else mode
        query = {"mode": _octal(bits), "owner": owner, "parents": _yes(True), "user": user}
        info = await self._put(_text(remote), body, query, timeout)
        return Transfer(1, info.size)

    async def download(
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
        source, target = _text(remote), Path(local)
        await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
        info = await self.stat(source, user=user)
        if info.is_dir or (info.kind == "symlink" and await self._leads_to_directory(source, user)):
            return await self._download_tree(source, target, user, skip_unsafe, timeout)
        mode = info.mode & 0o777 if info.is_file else 0o666
        return await self._download_file(source, target, mode, user, timeout)

    async def _leads_to_directory(self, path: str, user: str | None) -> bool:
        try:
            await self._list(path, 1, 1, user)
        except (InvalidArgument, Conflict, NotFound):
            return False
        return True

    async def _download_file(
        self, source: str, target: Path, mode: int, user: str | None, timeout: float | None
    ) -> Transfer:
        if await asyncio.to_thread(target.is_dir):
            raise AlreadyExists(f"{target} is a directory and {source} is a file")
        part = _part(target)
        backoff = Backoff(self._transport.retry_for)
        try:
            with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
                while True:
                    try:
                        query: dict[str, str | int | None] = {"path": source, "user": user}
                        async with self._transport.stream(
                            "GET", self._path, query=query, idle=timeout
                        ) as answer:
                            async for chunk in answer.aiter_raw(CHUNK):
                                await asyncio.to_thread(file.write, chunk)
                        break
                    except (ConnectionFailed, Unavailable) as error:
                        # From the start: the file may be another one by now.
                        await backoff.sleep_or_raise(error)
                        file.seek(0)
                        file.truncate()
                size = file.tell()
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return Transfer(1, size)

    async def _download_tree(
        self, source: str, target: Path, user: str | None, skip_unsafe: bool, timeout: float | None
    ) -> Transfer:
        if not hasattr(tarfile, "data_filter"):
            raise Unsupported(
                "this Python cannot unpack a directory safely",
                hint="use Python 3.10.12, 3.11.4, 3.12 or later",
            )
        backoff = Backoff(self._transport.retry_for)
        while True:
            part = _part(target)
            part.mkdir()
            unpack = Untar(part, skip_unsafe=skip_unsafe)
            try:
                async with self._transport.stream(
                    "GET", self._archive, query={"path": source, "user": user}, idle=timeout
                ) as answer:
                    async for chunk in answer.aiter_raw(CHUNK):
                        await unpack.feed(chunk)
                await unpack.finish()
                await asyncio.to_thread(_place, part, target)
                return Transfer(unpack.files, unpack.bytes, tuple(unpack.skipped))
            except (ConnectionFailed, Unavailable) as error:
                await backoff.sleep_or_raise(error)
            except tarfile.TarError as error:
                raise ConnectionFailed(f"the archive of {source} came damaged: {error}") from error
            finally:
                await unpack.abandon()
                await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)

    async def stat(self, path: RemotePath, *, user: str | None = None) -> FileInfo:
        """A file's facts; of a symbolic link, the link's own."""
        query = {"path": _text(path), "user": user}
        return FileInfo.of(
            await self._transport.json("GET", f"{self._path}/stat", query=query, retry=Retry.SAFE)
        )

    async def exists(self, path: RemotePath, *, user: str | None = None) -> bool:
        """Whether something is at the path, be it a link that leads nowhere."""
        try:
            await self.stat(path, user=user)
        except NotFound:
            # Which of the two is missing, the file or the sandbox?
            await self._transport.call("GET", self._sandbox, retry=Retry.SAFE)
            return False
        return True

    async def list(
        self, path: RemotePath = ".", *, depth: int = 1, limit: int | None = None, user: str | None = None
    ) -> FileList:
        """A directory's content; `depth` levels of it.

        Without `limit` everything is listed, and more than a million entries raise :class:`TooLarge`; with
        it, see `truncated` of the result.
        """
        found = await self._list(_text(path), depth, limit, user)
        if found.truncated and limit is None:
            found = await self._list(_text(path), depth, _LIST_MAX, user)
            if found.truncated:
                raise TooLarge(f"{_text(path)} has more than {_LIST_MAX:,} entries", hint="give a limit")
        return found

    async def _list(self, path: str, depth: int, limit: int | None, user: str | None) -> FileList:
        query = {"path": path, "depth": None if depth == 1 else depth, "limit": limit, "user": user}
        data = await self._transport.json("GET", f"{self._path}/list", query=query, retry=Retry.SAFE)
        return FileList(tuple(FileInfo.of(entry) for entry in data["entries"]), data.get("truncated", False))

    async def mkdir(
        self, path: RemotePath, *, parents: bool = True, mode: int | None = None, user: str | None = None
    ) -> FileInfo:
        """Makes a directory; with `parents`, also those above it, and it may be there already."""
        body: dict[str, object] = {"path": _text(path), "parents": parents}
        if mode is not None:
            body["mode"] = mode
        if user is not None:
            body["user"] = user
        retry = Retry.SAFE if parents else Retry.UNSENT
        return FileInfo.of(await self._transport.json("POST", f"{self._path}/mkdir", body=body, retry=retry))

    async def move(
        self, source: RemotePath, target: RemotePath, *, overwrite: bool = False, user: str | None = None
    ) -> FileInfo:
        """Moves a file or directory to the path `target` itself."""
        body: dict[str, object] = {"from": _text(source), "to": _text(target), "overwrite": overwrite}
        if user is not None:
            body["user"] = user
        return FileInfo.of(await self._transport.json("POST", f"{self._path}/move", body=body))

    async def remove(self, path: RemotePath, *, recursive: bool = False, user: str | None = None) -> None:
        """Removes a file, or a directory: an empty one, or with `recursive` whatever is in it."""
        query = {"path": _text(path), "recursive": "true" if recursive else None, "user": user}
        try:
            await self._transport.call("DELETE", self._path, query=query, retry=Retry.SAFE)
        except NotFound as error:
            # A first attempt whose answer was lost may have removed it.
            if error.attempts == 1:
                raise

    def watch(self, path: RemotePath, *, recursive: bool = False, user: str | None = None) -> Watch:
        """What happens to a file or in a directory::

        async with sb.files.watch("/work") as events:   # in place from here on
            async for event in events: ...
        """
        query = {"path": _text(path), "recursive": "true" if recursive else None, "user": user}
        return Watch(self._transport, f"{self._path}/watch", query)


class Watch:
    """Events of a watched path; made by `Files.watch`.

    When the connection breaks it is made again, and an event of kind `overflow` tells that some may have
    been lost: look again.
    """

    def __init__(self, transport: Transport, path: str, query: Mapping[str, str | None]) -> None:
        self._transport = transport
        self._path = path
        self._query = query
        self._socket: WebSocket | None = None
        self._opened = False
        self._closed = False
        self._backoff = Backoff(transport.retry_for)

    async def _open(self) -> None:
        """Opens it and waits until the watch is in place."""
        self._socket = await self._transport.websocket(self._path, query=self._query)
        first = await self._socket.receive(self._transport.timeout)
        if first is None or json.loads(first).get("kind") != "ready":
            await self._drop()
            raise ConnectionFailed(f"the watch {self._path} ended before it was in place")
        self._opened = True

    async def _drop(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def next(self, timeout: float | None = None) -> FileEvent | None:
        """The next event; None when the watch is closed. With `timeout`, raises :class:`RequestTimeout`."""
        while not self._closed:
            try:
                if self._socket is None:
                    again = self._opened
                    await self._open()
                    if again:
                        return FileEvent("overflow", "")
                assert self._socket is not None
                message = await self._socket.receive(timeout)
            except RequestTimeout:
                raise
            except (ConnectionFailed, Unavailable) as error:
                await self._drop()
                await self._backoff.sleep_or_raise(error)
                continue
            if message is None:
                await self._drop()
                broken = ConnectionFailed(f"the watch {self._path} was closed by the platform")
                await self._backoff.sleep_or_raise(broken)
                continue
            self._backoff.reset()
            data = json.loads(message)
            if data.get("kind") != "ready":
                return FileEvent.of(data)
        return None

    def __aiter__(self) -> AsyncIterator[FileEvent]:
        return self

    async def __anext__(self) -> FileEvent:
        event = await self.next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def close(self) -> None:
        """Ends the watch."""
        self._closed = True
        with suppress(DSecError):
            await self._drop()

    async def __aenter__(self) -> Watch:
        if self._socket is None:
            await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _yes(flag: bool) -> str | None:
    return "true" if flag else None


def _part(target: Path) -> Path:
    """A name beside the target, where what is not whole yet is kept."""
    return target.parent / f".{target.name}.{secrets.token_hex(6)}.part"


def _place(part: Path, target: Path) -> None:
    """Moves a whole tree to its place; into a directory that is there, entry by entry."""
    if not target.exists() and not target.is_symlink():
        part.rename(target)
        return
    if not target.is_dir():
        raise AlreadyExists(f"{target} is there and is not a directory")
    for entry in os.scandir(part):
        _merge(Path(entry.path), target / entry.name)


def _merge(source: Path, target: Path) -> None:
    real_directory = source.is_dir() and not source.is_symlink()
    if not real_directory:
        if target.is_dir() and not target.is_symlink():
            raise AlreadyExists(f"{target} is a directory and a file is to go there")
        os.replace(source, target)
    elif not os.path.lexists(target):
        source.rename(target)
    elif target.is_dir() and not target.is_symlink():
        for entry in os.scandir(source):
            _merge(Path(entry.path), target / entry.name)
    else:
        raise AlreadyExists(f"{target} is there and is not a directory")
