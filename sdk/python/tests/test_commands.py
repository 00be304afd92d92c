"""Commands, processes, sessions and terminals."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from fake_api import FakeApi, Fault
from libdsec import (
    CommandFailed,
    Conflict,
    ConnectionFailed,
    DSecClient,
    InvalidArgument,
    NotFound,
    RequestTimeout,
    Sandbox,
    _commands,
)


@pytest.mark.parametrize("timeout", [10, 60, None])
async def test_a_command_and_how_it_went(sb: Sandbox, timeout: float | None) -> None:
    result = await sb.run_shell("printf out; printf err >&2; exit 3", timeout=timeout)
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out", "err")
    assert not result.ok
    assert result.signal is None
    assert result.duration >= 0
    with pytest.raises(CommandFailed):
        result.check()
    assert (await sb.run("printf", "%s|", "a b", "$HOME", timeout=timeout)).stdout == "a b|$HOME|"


async def test_a_short_command_is_one_request_and_a_long_one_two(api: FakeApi, sb: Sandbox) -> None:
    before = len(api.requests)
    await sb.run_shell("true", timeout=30)
    assert len(api.requests) - before == 1
    await sb.run_shell("true", timeout=31)
    assert len(api.requests) - before == 3


async def test_environment_cwd_and_stdin(sb: Sandbox, tmp_path: Path) -> None:
    result = await sb.run_shell("echo $X; pwd; cat", env={"X": "ä"}, cwd=str(tmp_path), stdin="in")
    assert result.stdout == f"ä\n{tmp_path}\nin"
    raw = bytes(range(256))
    assert (await sb.run("cat", stdin=raw)).stdout_bytes == raw
    assert (await sb.run("cat", stdin="")).stdout_bytes == b""


async def test_a_large_stdin_is_streamed(sb: Sandbox) -> None:
    data = bytes(range(256)) * 40_000
    assert (await sb.run("cat", stdin=data, timeout=20)).stdout_bytes == data
    # A command that does not read it all is no failure.
    assert (await sb.run("head", "-c", "3", stdin=b"abc" * 1_000_000)).stdout == "abc"
    assert (await sb.run_shell("exit 4", stdin=b"x" * 5_000_000)).exit_code == 4


async def test_a_command_that_closes_a_large_stdin_goes_on(sb: Sandbox) -> None:
    # Longer than the wait for the end of a command whose input broke.
    line = "exec <&-; sleep 2.5; echo done; exit 5"
    result = await sb.run_shell(line, stdin=b"x" * 5_000_000, timeout=20)
    assert (result.exit_code, result.stdout) == (5, "done\n")


async def test_output_past_the_inline_part_is_fetched_whole(api: FakeApi, sb: Sandbox) -> None:
    api.cut_streams_after = [1_000_000, 500_000]
    line = "head -c 5000000 /dev/zero | tr '\\0' x; echo; echo end"
    result = await sb.run_shell(line, timeout=20)
    assert len(result.stdout_bytes) == 5_000_005
    assert result.stdout.endswith("x\nend\n")
    assert not result.truncated
    assert not api.cut_streams_after


async def test_bytes_that_are_not_text_are_exact(sb: Sandbox) -> None:
    result = await sb.run_shell(r"printf 'a\377\000b'; printf '\303\244' >&2")
    assert result.stdout_bytes == b"a\xff\x00b"
    assert result.stdout == "a\ufffd\0b"
    assert result.stderr == "ä"


@pytest.mark.parametrize("limit", [10, 3_000_000])
async def test_output_over_the_limit_is_truncated_and_says_so(sb: Sandbox, limit: int) -> None:
    result = await sb.run_shell("head -c 4000000 /dev/zero; echo end >&2", output_limit=limit)
    assert len(result.stdout_bytes) == limit
    assert result.stdout_total == 4_000_000
    assert result.truncated
    assert result.stdout_truncated
    assert not result.stderr_truncated
    assert result.ok


@pytest.mark.parametrize("timeout", [0.3, 31])
async def test_a_time_limit_ends_the_command_and_is_told(
    sb: Sandbox, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if timeout > 1:
        monkeypatch.setattr(_commands, "ONE_TRIP_MAX", 0.1)
        timeout = 0.3
    begin = time.monotonic()
    result = await sb.run_shell("echo before; sleep 30", timeout=timeout)
    assert time.monotonic() - begin < 5
    assert result.timed_out
    assert not result.ok
    assert result.stdout == "before\n"
    with pytest.raises(CommandFailed, match="time limit"):
        result.check()


async def test_a_platform_that_does_not_end_a_command_is_not_awaited_for_ever(
    sb: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await sb.start("sleep 30")
    with pytest.raises(RequestTimeout) as caught:
        await process.wait(timeout=0.2)
    assert caught.value.detail["exec_id"] == process.id
    await process.kill()
    assert (await process.wait(timeout=5)).signal == "SIGKILL"


async def test_what_cannot_be_run_is_refused(sb: Sandbox) -> None:
    with pytest.raises(InvalidArgument):
        await sb.run("no-such-program")


async def test_the_forms_of_a_started_command(sb: Sandbox) -> None:
    for process in (
        await sb.start("echo a b"),
        await sb.start(["echo", "a b"]),
        await sb.start(shell="echo a b"),
        await sb.start(argv=["echo", "a b"]),
    ):
        assert (await process.wait(timeout=5)).stdout == "a b\n"
    with pytest.raises(InvalidArgument):
        await sb.start()
    with pytest.raises(InvalidArgument):
        await sb.start("true", argv=["true"])


async def test_a_hundred_at_once(client: DSecClient, sb: Sandbox) -> None:
    results = await asyncio.gather(*(sb.run_shell(f"echo {n}", timeout=30) for n in range(100)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(100)]


# Processes


async def test_streams_come_as_they_are_written(sb: Sandbox) -> None:
    process = await sb.start("echo a; sleep 0.2; echo b >&2; sleep 0.2; echo c; exit 7")
    pieces = [piece async for piece in process.stream()]
    assert pieces == [("stdout", b"a\n"), ("stderr", b"b\n"), ("stdout", b"c\n")]
    assert process.exit_code == 7
    assert process.offsets == (4, 2)
    assert [piece async for piece in process.stream()] == []
    assert (await process.wait()).exit_code == 7


@pytest.mark.parametrize("how", ["attach", "follow"])
async def test_a_broken_stream_goes_on_where_it_was(api: FakeApi, sb: Sandbox, how: str) -> None:
    api.cut_streams_after = [10, 100_000, 1, 1_000_000]
    line = "for i in 1 2 3; do head -c 1000000 /dev/urandom; sleep 0.05; echo $i >&2; done"
    process = await sb.start(line)
    if how == "attach":
        got = b"".join([data async for name, data in process.stream() if name == "stdout"])
    else:
        got = b"".join([data async for data in process.stdout()])
    assert got == (await process.wait()).stdout_bytes
    assert len(got) == 3_000_000
    assert not api.cut_streams_after


async def test_a_body_that_ends_in_order_is_not_the_end_of_the_command(api: FakeApi, sb: Sandbox) -> None:
    api.cut_streams_after = [-2, -3]
    process = await sb.start("echo a; sleep 0.3; echo b; sleep 0.3; echo c")
    assert b"".join([data async for data in process.stdout()]) == b"a\nb\nc\n"
    assert not api.cut_streams_after


async def test_followers_do_not_end_before_the_command(
    api: FakeApi, sb: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_commands, "FOLLOW_QUIET", 0.1)
    process = await sb.start("echo a; sleep 0.5; echo b; echo e >&2")
    assert b"".join([data async for data in process.stdout()]) == b"a\nb\n"
    assert api.count("GET", "/stdout") > 3
    assert b"".join([data async for data in process.stderr()]) == b"e\n"
    assert b"".join([data async for data in process.stdout(2)]) == b"b\n"


async def test_a_stream_that_cannot_be_had_again_fails(api: FakeApi, sb: Sandbox) -> None:
    process = await sb.start("sleep 30")
    await sb.stop()
    with pytest.raises(Conflict):
        async for _ in process.stream():
            pass
    with pytest.raises(Conflict):
        async for _ in process.stdout():
            pass
    with pytest.raises(Conflict):
        await process.wait()


async def test_a_reader_that_is_behind_leaves_at_once(sb: Sandbox) -> None:
    process = await sb.start("head -c 50000000 /dev/zero")
    stream = process.stream()
    await anext(stream)
    await process.wait(timeout=20)
    begin = time.monotonic()
    await stream.aclose()  # type: ignore[attr-defined]
    assert time.monotonic() - begin < 1.5


async def test_a_gap_is_told(sb: Sandbox) -> None:
    process = await sb.start("head -c 1000 /dev/zero", output_limit=100)
    assert sum([len(data) async for _, data in process.stream()]) == 100
    assert [(gap.stream, gap.start, gap.end) for gap in process.gaps] == [("stdout", 100, 1000)]


async def test_stdin_is_written_in_order_and_ended(sb: Sandbox) -> None:
    process = await sb.start("cat", stdin=True)
    await asyncio.gather(*(process.write(f"{n}\n") for n in range(20)))
    await process.write(b"x" * 3_000_000)
    await process.close_stdin()
    result = await process.wait(timeout=10)
    assert result.stdout == "".join(f"{n}\n" for n in range(20)) + "x" * 3_000_000


async def test_a_write_that_may_have_arrived_is_not_repeated(api: FakeApi, sb: Sandbox) -> None:
    process = await sb.start("cat", stdin=True)
    api.faults = [Fault("PUT", "/stdin", "drop_after")]
    with pytest.raises(ConnectionFailed) as caught:
        await process.write("once\n")
    assert caught.value.maybe_sent
    await process.close_stdin()
    assert (await process.wait(timeout=5)).stdout == "once\n"


async def test_signals_reach_it_and_the_block_kills_it(sb: Sandbox) -> None:
    process = await sb.start("trap 'echo got; exit 5' INT; echo ready; while :; do sleep 0.05; done")
    async for _ in process.stdout():
        break
    await process.signal("SIGINT")
    result = await process.wait(timeout=5)
    assert (result.exit_code, result.stdout) == (5, "ready\ngot\n")
    async with await sb.start("sleep 60") as process:
        pass
    assert (await process.wait(timeout=5)).signal == "SIGKILL"


async def test_a_command_is_found_again_by_its_id(client: DSecClient, sb: Sandbox) -> None:
    process = await sb.start(["sh", "-c", "echo hello; echo world"])
    await process.wait(timeout=5)
    again = await (await client.get(sb.id)).attach(process.id, stdout_offset=6)
    assert [data async for _, data in again.stream()] == [b"world\n"]
    assert process.id in [each.id for each in await sb.execs()]
    with pytest.raises(NotFound):
        await sb.attach("ex-nothing")


# Sessions and terminals


async def test_a_session_keeps_its_state(api: FakeApi, sb: Sandbox, tmp_path: Path) -> None:
    async with await sb.session("main", cwd=str(tmp_path)) as session:
        await session.run_shell("cd /; X=5; f() { echo called; }", check=True)
        result = await session.run_shell("pwd; echo $X; f", timeout=10)
        assert result.stdout == "/\n5\ncalled\n"
        assert (await sb.run_shell("echo $X", session=session)).stdout == "5\n"
        assert [each.id for each in await sb.sessions()] == ["main"]
        assert (await session.refresh()).id == "main"
        ended = await session.run_shell("exit 9")
        assert (ended.exit_code, ended.session_ended) == (9, True)
    drawn = await sb.session()
    await drawn.close()
    with pytest.raises(NotFound):
        await drawn.close()


async def test_lines_of_a_session_that_queue_do_not_run_out_of_time(
    sb: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_commands, "GRACE", 0.2)
    async with await sb.session("q") as session:
        results = await asyncio.gather(
            session.run_shell("sleep 1.2; echo a", timeout=5),
            session.run_shell("echo b", timeout=0.2),
            session.run_shell("echo c", timeout=0.2),
        )
        assert [result.stdout for result in results] == ["a\n", "b\n", "c\n"]


async def test_a_terminal(sb: Sandbox) -> None:
    async with await sb.pty(
        rows=30, cols=100, argv=["sh", "-c", "stty size; read x; stty size; echo got $x"]
    ) as term:
        seen = b""
        async for name, data in term.stream():
            assert name == "stdout"
            seen += data
            if seen.endswith(b"30 100\r\n"):
                await term.resize(40, 120)
                await term.write("hello\n")
        assert b"40 120" in seen
        assert b"got hello" in seen
        assert term.exit_code == 0


async def test_a_shell_on_a_terminal_is_found_by_its_name(client: DSecClient, sb: Sandbox) -> None:
    first = await sb.pty(name="term")
    await first.write("X=found\n")
    second = await (await client.get(sb.id)).pty(name="term")
    assert first.id == second.id
    assert second.session_id == "term"
    await second.write("echo $X-again; exit\n")
    assert "found-again" in (await second.wait(timeout=5)).stdout
    await sb.session("plain")
    with pytest.raises(Conflict):
        await sb.pty(name="plain")
    with pytest.raises(InvalidArgument):
        await sb.pty(argv=["sh"], name="x")
