"""What an ingress replica and the coordinator are told when they are built. Frozen, plain values.

Knows neither YAML nor environment variables: `deploy.config` makes them from the operator's config. No secret stands
here, only the names of files that hold them: Serve shows application arguments to whoever asks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.coordination.terms import CoordinatorTerms, LineBounds, Thresholds
from kvstore.message import message
from workers.orders import GroupTerms


@message
@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model. `folder` holds the tokenizer and its chat template. `names` are those that clients may use, the
    canonical one first; `revision` identifies the weights and goes into every namespace; `max_model_len` is in tokens
    (None: the model's own context)."""

    folder: str
    names: tuple[str, ...]
    revision: str = ""
    max_model_len: int | None = None


@message
@dataclass(frozen=True, slots=True)
class IngressSettings:
    """One HTTP ingress replica.

    `secret_files` hold the bytes that key the namespaces, the same on every replica, the one in use first, one that is
    being retired after it (none: the coordinator draws one for its lifetime). `keys_file` holds the tenants and the
    hashes of their API keys (None: everybody is the tenant "default"), `public_file` the prompts whose cache all
    tenants share. `cache_scope` is "auto", "tenant" or "session". `body_limit` is in bytes. `drain_s`: how long running
    answers may take to end when the service stops. `timeout_s` is the deadline of a request that names none.
    `comment_s`: a stream that waits longer than that in the line gets its 200 and a comment, and one as often again.
    `max_logprobs`: how many likeliest tokens a completion may ask for at each place.
    `session_blocks`, `tenant_blocks` and `max_keep_s` are the cache quotas where a tenant has none of its own.
    """

    models: tuple[ModelSettings, ...]
    service: str = "tidegate"
    secret_files: tuple[str, ...] = ()
    keys_file: str | None = None
    public_file: str | None = None
    cache_scope: str = "auto"
    session_ttl_s: float = 300.0
    body_limit: int = 8 * 1024 * 1024
    drain_s: float = 30.0
    timeout_s: float = 600.0
    comment_s: float = 10.0
    max_logprobs: int = 5
    session_blocks: int | None = None
    tenant_blocks: int | None = None
    max_keep_s: float = 3600.0


@message
@dataclass(frozen=True, slots=True)
class LiveSettings:
    """What may change while a service runs: of the line and the ladder, of each model's groups (by the model's
    canonical name), of the ingresses (None: nothing; of theirs only what `cluster.ingress` can change counts).
    `purges` counts how often all that is cached was to be forgotten."""

    line: LineBounds = LineBounds()
    ladder: Thresholds = Thresholds()
    groups: tuple[tuple[str, GroupTerms], ...] = ()
    ingress: IngressSettings | None = None
    log_level: str = "info"
    purges: int = 0

    def terms_of(self, model: str) -> GroupTerms:
        """Those of the groups of `model`."""
        found = dict(self.groups).get(model, GroupTerms())
        return replace(found, purges=self.purges, log_level=self.log_level)


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """`service` names it; `config` identifies the deployment: another one's coordinator is replaced, not shared; so is,
    by whoever deploys, one of another `version` of the code. It begins with the settings `live`, made of the config
    whose text is `source` and whose digest is `digest`, unless it has left others behind; `terms` hold what nothing
    live says. It ends itself when nobody has called for `idle_s`."""

    service: str
    config: str
    terms: CoordinatorTerms = CoordinatorTerms()
    idle_s: float = 600.0
    version: str = ""
    live: LiveSettings | None = None
    source: str = ""
    digest: str = ""

    @property
    def settings(self) -> LiveSettings:
        """The live settings to begin with."""
        return self.live or LiveSettings(self.terms.line, self.terms.ladder)
