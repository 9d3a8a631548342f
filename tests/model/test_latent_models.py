"""Experts and MLA beyond what every family is tested for: preemption, every KV precision, FP8 and fused checkpoints,
16-bit kernels, and what the planner says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.plan.modelconfig import read_shape
from deploy.plan.planner import layouts
from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
from tests.model.localgroup import LocalGroup
from tests.model.mixtures import YARN
from tests.model.test_goldens import generate
from tests.model.test_weights import blockwise
from tests.model.tiny import FAMILIES, Ranks, oracle, prompt, row, save_model, tables
from workers.models.reading import read_native
from workers.sequence import Request, Sampling
from workers.settings import GroupSettings

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

NAMES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "minicpm3")
LATENT = NAMES[2:]
LENGTHS = (70, 1, 40, 33)
NEW_TOKENS = 20
MARGIN = 1e-3
"""Where transformers' two best logits lie closer than this, either token is right."""
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    made = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, save_model(FAMILIES[name], folder)
    return made


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_greedy_tokens_equal_transformers_in_a_pool_that_is_too_small(
    models: dict[str, tuple[Path, Any]], name: str
) -> None:
    folder, model = models[name]
    head = prompt(32, seed=1)
    prompts = [tuple((head + prompt(length, seed=length))[:length]) for length in LENGTHS]
    goldens = generate(model, prompts)
    settings = GroupSettings(
        model_dir=str(folder),
        model_names=("m",),
        tensor_parallel_size=2,
        dtype="fp32",
        kv_precision=PrecisionMap.uniform(Precision.FP32),
        block_size=8,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        threads=1,
    )
    sampling = Sampling(NEW_TOKENS)
    with LocalGroup(settings, 15) as group:
        for turn in ("cold", "warm"):
            outputs = group.generate([Request(f"{turn}{i}", p, sampling, b"ns") for i, p in enumerate(prompts)])
            right = 0
            for index, golden in enumerate(goldens):
                got = outputs[f"{turn}{index}"]
                assert len(got) == NEW_TOKENS
                for token, want, margin in zip(got, golden.tokens, golden.margins, strict=False):
                    assert token == want or margin < MARGIN, f"prompt {index}: {token}, not {want} ({margin:.1e})"
                    if token != want:
                        break
                    right += 1
            assert right > 0.8 * len(goldens) * NEW_TOKENS, "too many near ties to say anything"
        report = group.report()
        assert report.cached_tokens > 0 and report.pool.held == 0
        assert report.preemptions > 0


@pytest.mark.parametrize(
    "precision", [one for one in Precision if not one.by_channel], ids=lambda precision: precision.label
)
def test_every_kv_precision_keeps_latents(models: dict[str, tuple[Path, Any]], precision: Precision) -> None:
    folder, model = models["minicpm3"]  # no experts, between which a small error decides
    tokens = prompt(60)
    expected = oracle(model, tokens)[[29, 30, 59]]
    error = {"fp32": 5e-5, "bf16": 0.03, "fp16": 0.004, "int8": 0.05, "fp8_e4m3": 0.2, "fp8_e5m2": 0.4, "int4": 0.6}
    worst = []
    for world, chunks in ((1, [30, 1, 29]), (2, [30, 1, 29]), (1, [7] * 4 + [2, 1, 14, 15])):
        ranks = Ranks(folder, world, precision=precision)
        first, second = tables(64, [15, 15], seed=world)
        got = ranks.walk(tokens, chunks, first)[[-1] if len(chunks) > 3 else slice(None)]
        worst.append(float((got - expected[-len(got) :]).abs().max()))
        # The first blocks shared, the next one copied: a page is bytes.
        shared = (*first[:8], *second[8:])
        copied = ranks.logits(row(tokens[34:], 34, shared), copy=((first[8], second[8]),))
        assert (copied - got[-1:]).abs().max() < 1e-4 * expected.abs().max()
        ranks.close()
    assert max(worst) < error[precision.label]
    assert max(worst) > error[precision.label] / 100 or precision is Precision.FP32


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_with_all_experts_in_one_tensor_are_read_too(
    tmp_path: Path, models: dict[str, tuple[Path, Any]], name: str
) -> None:
    folder, model = models[name]
    model.save_pretrained(tmp_path, save_original_format=False)
    each = [key for key in load_file(folder / "model.safetensors") if ".experts.0." in key]
    assert len(each) == {"mixtral": 9, "minicpm3": 0}.get(name, 6)
    fused = [key for key in load_file(tmp_path / "model.safetensors") if key.endswith("experts.gate_up_proj")]
    assert len(fused) == {"mixtral": 3, "minicpm3": 0}.get(name, 2)
    tokens = prompt(20)
    ranks = Ranks(tmp_path, 3)
    assert (ranks.walk(tokens, [20], (3, 1, 2, 7, 5)) - oracle(model, tokens)[-1:]).abs().max() < TOLERANCE
    ranks.close()


BLOCK = (16, 24)


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral"])
def test_fp8_weights_compute_as_their_values_do(tmp_path: Path, models: dict[str, tuple[Path, Any]], name: str) -> None:
    folder, model = models[name]
    tensors = load_file(folder / "model.safetensors")
    changed, plain = {}, {}
    for key, tensor in tensors.items():
        if tensor.dim() != 2 or "embed" in key or "head" in key or "gate.weight" in key:
            changed[key] = plain[key] = tensor
            continue
        values, scales = blockwise(tensor, BLOCK)
        changed |= {key: values, f"{key}_scale_inv": scales}
        each = scales.repeat_interleave(BLOCK[0], 0)[: len(tensor)].repeat_interleave(BLOCK[1], 1)
        plain[key] = values.float() * each[:, : tensor.shape[1]]
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in changed.values()) > 20
    config = json.loads((folder / "config.json").read_text())
    logits = []
    for kind, content, extra in (
        ("plain", plain, {}),
        ("fp8", changed, {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK)}}),
    ):
        made = tmp_path / kind
        made.mkdir()
        save_file({key: tensor.contiguous() for key, tensor in content.items()}, made / "model.safetensors")
        (made / "config.json").write_text(json.dumps(config | extra))
        for world in (1, 2):
            ranks = Ranks(made, world)
            logits.append(ranks.walk(prompt(20), [20], (3, 1, 2, 7, 5)))
            ranks.close()
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], logits[3])
    original = oracle(model, prompt(20))[-1:]
    assert 1e-3 < (logits[0] - original).abs().max() < 1.0


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, models: dict[str, tuple[Path, Any]]) -> None:
    folder, model = models["deepseek_v3"]
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"model.layers.3.eh_proj.weight": torch.ones(64, 128), "model.layers.3.enorm.weight": torch.ones(64)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    got = Ranks(tmp_path).walk(prompt(9), [9], (3, 1, 2))
    assert (got - oracle(model, prompt(9))[-1:]).abs().max() < TOLERANCE


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", LATENT)
def test_the_planner_counts_the_pool_s_bytes(models: dict[str, tuple[Path, Any]], name: str, precision: str) -> None:
    folder, _ = models[name]
    planned = layouts(read_shape(folder / "config.json", name), 16, precision, 3)
    assert planned == read_native(folder).layout(16, PrecisionMap.parse(precision), 3)
    ranks = Ranks(folder, 3, precision=Precision.parse(precision), block_size=16, blocks=7)
    for runner, layout in zip(ranks.runners, planned, strict=True):
        assert runner.pool is not None
        assert sum(column.numel() for column in runner.pool.columns) == 7 * layout.block_bytes
    ranks.close()


@pytest.mark.parametrize(
    ("name", "kernels"),
    [("qwen3_moe", "native"), ("qwen3_moe", "torch-bf16"), ("deepseek_v2", "auto"), ("deepseek_v2", "torch-bf16")],
)
def test_sixteen_bit_kernels_stay_close_to_the_model(
    models: dict[str, tuple[Path, Any]], name: str, kernels: str
) -> None:
    folder, model = models[name]
    tokens = prompt(40)
    ranks = Ranks(folder, dtype="bf16", kernels=kernels, precision=Precision.BF16, block_size=16)
    got = ranks.walk(tokens, [38, 1, 1], (4, 3, 2))
    # What bf16 rounds may send a token to another expert, so a few logits may be off by more.
    assert (got - oracle(model, tokens)[-3:]).abs().mean() < 0.05
    if kernels == "auto":
        assert "joint latents" in ranks.runners[0].choice.why and not ranks.runners[0].choice.second_best


PLAIN = {"rope_type": "default", "rope_theta": 300.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "halves": ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None, "norm_topk_prob": False}),
    "biases": ("deepseek_v3", {"attention_bias": True, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}),
    "yarn": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "greedy": ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": 18, "rope_parameters": PLAIN}),
    "unscaled": ("minicpm3", {"rope_parameters": PLAIN, "scale_depth": None, "dim_model_base": None, "scale_emb": 1}),
    "sparse": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False}),
    "window": ("mixtral", {"sliding_window": 11, "num_experts_per_tok": 1}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_variants_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    family, changes = VARIANTS[variant]
    config = FAMILIES[family]
    model = save_model(type(config)(**config.to_dict() | changes), tmp_path)
    tokens = prompt(40)
    expected = oracle(model, tokens)[[16, 17, 39]]
    ranks = Ranks(tmp_path, 2)
    got = ranks.walk(tokens, [17, 1, 22], tables(64, [10])[0])
    ranks.close()
    assert expected.std() > 0.05
    assert (got - expected).abs().max() < TOLERANCE
