"""The prompts whose cache all tenants share: an operator's list, read and encoded once. Knows no namespace.

An entry is a `text` (what completions begin with) or `messages` (what chats begin with, through the model's template),
for one `model` or, without that, for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from cluster.documents import DocumentError, Entry, read
from cluster.errors import ApiError
from cluster.text.prefixes import Prefixes, Tokens, common_prefix
from cluster.text.tokenizer import Tokenizer

ENDLESS = 2**31
"""A context that no prompt exceeds: a public prompt longer than the model's own is merely never used up."""


class _Turn(Entry):
    role: Literal["system", "user", "assistant"]
    content: str


class _Prompt(Entry):
    model: str | None = None
    text: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[_Turn], Field(min_length=1)] | None = None


class _File(Entry):
    prompts: list[_Prompt]


def read_public(text: str, tokenizers: Mapping[str, Tokenizer]) -> dict[str, Prefixes]:
    """The public prompts of each model in `tokenizers`. Raises DocumentError with the path of the fault in `text`."""
    found: dict[str, list[Tokens]] = {model: [] for model in tokenizers}
    for index, prompt in enumerate(read(text, _File).prompts):
        where = f"prompts[{index}]"
        if (prompt.text is None) == (prompt.messages is None):
            raise DocumentError(f"{where}: must have either text or messages")
        if prompt.model is not None and prompt.model not in tokenizers:
            raise DocumentError(f"{where}.model: is not served here; these are: {', '.join(tokenizers)}")
        for model in [prompt.model] if prompt.model is not None else tokenizers:
            try:
                found[model].append(_encoded(prompt, tokenizers[model]))
            except ApiError as error:
                raise DocumentError(f"{where}: for {model}: {error.message}") from None
    return {model: Prefixes(tokens) for model, tokens in found.items()}


def _encoded(prompt: _Prompt, tokenizer: Tokenizer) -> Tokens:
    if prompt.messages is None:
        assert prompt.text is not None
        return tokenizer.encode(prompt.text, ENDLESS)
    turns = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
    if turns[-1]["role"] == "user":
        return tokenizer.encode_chat(turns, ENDLESS)
    # Many templates show a system turn only together with a user's. What two chats that go on differently have in
    # common is what the messages alone come to.
    ends = [tokenizer.encode_chat([*turns, {"role": "user", "content": letter}], ENDLESS) for letter in "ab"]
    return ends[0][: common_prefix(*ends)]
