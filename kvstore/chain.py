"""Names of content: typed encodings, namespaces, and the hash chain over a sequence's full blocks.

A block's key depends on its own tokens and on everything before them, on the namespace that may share it and on the
scheme that its bytes follow (model revision, KV precision, rope). Knows no blocks, no tables and no sessions.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Sequence

BlockKey = bytes
Field = str | bytes | int | None

KEY_BYTES = 32


def encode_fields(*fields: Field) -> bytes:
    """One byte string per tuple of fields: each is typed and length-prefixed, so that no two tuples look alike."""
    parts = []
    for field in fields:
        if field is None:
            tag, body = b"n", b""
        elif isinstance(field, bool):
            raise TypeError("a bool is no field: write 0 or 1")
        elif isinstance(field, int):
            tag, body = b"i", str(field).encode()
        elif isinstance(field, str):
            tag, body = b"s", field.encode("utf-8", "surrogatepass")
        else:
            tag, body = b"b", field
        parts.append(tag + len(body).to_bytes(8, "big") + body)
    return b"".join(parts)


def derive_namespace(secret: bytes, *fields: Field) -> bytes:
    """HMAC-SHA256 of the typed fields: the root that one tenant or session shares, which no client can choose."""
    return hmac.new(secret, encode_fields(*fields), hashlib.sha256).digest()


def chain_root(namespace: bytes, scheme: bytes) -> BlockKey:
    """The parent of a sequence's first block."""
    return hashlib.sha256(encode_fields("root", namespace, scheme)).digest()


def branch_root(parent: BlockKey, namespace: bytes) -> BlockKey:
    """The parent of the first block that belongs to `namespace` where a chain leaves a shared one after `parent`."""
    return hashlib.sha256(encode_fields("branch", parent, namespace)).digest()


def chain_key(parent: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """The key of the full block that holds `tokens` and follows `parent` (keys have one length, so no framing)."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()
