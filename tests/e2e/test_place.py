"""`dsec bench place`: control against simulated nodes. What it says is there, and it leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from platform_under_test import BIN, leftovers, nothing_new, until

SMALL = {"nodes": 8, "live": 400, "rate": 200, "seconds": 1, "burst": 320, "stop-ms": 1}


def place(tmp: Path, *flags: str, **given: int) -> subprocess.Popen[str]:
    """Starts it without any configuration, with its temporary files in `tmp`."""
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp), "TMPDIR": str(tmp)}
    options = [f"--{name}={value}" for name, value in {**SMALL, **given}.items()]
    command = [str(BIN / "dsec"), "bench", "place", *options, *flags]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def found(tmp: Path, **given: int) -> dict[str, Any]:
    """What it says in JSON."""
    running = place(tmp, "--json", **given)
    out, err = running.communicate(timeout=300)
    assert running.returncode == 0, err
    return dict(json.loads(out))


def test_it_says_all_figures_and_leaves_nothing(tmp_path: Path) -> None:
    before = leftovers()
    report = found(tmp_path, seed=7)
    assert {"p50_ms", "p90_ms", "p99_ms", "max_ms", "concurrency"} <= set(report)
    assert (report["bench"], report["count"], report["ok"], report["failed"]) == ("place", 200, 200, 0)
    assert (report["seed"], report["nodes"], report["live"], report["fanout_sandboxes"]) == (7, 8, 400, 320)
    for figure in (
        *("rate_per_s", "creates_per_s", "control_cpu_us", "placements_per_s", "placement_us", "report_us"),
        *("fanout_s", "pause_s", "direct_p50_ms", "through_p50_ms"),
        *("control_memory_mib", "control_memory_after_list_mib"),
    ):
        assert report[figure] > 0, figure
    assert report["added_p50_ms"] >= 0
    # 320 sandboxes of nobody's choosing on 8 nodes; each of a task takes its node a millisecond.
    assert 1 <= report["spread"] < report["spread_without_overlay"]
    assert report["fanout_s"] >= 0.04 and report["pause_s"] >= 0.04
    nothing_new(before)
    assert list(tmp_path.iterdir()) == []


def test_a_seed_gives_the_same_spread_again(tmp_path: Path) -> None:
    first, again = (found(tmp_path, seed=11) for _ in range(2))
    for figure in ("spread", "spread_without_overlay"):
        assert first[figure] == again[figure]


def test_an_interrupted_one_leaves_nothing(tmp_path: Path) -> None:
    before = leftovers()
    with place(tmp_path, seconds=600) as running:
        until(lambda: list(tmp_path.glob("dsec-sim-*/control.log")), "control starts")
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=30) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    nothing_new(before, limit_s=30)


def test_a_person_reads_the_seed_and_the_aims(tmp_path: Path) -> None:
    running = place(tmp_path)
    out, err = running.communicate(timeout=300)
    assert running.returncode == 0, err
    assert err.startswith("seed ") and err.split()[1] in out
    assert "placements a second" in out and "1.10 at most" in out


def test_a_cluster_that_cannot_be_is_refused(tmp_path: Path) -> None:
    running = place(tmp_path, nodes=1)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 2 and "--nodes" in err
