"""A platform of the test's own: `dsec up` on a state directory, with an image, and what it left behind."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from libdsec.sync import DSecClient

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / "target/bin"
IMAGE = "base"
#: How much longer than on a usual machine things may take: the testbed is an emulated one.
PATIENCE = float(os.environ.get("DSEC_TEST_PATIENCE", "1"))


def until(condition: Callable[[], Any], what: str, limit_s: float = 30.0) -> Any:
    """Waits until a condition holds and returns its value; fails with its last value after the limit."""
    limit_s *= PATIENCE
    end = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {limit_s} s; last seen: {value!r}")
        time.sleep(0.02)


def tar(files: Mapping[str, str | bytes]) -> bytes:
    """A tar of files that may be executed, with fixed times: the same files are the same layer."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, text in files.items():
            data = text.encode() if isinstance(text, str) else text
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), 0o755, 1_700_000_000
            archive.addfile(entry, io.BytesIO(data))
    return made.getvalue()


def free_address() -> str:
    """A loopback address with a port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def leftovers(state: Path | None = None, inside: Sequence[str] = ()) -> dict[str, int]:
    """Counts of all that a platform could leave on this machine, or in namespaces that a command leads into."""
    arguments = [*inside, str(ROOT / "scripts/leftovers"), *([str(state)] if state else [])]
    lines = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.splitlines()
    return {kind: int(count) for kind, count in (line.split() for line in lines)}


def nothing_new(
    since: Mapping[str, int], state: Path | None = None, inside: Sequence[str] = (), limit_s: float = 0.0
) -> None:
    """Fails when something that came after the counts of `since` is still there after the limit.

    Less than before is no leftover: what was about to end when it was counted has ended.
    """
    end = time.monotonic() + limit_s * PATIENCE
    while left := {kind: (since[kind], now) for kind, now in leftovers(state, inside).items() if now > since[kind]}:
        assert time.monotonic() < end, f"left behind, as (before, now): {left}"
        time.sleep(0.1)


@dataclass
class Platform:
    """A running platform."""

    state: Path
    env: dict[str, str]
    url: str = ""
    key: str = ""
    #: What goes before each command, such as `nsenter` with its options.
    inside: Sequence[str] = ()
    #: Where its programs are.
    programs: Path = BIN
    _clients: list[DSecClient] = field(default_factory=list)

    def dsec(self, *arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs the CLI against it."""
        done = subprocess.run(
            [*self.inside, str(self.programs / "dsec"), *arguments], env=self.env, capture_output=True, text=True, timeout=300 * PATIENCE, **options
        )
        if check and done.returncode != 0:
            raise AssertionError(f"dsec {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
        return done

    def up(self, *arguments: str) -> None:
        """Starts it and reads where it listens."""
        self.dsec("up", "--detach", "--state-dir", str(self.state), "--listen", free_address(), *arguments)
        config = tomllib.loads(Path(self.env["DSEC_CONFIG"]).read_text())
        self.url, self.key = config["url"], config["api_key"]

    def down(self) -> None:
        """Ends it."""
        self.dsec("down", "--state-dir", str(self.state))

    def client(self, **options: Any) -> DSecClient:
        """A client of it, open until the platform ends."""
        client = DSecClient(self.url, self.key, **{"timeout": 60 * PATIENCE, **options})
        client.open()
        self._clients.append(client)
        return client

    def close_clients(self) -> None:
        """Closes what `client` opened."""
        while self._clients:
            self._clients.pop().close()

    def nodes(self) -> list[dict[str, Any]]:
        """Nodes as the CLI's JSON has them."""
        import urllib.request

        request = urllib.request.Request(f"{self.url}/v1/nodes", headers={"authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            nodes: list[dict[str, Any]] = json.load(answer)["nodes"]
        return nodes

    def metrics(self) -> str:
        """What a scraper reads."""
        import urllib.request

        request = urllib.request.Request(f"{self.url}/metrics", headers={"authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def edge_pid(self) -> int:
        """Process id of its edge, asked of the edge itself."""
        return int(self.nodes()[0]["pid"])

    def kill_edge(self) -> None:
        """`kill -9` of the edge, then waits until the supervisor's next one answers."""
        old = self.edge_pid()
        os.kill(old, signal.SIGKILL)
        until(lambda: self._other_edge(old), "a new edge after kill -9")

    def _other_edge(self, old: int) -> bool:
        try:
            return self.edge_pid() != old
        except OSError:
            return False


def stored_files(running: Platform) -> set[Path]:
    """What its store keeps of layers. Without leases and the store's clock, which every node writes at times of its own."""
    store = running.state / "store"
    return {path for path in store.rglob("*") if path.is_file() and not {"leases", "clock"} & set(path.relative_to(store).parts)}


def base_image() -> Path:
    """The Debian base that `scripts/test` and the demo build."""
    path = ROOT / "target/demo/base.tar"
    if not path.exists():
        raise AssertionError(f"{path} is missing: run the tests by `make test`, which builds it")
    return path


@cache
def _image_at_hand() -> tempfile.TemporaryDirectory[str]:
    """Where the first platform's layer store is kept for those after it: an import takes longer than most tests."""
    return tempfile.TemporaryDirectory(prefix="dsec-e2e-store-")


def _with_image(running: Platform) -> None:
    """Starts a platform whose store has the image."""
    kept, store = Path(_image_at_hand().name) / "store", running.state / "store"
    if kept.exists():
        running.state.mkdir(mode=0o700)
        # Linked, since nothing in a store is ever written again, but for leases.
        shutil.copytree(kept, store, copy_function=os.link, ignore=shutil.ignore_patterns("leases"))
        running.up()
    else:
        running.up()
        running.dsec("image", "import", IMAGE, str(base_image()))
        shutil.copytree(store, kept, copy_function=os.link, ignore=shutil.ignore_patterns("leases"))
    # The first sandbox mounts the image for all of them; that mount stays until the platform goes down.
    running.dsec("run", IMAGE, "--", "true")


@contextmanager
def _made(inside: Sequence[Sequence[str]]) -> Iterator[list[Platform]]:
    """Platforms that are not up yet. What they left behind in the end fails the test."""
    before = [leftovers(inside=prefix) for prefix in inside]
    works = [Path(tempfile.mkdtemp(prefix="dsec-e2e-")) for _ in inside]
    made = []
    for work, prefix in zip(works, inside, strict=True):
        env = {**os.environ, "DSEC_CONFIG": str(work / "config.toml"), "NO_COLOR": "1"}
        made.append(Platform(work / "state", env, inside=prefix))
    try:
        yield made
    finally:
        for running in made:
            running.close_clients()
            running.down()
    for work, running, then in zip(works, made, before, strict=True):
        nothing_new(then, running.state, running.inside)
        shutil.rmtree(work)


@contextmanager
def made_inside(inside: Sequence[Sequence[str]]) -> Iterator[list[Platform]]:
    """Platforms that the test starts itself, each in the namespaces that a command leads into. What they left behind in the
    end fails the test."""
    with _made(inside) as made:
        yield made


@contextmanager
def platform(image: bool = True, prepare: Callable[[Path], None] = lambda _: None) -> Iterator[Platform]:
    """A platform from `dsec up` to `dsec down`. What it left behind fails the test. `prepare` is given its state directory
    before it starts."""
    with _made([()]) as [running]:
        prepare(running.state)
        if image:
            _with_image(running)
        else:
            running.up()
        yield running


@contextmanager
def nodes_of_one_store(
    count: int, store: dict[str, str | bool], inside: Sequence[Sequence[str]] = (), settings: Sequence[str] = ()
) -> Iterator[list[Platform]]:
    """Platforms of a node each whose layers lie in the same store, with these settings; each in namespaces of its own, if
    there are commands that lead into them, and with more lines of `edge.toml`, if there are some for it. Node n1 has the
    label rack=r1, and so on."""
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in store.items())
    with _made(inside or [()] * count) as made:
        for number, running in enumerate(made):
            running.state.mkdir(mode=0o700)
            more = settings[number] if number < len(settings) else ""
            named = f'node = "n{number + 1}"\n{more}\n[labels]\nrack = "r{number + 1}"\n'
            (running.state / "edge.toml").write_text(f"{named}[store]\n{lines}")
            running.up()
        yield made
