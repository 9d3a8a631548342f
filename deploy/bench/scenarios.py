"""Loads that press a service, as data: crowds of clients, in phases. Knows no HTTP and no clock.

closed      as many clients as saturate it, each asking again as soon as it has its answer
overload    many at once, outputs that grow from client to client, half of them batch: all must end
neighbour   one who asks every two seconds: alone, beside a flood, beside it under the flood's own key (so that it is
            first come, first served), beside a flood of batch requests
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from deploy.bench.prompts import Step, words

BATCH: Mapping[str, object] = {"service_tier": "flex"}
"""What a request says to be of the batch class."""
FLOOD, QUIET = "flood", "quiet"
"""Names of the two keys that a crowd may use."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """`clients` alike that ask one request after the other, or (`every_s`) one each so many seconds whether or not the
    one before is done. Prompts have half to 1.5 × `prompt_words`; outputs `shortest` to `longest` tokens: growing from
    client to client (`growing`), else drawn. A client ends after `requests` (None: with its phase). `key` names the API
    key it uses, `fields` go into the body."""

    name: str
    clients: int
    prompt_words: int = 64
    shortest: int = 64
    longest: int = 64
    growing: bool = False
    every_s: float | None = None
    requests: int | None = None
    key: str = FLOOD
    fields: Mapping[str, object] = field(default_factory=dict)

    def steps(self, client: int, seed: int) -> Iterator[Step]:
        """What that client asks, in order: the same for the same seed."""
        rng = random.Random(f"{seed}/{self.name}/{client}")
        asked = 0
        while self.requests is None or asked < self.requests:
            asked += 1
            length = max(1, rng.randint(self.prompt_words // 2, self.prompt_words * 3 // 2))
            yield Step(prompt=words(rng, length), max_tokens=self._tokens(client, rng))

    def _tokens(self, client: int, rng: random.Random) -> int:
        if self.growing:
            return self.shortest + (self.longest - self.shortest) * client // max(1, self.clients - 1)
        return rng.randint(self.shortest, self.longest)


@dataclass(frozen=True, slots=True)
class Phase:
    """Crowds at the same time for `seconds` (None: until each has asked all it has to). What ends in the first `warm_s`
    is not counted, what still runs at the end is cut off."""

    name: str
    crowds: tuple[Crowd, ...]
    seconds: float | None = None
    warm_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Phases, one after the other."""

    name: str
    phases: tuple[Phase, ...]


def closed(*, clients: int = 32, seconds: float = 180.0, prompt_words: int = 64, max_tokens: int = 256) -> Scenario:
    """A saturating closed loop: drawn outputs, so that requests do not end in step."""
    crowd = Crowd("clients", clients, prompt_words, max(1, max_tokens // 4), max_tokens)
    return Scenario("closed", (Phase("closed", (crowd,), seconds, min(15.0, seconds / 4)),))


def overload(*, clients: int = 64, prompt_words: int = 64, max_tokens: int = 256) -> Scenario:
    """All at once, one request each, the longest output `max_tokens`; every other client is batch."""
    shortest = max(1, max_tokens // 8)
    interactive = Crowd("interactive", clients - clients // 2, prompt_words, shortest, max_tokens, True, requests=1)
    batch = Crowd("batch", clients // 2, prompt_words, shortest, max_tokens, True, requests=1, fields=BATCH)
    return Scenario("overload", (Phase("overload", (interactive, batch)),))


def neighbour(
    *,
    clients: int = 48,
    seconds: float = 60.0,
    prompt_words: int = 64,
    max_tokens: int = 128,
    quiet_tokens: int = 16,
    every_s: float = 2.0,
) -> Scenario:
    """The quiet one's TTFT in each phase is what counts."""

    def quiet(key: str) -> Crowd:
        return Crowd("quiet", 1, prompt_words, quiet_tokens, quiet_tokens, every_s=every_s, key=key)

    flood = Crowd("flood", clients, prompt_words, max(1, max_tokens // 2), max_tokens)
    batch = Crowd("batch flood", clients, prompt_words, max(1, max_tokens // 2), max_tokens, fields=BATCH)
    warm = min(10.0, seconds / 4)
    return Scenario(
        "neighbour",
        (
            Phase("idle", (quiet(QUIET),), seconds),
            Phase("flood", (quiet(QUIET), flood), seconds, warm),
            Phase("first come, first served", (quiet(FLOOD), flood), seconds, warm),
            Phase("batch", (quiet(QUIET), batch), seconds, warm),
        ),
    )
