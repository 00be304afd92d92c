"""Real sandboxes through several servers, until a file says to stop: run in the namespaces that the servers are in.

Each worker makes a sandbox, runs a command that says a number ten times a second, reads all of it and stops the sandbox, again and
again, through one of the servers. The last line of the output is JSON: commands that were whole, creates that a quota or
the room refused, and everything that went wrong.

Usage: load.py STOP_FILE WORKERS URL...
"""

import json
import sys
import threading
import time
from pathlib import Path

from libdsec import ConnectionFailed, DSecContainerRunArgs, DSecError, ResourceExhausted, Unavailable
from libdsec.sync import DSecClient, Process, Sandbox

#: Numbers that a command says, and seconds that callers go on trying while a server or a node is away.
NUMBERS, RETRY_FOR = 15, 120.0
COUNT = f"i=0; while [ $i -lt {NUMBERS} ]; do i=$((i+1)); echo $i; sleep 0.1; done"
WHOLE = "".join(f"{number}\n" for number in range(1, NUMBERS + 1))


class Load:
    """What came of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.whole, self.refused = 0, 0
        self.made: dict[str, str] = {}
        self.wrong: list[str] = []

    def one(self, client: DSecClient, name: str) -> None:
        args = DSecContainerRunArgs(
            container_image="tools", memory_limit_mb=64, cpu_cores_limit=0.5, task_id="load", labels={"load": name}
        )
        try:
            sandbox = client.run_container(args, timeout=RETRY_FOR)
        except ResourceExhausted:
            with self.lock:
                self.refused += 1
            time.sleep(0.2)
            return
        out = self.start(sandbox).wait(timeout=RETRY_FOR).stdout
        sandbox.stop()
        with self.lock:
            self.made[name] = sandbox.id
            if out == WHOLE:
                self.whole += 1
            else:
                self.wrong.append(f"{name} on {sandbox.id} said {out!r}")

    def start(self, sandbox: Sandbox) -> Process:
        """Starts the command, once."""
        try:
            return sandbox.start(shell=COUNT)
        except ConnectionFailed:
            # A server that dies between a start and its answer leaves the caller to look whether it was.
            execs = sandbox.execs()
            return sandbox.attach(execs[0].id) if execs else sandbox.start(shell=COUNT)

    def work(self, url: str, worker: int, stop: Path) -> None:
        with DSecClient(url, timeout=RETRY_FOR, retry_for=RETRY_FOR) as client:
            number = 0
            while not stop.exists():
                number += 1
                try:
                    self.one(client, f"{worker}-{number}")
                except Unavailable as error:
                    # No node takes it now: nothing was made, and nothing is lost.
                    if error.maybe_sent:
                        self.note(worker, number, error)
                    time.sleep(0.2)
                except DSecError as error:
                    self.note(worker, number, error)

    def note(self, worker: int, number: int, error: DSecError) -> None:
        with self.lock:
            self.wrong.append(f"{worker}-{number}: {type(error).__name__}: {error}")


def main() -> None:
    stop, workers, urls = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    load = Load()
    threads = [
        threading.Thread(target=load.work, args=(urls[worker % len(urls)], worker, stop)) for worker in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"whole": load.whole, "refused": load.refused, "made": load.made, "wrong": load.wrong}))


if __name__ == "__main__":
    main()
