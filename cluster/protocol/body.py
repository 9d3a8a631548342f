"""A request's body: read within its limit, parsed as the JSON that RFC 8259 means, checked against a model of `api`.

Every way in which it can be wrong is an ApiError whose message is one sentence. Knows no field's meaning.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from cluster.errors import ApiError

Model = TypeVar("Model", bound=BaseModel)

MOST_CONTAINERS = 50_000
STRING = re.compile(rb'(?s)"[^"\\]*(?:\\.[^"\\]*)*"?')  # an open one ends with the body: one pass, whatever comes
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
SENTENCES = {
    "missing": "is required",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must not be an empty string",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
}
"""pydantic's error types -> our words. Those that `api` raises itself carry their own."""


async def read(headers: Mapping[str, str], chunks: AsyncIterator[bytes], limit: int) -> bytes:
    """The body, at most `limit` bytes of it: more is refused (413) before it is read, or as soon as it shows."""
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:19]) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for chunk in chunks:
        if len(body) + len(chunk) > limit:
            raise _too_large(limit)
        body += chunk
    return bytes(body)


def check_type(content_type: str) -> None:
    """Raises ApiError (415) unless it is JSON in UTF-8: nothing else, so that no web page's form can post here."""
    kind, _, parameters = content_type.lower().partition(";")
    charset = re.search(r"charset\s*=\s*\"?([^\s\";]+)", parameters)
    if kind.strip() != "application/json" or (charset and charset[1] not in ("utf-8", "utf8", "us-ascii")):
        message = "The Content-Type must be application/json (in UTF-8)."
        raise ApiError(message, "unsupported_media_type")


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError (400) for all else, duplicate keys, NaN and infinities included."""
    if _crowded(body):
        raise _invalid(f"has more than {MOST_CONTAINERS} lists and objects")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"is not valid UTF-8 at byte {error.start}") from None
    if text.startswith("\N{ZERO WIDTH NO-BREAK SPACE}"):
        raise _invalid("begins with a byte order mark: send it without")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _invalid(f"is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except UnicodeEncodeError:
        raise _invalid("holds half a surrogate pair (\\ud800 to \\udfff), which is no character") from None
    except RecursionError:
        raise _invalid("is nested too deeply") from None
    except ValueError:
        raise _invalid("holds a number with too many digits") from None
    if not isinstance(value, dict):
        raise _invalid("must be a JSON object")
    return value


def check(model: type[Model], body: Mapping[str, Any]) -> Model:
    """`body` as a `model`. Raises ApiError (400) with the first field at fault."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    except RecursionError:
        raise _invalid("is nested too deeply") from None
    param = _path(first["loc"])
    words = SENTENCES.get(first["type"])
    sentence = words.format_map(first.get("ctx", {})) if words else first["msg"]
    raise ApiError(f"'{param}' {sentence}.", "invalid_value", param)


def _crowded(body: bytes) -> bool:
    """More lists and objects than a request can mean. The parser would hold up every other thread over them."""
    if body.count(b"[") + body.count(b"{") <= MOST_CONTAINERS:
        return False
    bare = STRING.sub(b"", body)
    return bare.count(b"[") + bare.count(b"{") > MOST_CONTAINERS


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _invalid("names a field twice")
    return made


def _constant(name: str) -> NoReturn:
    raise _invalid(f"holds {name}, which JSON does not have")


def _invalid(what: str) -> ApiError:
    return ApiError(f"The request body {what}.", "invalid_json")


def _too_large(limit: int) -> ApiError:
    return ApiError(f"The request body is larger than {limit} bytes, the most that is read.", "body_too_large")
