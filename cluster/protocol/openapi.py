"""Makes the OpenAPI page say what the handlers do: they read raw bodies, so FastAPI cannot see it by itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.protocol.api import ChatRequest, CompletionRequest

COMPONENTS = "#/components/schemas/{model}"
SESSION_HEADER = {
    "name": "x-session-id",
    "in": "header",
    "required": False,
    "description": "Names the conversation: requests of one session share cached prefixes.",
    "schema": {"type": "string", "maxLength": 256},
}


class ErrorDetail(BaseModel):
    """What went wrong, for people (`message`) and for programs (`type`, `code`, and `param`, the field at fault)."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer other than 2xx."""

    error: ErrorDetail


Responses = dict[int | str, dict[str, Any]]

ERRORS: Responses = {
    "4XX": {"model": ErrorAnswer, "description": "The request cannot be served as it is."},
    "5XX": {"model": ErrorAnswer, "description": "It cannot be served now; Retry-After says when to try again."},
}


def generating_route(
    app: FastAPI,
    path: str,
    handler: Callable[[Request], Awaitable[Response]],
    asked: type[BaseModel],
    answer: type[BaseModel],
) -> None:
    """Add a POST route whose body is `asked` and whose answer is `answer`, or a stream of events."""
    schema = {"$ref": COMPONENTS.format(model=asked.__name__)}
    stream = {"schema": {"type": "string", "description": "With stream: server-sent events, then [DONE]."}}
    whole: Responses = {200: {"model": answer, "content": {"text/event-stream": stream}}}
    app.add_api_route(
        path,
        handler,
        methods=["POST"],
        response_class=Response,
        responses=whole | ERRORS,
        openapi_extra={
            "parameters": [SESSION_HEADER],
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        },
    )


def describe(app: FastAPI) -> None:
    """Let the page hold the schemas of the bodies. Call it after the last route."""

    def page() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            asked = [(model, "validation") for model in (CompletionRequest, ChatRequest)]
            _, schemas = models_json_schema(asked, ref_template=COMPONENTS)  # type: ignore[arg-type]
            made.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = page  # type: ignore[method-assign]
