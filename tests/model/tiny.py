"""Tiny random models of each family, groups of ranks as threads, and plans made by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
from kvstore.table import GONE
from tests.model.mixtures import MIXTURES
from workers.models.factory import read_spec
from workers.native.library import load_library
from workers.parallel import Communicator, join_store, open_store
from workers.plan import Draw, Row, StepPlan
from workers.runner import Runner
from workers.selection import Wish

HOST = "127.0.0.1"
GREEDY = Draw()
T = TypeVar("T")

_SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "intermediate_size": 97,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_GPT = _IDS | {"vocab_size": 101, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 90, "n_positions": 256}
_NEOX = _IDS | {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 97,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_FALCON = _IDS | {
    "vocab_size": 101,
    "hidden_size": 64,
    "ffn_hidden_size": 97,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_GEMMA = _SHAPE | {
    "hidden_size": 60,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "pad_token_id": None,
}
_PHI3 = _SHAPE | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0, 2.2, 3.0],
    "long_factor": [4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
    "partial_rotary_factor": 0.75,
}
FAMILIES: dict[str, Any] = {
    "llama2": LlamaConfig(**_SHAPE, hidden_size=64, num_attention_heads=4, num_key_value_heads=4),
    "llama3": LlamaConfig(
        **_SHAPE,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=LLAMA3_ROPE,
    ),
    "mistral": MistralConfig(
        **_SHAPE, hidden_size=60, num_attention_heads=6, num_key_value_heads=2, head_dim=16, sliding_window=None
    ),
    "qwen2": Qwen2Config(
        **_SHAPE, hidden_size=96, num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=True
    ),
    "qwen3": Qwen3Config(
        **_SHAPE, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, attention_bias=True
    ),
    "smollm2": LlamaConfig(
        **_SHAPE, hidden_size=144, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True
    ),
    "mistral-window": MistralConfig(
        **_SHAPE, hidden_size=60, num_attention_heads=6, num_key_value_heads=2, head_dim=16, sliding_window=11
    ),
    "qwen2-window": Qwen2Config(
        **_SHAPE,
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=2,
    ),
    "gemma2": Gemma2Config(
        **_GEMMA, sliding_window=9, attn_logit_softcapping=2.0, final_logit_softcapping=1.5, attention_bias=True
    ),
    "gemma3": Gemma3TextConfig(
        **_GEMMA | {"num_hidden_layers": 5},
        sliding_window=13,
        sliding_window_pattern=3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        },
    ),
    "phi3": Phi3Config(**_PHI3, sliding_window=17),
    "phi3-longrope": Phi3Config(**_PHI3, rope_parameters=LONGROPE, original_max_position_embeddings=128),
    "gpt2": GPT2Config(**_GPT),
    "bigcode": GPTBigCodeConfig(**_GPT),
    "bigcode-mha": GPTBigCodeConfig(**_GPT, multi_query=False),
    "neox": GPTNeoXConfig(**_NEOX, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
    "neox-sequential": GPTNeoXConfig(**_NEOX, use_parallel_residual=False, tie_word_embeddings=True),
    "falcon-mqa": FalconConfig(**_FALCON, tie_word_embeddings=False),
    "falcon-grouped": FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon-one-norm": FalconConfig(
        **_FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "falcon-mha": FalconConfig(**_FALCON, multi_query=False, parallel_attn=False, bias=True),
    **MIXTURES,
}


def save_model(config: Any, folder: Path, shard_size: str = "1GB") -> Any:
    """A model of `config` with every weight, bias and norm random, saved to `folder` in fp32; returns it."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and ("norm" in name or ".ln_" in name):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3 if name.endswith("bias") else 0.12)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def oracle(model: Any, tokens: Sequence[int]) -> Tensor:
    """transformers' logits at every position, fp32 [len(tokens), vocab]."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].float()


def connect(world: int, device: str = "cpu", *, shared: bool = True) -> list[Communicator]:
    """The communicators of a group whose ranks are threads of this process, over memory (`shared`) or gloo."""
    if world == 1:
        return [Communicator.alone()]
    store, address = open_store(HOST)
    library = load_library() if shared else None

    def meet(rank: int) -> Communicator:
        own = store if rank == 0 else join_store(address)
        return Communicator.connect(
            own, rank, world, host=HOST, device=torch.device(device), timeout_s=30, library=library
        )

    return in_threads(world, meet)


def in_threads(world: int, work: Callable[[int], T]) -> list[T]:
    """work(rank) of every rank at the same time; the first failure is raised."""
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(work, range(world)))


class Ranks:
    """`world` runners over the model in `folder`, driven in lockstep by hand-made plans.

    Plans are made as for a model with one layer group and `blocks` blocks: where there are more, each group gets as
    many blocks of its own, and those before a group's window are gone.
    """

    def __init__(
        self,
        folder: Path,
        world: int = 1,
        *,
        blocks: int = 64,
        kernels: str = "auto",
        **options: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "block_size": 4,
            "precision": Precision.FP32,
            "dtype": "fp32",
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "wish": Wish(kernels),
        } | options
        if isinstance(settings["precision"], Precision):
            settings["precision"] = PrecisionMap.uniform(settings["precision"])
        spec = read_spec(folder)
        self.world = world
        self.block_size: int = settings["block_size"]
        self.comms = connect(world)
        self.runners = in_threads(world, lambda rank: Runner(folder, spec, comm=self.comms[rank], **settings))
        self._groups = self.runners[0].layout.groups
        self._blocks = blocks
        for runner in self.runners:
            runner.allocate(blocks * len(self._groups))

    def logits(
        self, *rows: Row, copy: Sequence[tuple[int, int]] = (), zero: Sequence[int] = (), **lists: Any
    ) -> Tensor:
        """One step's logits on rank 0: one row of [rows, vocab] per row with a draw."""
        steps = [number * self._blocks for number in range(len(self._groups))]
        plan = StepPlan(
            0,
            tuple(replace(row, tables=tuple(map(self._table, repeat(row), range(len(steps))))) for row in rows),
            copy=tuple((source + step, target + step) for step in steps for source, target in copy),
            zero=tuple(block + step for step in steps for block in zero),
            **lists,
        )
        results = in_threads(self.world, lambda rank: self.runners[rank].logits(plan))
        assert all(result is None for result in results[1:])
        assert results[0] is not None
        return results[0].clone()  # the kernels' own buffer, which the next step writes to

    def _table(self, row: Row, group: int) -> tuple[int, ...]:
        """The row's blocks in layer group `group`."""
        window = self._groups[group].window
        gone = 0 if window is None else max(0, row.start - window + 1) // self.block_size
        blocks = [block + group * self._blocks for block in row.tables[0]]
        return tuple([GONE] * gone + blocks[gone:])

    def walk(self, tokens: Sequence[int], chunks: Sequence[int], table: tuple[int, ...]) -> Tensor:
        """Feed `tokens` in pieces of `chunks` tokens through `table`; the logits after each piece."""
        assert sum(chunks) == len(tokens)
        seen, outputs = 0, []
        for count in chunks:
            outputs.append(self.logits(row(tokens[seen : seen + count], seen, table)))
            seen += count
        return torch.cat(outputs)

    def close(self) -> None:
        in_threads(self.world, lambda rank: self.comms[rank].close())


def row(tokens: Sequence[int], start: int, table: tuple[int, ...], draw: Draw | None = GREEDY) -> Row:
    return Row(tuple(tokens), start, (table,), draw)


def prompt(count: int, seed: int = 0, vocabulary: int = 101) -> list[int]:
    """`count` token ids."""
    return random.Random(seed).choices(range(vocabulary), k=count)


def tables(blocks: int, sizes: Sequence[int], seed: int = 0) -> list[tuple[int, ...]]:
    """Block tables of the given sizes out of `blocks` blocks, shuffled, without overlap."""
    ids = random.Random(seed).sample(range(blocks), sum(sizes))
    return [tuple(ids[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]
