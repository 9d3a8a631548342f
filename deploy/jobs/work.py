"""Work: a row to its record, by asking a server. What a row is to blame for becomes an error record; anything else ends
the batch."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.jobs.batch import Outcome
from deploy.jobs.client import Refused, Server
from deploy.jobs.dispatch import Dispatch
from deploy.jobs.records import Usage, error_line, response_line, summary_line
from deploy.jobs.rows import BadRow, Document, Format, Request, Row
from deploy.jobs.summary import Summarizer
from deploy.jobs.template import TemplateError


@dataclass(frozen=True, slots=True)
class Work:
    """`format` is that of the records, `settings` their digest."""

    format: Format
    settings: str
    server: Server
    dispatch: Dispatch
    summarizer: Summarizer | None = None

    async def __call__(self, row: Row) -> Outcome:
        """The record. Raises ServerError and GaveUp."""
        usage = Usage()
        try:
            if isinstance(row, Document):
                assert self.summarizer is not None
                tree = await self.summarizer.summarize(row, usage)
                return Outcome(summary_line(row, self.settings, self.server.model, usage, tree), False, usage)
            if isinstance(row, Request):
                return await self._sent(row, usage)
        except (Refused, TemplateError) as error:
            code = error.code if isinstance(error, Refused) else "invalid_row"
            return Outcome(error_line(row, self.format, self.settings, code, str(error)), True, usage)
        assert isinstance(row, BadRow)
        return Outcome(error_line(row, self.format, self.settings, "invalid_row", row.reason), True, usage)

    async def _sent(self, row: Request, usage: Usage) -> Outcome:
        """A refusal is the server's answer, and recorded as such."""
        try:
            whole = await self.dispatch.send(lambda: self.server.send(row.url, row.body))
        except Refused as refused:
            if not refused.status:
                raise
            line = response_line(row, self.settings, refused.status, refused.request_id, refused.body)
            return Outcome(line, True, usage)
        usage.add(whole.body.get("usage"))
        return Outcome(response_line(row, self.settings, whole.status, whole.request_id, whole.body), False, usage)
