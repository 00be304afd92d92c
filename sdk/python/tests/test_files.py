"""Files, ports, images and nodes."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fake_api import FakeApi, Fault
from libdsec import (
    AlreadyExists,
    Conflict,
    ConnectionFailed,
    DSecClient,
    FileEvent,
    ImportProgress,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    PrefetchProgress,
    RegistryCredentials,
    RequestTimeout,
    Sandbox,
    Unavailable,
)


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """A directory "of the sandbox"."""
    path = tmp_path / "inside"
    path.mkdir()
    return path


async def test_a_file_in_every_form_of_data(sb: Sandbox, inside: Path, tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"a"
        yield b"bc"

    local = tmp_path / "local"
    local.write_bytes(b"abc")
    with local.open("rb") as opened:
        opened.seek(1)
        forms = [
            b"abc",
            bytearray(b"abc"),
            memoryview(b"abc"),
            "abc",
            io.BytesIO(b"abc"),
            [b"a", b"bc"],
            chunks(),
        ]
        for n, data in enumerate(forms):
            info = await sb.files.write(inside / f"sub/{n}", data, mode=0o640)  # type: ignore[arg-type]
            assert (info.size, info.mode) == (3, 0o640)
            assert await sb.files.read(inside / f"sub/{n}") == b"abc"
        await sb.files.write(inside / "part", opened)
    assert await sb.files.read_text(str(inside / "part")) == "bc"
    with local.open() as text, pytest.raises(InvalidArgument, match="rb"):
        await sb.files.write(inside / "part", text)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="int cannot"):
        await sb.files.write(inside / "part", 5)  # type: ignore[arg-type]


async def test_parts_of_a_file(sb: Sandbox, inside: Path) -> None:
    path = str(inside / "file with spaces + ä %20")
    await sb.files.write(path, "0123456789")
    await sb.files.write(path, "ab", offset=4)
    assert await sb.files.read(path) == b"0123ab6789"
    assert await sb.files.read(path, offset=3, length=4) == b"3ab6"
    assert b"".join([chunk async for chunk in sb.files.stream(path, offset=8)]) == b"89"
    assert [each.path for each in await sb.files.list(inside)] == ["file with spaces + ä %20"]


async def test_a_large_file_both_ways_and_through_broken_connections(
    api: FakeApi, sb: Sandbox, inside: Path, tmp_path: Path
) -> None:
    data = os.urandom(1 << 20) * 20
    local, back = tmp_path / "big", tmp_path / "deep" / "back"
    local.write_bytes(data)
    local.chmod(0o755)
    api.faults = [Fault("PUT", "/files", "drop_after"), Fault("PUT", "/files", "error")]
    moved = await sb.files.upload(local, inside / "big")
    assert (moved.files, moved.bytes) == (1, len(data))
    assert hashlib.sha256((inside / "big").read_bytes()).digest() == hashlib.sha256(data).digest()
    assert (inside / "big").stat().st_mode & 0o777 == 0o755
    api.cut_streams_after = [1000, 3_000_000]
    moved = await sb.files.download(inside / "big", back)
    assert moved.bytes == len(data)
    assert back.read_bytes() == data
    assert back.stat().st_mode & 0o777 == 0o755
    assert os.listdir(back.parent) == ["back"]
    api.cut_streams_after = [1000]
    assert await sb.files.read(inside / "big") == data


async def test_what_cannot_be_sent_twice_is_not(api: FakeApi, sb: Sandbox, inside: Path) -> None:
    api.faults = [Fault("PUT", "/files", "drop_before")]
    with pytest.raises(ConnectionFailed) as caught:
        await sb.files.write(inside / "x", iter([b"a", b"b"]))
    assert caught.value.maybe_sent
    assert api.count("PUT", "/files") == 1


async def test_a_failed_download_leaves_nothing(
    api: FakeApi, sb: Sandbox, inside: Path, tmp_path: Path
) -> None:
    (inside / "x").write_text("new")
    target = tmp_path / "out" / "x"
    target.parent.mkdir()
    target.write_text("old")
    api.faults = [Fault("GET", "/files", "error", code="internal", times=9)]
    with pytest.raises(Exception, match="internal"):
        await sb.files.download(inside / "x", target)
    assert target.read_text() == "old"
    assert os.listdir(target.parent) == ["x"]
    with pytest.raises(NotFound):
        await sb.files.download(inside / "none", target)


def tree(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = "dir"
        else:
            found[name] = (path.stat().st_mode & 0o777, path.read_bytes())
    return found


async def test_a_directory_both_ways(sb: Sandbox, inside: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a/b").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "a/b/run").write_text("#!/bin/sh\n")
    (source / "a/b/run").chmod(0o755)
    (source / "big").write_bytes(os.urandom(7_000_000))
    (source / "ä ö").write_text("")
    (source / "a/link").symlink_to("b/run")
    (source / "locked").mkdir()
    (source / "locked/file").write_text("x")
    (source / "locked").chmod(0o555)
    moved = await sb.files.upload(source, inside / "tree")
    assert (moved.files, moved.bytes) == (5, 7_000_011)
    assert tree(inside / "tree") == tree(source)
    target = tmp_path / "back"
    moved = await sb.files.download(inside / "tree", target)
    assert (moved.files, moved.skipped) == (5, ())
    assert tree(target) == tree(source)
    # Into a directory that is there: what is there and not in the archive stays.
    (target / "mine").write_text("mine")
    (target / "big").write_text("old")
    (target / "locked").chmod(0o755)
    await sb.files.download(inside / "tree", target)
    assert tree(target) == {**tree(source), "mine": (0o644, b"mine")}
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]
    (tmp_path / "file").write_text("")
    with pytest.raises(AlreadyExists):
        await sb.files.download(inside / "tree", tmp_path / "file")


@pytest.mark.parametrize("evil", ["../out", "/abs", "link", "through", "device", "hard", "chain"])
async def test_an_archive_that_reaches_out_is_refused(
    api: FakeApi, sb: Sandbox, inside: Path, tmp_path: Path, evil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:

        def add(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            member.size = 4 if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(b"evil") if member.size else None)

        add("good")
        match evil:
            case "../out":
                add("../outside/x")
            case "/abs":
                add("a", tarfile.SYMTYPE, str(outside))
            case "link":
                add("a", tarfile.SYMTYPE, "../outside")
            case "through":
                add("d", tarfile.DIRTYPE)
                add("a", tarfile.SYMTYPE, "d")
                add("a/x")
            case "device":
                add("a", tarfile.CHRTYPE)
            case "hard":
                add("a", tarfile.LNKTYPE, "../outside/x")
            case "chain":
                add("d", tarfile.DIRTYPE)
                add("d/up", tarfile.SYMTYPE, "..")
                add("a", tarfile.SYMTYPE, "d/up/../outside")
                add("a/x")

    async def get_archive(request: object) -> object:
        from aiohttp import web

        return web.Response(body=archive.getvalue())

    api.get_archive = get_archive  # type: ignore[method-assign, assignment]
    await api.stop()
    await api.start(int(api.url.rsplit(":", 1)[1]))
    with pytest.raises(InvalidArgument, match="not safe"):
        await sb.files.download(inside, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    moved = await sb.files.download(inside, tmp_path / "back", skip_unsafe=True)
    assert len(moved.skipped) >= 1
    assert (tmp_path / "back/good").read_bytes() == b"evil"
    assert os.listdir(outside) == []
    assert not any(name.endswith(".part") for name in os.listdir(tmp_path))


async def test_names_and_what_is_there(sb: Sandbox, inside: Path) -> None:
    files = sb.files
    assert (await files.mkdir(inside / "a/b", mode=0o700)).is_dir
    await files.mkdir(inside / "a/b")
    with pytest.raises(AlreadyExists):
        await files.mkdir(inside / "a", parents=False)
    await files.write(inside / "a/file", "x")
    (inside / "a/link").symlink_to("file")
    link = await files.stat(inside / "a/link")
    assert (link.kind, link.target) == ("symlink", "file")
    names = [(each.path, each.kind) for each in await files.list(inside / "a")]
    assert names == [("b", "directory"), ("file", "file"), ("link", "symlink")]
    assert [each.path for each in await files.list(inside, depth=2)] == ["a", "a/b", "a/file", "a/link"]
    few = await files.list(inside / "a", limit=1)
    assert few.truncated
    assert len(few) == 1
    await files.move(inside / "a/file", inside / "moved")
    assert not await files.exists(inside / "a/file")
    assert await files.exists(inside / "moved")
    await files.write(inside / "other", "y")
    with pytest.raises(AlreadyExists):
        await files.move(inside / "moved", inside / "other")
    await files.move(inside / "moved", inside / "other", overwrite=True)
    with pytest.raises(Conflict):
        await files.remove(inside / "a")
    await files.remove(inside / "a", recursive=True)
    assert [each.path for each in await files.list(inside)] == ["other"]
    await sb.stop()
    with pytest.raises(Conflict):
        await files.exists(inside / "other")


async def test_exists_does_not_take_a_missing_sandbox_for_a_missing_file(api: FakeApi, sb: Sandbox) -> None:
    api.sandboxes.clear()
    with pytest.raises(NotFound, match="no sandbox"):
        await sb.files.exists("/x")


async def test_a_watch_tells_what_happens_and_that_something_may_be_missing(
    api: FakeApi, sb: Sandbox, inside: Path
) -> None:
    api.cut_streams_after = [1]
    async with sb.files.watch(inside) as events:
        (inside / "one").write_text("x")
        assert await events.next(timeout=5) == FileEvent("created", "one")
        assert (await anext(events)).kind == "overflow"
        (inside / "two").write_text("x")
        async for event in events:
            if event == FileEvent("created", "two"):
                break
        (inside / "one").unlink()
        assert await events.next(timeout=5) == FileEvent("removed", "one")
        with pytest.raises(RequestTimeout):
            await events.next(timeout=0.1)
    assert await events.next() is None
    api.sandboxes.clear()
    with pytest.raises(NotFound):
        await sb.files.watch(inside).next()


# Ports


async def test_http_to_a_port(sb: Sandbox) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.splitlines() if line.lower().startswith(b"content-length:")), 0
        )
        body = head + await reader.readexactly(length)
        status = b"503 No" if b"/fail" in head else b"200 OK"
        if b"/shaped" in head:
            status, body = b"404 Not Found", b'{"code":"mine","message":"own"}'
        writer.write(
            b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body)) + body
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await sb.wait_for_port(port)
    answer = await sb.request(
        "post", port, "/a/b?c=d%20e", headers={"Authorization": "Basic x"}, json={"k": [1]}
    )
    assert answer.status_code == 200
    text = answer.text.lower()
    assert "post /a/b?c=d" in text
    assert "authorization: basic x" in text
    assert "bearer" not in text
    assert text.endswith('{"k": [1]}')
    # The server's own failures are answers.
    assert (await sb.request("GET", port, "/fail")).status_code == 503
    assert (await sb.request("GET", port, "/shaped")).status_code == 404
    server.close()
    await server.wait_closed()
    with pytest.raises(Unavailable):
        await sb.request("GET", port)
    with pytest.raises(RequestTimeout):
        await sb.wait_for_port(port, timeout=0.1)
    assert sb.port_url(80, "/x?y").endswith(f"/v1/sandboxes/{sb.id}/ports/80/http/x?y")


async def test_bytes_to_a_port(sb: Sandbox) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (chunk := await reader.read(65536)) and chunk != b"end":
            writer.write(chunk)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with await sb.connect(port) as stream:
        await stream.write(b"line one\nrest")
        assert await stream.read_until() == b"line one\n"
        assert await stream.read_exactly(4) == b"rest"
        with pytest.raises(RequestTimeout):
            await stream.read(1, timeout=0.05)
        data = os.urandom(3_000_000)
        got, _ = await asyncio.gather(stream.read_exactly(len(data)), stream.write(data))
        assert got == data
        await stream.write(b"end")
        assert await stream.read() == b""
        with pytest.raises(EOFError):
            await stream.read_exactly(1)
    server.close()
    await server.wait_closed()
    with pytest.raises(Unavailable):
        await sb.connect(port)


# Images, nodes


async def test_images(api: FakeApi, client: DSecClient, tmp_path: Path) -> None:
    tar = tmp_path / "image.tar"
    tar.write_bytes(b"x" * 3_000_000)
    seen: list[ImportProgress] = []
    image = await client.images.import_("team/image:1", tar, on_progress=seen.append)
    assert (image.name, image.size_bytes, image.source) == ("team/image:1", 3_000_000, "image.tar")
    assert seen == [ImportProgress(1, 10), ImportProgress(2, 20)]
    assert [each.name for each in await client.images.list()] == ["team/image:1"]
    assert (await client.images.get("team/image:1")).digest == "sha256:1"
    with pytest.raises(InvalidArgument, match="not a tar"):
        await client.images.import_("bad", b"broken")
    with pytest.raises(ConnectionFailed, match="without saying"):
        await client.images.import_("bad", b"cut")
    await client.images.remove("team/image:1")
    assert not await client.images.exists("team/image:1")
    # A directory goes as a tar of what is in it.
    tree = tmp_path / "tree"
    (tree / "opt").mkdir(parents=True)
    (tree / "opt/tool").write_text("tool")
    packed = await client.images.import_("tool", tree)
    assert packed.source == "tree"
    with tarfile.open(fileobj=io.BytesIO(api.images.imported["tool"])) as archive:
        assert archive.getnames() == ["opt", "opt/tool"]
    with pytest.raises(NotFound):
        await client.images.remove("team/image:1")


async def test_images_are_prefetched_tagged_and_their_traces_seen(client: DSecClient) -> None:
    seen: list[PrefetchProgress] = []
    here = await client.images.prefetch("debian", on_progress=seen.append)
    assert [(on.node, on.mounted, on.content and on.content.counts.fetched_bytes) for on in here] == [
        ("n1", True, 6)
    ]
    here = await client.images.prefetch("debian", node=["n2", "n3"])
    assert [on.node for on in here] == ["n2", "n3"]
    assert seen == [PrefetchProgress(10, 4)]
    with pytest.raises(Unavailable, match="did not come"):
        await client.images.prefetch("debian", trace=True)
    with pytest.raises(ConnectionFailed, match="without saying"):
        await client.images.prefetch("cut")
    assert (await client.images.tag("debian:12", "stable")).name == "debian:stable"
    first, second = await client.images.trace("debian")
    assert (first.runs, first.groups, first.recorded_ms) == (2, (3, 1), 7)
    assert (second.runs, second.groups, second.recorded_ms) == (0, (), None)


async def test_an_image_is_pulled_with_what_was_given(api: FakeApi, client: DSecClient) -> None:
    seen: list[ImportProgress] = []
    reference = "docker://registry.example/team/app:1"
    credentials = RegistryCredentials(username="ann", password="secret")
    image = await client.images.pull(
        "app:1", reference, platform="linux/arm64", credentials=credentials, on_progress=seen.append
    )
    assert (image.name, image.source) == ("app:1", reference)
    assert seen == [ImportProgress(1, 10, 5, 7)]
    shown = {"username": "ann", "password": "secret"}
    pulled = {"reference": reference, "plain_http": False, "platform": "linux/arm64", "credentials": shown}
    assert api.images.pulls == [pulled]
    assert "secret" not in repr(credentials)
    with pytest.raises(PermissionDenied, match="give credentials"):
        await client.images.pull("app:1", reference)
    assert api.images.pulls[1] == {"reference": reference, "plain_http": False}


async def test_nodes(client: DSecClient) -> None:
    (node,) = await client.nodes()
    assert node.capacity.cpu_millis == 2000
    assert node.features[0].state == "works"
    assert await client.healthy()


async def test_the_end_of_what_is_written_leaves_the_answer(sb: Sandbox) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"got " + await reader.read())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, await sb.connect(server.sockets[0].getsockname()[1]) as stream:
        await stream.write(b"question")
        await stream.write_eof()
        assert await stream.read() == b"got question"
