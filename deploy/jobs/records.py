"""Records: what a batch leaves behind, one JSON line per row: a result or an error. Pure.

Each carries the row's digest and the settings' digest: one that was made of another text or with other settings is not
taken for this row's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.jobs.rows import BadRow, Document, Format, Request, Row, digest_of, id_key
from deploy.jobs.tree import Node

MARK = "tidegate"
"""The field of a record with what a later run goes by."""
HEAD = b'{"id":'
"""What every record begins with."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Whose record it is, what of, with which settings; and whether it says what went wrong."""

    key: str
    digest: str
    settings: str
    failed: bool

    def counts_for(self, row: Row, settings: str, *, again: bool = False) -> bool:
        """Whether `row` is done; `again`: errors are to be tried once more."""
        return self.digest == row.digest and self.settings == settings and not (again and self.failed)

    def as_json(self) -> list[object]:
        """As a list, for whoever passes marks on."""
        return [self.key, self.digest, self.settings, self.failed]


@dataclass(slots=True)
class Usage:
    """Tokens of the requests that one row took."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, usage: Mapping[str, Any] | None) -> None:
        """Those of one answer, as the server told them; None where it did not."""
        self.requests += 1
        if usage:
            self.prompt_tokens += usage.get("prompt_tokens") or 0
            self.completion_tokens += usage.get("completion_tokens") or 0
            self.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def include(self, other: Usage) -> None:
        """Those of another row too."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cached_tokens += other.cached_tokens

    def as_json(self) -> dict[str, int]:
        """As it stands in a record."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
        }


def summary_line(row: Document, settings: str, model: str, usage: Usage, tree: Node) -> bytes:
    """The record of a document: the answer, and the tree of parts that it was made of."""
    record = {"id": row.key.removeprefix(id_key("")), "summary": tree.summary, "model": model}
    return _line(record | {"usage": usage.as_json(), "tree": tree.as_json()}, row, settings)


def response_line(row: Request, settings: str, status: int, request_id: str, body: object) -> bytes:
    """The record of a request: OpenAI's batch output. An answer that is an error says so by its status."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(_openai(row) | {"response": response, "error": None}, row, settings, failed=status != 200)


def error_line(row: Row, format: Format, settings: str, code: str, message: str) -> bytes:
    """The record of a row that has no result."""
    error = {"code": code, "message": message}
    if format == "openai":
        return _line(_openai(row) | {"response": None, "error": error}, row, settings, failed=True)
    at = {"line": row.line} if isinstance(row, BadRow) else {}
    return _line({"id": _id(row), **at, "error": error}, row, settings, failed=True)


def mark_of(line: bytes) -> Mark | None:
    """What a record says of itself; None for a line that is none of ours."""
    try:
        value = json.loads(line)
        mark = value[MARK]
        return Mark(str(mark["key"]), str(mark["digest"]), str(mark["settings"]), bool(mark.get("failed")))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _openai(row: Row) -> dict[str, object]:
    return {"id": f"batch_req_{digest_of(row.key, row.digest)}", "custom_id": _id(row)}


def _id(row: Row) -> str | None:
    return row.id if isinstance(row, BadRow) else row.key.removeprefix(id_key(""))


def _line(record: Mapping[str, object], row: Row, settings: str, *, failed: bool = False) -> bytes:
    mark: dict[str, object] = {"key": row.key, "digest": row.digest, "settings": settings}
    whole = {**record, MARK: mark | ({"failed": True} if failed else {})}
    # ASCII: no character of a text can end a line for whoever reads it.
    return json.dumps(whole, separators=(",", ":")).encode() + b"\n"
