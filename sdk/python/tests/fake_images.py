"""The images of the fake API: what is imported is kept by name and not looked into."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from fake_errors import ApiError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeImages:
    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        #: What was uploaded, by name.
        self.imported: dict[str, bytes] = {}
        #: Bodies of pulls, as they came.
        self.pulls: list[dict[str, Any]] = []

    def routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("GET", "/v1/images", self._list),
            ("GET", "/v1/images/{name}", self._get),
            ("PUT", "/v1/images/{name}", self._import),
            ("POST", "/v1/images/{name}/pull", self._pull),
            ("DELETE", "/v1/images/{name}", self._remove),
        ]

    async def _list(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"images": [self.kept[name] for name in sorted(self.kept)]})

    async def _get(self, request: web.Request) -> web.StreamResponse:
        image = self.kept.get(request.match_info["name"])
        if image is None:
            raise ApiError("not_found", "no such image")
        return web.json_response(image)

    async def _import(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        await answer.prepare(request)
        data = await request.read()
        await answer.write(b'{"event":"progress","files":1,"bytes":10}\n{"event":"progr')
        await answer.write(b'ess","files":2,"bytes":20}\n')
        if data == b"broken":
            body = ApiError("invalid_argument", "not a tar").body
            await answer.write(json.dumps({"event": "error", "error": body}).encode() + b"\n")
        elif data != b"cut":
            name = request.match_info["name"]
            image = {"name": name, "digest": "sha256:1", "size_bytes": len(data), "files": 2, "env": []}
            image["source"] = request.query.get("source", "")
            self.kept[name] = image
            self.imported[name] = data
            await answer.write(json.dumps({"event": "done", "image": image}).encode() + b"\n")
        await answer.write_eof()
        return answer

    async def _pull(self, request: web.Request) -> web.StreamResponse:
        self.pulls.append(asked := await request.json())
        answer = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        await answer.prepare(request)
        progress = {"event": "progress", "files": 1, "bytes": 10, "fetched_bytes": 5, "fetch_bytes_total": 7}
        await answer.write(json.dumps(progress).encode() + b"\n")
        if "credentials" not in asked:
            body = ApiError("permission_denied", "give credentials").body
            await answer.write(json.dumps({"event": "error", "error": body}).encode() + b"\n")
        else:
            name = request.match_info["name"]
            image = {"name": name, "digest": "sha256:1", "size_bytes": 1, "files": 2, "env": []}
            self.kept[name] = image | {"source": asked["reference"]}
            await answer.write(json.dumps({"event": "done", "image": self.kept[name]}).encode() + b"\n")
        await answer.write_eof()
        return answer

    async def _remove(self, request: web.Request) -> web.StreamResponse:
        if self.kept.pop(request.match_info["name"], None) is None:
            raise ApiError("not_found", "no such image")
        return web.Response(status=204)
