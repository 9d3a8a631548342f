"""Ingress: the Serve deployment that clients talk to. Joins the routes, the request shell and the links over Ray.

Loads neither torch nor transformers. Serve's own queue never stands before ours: a replica takes every request it is
sent, and placing decides.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from fastapi import FastAPI
from ray import serve

from cluster.generation import Generation, ModelCard
from cluster.links import CoordinatorLink, EngineLink
from cluster.loopback import keep_on_loopback
from cluster.namespaces import choose_scope, namespace
from cluster.protocol.routes import build_app
from cluster.requests.dispatch import Requests
from cluster.settings import IngressSettings
from cluster.text.tokenizer import Tokenizer
from workers.models.spec import ModelSpec

CAPACITY_S = 2.0
"""How often the size of the pools is looked up."""
TENANTS = 1
"""How many tenants there are: one, as long as there are no API keys."""

log = logging.getLogger("ray.serve")


@serve.ingress()
class Ingress:
    """One replica. `groups` is the handle that keeps the groups' deployment in the same application."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: IngressSettings, config: str, version: str, groups: object = None
    ) -> None:
        keep_on_loopback()
        self._settings = settings
        self._version = version
        self._groups = groups
        folder = Path(settings.model_dir)
        self._tokenizer = await asyncio.to_thread(Tokenizer.read, folder)
        self._card = _card(ModelSpec.read(folder), settings)
        self._pool_tokens: int | None = None
        self._coordinator = await CoordinatorLink.open(settings.service, config)
        name = f"{settings.service}-ingress-{uuid.uuid4().hex[:12]}"
        self._requests = Requests(
            self._coordinator,
            lambda address: EngineLink(address, name),
            models=settings.model_names[:1],
            namespace=_namespaces(settings, await self._secret()),
            clock=time.monotonic,
        )
        self._capacity = asyncio.create_task(self._follow_capacity())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(
            self._requests,
            self._tokenizer,
            self.card,
            version=self._version,
            body_limit=self._settings.body_limit,
        )

    def card(self) -> ModelCard:
        """What requests are checked against now."""
        card = self._card
        return ModelCard(
            card.names, card.max_model_len, card.vocab_size, self._pool_tokens, card.eos_ids, card.revision
        )

    async def modules(self, names: Sequence[str]) -> tuple[str, ...]:
        """Which of these modules this replica has loaded."""
        return tuple(name for name in names if name in sys.modules)

    async def __del__(self) -> None:
        if "_capacity" in self.__dict__:
            self._capacity.cancel()
            await self._requests.aclose()

    async def _secret(self) -> bytes:
        if self._settings.secret_file:
            return await asyncio.to_thread(Path(self._settings.secret_file).read_bytes)
        return await self._coordinator.secret()

    async def _follow_capacity(self) -> None:
        """Keep the most that one request can hold in any group's pool up to date."""
        while True:
            try:
                states = await self._coordinator.groups()
                self._pool_tokens = max((state.card.blocks * state.card.block_size for state in states), default=None)
            except ConnectionError as error:
                log.warning("the size of the pools cannot be looked up: %s", error)
            await asyncio.sleep(CAPACITY_S)


def _card(spec: ModelSpec, settings: IngressSettings) -> ModelCard:
    own = spec.context_length
    return ModelCard(
        names=settings.model_names,
        max_model_len=min(settings.max_model_len or own, own),
        vocab_size=spec.vocab_size,
        eos_ids=frozenset(spec.eos_ids),
        revision=settings.revision,
    )


def _namespaces(settings: IngressSettings, secret: bytes) -> Callable[[Generation], bytes]:
    scope = choose_scope(settings.cache_scope, TENANTS)

    def derive(generation: Generation) -> bytes:
        return namespace(
            secret,
            scope,
            tenant=generation.tenant,
            session=generation.session,
            request=generation.id,
            revision=settings.revision,
        )

    return derive
