"""The file of tenants: what it says, what is refused and where, whose key is whose and until when."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cluster.documents import DocumentError
from cluster.tenants import KeyRing, Tenant, hash_of, make_key
from workers.sequence import Priority

DEFAULTS = Tenant(session_blocks=10, tenant_blocks=100, max_keep_s=50.0)
A, B, C = (f"key-{letter}" for letter in "abc")


def ring(*tenants: dict[str, Any]) -> KeyRing:
    return KeyRing.read(yaml.safe_dump({"tenants": list(tenants)}), DEFAULTS)


def refusal(text: str) -> str:
    with pytest.raises(DocumentError) as refused:
        KeyRing.read(text, DEFAULTS)
    return str(refused.value)


def refused(**fields: Any) -> str:
    """The refusal of a file whose second tenant has these fields."""
    tenants = [{"name": "first", "keys": []}, {"name": "second", "keys": []} | fields]
    return refusal(yaml.safe_dump({"tenants": tenants}))


def test_each_tenant_has_several_keys_and_each_key_one_tenant() -> None:
    made = ring({"name": "one", "keys": [hash_of(A), {"hash": hash_of(B)}]}, {"name": "two", "keys": [hash_of(C)]})
    assert [tenant.name for tenant in made.tenants] == ["one", "two"]
    found = {key: made.tenant_of(key, 0.0) for key in (A, B, C, "key-d", "", A + " ")}
    names = {key: tenant.name for key, tenant in found.items() if tenant}
    assert names == {A: "one", B: "one", C: "two"}


def test_what_a_tenant_leaves_out_is_the_services_default() -> None:
    assert ring({"name": "plain", "keys": []}).tenants == (
        Tenant("plain", session_blocks=10, tenant_blocks=100, max_keep_s=50.0),
    )
    fields = {
        "weight": 2,
        "max_waiting": 7,
        "priority": -10,
        "classes": ["batch"],
        "models": ["tiny"],
        "session_blocks": 3,
        "tenant_blocks": 4,
        "max_keep_alive_s": 0,
    }
    assert ring({"name": "own", "keys": []} | fields).tenants == (
        Tenant("own", 2, 7, -10, frozenset({Priority.BATCH}), frozenset({"tiny"}), 3, 4, 0),
    )


@pytest.mark.parametrize("written", ["2027-01-31T00:00:00Z", "2027-01-31T01:00:00+01:00", "2027-01-31 00:00:00Z"])
@pytest.mark.parametrize("quoted", [False, True])
def test_a_key_counts_until_it_expires(written: str, quoted: bool) -> None:
    mark = '"' if quoted else ""
    text = f"tenants: [{{name: t, keys: [{{hash: '{hash_of(A)}', expires: {mark}{written}{mark}}}]}}]"
    made = KeyRing.read(text, DEFAULTS)
    expiry = 1_801_353_600.0
    assert made.tenant_of(A, expiry - 0.1) is not None
    assert made.tenant_of(A, expiry) is None


def test_json_is_read_as_well() -> None:
    text = json.dumps({"tenants": [{"name": "t", "keys": [hash_of(A).upper().replace("SHA", "sha")]}]})
    assert KeyRing.read(text, DEFAULTS).tenant_of(A, 0.0) is not None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"keys": ["plain-secret"]}, "tenants[1].keys[0].hash: must be sha256: and 64 hex digits"),
        ({"keys": ["sha256:abc"]}, "sha256sum"),
        ({"keys": [hash_of(A) + "0"]}, "tenants[1].keys[0].hash"),
        ({"keys": [hash_of(A).replace("sha256", "md5")]}, "tenants[1].keys[0].hash"),
        ({"keys": [7]}, "tenants[1].keys[0]"),
        ({"keys": [{}]}, "tenants[1].keys[0].hash: is required"),
        ({"keys": [{"hash": hash_of(A), "key": "plain-secret"}]}, "tenants[1].keys[0].key: unknown key"),
        ({"keys": [{"hash": hash_of(A), "expires": "2027-01-31T00:00:00"}]}, "tenants[1].keys[0].expires"),
        ({"keys": [{"hash": hash_of(A), "expires": 1_801_353_600}]}, "a time with its zone"),
        ({"keys": [{"hash": hash_of(A), "expires": "soon"}]}, "tenants[1].keys[0].expires"),
        ({"keys": [hash_of(A), hash_of(A)]}, "tenants[1].keys[1]: this key stands in the file a second time"),
        ({"keys": None}, "tenants[1].keys"),
        ({"name": "first"}, "tenants[1].name: there are two tenants called first"),
        ({"name": "a b"}, "tenants[1].name"),
        ({"name": ""}, "tenants[1].name"),
        ({"weight": 0}, "tenants[1].weight"),
        ({"weight": "2"}, "tenants[1].weight"),
        ({"weight": float("nan")}, "tenants[1].weight"),
        ({"max_waiting": -1}, "tenants[1].max_waiting"),
        ({"max_waiting": True}, "tenants[1].max_waiting"),
        ({"priority": 101}, "tenants[1].priority"),
        ({"classes": []}, "tenants[1].classes"),
        ({"classes": ["urgent"]}, "tenants[1].classes[0]"),
        ({"models": "tiny"}, "tenants[1].models"),
        ({"session_blocks": 0}, "tenants[1].session_blocks"),
        ({"tenant_blocks": 1.5}, "tenants[1].tenant_blocks"),
        ({"max_keep_alive_s": -1}, "tenants[1].max_keep_alive_s"),
        ({"wieght": 1}, "tenants[1].wieght: unknown key"),
    ],
)
def test_a_fault_is_named_by_its_path_and_no_key_is_repeated(fields: dict[str, Any], words: str) -> None:
    message = refused(**fields)
    assert words in message
    assert "plain-secret" not in message
    assert hash_of(A)[7:] not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file: must be a mapping"),
        ("[]", "the file: must be a mapping"),
        ("{}", "tenants: is required"),
        ("tenants: []", "tenants"),
        ("tenants: [", "line 1: not valid YAML"),
        ("tenants:\n- name: a\n  keys: []\n  keys: [x]\n", "line 2: not valid YAML: a key stands here twice"),
        ("tenants:\n\t- a", "line 2: not valid YAML"),
        ("tenants: !!python/object:os.system x", "line 1: not valid YAML"),
        ("tenants: 2027-99-99T00:00:00Z", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
    ],
)
def test_what_is_no_file_of_tenants_is_refused(text: str, words: str) -> None:
    assert words in refusal(text)


def test_one_key_of_two_tenants_is_refused() -> None:
    with pytest.raises(DocumentError, match=r"tenants\[1\].keys\[0\]"):
        ring({"name": "one", "keys": [hash_of(A)]}, {"name": "two", "keys": [hash_of(A)]})


def test_a_made_key_is_long_and_opens_what_its_hash_stands_for() -> None:
    made = {make_key(os.urandom(32)) for _ in range(50)}
    assert len(made) == 50
    for key, stored in made:
        assert len(key) > 40
        assert ring({"name": "t", "keys": [stored]}).tenant_of(key, 0.0) is not None
        assert key not in stored
    with pytest.raises(ValueError, match="32"):
        make_key(b"short")


@given(st.text(max_size=600))
def test_no_text_opens_a_ring_that_does_not_hold_it(key: str) -> None:
    assert ring({"name": "t", "keys": [hash_of(A)]}).tenant_of(key, 0.0) is None or key == A


def test_a_tenant_may_use_a_model_by_any_of_its_names() -> None:
    some = Tenant(models=frozenset({"alias"}))
    assert some.may_use(("tiny", "alias"))
    assert not some.may_use(("other",))
    assert Tenant().may_use(("anything",))
