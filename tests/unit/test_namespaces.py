"""Who shares a cache with whom, tested in pairs: the same fields meet, look-alikes do not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.coordination.grants import Share
from cluster.generation import Generation, Quota
from cluster.namespaces import Namespaces, Scope, choose_scope, namespace
from cluster.text.prefixes import Prefixes
from workers.sequence import Sampling


def root(scope: Scope = Scope.SESSION, secret: bytes = b"key", **fields: str | None) -> bytes:
    given = {"tenant": "t", "session": "s", "request": "r", "revision": "v"} | fields
    return namespace(secret, scope, **given)  # type: ignore[arg-type]


def test_the_same_session_meets_and_another_does_not() -> None:
    assert root() == root(request="another")
    assert len(root()) == 32
    assert len({root(), root(session="s2"), root(tenant="t2"), root(revision="v2"), root(secret=b"other")}) == 5


def test_look_alikes_do_not_meet() -> None:
    assert root(tenant="a", session="b:c") != root(tenant="a:b", session="c")
    assert root(tenant="ab", session="c") != root(tenant="a", session="bc")
    assert root(session="r") != root(session=None, request="r")


def test_without_a_session_a_request_is_alone_in_session_scope_and_with_its_tenant_in_tenant_scope() -> None:
    assert root(session=None) != root(session=None, request="r2")
    assert root(Scope.TENANT, session=None) == root(Scope.TENANT, session="s", request="r2")
    assert root(Scope.TENANT) != root(Scope.TENANT, tenant="t2")


def test_auto_keeps_sessions_apart_as_soon_as_there_are_several_tenants() -> None:
    assert choose_scope("auto", 1) is Scope.TENANT
    assert choose_scope("auto", 2) is Scope.SESSION
    assert choose_scope("tenant", 2) is Scope.TENANT
    with pytest.raises(ValueError, match="cache_scope"):
        choose_scope("everybody", 1)


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        root(secret=b"")


# -- the keys of whole generations -------------------------------------------------------------------------------------

SECRET, OLD = b"s" * 32, b"o" * 32
REVISIONS = {"tiny": "r1", "other": "r2"}
HEAD = tuple(range(400))


def generation(
    tenant: str = "t", session: str | None = "s", prompt: tuple[int, ...] = HEAD, model: str = "tiny", **fields: Any
) -> Generation:
    return Generation(fields.pop("id", "g"), prompt, Sampling(4), model, session, Share(tenant), **fields)


def made(scope: str = "session", secrets: tuple[bytes, ...] = (SECRET,), **options: Any) -> Namespaces:
    return Namespaces(secrets, REVISIONS, cache_scope=scope, **options)


NAMES = st.text(alphabet="ab:/\0\x1f é", max_size=4)


@given(st.tuples(NAMES, NAMES), st.tuples(NAMES, NAMES))
@settings(max_examples=500)
def test_only_the_same_tenant_and_session_meet(one: tuple[str, str], other: tuple[str, str]) -> None:
    keys = [made().keys(generation(*pair)) for pair in (one, other)]
    assert (keys[0].namespace == keys[1].namespace) == (one == other)
    assert (keys[0].affinity == keys[1].affinity) == (one == other)
    assert (keys[0].terms.tenant == keys[1].terms.tenant) == (one[0] == other[0])


@given(NAMES, NAMES, NAMES)
def test_in_tenant_scope_only_the_same_tenant_meets(one: str, other: str, session: str) -> None:
    keys = [made("tenant").keys(generation(tenant, session)).namespace for tenant in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


def test_auto_follows_the_number_of_tenants_as_it_changes() -> None:
    tenants = [1]
    auto = made("auto", tenants=lambda: tenants[0])
    assert auto.scope is Scope.TENANT
    assert auto.keys(generation(session="a")).namespace == auto.keys(generation(session="b")).namespace
    tenants[0] = 2
    assert auto.scope is Scope.SESSION
    assert auto.keys(generation(session="a")).namespace != auto.keys(generation(session="b")).namespace


def test_an_unknown_scope_and_an_empty_secret_are_refused_at_once() -> None:
    for broken in (lambda: made("world"), lambda: made(secrets=()), lambda: made(secrets=(SECRET, b""))):
        with pytest.raises(ValueError, match=r"cache_scope|secret"):
            broken()


def test_a_sessions_namespaces_are_those_of_all_models_and_secrets() -> None:
    both = made(secrets=(SECRET, OLD))
    found = both.of_session("t", "s")
    single = [made(secrets=(secret,)) for secret in (SECRET, OLD)]
    expected = {one.keys(generation(model=model)).namespace for one in single for model in REVISIONS}
    assert set(found) == expected and len(found) == 4
    assert both.keys(generation()).namespace == made().keys(generation()).namespace == found[0], "the first is in use"
    assert not set(found) & set(both.of_session("t", "other")) and not set(found) & set(both.of_session("u", "s"))


@pytest.mark.parametrize("scope", ["auto", "tenant", "session"])
@pytest.mark.parametrize("tenants", [1, 2])
def test_whatever_a_session_caches_is_found_by_its_name(scope: str, tenants: int) -> None:
    count = [tenants]
    namespaces = made(scope, tenants=lambda: count[0])
    cached = namespaces.keys(generation()).namespace
    count[0] = 3 - tenants  # a tenant comes or goes in between
    assert cached in namespaces.of_session("t", "s")


def test_the_session_is_the_strongest_likeness_then_the_head_of_the_prompt() -> None:
    keys = made("tenant").keys
    same_head = keys(generation(session="x", prompt=(*HEAD[:300], 7, 8, 9))).affinity
    mine = keys(generation()).affinity
    assert len(mine) == 2 == len(same_head)
    assert mine[0] != same_head[0] and mine[1] == same_head[1]
    assert keys(generation(session=None)).affinity == mine[1:]
    assert keys(generation(prompt=(*HEAD[:255], 7, 8, 9))).affinity[1] != mine[1]
    assert keys(generation(prompt=HEAD[:20])).affinity[1] == keys(generation(prompt=HEAD[:20], session="x")).affinity[1]
    assert not set(mine) & set(keys(generation(model="other")).affinity)
    assert not set(mine) & set(keys(generation(tenant="u")).affinity)
    assert not set(mine) & set(made("tenant", secrets=(OLD,)).keys(generation()).affinity)


def test_in_session_scope_nobody_is_placed_by_the_private_text_of_another() -> None:
    keys = made("session").keys
    assert len(keys(generation()).affinity) == 1
    assert keys(generation(session=None)).affinity == ()


@pytest.mark.parametrize("registered", [0, 1, 31, 32, 100, 399])
def test_public_tokens_are_the_common_prefix_with_a_registered_prompt(registered: int) -> None:
    prompt = (*HEAD[:registered], -1)
    keys = made(public={"tiny": Prefixes([prompt, (5, 5)])}).keys
    mine, other = (keys(generation(tenant, session)) for tenant, session in (("t", "s"), ("u", "z")))
    assert mine.terms.public_tokens == registered == other.terms.public_tokens
    assert mine.terms.public == other.terms.public
    assert bool(mine.terms.public) == bool(registered)
    assert mine.namespace != other.namespace
    assert bool(set(mine.affinity) & set(other.affinity)) == (registered >= 32), "placed by it where it fills a block"
    assert keys(generation(model="other")).terms.public_tokens == 0


def test_the_public_namespace_is_of_the_weights_and_the_secret_and_nobodys_own() -> None:
    prefixes = {model: Prefixes([HEAD]) for model in REVISIONS}
    publics = {
        made(scope, (secret,), public=prefixes).keys(generation(model=model)).terms.public
        for scope in ("session", "tenant")
        for secret in (SECRET, OLD)
        for model in REVISIONS
    }
    assert len(publics) == 4
    names = [None, "", "public", "r1"]
    own = {made().keys(generation(tenant, name)).namespace for tenant in ("", "public", "r1") for name in names}
    assert not publics & own


def test_terms_carry_quotas_and_keep_what_somebody_can_ask_for_again() -> None:
    quota = Quota(7, 70)
    terms = made().keys(generation(quota=quota, keep_s=90.0)).terms
    assert (terms.session_blocks, terms.tenant_blocks, terms.keep_s) == (7, 70, 90.0)
    assert made().keys(generation(session=None, keep_s=90.0)).terms.keep_s == 0.0
    assert made("tenant").keys(generation(session=None, keep_s=90.0)).terms.keep_s == 90.0


def test_no_key_shows_a_name_or_a_token() -> None:
    keys = made("tenant", public={"tiny": Prefixes([HEAD])}).keys(generation("tenant-name", "session-name"))
    for key in (keys.namespace, keys.terms.tenant, keys.terms.public, *keys.affinity):
        assert len(key) == 32
        assert b"name" not in key
