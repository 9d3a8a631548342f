"""OpenAI's requests as we serve them: the fields, their types and ranges. The OpenAPI page is made of these models.

Strict: "true" is no boolean and "1" no number; null means absent. Limits that depend on the model (context, pool,
vocabulary) are checked where the model is known.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.text.stops import MAX_STOP_CHARS, MAX_STOPS

MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_SESSION_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_TIMEOUT_S = 86_400.0
MAX_KEEP_S = 30 * 86_400.0
MAX_PRIORITY = 100
MAX_LOGPROBS = 20
MAX_BIASES = 300
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's own default for completions; a chat without `max_tokens` may fill the context."""

Prompt = str | tuple[int, ...]


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A prompt in each of its four forms, as one prompt per choice."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise PydanticCustomError("prompt", "must be a string, a list of strings, token ids, or a list of such lists")
    if value and _ids(value):
        value = [value]
    if not 1 <= len(value) <= MAX_PROMPTS:
        problem = "is empty" if not value else f"has {len(value)} prompts; at most {MAX_PROMPTS} are taken at once"
        raise PydanticCustomError("prompt", "{problem}", {"problem": problem})
    if not (all(isinstance(one, str) for one in value) or all(isinstance(one, list) and _ids(one) for one in value)):
        message = "must hold strings only, or token ids (whole numbers) only, or lists of token ids only"
        raise PydanticCustomError("prompt", message)
    if not all(value):
        raise PydanticCustomError("prompt", "holds an empty prompt")
    return tuple(one if isinstance(one, str) else tuple(one) for one in value)


def _ids(value: list[Any]) -> bool:
    return set(map(type, value)) <= {int}


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    return value


class Frozen(BaseModel):
    """Strict types, no assignment, unknown fields ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class StreamOptions(Frozen):
    """`include_usage`: one more chunk before `[DONE]`, with the usage of the whole request."""

    include_usage: bool | None = None


class Scheduled(Frozen):
    """What every request for a model's work may say of how it is treated."""

    model: str
    priority: (
        Annotated[
            int,
            Field(
                ge=-MAX_PRIORITY,
                le=MAX_PRIORITY,
                description="Lower is served first, as far as the API key may; the default is 0.",
            ),
        ]
        | None
    ) = None
    service_tier: (
        Annotated[
            Literal["auto", "default", "flex", "scale", "priority"],
            Field(description="flex: batch work, which waits behind, and gives way to, interactive requests."),
        ]
        | None
    ) = None
    timeout: (
        Annotated[
            float,
            Field(
                gt=0,
                le=MAX_TIMEOUT_S,
                allow_inf_nan=False,
                description="Seconds until the answer must be complete; else it ends with the error timed_out.",
            ),
        ]
        | None
    ) = None
    keep_alive: (
        Annotated[
            float,
            Field(
                ge=0,
                le=MAX_KEEP_S,
                allow_inf_nan=False,
                description="Seconds for which the session's cache is kept after this request, as far as the API key "
                "may; the service's own time if that is longer.",
            ),
        ]
        | None
    ) = None


class Sampled(Scheduled):
    """What completions and chats share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, description="The same as max_tokens.")] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False, description="0 is greedy.")] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, description="0 is greedy, 1 is off.")] | None = None
    top_k: Annotated[int, Field(ge=-1, description="0 and -1 are off.")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, description="0 is off.")] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1, description="0 is a seed as any other.")] | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
            Field(max_length=MAX_STOPS, fail_fast=True),
            BeforeValidator(_listed, json_schema_input_type=str | list[str]),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    min_tokens: (
        Annotated[int, Field(ge=0, description="No end-of-sequence or stop token, and no stop string, before so many.")]
        | None
    ) = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    repetition_penalty: (
        Annotated[
            float,
            Field(gt=0, le=10, allow_inf_nan=False, description="Of prompt and output, as in transformers; 1 is off."),
        ]
        | None
    ) = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]],
            Field(max_length=MAX_BIASES, description="Token id -> what is added to its logit; -100 bans the token."),
        ]
        | None
    ) = None
    ignore_eos: Annotated[bool, Field(description="Generate on past the model's end-of-sequence token.")] | None = None
    prompt_cache_key: (
        Annotated[str, Field(max_length=MAX_SESSION_CHARS, description="Names the session, as x-session-id does.")]
        | None
    ) = None

    @property
    def most_tokens(self) -> int | None:
        """The output limit that the client set, by either name."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens


Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": {"type": "integer", "minimum": 0}},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    "maxItems": MAX_PROMPTS,
                },
            ]
        }
    ),
]


class CompletionRequest(Sampled):
    """POST /v1/completions. Several prompts give as many choices, `index` by prompt."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, description="0 is for echo only.")] | None = None
    logprobs: Annotated[
        Annotated[
            int,
            Field(
                ge=0,
                le=MAX_LOGPROBS,
                description="Log-probabilities of each token, and of so many likeliest ones at its place, by the "
                "model's own distribution, before temperature and filters. The service may set a lower limit.",
            ),
        ]
        | None,
        BeforeValidator(lambda value: None if value is False else value),
    ] = None
    echo: (
        Annotated[bool, Field(description="The text begins with the prompt, and so do the logprobs asked for.")] | None
    ) = None


class TextPart(Frozen):
    """A piece of a message; the pieces are joined as they are."""

    type: Literal["text"]
    text: str


class Message(Frozen):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart],
        Field(min_length=1, max_length=MAX_PARTS, fail_fast=True),
        BeforeValidator(_parts, json_schema_input_type=str | list[TextPart]),
    ]
    name: Annotated[str, Field(max_length=64)] | None = None

    def fields(self) -> dict[str, str]:
        """What the chat template sees; a developer's turn is a system's, the name that templates know."""
        role = "system" if self.role == "developer" else self.role
        seen = {"role": role, "content": "".join(part.text for part in self.content)}
        return seen if self.name is None else seen | {"name": self.name}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(Sampled):
    """POST /v1/chat/completions. The assistant's turn is always a new one, also after an assistant's message."""

    messages: Messages
    logprobs: Annotated[bool, Field(description="The log-probability of each token, as for completions.")] | None = None
    top_logprobs: (
        Annotated[
            int,
            Field(ge=0, le=MAX_LOGPROBS, description="Of so many likeliest tokens at each place too; needs logprobs."),
        ]
        | None
    ) = None


class TokenizeRequest(Frozen):
    """POST /tokenize: a chat (`messages`), or what completions begin with (`prompt`). Nothing is computed."""

    model: str
    messages: Messages | None = None
    prompt: Prompts | None = None


class PrewarmRequest(Scheduled):
    """POST /v1/sessions/{session}/prewarm: what a chat (`messages`) or what completions (`prompt`) will begin with.
    Nothing is generated."""

    messages: Messages | None = None
    prompt: Prompts | None = None
