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
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from ray import serve

from cluster.documents import DocumentError
from cluster.generation import ModelCard
from cluster.keys import CHECK_S, KeyFile, read_secrets
from cluster.links import CoordinatorLink, EngineLink
from cluster.loopback import keep_on_loopback
from cluster.metrics import IngressMeter
from cluster.namespaces import Namespaces
from cluster.protocol.caller import Callers
from cluster.protocol.routes import build_app
from cluster.protocol.served import ServedModel
from cluster.requests.dispatch import Requests
from cluster.requests.work import Endurance
from cluster.settings import CoordinatorSettings, IngressSettings, LiveSettings, ModelSettings
from cluster.tenants import Tenant
from cluster.text.prefixes import Prefixes
from cluster.text.public import read_public
from cluster.text.tokenizer import Tokenizer
from workers.loglevel import set_log_level
from workers.models.identity import ModelIdentity

CAPACITY_S = 2.0
"""How often the size of the pools is looked up."""

SETTINGS_REST_S = 0.5
"""Before the settings are asked for again, where the coordinator did not answer."""

log = logging.getLogger("ray.serve")


@serve.ingress()
class Ingress:
    """One replica. `groups` is the handle that keeps the groups' deployments in the same application."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: IngressSettings, coordinator: CoordinatorSettings, version: str, groups: object = None
    ) -> None:
        keep_on_loopback()
        self._settings = settings
        self._version = version
        self._groups = groups
        self._fault = ""
        self._tokenizers = await asyncio.to_thread(_read_tokenizers, settings.models)
        self._cards = {model.names[0]: _card(model) for model in settings.models}
        self._unkeyed = _defaults(settings)
        self._keys = await asyncio.to_thread(_open_keys, settings, self._unkeyed)
        name = f"{settings.service}-ingress-{uuid.uuid4().hex[:12]}"
        self._coordinator = await CoordinatorLink.open(coordinator, name)
        self._namespaces = await self._make_namespaces(settings)
        self._requests = Requests(
            self._coordinator,
            lambda address: EngineLink(address, name),
            models=tuple(self._cards),
            cache=lambda generation: self._namespaces.keys(generation),
            sessions=lambda tenant, session: self._namespaces.of_session(tenant, session),
            clock=time.monotonic,
            endurance=Endurance(timeout_s=settings.timeout_s),
            meter=IngressMeter(settings.service),
        )
        follows = (self._follow_capacity(), self._follow_settings(), self._follow_keys())
        self._watches = [asyncio.create_task(follow) for follow in follows]

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(
            self._requests,
            [ServedModel(tokenizer, partial(self.card, name)) for name, tokenizer in self._tokenizers.items()],
            callers=Callers(lambda: self._keys.ring if self._keys else None, time.time, lambda: self._unkeyed),
            version=self._version,
            body_limit=self._settings.body_limit,
            comment_s=self._settings.comment_s,
            max_logprobs=self._settings.max_logprobs,
        )

    def card(self, model: str) -> ModelCard:
        """What requests for the model of this canonical name are checked against now."""
        return self._cards[model]

    async def modules(self, names: Sequence[str]) -> tuple[str, ...]:
        """Which of these modules this replica has loaded."""
        return tuple(name for name in names if name in sys.modules)

    async def __del__(self) -> None:
        if "_watches" in self.__dict__:
            for watch in self._watches:
                watch.cancel()
            await self._requests.aclose()

    async def _follow_settings(self) -> None:
        """Go by the settings in force, and say so."""
        held = 0
        while True:
            try:
                revision = await self._coordinator.revision(held, self._fault)
                if revision.number != held or self._fault:  # what could not be used may be mended by now
                    await self._adopt(revision.edition.live)
                    held = revision.number
            except Exception as error:  # whatever it is: to go on listening matters more
                log.warning("the settings in force cannot be asked for: %r", error)
                await asyncio.sleep(SETTINGS_REST_S)

    async def _adopt(self, live: LiveSettings) -> None:
        """All of these settings or, where a file of theirs cannot be used, none; `_fault` says why then."""
        set_log_level(live.log_level)
        settings, before = live.ingress, self._fault
        if settings is None or settings == self._settings:
            self._fault = ""
            return
        unkeyed = _defaults(settings)
        try:
            keys = await asyncio.to_thread(_open_keys, settings, unkeyed)
            namespaces = await self._make_namespaces(settings)
        except (DocumentError, OSError, ValueError) as error:
            self._fault = str(error)
            if self._fault != before:
                log.error("the settings stay as they are: %s", error)
            return
        self._fault = ""
        self._settings, self._unkeyed, self._keys, self._namespaces = settings, unkeyed, keys, namespaces
        self._requests.endure(Endurance(timeout_s=settings.timeout_s))

    async def _follow_keys(self) -> None:
        """Take in the file of keys whenever it changes."""
        while True:
            await asyncio.sleep(CHECK_S)
            if self._keys:
                await self._keys.look()

    async def _make_namespaces(self, settings: IngressSettings) -> Namespaces:
        public = await asyncio.to_thread(_read_public, settings, self._tokenizers)
        return Namespaces(
            await self._secrets(settings.secret_files),
            {model.names[0]: model.revision for model in settings.models},
            cache_scope=settings.cache_scope,
            tenants=lambda: len(self._keys.ring.tenants) if self._keys else 1,
            public=public,
        )

    async def _secrets(self, files: tuple[str, ...]) -> tuple[bytes, ...]:
        if files:
            return await asyncio.to_thread(read_secrets, files)
        return (await self._coordinator.secret(),)

    async def _follow_capacity(self) -> None:
        """Keep the most that one request can hold in any group's pool up to date, model by model. The requests, too,
        remember the groups that were seen here."""
        while True:
            try:
                groups = [state.card for state in await self._requests.groups()]
                self._cards = {name: card.sized(groups) for name, card in self._cards.items()}
            except Exception as error:  # whatever it is: the next look may succeed
                log.warning("the size of the pools cannot be looked up: %r", error)
            await asyncio.sleep(CAPACITY_S)


def _card(model: ModelSettings) -> ModelCard:
    spec = ModelIdentity.read(Path(model.folder))
    own = spec.context_length
    return ModelCard(
        names=model.names,
        max_model_len=min(model.max_model_len or own, own),
        vocab_size=spec.vocab_size,
        eos_ids=frozenset(spec.eos_ids),
        revision=model.revision,
    )


def _defaults(settings: IngressSettings) -> Tenant:
    """Everybody, where there are no keys; and what a tenant has that says nothing else."""
    return Tenant(
        session_blocks=settings.session_blocks,
        tenant_blocks=settings.tenant_blocks,
        max_keep_s=settings.max_keep_s,
    )


def _read_tokenizers(models: Sequence[ModelSettings]) -> dict[str, Tokenizer]:
    """By canonical name."""
    return {model.names[0]: Tokenizer.read(Path(model.folder)) for model in models}


def _open_keys(settings: IngressSettings, defaults: Tenant) -> KeyFile | None:
    return KeyFile(Path(settings.keys_file), defaults) if settings.keys_file else None


def _read_public(settings: IngressSettings, tokenizers: Mapping[str, Tokenizer]) -> dict[str, Prefixes]:
    if not settings.public_file:
        return {}
    try:
        return read_public(Path(settings.public_file).read_text(encoding="utf-8"), tokenizers)
    except (DocumentError, OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"the public prompts in {settings.public_file} cannot be used: {error}") from error
