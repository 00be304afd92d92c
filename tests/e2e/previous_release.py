"""The release before this one, built from the repository's history: `tests/previous-release` names its commit."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from platform_under_test import ROOT


@cache
def previous_release() -> Path:
    """A directory with its dsec-edge, dsec-fill and dsec-aether."""
    done = subprocess.run([str(ROOT / "scripts/previous-release")], capture_output=True, text=True)
    assert done.returncode == 0, f"the previous release was not built:\n{done.stderr[-4000:]}"
    return Path(done.stdout.strip())
