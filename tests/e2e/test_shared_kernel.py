"""What sandboxes of one kernel have in common: nothing that one can use up for another, see of it, or signal it by."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from libdsec import DSecContainerRunArgs
from libdsec.errors import DSecError
from libdsec.sync import DSecClient, Sandbox
from platform_under_test import PATIENCE, Platform, free_address, leftovers, nothing_new, until

#: What of `/proc` a sandbox may read: itself, what its kernel is, and load that programs cannot do without.
OPEN_IN_PROC = {
    *("consoles", "cpuinfo", "crypto", "devices", "dma", "execdomains", "fb", "filesystems", "loadavg", "meminfo"),
    *("misc", "mounts", "net", "self", "stat", "sys", "sysvipc", "thread-self", "tty", "uptime", "version"),
}


def test_nothing_in_proc_tells_of_the_host_but_what_must(sandbox: Sandbox) -> None:
    script = """
import os
for name in sorted(os.listdir("/proc")):
    if name.isdigit():
        continue
    path = "/proc/" + name
    try:
        content = os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
    except OSError:
        continue
    if content:
        print(name)
"""
    told = sandbox.run("python3", "-c", script, check=True).stdout.split()
    assert set(told) <= OPEN_IN_PROC, set(told) - OPEN_IN_PROC


@pytest.mark.parametrize("name", ["proc", "dev", "tmp"])
def test_an_image_that_leads_a_mount_elsewhere_is_refused(
    shared: Platform, client: DSecClient, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "image.tar"
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo(name)
        link.type, link.linkname = tarfile.SYMTYPE, "etc"
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("etc/motd"), io.BytesIO())
    shared.dsec("image", "import", f"link-{name}", str(path))
    with pytest.raises(DSecError, match=f"/{name} of the image is a symbolic link"):
        client.run_container(DSecContainerRunArgs(container_image=f"link-{name}"))


def test_a_lock_on_a_device_or_a_covered_file_is_the_sandbox_s_own(start: Callable[..., Sandbox]) -> None:
    # The first and the third are covers: one file and one directory for all that is covered.
    paths = ["/proc/cmdline", "/dev/urandom", "/proc/fs", "/dev"]
    script = f"""
import fcntl, os, time
for path in {paths!r}:
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
print("locked", flush=True)
time.sleep(WAIT)
"""
    first, second = start(), start()
    holder = first.start(argv=["python3", "-c", script.replace("WAIT", "1000")])
    until(lambda: holder.refresh().stdout_bytes > 0, "the first has its locks")
    assert second.run("python3", "-c", script.replace("WAIT", "0"), check=True).stdout == "locked\n"
    works = "head -c 3 /dev/zero | wc -c; head -c 3 /dev/urandom | wc -c; echo x > /dev/null; echo y > /dev/full"
    assert second.run_shell(works).stdout.split() == ["3", "3"]
    assert not second.run_shell("touch /dev/x || rm /dev/null || chmod 600 /dev/null || touch /proc/fs/x").ok
    assert second.run("stat", "-c", "%a %u", "/dev/null").stdout == "666 0\n"


def test_filters_of_its_own_are_refused_as_by_a_kernel_without_them(sandbox: Sandbox) -> None:
    script = """
import ctypes, errno, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7fff0000))
fprog = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(program)))
libc.prctl(38, 1, 0, 0, 0)
print(libc.prctl(22, 2, fprog), errno.errorcode[ctypes.get_errno()])
print(libc.syscall(317, 1, 0, fprog), errno.errorcode[ctypes.get_errno()])
for option in (26, 51):
    try:
        socket.socket(type=socket.SOCK_DGRAM).setsockopt(socket.SOL_SOCKET, option, fprog.raw)
    except OSError as error:
        print(errno.errorcode[error.errno])
for protocol in (2, 9, 15):
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    except OSError as error:
        print(errno.errorcode[error.errno])
print(socket.if_nameindex())
"""
    assert sandbox.run("python3", "-c", script, check=True).stdout.splitlines() == [
        *("-1 EINVAL", "-1 EINVAL", "ENOPROTOOPT", "ENOPROTOOPT"),
        *("EPROTONOSUPPORT", "EPROTONOSUPPORT", "EPROTONOSUPPORT", "[(1, 'lo')]"),
    ]


def test_the_limit_of_core_files_stays_where_no_handler_on_the_host_is_started(sandbox: Sandbox) -> None:
    script = """
import os, resource
os.sync()
for value in (0, resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_CORE, (value, value))
    print(resource.getrlimit(resource.RLIMIT_CORE))
"""
    assert sandbox.run("python3", "-c", script, check=True).stdout == "(1, 1)\n(1, 1)\n"


def test_watches_that_one_sandbox_uses_up_are_there_for_another(start: Callable[..., Sandbox]) -> None:
    script = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
made = 0
while made < 100_000 and libc.inotify_init() >= 0:
    made += 1
print(made, flush=True)
time.sleep(float(sys.argv[1]))
"""
    greedy, other = start(), start()
    holder = greedy.start(argv=["python3", "-c", script, "1000"])
    until(lambda: holder.refresh().stdout_bytes > 0, "one sandbox has all it can")
    most = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    assert int(next(iter(holder.stdout()))) <= most
    assert int(other.run("python3", "-c", script, "0", check=True).stdout) > 0
    assert subprocess.run(["python3", "-c", script, "0"], check=True, capture_output=True).stdout > b"0\n"


#: Runs on one CPU, and can print how much of it it got from one moment to another, seconds. What else runs there takes from all alike.
ON_ONE_CPU = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
def count():
    while time.time() < float(sys.argv[1]):
        time.sleep(0.01)
    before = time.process_time()
    while time.time() < float(sys.argv[1]) + 4:
        pass
    print(time.process_time() - before)
"""
#: Tries to get more than its share first, and counts in a child.
GREED = """
for policy in (os.SCHED_RR, os.SCHED_FIFO, os.SCHED_BATCH, os.SCHED_OTHER):
    try:
        os.sched_setscheduler(0, policy, os.sched_param(os.sched_get_priority_max(policy)))
    except PermissionError:
        pass
try:
    os.setpriority(os.PRIO_PROCESS, 0, -20)
except PermissionError:
    pass
if os.fork() == 0:
    count()
else:
    os.wait()
"""


def got(*sandboxes: Sandbox, how: str = "count()") -> list[float]:
    """What each gets of one CPU that all of them want."""
    begin = str(time.time() + 2 * PATIENCE)
    runs = [sandbox.start(argv=["python3", "-c", ON_ONE_CPU + how, begin]) for sandbox in sandboxes]
    return [float(run.wait(timeout=120 * PATIENCE).stdout) for run in runs]


def greed(*sandboxes: Sandbox) -> list[float]:
    """The same, where each tries to get more."""
    return got(*sandboxes, how=GREED)


def test_cpu_goes_by_weight_where_two_want_the_same(start: Callable[..., Sandbox]) -> None:
    low, high = got(start(cpu_weight=100), start(cpu_weight=800))
    assert high > 3 * low, (low, high)


@pytest.mark.kernel
def test_best_effort_gets_what_is_left_whatever_it_tries_and_the_class_can_change(start: Callable[..., Sandbox]) -> None:
    first, second = start(cpu_class="best_effort"), start(cpu_class="latency_sensitive")
    low, high = greed(first, second)
    assert high > 20 * low, (low, high)
    # Nobody else wants it: then it is theirs.
    [alone] = greed(first)
    assert alone > 1, alone
    assert first.update(cpu_class="latency_sensitive").limits.cpu_class == "latency_sensitive"
    process = second.start(shell="sleep 600")
    assert second.update(cpu_class="best_effort").limits.cpu_class == "best_effort"
    high, low = greed(first, second)
    assert high > 20 * low, (low, high)
    # What runs already is of the new class too, and what it was is not remembered by anything inside.
    assert process.refresh().state == "running"
    # Of one class they are equal again.
    second.update(cpu_class="latency_sensitive", cpu_weight=100)
    one, other = greed(first, second)
    assert max(one, other) < 5 * min(one, other), (one, other)


def test_what_sandboxes_write_is_data_to_the_host_and_runs_in_them(shared: Platform, sandbox: Sandbox) -> None:
    assert sandbox.run_shell("cp /bin/true /root/t && /root/t && cp /bin/true /tmp/t && /tmp/t").ok
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    ours = {m[4].removeprefix(str(shared.state)): set(m[5].split(",")) for m in mounts if str(shared.state) in m[4]}
    assert "/rw" in ours and len(ours) >= 2, ours
    for place, options in ours.items():
        assert {"nosuid", "nodev", "noexec"} <= options, (place, options)


@pytest.mark.parametrize("obstacle", ["layers", "quota"])
def test_a_start_that_fails_leaves_no_mount_and_no_cgroup(tmp_path: Path, obstacle: str) -> None:
    before = leftovers()
    state = tmp_path / "state"
    (state / "run").mkdir(parents=True)
    if obstacle == "layers":
        (state / "run/layers").touch()
    else:
        # A seed mounts, and nothing can be written to it: not even that quotas are on.
        subprocess.run(["truncate", "-s", "512M", state / "rw.btrfs"], check=True)
        subprocess.run(["mkfs.btrfs", "-q", state / "rw.btrfs"], check=True)
        subprocess.run(["btrfstune", "-S", "1", state / "rw.btrfs"], check=True)
    platform = Platform(state, {**os.environ, "DSEC_CONFIG": str(tmp_path / "config.toml")})
    ended = platform.dsec("up", "--detach", "--state-dir", str(state), "--listen", free_address(), check=False)
    if ended.returncode == 0:
        platform.down()
    assert ended.returncode != 0, ended.stdout
    nothing_new(before)


#: Lets answers of the kernel wait in netlink sockets, each with the whole message that it answers.
FILL_SOCKETS = """
import socket, struct, sys, time
held = []
for _ in range(int(sys.argv[1])):
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        s.setsockopt(socket.SOL_SOCKET, option, 1 << 30)
    size = s.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4
    message = struct.pack("=IHHII", size, 16, 1, 0, 0) + bytes(size - 16)
    for _ in range(5):
        s.send(message)
    held.append(s)
print(len(held), flush=True)
time.sleep(1000)
"""


def test_a_sandbox_that_hides_memory_in_sockets_is_ended(start: Callable[..., Sandbox]) -> None:
    hider, other = start(memory_limit_mb=64), start(memory_limit_mb=64)
    few = other.start(argv=["python3", "-c", FILL_SOCKETS, "1"])
    hider.start(argv=["python3", "-c", FILL_SOCKETS, "400"])
    info = hider.wait("stopped", timeout=60)
    assert info.reason is not None and info.reason.code == "socket_memory", info
    assert few.refresh().state == "running"
    assert other.run("true").ok
