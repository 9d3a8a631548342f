"""What ended requests teach: how many tokens of its max_tokens a request generates, by tenant and by size.

Numbers only: knows no request, no group and no clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict

SAMPLES = 8
"""So many outcomes make an estimate: fewer say nothing, and a wider one stands in."""
MARGIN = 0.25
"""Mean deviations that are reserved beyond the mean: requests outlive and fall short of it side by side, so that a pool
of many needs little more. (A whole deviation computes a third as many tokens twice, 0.3 instead of 0.9 %, and fills
2 to 3 % less of the pool; pools of 4 to 12 requests, uniform and exponential lengths.)"""
_WEIGHT = 1 / 16
"""A new outcome's share in a running mean, once there are many."""


class Estimate:
    """Running mean and mean deviation of the tokens that outputs had, and of their share of max_tokens."""

    __slots__ = ("_share", "_share_spread", "_tokens", "_tokens_spread", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self._tokens = self._tokens_spread = 0.0
        self._share = self._share_spread = 0.0

    @property
    def known(self) -> bool:
        return self.samples >= SAMPLES

    @property
    def tokens(self) -> float:
        """The mean, and a little on top."""
        return self._tokens + MARGIN * self._tokens_spread

    @property
    def share(self) -> float:
        return min(1.0, self._share + MARGIN * self._share_spread)

    def learn(self, tokens: int, max_tokens: int) -> None:
        self.samples += 1
        weight = max(_WEIGHT, 1 / self.samples)
        share = min(1.0, tokens / max_tokens)
        if self.samples > 1:
            self._tokens_spread += weight * (abs(tokens - self._tokens) - self._tokens_spread)
            self._share_spread += weight * (abs(share - self._share) - self._share_spread)
        self._tokens += weight * (tokens - self._tokens)
        self._share += weight * (share - self._share)

    def expect(self, max_tokens: int) -> int:
        """The larger of both readings: outputs that ran into a small limit say little of what a large one brings."""
        return math.ceil(max(self.tokens, self.share * max_tokens))


class _Tenant:
    __slots__ = ("all", "by_size")

    def __init__(self) -> None:
        self.all = Estimate()
        self.by_size: dict[int, Estimate] = {}


class Experience:
    """Of one model. Remembers the `tenants` that were heard of last."""

    def __init__(self, *, tenants: int = 1024) -> None:
        self._limit = tenants
        self._all = Estimate()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def share(self) -> float:
        """The share of max_tokens that the model's requests are expected to use; 1 before anything is known."""
        return self._all.share if self._all.known else 1.0

    @property
    def tokens(self) -> float | None:
        """Output tokens that a request is expected to have; None before anything is known."""
        return self._all.tokens if self._all.known else None

    def expect(self, tenant: str, max_tokens: int) -> int:
        """Output tokens to reserve for a request that may generate `max_tokens`: at least 1, at most `max_tokens`. By
        what the tenant's requests of that size used, else all of the tenant's, else all of the model's; all of
        `max_tokens` before anything is known."""
        known = self._tenants.get(tenant)
        estimates = (known.by_size.get(max_tokens.bit_length()), known.all, self._all) if known else (self._all,)
        for estimate in estimates:
            if estimate is not None and estimate.known:
                return max(1, min(max_tokens, estimate.expect(max_tokens)))
        return max(1, max_tokens)

    def learn(self, tenant: str, output_tokens: int, max_tokens: int) -> None:
        """A request that might have generated `max_tokens` ended by itself after `output_tokens`."""
        if max_tokens < 1:
            return
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant()
            if len(self._tenants) > self._limit:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        size = max_tokens.bit_length()
        if size not in known.by_size:
            known.by_size[size] = Estimate()
        for estimate in (known.by_size[size], known.all, self._all):
            estimate.learn(output_tokens, max_tokens)
