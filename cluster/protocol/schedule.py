"""How a request is treated: its class, its urgency, its deadline, how long its cache is kept; all of it within what
its tenant may. Knows no prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import ApiError
from cluster.generation import Generation, Quota
from cluster.protocol.api import Scheduled
from cluster.protocol.caller import Caller
from cluster.tenants import Tenant
from workers.sequence import Priority, Sampling

TIERS = {"flex": Priority.BATCH, "default": Priority.INTERACTIVE, "priority": Priority.INTERACTIVE}
"""`service_tier` -> class. "auto" and "scale" ask for none: interactive, unless the tenant may only send batch work."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Times in seconds; `timeout_s` None: the server's default."""

    tenant: Tenant
    session: str | None
    priority: Priority
    urgency: int
    timeout_s: float | None
    keep_s: float

    @classmethod
    def of(cls, asked: Scheduled, caller: Caller) -> Schedule:
        """What the body and the headers ask for. Raises ApiError (403) when the tenant may not send such requests."""
        tenant = caller.tenant
        return cls(
            tenant=tenant,
            session=caller.session,
            priority=_class(asked, caller),
            urgency=max(asked.priority or 0, tenant.best_urgency),
            timeout_s=asked.timeout if asked.timeout is not None else caller.timeout_s,
            keep_s=min(asked.keep_alive or 0.0, tenant.max_keep_s),
        )

    def generation(
        self, id: str, prompt: tuple[int, ...], sampling: Sampling, model: str, keyed: str | None
    ) -> Generation:
        """One choice, so treated. `keyed` is the session that the body names, for a request whose headers name none."""
        return Generation(
            id=id,
            prompt=prompt,
            sampling=sampling,
            model=model,
            session=self.session or keyed or None,
            share=self.tenant.share,
            priority=self.priority,
            urgency=self.urgency,
            timeout_s=self.timeout_s,
            keep_s=self.keep_s,
            quota=Quota(self.tenant.session_blocks, self.tenant.tenant_blocks),
        )


def _class(asked: Scheduled, caller: Caller) -> Priority:
    """The less urgent one where header and body name two."""
    allowed = caller.tenant.classes
    named = [one for one in (TIERS.get(asked.service_tier or ""), caller.urgency_class) if one is not None]
    wanted = max(named) if named else min(allowed)
    if wanted in allowed:
        return wanted
    instead = "send service_tier flex" if wanted is Priority.INTERACTIVE else "leave service_tier flex out"
    message = f"This API key may not send {wanted.name.lower()} requests: {instead}."
    raise ApiError(message, "class_not_allowed", "service_tier")
