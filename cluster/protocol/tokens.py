"""The route that counts: a prompt's tokens, as the model's own tokenizer and chat template make them. As in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from pydantic import BaseModel, Field

from cluster.protocol.api import TokenizeRequest
from cluster.protocol.fields import CHAT, COMPLETION, Neutral
from cluster.protocol.intake import Intake
from cluster.protocol.reader import Reader


class Tokens(BaseModel):
    """`count`: of all prompts together. `tokens`: the ids, if there is one prompt: of many, only numbers are wanted."""

    count: int
    counts: list[int] = Field(description="Of each prompt.")
    max_model_len: int
    tokens: list[int] | None


class Tokenizing:
    """Handler of POST /tokenize."""

    def __init__(self, intake: Intake, reader: Reader) -> None:
        self._intake = intake
        self._reader = reader

    async def tokens(self, request: Request) -> Tokens:
        """The tokens of a chat or of completions' prompts, which may be longer than the model's context. Nothing is
        computed."""
        asked, caller = await self._reader.read(request, TokenizeRequest, _table)
        prompts, card = await self._intake.tokens(asked, caller.tenant)
        counts = [len(prompt) for prompt in prompts]
        return Tokens(
            count=sum(counts),
            counts=counts,
            max_model_len=card.max_model_len,
            tokens=list(prompts[0]) if len(prompts) == 1 else None,
        )


def _table(body: Mapping[str, Any]) -> Mapping[str, Neutral]:
    return CHAT if body.get("messages") is not None else COMPLETION
