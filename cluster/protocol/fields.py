"""Fields of OpenAI's and of vLLM's requests that would change the answer and that we do not serve: refused by name.

Each stands here with the values that ask for nothing; null always does. Fields that change no token (`user`, `store`,
`metadata`, …) and unknown ones are ignored, as OpenAI ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import unsupported

Neutral = tuple[tuple[Any, ...], str]
"""The values besides null that ask for nothing, and what to do instead."""

LEAVE_OUT = "leave it out"

BOTH: dict[str, Neutral] = {
    "n": ((1,), "ask for one choice per prompt (n = 1) and send the request again for more"),
    "best_of": ((1,), "leave it out or send 1"),
    "length_penalty": ((1,), "leave it out or send 1"),
    "response_format": (({"type": "text"},), 'leave it out or send {"type": "text"}'),
    "use_beam_search": ((False,), LEAVE_OUT),
    "guided_json": ((), LEAVE_OUT),
    "guided_regex": ((), LEAVE_OUT),
    "guided_choice": (([],), LEAVE_OUT),
    "guided_grammar": ((), LEAVE_OUT),
    "structured_outputs": (({},), LEAVE_OUT),
    "allowed_token_ids": ((), LEAVE_OUT),
    "bad_words": (([],), LEAVE_OUT),
    "prompt_logprobs": ((False,), LEAVE_OUT),
    "truncate_prompt_tokens": ((), "shorten the prompt yourself"),
    "skip_special_tokens": ((True,), "control tokens never show in the text"),
    "include_stop_str_in_output": ((False,), "the text always ends before the stop string"),
}

COMPLETION = BOTH | {
    "suffix": (("",), LEAVE_OUT),
    "add_special_tokens": ((True,), "send token ids to choose every token yourself"),
}

CHAT = BOTH | {
    "echo": ((False,), "leave it out or send false"),
    "tools": (([],), LEAVE_OUT),
    "tool_choice": (("none", "auto"), LEAVE_OUT),
    "functions": (([],), LEAVE_OUT),
    "function_call": (("none", "auto"), LEAVE_OUT),
    "modalities": ((["text"],), 'leave it out or send ["text"]'),
    "audio": ((), LEAVE_OUT),
    "prediction": ((), LEAVE_OUT),
    "reasoning_effort": (("none",), LEAVE_OUT),
    "verbosity": (("medium",), LEAVE_OUT),
    "web_search_options": ((), LEAVE_OUT),
    "add_special_tokens": ((False,), "the chat template writes every special token"),
    "add_generation_prompt": ((True,), "the assistant's turn is always opened"),
    "continue_final_message": ((False,), "the assistant's turn is always a new one"),
    "chat_template": ((), "the model's own template is used"),
    "chat_template_kwargs": (({},), LEAVE_OUT),
    "documents": (([],), LEAVE_OUT),
}

MESSAGE: dict[str, Neutral] = {
    "tool_calls": (([],), LEAVE_OUT),
    "function_call": ((), LEAVE_OUT),
    "tool_call_id": ((), LEAVE_OUT),
    "audio": ((), LEAVE_OUT),
    "refusal": (("",), LEAVE_OUT),
}
"""Of one chat message."""


def refuse_unserved(body: Mapping[str, Any], table: Mapping[str, Neutral], where: str = "") -> None:
    """Raises ApiError (400) for the first field of `body` whose value asks for what we do not serve."""
    for field in body.keys() & table.keys():
        neutral, instead = table[field]
        value = body[field]
        if value is not None and not any(_same(value, one) for one in neutral):
            raise unsupported(where + field, instead)


def refuse_in_messages(body: Mapping[str, Any]) -> None:
    """The same for each message of a chat. What is no message at all is found elsewhere."""
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        if isinstance(message, dict):
            refuse_unserved(message, MESSAGE, f"messages[{index}].")


def _same(value: object, other: object) -> bool:
    """Equality that keeps true apart from 1; 0 and 0.0 are one number."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return value == other
