"""Around every request: its id on the way out, and the last net under what nobody caught.

Pure ASGI, so that streams pass through untouched. The client's text is never logged: of an exception only its type
and where it came from.
"""

from __future__ import annotations

import logging
import re
import traceback
import uuid

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import internal

log = logging.getLogger("tidegate.ingress")

HARMLESS = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
"""Request ids that are echoed as they are; any other is replaced by one of ours."""


class Envelope:
    """The outermost layer of the app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = request_id(scope)
        started = False

        async def stamped(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = id
            await send(message)

        try:
            await self._app(scope, receive, stamped)
        except Exception as error:
            log_failure(error, id)
            if not started:
                await JSONResponse(internal().body(), internal().status)(scope, receive, stamped)


def request_id(scope: Scope) -> str:
    """The client's own id where it is harmless, else a new one."""
    given = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if HARMLESS.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def log_failure(error: BaseException, id: str = "-") -> None:
    """A fault of ours: its type and its frames, not its message, which may quote the client."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("request %s failed: %s at\n%s", id, type(error).__name__, frames)
