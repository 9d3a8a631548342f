"""Which kernels compute here: what the device, the CPU, the weights' format and the KV layout allow, fastest first.

Knows for each kind of kernels when it can be had and when it is the fast one; not what it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvstore.layout import KVLayout
from workers.kernels import Kernels
from workers.layers import TorchKernels
from workers.models.spec import ModelSpec, Unsupported
from workers.native.kernels import NativeKernels, model_fault
from workers.native.library import NativeUnavailable, load_library
from workers.native.pairs import layout_fault, parts_of
from workers.native.processor import Processor
from workers.settings import KERNELS, WEIGHT_PRECISIONS
from workers.weights import DTYPES


@dataclass(frozen=True, slots=True)
class Wish:
    """What the operator wants: `kernels` one of KERNELS or the exact name of some, `weight_precision` "auto" or "int8".
    `folder` caches what is compiled (None: the user's own cache)."""

    kernels: str = "auto"
    weight_precision: str = "auto"
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """`kernels`, and `why` they: in words, for status and log. `second_best`: faster ones ought to be had here."""

    kernels: Kernels
    why: str
    second_best: bool = False


def choose_kernels(
    dtype: str, device: torch.device, layout: KVLayout, wish: Wish | None = None, spec: ModelSpec | None = None
) -> Choice:
    """The fastest kernels for weights of `dtype` (fp32, bf16, fp16) and a KV cache of `layout` on `device` that do what
    `wish` says and have what the layers of a model of `spec` need. Raises ValueError for what nobody knows,
    Unsupported for what cannot be had here."""
    wish = wish or Wish()
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; known: {', '.join(DTYPES)}")
    if wish.weight_precision not in WEIGHT_PRECISIONS:
        known = ", ".join(WEIGHT_PRECISIONS)
        raise ValueError(f"weight_precision {wish.weight_precision!r} is not supported; known: {known}")
    family, _, exact = wish.kernels.partition("-")
    if family == "native" or (wish.kernels == "auto" and wish.weight_precision == "int8"):
        return Choice(_native(device, layout, wish, exact or None, spec), "as configured")
    if wish.weight_precision == "int8":
        raise Unsupported(f"weight_precision int8 needs kernels: native; {wish.kernels} have none for it")
    if wish.kernels != "auto":
        return Choice(_torch(dtype, device, wish.kernels), "as configured")
    if device.type != "cpu":
        return Choice(_torch(dtype, device, "torch"), f"device {device.type}")
    if dtype != "bf16":
        return Choice(_torch(dtype, device, "auto"), f"weights in {dtype}; the native kernels compute in bf16")
    processor = Processor.read()
    if len(processor.variants) == 1:
        why = f"{processor.name} has neither AVX512 nor AVX2, and native kernels are slow without"
        return Choice(_torch(dtype, device, "auto"), why)
    if spec is not None and (fault := model_fault(spec)):
        return Choice(_torch(dtype, device, "auto"), f"native kernels cannot be used: {fault}")
    try:
        return Choice(_native(device, layout, wish, None, spec), f"the fastest for {processor.name}")
    except Unsupported as error:
        return Choice(_torch(dtype, device, "auto"), str(error), second_best=True)


def _native(device: torch.device, layout: KVLayout, wish: Wish, variant: str | None, spec: ModelSpec | None) -> Kernels:
    """Raises Unsupported with the reason."""
    if device.type != "cpu":
        raise Unsupported(f"native kernels run on a CPU, not on {device.type}")
    if fault := layout_fault(layout) or (model_fault(spec) if spec else ""):
        raise Unsupported(f"native kernels cannot be used: {fault}")
    try:
        library = load_library(wish.folder, variant=variant, parts=parts_of(layout))
    except NativeUnavailable as error:
        raise Unsupported(f"native kernels cannot be had: {error}") from error
    library.threads = torch.get_num_threads()
    return NativeKernels(library, wish.weight_precision)


def _torch(dtype: str, device: torch.device, name: str) -> Kernels:
    """Those of torch called `name`; for "auto" and "onednn" oneDNN's, which need a CPU.

    A CPU without bf16 instructions computes in fp32 with the weights upcast once (torch's bf16 linear is 2-10 times
    slower there from 8 rows on); their values stay those of the 16-bit weights.
    """
    known = {f"torch-{label}": TorchKernels(f"torch-{label}", kind, False) for label, kind in DTYPES.items()}
    known["torch"] = known[f"torch-{dtype}"]
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        known["onednn-fp32"] = TorchKernels("onednn-fp32", torch.float32, True)
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            known["onednn-bf16"] = TorchKernels("onednn-bf16", torch.bfloat16, True)
        known["onednn"] = known.get(f"onednn-{dtype}", known["onednn-fp32"])
    known["auto"] = known.get("onednn") or known["torch-fp32"]
    if name not in known:
        names = ", ".join(dict.fromkeys((*KERNELS, *known)))
        raise ValueError(f"kernels {name!r} are not available here; known: {names}")
    return known[name]
