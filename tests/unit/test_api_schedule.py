"""How a request is treated: class, urgency, deadline, how long its cache is kept; from body and headers, and within
what the tenant may."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.generation import Generation
from cluster.protocol.caller import Callers
from cluster.tenants import Tenant
from tests.scripted import Scripted, app_of, says, send
from workers.sequence import Priority

TURN = [{"role": "user", "content": "hi"}]
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "hi"}),
    "chat": ("/v1/chat/completions", {"messages": TURN}),
    "prewarm": ("/v1/sessions/s/prewarm", {"prompt": "hi"}),
}
EVERY = pytest.mark.parametrize("route", PATHS)
NONE: dict[str, str] = {}


def ask(route: str, headers: dict[str, str], tenant: Tenant, fields: dict[str, Any]) -> Generation | tuple[str, str]:
    """The generation that a request becomes, or the field at fault and what is wrong with it."""
    completer = Scripted(says("ok"))
    app = app_of(completer, callers=Callers(lambda: None, lambda: 0.0, lambda: tenant or Tenant()))
    path, content = PATHS[route]
    answer = send(app, "POST", path, json={"model": "tiny"} | content | fields, headers=headers)
    if answer.status_code == 200:
        return completer.seen[0]
    assert answer.status_code == 400
    return answer.json()["error"]["param"], answer.json()["error"]["message"]


def asked(route: str, headers: dict[str, str] = NONE, tenant: Tenant | None = None, **fields: Any) -> Generation:
    made = ask(route, headers, tenant or Tenant(), fields)
    assert isinstance(made, Generation), made
    return made


def refused(route: str, headers: dict[str, str] = NONE, **fields: Any) -> tuple[str, str]:
    made = ask(route, headers, Tenant(), fields)
    assert not isinstance(made, Generation), fields
    return made


@EVERY
@pytest.mark.parametrize("best", [-100, -5, 0, 5, 100])
@pytest.mark.parametrize("priority", [None, -100, -6, -5, 0, 5, 6, 100])
def test_urgency_is_what_was_asked_for_as_far_as_the_tenant_may(route: str, best: int, priority: int | None) -> None:
    assert asked(route, tenant=Tenant(best_urgency=best), priority=priority).urgency == max(priority or 0, best)


@EVERY
@pytest.mark.parametrize(
    ("tier", "header", "meant"),
    [
        (None, None, Priority.INTERACTIVE),
        ("auto", None, Priority.INTERACTIVE),
        ("default", None, Priority.INTERACTIVE),
        ("priority", None, Priority.INTERACTIVE),
        ("scale", None, Priority.INTERACTIVE),
        ("flex", None, Priority.BATCH),
        (None, "batch", Priority.BATCH),
        (None, "Batch", Priority.BATCH),
        (None, "interactive", Priority.INTERACTIVE),
        (None, "", Priority.INTERACTIVE),
        ("auto", "batch", Priority.BATCH),
        ("default", "batch", Priority.BATCH),
        ("flex", "interactive", Priority.BATCH),
    ],
)
def test_a_class_is_named_by_the_tier_or_the_header(
    route: str, tier: str | None, header: str | None, meant: Priority
) -> None:
    headers = {} if header is None else {"x-priority-class": header}
    assert asked(route, headers, service_tier=tier).priority is meant


@EVERY
def test_a_deadline_is_the_bodys_then_the_headers_then_the_servers(route: str) -> None:
    header = {"x-request-timeout": "7.5"}
    assert asked(route).timeout_s is None
    assert asked(route, {"x-request-timeout": ""}).timeout_s is None
    assert asked(route, header).timeout_s == 7.5
    assert asked(route, header, timeout=None).timeout_s == 7.5
    assert asked(route, header, timeout=2).timeout_s == 2
    assert asked(route, timeout=86_400.0).timeout_s == 86_400


@EVERY
@pytest.mark.parametrize("most", [0.0, 10.0, 3600.0])
@pytest.mark.parametrize("keep", [None, 0, 10, 10.5, 86_400])
def test_a_session_is_kept_as_long_as_asked_and_as_the_tenant_may(route: str, most: float, keep: float | None) -> None:
    assert asked(route, tenant=Tenant(max_keep_s=most), keep_alive=keep).keep_s == min(keep or 0, most)


@EVERY
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("priority", [-101, 101, 2**70, 1.5, "1", True, []]),
        ("service_tier", ["batch", "FLEX", "", 1, ["flex"], {}]),
        ("timeout", [0, -1, 86_400.1, "5", True, [], 1e300]),
        ("keep_alive", [-1, -0.1, 1e9, "5m", "-1", True, {}]),
    ],
)
def test_a_value_of_a_wrong_type_or_out_of_range_is_a_400_that_names_the_field(
    route: str, field: str, values: list[Any]
) -> None:
    for value in values:
        param, message = refused(route, **{field: value})
        assert param == field
        assert message.startswith(f"'{field}' must be "), message


@EVERY
@pytest.mark.parametrize(
    ("header", "values"),
    [
        ("x-request-timeout", ["0", "-1", "soon", "5s", "nan", "inf", "1e999", "86401", "0x10"]),
        ("x-priority-class", ["flex", "urgent", "batch, interactive", "x" * 5000]),
    ],
)
def test_a_header_that_cannot_be_understood_is_a_400_that_names_it(route: str, header: str, values: list[str]) -> None:
    for value in values:
        param, message = refused(route, {header: value})
        assert param == header and header in message
        assert len(message) < 200


@EVERY
def test_each_field_at_the_edge_of_its_range_is_taken(route: str) -> None:
    edges: dict[str, list[Any]] = {
        "priority": [-100, 100, 0],
        "timeout": [1e-3, 86_400, 5],
        "keep_alive": [0, 30 * 86_400],
        "service_tier": ["auto"],
    }
    for field, values in edges.items():
        for value in (None, *values):
            asked(route, **{field: value})
