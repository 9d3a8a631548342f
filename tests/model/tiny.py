"""Tiny random models of each family, groups of ranks as threads, and plans made by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
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
}


def save_model(config: Any, folder: Path, shard_size: str = "1GB") -> Any:
    """A model of `config` with every weight, bias and norm random, saved to `folder` in fp32; returns it."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3 if name.endswith("bias") else 0.12)
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
    """`world` runners over the model in `folder`, driven in lockstep by hand-made plans."""

    def __init__(
        self, folder: Path, world: int = 1, *, blocks: int = 64, kernels: str = "auto", **options: Any
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
        for runner in self.runners:
            runner.allocate(blocks)

    def logits(self, *rows: Row, **lists: Any) -> Tensor:
        """One step's logits on rank 0: one row of [rows, vocab] per row with a draw."""
        plan = StepPlan(0, rows, **lists)
        results = in_threads(self.world, lambda rank: self.runners[rank].logits(plan))
        assert all(result is None for result in results[1:])
        assert results[0] is not None
        return results[0].clone()  # the kernels' own buffer, which the next step writes to

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
