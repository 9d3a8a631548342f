"""What a precision costs, measured on tiny models through the paged pool: against transformers, and by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from cluster.text.tokenizer import Tokenizer as ServedTokenizer
from deploy.quality import measurement, trial
from deploy.quality.dialogue import Script, ScriptError, messages
from deploy.quality.figures import Cost, Limits
from deploy.quality.job import Job
from deploy.quality.measurement import Bench, Wanted, measure, tokenwise
from deploy.quality.subject import Subject
from kvstore.precisions import PrecisionMap
from tests.model.tiny import FAMILIES, GREEDY, Ranks, in_threads, oracle, prompt, row, save_model
from workers.models.spec import Unsupported
from workers.plan import Row, StepPlan
from workers.settings import GroupSettings

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

TEXT = tuple(prompt(200))
INT4, INT8, PLAIN = (PrecisionMap.parse(each) for each in ("int4", "int8", "auto"))
MIXED = PrecisionMap.parse({"default": "int8", "layers": {"1": {"k": "int8", "v": "int4"}}})
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model that can chat in bytes."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    config = type(FAMILIES["smollm2"])(**{**FAMILIES["smollm2"].to_dict(), "vocab_size": 256})
    config.max_position_embeddings = 16_384
    model = save_model(config, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder, model


@pytest.fixture(scope="module")
def folder(made: tuple[Path, Any]) -> Path:
    return made[0]


def settings(folder: Path, **changes: Any) -> GroupSettings:
    options: dict[str, Any] = {
        "kernels": "torch",
        "threads": 1,
        "block_size": 16,
        "max_num_batched_tokens": 48,
    } | changes
    return GroupSettings(str(folder), ("tiny",), **options)


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return Subject(settings(folder))


def cost(subject: Subject, precision: PrecisionMap) -> Cost:
    return Bench(subject, Wanted(TEXT, greedy=False)).cost(precision)


def test_states_give_the_logits_of_every_token(folder: Path) -> None:
    tokens, table = prompt(20), (3, 1, 4, 0, 5)
    ranks = Ranks(folder, blocks=8)
    expected = torch.cat([ranks.logits(row(tokens[: at + 1], 0, table)) for at in range(20)])
    (runner,) = ranks.runners
    first, second = (Row(tuple(tokens[a:b]), a, (table,), draw) for a, b, draw in ((0, 7, None), (7, 20, GREEDY)))
    states = torch.cat([runner.states(StepPlan(0, (each,))) for each in (first, second)])
    found = torch.cat([runner.project(states[:5]).clone(), runner.project(states[5:])])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_states_are_those_of_all_ranks_together(folder: Path) -> None:
    tokens = tuple(prompt(10))
    plan = StepPlan(0, (Row(tokens, 0, ((0, 1, 2),), None),))
    found = []
    for world in (1, 2):
        ranks = Ranks(folder, world, blocks=8)
        each = in_threads(world, lambda rank, at=ranks: at.runners[rank].project(at.runners[rank].states(plan)))
        assert all(other is None for other in each[1:])
        found.append(each[0].clone())
        ranks.close()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_perplexity_is_that_of_transformers(subject: Subject, made: tuple[Path, Any]) -> None:
    subject.use(INT8)
    reading = subject.read(TEXT, PLAIN)
    values = tokenwise(subject, reading, reading)
    probabilities = oracle(made[1], TEXT).double().softmax(-1)
    expected = [-math.log(probabilities[at - 1, TEXT[at]]) for at in range(1, len(TEXT))]
    assert values.before == pytest.approx(expected, abs=1e-3)
    assert values.kl == [0.0] * 199 and all(values.same) and values.before == values.after
    assert values.cost.rise.mean == 0


def test_the_cost_is_what_its_definition_says(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "PIECE_BYTES", 4 * 256 * 7)  # logits in pieces of 7 tokens
    found = cost(subject, INT4)
    before, after = (
        subject.logits(subject.read(TEXT, precision).states).double().log_softmax(-1) for precision in (PLAIN, INT4)
    )
    before, after = before[:-1], after[:-1]
    assert found.kl.mean == pytest.approx(float((before.exp() * (before - after)).sum(-1).mean()), rel=1e-3)
    assert found.top1.mean == pytest.approx(float((before.argmax(-1) == after.argmax(-1)).double().mean()))
    wanted = torch.tensor(TEXT[1:])[:, None]
    assert math.log(found.perplexity) == pytest.approx(-float(after.gather(1, wanted).mean()), rel=1e-4)
    assert found.rise.mean == pytest.approx(math.expm1(float((before - after).gather(1, wanted).mean())), rel=1e-2)
    assert found.kl.mean > 0 and found.kl.error > 0


def test_more_bits_cost_less(subject: Subject) -> None:
    by_label = [cost(subject, precision).kl.mean for precision in (PLAIN, INT8, MIXED, INT4)]
    assert by_label == sorted(by_label) and by_label[0] == 0 < by_label[1] < by_label[2]


def test_what_is_measured_does_not_depend_on_chunks(folder: Path) -> None:
    """The cached values are read, not the fresh ones: a text in one chunk costs the same."""
    found = [cost(Subject(settings(folder, max_num_batched_tokens=chunk)), INT4) for chunk in (16, 48, 512)]
    for other in found[1:]:
        assert other.kl.mean == pytest.approx(found[0].kl.mean, rel=1e-3)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_every_way_to_compute_is_measured_against_itself(folder: Path, kernels: str) -> None:
    other = Subject(settings(folder, kernels=kernels, dtype="bf16"))
    assert other.kernels(INT8).startswith(kernels)
    assert cost(other, PLAIN).kl.mean == 0
    assert 0 < cost(other, INT8).kl.mean < 0.1


def test_greedy_continuations_are_those_of_the_model(subject: Subject, made: tuple[Path, Any]) -> None:
    prompts = [TEXT[:30], TEXT[50:67], TEXT[100:101]]
    subject.use(INT8)
    found = subject.generate(prompts, 12, PLAIN)
    for given, tokens in zip(prompts, found, strict=True):
        ids = list(given)
        for token in tokens:
            logits = oracle(made[1], ids)[-1]
            best = logits.topk(2)
            assert token == best.indices[0] or float(best.values[0] - logits[token]) < 1e-3
            ids.append(token)
    assert [len(tokens) for tokens in found] == [12] * 3


def test_continuations_part_later_with_more_bits(subject: Subject) -> None:
    bench = Bench(subject, Wanted(TEXT))
    same, near, far = (bench.parted(precision) for precision in (PLAIN, INT8, INT4))
    assert same is not None and near is not None and far is not None
    assert same.mean == measurement.CONTINUED and same.error == 0
    assert same.mean >= near.mean > far.mean


def test_turns_are_the_dialogues(subject: Subject, folder: Path) -> None:
    script = Script.write(ServedTokenizer.read(folder), messages(), 3)
    assert script.turns[-1][1] == len(script.tokens)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for number, (first, last) in enumerate(script.turns):
        assert tokenizer.decode(script.tokens[:first]).endswith("|<assistant>")
        assert tokenizer.decode(script.tokens[first:last]).startswith(messages()[2 * number + 1]["content"])
    assert [last for _, last in script.turns[:-1]] == [first for first, _ in script.turns[1:]]
    bench = Bench(subject, Wanted(TEXT, script, greedy=False))
    turns = bench.turns(INT4)
    subject.use(INT4)
    kl = tokenwise(subject, subject.read(script.tokens, PLAIN), subject.read(script.tokens, INT4)).kl
    first, last = script.turns[1]
    assert turns[1].mean == pytest.approx(sum(kl[first - 1 : last - 1]) / (last - first), rel=1e-3)
    assert all(turn.mean == 0 for turn in bench.turns(PLAIN))


def test_a_template_that_writes_earlier_turns_anew_is_refused(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ScriptError, match="no chat template"):
        Script.write(ServedTokenizer.read(tmp_path), messages(), 2)
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}" + TEMPLATE)
    with pytest.raises(ScriptError, match="changes earlier turns"):
        Script.write(ServedTokenizer.read(tmp_path), messages(), 2)
    with pytest.raises(ScriptError, match="has 12 turns, not 13"):
        Script.write(ServedTokenizer.read(folder), messages(), 13)


def test_a_map_that_cannot_be_is_told_beside_the_others(tmp_path: Path) -> None:
    config = type(FAMILIES["mistral"])(**{**FAMILIES["mistral"].to_dict(), "head_dim": 6, "hidden_size": 36})
    save_model(config, tmp_path)
    odd = Subject(settings(tmp_path))
    with pytest.raises(Unsupported):
        odd.layout(INT8)
    bad, good = measure(odd, [INT4, PrecisionMap.parse("bf16")], Wanted(TEXT, greedy=False), lambda text: None)
    assert "multiple of" in bad["fault"] and "cost" not in bad
    assert good["capacity"] == 2.0 and good["cost"]["kl"]["mean"] < 0.01


def test_a_trial_measures_what_its_job_says(folder: Path) -> None:
    said: list[str] = []
    job = Job(settings(folder), 300, maps=(INT4, MIXED), turns=2, greedy=True)
    found = json.loads(json.dumps(trial.run(Job.parse(json.loads(json.dumps(job.plain))), said.append)))
    assert (found["tokens"], found["device"], found["unquantised"]["label"]) == (300, "cpu", "fp32")
    low, mixed = found["rows"]
    assert low["cost"]["kl"]["mean"] > mixed["cost"]["kl"]["mean"]
    assert low["token_bytes"] < mixed["token_bytes"] and low["capacity"] > mixed["capacity"] > 1
    assert len(low["turns"]) == 2 and low["parted"]["most"] == 64 and low["cost"]["tokens"] == 299
    assert said[-1] == f"measuring: {mixed['label']}, 2 of 2"


def test_a_trial_searches(folder: Path) -> None:
    subject = Subject(settings(folder))
    whole = {precision: cost(subject, PrecisionMap.parse(precision)).kl.mean for precision in ("int8", "int4")}
    middle = (whole["int8"] * whole["int4"]) ** 0.5
    job = Job(settings(folder), 200, limits=Limits(middle, 0.0, 9.0))
    found = trial.run(job, lambda text: None)["found"]
    assert not found["faults"] and found["cost"]["kl"]["mean"] <= middle
    sizes = [subject.layout(PrecisionMap.parse(each)).token_bytes for each in ("int4", "int8")]
    assert sizes[0] < found["token_bytes"] <= sizes[1]
    assert found["token_bytes"] == subject.layout(PrecisionMap.parse(found["precision"])).token_bytes


def test_too_little_text_or_too_long_a_dialogue_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too few"):
        trial.run(Job(settings(folder), 100, maps=(INT8,)), lambda text: None)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the model reaches 512"):
        trial.run(Job(settings(tmp_path), 300, maps=(INT8,), turns=12), lambda text: None)
