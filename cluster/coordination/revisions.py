"""The live settings of a service: which revision is in force, and which were before it.

A revision is a number that only grows, a digest of the config it comes from, and what that config means to whoever
runs. Pure: how a config becomes settings, whoever makes an edition knows; who takes them, whoever asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.settings import LiveSettings
from kvstore.message import message

KEPT = 20
"""Earlier revisions that one can return to."""


class RevisionError(ValueError):
    """A change is refused; the message says why."""


@message
@dataclass(frozen=True, slots=True)
class Edition:
    """A config as settings. `source` is its text, opaque here; `built` that of the config with which the groups that
    run were built, which says how far some settings can go without building them anew."""

    digest: str
    live: LiveSettings
    source: str = ""
    built: str = ""


@message
@dataclass(frozen=True, slots=True)
class Revision:
    """An edition in force. `undone`: it is in force again, in place of one that came after it."""

    number: int
    edition: Edition
    undone: bool = False


class Revisions:
    """Begins with revision 1, or where an earlier life has left off."""

    def __init__(self, current: Revision, past: tuple[Edition, ...] = ()) -> None:
        self.current = current
        self.past = past

    @classmethod
    def begin(cls, edition: Edition) -> Revisions:
        """A service that has just been deployed."""
        return cls(Revision(1, edition))

    def check(self, base: int | None) -> None:
        """RevisionError when revision `base` (None: any) is not the one in force."""
        if base is not None and base != self.current.number:
            raise RevisionError(
                f"revision {self.current.number} is in force, not {base} any more: somebody else has changed it; look "
                "at the difference again"
            )

    def revise(self, edition: Edition) -> Revision:
        """`edition` is in force from now on, if it says anything else than the one that is."""
        purges = self.current.edition.live.purges
        edition = replace(edition, live=replace(edition.live, purges=purges))
        if edition == self.current.edition:
            return self.current
        self.past = (*self.past, self.current.edition)[-KEPT:]
        self.current = Revision(self.current.number + 1, edition)
        return self.current

    def purge(self) -> Revision:
        """The same settings, but every group forgets what it has cached."""
        live, edition = self.current.edition.live, self.current.edition
        self.current = Revision(
            self.current.number + 1, replace(edition, live=replace(live, purges=live.purges + 1)), self.current.undone
        )
        return self.current

    def rollback(self, edition: Edition | None = None) -> Revision:
        """The edition before this one is in force again: as it was, or as `edition`, which a deployment has made of it.
        RevisionError when there is none."""
        if not self.past:
            raise RevisionError(f"there is no revision before {self.current.number} to return to")
        purges = self.current.edition.live.purges
        before = edition or self.past[-1]
        before = replace(before, live=replace(before.live, purges=purges))
        self.past = self.past[:-1]
        self.current = Revision(self.current.number + 1, before, undone=True)
        return self.current
