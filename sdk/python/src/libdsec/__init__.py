"""Python SDK of dsec, the sandbox platform for agentic RL training.

The names here are asynchronous; :mod:`libdsec.sync` has the same ones without `await`.
"""

from ._args import DSecContainerRunArgs, DSecExecArgs
from ._bodies import Data
from ._client import DSecClient
from ._commands import Process
from ._files import Files, Watch
from ._images import Images
from ._ports import PortStream
from ._records import (
    Capacity,
    EndReason,
    ExecInfo,
    ExecResult,
    Feature,
    FileEvent,
    FileInfo,
    FileList,
    Gap,
    ImageInfo,
    ImportProgress,
    LaunchPhase,
    NodeStatus,
    NodeUsage,
    OomKill,
    SandboxInfo,
    SandboxLimits,
    SessionInfo,
    Transfer,
    Usage,
)
from ._sandbox import Sandbox, Session
from ._version import __version__
from .errors import (
    AlreadyExists,
    ClientNotOpen,
    CommandFailed,
    Conflict,
    ConnectionFailed,
    DeadlineExceeded,
    DSecError,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    RequestTimeout,
    ResourceExhausted,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnexpectedAnswer,
    Unsupported,
)

__all__ = [
    "AlreadyExists",
    "Capacity",
    "ClientNotOpen",
    "CommandFailed",
    "Conflict",
    "ConnectionFailed",
    "DSecClient",
    "DSecContainerRunArgs",
    "DSecError",
    "DSecExecArgs",
    "Data",
    "DeadlineExceeded",
    "EndReason",
    "ExecInfo",
    "ExecResult",
    "Feature",
    "FileEvent",
    "FileInfo",
    "FileList",
    "Files",
    "Gap",
    "ImageInfo",
    "Images",
    "ImportProgress",
    "Internal",
    "InvalidArgument",
    "LaunchPhase",
    "NodeStatus",
    "NodeUsage",
    "NotFound",
    "OomKill",
    "PermissionDenied",
    "PortStream",
    "Process",
    "RequestTimeout",
    "ResourceExhausted",
    "Sandbox",
    "SandboxInfo",
    "SandboxLimits",
    "Session",
    "SessionInfo",
    "TooLarge",
    "Transfer",
    "Unauthenticated",
    "Unavailable",
    "UnexpectedAnswer",
    "Unsupported",
    "Usage",
    "Watch",
    "__version__",
]
