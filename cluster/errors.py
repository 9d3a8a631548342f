"""What can go wrong for a client, in OpenAI's error shape, and the one table from an error's code to its HTTP status.

Knows no route and no engine. Messages say what to change; they never carry a traceback, a class name or log text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STATUS: dict[str, tuple[int, str]] = {
    # Who asks.
    "invalid_api_key": (401, "invalid_request_error"),
    "model_not_allowed": (403, "invalid_request_error"),
    "class_not_allowed": (403, "invalid_request_error"),
    # What the client sent.
    "invalid_json": (400, "invalid_request_error"),
    "invalid_value": (400, "invalid_request_error"),
    "unsupported_parameter": (400, "invalid_request_error"),
    "context_length_exceeded": (400, "invalid_request_error"),
    "never_fits": (400, "invalid_request_error"),
    "no_chat_template": (400, "invalid_request_error"),
    "chat_template_refused": (400, "invalid_request_error"),
    "model_not_found": (404, "invalid_request_error"),
    "not_found": (404, "invalid_request_error"),
    "method_not_allowed": (405, "invalid_request_error"),
    "body_too_large": (413, "invalid_request_error"),
    "unsupported_media_type": (415, "invalid_request_error"),
    "client_closed": (499, "invalid_request_error"),
    # What the cluster cannot do now: try again.
    "tenant_limit": (429, "rate_limit_error"),
    "cluster_full": (503, "server_error"),
    "no_group": (503, "server_error"),
    "draining": (503, "server_error"),
    "not_ready": (503, "server_error"),
    "aborted": (503, "server_error"),
    "not_confirmed": (503, "server_error"),
    "timed_out": (504, "server_error"),
    # What went wrong on our side.
    "generation_failed": (500, "server_error"),
    "poisoned_request": (500, "server_error"),
    "internal_error": (500, "server_error"),
}
"""code -> (HTTP status, OpenAI's error type). The only place where the two meet."""


@dataclass(eq=False)
class ApiError(Exception):
    """An answer other than 2xx. `param` is the path of the field at fault, `retry_after` seconds (a header)."""

    message: str
    code: str = "invalid_value"
    param: str | None = None
    retry_after: float | None = None

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    @property
    def status(self) -> int:
        """The HTTP status; 500 for a code that the table does not know."""
        return STATUS.get(self.code, STATUS["internal_error"])[0]

    @property
    def type(self) -> str:
        """OpenAI's `error.type`."""
        return STATUS.get(self.code, STATUS["internal_error"])[1]

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body, as OpenAI's clients read it."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, at least 1, where there is something to wait for; how to authenticate where
        that is the matter (RFC 9110, section 11.6.1)."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.retry_after is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after)))}


def unsupported(field: str, instead: str) -> ApiError:
    """A field that OpenAI or a peer has and we do not serve: refused, because ignoring it would change the answer."""
    return ApiError(f"'{field}' is not supported: {instead}.", "unsupported_parameter", field)


def model_not_found(name: str, known: tuple[str, ...]) -> ApiError:
    """The model is none of ours; names those that the client may use."""
    shown = name if len(name) <= 100 else name[:100] + "…"
    served = ", ".join(known) or "nothing that this API key may use"
    return ApiError(f"The model '{shown}' does not exist. Served here: {served}.", "model_not_found", "model")


def model_not_allowed(name: str, allowed: tuple[str, ...]) -> ApiError:
    """The model is ours, but not for this tenant."""
    message = f"This API key may not use the model '{name}'. It may use: {', '.join(allowed) or 'none'}."
    return ApiError(message, "model_not_allowed", "model")


def invalid_key(sent: bool) -> ApiError:
    """No API key that counts; says how to send one. What was sent is never repeated."""
    if sent:
        return ApiError("The API key is not valid: it is unknown, revoked or expired.", "invalid_api_key")
    return ApiError("No API key was sent. Send it as a header: Authorization: Bearer YOUR_KEY.", "invalid_api_key")


def not_ready(reason: str) -> ApiError:
    """Nothing can answer now; a second later something may."""
    return ApiError(f"The model is not ready: {reason}", "not_ready", retry_after=1.0)


def internal() -> ApiError:
    """Our own fault; what it was is in the server's log, found by the request's id."""
    return ApiError("The server failed on this request. Its log has the reason, by x-request-id.", "internal_error")
