"""Stop strings: where they end a text that arrives in pieces. Knows no token and no stream.

Each stop string is an automaton (Knuth, Morris, Pratt 1977): its state is the length of its longest prefix that ends
the text so far. So a match is seen with its last character, however the text was cut, and exactly as much is held back
as could still become a match: nothing without a real partial match.
"""

from __future__ import annotations

MAX_STOPS = 16
MAX_STOP_CHARS = 1024


class StopMatcher:
    """Feeds text through, keeps back what may belong to a stop string. The first one to be complete ends the text."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """`stops` are non-empty strings."""
        assert all(stops), "an empty stop string matches everything"
        self._stops = [(stop, _fallbacks(stop)) for stop in stops]
        self._firsts = {stop[0] for stop in stops}
        self._states = [0] * len(stops)
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """The part of the text, with what was held before, that can be shown now. After a hit: what precedes it."""
        if self.hit:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        buffer = self._held + text
        for end in range(len(self._held), len(buffer)):
            matched = self._advance(buffer[end])
            if matched:
                self.hit = True
                self._held = ""
                return buffer[: end + 1 - matched]
        shown = len(buffer) - max(self._states, default=0)
        self._held = buffer[shown:]
        return buffer[:shown]

    def flush(self) -> str:
        """The text has ended: what was held is no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """One character further: the length of the longest stop string that is complete now, else 0."""
        matched = 0
        for index, (stop, fallbacks) in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != character:
                state = fallbacks[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                matched = max(matched, state)
                state = 0  # the text ends here: the state is not used again
            self._states[index] = state
        return matched


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    lengths = [0] * len(stop)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[index] != stop[state]:
            state = lengths[state - 1]
        if stop[index] == stop[state]:
            state += 1
        lengths[index] = state
    return lengths
