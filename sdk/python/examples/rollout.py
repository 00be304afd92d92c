"""One rollout: a sandbox, a few turns in one shell session, files in and out.

python examples/rollout.py [IMAGE]
"""

import asyncio
import sys

from libdsec import DSecClient, DSecContainerRunArgs

TURNS = [
    "mkdir -p /tmp/work && cd /tmp/work && printf '1\\n2\\n3\\n' > numbers",
    "awk '{ s += $1 } END { print s }' numbers > sum",
    "pwd; cat sum",
]


async def main(image: str) -> None:
    args = DSecContainerRunArgs(
        container_image=image,
        memory_limit_mb=1024,
        cpu_cores_limit=1,
        ttl_running_stop=300,
        task_id="example/rollout",
    )
    async with DSecClient() as client, client.container(args) as sb:
        print("running", sb.id, "after", sum(phase.us for phase in sb.info.launch_phases), "us")
        async with await sb.session("agent") as session:
            for line in TURNS:
                result = await session.run_shell(line, timeout=30, check=True)
                print(f"$ {line}\n{result.stdout}", end="")
        print("graded:", (await sb.files.read_text("/tmp/work/sum")).strip() == "6")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "debian"))
