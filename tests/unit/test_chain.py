"""Typed encodings, namespaces and keys: things that differ must never look alike."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvstore.chain import chain_key, chain_root, derive_namespace, encode_fields

FIELD = st.one_of(st.none(), st.integers(), st.text(), st.binary())


@given(st.lists(FIELD, max_size=4), st.lists(FIELD, max_size=4))
def test_equal_encodings_mean_equal_fields(
    left: list[str | bytes | int | None], right: list[str | bytes | int | None]
) -> None:
    same = left == right and [type(f) for f in left] == [type(f) for f in right]
    assert (encode_fields(*left) == encode_fields(*right)) == same


def test_look_alike_fields_differ() -> None:
    alike = [("a", "b:c"), ("a:b", "c"), ("ab", "c"), ("a", "bc"), (b"a", "bc"), ("a", None), ("a",), ("1",), (1,)]
    assert len({encode_fields(*fields) for fields in alike}) == len(alike)


def test_a_namespace_depends_on_secret_and_fields() -> None:
    names = {
        derive_namespace(secret, *fields) for secret in (b"s", b"t") for fields in (("a", "b"), ("ab", ""), ("b", "a"))
    }
    assert len(names) == 6


def test_a_key_depends_on_everything_before_it() -> None:
    roots = [chain_root(namespace, scheme) for namespace in (b"n", b"m") for scheme in (b"", b"int8")]
    keys = [
        chain_key(chain_key(root, first), second) for root in roots for first in ([1], [2]) for second in ([3], [4])
    ]
    assert len({*roots, *keys}) == len(roots) + len(keys)
    assert all(a != b for a, b in itertools.combinations(keys, 2))
