"""One platform for all tests that only use it; tests that break one make their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from libdsec import DSecContainerRunArgs  # noqa: E402
from libdsec.sync import DSecClient, Sandbox  # noqa: E402
from platform_under_test import IMAGE, Platform, platform  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Names the marks of these tests."""
    for mark in (
        "kernel: what it shows depends on the host's kernel (cgroups, namespaces), so the testbed runs it too",
        "bulk: so much work that an emulated host, such as the testbed's, takes minutes for it",
    ):
        config.addinivalue_line("markers", mark)


@pytest.fixture(scope="session")
def shared() -> Iterator[Platform]:
    """The platform that most tests share."""
    with platform() as running:
        yield running


@pytest.fixture(scope="session")
def client(shared: Platform) -> DSecClient:
    """A client of the shared platform."""
    return shared.client()


@pytest.fixture
def start(client: DSecClient) -> Iterator[Callable[..., Sandbox]]:
    """Starts sandboxes with the given arguments; stops them after the test."""
    started: list[Sandbox] = []

    def make(**arguments: Any) -> Sandbox:
        sandbox = client.run_container(DSecContainerRunArgs(container_image=IMAGE, **arguments))
        started.append(sandbox)
        return sandbox

    yield make
    for sandbox in started:
        sandbox.stop()


@pytest.fixture
def sandbox(start: Callable[..., Sandbox]) -> Sandbox:
    """A sandbox with the defaults."""
    return start()
