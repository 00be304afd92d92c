"""The command line on a real platform: what a script relies on."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from pathlib import Path

from libdsec.sync import Sandbox
from platform_under_test import BIN, IMAGE, Platform, leftovers, nothing_new


def test_run_passes_streams_and_exit_code_and_leaves_nothing(shared: Platform) -> None:
    before = leftovers(shared.state)
    done = shared.dsec("run", IMAGE, "--", "sh", "-c", "echo out; echo err >&2; exit 7", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    nothing_new(before, shared.state)


def test_exec_as_json_is_a_record_with_output(shared: Platform, sandbox: Sandbox) -> None:
    record = json.loads(shared.dsec("exec", sandbox.id, "--json", "--", "sh", "-c", "echo hi; exit 3", check=False).stdout)
    assert (record["exit_code"], record["stdout"]) == (3, "hi\n")


def test_tables_and_json_name_the_same_sandbox(shared: Platform, sandbox: Sandbox) -> None:
    assert sandbox.id in shared.dsec("ps").stdout
    assert sandbox.id in {each["id"] for each in json.loads(shared.dsec("ps", "--json").stdout)}
    assert json.loads(shared.dsec("inspect", sandbox.id).stdout)
    assert "created" in shared.dsec("logs", sandbox.id).stdout


def test_files_go_both_ways(shared: Platform, sandbox: Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep/file").write_bytes(bytes(range(256)) * 1000)
    shared.dsec("cp", str(tree), f"{sandbox.id}:/root/tree")
    shared.dsec("cp", f"{sandbox.id}:/root/tree", str(tmp_path / "back"))
    assert (tmp_path / "back/deep/file").read_bytes() == (tree / "deep/file").read_bytes()


def test_a_mistyped_image_says_what_to_do(shared: Platform) -> None:
    done = shared.dsec("run", "bsae", "--", "true", check=False)
    assert done.returncode == 125
    assert "bsae" in done.stderr and "hint:" in done.stderr


def test_input_that_nobody_reads_takes_nothing_from_the_output(shared: Platform, sandbox: Sandbox) -> None:
    # The command closes its input, or leaves it, while megabytes of it are on their way.
    for line in ("echo out; exit 6", "exec <&-; echo out; exit 6", "head -c 3 >/dev/null; echo out; exit 6"):
        for _ in range(5):
            done = shared.dsec("exec", sandbox.id, "-i", "--", "sh", "-c", line, check=False, input="x" * (4 << 20))
            assert (done.returncode, done.stdout) == (6, "out\n"), (line, done.stderr)


def test_input_arrives_whole(shared: Platform, sandbox: Sandbox) -> None:
    text = "".join(f"{n}\n" for n in range(500_000))
    assert shared.dsec("exec", sandbox.id, "-i", "--", "cat", input=text).stdout == text


def test_output_above_the_nodes_default_comes_whole(shared: Platform, sandbox: Sandbox) -> None:
    line = "head -c 80M /dev/zero | tr '\\0' x"
    assert len(shared.dsec("exec", sandbox.id, "--", "sh", "-c", line).stdout) == 80 << 20
    cut = shared.dsec("exec", sandbox.id, "--output-limit", "1m", "--", "sh", "-c", line)
    assert len(cut.stdout) == 1 << 20 and "not all of it was kept" in cut.stderr


def test_json_has_more_output_than_one_answer_carries(shared: Platform, sandbox: Sandbox) -> None:
    line = "head -c 20M /dev/zero | tr '\\0' x"
    record = json.loads(shared.dsec("exec", sandbox.id, "--json", "--", "sh", "-c", line).stdout)
    assert len(record["stdout"]) == record["stdout_bytes"] == 20 << 20


def test_exit_codes_are_those_of_docker(shared: Platform, sandbox: Sandbox) -> None:
    def code(*command: str) -> int:
        return shared.dsec("exec", sandbox.id, "--", *command, check=False).returncode

    assert code("no-such-program") == 127
    assert code("/no/such/program") == 127
    assert code("/etc/passwd") == 126
    assert code("/etc") == 126
    assert code("sh", "-c", "exit 126") == 126
    assert shared.dsec("exec", sandbox.id, "--nonsense", check=False).returncode == 125
    assert shared.dsec("exec", "sb-n1-none", "--", "true", check=False).returncode == 125
    failed = shared.dsec("exec", sandbox.id, "--json", "--", "no-such-program", check=False)
    assert json.loads(failed.stderr)["detail"]["reason"] == "program_not_found"


def test_a_command_in_the_background(shared: Platform, sandbox: Sandbox) -> None:
    line = "echo one; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo two; exit 4"
    exec_id = shared.dsec("exec", sandbox.id, "--detach", "--", "sh", "-c", line).stdout.strip()
    assert exec_id in shared.dsec("execs", sandbox.id, "--running", "--quiet").stdout.split()
    shared.dsec("exec", sandbox.id, "--", "touch", "/tmp/go")
    done = shared.dsec("attach", sandbox.id, exec_id, check=False)
    assert (done.returncode, done.stdout) == (4, "one\ntwo\n")
    reader = shared.dsec("exec", sandbox.id, "--detach", "-i", "--", "cat").stdout.strip()
    assert shared.dsec("attach", sandbox.id, reader, "-i", input="typed").stdout == "typed"
    endless = shared.dsec("exec", sandbox.id, "--detach", "--", "sleep", "1000").stdout.strip()
    shared.dsec("kill", sandbox.id, endless)
    assert shared.dsec("attach", sandbox.id, endless, check=False).returncode == 137


def test_sessions_are_listed_closed_and_their_end_is_told(shared: Platform, sandbox: Sandbox) -> None:
    shared.dsec("exec", sandbox.id, "--session", "build", "--", "cd /tmp && X=1")
    assert shared.dsec("exec", sandbox.id, "--session", "build", "--", "echo $PWD $X").stdout == "/tmp 1\n"
    assert [each["id"] for each in json.loads(shared.dsec("session", "ls", sandbox.id, "--json").stdout)] == ["build"]
    ended = shared.dsec("exec", sandbox.id, "--session", "build", "--", "exit 3", check=False)
    assert ended.returncode == 3 and "the session build has ended" in ended.stderr
    shared.dsec("exec", sandbox.id, "--session", "other", "--", "true")
    assert shared.dsec("session", "close", sandbox.id, "other").stdout == "other\n"
    assert json.loads(shared.dsec("session", "ls", sandbox.id, "--json").stdout) == []


def test_a_port_is_reached_on_this_machine(shared: Platform, sandbox: Sandbox) -> None:
    server = "import socket; s = socket.create_server(('127.0.0.1', 5000)); c, _ = s.accept(); d = b''\n" \
             "while b := c.recv(9): d += b\n" \
             "c.sendall(b'got ' + d)"
    shared.dsec("exec", sandbox.id, "--detach", "--", "python3", "-c", server)
    sandbox.run_shell("until grep -q ':1388 ' /proc/net/tcp; do sleep 0.05; done", timeout=20)
    command = [str(BIN / "dsec"), "port-forward", sandbox.id, "0:5000"]
    with subprocess.Popen(command, env=shared.env, stdout=subprocess.PIPE, text=True) as forward:
        assert forward.stdout is not None
        host, port = forward.stdout.readline().split(" ")[0].rsplit(":", 1)
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port)), timeout=20) as stream:
            stream.sendall(b"question")
            # The end of one side leaves the other.
            stream.shutdown(socket.SHUT_WR)
            assert stream.makefile("rb").read() == b"got question"
        forward.send_signal(signal.SIGINT)
        assert forward.wait(20) == 130


def test_a_directory_lands_whole_and_a_second_time_inside(shared: Platform, sandbox: Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_text("1")
    for _ in range(3):
        shared.dsec("cp", str(tree), f"{sandbox.id}:/root/copy")
    found = sandbox.run_shell("cd /root && find copy .*.part-* | sort").stdout.split()
    assert found == ["copy", "copy/file", "copy/tree", "copy/tree/file"]
    shared.dsec("cp", f"{sandbox.id}:/root/copy", str(tmp_path / "back"))
    assert (tmp_path / "back/tree/file").read_text() == "1"
    assert [each.name for each in tmp_path.iterdir() if ".part-" in each.name] == []
