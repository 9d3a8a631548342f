"""Subject: a served model in this process, as its ranks compute it, with KV caches of whatever precision beside the
same weights.

One rank, on a CPU or one GPU: scales belong to (token, KV head) pairs, so what a precision costs does not depend on the
tensor-parallel degree. Teacher-forced: a text goes through the paged pool in chunks as a prompt does. Knows no figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvstore.layout import KVLayout, Precision
from kvstore.precisions import PrecisionMap
from workers.attention.formats import fault
from workers.models.factory import read_spec
from workers.models.spec import ModelSpec, Unsupported
from workers.parallel import Communicator
from workers.plan import Draw, Row, StepPlan
from workers.rank import short_dtype
from workers.runner import Runner
from workers.selection import Wish, choose_kernels
from workers.settings import GroupSettings

GREEDY = Draw()


@dataclass(frozen=True, slots=True)
class Reading:
    """A text as the model has read it: `states` [T, hidden] behind the last layer, one per token, and the `tokens`."""

    tokens: tuple[int, ...]
    states: Tensor


class Subject:
    """The model that `settings` describe. Weights are loaded for the kernels that serve a precision, when it is asked
    for, and kept until one comes that others serve: ask for precisions in the order of `kernels`."""

    def __init__(self, settings: GroupSettings) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.folder = Path(settings.model_dir)
        self.spec = read_spec(self.folder)
        self.dtype = short_dtype(self.spec.dtype) if settings.dtype == "auto" else settings.dtype
        self.auto = PrecisionMap.uniform(Precision.parse(self.dtype))
        self.device = settings.device
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        native = settings.native_dir
        self._settings = settings
        self._wish = Wish(settings.kernels, settings.weight_precision, Path(native) if native else None)
        self._runner: Runner | None = None
        self._name = ""

    def settle(self, precision: PrecisionMap) -> PrecisionMap:
        """With the model's own precision for "auto"."""
        return precision.settle(Precision.parse(self.dtype))

    def layout(self, precision: PrecisionMap) -> KVLayout:
        """The pages of a rank that holds all heads. PrecisionError for a map of other layers, Unsupported where the
        model's vectors cannot be stored so."""
        layout: KVLayout = self.spec.layout(self._settings.block_size, self.settle(precision), 1)[0]
        for layer in layout.layers:
            if why := fault(layer.vectors):
                raise Unsupported(why)
        return layout

    def kernels(self, precision: PrecisionMap) -> str:
        """The name of those that serve `precision`. Raises as `layout` does."""
        device, native = torch.device(self.device), self.spec if isinstance(self.spec, ModelSpec) else None
        return str(choose_kernels(self.dtype, device, self.layout(precision), self._wish, native).kernels.name)

    def use(self, precision: PrecisionMap) -> None:
        """Have the weights ready for the kernels that serve `precision`; every reading until the next call goes through
        them, of whatever precision its cache is."""
        name = self.kernels(precision)
        if name == self._name:
            return
        self._runner, self._name = None, ""
        settings = self._settings
        self._runner = Runner(
            self.folder,
            self.spec,
            comm=Communicator.alone(),
            block_size=settings.block_size,
            precision=self.settle(precision),
            dtype=self.dtype,
            device=self.device,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            wish=self._wish,
        )
        self._name = name

    def read(self, tokens: Sequence[int], precision: PrecisionMap) -> Reading:
        """`tokens` as a prompt, in chunks of a step, with a KV cache of `precision`."""
        layout, runner, text = self.layout(precision), self._ready, tuple(tokens)
        room = layout.blocks_for(len(text))
        runner.allocate(room * len(layout.groups), layout)
        states = []
        for start in range(0, len(text), self._settings.max_num_batched_tokens):
            stop = min(start + self._settings.max_num_batched_tokens, len(text))
            tables = _tables(layout, room, 0, layout.blocks_for(stop))
            states.append(runner.states(StepPlan(0, (Row(text[start:stop], start, tables),))))
        return Reading(text, torch.cat(states))

    def logits(self, states: Tensor) -> Tensor:
        """fp32 [n, vocab] of hidden states [n, hidden], until the next call."""
        logits = self._ready.project(states)
        assert logits is not None, "a lone rank has all logits"
        return logits

    def generate(self, prompts: Sequence[Sequence[int]], count: int, precision: PrecisionMap) -> list[list[int]]:
        """The `count` tokens that follow each prompt, the most likely one at a time, with a KV cache of `precision`.
        All prompts share the decode steps, as many as max_num_seqs at most."""
        layout, runner = self.layout(precision), self._ready
        room = max(layout.blocks_for(len(prompt) + count) for prompt in prompts)
        runner.allocate(len(prompts) * room * len(layout.groups), layout)

        def row(index: int, tokens: tuple[int, ...], start: int, draw: Draw | None) -> Row:
            first = index * room
            blocks = layout.blocks_for(start + len(tokens))
            return Row(tokens, start, _tables(layout, room * len(prompts), first, first + blocks), draw)

        found = []
        for index, prompt in enumerate(prompts):
            found.append(list(runner.run(StepPlan(0, (row(index, tuple(prompt), 0, GREEDY),)))))
        for step in range(count - 1):
            rows = tuple(
                row(index, (tokens[-1],), len(prompts[index]) + step, GREEDY) for index, tokens in enumerate(found)
            )
            for tokens, token in zip(found, runner.run(StepPlan(0, rows)), strict=True):
                tokens.append(token)
        return found

    @property
    def _ready(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("use() comes before the first reading")
        return self._runner


def _tables(layout: KVLayout, room: int, first: int, last: int) -> tuple[tuple[int, ...], ...]:
    """Blocks [first, last) of each layer group's own `room` blocks."""
    return tuple(tuple(range(group * room + first, group * room + last)) for group in range(len(layout.groups)))
