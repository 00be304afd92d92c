"""What can go wrong, by kind.

Every failure is a :class:`DSecError`. A failure that the platform answered has the class of its code
(:class:`NotFound`, :class:`Conflict`, ...); one that happened on the way there is a
:class:`ConnectionFailed` or a :class:`RequestTimeout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._records import ExecResult

#: Characters of a failed command's output that its exception's message shows.
_TAIL_CHARS = 2000


class DSecError(Exception):
    """Base of every failure of this package."""

    #: What a program branches on; each subclass has its own.
    code: str = "error"
    #: What was asked and what was found, for a person.
    message: str
    #: Facts for a program: the field, the bounds, the id.
    detail: Mapping[str, Any]
    #: What to do about it; may be empty.
    hint: str
    #: Id of the request, which every process of the platform logs.
    request_id: str | None
    #: HTTP status, where the platform answered.
    status: int | None
    #: True when no answer came and the platform may have taken the request and acted on it.
    maybe_sent: bool
    #: How often the request was tried.
    attempts: int

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        detail: Mapping[str, Any] | None = None,
        hint: str = "",
        request_id: str | None = None,
        status: int | None = None,
        maybe_sent: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        self.detail = detail or {}
        self.hint = hint
        self.request_id = request_id
        self.status = status
        self.maybe_sent = maybe_sent
        self.attempts = 1

    def __str__(self) -> str:
        text = f"{self.code}: {self.message}"
        if self.hint:
            text += f" ({self.hint})"
        if self.maybe_sent:
            text += " [the platform may have acted on it]"
        if self.request_id:
            text += f" [request {self.request_id}]"
        return text


class InvalidArgument(DSecError, ValueError):
    """The request is malformed or a value is out of its range; the same again fails again."""

    code = "invalid_argument"


class Unauthenticated(DSecError):
    """No key, or a key nobody issued."""

    code = "unauthenticated"


class PermissionDenied(DSecError):
    """The key, or the user inside the sandbox, may not do this."""

    code = "permission_denied"


class NotFound(DSecError, LookupError):
    """What the request names is not there."""

    code = "not_found"


class AlreadyExists(DSecError):
    """It is there already, with other content."""

    code = "already_exists"


class Conflict(DSecError):
    """It is in a state in which this cannot be done: a stopped sandbox, an image in use."""

    code = "conflict"


class TooLarge(DSecError):
    """Bigger than a limit of the platform."""

    code = "too_large"


class ResourceExhausted(DSecError):
    """The platform has no room for it now; later may work."""

    code = "resource_exhausted"


class Unsupported(DSecError):
    """The host's kernel or this Python cannot do it."""

    code = "unsupported"


class Unavailable(DSecError):
    """The node, or the agent in the sandbox, cannot be reached now; later may work."""

    code = "unavailable"


class DeadlineExceeded(DSecError, TimeoutError):
    """A time limit that the platform enforces ran out."""

    code = "deadline_exceeded"


class Internal(DSecError):
    """A defect or a failing host."""

    code = "internal"


class ConnectionFailed(DSecError, ConnectionError):
    """The platform could not be reached, or the connection broke before the answer was whole."""

    code = "connection_failed"


class RequestTimeout(DSecError, TimeoutError):
    """This side's time limit for the call ran out before the platform answered."""

    code = "request_timeout"


class UnexpectedAnswer(DSecError):
    """The answer is not the API's: the address is probably not that of a dsec platform."""

    code = "unexpected_answer"


class ClientNotOpen(DSecError, RuntimeError):
    """The client was not opened, is closed, or belongs to another event loop or process."""

    code = "client_not_open"


class CommandFailed(DSecError):
    """A command ended with another exit code than 0, by a signal, or at its time limit."""

    code = "command_failed"
    #: How the command went.
    result: ExecResult

    def __init__(self, result: ExecResult) -> None:
        if result.timed_out:
            how = "ran into its time limit"
        elif result.signal:
            how = f"was ended by {result.signal}"
        else:
            how = f"ended with exit code {result.exit_code}"
        if result.oom_kills:
            names = ", ".join(kill.process for kill in result.oom_kills)
            how += f", and the kernel killed {names} because the sandbox's memory was full"
        message = f"`{result.command}` {how}"
        tail = (result.stderr.strip() or result.stdout.strip())[-_TAIL_CHARS:]
        if tail:
            message += f":\n{tail}"
        super().__init__(message)
        self.result = result

    def __reduce__(self) -> tuple[type[CommandFailed], tuple[ExecResult]]:
        return (CommandFailed, (self.result,))


_BY_CODE: Mapping[str, type[DSecError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        Unauthenticated,
        PermissionDenied,
        NotFound,
        AlreadyExists,
        Conflict,
        TooLarge,
        ResourceExhausted,
        Unsupported,
        Unavailable,
        DeadlineExceeded,
        Internal,
    )
} | {"method_not_allowed": InvalidArgument, "range_not_satisfiable": InvalidArgument}

# What an answer without the API's error body means: it came from something in between.
_BY_STATUS: dict[int, type[DSecError]] = {
    401: Unauthenticated,
    403: PermissionDenied,
    413: TooLarge,
    429: ResourceExhausted,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


def is_error_body(body: object, *, strict: bool = False) -> bool:
    """Whether a decoded JSON value is the API's error body; strictly: nothing but that."""
    if not isinstance(body, dict) or not isinstance(body.get("code"), str) or "message" not in body:
        return False
    return not strict or (body["code"] in _BY_CODE and set(body) <= {"code", "message", "detail", "hint"})


def error_of_body(
    body: Mapping[str, Any], *, request_id: str | None = None, status: int | None = None
) -> DSecError:
    """The exception for an error body."""
    code = str(body.get("code"))
    detail = body.get("detail")
    return _BY_CODE.get(code, DSecError)(
        str(body.get("message") or code),
        code=code,
        detail=detail if isinstance(detail, dict) else {},
        hint=str(body.get("hint") or ""),
        request_id=request_id,
        status=status,
    )


def error_of_status(status: int, what: str, *, request_id: str | None = None, text: str = "") -> DSecError:
    """The exception for a failed answer that is not the API's."""
    kind = _BY_STATUS.get(status, UnexpectedAnswer)
    shown = " ".join(text.split())[:200]
    return kind(
        f"{what} was answered with HTTP {status} and not with the API's error body"
        + (f": {shown}" if shown else ""),
        hint="is the address that of a dsec platform?" if kind is UnexpectedAnswer else "",
        request_id=request_id,
        status=status,
    )
