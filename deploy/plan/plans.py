"""From one plan to others: the settings that would fit, and what is worth knowing about those that were asked for, in
words with numbers. Pure; how much each change takes is `deploy.plan.planner`'s arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from deploy.plan.planner import KV_PRECISIONS, Hardware, Plan, greatest
from deploy.plan.shapes import ModelShape
from deploy.sizes import format_size
from kvstore.layout import KVLayout, LayerKV, Precision

USUAL_SHARE = (0.6, 0.8)
"""What a KV pool is of a device's memory where nothing is out of proportion."""
_REDUCED = 4
"""Bytes of an element while ranks add it up: reductions are in fp32."""
_SMALLER_WEIGHTS = "int8"
_USUAL_GPU = Hardware("gpu", 1, 80 * 2**30, 0.9)
_NAMES = {
    "ranks": "tp",
    "kv_precision": "kv-precision",
    "weights": "weights",
    "context": "context",
    "batch": "batch",
}
"""Fields of an Ask → the command's options."""


@dataclass(frozen=True, slots=True)
class Option:
    """Settings under which it would fit: `changes` by the name of the command's option, in words, and what the fullest
    rank would need of its `budget`, bytes."""

    changes: dict[str, int | str]
    words: str
    needed: int
    budget: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one token makes ranks send each other, over all of them: `tensor` per layer when every layer is split
    over the ranks; `pipeline` in all when each rank has layers of its own."""

    ranks: int
    layers: int
    tensor: int
    pipeline: int

    @property
    def tensor_total(self) -> int:
        return self.tensor * self.layers

    @property
    def pipeline_per_layer(self) -> float:
        return self.pipeline / self.layers


def traffic(plan: Plan) -> Traffic:
    """Two ring all-reduces of the hidden state per layer, each 2 (ranks - 1) of it; or one hand-over between stages."""
    hidden, steps = plan.shape.hidden, plan.ask.ranks - 1
    item = 4 if plan.ask.weights == "fp32" else 2
    return Traffic(plan.ask.ranks, len(plan.shape.layers), 2 * 2 * steps * hidden * _REDUCED, steps * hidden * item)


def options(plan: Plan) -> list[Option]:
    """What would make a plan fit that does not, what changes least first; [] when nothing that is tried does."""
    if not plan.hardware.groups(plan.ask.ranks):
        return [*_first(plan, _fewer_ranks(plan)), *_first(plan, _more_ranks(plan))]
    found = [*_first(plan, _more_ranks(plan)), *_first(plan, _smaller_kv(plan))]
    if not found:
        found += _first(plan, (other for ranks in _more_ranks(plan) for other in _smaller_kv(ranks)))
    found += _first(plan, _smaller_weights(plan))
    if plan.max_context:
        found.append(_option(plan, _asked(plan, context=plan.max_context)))
    if plan.max_batch:
        found.append(_option(plan, _asked(plan, batch=plan.max_batch)))
    found += [option for option in (_windowed(plan), _larger_devices(plan)) if option]
    if plan.hardware.kind == "cpu":
        found += _first(plan, _larger_shares(plan))
    return found or _first(plan, _on_gpus(plan))


def rank_counts(shape: ModelShape, hardware: Hardware) -> list[int]:
    """The numbers of ranks worth a look: powers of two and all devices."""
    counts = {1 << power for power in range(shape.q_heads.bit_length())} | {max(1, hardware.devices)}
    return sorted(count for count in counts if count <= shape.q_heads)


def advice(plan: Plan) -> list[str]:
    """Sentences about the plan, with numbers."""
    notes: tuple[Callable[[Plan], str | None], ...] = (_reach, _groups, _share, _idle, _copied)
    return [said for note in notes if (said := note(plan))]


def parallelism(plan: Plan) -> list[str]:
    """Tensor against pipeline parallelism for this model, in words with numbers. Only the former is built."""
    if plan.ask.ranks == 1:
        return ["One rank: ranks send each other nothing. Split only what does not fit, or what must answer faster."]
    moved = traffic(plan)
    apart = f"{moved.tensor_total / moved.pipeline:,.0f}"
    lines = [
        f"Tensor parallelism over {moved.ranks} ranks (what is built): two all-reduces per layer, "
        f"{moved.tensor:,} B per token and layer over all ranks, {moved.tensor_total / 1e6:.2f} MB per token. "
        "Every rank works on every token, so an answer comes faster; it wants NVLink, or memory that ranks share.",
        f"Pipeline parallelism over {moved.ranks} stages (not built) would send {moved.pipeline:,} B per token, "
        f"{moved.pipeline_per_layer:,.0f} B per layer, {apart} times less: for links between machines. No answer comes "
        f"faster by it, and {moved.ranks} steps must be in flight to keep all stages busy.",
    ]
    saved = plan.copied_bytes + plan.idle_bytes
    if saved:
        lines.append(f"Stages hold whole layers: the {format_size(saved)} that ranks copy or leave idle would be free.")
    return lines


def _more_ranks(plan: Plan) -> Iterator[Plan]:
    """More ranks, or as many: on the devices there are, else on as many such devices as it takes."""
    for ranks in rank_counts(plan.shape, plan.hardware):
        if ranks > plan.ask.ranks or (ranks == plan.ask.ranks and not plan.hardware.groups(ranks)):
            hardware = plan.hardware
            if hardware.kind == "gpu" and ranks > hardware.devices:
                hardware = replace(hardware, devices=ranks)
            yield Plan(plan.shape, hardware, replace(plan.ask, ranks=ranks))


def _fewer_ranks(plan: Plan) -> Iterator[Plan]:
    """The most ranks that find a device, then fewer."""
    for ranks in reversed(rank_counts(plan.shape, plan.hardware)):
        if ranks <= plan.hardware.devices:
            yield _asked(plan, ranks=ranks)


def _larger_shares(plan: Plan) -> Iterator[Plan]:
    for percent in range(30, 91, 5):
        if percent / 100 > plan.hardware.share:
            yield Plan(plan.shape, replace(plan.hardware, share=percent / 100), plan.ask)


def _on_gpus(plan: Plan) -> Iterator[Plan]:
    """On as few GPUs of a usual size as it takes."""
    for ranks in rank_counts(plan.shape, _USUAL_GPU):
        yield Plan(plan.shape, replace(_USUAL_GPU, devices=ranks), replace(plan.ask, ranks=ranks))


def _smaller_kv(plan: Plan) -> Iterator[Plan]:
    """Other precisions of the KV cache, the largest of those that are smaller first."""
    known = [name for name in KV_PRECISIONS if not (plan.whole.layers[0].joint and Precision.parse(name).by_channel)]
    kept = {name: LayerKV.pair(1, 128, Precision.parse(name)) for name in known}
    size = {name: KVLayout(plan.ask.block_size, (layer,)).token_bytes for name, layer in kept.items()}
    for name in sorted(size, key=lambda name: -size[name]):
        if size[name] < size[plan.ask.kv_precision]:
            yield _asked(plan, kv_precision=name)


def _smaller_weights(plan: Plan) -> Iterator[Plan]:
    if plan.ask.weights in ("fp32", "bf16", "fp16"):
        yield _asked(plan, weights=_SMALLER_WEIGHTS)


def _first(base: Plan, plans: Iterable[Plan]) -> list[Option]:
    """The first of `plans` that fits, as changes to `base`; nothing when none does."""
    return next(([_option(base, plan)] for plan in plans if plan.fits), [])


def _asked(plan: Plan, **changes: Any) -> Plan:
    return Plan(plan.shape, plan.hardware, replace(plan.ask, **changes))


def _option(base: Plan, plan: Plan, **more: int) -> Option:
    """`plan` as changes to `base`; `more` are those that the command's options do not say by themselves."""
    changes: dict[str, int | str] = {}
    for key, name in _NAMES.items():
        if (value := getattr(plan.ask, key)) != getattr(base.ask, key):
            changes[name] = value
    if plan.hardware.devices != base.hardware.devices:
        changes["gpus"] = plan.hardware.devices
    if plan.hardware.device_bytes != base.hardware.device_bytes:
        changes["gpu-memory"] = f"{plan.hardware.device_bytes // 2**30}GiB"
    if plan.hardware.share != base.hardware.share and plan.hardware.kind == base.hardware.kind:
        changes["share"] = f"{plan.hardware.share:g}"
    changes |= more
    words = " ".join(f"--{name} {value}" for name, value in changes.items())
    return Option(changes, words, _needed(plan), plan.budget)


def _windowed(plan: Plan) -> Option | None:
    """The longest window over all layers that would do; it changes what the model sees."""

    def within(window: int) -> Plan:
        return Plan(plan.shape.with_window(window), plan.hardware, plan.ask)

    # No window that matters is longer than the context.
    window = greatest(lambda window: window < plan.ask.context and within(window).fits)
    return _option(plan, within(window), window=window) if window else None


def _larger_devices(plan: Plan) -> Option | None:
    """The same devices with more memory, in whole GiB."""
    hardware = plan.hardware
    if hardware.kind != "gpu" or not hardware.groups(plan.ask.ranks):
        return None
    least = -(-int(_needed(plan) / hardware.share) // 2**30)
    for size in (least, least + 1):  # one more where the share's rounding takes a byte
        larger = Plan(plan.shape, replace(hardware, device_bytes=size * 2**30), plan.ask)
        if larger.fits:
            return _option(plan, larger)
    return None


def _needed(plan: Plan) -> int:
    return plan.fullest.total(plan.ask.batch, plan.ask.context, plan.ask.step_tokens)


def _reach(plan: Plan) -> str | None:
    reach = plan.shape.context
    if reach is None or plan.ask.context <= reach:
        return None
    return (
        f"{plan.shape.name}'s positions reach {reach:,} tokens, {plan.ask.context:,} were asked for: the memory is "
        "planned all the same, but answers need a model that was made for it."
    )


def _groups(plan: Plan) -> str | None:
    hardware, ranks = plan.hardware, plan.ask.ranks
    groups = hardware.groups(ranks)
    if hardware.kind == "cpu":
        return None
    if not groups:
        return f"--tp {ranks} takes {ranks} GPUs, and there are {hardware.devices}."
    left = hardware.devices - groups * ranks
    if groups == 1 and not left:
        return None
    idle = f"; {left} GPUs would have nothing to do" if left else ""
    held = f"{hardware.devices} GPUs hold {groups} groups of {ranks} ranks"
    return f"{held}, each with its own pool (groups: {groups}){idle}."


def _share(plan: Plan) -> str | None:
    """Whether the pool is as large as usual, and what moves it."""
    low, high = USUAL_SHARE
    share, usual = plan.pool_share, f"{low:.0%} to {high:.0%} is usual".replace("%", " %")
    said = f"The KV pool would be {100 * share:.1f} % of each rank's memory ({usual})"
    if plan.ask.kv_memory is not None and not low <= share <= high:
        return f"{said}; kv_memory sets it."
    if share < low:
        return f"{said}: {_raising(plan)}."
    if share > high:
        return f"{said}: weights take little of it. {_lowering(plan)}."
    return f"{said}."


def _raising(plan: Plan) -> str:
    """What makes the pool's share larger."""
    if plan.hardware.kind == "cpu":
        share = f"cpu_memory_utilization is {plan.hardware.share:g} of the machine"
        return f"{share}; raise it (--share) if nothing else runs there"
    weights = plan.fullest.weights / plan.hardware.rank_bytes(plan.ask.ranks)
    more = [other for other in _more_ranks(plan) if other.pool_share > plan.pool_share]
    moves = (
        f"--tp {more[0].ask.ranks} would make it {100 * more[0].pool_share:.1f} %"
        if more
        else "smaller weights raise it"
    )
    return f"weights take {100 * weights:.1f} %; {moves}, weights in int8 or a higher gpu_memory_utilization too"


def _lowering(plan: Plan) -> str:
    """What uses memory that the pool does not need."""
    fewer = [count for count in rank_counts(plan.shape, plan.hardware) if count < plan.ask.ranks]
    for count in reversed(fewer):
        other = _asked(plan, ranks=count)
        if other.fits:
            return f"--tp {count} fits too ({100 * other.pool_share:.1f} %), and leaves devices for more groups"
    return "Smaller devices would do, or more sequences at once (max_num_seqs)"


def _idle(plan: Plan) -> str | None:
    if not plan.idle_bytes:
        return None
    held = plan.held_bytes
    return (
        f"Ranks hold unequal numbers of KV heads: the fullest holds {format_size(max(held))} of what was asked for, "
        f"the emptiest {format_size(min(held))}; {format_size(plan.idle_bytes)} stay idle, for the fullest sets the "
        "number of blocks. A tp that divides the KV heads leaves none."
    )


def _copied(plan: Plan) -> str | None:
    if plan.copied_bytes <= 0:
        return None
    if any(layer.attention.latent for layer in plan.shape.layers):
        return (
            f"MLA's latent is whole on every rank: {format_size(plan.copied_bytes)} are copies. More ranks split "
            "weights and work, not the KV cache; groups of fewer ranks hold more sequences."
        )
    copies = format_size(plan.copied_bytes)
    return f"With more ranks than KV heads, ranks share a head and each holds it: {copies} are copies."
