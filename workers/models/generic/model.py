"""GenericModel: a decoder of transformers, computed by its own modules, with attention over the paged pool.

A step's tokens go through as one packed row with a position each; every layer hands its rotated queries and keys, and
its values, to the attention backend, which alone knows rows, blocks and precisions. The head runs on the hidden states
that are asked for, through the model's own forward, so that whatever scales or caps the logits takes part. One rank
only; it keeps no sequence state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from workers.attention.backend import AttentionBackend, AttentionRule
from workers.batch import Batch
from workers.kernels import Kernels
from workers.models.generic.interface import PAGED, attending
from workers.models.generic.spec import GenericSpec
from workers.weights import DTYPES, WeightError


class GenericModel:
    """The model in `folder`, its weights rounded to `dtype` and kept in the kernels' dtype. Raises WeightError for
    tensors that are missing, left over or misshapen."""

    def __init__(self, spec: GenericSpec, folder: Path, *, kernels: Kernels, dtype: str, device: torch.device) -> None:
        self.shard = spec.shards(1)[0]
        self.widths = (spec.vocab_size,)
        self._dtype = kernels.dtype
        self._device = device
        self._model = _load(folder, DTYPES[dtype]).to(device=device, dtype=kernels.dtype)
        self._decoder: Any = self._model.get_decoder()
        self._given: Tensor | None = None
        self._insert()
        self.rules = self._rules(spec)

    def forward(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """Hidden states [T, hidden] that the model's head takes."""
        step = attention.prepare(batch)

        def attend(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]
        ) -> Tensor:
            heads = torch.cat((query[0], key[0], value[0])).transpose(0, 1).to(self._dtype)
            out = attention.attend(module.layer_idx, heads.flatten(1), None, step)
            return out.to(query.dtype).unflatten(-1, (query.shape[1], -1))[None]

        with attending(attend):
            out = self._decoder(input_ids=batch.tokens[None], position_ids=batch.positions[None], use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits fp32 [S, vocab] of hidden states [S, hidden]."""
        self._given = hidden[None]
        try:
            tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=self._device)
            logits: Tensor = self._model(input_ids=tokens, use_cache=False).logits[0, :, : self.widths[0]].float()
        finally:
            self._given = None
        return logits

    def plain(self, tokens: Tensor) -> Tensor:
        """Logits fp32 [T, vocab] of one sequence, int64 [T], as transformers computes them by itself: no cache, its own
        masks and attention, nothing of this project."""
        with self._by("eager"):
            logits: Tensor = self._model(input_ids=tokens[None], use_cache=False).logits[0, :, : self.widths[0]].float()
        return logits

    @contextmanager
    def _by(self, attention: str) -> Iterator[None]:
        """Within it, layers attend by transformers' function of that name."""
        self._model.config._attn_implementation = attention
        try:
            yield
        finally:
            self._model.config._attn_implementation = PAGED

    def _insert(self) -> None:
        """Let the decoder's place in the model give `_given` where there is one: the head alone runs then."""
        whole = self._decoder.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._given is None:
                return whole(*args, **kwargs)
            return _Given(self._given)

        self._decoder.forward = forward

    def _rules(self, spec: GenericSpec) -> tuple[AttentionRule, ...]:
        """What attention is to do in each layer, with the sinks that are weights."""
        sinks: dict[int, Tensor] = {}

        def note(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]
        ) -> Tensor:
            if (found := options.get("s_aux")) is not None:
                sinks[module.layer_idx] = found.detach().float().flatten()
            return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

        if any(layer.sinks for layer in spec.attention):
            token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
            with attending(note):
                self._decoder(input_ids=token, position_ids=token, use_cache=False)
        return tuple(
            AttentionRule(layer.scale, layer.softcap, layer.window, sinks[index] if layer.sinks else None)
            for index, layer in enumerate(spec.attention)
        )


class _Given:
    """What a decoder returns, with hidden states alone: whatever else a head asks for is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


def _load(folder: Path, dtype: torch.dtype) -> Any:
    """The model with all its weights, in `dtype`."""
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=PAGED,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise WeightError(f"{folder}: transformers cannot load the weights: {error}") from error
    for kind, what in (("missing_keys", "lacks"), ("unexpected_keys", "has what this model does not use:")):
        if names := sorted(map(str, told[kind])):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise WeightError(f"the checkpoint {what} {', '.join(names[:3])}{more}")
    return model.eval().requires_grad_(False)
