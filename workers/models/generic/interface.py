"""transformers' attention interface, with ours behind it: every layer's call goes to whatever `attending` names.

Two names are registered there. Under PAGED transformers makes no masks; under WALKED it hands each mask's rule to the
mask function that `attending` names, which is how a model's windows are found out. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

PAGED = "tidegate"
WALKED = "tidegate_walk"

Attend = Callable[[Any, Tensor, Tensor, Tensor, "Tensor | None", Mapping[str, Any]], Tensor]
"""The layer's module, queries [1, q_heads, T, d], keys and values [1, kv_heads, T, d], its mask, and all else that the
layer says → [1, T, q_heads, d]."""
Mask = Callable[[Mapping[str, Any]], "Tensor | None"]
"""What transformers says of a mask, `mask_function` above all → the mask that layers will be called with."""


@dataclass(frozen=True, slots=True)
class _Hooks:
    attend: Attend
    mask: Mask | None


_hooks: ContextVar[_Hooks] = ContextVar("hooks")


@contextmanager
def attending(attend: Attend, mask: Mask | None = None) -> Iterator[None]:
    """Within it, in this thread, layers attend by `attend`, and (under WALKED) masks come from `mask`."""
    token = _hooks.set(_Hooks(attend, mask))
    try:
        yield
    finally:
        _hooks.reset(token)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    return _hooks.get().attend(module, query, key, value, attention_mask, options), None


def _mask(**said: Any) -> Tensor | None:
    mask = _hooks.get().mask
    return mask(said) if mask else None


logging.set_verbosity_error()
logging.disable_progress_bar()
ALL_ATTENTION_FUNCTIONS.register(PAGED, _attention)
ALL_ATTENTION_FUNCTIONS.register(WALKED, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(WALKED, _mask)
