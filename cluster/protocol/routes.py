"""The HTTP surface: OpenAI's routes over a `Completer`, and what monitors ask. Does not know how a request is served.

Handlers read the raw body themselves, because FastAPI would coerce types and answer errors in a shape of its own. The
page /openapi.json is true; there is no /docs, whose scripts a browser would fetch from elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from cluster.errors import ApiError, not_ready
from cluster.generation import Completer, Health, ModelCard
from cluster.protocol.answers import ChatCompletion, Completion
from cluster.protocol.api import MAX_LOGPROBS, ChatRequest, CompletionRequest, PrewarmRequest, TokenizeRequest
from cluster.protocol.caller import Callers
from cluster.protocol.envelope import Envelope
from cluster.protocol.generating import Generating
from cluster.protocol.intake import Intake
from cluster.protocol.openapi import CLASS_HEADER, ERRORS, TIMEOUT_HEADER, describe, generating_route, taking
from cluster.protocol.reader import Reader
from cluster.protocol.served import ServedModel, ServedModels
from cluster.protocol.sessions import Sessions
from cluster.protocol.tokens import Tokenizing

BODY_LIMIT = 8 * 1024 * 1024
COMMENT_S = 10.0
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
    models: Sequence[ServedModel],
    *,
    callers: Callers | None = None,
    version: str = "0",
    body_limit: int = BODY_LIMIT,
    encoders: int = 2,
    comment_s: float = COMMENT_S,
    max_logprobs: int = MAX_LOGPROBS,
) -> FastAPI:
    """The app of one ingress replica. Without `callers` there are no API keys. `body_limit` is in bytes, `encoders` the
    number of threads that encode long prompts; `comment_s` seconds of silence in a stream are followed by a comment.
    A completion may ask for `max_logprobs` likeliest tokens at each place."""
    app = FastAPI(title="Tidegate", version=version, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Envelope)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    callers = callers or Callers(lambda: None, time.time)
    served = ServedModels(models)
    intake = Intake(served, encoders, max_logprobs)
    reader = Reader(callers, intake, body_limit)
    generating = Generating(completer, intake, reader, comment_s)
    generating_route(app, "/v1/completions", generating.completions, CompletionRequest, Completion)
    generating_route(app, "/v1/chat/completions", generating.chat, ChatRequest, ChatCompletion)
    counted = {"requestBody": taking(TokenizeRequest)}
    app.post("/tokenize", responses=ERRORS, openapi_extra=counted)(Tokenizing(intake, reader).tokens)
    _add_sessions(app, Sessions(completer, intake, reader))
    _add_models(app, served, callers)
    _add_health(app, completer, version)
    describe(app, callers.keyed)
    return app


def _add_sessions(app: FastAPI, sessions: Sessions) -> None:
    """A session's name may hold slashes."""
    path = "/v1/sessions/{session:path}"
    about = {"parameters": [TIMEOUT_HEADER, CLASS_HEADER], "requestBody": taking(PrewarmRequest)}
    app.post(f"{path}/prewarm", responses=ERRORS, openapi_extra=about)(sessions.prewarm)
    app.get(path, responses=ERRORS)(sessions.show)
    app.delete(path, responses=ERRORS)(sessions.forget)


def _add_models(app: FastAPI, served: ServedModels, callers: Callers) -> None:
    created = int(time.time())

    def shown(name: str, card: ModelCard) -> Model:
        return Model(id=name, created=created, max_model_len=card.max_model_len)

    @app.get("/v1/models", responses=ERRORS)
    async def models(request: Request) -> Models:
        """The names that requests may use."""
        tenant = callers.tenant(request.headers)
        return Models(data=[shown(name, card) for name, card in served.allowed(tenant)])

    @app.get("/v1/models/{model:path}", responses=ERRORS)
    async def model(model: str, request: Request) -> Model:
        """One of them."""
        _, card = served.pick(model, callers.tenant(request.headers))
        return shown(model, card)


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
