"""Pairs: which formats of keys and values native attention reads, and the part of the library that reads them.

Every pair has kernels of its own, in a part that is compiled when a layout has such layers. It knows no pool.
"""

from __future__ import annotations

from kvstore.layout import KVLayout, Precision, Vector
from kvstore.precisions import PrecisionMap
from workers.native.build import Part

_SINGLE = (
    Precision.BF16,
    Precision.FP16,
    Precision.INT8,
    Precision.FP8_E4M3,
    Precision.FP8_E5M2,
    Precision.INT4,
)
BLOCK_STEP = 64
"""What the tokens of a block with keys by channel are a multiple of: the kernel takes so many keys at a time."""
PAIRS = (
    *((precision, precision) for precision in _SINGLE),
    (Precision.BF16, Precision.INT8),
    (Precision.BF16, Precision.FP8_E4M3),
    (Precision.BF16, Precision.INT4),
    (Precision.INT8, Precision.FP8_E4M3),
    (Precision.INT8, Precision.INT4),
    (Precision.FP8_E4M3, Precision.INT4),
    (Precision.INT4_CHANNEL, Precision.INT4),
)
"""(keys, values): alike, or the values more coarsely than the keys: they bear it better."""
TILE = 16
"""Tokens that lie together in a page, and what a head_dim is a multiple of."""
MOST_DIM = 256


def part_of(key: Vector, value: Vector) -> Part:
    """The kernels for keys and values that are kept so."""
    return _part(key.precision, value.precision)


def parts_of(layout: KVLayout) -> tuple[Part, ...]:
    """Those that `layout`, which has no fault, asks for."""
    return tuple(dict.fromkeys(part_of(*layer.vectors) for layer in layout.layers))


def parts_for(precisions: PrecisionMap) -> tuple[Part, ...]:
    """Those that a model in bf16 would ask for, before it is known which of its layers are named."""
    kept = (words.stored for words in precisions.settle(Precision.BF16).words)
    return tuple(dict.fromkeys(_part(one.key, one.value) for one in kept if (one.key, one.value) in PAIRS))


def part_named(name: str) -> Part:
    """The part called so, as in "int8-int4". Raises ValueError for one that there is none of."""
    parts = {part.name: part for part in (_part(*pair) for pair in PAIRS)}
    if name not in parts:
        raise ValueError(f"pair {name!r} is none of {', '.join(parts)}")
    return parts[name]


def _part(key: Precision, value: Precision) -> Part:
    defines = (f"TG_KEYS={key.label.upper()}", f"TG_VALUES={value.label.upper()}")
    return Part(f"{key.label}-{value.label}", "attention_pair.cpp", defines)


def layout_fault(layout: KVLayout) -> str:
    """Why native attention cannot work on pages of `layout`; empty when it can."""
    for layer in layout.layers:
        if layer.joint:
            return "MLA's latents are read by torch alone"
        keys, values = (vector.precision for vector in layer.vectors)
        for precision in (keys, values):
            if precision not in _SINGLE and not precision.by_channel:
                known = ", ".join(known.label for known in _SINGLE)
                return f"kv_precision {precision.label} is none of {known}"
        if (keys, values) not in PAIRS:
            return f"no kernels for keys in {keys.label} with values in {values.label}"
        if keys.by_channel and layout.block_size % BLOCK_STEP:
            return f"keys in {keys.label} need a block_size of a multiple of {BLOCK_STEP}, got {layout.block_size}"
        dim = layer.vectors[0].elements
        if dim % TILE or dim > MOST_DIM:
            return f"heads of {dim} elements are no multiple of {TILE} up to {MOST_DIM}"
    if layout.block_size % TILE:
        return f"block_size {layout.block_size} is no multiple of {TILE}"
    return ""
