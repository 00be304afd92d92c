"""The unit in `packaging` under a systemd that is the first process of a machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from platform_under_test import BIN, PATIENCE, ROOT, leftovers, tar, until  # noqa: E402

#: Run as a part of `-m kernel` too.
pytestmark = pytest.mark.kernel

UNIT = ROOT / "packaging/systemd/dsec.service"
#: What the first process of a machine finds: its own part of the cgroups, and empty places for what does not stay.
FIRST = """
set -e
echo 0 > /sys/fs/cgroup/machine/cgroup.procs
exec unshare --cgroup sh -ec '
  umount /sys/fs/cgroup
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
  mount -t tmpfs tmpfs /run
  mount --bind /dev/null /dev/console
  exec env container=testbed /lib/systemd/systemd --unit=basic.target --show-status=no'
"""


class Machine:
    """A machine that systemd has booted."""

    def __init__(self, pid: int) -> None:
        self._inside = ["nsenter", "--target", str(pid), "--mount", "--pid", "--cgroup", "--uts", "--ipc", "--"]

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PATH": f"/usr/local/bin:{os.environ['PATH']}", "DSEC_CONFIG": "/etc/dsec/client.toml"}
        limit = 120 * PATIENCE
        done = subprocess.run([*self._inside, *command], env=env, capture_output=True, text=True, timeout=limit, check=False)
        if check and done.returncode != 0:
            log = subprocess.run([*self._inside, "journalctl", "-n", "40"], capture_output=True, text=True, check=False).stdout
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}\n{log}")
        return done

    def is_up(self) -> bool:
        return self.run("systemctl", "is-system-running", check=False).stdout.strip() in ("running", "degraded")

    def state(self) -> str:
        return self.run("systemctl", "is-active", "dsec", check=False).stdout.strip()

    def main_pid(self) -> str:
        return self.run("systemctl", "show", "--property=MainPID", "--value", "dsec").stdout.strip()


@contextmanager
def machine() -> Iterator[Machine]:
    cgroups = Path("/sys/fs/cgroup")
    (cgroups / "cgroup.subtree_control").write_text("+cpu +memory +pids")
    (cgroups / "machine").mkdir()
    new = ["unshare", "--pid", "--mount", "--uts", "--ipc", "--propagation", "private", "--mount-proc", "--fork", "--kill-child"]
    holder = subprocess.Popen([*new, "sh", "-c", FIRST], stdin=subprocess.DEVNULL)
    try:
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        made = Machine(int(until(lambda: children.read_text().strip(), "the first process")))
        until(made.is_up, "systemd on the machine", 60)
        try:
            yield made
        except BaseException:
            print(made.run("systemctl", "status", "--no-pager", "dsec", check=False).stdout)
            print(made.run("journalctl", "--no-pager", "-n", "60", check=False).stdout)
            raise
    finally:
        holder.kill()
        holder.wait()
        for group in sorted(cgroups.glob("machine/**/"), reverse=True):
            until(lambda group=group: "populated 0" in (group / "cgroup.events").read_text(), f"the end of {group}")
            group.rmdir()


@pytest.fixture
def programs() -> Iterator[None]:
    """The programs and the unit where they belong."""
    installed = [Path(shutil.copy(program, "/usr/local/bin")) for program in BIN.iterdir()]
    installed.append(Path(shutil.copy(UNIT, "/etc/systemd/system")))
    yield
    for path in installed:
        path.unlink()
    shutil.rmtree("/etc/dsec", ignore_errors=True)
    shutil.rmtree("/var/lib/dsec", ignore_errors=True)


def test_the_service_starts_serves_comes_back_and_leaves_nothing(programs: None, tmp_path: Path) -> None:
    image = tmp_path / "image.tar"
    image.write_bytes(tar({"bin/sh": Path("/bin/busybox").read_bytes()}))
    before = leftovers()
    with machine() as host:
        host.run("systemd-analyze", "verify", f"/etc/systemd/system/{UNIT.name}")
        # The root has no room for the writable layers.
        host.run("mkdir", "-p", "/var/lib/dsec", str(tmp_path / "state"))
        host.run("mount", "--bind", str(tmp_path / "state"), "/var/lib/dsec")
        host.run("systemctl", "enable", "dsec")
        host.run("systemctl", "start", "dsec")
        until(lambda: host.run("dsec", "status", check=False).returncode == 0, "the platform", 30)
        host.run("dsec", "image", "import", "tools", str(image))
        sandbox = host.run("dsec", "create", "tools", "--memory", "64m").stdout.strip()
        assert host.run("dsec", "exec", sandbox, "--", "sh", "-c", "echo here > /kept; echo ran").stdout == "ran\n"
        # The supervisor killed, it comes back, and what ran runs.
        old = host.main_pid()
        host.run("kill", "-9", old)
        until(lambda: host.state() == "active" and host.main_pid() not in ("0", old), "the service again", 60)
        until(lambda: host.run("dsec", "status", check=False).returncode == 0, "the platform again", 60)
        assert host.run("dsec", "exec", sandbox, "--", "sh", "-c", "read line < /kept; echo $line").stdout == "here\n"
        host.run("systemctl", "stop", "dsec")
        assert host.state() == "inactive"
        assert not list(Path("/sys/fs/cgroup/machine").glob("dsec-*")), "a cgroup is left"
        # Refused while anything is mounted below it, or open in it.
        host.run("umount", "/var/lib/dsec")
        assert host.run("pgrep", "-a", "dsec", check=False).stdout == "", "a process is left"
    assert leftovers() == before
