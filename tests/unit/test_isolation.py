"""Who finds whose cached prompts, in pairs: otherwise "isolated" would also pass with the cache off."""

from __future__ import annotations

import pytest

from kvstore.chain import derive_namespace
from kvstore.sessions import Terms
from tests.engine_bench import cached, make, report, request, run

SECRET = b"s" * 32


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("tenant", "session"), ("tenant", "session 2")),
        (("tenant", "session"), ("tenant 2", "session")),
        (("a", "b:c"), ("a:b", "c")),
        (("ab", "c"), ("a", "bc")),
        (("1",), (1,)),
        (("",), (None,)),
        (("tenant", None), ("tenant", "")),
    ],
)
@pytest.mark.parametrize("public", [False, True])
def test_the_same_namespace_hits_and_another_one_misses(
    one: tuple[str | int | None, ...], other: tuple[str | int | None, ...], public: bool
) -> None:
    engine, box = make()
    terms = Terms(public=b"public", public_tokens=8) if public else Terms()
    for index, fields in enumerate((one, one, other, other)):
        namespace = derive_namespace(SECRET, *fields)
        engine.submit("i", request(f"r{index}", 18, 2, namespace, grant=str(index), terms=terms))
        run(engine)
        engine._scheduler.store.check()
    shared = 8 if public else 0
    assert cached(box) == {"r0": 0, "r1": 16, "r2": shared, "r3": 16}
    last = report(engine)
    assert last.lost_to_scope == 16 - shared and last.cached_tokens == 32 + shared
