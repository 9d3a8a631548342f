"""Which kernels compute here: what the device, the CPU and the weights' format allow, fastest first; not for what."""

from __future__ import annotations

import torch

from workers.kernels import Kernels
from workers.layers import TorchKernels
from workers.weights import DTYPES


def choose_kernels(dtype: str, device: torch.device, name: str | None = None) -> Kernels:
    """The fastest exact kernels for weights of `dtype` (fp32, bf16, fp16) on `device`, or those called `name`.

    A CPU without bf16 instructions computes in fp32 with the weights upcast once (torch's bf16 linear is 2-10 times
    slower there from 8 rows on); their values stay those of the 16-bit weights.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; known: {', '.join(DTYPES)}")
    kernels = {f"torch-{label}": TorchKernels(f"torch-{label}", kind, False) for label, kind in DTYPES.items()}
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        kernels["onednn-fp32"] = TorchKernels("onednn-fp32", torch.float32, True)
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            kernels["onednn-bf16"] = TorchKernels("onednn-bf16", torch.bfloat16, True)
    if name is not None:
        if name not in kernels:
            raise ValueError(f"kernels {name!r} are not available here; known: {', '.join(kernels)}")
        return kernels[name]
    if device.type != "cpu":
        return kernels[f"torch-{dtype}"]
    return kernels.get(f"onednn-{dtype}") or kernels.get("onednn-fp32") or kernels["torch-fp32"]
