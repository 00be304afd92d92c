"""Many sandboxes at once, without `await`: how long each takes from the create to its first answer.

python examples/many.py [IMAGE] [HOW_MANY]
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from libdsec import DSecContainerRunArgs, ResourceExhausted
from libdsec.sync import DSecClient


def main(image: str, count: int) -> None:
    args = DSecContainerRunArgs(container_image=image, memory_limit_mb=256, task_id="example/many")
    with DSecClient() as client, ThreadPoolExecutor(16) as pool:

        def one(_: int) -> float | None:
            begin = time.monotonic()
            try:
                with client.run_container(args) as sb:
                    sb.run_shell("true", timeout=10, check=True)
                    return time.monotonic() - begin
            except ResourceExhausted as error:
                print("no room:", error.message)
                return None

        seconds = sorted(each for each in pool.map(one, range(count)) if each is not None)
        if seconds:
            print(f"{len(seconds)} of {count}; median {seconds[len(seconds) // 2] * 1000:.1f} ms")


main(sys.argv[1] if len(sys.argv) > 1 else "debian", int(sys.argv[2]) if len(sys.argv) > 2 else 20)
