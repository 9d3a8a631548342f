"""What one ingress has not read or not acknowledged yet. Events of a request merge until they are read, so that a slow
reader costs memory bounded by its requests' max_tokens, and slows nobody.

Written by the step thread, read by the actor's event loop. Knows neither sequences nor steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.message import message
from workers.logprobs import Logprobs, join
from workers.plan import Finish, TokenEvent

Key = tuple[str, int]


@message
@dataclass(frozen=True, slots=True)
class Message:
    """One message of the stream to an ingress: everything that was unread. Numbers rise by one from 1."""

    number: int
    epoch: int
    events: tuple[TokenEvent, ...]


@dataclass(slots=True)
class _Backlog:
    """One request's output from the first unacknowledged token on."""

    start: int
    tokens: list[int] = field(default_factory=list)
    read: int = 0
    finish: Finish | None = None
    cached: int = 0
    error: str | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt: Logprobs | None = None


class Outbox:
    """One reader. `wake` is called, from the writing thread, whenever there is something to read or the box closes.
    `pressing`: there is a request's first token or its end among it."""

    def __init__(self, epoch: int, wake: Callable[[], None]) -> None:
        self.closed = False
        self.pressing = False
        self.epoch = epoch
        self._wake = wake
        self._lock = threading.Lock()
        self._backlogs: dict[Key, _Backlog] = {}
        self._unread: dict[Key, None] = {}
        self._number = 0
        self._marks: deque[tuple[int, list[tuple[Key, int, bool]]]] = deque()

    @property
    def requests(self) -> int:
        """Requests with something unacknowledged, or still under way."""
        return len(self._backlogs)

    @property
    def backlog(self) -> int:
        """Tokens unacknowledged."""
        return sum(len(backlog.tokens) for backlog in self._backlogs.values())

    def put(self, events: list[TokenEvent]) -> None:
        """Add events, each of which continues its request's output."""
        with self._lock:
            for event in events:
                key = (event.request, event.attempt)
                backlog = self._backlogs.setdefault(key, _Backlog(event.index))
                assert event.index == backlog.start + len(backlog.tokens), f"a gap in the output of {key}"
                backlog.tokens.extend(event.tokens)
                if event.logprobs is not None:
                    backlog.logprobs.append(event.logprobs)
                if event.prompt is not None:
                    backlog.prompt = event.prompt
                backlog.finish, backlog.error, backlog.cached = event.finish, event.error, event.cached
                self._unread[key] = None
                self.pressing = self.pressing or not event.index or event.finish is not None
        self._wake()

    def read(self) -> Message | None:
        """Everything unread as one message, or None."""
        with self._lock:
            self.pressing = False
            if not self._unread:
                return None
            self._number += 1
            marks: list[tuple[Key, int, bool]] = []
            events = tuple(self._event(key, marks) for key in self._unread)
            self._unread.clear()
            self._marks.append((self._number, marks))
            return Message(self._number, self.epoch, events)

    def acknowledge(self, number: int) -> None:
        """Forget what messages up to `number` carried."""
        with self._lock:
            while self._marks and self._marks[0][0] <= number:
                for key, index, ended in self._marks.popleft()[1]:
                    self._forget(key, index, ended)

    def rewind(self, acked: int, wake: Callable[[], None]) -> None:
        """A new reader takes over behind message `acked`: what came later is unread again."""
        self.acknowledge(acked)
        with self._lock:
            self._wake = wake
            self._marks.clear()
            for key, backlog in self._backlogs.items():
                backlog.read = 0
                if backlog.tokens or backlog.finish:
                    self._unread[key] = None
                    self.pressing = True
        wake()

    def close(self) -> None:
        """No more events will come."""
        self.closed = True
        self._wake()

    def _event(self, key: Key, marks: list[tuple[Key, int, bool]]) -> TokenEvent:
        backlog = self._backlogs[key]
        index = backlog.start + backlog.read
        tokens = tuple(backlog.tokens[backlog.read :])
        logprobs = None
        if backlog.logprobs:
            logprobs = join(backlog.logprobs)
            backlog.logprobs, logprobs = [logprobs], logprobs.since(backlog.read)
        # It comes with the first token; without one there is nothing to read twice but after a rewind.
        prompt = None if backlog.read else backlog.prompt
        backlog.read = len(backlog.tokens)
        marks.append((key, index + len(tokens), backlog.finish is not None))
        return TokenEvent(*key, index, tokens, backlog.finish, backlog.cached, backlog.error, logprobs, prompt)

    def _forget(self, key: Key, index: int, ended: bool) -> None:
        backlog = self._backlogs.get(key)
        if backlog is None:
            return
        if ended:
            del self._backlogs[key]
            return
        gone = index - backlog.start
        if gone > 0:
            del backlog.tokens[:gone]
            backlog.prompt = None
            if backlog.logprobs:
                backlog.logprobs = [join(backlog.logprobs).since(gone)]
            backlog.start, backlog.read = index, backlog.read - gone
