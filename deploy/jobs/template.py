"""Template: what is asked about each document. Placeholders in braces; the text of the document is one of them.

What stands before the first placeholder is the same for all documents: a server's prefix cache computes it once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TEXT = "text"
SUMMARY = (
    "Summarize the text below in one short paragraph of plain prose. Keep the names, numbers, dates, decisions and "
    "conclusions that matter most. Add nothing that the text does not say, and do not comment on it. Where the text "
    "consists of summaries of consecutive parts of one document, write one summary of the whole document.\n\n"
    "Text:\n{text}"
)
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")


class TemplateError(ValueError):
    """The template cannot be used, or a row lacks what it asks for; the message says which."""


@dataclass(frozen=True, slots=True)
class Template:
    """`source` holds {text} once, and may hold {name} for other fields of a row; {{ and }} are braces."""

    source: str

    def __post_init__(self) -> None:
        found = self.fields.count(TEXT)
        if found != 1:
            raise TemplateError(f"must hold {{text}} once, where the document's text goes; it is there {found} times")

    @classmethod
    def read(cls, path: Path | None) -> Template:
        """The template of a file; without one, the summary's. Raises TemplateError naming the file."""
        if path is None:
            return cls(SUMMARY)
        try:
            return cls(path.read_text(encoding="utf-8").rstrip("\n"))
        except (OSError, ValueError) as error:  # TemplateError and text that is no UTF-8 are ValueErrors
            raise TemplateError(f"--prompt-template {path}: {error}") from error

    @property
    def fields(self) -> list[str]:
        """The placeholders' names, in order."""
        return [match[1] for match in _PLACEHOLDER.finditer(self.source) if match[1]]

    def render(self, text: str, fields: Mapping[str, object]) -> str:
        """The prompt for `text`, a document's or a part's. Raises TemplateError for a field that the row lacks."""

        def value(match: re.Match[str]) -> str:
            name = match[1]
            if name is None:
                return match[0][0]
            if name == TEXT:
                return text
            if name not in fields:
                raise TemplateError(f"the prompt template asks for {{{name}}}, which this row does not have")
            return str(fields[name])

        return _PLACEHOLDER.sub(value, self.source)
