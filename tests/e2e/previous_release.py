"""The release before this one, built from the repository's history: `tests/previous-release` names its commit."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest

from platform_under_test import ROOT


#: What the script ends with where the commit is not in the clone.
NO_HISTORY = 3


@cache
def previous_release() -> Path:
    """A directory with its dsec-edge, dsec-fill and dsec-aether."""
    done = subprocess.run([str(ROOT / "scripts/previous-release")], capture_output=True, text=True)
    if done.returncode == NO_HISTORY:
        # Nothing that could be installed: an archive of the source is whole without it.
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, f"the previous release was not built:\n{done.stderr[-4000:]}"
    return Path(done.stdout.strip())
