"""Rows: what a batch consists of: documents to ask about, requests in OpenAI's batch format, and rows that are neither.

A row's key says which one it is, its digest what it holds: a row whose digest has changed is done again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Format = Literal["documents", "openai"]
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
"""What requests of a batch file may ask for here."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text to ask about; `fields` are what the row holds besides."""

    key: str
    digest: str
    text: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """A request that is sent as it is."""

    key: str
    digest: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that nothing can be done with, at `line` of the input (from 1); `id` as far as it has one that is free."""

    key: str
    digest: str
    line: int
    reason: str
    id: str | None = None


Row = Document | Request | BadRow


class RowError(ValueError):
    """Why a row can be nothing but an error."""


def digest_of(*parts: str) -> str:
    """16 hex digits that stand for these texts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def line_key(number: int) -> str:
    """The key of a row that has no id of its own. Ids are kept apart from these by a prefix: see `id_key`."""
    return f"line:{number}"


def id_key(id: str) -> str:
    """The key of the row that calls itself so."""
    return f"id:{id}"


def parsed(line: str) -> dict[str, Any]:
    """A line's JSON object. Raises RowError."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RowError(f"expected a JSON object, got {type(value).__name__}")
    return value


def format_of(value: Mapping[str, Any]) -> Format:
    """Which of the two formats a row is in."""
    return "openai" if "custom_id" in value and "body" in value else "documents"


def id_of(value: Mapping[str, Any], format: Format) -> str:
    """What a row calls itself; numbers count as their digits. Raises RowError."""
    name = "custom_id" if format == "openai" else "id"
    id = value.get(name)
    if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
        raise RowError(f"{name} must be a text that is not empty, or a whole number, got {shown(id)}")
    return str(id)


def request_of(value: Mapping[str, Any], key: str) -> Request:
    """A row of OpenAI's batch format. Raises RowError."""
    method, url, body = value.get("method", "POST"), value.get("url"), value.get("body")
    if method != "POST":
        raise RowError(f"method must be POST, got {shown(method)}")
    if url not in ENDPOINTS:
        raise RowError(f"url must be {' or '.join(ENDPOINTS)}, got {shown(url)}")
    if not isinstance(body, dict):
        raise RowError(f"body must be an object, got {shown(body)}")
    if body.get("stream"):
        raise RowError("body.stream: the answers of a batch come whole; leave it out")
    return Request(key, digest_of(str(url), json.dumps(body, sort_keys=True)), str(url), body)


def shown(value: object) -> str:
    """A value in a message: short."""
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:60] + "…"
