"""What the native kernels cost in quality: the real SmolLM2's next-token distributions against fp32's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
from tests.model.test_goldens import TEXT
from workers.batch import build_batch
from workers.kernels import Kernels
from workers.kvpool import KVPool
from workers.layers import TorchKernels
from workers.models.decoder import Decoder
from workers.models.reading import read_native
from workers.native.kernels import NativeKernels
from workers.native.library import load_library
from workers.parallel import Communicator
from workers.plan import Row, StepPlan
from workers.weights import Checkpoint

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

BLOCK = 16


@pytest.fixture(scope="module")
def tokens(smollm2: Path) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(TEXT).ids


@pytest.fixture(scope="module")
def exact(smollm2: Path, tokens: list[int]) -> Tensor:
    return distributions(smollm2, tokens, TorchKernels("torch-fp32", torch.float32, False), Precision.FP32)


def distributions(folder: Path, tokens: list[int], kernels: Kernels, precision: Precision | PrecisionMap) -> Tensor:
    """Log-probabilities [len(tokens), vocab] of what follows each token, all in one chunk."""
    spec, device = read_native(folder), torch.device("cpu")
    blocks = -(-len(tokens) // BLOCK)
    with torch.inference_mode(), Checkpoint(folder) as checkpoint:
        model = Decoder(spec, checkpoint, comm=Communicator.alone(), kernels=kernels, dtype="bf16", device=device)
        kept = precision if isinstance(precision, PrecisionMap) else PrecisionMap.uniform(precision)
        pool = KVPool(spec.layout(BLOCK, kept, 1)[0], blocks, device)
        attention = kernels.attention(pool, model.rules)
        row = Row(tuple(tokens), 0, (tuple(range(blocks)),), None)
        hidden = model.forward(build_batch(StepPlan(0, (row,)), BLOCK, device), attention)
        return model.logits(hidden).log_softmax(-1)


def divergence(exact: Tensor, found: Tensor) -> float:
    """KL divergence of `found` from `exact`, the mean over positions, in nats."""
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def test_bf16_is_closer_to_fp32_than_transformers_bf16(smollm2: Path, tokens: list[int], exact: Tensor) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    ours = distributions(smollm2, tokens, NativeKernels(load_library()), Precision.BF16)
    assert divergence(exact, ours) < divergence(exact, theirs)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8])
def test_int8_weights_stay_close_to_fp32(smollm2: Path, tokens: list[int], exact: Tensor, precision: Precision) -> None:
    found = distributions(smollm2, tokens, NativeKernels(load_library(), "int8"), precision)
    assert divergence(exact, found) < 0.012
    assert (exact.argmax(-1) == found.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("written", ["fp8_e4m3", {"k": "int8", "v": "int4"}], ids=str)
def test_a_coarse_cache_costs_what_its_format_costs(
    smollm2: Path, tokens: list[int], exact: Tensor, written: object
) -> None:
    """Read in bf16 and integers by a model in bf16, it is about as close to fp32 as all in fp32."""
    kept = PrecisionMap.parse(written)
    ours = divergence(exact, distributions(smollm2, tokens, NativeKernels(load_library()), kept))
    plain = divergence(exact, distributions(smollm2, tokens, TorchKernels("torch-fp32", torch.float32, False), kept))
    assert ours < 1.5 * plain + 0.001
