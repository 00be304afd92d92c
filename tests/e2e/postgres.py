"""A PostgreSQL of the test's own, from the system's package, in a directory that goes with it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platform_under_test import until

#: It refuses to run as root.
AS_ITSELF = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups", "--"]


def _bin() -> Path:
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    assert versions, "PostgreSQL is missing: run scripts/deps test"
    return versions[-1]


@contextmanager
def postgres(over_socket: bool = False) -> Iterator[str]:
    """Starts one; gives the address of an empty database. Its socket is reached from other network namespaces too."""
    with tempfile.TemporaryDirectory(prefix="dsec-pg-") as home:
        shutil.chown(home, "postgres", "postgres")
        data = f"{home}/data"
        initdb = [str(_bin() / "initdb"), "--auth=trust", "--username=dsec", "--no-sync", "--locale=C", "-D", data]
        subprocess.run([*AS_ITSELF, *initdb], check=True, capture_output=True)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        command = [str(_bin() / "postgres"), "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", home, "-c", "fsync=off"]
        with open(f"{home}/log", "wb") as log:
            server = subprocess.Popen([*AS_ITSELF, *command], stdout=log, stderr=log)
        try:
            ready = [str(_bin() / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
            until(lambda: subprocess.run(ready).returncode == 0, "PostgreSQL")
            tcp, socket_file = f"postgres://dsec@127.0.0.1:{port}/postgres", f"postgres://dsec@localhost:{port}/postgres?host={home}"
            yield socket_file if over_socket else tcp
        finally:
            # An immediate shutdown: its children end with it.
            os.kill(server.pid, signal.SIGQUIT)
            server.wait(timeout=30)
