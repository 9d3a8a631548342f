"""The HTTP surface: OpenAI's routes over a `Completer`, and what monitors ask. Does not know how a request is served.

Handlers read the raw body themselves, because FastAPI would coerce types and answer errors in a shape of its own. The
page /openapi.json is true; there is no /docs, whose scripts a browser would fetch from elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from cluster.errors import ApiError, model_not_found, not_ready
from cluster.generation import Completer, Health, ModelCard
from cluster.protocol.answers import ChatCompletion, Completion
from cluster.protocol.api import ChatRequest, CompletionRequest
from cluster.protocol.envelope import Envelope
from cluster.protocol.generating import Generating
from cluster.protocol.intake import Intake
from cluster.protocol.openapi import ERRORS, describe, generating_route
from cluster.text.tokenizer import Tokenizer

BODY_LIMIT = 8 * 1024 * 1024
HEALTH_PATIENCE_S = 2.0


class Model(BaseModel):
    """A name that requests may use. `max_model_len`: its context, prompt and answer together, in tokens."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "tidegate"
    max_model_len: int


class Models(BaseModel):
    """All of them."""

    object: str = "list"
    data: list[Model]


class Version(BaseModel):
    """Of this service."""

    version: str


def build_app(
    completer: Completer,
    tokenizer: Tokenizer,
    card: Callable[[], ModelCard],
    *,
    version: str = "0",
    body_limit: int = BODY_LIMIT,
    encoders: int = 2,
) -> FastAPI:
    """The app of one ingress replica. `card` is asked at every request, because what the pools can hold changes;
    `body_limit` is in bytes, `encoders` the number of threads that encode long prompts."""
    app = FastAPI(title="Tidegate", version=version, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Envelope)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    generating = Generating(completer, Intake(tokenizer, card, encoders), body_limit)
    generating_route(app, "/v1/completions", generating.completions, CompletionRequest, Completion)
    generating_route(app, "/v1/chat/completions", generating.chat, ChatRequest, ChatCompletion)
    _add_models(app, card)
    _add_health(app, completer, version)
    describe(app)
    return app


def _add_models(app: FastAPI, card: Callable[[], ModelCard]) -> None:
    created = int(time.time())

    def shown(name: str) -> Model:
        return Model(id=name, created=created, max_model_len=card().max_model_len)

    @app.get("/v1/models", responses=ERRORS)
    async def models() -> Models:
        """The names that requests may use."""
        return Models(data=[shown(name) for name in card().names])

    @app.get("/v1/models/{model:path}", responses=ERRORS)
    async def model(model: str) -> Model:
        """One of them."""
        if model not in card().names:
            raise model_not_found(model, card().names)
        return shown(model)


def _add_health(app: FastAPI, completer: Completer, version: str) -> None:
    @app.get("/health", responses=ERRORS)
    async def health() -> Response:
        """200 while a request sent now would be answered; else 503 and why."""
        try:
            async with asyncio.timeout(HEALTH_PATIENCE_S):
                state = await completer.health()
        except TimeoutError:
            state = Health(False, f"no word of the groups within {HEALTH_PATIENCE_S:g} s")
        groups = [{"group": one.group, "ready": one.ready, "reason": one.reason} for one in state.groups]
        answer = {"status": "ready" if state.ready else "not ready", "reason": state.reason, "groups": groups}
        if state.ready:
            return JSONResponse(answer)
        error = not_ready(state.reason)
        return JSONResponse(answer | error.body(), error.status, error.headers())

    @app.get("/version", responses=ERRORS)
    async def version_() -> Version:
        """The version of this service."""
        return Version(version=version)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers())


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses: a path or a method that there is not."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:200]
    if error.status_code == 405:
        refused = ApiError(f"{path} does not take {method}.", "method_not_allowed")
        return JSONResponse(refused.body(), refused.status, error.headers)
    return await _refused(request, ApiError(f"There is no {method} {path} here.", "not_found"))
