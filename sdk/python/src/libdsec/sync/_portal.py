"""A private event loop on a thread of its own, and calls into it."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from ..errors import ClientNotOpen

T = TypeVar("T")


class Portal:
    """Runs coroutines on the loop's thread while the caller waits."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._guard = threading.Lock()

    def start(self) -> None:
        """Starts the thread; again does nothing."""
        with self._guard:
            if self._loop is not None:
                return
            loop = asyncio.new_event_loop()
            # A daemon, so that a program that forgets to close the client ends all the same.
            thread = threading.Thread(target=self._run, args=(loop,), name="libdsec", daemon=True)
            thread.start()
            self._loop, self._thread, self._pid = loop, thread, os.getpid()

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    def stop(self) -> None:
        """Ends the thread; again does nothing."""
        with self._guard:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            if loop is None or thread is None or self._pid != os.getpid():
                return
            loop.call_soon_threadsafe(loop.stop)
        thread.join()

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return self._loop is not None

    @property
    def is_own_process(self) -> bool:
        """Whether this is the process that started it: a fork has no such thread."""
        return self._pid == os.getpid()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end. An exception in this thread, such as KeyboardInterrupt, cancels it."""
        loop, thread = self._loop, self._thread
        reason = ""
        if loop is None:
            reason = "the client is not open: `client.open()`, or `with`"
        elif not self.is_own_process:
            reason = "the client was opened in another process: make one in each process"
        elif threading.current_thread() is thread:
            reason = "a callback of the synchronous client cannot call it: that would wait for itself"
        if loop is None or reason:
            work.close()
            raise ClientNotOpen(reason)
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """The items of an asynchronous iterator."""
        try:
            while True:
                try:
                    item = self.call(_next(source))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            self._finish(source)

    def _finish(self, source: AsyncIterator[Any]) -> None:
        loop = self._loop
        if loop is None or not self.is_own_process or not hasattr(source, "aclose"):
            return
        if threading.current_thread() is self._thread:
            # The garbage collector came by here: the loop must not wait for itself.
            task = loop.create_task(_close(source))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            return
        with suppress(ClientNotOpen):
            self.call(_close(source))


async def _next(source: AsyncIterator[T]) -> T:
    return await source.__anext__()


async def _close(source: Any) -> None:
    await source.aclose()


class _Closes(Protocol):
    _portal: Portal

    def close(self) -> None: ...


_open: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(client: _Closes) -> None:
    """Closes the client when the program ends without doing so: its sandboxes are stopped."""
    _open.add(client)


@atexit.register
def _close_all() -> None:
    for client in list(_open):
        if client._portal.is_own_process:
            with suppress(Exception):
                client.close()
