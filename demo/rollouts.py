"""Rollouts over real repositories, as a training run would drive them.

Each rollout has a sandbox of its own: it uploads a repository, applies a change that breaks a test,
sees the test fail, mends it, runs the whole suite, reads the report, and stops. Any step that does
not go as it must fails the rollout, and one failed rollout fails the program.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from libdsec import DSecClient, DSecContainerRunArgs

WORKSPACE = "/workspace"


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


async def rollout(client: DSecClient, image: str, task: Task, repository: Path) -> Outcome:
    """Runs one rollout. Raises `RuntimeError` when a step does not go as it must."""

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise RuntimeError(f"{task.repository}: {what}")

    args = DSecContainerRunArgs(
        container_image=image,
        memory_limit_mb=1024,
        cpu_cores_limit=1,
        ttl_running_stop=600,
        cwd="/",
        task_id="demo",
        labels={"repository": task.repository},
    )
    started = time.perf_counter()
    sandbox = await client.run_container(args, timeout=120)
    try:
        first = await sandbox.run_shell("python3 --version")
        first_command_s = time.perf_counter() - started
        require(first.exit_code == 0, f"the first command failed: {first.stderr}")

        await sandbox.files.upload(str(repository), WORKSPACE)
        # Without bytecode: a file that is mended within the second in which it was broken, at the same length, would
        # be taken for the broken one.
        python = f"PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={task.source_root} python3"
        pytest = f"cd {WORKSPACE} && {python} -m pytest -q -p no:cacheprovider"
        path = f"{WORKSPACE}/{task.file}"
        original = await sandbox.files.read_text(path)
        require(task.good in original, f"{task.file} does not hold what is to be broken")

        await sandbox.files.write(path, original.replace(task.good, task.bad))
        broken = await sandbox.run_shell(f"{pytest} {task.tests}", timeout=120)
        require(broken.exit_code == 1, f"the broken tests ended with {broken.exit_code}: {broken.stdout[-500:]}")

        await sandbox.files.write(path, original)
        mended = await sandbox.run_shell(f"{pytest} tests --junitxml=/tmp/report.xml", timeout=300)
        require(mended.exit_code == 0, f"the mended suite ended with {mended.exit_code}: {mended.stdout[-500:]}")
        suite = ElementTree.fromstring(await sandbox.files.read("/tmp/report.xml")).find("testsuite")
        require(suite is not None, "the report has no test suite")
        tests = int(suite.attrib["tests"]) if suite is not None else 0
        usage = (await sandbox.refresh()).usage
        peak = usage.memory_peak_bytes / (1 << 20) if usage is not None else 0.0
        return Outcome(first_command_s, tests, peak)
    finally:
        await sandbox.stop()


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

    with tempfile.TemporaryDirectory() as unpacked:
        for task in TASKS:
            with tarfile.open(sdists / f"{task.repository}.tar.gz") as archive:
                archive.extractall(unpacked, filter="data")

        async with DSecClient() as client:

            async def one(number: int) -> None:
                task = TASKS[number % len(TASKS)]
                async with gate:
                    try:
                        outcomes.append(await rollout(client, image, task, Path(unpacked) / task.repository))
                    except Exception as error:
                        failures.append(f"rollout {number}: {type(error).__name__}: {error}")
                show_progress(len(outcomes) + len(failures), rollouts, len(failures))

            started = time.perf_counter()
            await asyncio.gather(*(one(number) for number in range(rollouts)))
            wall_s = time.perf_counter() - started

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
