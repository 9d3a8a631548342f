"""Who shares a cache with whom, tested in pairs: the same fields meet, look-alikes do not."""

from __future__ import annotations

import pytest

from cluster.namespaces import Scope, choose_scope, namespace


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
