"""Run: a batch from plan to totals: finds the service, asks what it is like, opens the output, does the rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import aiohttp
from rich.console import Console

from deploy.bench.client import ServerError
from deploy.cluster import recall
from deploy.config import ConfigError, Environment
from deploy.jobs import discovery
from deploy.jobs.batch import Batch, Ledger
from deploy.jobs.client import Refused, Server
from deploy.jobs.counting import Counter, LocalCounter, ServerCounter
from deploy.jobs.discovery import Capacity
from deploy.jobs.dispatch import Dispatch
from deploy.jobs.documents import Input
from deploy.jobs.ledger import FileLedger
from deploy.jobs.objects import ObjectLedger
from deploy.jobs.pace import Pace
from deploy.jobs.places import is_url
from deploy.jobs.progress import Display, totals_lines
from deploy.jobs.returning import FrameLedger
from deploy.jobs.rows import digest_of
from deploy.jobs.summary import Shape, Summarizer, least_limit
from deploy.jobs.template import Template
from deploy.jobs.work import Work

DEFAULT_URL = "http://127.0.0.1:8000"
SPARE_TOKENS = 16
"""Left free in every request: a text may have a token more within a prompt than by itself."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a batch is asked to do. `context` None: the model's own; times in seconds, sizes in tokens."""

    input: Input
    template: Template
    max_tokens: int = 256
    context: int | None = None
    temperature: float = 0.0
    max_in_flight: int = 64
    patience_s: float = 3600.0
    timeout_s: float = 3600.0
    retry_errors: bool = False
    in_order: bool = True
    tokenizer: Path | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """Where to ask. `url` None: the cluster's own in a Ray job, else the one on this machine."""

    url: str | None
    model: str | None
    key: str | None
    environment: Environment

    def located(self) -> tuple[str, Callable[[], Capacity | None]]:
        """The URL, and how to learn what the service computes with. Raises NoService."""
        if self.url is None and self.environment.in_ray_job:
            url, capacity = discovery.found(None)
            return url, lambda: capacity
        run_dir = self.environment.cache / "run"
        url = (self.url or "").rstrip("/").removesuffix("/v1")
        note = recall(run_dir, url=url or None)
        if note is None:
            return url or DEFAULT_URL, lambda: None
        return note.url, lambda: discovery.capacity_at(note.link.address, note.link.token)


def output_ledger(output: str | None, known: Path | None, settings: str) -> Ledger:
    """The output: a file, a URL, or None: whoever submitted this job. Raises LedgerError."""
    if output is None:
        return FrameLedger(settings, known)
    return ObjectLedger(output) if is_url(output) else FileLedger(Path(output))


async def run_batch(plan: Plan, service: Service, opened: Callable[[str], Ledger], said: Console) -> bool:
    """Do what is left to do; whether every row has a record now. `opened` opens the output, given the settings' digest.
    Raises ConfigError, ServerError, GaveUp, LedgerError, NoService."""
    url, capacity = await asyncio.to_thread(service.located)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20) as http:
        display = Display(said, Pace(plan.max_in_flight))
        dispatch = Dispatch(display.pace, plan.patience_s, display.trouble)
        work = await _prepared(plan, Server(http, url, service.model or "", "", service.key), dispatch)
        ledger = await asyncio.to_thread(opened, work.settings)
        batch = Batch(
            plan.input.rows,
            ledger,
            work.settings,
            workers=plan.max_in_flight,
            in_order=plan.in_order,
            again=plan.retry_errors,
            on_progress=display.show,
        )
        computed = None
        try:
            with display:
                await batch.run(work)
            computed = await asyncio.to_thread(capacity)
        finally:
            display.lines(totals_lines(batch.totals, computed))
            await asyncio.to_thread(ledger.close)
    return not batch.totals.missing


async def _prepared(plan: Plan, server: Server, dispatch: Dispatch) -> Work:
    """Who makes records of rows. Waits for a server that is not up yet."""
    try:
        name, context = await dispatch.send(server.introduction, learns=False)
        server = replace(server, model=server.model or name, timeout_s=plan.timeout_s)
        if plan.input.settled() == "openai":
            settings = digest_of("openai")
            return Work("openai", settings, replace(server, session=_session(settings)), dispatch)
        counter = LocalCounter(plan.tokenizer) if plan.tokenizer else ServerCounter(server)
        shape = await _shaped(plan, counter, dispatch, plan.context or context)
    except Refused as refused:
        raise ServerError(f"{server.url}: {refused}") from refused
    settings = digest_of(json.dumps([server.model, *astuple(shape)]))
    server = replace(server, session=_session(settings))
    return Work("documents", settings, server, dispatch, Summarizer(server, dispatch, counter, shape))


def _session(settings: str) -> str:
    """The name by which all requests of such a batch share what is cached of their common beginning."""
    return f"summarize-{settings}"


async def _shaped(plan: Plan, counter: Counter, dispatch: Dispatch, context: int | None) -> Shape:
    """How documents are asked about. Raises ConfigError where there is no room for any."""
    if context is None:
        raise ConfigError("--context: the server does not say how long a request may be; how many tokens?")
    bare = plan.template.render("", dict.fromkeys(plan.template.fields, ""))
    try:
        overhead, chat = await dispatch.send(lambda: counter.overhead(bare), learns=False)
    except Refused as refused:
        if refused.status != 404:
            raise
        raise ConfigError("--tokenizer: the server does not count tokens; name the folder of the model's own") from None
    limit = context - plan.max_tokens - overhead - SPARE_TOKENS
    if limit < (least := least_limit(plan.max_tokens)):
        raise ConfigError(
            f"--max-tokens {plan.max_tokens}: of {context} tokens of a request, {overhead} are the question and "
            f"{plan.max_tokens} the answer; {max(0, limit)} are left for the text, and two answers must fit there "
            f"({least}): ask for shorter answers, or give a longer --context"
        )
    return Shape(plan.template, limit, plan.max_tokens, plan.temperature, chat)
