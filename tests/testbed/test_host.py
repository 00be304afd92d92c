"""The testbed's host is what it is said to be, and a host that refuses what sandboxes need is told of in plain words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from platform_under_test import BIN, IMAGE, platform  # noqa: E402

#: Run as a part of `-m kernel` too.
pytestmark = pytest.mark.kernel

#: All that a program may do but mount: what a profile written for ordinary daemons leaves out.
PROFILE = f"""
profile dsec-edge {BIN}/dsec-edge {{
  file,
  capability,
  network,
  unix,
  signal,
  ptrace,
}}
"""


def features() -> dict[str, dict[str, Any]]:
    """What `dsec doctor` says, by name."""
    done = subprocess.run([str(BIN / "dsec"), "doctor", "--json"], capture_output=True, text=True, timeout=120)
    return {each["name"]: each for each in json.loads(done.stdout)}


@contextmanager
def sysctl(name: str, value: str) -> Iterator[None]:
    """A setting of the kernel that holds for a while."""
    path = Path("/proc/sys", name)
    before = path.read_text()
    path.write_text(value)
    try:
        yield
    finally:
        path.write_text(before)


@contextmanager
def profile(text: str) -> Iterator[None]:
    """An AppArmor profile that is loaded for a while."""
    subprocess.run(["apparmor_parser", "--skip-cache", "--add"], input=text, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["apparmor_parser", "--skip-cache", "--remove"], input=text, text=True, check=True)


def test_this_host_has_version_2_alone_and_apparmor() -> None:
    told = features()
    assert not [each for each in told.values() if each["state"] == "missing"]
    assert told["cgroups"]["found"] == "version 2 at /sys/fs/cgroup"
    assert told["AppArmor"]["found"] == "the edge is unconfined"
    assert " cgroup " not in Path("/proc/self/mounts").read_text()


def test_doctor_and_a_create_say_so_where_only_root_may_make_user_namespaces() -> None:
    with platform() as running:
        # Those that are ready were made before.
        with sysctl("kernel/unprivileged_userns_clone", "0"):
            told = features()["user namespaces"]
            assert told["state"] == "missing" and "unprivileged_userns_clone" in told["remedy"]
            running.kill_edge()
            refused = running.dsec("run", IMAGE, "--", "true", check=False)
            assert refused.returncode == 125
            assert "make namespaces" in refused.stderr and "Operation not permitted" in refused.stderr, refused.stderr
        running.dsec("run", IMAGE, "--", "true")


def test_doctor_names_an_apparmor_profile_that_confines_the_edge() -> None:
    with profile(PROFILE):
        told = features()
    assert told["AppArmor"]["state"] == "degraded" and "dsec-edge (enforce)" in told["AppArmor"]["found"]
    assert told["overlayfs"]["state"] == "missing", told["overlayfs"]
