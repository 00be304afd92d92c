"""What the fake API does with layers beyond their names."""

from __future__ import annotations

import json

from aiohttp import web


async def prefetch(request: web.Request) -> web.StreamResponse:
    """All of it comes, but not along a trace, and nothing is said of `cut`."""
    answer = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
    await answer.prepare(request)
    what = (await request.json())["what"]
    await answer.write(b'{"event":"progress","wanted_bytes":10,"left_bytes":4}\n')
    if what == "trace":
        error = {"code": "unavailable", "message": "4 of 10 bytes did not come", "detail": {}, "hint": ""}
        await answer.write(json.dumps({"event": "error", "error": error}).encode() + b"\n")
    elif request.match_info["name"] != "cut":
        nodes = request.query.getall("node", ["n1"])
        content = {"size_bytes": 10, "here_bytes": 10, "fetched_bytes": 6, "blobs": []}
        done = {
            "event": "done",
            "nodes": [{"node": node, "mounted": True, "content": content} for node in nodes],
        }
        await answer.write(json.dumps(done).encode() + b"\n")
    await answer.write_eof()
    return answer


async def tag(request: web.Request) -> web.StreamResponse:
    """Every tag can be put on every name."""
    name = request.match_info["name"].split(":")[0]
    return web.json_response({"name": f"{name}:{request.match_info['tag']}", "digest": "sha256:1"})


async def trace(request: web.Request) -> web.StreamResponse:
    """One blob was read, one never."""
    read = {"size_bytes": 99, "runs": 2, "recorded_ms": 7, "traced_bytes": 5, "groups": [3, 1]}
    blobs = [{"id": "b1", "of a later version": 1, **read}, {"id": "b2", "size_bytes": 1}]
    return web.json_response({"digest": "sha256:1", "blobs": blobs})


ROUTES = (
    ("POST", "/v1/layers/base/{name}/prefetch", prefetch),
    ("PUT", "/v1/layers/base/{name}/tags/{tag}", tag),
    ("GET", "/v1/layers/base/{name}/trace", trace),
)
