"""The command line on a real platform: what a script relies on."""

from __future__ import annotations

import json

from libdsec.sync import Sandbox
from platform_under_test import IMAGE, Platform, leftovers


def test_run_passes_streams_and_exit_code_and_leaves_nothing(shared: Platform) -> None:
    before = leftovers(shared.state)
    done = shared.dsec("run", IMAGE, "--", "sh", "-c", "echo out; echo err >&2; exit 7", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert leftovers(shared.state) == before


def test_exec_as_json_is_a_record_with_output(shared: Platform, sandbox: Sandbox) -> None:
    record = json.loads(shared.dsec("exec", sandbox.id, "--json", "--", "sh", "-c", "echo hi; exit 3", check=False).stdout)
    assert (record["exit_code"], record["stdout"]) == (3, "hi\n")


def test_tables_and_json_name_the_same_sandbox(shared: Platform, sandbox: Sandbox) -> None:
    assert sandbox.id in shared.dsec("ps").stdout
    assert sandbox.id in {each["id"] for each in json.loads(shared.dsec("ps", "--json").stdout)}
    assert json.loads(shared.dsec("inspect", sandbox.id).stdout)
    assert "created" in shared.dsec("logs", sandbox.id).stdout


def test_files_go_both_ways(shared: Platform, sandbox: Sandbox, tmp_path) -> None:  # type: ignore[no-untyped-def]
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
