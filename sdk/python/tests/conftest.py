from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from fake_api import KEY, FakeApi
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

ARGS = DSecContainerRunArgs(container_image="debian", ttl_running_stop=300)


@pytest.fixture(autouse=True)
def _no_surroundings(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """Unit tests know nothing of the machine's own platform."""
    if request.node.get_closest_marker("live"):
        return
    for name in ("DSEC_URL", "DSEC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DSEC_CONFIG", f"{tmp_path}/none.toml")


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    fake = FakeApi()
    await fake.start()
    yield fake
    await fake.end()


@pytest.fixture
async def client(api: FakeApi) -> AsyncIterator[DSecClient]:
    async with DSecClient(api.url, KEY, timeout=10, retry_for=5) as client:
        yield client


@pytest.fixture
async def sb(client: DSecClient) -> Sandbox:
    return await client.run_container(ARGS)


@pytest.fixture
def api_thread() -> Iterator[str]:
    """A fake on a thread of its own, for synchronous tests: its address."""
    loop = asyncio.new_event_loop()
    fake = FakeApi()
    loop.run_until_complete(fake.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield fake.url
    asyncio.run_coroutine_threadsafe(fake.end(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
