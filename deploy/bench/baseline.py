"""transformers' batched generate as a peer: a job as JSON on stdin, its result as one JSON line on stdout.

A process of its own, so that torch is in nobody else's way: `python -m deploy.bench.baseline`. Prompts go in static
batches, padded on the left; every row decodes the same number of tokens. Loading and one warm-up batch are not timed.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    """Read the job, run it, print {"wall_s": …, "samples": […]}."""
    job = json.load(sys.stdin)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["folder"], padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[job["dtype"]]
    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=dtype).eval()
    prompts, size = job["prompts"], job["batch"]
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    _generate(model, tokenizer, batches[0], 4)
    samples: list[dict[str, Any]] = []
    start = time.perf_counter()
    for batch in batches:
        samples += _generate(model, tokenizer, batch, job["max_tokens"])
    print(json.dumps({"wall_s": time.perf_counter() - start, "samples": samples}))


def _generate(model: Any, tokenizer: Any, prompts: list[str], tokens: int) -> list[dict[str, Any]]:
    """One batch; what each row took is what the batch took."""
    import torch

    start = time.perf_counter()
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        model.generate(
            **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
    seconds = time.perf_counter() - start
    lengths = inputs["attention_mask"].sum(1).tolist()
    return [{"total": seconds, "output_tokens": tokens, "prompt_tokens": length} for length in lengths]


if __name__ == "__main__":
    main()
