"""The API's errors, as its fake answers them."""

from __future__ import annotations

from typing import Any

STATUS = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "not_found": 404,
    "already_exists": 409,
    "conflict": 409,
    "too_large": 413,
    "resource_exhausted": 429,
    "unavailable": 503,
    "deadline_exceeded": 504,
    "internal": 500,
}


class ApiError(Exception):
    def __init__(self, code: str, message: str, detail: dict[str, Any] | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.body = {"code": code, "message": message, "detail": detail or {}, "hint": hint}
        self.status = STATUS[code]
