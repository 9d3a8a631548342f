"""lm-eval's client `local-completions`: the requests that version 0.4.13 sends, read as it reads them; and the package
itself where it is installed: beside us (the extra `eval`), or for the Python that TIDEGATE_LM_EVAL_PYTHON names."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.ray.stage import PATIENCE_S, Stage

PYTHON = os.environ.get("TIDEGATE_LM_EVAL_PYTHON", sys.executable)
CONTEXTS = ("The capital of France is", "Water boils at one hundred", "\n1. Anna has 12 apples and", "日本の首都は")
CHOICES = (" Paris", " a blue house 🙂", " degrees")


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def score(context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The sum of the continuation's log-probabilities, and whether each of its tokens is the likeliest."""
        with torch.inference_mode():
            logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])
        return float(own.sum()), logits.argmax(-1).tolist() == continuation

    return score


def post(tiny: Stage, **fields: Any) -> dict[str, Any]:
    """As it posts: with the header of a key that is empty."""
    answer = requests.post(
        f"{tiny.url}/v1/completions",
        json={"model": "tiny", "seed": 1234, "temperature": 0, **fields},
        headers={"Authorization": "Bearer "},
        timeout=PATIENCE_S,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def likelihoods(answer: dict[str, Any], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """Per choice, as the client reads it: what lies between the context and the one token that is generated."""
    found = []
    for choice, length in zip(sorted(answer["choices"], key=itemgetter("index")), context_lengths, strict=True):
        told = choice["logprobs"]
        own, tops = told["token_logprobs"][length:-1], told["top_logprobs"][length:-1]
        found.append((sum(own), all(one == max(top.values()) for one, top in zip(own, tops, strict=True))))
    return found


@pytest.mark.parametrize("tokenized", [True, False])
@pytest.mark.parametrize("batch", [1, 5])
def test_likelihoods_of_choices(tiny: Stage, tokenizer: Any, oracle: Any, tokenized: bool, batch: int) -> None:
    pairs = [(tokenizer(context).input_ids, tokenizer(choice).input_ids) for context in CONTEXTS for choice in CHOICES]
    for context in CONTEXTS[:2]:  # what the model itself would say is greedy
        said = tiny.complete(context, max_tokens=2, logprobs=0)["choices"][0]["text"]
        whole, ids = tokenizer(context + said).input_ids, tokenizer(context).input_ids
        pairs.append((ids, whole[len(ids) :]))
    got = []
    for start in range(0, len(pairs), batch):
        part = pairs[start : start + batch]
        prompts: list[Any] = [context + choice for context, choice in part]
        if not tokenized:
            prompts = tokenizer.batch_decode(prompts)
        prompt = prompts[0] if batch == 1 and not tokenized else prompts
        answer = post(tiny, prompt=prompt, max_tokens=1, logprobs=1, echo=True)
        assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [
            len(context) + len(choice) + 1 for context, choice in part
        ]
        got += likelihoods(answer, [len(context) for context, _ in part])
    for (value, greedy), pair in zip(got, pairs, strict=True):
        want = oracle(*pair)
        assert abs(value - want[0]) < 1e-3 * len(pair[1]) and greedy == want[1]
    assert any(greedy for _, greedy in got) and not all(greedy for _, greedy in got)


@pytest.mark.parametrize("tokenized", [True, False])
def test_generations_until_a_stop(tiny: Stage, tokenizer: Any, tokenized: bool) -> None:
    prompts: list[Any] = [tokenizer(context).input_ids for context in CONTEXTS] if tokenized else list(CONTEXTS)
    stops = ["\n\n", tokenizer.eos_token]
    answer = post(tiny, prompt=prompts, max_tokens=12, stop=stops)
    texts = [choice["text"] for choice in sorted(answer["choices"], key=itemgetter("index"))]
    alone = [post(tiny, prompt=[prompt], max_tokens=12, stop=stops)["choices"][0]["text"] for prompt in prompts]
    assert texts == alone and all(texts)


def test_what_was_scored_once_is_scored_alike_again_from_whatever_is_cached(tiny: Stage, tokenizer: Any) -> None:
    first = tokenizer(
        "The harbour wakes before the town does, and the nets are hung to dry along the wall, as ever."
    ).input_ids
    other = [*first[:16], *reversed(first[16:])]
    told = [
        post(tiny, prompt=prompt, max_tokens=0, logprobs=2, echo=True)["choices"][0]["logprobs"]["token_logprobs"]
        for prompt in (first, first, other, first)
    ]
    assert [len(values) for values in told] == [len(first)] * 4 and all(values[0] is None for values in told)
    for values in (told[1], told[3]):
        assert values[1:] == pytest.approx(told[0][1:], abs=1e-4)
    assert told[2][1:16] == pytest.approx(told[0][1:16], abs=1e-4)
    assert len(first) > 18 and told[2][17:] != pytest.approx(told[0][17:], abs=1e-4)


TASKS = {
    "tidegate_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "tidegate_until": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.mark.slow
@pytest.mark.skipif(
    sys.executable == PYTHON and importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed: it is the extra `eval`, and large",
)
@pytest.mark.parametrize("options", ["tokenized_requests=True,num_concurrent=2", "tokenized_requests=False"])
def test_the_package_itself(
    tiny: Stage, tiny_model: Path, oracle: Any, tokenizer: Any, tmp_path: Path, options: str
) -> None:
    docs = [{"question": q, "choices": list(CHOICES), "answer": i % 3} for i, q in enumerate(CONTEXTS)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **data, "test_split": "test", **task}))
    server = f"model=tiny,base_url={tiny.url}/v1/completions,tokenizer={tiny_model},tokenizer_backend=huggingface"
    command = [PYTHON, "-m", "lm_eval", "--model", "local-completions", "--model_args", f"{server},{options}"]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(tmp_path), "--batch_size", "3", "--log_samples"]
    command += ["--output_path", str(tmp_path / "out")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    (samples,) = (tmp_path / "out").rglob("samples_tidegate_choice*.jsonl")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        context = tokenizer(sample["doc"]["question"]).input_ids
        for choice, found in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            whole = tokenizer(sample["doc"]["question"] + choice).input_ids
            want = oracle(context, whole[len(context) :])
            assert abs(float(found[0]) - want[0]) < 1e-2 and (str(found[1]) == "True") == want[1]
