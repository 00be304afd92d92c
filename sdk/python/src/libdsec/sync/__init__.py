"""The SDK without `await`: the same names and arguments as :mod:`libdsec`, for programs that have no loop.

::

    from libdsec import DSecContainerRunArgs
    from libdsec.sync import DSecClient

    with DSecClient() as client:
        with client.run_container(DSecContainerRunArgs(container_image="debian")) as sb:
            print(sb.run_shell("uname -a").stdout)

Each client has a thread of its own, on which callbacks such as `on_progress` run too. Calls may be made from
any thread. Closing the client, or the end of the program, stops the sandboxes that it made.
"""

from ._generated import DSecClient, Files, Iam, Images, PortStream, Process, Sandbox, Session, Watch

__all__ = ["DSecClient", "Files", "Iam", "Images", "PortStream", "Process", "Sandbox", "Session", "Watch"]
