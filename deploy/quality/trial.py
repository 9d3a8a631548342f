"""A trial: KV precisions measured on the engine alone, or a map searched. A job as JSON on stdin; on stdout one JSON
line for each thing to say, and a last one with the result, or with the fault that a person can act on.

A process of its own, so that its weights and pools are gone when the service's ranks load theirs:
`python -m deploy.quality.trial`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from cluster.text.tokenizer import Tokenizer
from deploy.quality.dialogue import Script, ScriptError, messages, prose
from deploy.quality.figures import FEWEST, Limits
from deploy.quality.job import RUNGS, SHORT, Job
from deploy.quality.measurement import Bench, Say, Wanted, measure
from deploy.quality.perplexity import Passage, PassageError
from deploy.quality.search import Measures, search
from deploy.quality.subject import Subject
from kvstore.precisions import PrecisionMap, Words


def run(job: Job, say: Say) -> dict[str, Any]:
    """`tokens` of the text, what `unquantised` is called and takes per token, and `rows` or what was `found`. Raises
    ValueError of some kind for what cannot be measured."""
    say("loading torch and the model")
    subject = Subject(job.settings)
    text = _text(subject, job.context)
    script = _script(subject, job.turns) if job.turns else None
    facts = {
        "tokens": len(text),
        "device": subject.device,
        "unquantised": {
            "label": subject.auto.spelled(subject.spec.layers),
            "token_bytes": subject.layout(subject.auto).token_bytes,
        },
    }
    if job.limits is None:
        return facts | {"rows": measure(subject, job.maps, Wanted(text, script, job.greedy), say)}
    return facts | {"found": _searched(subject, text, job.limits, job.budget, say)}


def _searched(subject: Subject, text: tuple[int, ...], limits: Limits, budget: int | None, say: Say) -> dict[str, Any]:
    whole, short = Bench(subject, Wanted(text, greedy=False)), Bench(subject, Wanted(text[:SHORT], greedy=False))
    rungs = []
    for given in RUNGS:
        words = subject.settle(PrecisionMap(Words.parse(given, ""))).default
        try:
            subject.layout(PrecisionMap(words))
        except ValueError:  # this model's vectors cannot be stored so
            continue
        rungs.append(words)
    layers = subject.spec.layers
    measures = Measures(
        cost=whole.cost,
        short_kl=lambda precision: short.cost(precision).kl.mean,
        token_bytes=lambda precision: subject.layout(precision).token_bytes,
    )
    found = search(layers, rungs, measures, limits, say, budget=budget)
    return {
        "precision": found.precision.plain,
        "label": found.precision.spelled(layers),
        "token_bytes": found.token_bytes,
        "capacity": subject.layout(subject.auto).token_bytes / found.token_bytes,
        "cost": found.cost.plain if found.cost else None,
        "faults": list(found.faults),
        "tried": found.tried,
        "probed": found.probed,
    }


def _text(subject: Subject, context: int) -> tuple[int, ...]:
    passage = Passage.read(subject.folder, prose())
    tokens = (*passage.lead, *passage.tokens)[: min(context, subject.spec.context_length)]
    if len(tokens) < FEWEST:
        raise PassageError(f"{len(tokens)} tokens are too few to measure anything: {FEWEST} at least")
    if max(tokens) >= subject.spec.vocab_size:
        raise PassageError(f"tokenizer.json gives ids beyond the model's {subject.spec.vocab_size} tokens")
    return tokens


def _script(subject: Subject, turns: int) -> Script:
    script = Script.write(Tokenizer.read(subject.folder), messages(), turns)
    if len(script.tokens) > subject.spec.context_length:
        raise ScriptError(
            f"{turns} turns are {len(script.tokens)} tokens, and the model reaches {subject.spec.context_length}"
        )
    return script


def main() -> None:
    """Read the job, run it, print the result."""

    def tell(key: str, value: object) -> None:
        print(json.dumps({key: value}), flush=True)

    try:
        tell("result", run(Job.parse(json.load(sys.stdin)), lambda text: tell("say", text)))
    except ValueError as error:
        tell("fault", str(error))


if __name__ == "__main__":
    main()
