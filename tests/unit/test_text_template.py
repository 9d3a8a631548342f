"""Chat templates: what Hugging Face's rely on works, what they refuse is the client's to read, the sandbox holds."""

from __future__ import annotations

from datetime import datetime

import pytest

from cluster.errors import ApiError
from cluster.text.template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def rendered(source: str, messages: list[dict[str, str]] = USER, **names: str) -> str:
    return ChatTemplate(source, names, lambda: datetime(2031, 5, 4)).render(messages)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}", "<s>hi"),
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", "user\n"),
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "hi"),
        ("{{ strftime_now('%d %b %Y') }}", "04 May 2031"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% if tools %}t{% endif %}{% if add_generation_prompt %}g{% endif %}", "g"),
    ],
)
def test_what_published_templates_use_works(source: str, text: str) -> None:
    assert rendered(source, bos_token="<s>") == text


def test_a_refusal_of_the_template_is_told_in_its_own_words() -> None:
    with pytest.raises(ApiError, match="System role not supported") as refused:
        rendered("{{ raise_exception('System role not supported') }}")
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
    ],
)
def test_a_template_that_trips_or_breaks_out_is_a_bad_request_without_internals(source: str) -> None:
    with pytest.raises(ApiError) as refused:
        rendered(source)
    assert refused.value.status == 400
    assert not any(word in refused.value.message for word in ("Error", "jinja", "class", "Traceback"))
