"""Rollouts over real repositories, as a training run would drive them.

The repositories become workspace layers, and a small program that reads test reports a toolkit. Each rollout has a
sandbox of its own, composed of the base image, its repository and the toolkit: it applies a change that breaks a test,
sees the test fail, mends it, runs the whole suite, has the toolkit read the report, and stops. Half-way the toolkit is
upgraded: one layer is built, and what starts later has it. At last one sandbox works some steps ahead and is packed,
and many start from where it stood. Any step that does not go as it must fails the rollout, and one failed rollout
fails the program.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import sys
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from libdsec import DSecClient, DSecContainerRunArgs

WORKSPACE = "/workspace"
TOOLKIT = "report"
READ_REPORT = f"/opt/{TOOLKIT}/read-report"
#: The toolkit's program, before and after its upgrade.
VERSIONS = [
    """#!/usr/bin/env python3
import sys, xml.etree.ElementTree as tree
suite = tree.parse(sys.argv[1]).find("testsuite")
print(suite.attrib["tests"], "1")
""",
    """#!/usr/bin/env python3
import sys, xml.etree.ElementTree as tree
suite = tree.parse(sys.argv[1]).find("testsuite").attrib
print(int(suite["tests"]) - int(suite["skipped"]), "2")
""",
]
#: Sandboxes that start from the packed one.
BRANCHES = 16


@dataclass(frozen=True)
class Task:
    """A repository, a change that breaks it, and the tests that notice."""

    repository: str
    source_root: str
    file: str
    good: str
    bad: str
    tests: str


TASKS = [
    Task(
        "click-8.1.7",
        "src",
        "src/click/utils.py",
        "os.path.basename(filename)",
        "os.path.dirname(filename)",
        "tests/test_utils.py",
    ),
    Task("idna-3.10", ".", "idna/core.py", "if len(label) > 63", "if len(label) > 6", "tests/test_idna.py"),
    Task(
        "sqlparse-0.5.1",
        ".",
        "sqlparse/utils.py",
        "val = val[1:-1]",
        "val = val[1:]",
        "tests/test_parse.py tests/test_grouping.py tests/test_regressions.py",
    ),
    Task(
        "boltons-24.0.0",
        ".",
        "boltons/mathutils.py",
        "return min(max(x, lower), upper)",
        "return max(min(x, lower), upper)",
        "tests/test_mathutils.py",
    ),
]


@dataclass
class Outcome:
    """What one rollout measured."""

    first_command_s: float
    tests: int
    peak_memory_mib: float


class Failed(Exception):
    """A step did not go as it must."""


def require(condition: bool, what: str) -> None:
    """Fails unless it is so."""
    if not condition:
        raise Failed(what)


def workspace_of(sdist: Path) -> bytes:
    """A source distribution as a layer: its one directory becomes the workspace."""
    made = io.BytesIO()
    with tarfile.open(sdist) as source, tarfile.open(fileobj=made, mode="w") as archive:
        for entry in source:
            content = source.extractfile(entry) if entry.isreg() else None
            entry.name = "/".join([WORKSPACE.strip("/"), *entry.name.split("/")[1:]])
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = "root"
            archive.addfile(entry, content)
    return made.getvalue()


def arguments(image: str, task: Task) -> DSecContainerRunArgs:
    """A sandbox for a task."""
    return DSecContainerRunArgs(
        container_image=image,
        workspace=task.repository,
        toolkits=[TOOLKIT],
        memory_limit_mb=1024,
        cpu_cores_limit=1,
        ttl_running_stop=600,
        cwd=WORKSPACE,
        # Without bytecode: a file that is mended within the second in which it was broken, at the same length, would
        # be taken for the broken one.
        env={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": task.source_root},
        task_id="demo",
        labels={"repository": task.repository},
    )


PYTEST = "python3 -m pytest -q -p no:cacheprovider"


async def rollout(client: DSecClient, image: str, task: Task, version: int) -> Outcome:
    """Runs one rollout with the toolkit's version."""
    started = time.perf_counter()
    sandbox = await client.run_container(arguments(image, task), timeout=120)
    try:
        first = await sandbox.run_shell("python3 --version")
        first_command_s = time.perf_counter() - started
        require(first.exit_code == 0, f"the first command failed: {first.stderr}")

        path = f"{WORKSPACE}/{task.file}"
        original = await sandbox.files.read_text(path)
        require(task.good in original, f"{task.file} does not hold what is to be broken")
        await sandbox.files.write(path, original.replace(task.good, task.bad))
        broken = await sandbox.run_shell(f"{PYTEST} {task.tests}", timeout=120)
        require(broken.exit_code == 1, f"the broken tests ended with {broken.exit_code}: {broken.stdout[-500:]}")

        await sandbox.files.write(path, original)
        mended = await sandbox.run_shell(f"{PYTEST} tests --junitxml=/tmp/report.xml", timeout=300)
        require(mended.exit_code == 0, f"the mended suite ended with {mended.exit_code}: {mended.stdout[-500:]}")
        read = await sandbox.run_shell(f"{READ_REPORT} /tmp/report.xml")
        require(read.exit_code == 0, f"the report cannot be read: {read.stderr}")
        tests, by = read.stdout.split()
        require(by == str(version), f"version {by} of the toolkit read the report and not {version}")
        usage = (await sandbox.refresh()).usage
        peak = usage.memory_peak_bytes / (1 << 20) if usage is not None else 0.0
        return Outcome(first_command_s, int(tests), peak)
    finally:
        await sandbox.stop()


async def branch(client: DSecClient, image: str, task: Task) -> tuple[float, float]:
    """Packs a sandbox that has worked and starts many from it. Returns how long the pack and the slowest start took, s."""
    sandbox = await client.run_container(arguments(image, task))
    try:
        note = f"{WORKSPACE}/NOTES"
        await sandbox.run_shell(f"echo 'step 1: read the code' > {note}; rm {WORKSPACE}/pyproject.toml; mkdir /tmp/cache")
        started = time.perf_counter()
        packed = await sandbox.pack_diff(f"{task.repository}-step-1")
        pack_s = time.perf_counter() - started
        # What is done after the pack is not in it.
        await sandbox.run_shell(f"echo 'step 2: a dead end' >> {note}")
    finally:
        await sandbox.stop()

    async def one(number: int) -> float:
        started = time.perf_counter()
        child = await client.run_container(replace(arguments(image, task), workspace=packed.name))
        try:
            seen = await child.run_shell(f"echo 'step 2: idea {number}' >> {note}; cat {note}; ls {WORKSPACE}/pyproject.toml")
            start_s = time.perf_counter() - started
            expected = f"step 1: read the code\nstep 2: idea {number}\n"
            require(seen.stdout == expected and seen.exit_code != 0, f"branch {number} began elsewhere: {seen.stdout}")
            return start_s
        finally:
            await child.stop()

    return pack_s, max(await asyncio.gather(*(one(number) for number in range(BRANCHES))))


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


def show_progress(done: int, total: int, failed: int) -> None:
    """One line that grows on a terminal; every eighth rollout elsewhere."""
    text = f"{done}/{total} rollouts, {failed} failed"
    if sys.stdout.isatty():
        print(f"\r{text}", end="\n" if done == total else "", flush=True)
    elif done % 8 == 0 or done == total:
        print(text, flush=True)


async def run(image: str, sdists: Path, rollouts: int, concurrency: int) -> int:
    """Runs all rollouts and prints the table. Returns the exit code."""
    gate = asyncio.Semaphore(concurrency)
    outcomes: list[Outcome] = []
    failures: list[str] = []

    async def guarded(what: str, work: Awaitable[Outcome]) -> None:
        async with gate:
            try:
                outcomes.append(await work)
            except Exception as error:
                failures.append(f"{what}: {type(error).__name__}: {error}")
        show_progress(len(outcomes) + len(failures), rollouts, len(failures))

    async def wave(client: DSecClient, version: int, numbers: range) -> None:
        with tempfile.TemporaryDirectory() as tools:
            program = Path(tools, READ_REPORT.strip("/"))
            program.parent.mkdir(parents=True)
            program.write_text(VERSIONS[version - 1])
            program.chmod(0o755)
            await client.toolkits.import_(TOOLKIT, Path(tools))
        tasks = [TASKS[number % len(TASKS)] for number in numbers]
        await asyncio.gather(*(guarded(task.repository, rollout(client, image, task, version)) for task in tasks))

    async with DSecClient() as client:
        started = time.perf_counter()
        for task in TASKS:
            await client.workspaces.import_(task.repository, workspace_of(sdists / f"{task.repository}.tar.gz"))
        layers = {info.name: info.digest for info in await client.workspaces.list()}
        print(f"{len(layers)} workspaces made in {time.perf_counter() - started:.1f} s", flush=True)

        started = time.perf_counter()
        await wave(client, 1, range(rollouts // 2))
        await wave(client, 2, range(rollouts // 2, rollouts))
        wall_s = time.perf_counter() - started
        after = {info.name: info.digest for info in await client.workspaces.list()}
        touched = sum(after.get(name) != digest for name, digest in layers.items())
        if touched:
            failures.append(f"the toolkit's upgrade touched {touched} workspaces")
        pack_s = start_s = float("nan")
        try:
            pack_s, start_s = await branch(client, image, TASKS[0])
        except Exception as error:
            failures.append(f"branches: {type(error).__name__}: {error}")

    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    if outcomes:
        first = [outcome.first_command_s * 1000 for outcome in outcomes]
        peak = [outcome.peak_memory_mib for outcome in outcomes]
        rows = [
            ("rollouts that passed", f"{len(outcomes)} of {rollouts}, {concurrency} at once"),
            ("create to first command (python3), p50 / p99", f"{percentile(first, 0.5):.0f} / {percentile(first, 0.99):.0f} ms"),
            ("rollouts a minute", f"{len(outcomes) / wall_s * 60:.0f}"),
            ("tests run", f"{sum(outcome.tests for outcome in outcomes)}"),
            ("peak memory a sandbox, p50 / max", f"{percentile(peak, 0.5):.0f} / {max(peak):.0f} MiB"),
            ("wall time", f"{wall_s:.1f} s"),
            ("toolkit upgraded between two waves", f"{touched} of {len(layers)} workspaces touched"),
            ("a sandbox packed", f"{pack_s * 1000:.0f} ms"),
            (f"{BRANCHES} at once started from it, the slowest", f"{start_s * 1000:.0f} ms"),
        ]
        width = max(len(name) for name, _ in rows)
        print()
        for name, value in rows:
            print(f"{name:<{width}}  {value}")
    return 1 if failures else 0


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", required=True, help="name of an imported image with Python and pytest")
    parser.add_argument("--sdists", required=True, type=Path, help="directory with the source distributions")
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    args = parser.parse_args()
    return asyncio.run(run(args.image, args.sdists, args.rollouts, args.concurrency))


if __name__ == "__main__":
    sys.exit(main())
