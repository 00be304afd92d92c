"""`pack_diff`: what a sandbox wrote becomes a layer that others start from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from libdsec import Conflict, DSecContainerRunArgs, InvalidArgument, NotFound, PackResult
from libdsec.sync import DSecClient, Sandbox

from platform_under_test import IMAGE, Platform, platform, stored_files, tar, until

Start = Callable[..., Sandbox]

#: Prints all that can be seen of the files below some directories, and of every other file but its content.
FACTS = r"""
import hashlib, json, os, stat, sys
whole = sys.argv[1:]
seen = {}
for top, dirs, files in os.walk(b"/"):
    dirs[:] = [d for d in dirs if os.path.join(top, d) not in (b"/proc", b"/sys", b"/dev", b"/tmp", b"/run")]
    for name in dirs + files:
        path = os.path.join(top, name)
        if path in (b"/etc/hostname", b"/etc/hosts", b"/etc/resolv.conf"):
            continue  # of each sandbox, and in no layer
        at = os.lstat(path)
        facts = [at.st_mode, at.st_uid, at.st_gid, at.st_mtime_ns, at.st_rdev]
        if not stat.S_ISDIR(at.st_mode):
            facts.append(at.st_size)
        facts.append({n: os.getxattr(path, n, follow_symlinks=False).hex()
                      for n in os.listxattr(path, follow_symlinks=False)})
        if stat.S_ISLNK(at.st_mode):
            facts.append(os.readlink(path).hex())
        elif stat.S_ISREG(at.st_mode) and any(path.startswith(w.encode()) for w in whole):
            facts += [at.st_nlink, hashlib.sha256(open(path, "rb").read()).hexdigest()]
        seen[path.decode("latin-1")] = facts
print(json.dumps(seen))
"""

#: Every kind of file, and every way to hide or move what is below.
WORK = r"""
set -e
mkdir -p /work/d && cd /work
head -c 300000 /dev/urandom > large; echo small > d/small; : > empty
ln large d/linked; ln -s ../large d/link; ln -s /nowhere dangling; mkfifo pipe
truncate -s 5M sparse; printf x | dd of=sparse bs=1 seek=3000000 conv=notrunc status=none
chmod 4751 d/small; chown 1000:1000 empty; chown 65534:7 d; chmod 1777 d; touch -d @1 dangling -h
printf n > "$(printf 'name-\377')"; touch -d '1999-01-01 01:02:03.4' large
python3 -c "import os; os.setxattr('d/small', 'user.note', b'\x00kept'); os.setxattr('/work', 'user.dir', b'y')"
python3 -c "import socket; socket.socket(socket.AF_UNIX).bind('socket')"
rm /etc/issue; rm -r /etc/apt; mkdir /etc/apt; echo mine > /etc/apt/sources
mv /usr/share/doc/bash /work/moved; echo more > /work/moved/more; rm /work/moved/copyright
mv /usr/share/perl5 /usr/share/perl6; mkdir /usr/share/perl5; echo p > /usr/share/perl5/p
rm /etc/debian_version; mkdir /etc/debian_version; echo in > /etc/debian_version/in
rm -r /usr/share/bug; echo file > /usr/share/bug
chmod 700 /opt; echo x >> /etc/passwd
"""


def facts(sandbox: Sandbox, *whole: str) -> dict[str, Any]:
    sandbox.files.write("/tmp/facts.py", FACTS)
    shown = sandbox.run("python3", "/tmp/facts.py", *whole, env={"PYTHONDONTWRITEBYTECODE": "1"}, timeout=300, check=True)
    seen: dict[str, Any] = json.loads(shown.stdout)
    return seen


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {p: (one.get(p), other.get(p)) for p in one.keys() | other.keys() if one.get(p) != other.get(p)}


def assert_nothing_at_work(shared: Platform) -> None:
    assert not os.listdir(shared.state / "layers/work")
    assert not [name for name in os.listdir(shared.state / "rw") if "snapshot" in name]


def test_a_restored_sandbox_is_the_one_that_was_packed(shared: Platform, client: DSecClient, start: Start) -> None:
    first = start()
    first.run_shell(WORK, check=True)
    whole = ("/work", "/etc", "/usr/share/perl", "/usr/share/bug")
    before = facts(first, *whole)
    packed = first.pack_diff("restored", scrub=False)
    assert (packed.layer.kind, packed.name, packed.layer.source) == ("workspace", "restored", f"sandbox {first.id}")
    second = start(workspace=packed.name)
    after = facts(second, *whole)
    assert len(before) > 5000
    assert differences(before, after) == {}
    assert second.run_shell("ls /etc/apt /usr/share/perl5; cat /etc/apt/sources").stdout.split() == [
        "/etc/apt:", "sources", "/usr/share/perl5:", "p", "mine",
    ]
    assert [(layer.kind, layer.name) for layer in second.refresh().layers] == [("base", IMAGE), ("workspace", "restored")]
    # Who changed nothing packs nothing but what the start itself leaves.
    assert second.pack_diff("again", scrub=False).new_bytes == 0
    third = start(workspace="again")
    assert differences(before, facts(third, *whole)) == {}
    assert_nothing_at_work(shared)


def test_a_chain_of_packs_is_one_layer_that_names_its_parents(shared: Platform, client: DSecClient, start: Start) -> None:
    imported = client.workspaces.import_("chain", tar({"work/a": "a", "work/b": "b"}))
    first = start(workspace="chain", task_id="job/7")
    first.run_shell("cd /work; rm a /etc/issue; echo c > c; mkdir d; echo d > d/d", check=True)
    one = first.pack_diff("chain:1")
    second = start(workspace="chain:1")
    second.run_shell("cd /work; echo B > b; rm c; rm -r d; mkdir d; echo e > d/e", check=True)
    two = second.pack_diff("chain:2")
    third = start(workspace="chain:2")
    seen = third.run_shell("cd /work; ls -R; cat b d/e; test -e /etc/issue || echo gone")
    assert seen.stdout.split() == [".:", "b", "d", "./d:", "e", "B", "e", "gone"]
    assert [layer.name for layer in third.refresh().layers] == [IMAGE, "chain:2"]
    base = client.images.get(IMAGE).digest
    inspected = json.loads(shared.dsec("layer", "inspect", "workspace", "chain:1", "--json").stdout)
    assert inspected["parents"] == [base, imported.digest]
    manifest = json.loads((shared.state / "store/layers" / one.layer.digest).read_text())
    assert [parent["role"] for parent in manifest["parents"]] == ["below", "merged"]
    assert manifest["facts"]["source"] == {"from": "sandbox", "id": first.id, "task": "job/7", "project": "root"}
    manifest = json.loads((shared.state / "store/layers" / two.layer.digest).read_text())
    assert manifest["parents"][1] == {"layer": one.layer.digest, "role": "merged"}


def test_sandboxes_branch_at_any_step(start: Start) -> None:
    sandbox = start()
    names = []
    for step in range(3):
        sandbox.run_shell(f"echo {step} >> /work.txt; mkdir /step-{step}", check=True)
        names.append(sandbox.pack_diff(f"run-1/step-{step}", kind="snapshot").name)
    assert names[1] == "snapshot/run-1/step-1"
    branches = [start(workspace=name) for name in names]
    for step, branch in enumerate(branches):
        seen = branch.run_shell("cat /work.txt; ls -d /step-*").stdout.split()
        assert seen == [*map(str, range(step + 1)), *(f"/step-{n}" for n in range(step + 1))]
    branches[0].run_shell("echo other >> /work.txt", check=True)
    assert branches[0].run_shell("cat /work.txt").stdout == "0\nother\n"
    assert branches[1].run_shell("cat /work.txt").stdout == "0\n1\n"
    kinds = [(layer.kind, layer.name) for layer in branches[2].refresh().layers]
    assert kinds == [("base", IMAGE), ("snapshot", "run-1/step-2")]


def test_packing_again_stores_what_changed(start: Start) -> None:
    sandbox = start()
    sandbox.run_shell("mkdir /work; cd /work; for n in $(seq 60); do head -c 20000 /dev/urandom > $n; done", check=True)
    first = sandbox.pack_diff("grows")
    assert 60 * 20_000 <= first.stored_bytes <= 60 * 20_480 + 200_000
    again = sandbox.pack_diff("grows")
    assert (again.new_bytes, again.layer.digest) == (0, first.layer.digest)
    sandbox.run_shell("cd /work; echo more >> 7; rm 8; mv 9 nine; touch 10; cp /usr/bin/python3 here", check=True)
    changed = sandbox.pack_diff("grows")
    # The changed file alone: what was copied is in the image, what was moved or touched is known by its content.
    assert changed.new_bytes == 20_480
    assert changed.stored_bytes < 200_000
    restored = start(workspace="grows")
    same = "cd /work; sha256sum * | sha256sum; ls | wc -l"
    assert restored.run_shell(same).stdout == sandbox.run_shell(same).stdout
    # Of a restored one, too, what it was restored from is known.
    restored.run_shell("cd /work; cp 11 eleven; echo x > x", check=True)
    assert restored.pack_diff("grows:2").new_bytes == 4096


def test_residue_is_left_out_and_told(start: Start) -> None:
    sandbox = start()
    sandbox.run_shell(
        "mkdir -p /work/pkg/__pycache__ /work/.pytest_cache /root/.ssh /root/.cache/pip /var/log/app /solution/x /work/keep;"
        "cd /work; echo code > a.py; head -c 5000 /dev/zero > pkg/__pycache__/a.pyc; echo x > .pytest_cache/x;"
        "echo ls > /root/.bash_history; echo key > /root/.ssh/id_rsa; echo w > /root/.cache/pip/w; echo l > /var/log/app/l;"
        "echo deb > /var/lib/apt/lists/x; echo 42 > /solution/x/answer; echo t > /var/tmp/t; rm -f /etc/issue",
        check=True,
    )
    packed = sandbox.pack_diff("clean", answers=["/solution"])
    told = {left.rule: left for left in packed.scrubbed}
    assert set(told) >= {"caches/python", "caches/pip", "caches/apt", "history", "keys", "logs", "temp", "answers"}
    assert (told["caches/python"].files, told["caches/python"].bytes) == (4, 5002)
    assert told["caches/python"].paths == ("/work/.pytest_cache", "/work/pkg/__pycache__")
    assert told["keys"].paths == ("/root/.ssh/id_rsa",)
    assert (told["answers"].files, told["answers"].paths) == (3, ("/solution",))
    restored = start(workspace="clean")
    seen = restored.run_shell(
        "ls -A /work /work/pkg /root/.ssh; ls -d /solution /root/.bash_history /etc/issue 2>/dev/null; ls -d /var/log/app"
    )
    assert seen.stdout.split() == ["/root/.ssh:", "/work:", "a.py", "keep", "pkg", "/work/pkg:", "/var/log/app"]
    some = sandbox.pack_diff("some", scrub=["caches", "history"])
    assert {left.rule.split("/")[0] for left in some.scrubbed} == {"caches", "history"}
    assert sandbox.pack_diff("all", scrub=False).scrubbed == ()
    # What a workspace brought is looked at as well.
    dirty = start(workspace="all")
    told = {left.rule: left for left in dirty.pack_diff("clean:2", answers=["/solution"]).scrubbed}
    assert (told["keys"].paths, told["answers"].paths) == (("/root/.ssh/id_rsa",), ("/solution",))
    assert start(workspace="clean:2").run_shell("ls -d /solution /root/.ssh/*").stdout == ""


def test_what_a_rule_denies_fails_and_leaves_nothing(shared: Platform, client: DSecClient, start: Start) -> None:
    sandbox = start()
    sandbox.run_shell("mkdir -p /work/certs; cd /work; head -c 100000 /dev/urandom > data; echo k > certs/a.pem", check=True)
    before = stored_files(shared)
    with pytest.raises(Conflict, match=r"/work/certs/a\.pem.*\*\.pem") as refused:
        sandbox.pack_diff("denied", deny=["*.pem"])
    assert refused.value.detail == {"rule": "*.pem", "path": "/work/certs/a.pem"}
    assert stored_files(shared) == before
    assert not client.workspaces.exists("denied")
    assert_nothing_at_work(shared)
    # What is left out is not denied.
    sandbox.pack_diff("denied", deny=["*.pem"], exclude=["certs/"])
    # What comes from below is.
    client.workspaces.import_("with-pem", tar({"work/b/pem": "x"}))
    from_below = start(workspace="with-pem")
    with pytest.raises(Conflict, match=r"/work/b/pem"):
        from_below.pack_diff("denied:2", deny=["/work/b/*"])


def test_what_is_excluded_is_as_the_layers_below_have_it(start: Start) -> None:
    sandbox = start()
    sandbox.run_shell("echo changed > /etc/issue; rm /etc/debian_version; mkdir /data; echo d > /data/d; echo w > /w", check=True)
    packed = sandbox.pack_diff("excluded", exclude=["/etc/**", "/data/"])
    told = {left.rule: left for left in packed.excluded}
    assert told["/data/"].paths == ("/data",) and "/etc/issue" in told["/etc/**"].paths
    seen = start(workspace="excluded").run_shell("cat /w; ls -d /data; grep -c Debian /etc/issue; ls /etc/debian_version")
    assert seen.stdout.split() == ["w", "1", "/etc/debian_version"]


def test_a_sandbox_is_packed_while_it_writes(start: Start) -> None:
    sandbox = start()
    writer = sandbox.start(
        argv=["python3", "-c", "import os\nn = 0\nos.makedirs('/work')\nwhile True:\n"
              "    n += 1\n    for name in 'ab':\n        with open(f'/work/{name}.new', 'w') as out:\n"
              "            out.write(f'{n}\\n' * 10000)\n        os.rename(f'/work/{name}.new', f'/work/{name}')\n"]
    )
    count = lambda box: box.run_shell("for f in a b; do sort -u /work/$f; wc -l < /work/$f; done").stdout.split()  # noqa: E731
    until(lambda: sandbox.run_shell("ls /work/b").ok, "the writer has begun")
    for kind in ("workspace", "snapshot"):
        packed = sandbox.pack_diff(f"writing-{kind}", kind=kind)
        a, lines_a, b, lines_b = count(start(workspace=packed.name))
        assert (lines_a, lines_b) == ("10000", "10000")
        assert int(a) - int(b) in (0, 1)
    seen = int(count(sandbox)[0])
    until(lambda: int(count(sandbox)[0]) > seen + 5, "the writer goes on")
    writer.kill()


#: Writes a number into many files in place, one file after the other, then the next number.
NUMBERS = """
import os
os.makedirs("/work/a/b")
for n in range(100_000_000):
    for i in range(600):
        with open(f"/work/{'a/b/' if i % 2 else ''}{i:03}", "r+b" if n else "wb", buffering=0) as out:
            assert out.write(b"%08d" % n * 2500) == 20_000
"""
#: The number in each of those files, in order.
SEEN = """
for i in range(600):
    content = open(f"/work/{'a/b/' if i % 2 else ''}{i:03}").read()
    assert content == content[:8] * 2500, i
    print(int(content[:8]))
"""


def stands_still(own: Platform, most_ms: int) -> None:
    """Starts the edge again, whose sandboxes stand still for a pack for so long at most."""
    edge = own.state / "edge.toml"
    edge.write_text(edge.read_text().split("[packs]")[0] + f"[packs]\nstill_ms_max = {most_ms}\n")
    own.kill_edge()


def phases(packed: PackResult) -> set[str]:
    """How the pack went, of what only one of two ways has."""
    return {phase.name for phase in packed.phases} & {"read", "snapshot"}


def test_a_pack_is_of_one_moment_in_place_and_of_a_snapshot() -> None:
    args = DSecContainerRunArgs(container_image=IMAGE)
    with platform() as own, own.client().run_container(args) as sandbox:
        client = own.client()
        writer = sandbox.start(argv=["python3", "-c", NUMBERS])
        until(lambda: sandbox.run_shell("cat /work/a/b/599").stdout > "00000001", "the writer has begun")
        for way, most_ms in (("read", 10_000), ("snapshot", 0)):
            stands_still(own, most_ms)
            for number in range(8):
                assert phases(sandbox.pack_diff(f"{way}-{number}")) == {way}
            assert phases(sandbox.pack_diff("going-on", quiesce="none")) == {"snapshot"}
            for number in range(8):
                with client.run_container(replace(args, workspace=f"{way}-{number}")) as packed:
                    numbers = [int(line) for line in packed.run("python3", "-c", SEEN, check=True).stdout.split()]
                assert numbers == sorted(numbers, reverse=True) and numbers[0] - numbers[-1] <= 1
        assert writer.refresh().state == "running"
        writer.kill()
        assert_nothing_at_work(own)


#: Writes into a mapped file without a call that the kernel could date, whenever a file on memory says what.
MAPPED = """
import mmap, os, time
with open("/work/mapped", "w+b") as file:
    file.truncate(8192)
    memory = mmap.mmap(file.fileno(), 8192)
said = ""
while True:
    try:
        now = open("/tmp/say").read()
    except OSError:
        now = ""
    if now != said:
        memory[:5] = now.encode()
        said = now
        open("/tmp/said", "w").write(now)
    time.sleep(0.02)
"""


def test_what_a_process_has_mapped_is_not_taken_for_unchanged(start: Start) -> None:
    sandbox = start()
    sandbox.run_shell("mkdir /work", check=True)
    process = sandbox.start(argv=["python3", "-c", MAPPED])
    for word in ("first", "again", "third"):
        sandbox.run_shell(f"printf {word} > /tmp/say", check=True)
        until(lambda: sandbox.run_shell("cat /tmp/said").stdout == word, "it is written")  # noqa: B023
        # Later than any doubt about the file's times.
        sandbox.run_shell("sleep 0.1; touch /work/later", check=True)
        packed = sandbox.pack_diff(f"mapped-{word}")
        assert phases(packed) == {"snapshot"}
        assert start(workspace=packed.name).run_shell("head -c 5 /work/mapped").stdout == word
    process.kill()


def test_a_pack_is_refused_while_a_file_is_open_for_writing(shared: Platform, client: DSecClient, start: Start) -> None:
    sandbox = start()
    sandbox.run_shell("mkdir /work; echo 1 > /work/read", check=True)
    for code, path in (
        ("import time; f = open('/work/written', 'w'); r = open('/work/read'); open('/tmp/up', 'w'); time.sleep(600)", "/work/written"),
        ("import mmap, os, time; f = open('/work/mapped', 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096);"
         "f.close(); open('/tmp/up', 'w'); time.sleep(600)", "/work/mapped"),
    ):
        process = sandbox.start(argv=["python3", "-c", code])
        until(lambda: sandbox.run_shell("ls /tmp/up && rm /tmp/up").ok, "the file is open")
        with pytest.raises(Conflict, match=f"{path} by python3") as refused:
            sandbox.pack_diff("refused", quiesce="refuse")
        assert refused.value.detail["writing"] == [{"command": "python3", "path": path}]
        assert sandbox.run_shell("echo goes on").stdout == "goes on\n"
        assert not client.workspaces.exists("refused")
        sandbox.pack_diff("not-refused", quiesce="none")
        process.kill()
        process.wait()
    # A file on memory is none of the layer's.
    process = sandbox.start("exec 3> /tmp/memory; sleep 600")
    until(lambda: sandbox.run_shell("ls /tmp/memory").ok, "the file is open")
    sandbox.pack_diff("refused", quiesce="refuse")
    process.kill()
    assert_nothing_at_work(shared)


def test_toolkits_keep_what_is_theirs_under_a_workspace_and_not_under_a_snapshot(client: DSecClient, start: Start) -> None:
    client.toolkits.import_("kit", tar({"opt/kit/conf": "kit", "opt/kit/bin/run": "run", "opt/kit/old": "old"}))
    client.workspaces.import_("ws", tar({"work/a": "a", "opt/kit/conf": "below"}))
    args = {"toolkits": ["kit"]}
    sandbox = start(workspace="ws", **args)
    sandbox.run_shell(
        "cd /opt/kit; echo mine > conf; rm old; echo new > cache; mv bin /work/moved; echo more > /work/moved/more", check=True
    )
    state = "cd /opt/kit; cat conf cache; ls; ls /work/moved; cat /work/moved/run /work/a"
    now = sandbox.run_shell(state).stdout
    as_workspace = sandbox.pack_diff("over-kit")
    under = as_workspace.under_toolkits
    assert under is not None and set(under.paths) == {"/opt/kit/conf", "/opt/kit/old", "/opt/kit/bin"}
    restored = start(workspace="over-kit", **args)
    assert restored.run_shell("cat /opt/kit/conf; ls /opt/kit; cat /work/moved/run").stdout == "kitbin\ncache\nconf\nold\nrun"
    assert start(workspace="over-kit").run_shell(state).stdout == now
    as_snapshot = sandbox.pack_diff("over-kit", kind="snapshot")
    assert as_snapshot.under_toolkits is None
    for more in ({}, args):
        branch = start(workspace="snapshot/over-kit", **more)
        assert branch.run_shell(state).stdout == now
    # What was written alone, over the same workspace.
    sandbox.pack_diff("over-kit", kind="toolkit")
    assert start(workspace="ws", toolkits=["kit", "over-kit"]).run_shell(state).stdout == now
    # And an image of all of it.
    image = sandbox.pack_diff("whole", kind="base")
    assert image.layer.env == client.images.get(IMAGE).env
    with client.run_container(DSecContainerRunArgs(container_image="whole")) as alone:
        assert alone.run_shell(state).stdout == now


def test_ids_links_and_capabilities_of_the_layer_are_those_inside(start: Start) -> None:
    sandbox = start()
    sandbox.run_shell(
        "mkdir /work; cd /work; cp /usr/bin/python3 .; ln -s /etc/shadow shadow; ln -s ../../../../../../etc up; echo o > own;"
        "chown -h 65535:65535 own; ln -s /proc/1/root root", check=True,
    )
    capability = "import os,struct; os.setxattr('/work/python3','security.capability',struct.pack('<IIIII',0x02000001,1<<10,0,0,0))"
    given = sandbox.run("python3", "-c", capability)
    sandbox.pack_diff("ids")
    restored = start(workspace="ids")
    seen = restored.run_shell("cd /work; readlink shadow up root; stat -c %u:%g own; ls -d python3").stdout.split()
    assert seen == ["/etc/shadow", "../../../../../../etc", "/proc/1/root", "65535:65535", "python3"]
    shown = "import os; print(os.getxattr('/work/python3','security.capability').hex() if os.listxattr('/work/python3') else None)"
    assert restored.run("python3", "-c", shown).stdout == sandbox.run("python3", "-c", shown).stdout
    assert given.ok, given.stderr


def test_what_cannot_be_packed_is_refused_by_name(shared: Platform, client: DSecClient, start: Start) -> None:
    sandbox = start()
    sandbox.run_shell("echo 1 > /one", check=True)
    sandbox.pack_diff("named@1")
    # The same layer again is no change.
    sandbox.pack_diff("named@1")
    sandbox.run_shell("echo 2 > /one", check=True)
    with pytest.raises(Conflict, match="named@1"):
        sandbox.pack_diff("named@1")
    assert start(workspace="named@1").run_shell("cat /one").stdout == "1\n"
    for wrong, found in (
        ({"kind": "image"}, "\"image\" is no kind of layer"),
        ({"exclude": ["a/../b"]}, r"exclude\[0\]"),
        ({"deny": ["ok", "["]}, r"deny\[1\]"),
        ({"scrub": ["everything"]}, "caches/python"),
        ({"quiesce": "wait"}, "quiesce|variant"),
    ):
        with pytest.raises(InvalidArgument, match=found):
            sandbox.pack_diff("named", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="Bad Name"):
        sandbox.pack_diff("Bad Name")
    with pytest.raises(NotFound, match="snapshot"):
        client.run_container(DSecContainerRunArgs(container_image=IMAGE, workspace="snapshot/none"))
    sandbox.pack_diff("only-snapshot", kind="snapshot")
    with pytest.raises(NotFound) as missing:
        client.run_container(DSecContainerRunArgs(container_image=IMAGE, workspace="only-snapshot"))
    assert "snapshot/only-snapshot" in missing.value.hint
    sandbox.stop()
    with pytest.raises(Conflict, match="stopped"):
        sandbox.pack_diff("named")
    assert_nothing_at_work(shared)


def test_the_command_line_packs(shared: Platform, start: Start) -> None:
    sandbox = start()
    sandbox.run_shell("mkdir -p /w/__pycache__; echo 1 > /w/__pycache__/x; echo 2 > /w/y", check=True)
    told = shared.dsec("pack", sandbox.id, "by-hand", "--exclude", "/z").stdout
    assert "workspace by-hand: " in told and "scrubbed caches/python: 2 files" in told and "/w/__pycache__" in told
    shown = json.loads(shared.dsec("pack", sandbox.id, "by-hand", "-k", "snapshot", "--no-scrub", "--json").stdout)
    assert (shown["layer"]["kind"], shown["scrubbed"]) == ("snapshot", [])
    seen = shared.dsec("run", IMAGE, "--workspace", "snapshot/by-hand", "--", "cat", "/w/y", "/w/__pycache__/x")
    assert seen.stdout == "2\n1\n"
    refused = shared.dsec("pack", sandbox.id, "by-hand", "--deny", "/w/y", check=False)
    assert refused.returncode == 1 and "/w/y" in refused.stderr


def test_packs_go_on_from_each_other_over_a_restart_and_after_a_removal() -> None:
    with platform() as own:
        client = own.client()
        with client.run_container(DSecContainerRunArgs(container_image=IMAGE)) as sandbox:
            sandbox.run_shell("mkdir /work; cd /work; for n in $(seq 40); do head -c 9000 /dev/urandom > $n; done", check=True)
            first = sandbox.pack_diff("kept")
            own.kill_edge()
            sandbox.run_shell("echo more > /work/more", check=True)
            assert sandbox.pack_diff("kept").new_bytes == 4096
            # A pack whose layer was taken away stores all of it again.
            client.workspaces.remove("kept")
            (own.state / "store/layers" / first.layer.digest).unlink()
            for manifest in (own.state / "store/layers").iterdir():
                if '"from":"sandbox"' in manifest.read_text():
                    manifest.unlink()
            anew = sandbox.pack_diff("anew")
            assert anew.new_bytes >= 40 * 9000
            with client.run_container(DSecContainerRunArgs(container_image=IMAGE, workspace="anew")) as restored:
                assert restored.run_shell("ls /work | wc -l").stdout == "41\n"
        assert not list(Path(own.state / "sandboxes").iterdir())
