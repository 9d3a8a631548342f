"""A plan as lines for people and as one JSON document. Knows what a plan says, decides nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from deploy.plan.planner import Plan, layer_kv
from deploy.plan.plans import USUAL_SHARE, Option, advice, options, parallelism, traffic
from deploy.plan.shapes import Attention
from kvstore.layout import Precision


def both(amount: int | float) -> str:
    """Bytes in decimal and in binary units: "42.95 GB = 40.00 GiB"."""
    decimal, binary, letter = (10**6, 2**20, "M") if amount < 10**8 else (10**9, 2**30, "G")
    return f"{amount / decimal:,.2f} {letter}B = {amount / binary:,.2f} {letter}iB"


def formula(attention: Attention, precision: str) -> str:
    """How many bytes one token takes in such a layer, as a calculation."""
    total = layer_kv(attention, attention.kv_heads if not attention.latent else 1, precision).token_bytes
    if attention.latent:
        kept = layer_kv(attention, 1, precision).vectors
        parts = " + ".join(_vector(vector.elements, vector.precision.label) for vector in kept)
        return f"{parts} = {total:,} B (one latent and its rotated part, no factor 2)"
    heads, values = f"{attention.kv_heads} KV heads", Precision.parse(precision).of_values.label
    if attention.values != attention.head_dim or values != precision:
        pair = f"({_vector(attention.head_dim, precision)} + {_vector(attention.values, values)})"
        scales = layer_kv(attention, attention.kv_heads, precision).channel_bytes
        more = f", and {scales:,} B of scales per block" if scales else ""
        return f"{heads} × {pair} = {total:,} B{more}"
    return f"2 × {heads} × {_vector(attention.head_dim, precision)} = {total:,} B"


def kv_formula(plan: Plan) -> str:
    """How many bytes all that was asked for takes, as a calculation."""
    kinds = Counter((layer.window, layer.token_bytes, layer.channel_bytes) for layer in plan.whole.layers)
    parts = []
    for (window, per_token, per_block), count in kinds.items():
        tokens = f"{plan.ask.context:,}" if window is None else f"min({plan.ask.context:,}, window {window:,})"
        parts.append(f"{count} layers × {tokens} tokens × {per_token:,} B")
        if per_block:
            blocks = plan.whole.blocks_for(plan.ask.context, window)
            parts.append(f"{count} layers × {blocks:,} blocks × {per_block:,} B")
    inner = " + ".join(parts)
    return f"{plan.ask.batch} × {f'({inner})' if len(parts) > 1 else inner} = {plan.kv_bytes:,} B"


def lines(plan: Plan) -> list[tuple[str, str]]:
    """The report: a heading ("" for none) and what stands beside it."""
    return [*_model_lines(plan), *_kv_lines(plan), *_rank_lines(plan), *_verdict_lines(plan), *_advice_lines(plan)]


def _model_lines(plan: Plan) -> list[tuple[str, str]]:
    shape, ask = plan.shape, plan.ask
    elements, ranks = shape.elements.total, [rank.weights for rank in plan.ranks]
    kinds = ", ".join(f"{count} × {_kind(attention)}" for attention, count in _attentions(plan).items())
    found = [("model", f"{shape.name}: {len(shape.layers)} layers ({kinds}), {elements / 1e9:,.3f} billion weights")]
    if shape.experts:
        part = shape.expert_elements / elements
        found.append(("", f"{100 * part:.1f} % of them in experts ({shape.experts} per layer, all of them kept)"))
    found.append(("weights", f"{both(plan.weight_bytes)} in {ask.weights}; fullest rank {both(max(ranks))}"))
    return found


def _kv_lines(plan: Plan) -> list[tuple[str, str]]:
    ask = plan.ask
    found = [("KV, token and layer", formula(attention, ask.kv_precision)) for attention in _attentions(plan)]
    found.append(("KV, token", f"{plan.whole.token_bytes:,} B over all layers"))
    found.append(("KV, all", kv_formula(plan)))
    found.append(("", f"{both(plan.kv_bytes)} for {ask.batch} × {ask.context:,} tokens in {ask.kv_precision}"))
    return found


def _rank_lines(plan: Plan) -> list[tuple[str, str]]:
    ask, rank = plan.ask, plan.fullest
    buffers = rank.buffers(ask.batch, ask.step_tokens)
    total = rank.total(ask.batch, ask.context, ask.step_tokens)
    return [
        ("buffers", f"{both(buffers)} per rank, an estimate: {both(rank.runtime)} runtime, the rest for a step"),
        (
            "a rank needs",
            f"{both(total)}, {100 * plan.need_share:.1f} % of it KV, in blocks of {ask.block_size} tokens",
        ),
        ("a rank has", f"{both(plan.budget)} ({plan.hardware.share:g} of {_devices(plan)})"),
        (
            "its pool",
            f"{plan.pool_blocks:,} blocks, {both(max(plan.pool_bytes))}, {100 * plan.pool_share:.1f} % of memory",
        ),
    ]


def _verdict_lines(plan: Plan) -> list[tuple[str, str]]:
    ask = plan.ask
    context = "any context" if plan.max_context is None else f"{plan.max_context:,} tokens"
    found = [
        (
            "fits at most",
            f"{plan.max_batch:,} sequences of {ask.context:,} tokens; {context} for {ask.batch} sequences",
        ),
    ]
    if plan.fits:
        return [("FITS", f"{ask.batch} sequences of {ask.context:,} tokens on {ask.ranks} ranks"), *found]
    need = plan.fullest.total(ask.batch, ask.context, ask.step_tokens)
    lack = f"each rank lacks {both(need - plan.budget)}" if need > plan.budget else "there are too few devices"
    if ask.kv_memory is not None and need <= plan.budget and plan.hardware.groups(ask.ranks):
        lack = f"kv_memory is {both(ask.kv_memory)} per rank, {both(max(plan.held_bytes))} are needed"
    found.insert(0, ("DOES NOT FIT", lack))
    ways = options(plan)
    for index, option in enumerate(ways):
        found.append(("" if index else "would fit", _way(option)))
    return found if ways else [*found, ("would fit", "nothing that was tried: take a smaller model or more devices")]


def _advice_lines(plan: Plan) -> list[tuple[str, str]]:
    return [("note", text) for text in advice(plan)] + [("parallelism", text) for text in parallelism(plan)]


def document(plan: Plan) -> dict[str, Any]:
    """All of it as plain JSON values; sizes are bytes."""
    ask, shape = plan.ask, plan.shape
    return {
        "model": _model_values(plan),
        "hardware": {**asdict(plan.hardware), "rank_budget_bytes": plan.budget},
        "settings": asdict(ask),
        "weights": {
            "elements": shape.elements.total,
            "expert_elements": shape.expert_elements,
            "total_bytes": plan.weight_bytes,
            "rank_bytes": [rank.weights for rank in plan.ranks],
        },
        "kv": _kv_values(plan),
        "buffers_bytes": [rank.buffers(ask.batch, ask.step_tokens) for rank in plan.ranks],
        "needed_bytes": [rank.total(ask.batch, ask.context, ask.step_tokens) for rank in plan.ranks],
        "pool": {
            "blocks": plan.pool_blocks,
            "rank_bytes": list(plan.pool_bytes),
            "share": plan.pool_share,
            "usual_share": list(USUAL_SHARE),
        },
        "fits": plan.fits,
        "max_batch": plan.max_batch,
        "max_context": plan.max_context,
        "would_fit": [] if plan.fits else [asdict(option) for option in options(plan)],
        "traffic": {
            "tensor_bytes_per_token_and_layer": traffic(plan).tensor,
            "tensor_bytes_per_token": traffic(plan).tensor_total,
            "pipeline_bytes_per_token": traffic(plan).pipeline,
            "pipeline_bytes_per_token_and_layer": traffic(plan).pipeline_per_layer,
        },
        "notes": [text for heading, text in _advice_lines(plan) if heading == "note"],
        "parallelism": parallelism(plan),
    }


def _model_values(plan: Plan) -> dict[str, Any]:
    shape = plan.shape
    return {
        "name": shape.name,
        "layers": len(shape.layers),
        "hidden": shape.hidden,
        "vocabulary": shape.vocab,
        "context": shape.context,
        "attention": [
            {"layers": count, "kind": attention.kind, **asdict(attention)}
            for attention, count in _attentions(plan).items()
        ],
        "experts": shape.experts,
    }


def _kv_values(plan: Plan) -> dict[str, Any]:
    precision = plan.ask.kv_precision
    return {
        "token_bytes_by_layer": [layer.token_bytes for layer in plan.whole.layers],
        "token_bytes": plan.whole.token_bytes,
        "total_bytes": plan.kv_bytes,
        "rank_token_bytes": [rank.layout.token_bytes for rank in plan.ranks],
        "held_bytes": list(plan.held_bytes),
        "idle_bytes": plan.idle_bytes,
        "copied_bytes": plan.copied_bytes,
        "share_of_need": plan.need_share,
        "formula": {"layers": [formula(each, precision) for each in _attentions(plan)], "total": kv_formula(plan)},
    }


def _attentions(plan: Plan) -> Counter[Attention]:
    return Counter(layer.attention for layer in plan.shape.layers)


def _kind(attention: Attention) -> str:
    heads = f"{attention.q_heads} heads"
    if attention.kind == "GQA":
        heads += f" on {attention.kv_heads}"
    window = f", window {attention.window:,}" if attention.window else ""
    return f"{attention.kind} of {heads}{window}"


def _vector(elements: int, precision: str) -> str:
    """Bytes of one vector, as a calculation."""
    found = Precision.parse(precision)
    size = f"{elements} × {found.bits / 8:g} B"
    return f"({size} + {found.scale_bytes} B of scales)" if found.scale_bytes else size


def _devices(plan: Plan) -> str:
    hardware = plan.hardware
    if hardware.kind == "cpu":
        ranks = f", shared by {plan.ask.ranks} ranks" if plan.ask.ranks > 1 else ""
        return f"this machine's {both(hardware.device_bytes)}{ranks}"
    return f"a GPU's {both(hardware.device_bytes)}; {hardware.devices} GPUs"


def _way(option: Option) -> str:
    changed = " (answers change)" if "window" in option.changes else ""
    return f"{option.words}{changed}: a rank needs {both(option.needed)} of {both(option.budget)}"
