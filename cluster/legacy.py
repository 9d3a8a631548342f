"""What a coordinator leaves to its successor: the revisions of its settings and which groups are cordoned.

Kept in Ray's own key-value store (the GCS, which outlives the head node where its fault tolerance is set up). What
cannot be read is said in the log and counts for nothing: the deployment's own settings hold then.
"""

from __future__ import annotations

import hashlib
import logging
import pickle

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from cluster.coordination.revisions import Edition, Revisions
from cluster.settings import CoordinatorSettings

_SPACE = b"tidegate"

_log = logging.getLogger(__name__)


def remember(service: str, content: bytes) -> None:
    """Keep `content` for the next coordinator of `service`. Blocks for a call to Ray."""
    _internal_kv_put(_key(service), content, overwrite=True, namespace=_SPACE)


def forget(service: str) -> None:
    """The service is over."""
    _internal_kv_del(_key(service), namespace=_SPACE)


def recall(settings: CoordinatorSettings) -> tuple[Revisions, frozenset[str]]:
    """What an earlier coordinator of this very deployment has left, else its settings as they are."""
    content = _internal_kv_get(_key(settings.service), namespace=_SPACE)
    if content:
        try:
            config, revisions, cordoned = pickle.loads(content)
            if config == settings.config and isinstance(revisions, Revisions):
                return revisions, frozenset(cordoned)
        except Exception as error:  # whatever an older version has written: to start matters more
            _log.error("the settings that the coordinator before has left cannot be read: %r", error)
    return Revisions.begin(edition_of(settings)), frozenset()


def edition_of(settings: CoordinatorSettings) -> Edition:
    """The edition that a deployment begins with."""
    return Edition(settings.digest, settings.settings, settings.source, settings.source)


def _key(service: str) -> bytes:
    return hashlib.sha256(f"coordinator of {service}".encode()).digest()
