"""The synchronous twin: its surface is the asynchronous one's, and it works the same."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import libdsec
import libdsec.sync
from conftest import ARGS
from fake_api import KEY
from libdsec import ClientNotOpen, CommandFailed, NotFound, Transfer
from libdsec.sync import DSecClient

TWINS = libdsec.sync.__all__


def test_the_generated_module_is_what_the_generator_writes() -> None:
    script = Path(__file__).parent.parent / "tools/gen_sync.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def public(cls: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_")}


def test_every_class_that_makes_calls_has_a_twin() -> None:
    calling = {
        name
        for name in libdsec.__all__
        if inspect.isclass(cls := getattr(libdsec, name))
        and any(inspect.iscoroutinefunction(each) for each in vars(cls).values())
    }
    assert calling == set(TWINS)


@pytest.mark.parametrize("name", TWINS)
def test_the_two_surfaces_are_the_same(name: str) -> None:
    slow, fast = public(getattr(libdsec, name)), public(getattr(libdsec.sync, name))
    assert slow.keys() == fast.keys()
    for each, value in slow.items():
        twin = fast[each]
        assert isinstance(value, property) == isinstance(twin, property), each
        assert twin.__doc__, each
        if isinstance(value, property):
            continue
        assert not inspect.iscoroutinefunction(twin)
        shape = [
            (p.name, p.kind, p.default, p.annotation) for p in inspect.signature(value).parameters.values()
        ]
        same = [
            (p.name, p.kind, p.default, p.annotation) for p in inspect.signature(twin).parameters.values()
        ]
        assert shape == same, each


def test_the_whole_way_without_await(api_thread: str, tmp_path: Path) -> None:
    with DSecClient(api_thread, KEY) as client:
        with client.container(ARGS) as sb:
            assert sb.run_shell("echo hello").stdout == "hello\n"
            assert sb.run("cat", stdin="x", timeout=5).stdout == "x"
            with pytest.raises(CommandFailed):
                sb.run_shell("exit 1", check=True)
            process = sb.start("read x; echo $x; echo e >&2", stdin=True)
            process.write("line\n")
            assert sorted(process.stream()) == [("stderr", b"e\n"), ("stdout", b"line\n")]
            assert b"".join(process.stdout()) == b"line\n"
            assert process.wait(timeout=5).ok
            with sb.session("s") as session:
                session.run_shell("X=1")
                assert sb.run_shell("echo $X", session=session).stdout == "1\n"
                assert [each.id for each in sb.sessions()] == ["s"]
            sb.files.write(tmp_path / "file", [b"a", b"b"])
            assert b"".join(sb.files.stream(tmp_path / "file")) == b"ab"
            assert sb.files.download(tmp_path / "file", tmp_path / "copy") == Transfer(1, 2)
            with sb.files.watch(tmp_path) as events:
                (tmp_path / "new").write_text("")
                for event in events:
                    assert (event.kind, event.path) == ("created", "new")
                    break
            with pytest.raises(NotFound):
                sb.files.read(tmp_path / "none")
            assert [each.id for each in client.list()] == [sb.id]
            assert client.nodes()[0].node == "n1"
        assert client.get(sb.id).state == "stopped"
        kept = client.run_container(ARGS)
        with pytest.raises(ZeroDivisionError), client.container(ARGS):
            raise ZeroDivisionError
    with pytest.raises(ClientNotOpen):
        kept.refresh()
    client.close()
    with DSecClient(api_thread, KEY) as again:
        assert [each.state for each in again.list()] == ["stopped"] * 3


def test_calls_from_many_threads(api_thread: str) -> None:
    with DSecClient(api_thread, KEY) as client, client.run_container(ARGS) as sb:
        found: list[str] = []
        threads = [
            threading.Thread(target=lambda n=n: found.append(sb.run_shell(f"echo {n}", timeout=20).stdout))
            for n in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == sorted(f"{n}\n" for n in range(20))


def test_an_iterator_left_early_is_closed(api_thread: str) -> None:
    with DSecClient(api_thread, KEY) as client, client.run_container(ARGS) as sb:
        process = sb.start("while :; do echo x; sleep 0.01; done")
        for _ in process.stream():
            break
        for _ in process.stdout():
            break
        process.kill()


def test_misuse_is_told_and_does_not_hang(api_thread: str) -> None:
    client = DSecClient(api_thread, KEY)
    with pytest.raises(ClientNotOpen, match="not open"):
        client.nodes()
    with client:
        seen: list[Exception] = []

        def from_callback(_: object) -> None:
            try:
                client.nodes()
            except ClientNotOpen as error:
                seen.append(error)

        client.images.import_("image", b"data", on_progress=from_callback)
        assert "callback" in str(seen[0])
        child = os.fork()
        if child == 0:
            try:
                client.nodes()
            except ClientNotOpen:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_failed_open_leaves_no_thread(api_thread: str) -> None:
    before = threading.active_count()
    with pytest.raises(libdsec.Unauthenticated):
        DSecClient(api_thread, "bad").open()
    assert threading.active_count() == before
