"""Text to tokens and back for one model: prompts, chats, and the answer's text as its tokens come.

The tokenizer is Hugging Face's `tokenizers`, read from a model's folder; no torch, no transformers. Prompts become the
ids that transformers makes of them, but a beginning-of-sequence token is never doubled, and control tokens that a
client spells out in a *chat* message stay plain characters, so that nobody can open a turn from within one. In a
completion's prompt they are control tokens, as in transformers: that prompt is the client's alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from cluster.errors import ApiError
from cluster.text.detokenizer import detokenizer
from cluster.text.spelling import Spelling
from cluster.text.stops import StopMatcher
from cluster.text.template import ChatTemplate, read_template, special_names
from cluster.text.vocabulary import Vocabulary

MARKS = range(0xF0000, 0xFFFFE)
"""Private characters: one that a chat does not use marks, through the template, where its texts are cut."""


class Tokenizer:
    """One model's tokenizer and chat template. Thread-safe; encoding lets other threads run (see `encode`)."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None, bos: str | None = None) -> None:
        tokenizer.no_truncation()  # some models' files cut at 512 tokens, silently
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self.vocabulary = Vocabulary(tokenizer)
        self.spelling = Spelling(tokenizer, self.vocabulary)
        self._bos = tokenizer.token_to_id(bos) if bos is not None else None
        spellings = sorted((text for text in self.vocabulary.special_texts if len(text) > 1), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    @classmethod
    def read(cls, folder: Path) -> Tokenizer:
        """From tokenizer.json, tokenizer_config.json, chat_template.jinja. Raises ValueError naming what is wrong."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{folder} has no tokenizer.json: only 'fast' tokenizers are supported")
        path = folder / "tokenizer_config.json"
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        names = special_names(config)
        source = read_template(folder, config)
        template = ChatTemplate(source, names) if source is not None else None
        return cls(tokenizers.Tokenizer.from_file(str(file)), template, names.get("bos_token"))

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def encode(self, text: str, context: int) -> tuple[int, ...]:
        """A completion's prompt, with the special tokens that the tokenizer adds by itself. Raises ApiError (400) for a
        text that cannot fit into `context` tokens, before encoding it, where that is certain."""
        self._refuse_certain_excess(len(text), context, "prompt")
        ids = self._encode(text, special=True)
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            ids = ids[1:]  # the text spelled it out already
        return tuple(ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], context: int) -> tuple[int, ...]:
        """A chat's prompt by the model's template; a message is `role`, `content` and the like. Raises ApiError (400)
        without a template, when it refuses the messages, or when they cannot fit into `context` tokens for certain."""
        if self._template is None:
            message = "This model has no chat template, so it cannot chat: use /v1/completions."
            raise ApiError(message, "no_chat_template")
        mark = self._mark(messages)
        if mark is not None:
            messages = [{key: self._cut(text, mark) for key, text in message.items()} for message in messages]
        rendered = self._template.render(messages)
        self._refuse_certain_excess(len(rendered), context, "messages")
        ids: list[int] = []
        for part in [rendered] if mark is None else rendered.split(mark):
            ids.extend(self._encode(part, special=False))
        return tuple(ids)

    def transcript(self, stops: tuple[str, ...] = (), *, least: int = 0, traced: bool = False) -> Transcript:
        """A new answer's text."""
        return Transcript(self._tokenizer, self.vocabulary, stops, least=least, traced=traced)

    def special_id(self, text: str) -> int | None:
        """The id of the control token that is spelled so, if there is one."""
        return self.vocabulary.special_texts.get(text)

    def _refuse_certain_excess(self, characters: int, context: int, param: str) -> None:
        """A token stands for at most `longest` characters, so that many characters are at least so many tokens."""
        longest = self.vocabulary.longest
        if longest is not None and characters > longest * context:
            raise ApiError(
                f"The {param} has {characters} characters, so at least {-(-characters // longest)} tokens; the model's "
                f"context holds {context}, prompt and answer together.",
                "context_length_exceeded",
                param,
            )

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # Not `encode`: that one holds the interpreter's lock throughout (measured: 1.2 s for a megabyte of text,
        # against 10 ms) and computes offsets that nobody reads.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids) if text else []

    def _mark(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        """A character that no message uses; None when no message spells out a control token."""
        texts = [text for message in messages for text in message.values()]
        if self._control is None or not any(map(self._control.search, texts)):
            return None
        used = set().union(*texts)
        return next(chr(code) for code in MARKS if chr(code) not in used)

    def _cut(self, text: str, mark: str) -> str:
        """`text` with a mark after the first character of each control token that it spells out."""
        assert self._control is not None
        while True:  # a cut may leave another one whole: "<" + "|a|>" where "|a|>" is one too
            cut = self._control.sub(lambda match: match[0][0] + mark + match[0][1:], text)
            if cut == text:
                return text
            text = cut


class Transcript:
    """One answer's text, ended before its stop string, of which the first `least` tokens are no part. `tokens` counts
    those fed until the text ended. When `traced`,
    `pieces` are what each token added to the text (of those that were counted, with the stop string in them, and of the
    prompt's): "" for a part of a character, and for a token that never shows."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        vocabulary: Vocabulary,
        stops: tuple[str, ...],
        *,
        least: int = 0,
        traced: bool = False,
    ) -> None:
        self._detokenizer = detokenizer(tokenizer, vocabulary)
        self._vocabulary = vocabulary
        self._matcher = StopMatcher(stops) if stops else None
        self._least = least
        self._traced = traced
        self.pieces: list[str] = []
        self.tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: the text has ended."""
        return self._matcher is not None and self._matcher.hit

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that can be shown now. Tokens after a stop string's last one are neither shown nor counted."""
        if self._matcher is None and not self._traced:
            self.tokens += len(tokens)
            return self._detokenizer.feed(tokens)
        shown = []
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            piece = self._detokenizer.feed((token,))
            if self._traced:
                self.pieces.append(piece)
            shown.append(piece if self._matcher is None or self.tokens <= self._least else self._matcher.feed(piece))
        return "".join(shown)

    def end(self) -> None:
        """A token that ends the text came: it was generated, but it is no part of it."""
        self.tokens += 1
        if self._traced:
            self.pieces.append("")

    def echo(self, prompt: Sequence[int], text: str | None) -> str:
        """The prompt's text, before any output: `text`, if it was sent as such, with control tokens where it spells
        them out. No stop string is looked for there."""
        pieces: list[str] = []
        position = 0
        for token in prompt:
            control = self._vocabulary.controls.get(token)
            if control is None:
                piece = self._detokenizer.feed((token,))
            else:
                tail = self._detokenizer.flush()
                position += len(tail)
                if pieces:
                    pieces[-1] += tail
                # One that the tokenizer adds by itself is in no text.
                piece = control if text is None or text.startswith(control, position) else ""
            position += len(piece)
            pieces.append(piece)
        if self._traced:
            self.pieces += pieces
        return "".join(pieces) if text is None else text

    def finish(self) -> str:
        """The tokens have ended: what was held back."""
        tail = self._detokenizer.flush()
        if self._traced and self.pieces:
            self.pieces[-1] += tail
        if self._matcher is None:
            return tail
        return self._matcher.feed(tail) + self._matcher.flush()
