"""Submitting: `tidegate summarize --submit`: a job sent off and followed, its results put in order here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from deploy.jobs.ledger import FileLedger
from deploy.jobs.returning import End
from deploy.jobs.run import Plan
from deploy.jobs.submission import Collector, Parcel, Say, connected, follow, returned, submit


async def without_return(parcel: Parcel, words: Sequence[str], address: str | None, to: Console) -> bool:
    """Results go where `words` say. Whether the job has done all. Raises SubmissionError."""
    client = await asyncio.to_thread(connected, address)
    job = await asyncio.to_thread(submit, client, replace(parcel, options=[*parcel.options, *words]), None)
    _say(to)(f"submitted job {job}; it goes on by itself (ray job stop {job} ends it)")
    return await follow(client, job, Collector(None, _say(to)))


async def with_return(parcel: Parcel, plan: Plan, output: Path, address: str | None, to: Console) -> bool:
    """Results come to `output`. Whether every row has a record there. Raises SubmissionError, LedgerError."""
    ledger = await asyncio.to_thread(FileLedger, output)
    try:
        client = await asyncio.to_thread(connected, address)
        succeeded, end = await returned(client, parcel, output, ledger, _say(to))
        whole = succeeded and end is not None and end.whole
        if whole and end is not None and not parcel.shared:
            whole = await asyncio.to_thread(_settle, plan, ledger, end)
        if not whole:
            _say(to)("not every row has a record yet: run the same command again to go on")
        return whole
    finally:
        ledger.close()


def _settle(plan: Plan, ledger: FileLedger, end: End) -> bool:
    """Put the records in order; whether every row of the input has one. An input that was changed meanwhile has rows
    without."""
    valid = {row.key: (row.digest, end.settings) for row in plan.input.rows()}
    done = {mark.key: (mark.digest, mark.settings) for mark in ledger.marks}
    if any(done.get(key) != mark for key, mark in valid.items()):
        return False
    ledger.finish(valid, list(valid) if plan.in_order else None)
    return True


def _say(console: Console) -> Say:
    return lambda text: console.print(Text(text), soft_wrap=True)
