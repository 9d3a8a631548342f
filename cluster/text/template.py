"""The model's own chat template: messages to the text that its tokenizer then encodes. Knows no tokenizer and no HTTP.

Jinja in its sandbox, with what Hugging Face's templates rely on: trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson` without HTML escapes, and the `generation` block (which only marks text for training).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from cluster.errors import ApiError

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Refused(Exception):
    """The template itself refused the messages, in its author's words."""


class ChatTemplate:
    """One compiled template. Rendering is thread-safe."""

    def __init__(self, source: str, names: Mapping[str, str], clock: Callable[[], datetime] = datetime.now) -> None:
        """`names`: the texts of the special tokens, by variable. Raises ValueError when `source` is not Jinja."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error
        self._names = dict(names)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt's text, the assistant's turn opened. Raises ApiError (400) when the template refuses or fails."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._names,
            )
        except Refused as refusal:
            message = f"The model's chat template refuses these messages: {refusal}"
            raise ApiError(message, "chat_template_refused", "messages") from None
        except Exception as error:
            # A template is the model's program: whatever it trips over, it was these messages that it could not take.
            message = "The model's chat template cannot render these messages: their roles or order do not suit it."
            raise ApiError(message, "chat_template_refused", "messages") from error


def read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template's source: `chat_template.jinja`, else `chat_template` of tokenizer_config.json (a string, or named
    ones of which "default" is taken); None for a model that has none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return source if isinstance(source, str) else None


def special_names(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens' texts in a tokenizer_config.json, each written as a string or as {"content": …}."""
    names = {}
    for name in SPECIAL:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            names[name] = text
    return names


def _raise(message: object) -> None:
    raise Refused(str(message))


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: its content, nothing else."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
