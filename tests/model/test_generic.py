"""Decoders that transformers' own modules compute, through the paged pool: against the plain model, fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deploy.models.card import card_of
from deploy.plan.modelconfig import read_shape
from deploy.plan.planner import layouts
from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
from tests.model.generics import GENERICS
from tests.model.localgroup import LocalGroup
from tests.model.tiny import Ranks, oracle, prompt, row, save_model, tables
from workers.models.factory import read_spec
from workers.models.generic import selfcheck
from workers.models.generic.model import GenericModel
from workers.models.generic.spec import GenericSpec
from workers.models.generic.walk import window_of
from workers.models.spec import Unsupported
from workers.plan import Draw, Row
from workers.sequence import Request, Sampling
from workers.settings import GroupSettings

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

TOLERANCE = 5e-5
MARGIN = 1e-4
Models = dict[str, tuple[Path, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made = {}
    for name, config in GENERICS.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, save_model(config, folder)
    return made


@pytest.mark.parametrize("name", GENERICS)
def test_logits_are_those_of_transformers(models: Models, name: str) -> None:
    folder, model = models[name]
    tokens = prompt(40, seed=3)
    expected = oracle(model, tokens)
    chunks = [9, 1, 1, 14, 1, 7, 1, 1, 5]
    ends = [sum(chunks[: index + 1]) - 1 for index in range(len(chunks))]
    ranks = Ranks(folder)
    got = walk(ranks, tokens, chunks)
    whole = walk(ranks, tokens, [40])
    assert 0.2 < expected.std() < 5
    assert (got - expected[ends]).abs().max() < TOLERANCE
    assert (whole - expected[-1:]).abs().max() < TOLERANCE


def walk(ranks: Ranks, tokens: list[int], chunks: list[int]) -> Tensor:
    """Feed `tokens` in pieces; the logits after each. Every layer group has blocks of its own."""
    groups = len(ranks.runners[0].layout.groups)
    places, seen, outputs = tuple(tables(64, [10] * groups)), 0, []
    for count in chunks:
        outputs.append(ranks.logits(Row(tuple(tokens[seen : seen + count]), seen, places, Draw())))
        seen += count
    return torch.cat(outputs)


@pytest.mark.parametrize("name", GENERICS)
def test_greedy_tokens_with_chunks_and_a_warm_prefix_cache(models: Models, name: str) -> None:
    folder, model = models[name]
    settings = GroupSettings(
        model_dir=str(folder),
        model_names=("m",),
        dtype="fp32",
        kv_precision=PrecisionMap.uniform(Precision.FP32),
        block_size=8,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        threads=1,
        revision="r1",
        checks_dir=str(folder / "checks"),
    )
    prompts = [tuple(prompt(count, seed=count)) for count in (33, 20, 5)]
    with LocalGroup(settings, 64) as group:
        for turn in "ab":
            requests = [Request(f"{turn}{index}", tokens, Sampling(12), b"ns") for index, tokens in enumerate(prompts)]
            for index, tokens in group_outputs(group, requests).items():
                assert_greedy(model, prompts[int(index[1:])], tokens)
        assert len(list((folder / "checks").iterdir())) == 1, "what was checked is remembered"
        windowed = any(each.window for each in group.ranks[0].runner.layout.groups)
        assert group.report().cached_tokens >= (8 if windowed else 32 + 16)


def group_outputs(group: LocalGroup, requests: list[Request]) -> dict[str, list[int]]:
    outputs = group.generate(requests)
    assert all(len(tokens) == 12 for tokens in outputs.values())
    return outputs


def assert_greedy(model: Any, tokens: tuple[int, ...], output: list[int]) -> None:
    """Each output token is the plain model's choice, or as good as that."""
    logits = oracle(model, (*tokens, *output[:-1]))[len(tokens) - 1 :]
    behind = logits.max(-1).values - logits[torch.arange(len(output)), torch.tensor(output)]
    assert behind.max() < MARGIN


def test_rows_of_every_kind_share_a_step(models: Models) -> None:
    folder, model = models["cohere"]
    ranks = Ranks(folder)
    prompts = [prompt(count, seed=count) for count in (30, 17, 9)]
    places = tables(64, [8, 5, 3])
    ranks.logits(row(prompts[0][:-1], 0, places[0]))
    ranks.logits(row(prompts[1][:10], 0, places[1]))
    step = [
        row(prompts[1][10:], 10, places[1]),
        row(prompts[0][-1:], 29, places[0]),
        row(prompts[2], 0, places[2], draw=None),
    ]
    got = ranks.logits(*step)
    expected = torch.stack([oracle(model, prompts[index])[-1] for index in (1, 0)])
    assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("kernel", ["torch-bf16", "auto"])
def test_sixteen_bit_weights_and_a_quantised_cache_stay_close(models: Models, kernel: str) -> None:
    folder, model = models["olmo2"]
    ranks = Ranks(folder, dtype="bf16", kernels=kernel, block_size=16, precision=Precision.INT8)
    tokens = prompt(20)
    got = ranks.walk(tokens, [19, 1], (4, 3))
    assert (got - oracle(model, tokens)[-2:]).abs().max() < 0.3
    assert got.dtype == torch.float32


def test_rules_are_what_the_layers_ask_for(models: Models) -> None:
    cohere2, gemma, oss = (read_spec(models[name][0]) for name in ("cohere2", "vaultgemma", "gpt_oss"))
    assert isinstance(cohere2, GenericSpec) and isinstance(gemma, GenericSpec) and isinstance(oss, GenericSpec)
    assert [layer.window for layer in cohere2.attention] == [9, None, 9]
    assert {(layer.scale, layer.softcap) for layer in gemma.attention} == {(20**-0.5, 2.0)}
    assert [layer.sinks for layer in oss.attention] == [True] * 3


@pytest.mark.parametrize("name", GENERICS)
def test_the_planner_plans_the_pages_that_are_there(models: Models, name: str) -> None:
    folder, _ = models[name]
    spec = read_spec(folder)
    assert layouts(read_shape(folder / "config.json", name), 16, "int8", 1) == spec.layout(
        16, PrecisionMap.uniform(Precision.INT8), 1
    )


@pytest.mark.parametrize("name", ["olmo2", "vaultgemma"])
def test_the_card_of_a_generic_model_counts_its_own_pages(models: Models, name: str) -> None:
    folder, _ = models[name]
    precision = PrecisionMap.parse({"default": "int8", "layers": {"-1-": {"k": "fp32", "v": "int4"}}})
    card = card_of(str(folder), precision)
    (layout,) = read_spec(folder).layout(16, precision, 1)
    assert (card.standing, card.context, card.token_bytes) == ("generic", 128, layout.token_bytes)
    assert {index: part.token_bytes for part in card.layers for index in part.indices} == {
        index: layer.token_bytes for index, layer in enumerate(layout.layers)
    }
    assert {part.softcap for part in card.layers} == {2.0 if name == "vaultgemma" else None}


def test_what_a_spec_says(models: Models) -> None:
    spec = read_spec(models["granite"][0])
    assert isinstance(spec, GenericSpec)
    assert (spec.q_heads, spec.kv_heads, spec.head_dim, spec.layers) == (4, 2, 16, 3)
    assert {layer.scale for layer in spec.attention} == {0.3}
    assert (spec.context_length, spec.eos_ids, spec.vocab_size) == (128, (2,), 101)
    assert GenericSpec.parse(spec.plain) == spec
    with pytest.raises(Unsupported, match=r"tensor_parallel_size 2: GraniteForCausalLM .* tensor_parallel_size: 1"):
        spec.shards(2)


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (lambda b, h, q, k: k <= q, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 7), 7),
        (lambda b, h, q, k: (k <= q) & (k > q - 1), 1),
        (lambda b, h, q, k: (k <= q) & (k > q - 4096), 4096),
        (lambda b, h, q, k: (k <= q) & (k // 16 == q // 16), 0),
        (lambda b, h, q, k: (k <= q) & ((k > q - 7) | (k < 2)), 0),
        (lambda b, h, q, k: k >= 0, 0),
        (lambda b, h, q, k: (k - q).abs() < 5, 0),
        (lambda b, h, q, k: torch.ones(2, 2)[b, q] > 0, 0),
    ],
)
def test_the_window_of_a_mask(rule: Callable[..., Tensor], window: int | None) -> None:
    assert window_of(rule) == window


def checked(folder: Path, check: selfcheck.SelfCheck, change: Callable[[GenericModel], None] = lambda _: None) -> None:
    """Load the model in `folder`, change it, and have it checked."""
    from workers.layers import TorchKernels

    kernels, device = TorchKernels("torch-fp32", torch.float32, False), torch.device("cpu")
    spec = read_spec(folder)
    assert isinstance(spec, GenericSpec)
    with torch.inference_mode():
        model = GenericModel(spec, folder, kernels=kernels, dtype="fp32", device=device)
        change(model)
        check.demand(model, spec, kernels, device)


def _scaled(model: GenericModel) -> None:
    from dataclasses import replace

    model.rules = tuple(replace(rule, scale=rule.scale * 1.5) for rule in model.rules)


def _shifting(model: GenericModel) -> None:
    """A layer that adds the token before to each token, as convolutions and recurrent states do."""

    def shift(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0] + 0.5 * inputs[0].roll(1, 1), *inputs[1:])

    model._decoder.layers[1].register_forward_pre_hook(shift)


def _forgetful(model: GenericModel) -> None:
    """A model that reckons positions from where a chunk begins."""
    whole = model._decoder.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if "position_ids" in kwargs and kwargs["position_ids"] is not None:
            kwargs["position_ids"] = kwargs["position_ids"] % 16
        return whole(*args, **kwargs)

    model._decoder.forward = forward


@pytest.mark.parametrize("change", [_scaled, _shifting, _forgetful])
def test_a_model_that_answers_otherwise_through_the_pool_is_refused(
    models: Models, change: Callable[[GenericModel], None]
) -> None:
    folder, _ = models["stablelm"]
    checked(folder, selfcheck.SelfCheck())
    with pytest.raises(Unsupported, match=r"StableLmForCausalLM cannot be served: through the paged KV cache .* token"):
        checked(folder, selfcheck.SelfCheck(), change)


def test_an_error_of_the_models_own_code_refuses_it_too(models: Models) -> None:
    def break_it(model: GenericModel) -> None:
        def fail(module: Any, inputs: tuple[Any, ...]) -> None:
            raise RuntimeError("shapes that do not fit")

        model._decoder.layers[1].register_forward_pre_hook(fail)

    with pytest.raises(Unsupported, match=r"StableLmForCausalLM cannot be served: its check .*shapes that do not fit"):
        checked(models["stablelm"][0], selfcheck.SelfCheck(), break_it)


def test_a_passed_check_is_remembered_and_a_failed_one_is_not(models: Models, tmp_path: Path) -> None:
    folder, _ = models["stablelm"]
    check = selfcheck.SelfCheck(tmp_path / "checks", "r1")
    with pytest.raises(Unsupported):
        checked(folder, check, _scaled)
    assert not list(tmp_path.rglob("*.json"))
    checked(folder, check)
    assert len(list(tmp_path.rglob("*"))) == 2
    checked(folder, check, _scaled)  # not looked at again
    with pytest.raises(Unsupported):
        checked(folder, selfcheck.SelfCheck(tmp_path / "checks", "r2"), _scaled)
    checked(folder, selfcheck.SelfCheck(tmp_path / "checks", ""))
    assert len(list(tmp_path.rglob("*.json"))) == 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"hidden_size": 64, "num_hidden_layers": 2}, "MambaForCausalLM .* recurrent state"),
    "jamba": ({"hidden_size": 64, "num_hidden_layers": 2}, "JambaForCausalLM .* recurrent state"),
    "bloom": ({"hidden_size": 64, "n_layer": 2}, "BloomForCausalLM .* ALiBi"),
    "mpt": ({"d_model": 64, "n_layers": 2}, "MptForCausalLM .* ALiBi"),
    "t5": ({}, "T5ForConditionalGeneration .* encoder with a decoder"),
    "bert": ({}, "BertLMHeadModel .* later tokens"),
    "gpt_neo": ({"hidden_size": 64, "num_heads": 4}, "GPTNeoForCausalLM .* attention interface"),
    "openai-gpt": ({"n_layer": 2}, "OpenAIGPTLMHeadModel .* attention interface"),
    "llama4_text": ({"num_hidden_layers": 4}, "Llama4ForCausalLM: its attention mask is neither causal nor"),
    "granitemoehybrid": ({"num_hidden_layers": 2}, "GraniteMoeHybridForCausalLM .* recurrent state"),
    "diffllama": ({"num_hidden_layers": 2}, r"DiffLlamaForCausalLM: layer 0 \(DiffLlamaAttention\) attends more than"),
    "gemma4_text": ({}, "Gemma4ForCausalLM: its layers have heads of several"),
}
CLASSES = {"t5": "T5ForConditionalGeneration"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, name: str) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

    sizes, said = REFUSED[name]
    config = AutoConfig.for_model(name, **sizes)
    config.architectures = [CLASSES.get(name) or DECODERS[name]]
    config.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=said):
        read_spec(tmp_path)
