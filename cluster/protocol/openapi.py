"""Makes the OpenAPI page say what the handlers do: they read raw bodies, so FastAPI cannot see it by itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.protocol.api import (
    MAX_SESSION_CHARS,
    MAX_TIMEOUT_S,
    ChatRequest,
    CompletionRequest,
    PrewarmRequest,
    TokenizeRequest,
)

COMPONENTS = "#/components/schemas/{model}"
BEARER = {"type": "http", "scheme": "bearer", "description": "The API key that the operator gave you."}
TIMEOUT_HEADER = {
    "name": "x-request-timeout",
    "in": "header",
    "required": False,
    "description": "Seconds until the answer must be complete; the body's timeout goes before it.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
}
CLASS_HEADER = {
    "name": "x-priority-class",
    "in": "header",
    "required": False,
    "description": "batch: the same as service_tier flex.",
    "schema": {"type": "string", "enum": ["interactive", "batch"]},
}
SESSION_HEADER = {
    "name": "x-session-id",
    "in": "header",
    "required": False,
    "description": "Names the conversation: requests of one session share cached prefixes.",
    "schema": {"type": "string", "maxLength": MAX_SESSION_CHARS},
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
    stream = {"schema": {"type": "string", "description": "With stream: server-sent events, then [DONE]."}}
    whole: Responses = {200: {"model": answer, "content": {"text/event-stream": stream}}}
    app.add_api_route(
        path,
        handler,
        methods=["POST"],
        response_class=Response,
        responses=whole | ERRORS,
        openapi_extra={"parameters": [SESSION_HEADER, TIMEOUT_HEADER, CLASS_HEADER], "requestBody": taking(asked)},
    )


def taking(asked: type[BaseModel]) -> dict[str, Any]:
    """The page's words for a JSON body that is an `asked`."""
    schema = {"$ref": COMPONENTS.format(model=asked.__name__)}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def describe(app: FastAPI, keyed: bool) -> None:
    """Let the page hold the schemas of the bodies, and say that a key is needed where one is. Call it after the last
    route."""

    def page() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            bodies = (CompletionRequest, ChatRequest, PrewarmRequest, TokenizeRequest)
            asked = [(model, "validation") for model in bodies]
            _, schemas = models_json_schema(asked, ref_template=COMPONENTS)  # type: ignore[arg-type]
            components = made.setdefault("components", {})
            components.setdefault("schemas", {}).update(schemas["$defs"])
            if keyed:
                components["securitySchemes"] = {"key": BEARER}
                for path, route in made["paths"].items():
                    for operation in route.values() if path.startswith(("/v1/", "/tokenize")) else ():
                        operation["security"] = [{"key": []}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = page  # type: ignore[method-assign]
