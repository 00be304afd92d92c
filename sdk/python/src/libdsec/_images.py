"""Images, and the layers over them."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from ._args import RegistryCredentials
from ._bodies import Body, Data
from ._records import BlobTrace, ImageInfo, ImportProgress, LayerOnNode, PrefetchProgress
from ._transport import Retry, Transport, segment
from .errors import ConnectionFailed, NotFound, UnexpectedAnswer, error_of_body

#: Called as an import goes on.
OnProgress = Callable[[ImportProgress], "Awaitable[None] | None"]
#: Called as a prefetch goes on.
OnPrefetch = Callable[[PrefetchProgress], "Awaitable[None] | None"]


class Images:
    """Layers of one kind: images at `DSecClient.images`, others at `workspaces`, `toolkits`, `snapshots`.

    `node` names the node that is to do it; without, any does, and all prefetch.
    """

    def __init__(self, transport: Transport, path: str = "/v1/images") -> None:
        self._transport = transport
        self._path = path
        # What is done beyond names has one path for all kinds.
        self._layers = "/v1/layers/base" if path == "/v1/images" else path

    async def list(self, *, node: str | None = None) -> tuple[ImageInfo, ...]:
        """All of them, by name."""
        data = await self._transport.json("GET", self._path, query={"node": node}, retry=Retry.SAFE)
        return tuple(ImageInfo.of(image) for image in data["images"])

    async def get(self, name: str, *, node: str | None = None) -> ImageInfo:
        """One of them."""
        path = f"{self._path}/{segment(name)}"
        return ImageInfo.of(await self._transport.json("GET", path, query={"node": node}, retry=Retry.SAFE))

    async def import_(
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
        if isinstance(source, (str, Path)):
            path = Path(source)
            body = Body.of_path(path)
            description = description or path.name
        else:
            body = Body.of(source)
        return await self._taken_in(
            name,
            on_progress,
            "PUT",
            f"{self._path}/{segment(name)}",
            query={"source": description, "node": node},
            content=body.content,
            headers={**body.headers, "content-type": "application/octet-stream"},
            idle=timeout,
        )

    async def pull(
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
        body: dict[str, Any] = {"reference": reference, "plain_http": plain_http}
        if platform is not None:
            body["platform"] = platform
        if credentials is not None:
            body["credentials"] = credentials.body()
        if ca_pem is not None:
            body["ca_pem"] = ca_pem
        return await self._taken_in(
            name,
            on_progress,
            "POST",
            f"{self._path}/{segment(name)}/pull",
            query={"node": node},
            content=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
            idle=timeout,
        )

    async def _taken_in(
        self, name: str, on_progress: OnProgress | None, method: str, path: str, **request: Any
    ) -> ImageInfo:
        def told(event: dict[str, Any]) -> ImportProgress:
            fetched = event.get("fetched_bytes"), event.get("fetch_bytes_total")
            return ImportProgress(event["files"], event["bytes"], *fetched)

        async with self._transport.stream(method, path, **request) as answer:
            last = await _last(answer, told, on_progress)
        match last.get("event"):
            case "done":
                return ImageInfo.of(last["image"])
            case "error":
                raise error_of_body(last["error"])
        raise ConnectionFailed(
            f"the import of {name} ended without saying how it went",
            hint="look whether the image is there",
            maybe_sent=True,
        )

    async def prefetch(
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
        async with self._transport.stream(
            "POST",
            f"{self._layers}/{segment(name)}/prefetch",
            query={"node": node},
            content=json.dumps({"what": "trace" if trace else "all"}).encode(),
            headers={"content-type": "application/json"},
            idle=timeout,
        ) as answer:
            last = await _last(
                answer,
                lambda event: PrefetchProgress(event["wanted_bytes"], event["left_bytes"]),
                on_progress,
            )
        match last.get("event"):
            case "done":
                return tuple(LayerOnNode.of(on) for on in last.get("nodes") or ())
            case "error":
                raise error_of_body(last["error"])
        raise ConnectionFailed(
            f"the prefetch of {name} ended without saying how it went",
            hint="what came stays; try again",
            maybe_sent=True,
        )

    async def tag(self, name: str, tag: str, *, node: str | None = None) -> ImageInfo:
        """Puts a tag on the version that `name` means, wherever the tag was before."""
        path = f"{self._layers}/{segment(name)}/tags/{segment(tag)}"
        return ImageInfo.of(await self._transport.json("PUT", path, query={"node": node}, retry=Retry.SAFE))

    async def trace(self, name: str, *, node: str | None = None) -> tuple[BlobTrace, ...]:
        """What first runs read of it, which later ones find prefetched."""
        path = f"{self._layers}/{segment(name)}/trace"
        data = await self._transport.json("GET", path, query={"node": node}, retry=Retry.SAFE)
        return tuple(BlobTrace.of(blob) for blob in data["blobs"])

    async def remove(self, name: str, *, node: str | None = None) -> None:
        """Removes one; :class:`Conflict` while sandboxes use it."""
        path = f"{self._path}/{segment(name)}"
        try:
            await self._transport.call("DELETE", path, query={"node": node}, retry=Retry.SAFE)
        except NotFound as error:
            if error.attempts == 1:
                raise

    async def exists(self, name: str, *, node: str | None = None) -> bool:
        """Whether it is there."""
        try:
            await self.get(name, node=node)
        except NotFound:
            return False
        return True


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of an answer, a line of JSON each."""
    rest = b""

    def event(line: bytes) -> dict[str, Any]:
        try:
            read: dict[str, Any] = json.loads(line)
        except ValueError:
            raise UnexpectedAnswer(f"the platform answered {line[:100]!r}") from None
        return read

    async for chunk in answer.aiter_raw():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in filter(None, lines):
            yield event(line)
    if rest.strip():
        yield event(rest)


async def _last(
    answer: httpx.Response, progress: Callable[[dict[str, Any]], Any], told: Callable[[Any], Any] | None
) -> dict[str, Any]:
    """Reads events, tells of those that are progress, and gives the last."""
    last: dict[str, Any] = {}
    async for event in events(answer):
        last = event
        if event.get("event") == "progress" and told is not None:
            done = told(progress(event))
            if inspect.isawaitable(done):
                await done
    return last
