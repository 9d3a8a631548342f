"""What a request's terms do to the cache: how long, how much, for whom; and what a purge leaves of it."""

from __future__ import annotations

import random

import pytest

from kvstore.sessions import Terms
from kvstore.store import KVStore
from kvstore.table import BlockTable

SIZE = 4
PUBLIC = b"public"


class Shelf:
    """A store, and sequences that come, compute all they have and go."""

    def __init__(self, blocks: int = 64, ttl: float = 10.0, groups: int = 1) -> None:
        self.store = KVStore(blocks, SIZE, ttl=ttl, windows=(None,) * groups)
        self.step = 0

    def open(
        self, namespace: bytes, tokens: list[int], now: float = 0.0, terms: Terms = Terms(), *, compute: bool = True
    ) -> BlockTable:
        table = self.store.adopt(namespace, tokens, [], now, terms)
        assert self.store.grow(table, table.cached, len(tokens), now) is not None
        if compute:
            self.turn()
            self.store.seal(table, tokens, len(tokens), now)
        self.store.check()
        return table

    def visit(self, namespace: bytes, tokens: list[int], now: float = 0.0, terms: Terms = Terms()) -> int:
        """One whole request; what of it was cached."""
        table = self.open(namespace, tokens, now, terms)
        cached = table.cached
        self.store.release(table, now)
        self.store.check()
        return cached

    def hit(self, namespace: bytes, tokens: list[int], now: float = 0.0, terms: Terms = Terms()) -> int:
        found = self.store.match(namespace, tokens, [], now, terms)
        return found.blocks * SIZE

    def turn(self, zero: int = 100) -> tuple[int, ...]:
        self.step += 1
        washed = self.store.pool.wash(self.step, zero)
        self.store.pool.launch(self.step)
        self.store.pool.apply(self.step)
        return washed


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


A, B = words(1, 17), words(2, 17)


# -- how long ---------------------------------------------------------------------------------------------------------


def test_a_kept_session_outlives_the_others_and_does_not_hold_up_their_expiry() -> None:
    shelf = Shelf()
    shelf.visit(b"kept", A, 0.0, Terms(keep_s=100.0))
    shelf.visit(b"other", B, 1.0)
    assert shelf.store.expire(11.0) == 4, "the younger one goes, the older one is kept"
    shelf.store.check()
    assert shelf.hit(b"kept", A, 50.0) == 16 and shelf.hit(b"other", B, 50.0) == 0
    assert shelf.store.next_expiry() == 100.0
    assert shelf.store.expire(99.9) == 0 and shelf.store.expire(100.0) == 4
    shelf.store.check()
    assert not len(shelf.store.sessions)


def test_a_later_use_keeps_for_the_longer_of_both() -> None:
    shelf = Shelf()
    shelf.visit(b"n", A, 0.0, Terms(keep_s=50.0))
    shelf.visit(b"n", A, 30.0)
    assert shelf.store.sessions.rows(30.0) == ((b"n", 4, 20.0),)
    shelf.visit(b"n", A, 45.0)
    assert shelf.store.sessions.rows(45.0) == ((b"n", 4, 10.0),)
    assert shelf.store.expire(50.0) == 0, "used at 45, it has its 10 seconds anyway"
    assert shelf.store.expire(55.0) == 4


def test_keeping_counts_from_the_end_of_a_use() -> None:
    shelf = Shelf()
    table = shelf.open(b"n", A, 0.0, Terms(keep_s=50.0))
    shelf.store.release(table, 40.0)
    assert shelf.store.expire(89.0) == 0 and shelf.store.expire(90.0) == 4


def test_a_namespace_that_was_kept_used_again_and_emptied_leaves_nothing_behind() -> None:
    shelf = Shelf()
    for now in range(0, 1000, 12):
        shelf.visit(b"n", A, float(now), Terms(keep_s=60.0))
        shelf.store.expire(now + 11.0)
        shelf.store.check()
    assert len(shelf.store._cache._retention._ends) <= 66, "old dates do not pile up"
    shelf.store.expire(2000.0)
    shelf.store.check()
    assert shelf.store.next_expiry() is None


def test_expiry_looks_at_each_kept_block_once() -> None:
    shelf = Shelf(blocks=300)
    for session in range(60):
        shelf.visit(b"k%d" % session, words(session, 17), 0.0, Terms(keep_s=1e6))
    shelf.store.expire(20.0)
    looked = []
    kept_until = shelf.store._cache._retention._kept_until
    shelf.store._cache._retention._kept_until = lambda name: looked.append(name) or kept_until(name)
    for now in range(30, 80):
        shelf.visit(b"other", B, float(now))
        shelf.store.expire(float(now))
    assert len(looked) < 20
    assert shelf.store.pool.idle >= 240


def test_a_public_head_lives_as_long_as_what_stands_on_it() -> None:
    shelf = Shelf()
    terms = Terms(keep_s=100.0, public=PUBLIC, public_tokens=8)
    shelf.visit(b"kept", A, 0.0, terms)
    assert shelf.store.expire(50.0) == 0
    shelf.store.check()
    assert shelf.hit(b"kept", A, 50.0, terms) == 16
    assert shelf.store.expire(100.0) == 4
    shelf.store.check()


# -- how much ---------------------------------------------------------------------------------------------------------


def test_a_session_over_its_quota_loses_its_own_oldest_idle_blocks() -> None:
    shelf = Shelf()
    terms = Terms(session_blocks=6)
    shelf.visit(b"n", A, 0.0, terms)
    shelf.visit(b"other", B, 0.0)
    shelf.visit(b"n", B, 1.0, terms)
    assert shelf.store.sessions.blocks(b"n") == 6 and shelf.store.sessions.blocks(b"other") == 4
    assert shelf.hit(b"n", B) == 16 and shelf.hit(b"n", A) == 8, "the tail of the older chain went"
    assert shelf.store.pool.dirty == 2, "to be zeroed"
    assert shelf.store.evictions == 2


def test_a_tenant_over_its_quota_loses_blocks_of_any_of_its_sessions_and_of_no_other() -> None:
    shelf = Shelf()
    terms = Terms(tenant=b"t", tenant_blocks=6)
    shelf.visit(b"one", A, 0.0, terms)
    shelf.visit(b"foreign", A, 0.0, Terms(tenant=b"u"))
    shelf.visit(b"two", B, 1.0, terms)
    assert (shelf.store.sessions.blocks(b"one"), shelf.store.sessions.blocks(b"two")) == (2, 4)
    assert shelf.store.sessions.blocks(b"foreign") == 4


@pytest.mark.parametrize("quota", [Terms(session_blocks=0), Terms(tenant=b"t", tenant_blocks=0)])
def test_what_is_in_use_is_never_taken_for_a_quota(quota: Terms) -> None:
    shelf = Shelf()
    table = shelf.open(b"n", A, 0.0, quota)
    assert shelf.store.sessions.blocks(b"n") == 4 and table.held == 5
    shelf.store.release(table, 1.0)
    shelf.store.check()
    assert shelf.store.sessions.blocks(b"n") == 0 and shelf.store.pool.dirty == 4


def test_public_blocks_are_in_nobodys_quota() -> None:
    shelf = Shelf()
    terms = Terms(tenant=b"t", session_blocks=1, tenant_blocks=1, public=PUBLIC, public_tokens=12)
    shelf.visit(b"n", A, 0.0, terms)
    assert shelf.store.sessions.blocks(PUBLIC) == 3 and shelf.store.sessions.blocks(b"n") == 1


# -- for whom ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("public_tokens", "shared"), [(0, 0), (3, 0), (4, 4), (11, 8), (12, 12), (16, 16), (17, 16)])
def test_others_find_the_blocks_of_a_public_prompt_and_nothing_behind_it(
    public_tokens: int, shared: int, groups: int
) -> None:
    shelf = Shelf(groups=groups)
    terms = Terms(public=PUBLIC, public_tokens=public_tokens)
    shelf.visit(b"one", A, 0.0, terms)
    assert shelf.hit(b"one", A, 0.0, terms) == 16, "the pair: whoever computed it finds all of it"
    assert shelf.hit(b"two", A, 0.0, terms) == shared
    assert shelf.visit(b"two", A, 0.0, terms) == shared


def test_sessions_behind_the_same_public_head_stay_apart() -> None:
    shelf = Shelf()
    terms = Terms(public=PUBLIC, public_tokens=8)
    one = shelf.open(b"one", A, 0.0, terms)
    two = shelf.open(b"two", A, 0.0, terms)
    assert one.blocks[0][:2] == two.blocks[0][:2] and not set(one.blocks[0][2:]) & set(two.blocks[0][2:])
    assert one.keys[:2] == two.keys[:2] and not set(one.keys[2:]) & set(two.keys[2:])


def test_a_private_prompt_never_answers_for_the_public_one_it_equals() -> None:
    shelf = Shelf()
    shelf.visit(b"one", A)
    assert shelf.hit(b"two", A, 0.0, Terms(public=PUBLIC, public_tokens=16)) == 0
    shelf.visit(b"two", A, 0.0, Terms(public=PUBLIC, public_tokens=16))
    assert shelf.hit(b"three", A) == 0, "who does not name the public namespace does not read it"


# -- purges -----------------------------------------------------------------------------------------------------------


def test_a_purge_makes_idle_blocks_dirty_at_once_and_held_ones_when_they_are_released() -> None:
    shelf = Shelf()
    shelf.visit(b"n", A)
    table = shelf.open(b"n", B)
    other = shelf.open(b"other", A)
    assert shelf.store.purge(b"n") == 8
    shelf.store.check()
    assert shelf.store.pool.dirty == 4 and not shelf.store.sessions.blocks(b"n")
    assert shelf.hit(b"n", A) == shelf.hit(b"n", B) == 0 and shelf.hit(b"other", A) == 16
    held = set(table.blocks[0])
    shelf.store.release(table, 1.0)
    shelf.store.check()
    zeroed = set(shelf.turn())
    assert held <= zeroed, "the unsealed tail too"
    assert len(zeroed) == 4 + 5
    shelf.store.release(other, 1.0)
    assert shelf.store.purge() == 4


def test_what_a_request_computes_after_the_purge_of_its_session_is_not_cached() -> None:
    shelf = Shelf()
    table = shelf.open(b"n", A)
    shelf.store.purge(b"n")
    longer = [*A, *B]
    assert shelf.store.grow(table, len(A), len(longer), 1.0) is not None
    shelf.store.seal(table, longer, len(longer), 1.0)
    shelf.store.check()
    assert not shelf.store.sessions.blocks(b"n")
    assert shelf.visit(b"n", A, 2.0) == 0 and shelf.hit(b"n", A, 2.0) == 16, "a new request begins anew"
    fork = shelf.store.fork(table)
    shelf.store.seal(fork, longer, len(longer), 3.0)
    shelf.store.release(table, 3.0)
    shelf.store.release(fork, 3.0)
    shelf.store.check()
    assert shelf.store.sessions.blocks(b"n") == 4 and shelf.store.pool.dirty == 9


def test_the_purge_of_a_public_prompt_takes_what_stands_on_it_along() -> None:
    shelf = Shelf()
    terms = Terms(public=PUBLIC, public_tokens=8)
    table = shelf.open(b"one", A, 0.0, terms)
    shelf.visit(b"two", A, 0.0, terms)
    assert shelf.store.purge(PUBLIC) == 2 + 2 + 2
    shelf.store.check()
    assert table.forgotten and shelf.hit(b"one", A, 0.0, terms) == 0
    shelf.visit(b"two", A, 1.0, terms)
    shelf.store.release(table, 1.0)
    shelf.store.check()


@pytest.mark.parametrize("held", [False, True])
def test_the_purge_of_a_session_leaves_the_public_head_to_the_others(held: bool) -> None:
    shelf = Shelf()
    terms = Terms(public=PUBLIC, public_tokens=8)
    table = shelf.open(b"one", A, 0.0, terms)
    if not held:
        shelf.store.release(table, 0.0)
    assert shelf.store.purge(b"one") == 2
    shelf.store.check()
    assert shelf.hit(b"two", A, 0.0, terms) == 8
    if held:
        shelf.store.release(table, 0.0)
        shelf.store.check()
        assert shelf.store.pool.idle == 2


# -- what could have been ---------------------------------------------------------------------------------------------


def test_tokens_that_were_cached_and_expired_are_counted_when_they_are_asked_for() -> None:
    shelf = Shelf()
    shelf.visit(b"n", A)
    shelf.store.expire(10.0)
    table = shelf.open(b"n", A, 11.0, compute=False)
    assert shelf.store.misses(table, A) == (16, 0)
    shelf.store.release(table, 11.0)
    foreign = shelf.open(b"m", A, 11.0, compute=False)
    assert shelf.store.misses(foreign, A) == (0, 0), "it was never his"


@pytest.mark.parametrize("how", ["purge", "quota"])
def test_what_was_purged_or_over_quota_has_not_expired(how: str) -> None:
    shelf = Shelf()
    shelf.visit(b"n", A, 0.0, Terms(session_blocks=0) if how == "quota" else Terms())
    shelf.store.purge(b"n")
    table = shelf.open(b"n", A, 1.0, compute=False)
    assert shelf.store.misses(table, A)[0] == 0


def test_tokens_that_another_namespace_has_cached_are_counted_as_lost_to_scope() -> None:
    shelf = Shelf()
    shelf.visit(b"n", A)
    longer = [*A[:12], *B]
    table = shelf.open(b"m", longer, compute=False)
    assert shelf.store.misses(table, longer) == (0, 12)
    same = shelf.open(b"n", longer, compute=False)
    assert (same.cached, shelf.store.misses(same, longer)) == (12, (0, 0))
    shelf.store.purge(b"n")
    late = shelf.open(b"m", longer, compute=False)
    assert shelf.store.misses(late, longer) == (0, 0), "it is there no more"
