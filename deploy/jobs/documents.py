"""Input: the rows of a JSONL file, or of a folder's .txt and .md files, in order. A row that is bad is a row still.

A file is read twice: once for the keys and digests, which decide what is left to do, then row by row as the work
proceeds; texts are not kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.jobs.rows import (
    BadRow,
    Document,
    Format,
    Row,
    RowError,
    digest_of,
    format_of,
    id_key,
    id_of,
    line_key,
    parsed,
    request_of,
    shown,
)

SUFFIXES = (".txt", ".md")


class InputError(ValueError):
    """There is no such input, or nothing in it."""


@dataclass(frozen=True, slots=True)
class Input:
    """`format` None: the format of a file's first row that is JSON."""

    path: Path
    format: Format | None = None

    def check(self) -> None:
        """Raises InputError where there is nothing to read."""
        if self.path.is_dir():
            if not self._files():
                raise InputError(f"--input {self.path}: holds no {' or '.join(SUFFIXES)} file")
            return
        try:
            with self.path.open("rb"):
                pass
        except OSError as error:
            raise InputError(f"--input {self.path}: cannot be read: {error}") from error

    def settled(self) -> Format:
        """The format that the rows have."""
        if self.format is not None or self.path.is_dir():
            return self.format or "documents"
        for _, line in self._lines():
            try:
                return format_of(parsed(line))
            except RowError:
                continue  # it becomes an error record, whatever the format
        return "documents"

    def rows(self) -> Iterator[Row]:
        """All rows in order, each key once."""
        if self.path.is_dir():
            yield from (self._file(path) for path in self._files())
            return
        format, seen = self.settled(), set[str]()
        for number, line in self._lines():
            yield self._row(number, line, format, seen)

    def copy_to(self, path: Path) -> None:
        """The same rows, with the same keys and digests, at `path`, where files that rows name are no longer needed."""
        if self.path.is_dir():
            for file in self._files():
                target = path / file.relative_to(self.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
            return
        with self.path.open("rb") as source, path.open("wb") as target_file:
            for raw in source:
                target_file.write(self._with_text(raw))

    def _with_text(self, raw: bytes) -> bytes:
        """A line that names a file, with the file's text instead; any other as it is."""
        try:
            value = parsed(raw.decode("utf-8-sig"))
            if value.get("text") is not None or not isinstance(path := value.get("path"), str):
                return raw
            text = _read(self.path.parent / path, path)
        except (RowError, UnicodeDecodeError):
            return raw
        del value["path"]
        return json.dumps(value | {"text": text}).encode() + b"\n"

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Lines that are not blank, with their numbers from 1."""
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape").strip()

    def _row(self, number: int, line: str, format: Format, seen: set[str]) -> Row:
        id = None
        try:
            line.encode("utf-8")
            value = parsed(line)
            id = id_of(value, format)
            key = id_key(id)
            if key in seen:
                taken, id = id, None
                raise RowError(f"a row before this one has the id {shown(taken)} already")
            seen.add(key)
            if format == "openai":
                return request_of(value, key)
            return self._document(value, key)
        except UnicodeEncodeError:
            reason = "not UTF-8"
        except RowError as error:
            reason = str(error)
        return BadRow(id_key(id) if id is not None else line_key(number), digest_of(line, reason), number, reason, id)

    def _document(self, value: dict[str, object], key: str) -> Document:
        text, path = value.get("text"), value.get("path")
        if (text is None) == (path is None):
            raise RowError("a row must have either text or path")
        if text is None:
            if not isinstance(path, str) or not path:
                raise RowError(f"path must be a file's name, got {shown(path)}")
            text = _read(self.path.parent / path, path)
        if not isinstance(text, str):
            raise RowError(f"text must be a text, got {shown(text)}")
        _check(text)
        fields = {name: one for name, one in value.items() if name not in ("text", "path")}
        return Document(key, digest_of(text, json.dumps(fields, sort_keys=True)), text, fields)

    def _files(self) -> list[Path]:
        found = (path for path in self.path.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        return sorted(found, key=lambda path: path.relative_to(self.path).as_posix())

    def _file(self, path: Path) -> Row:
        id = path.relative_to(self.path).as_posix()
        try:
            text = _read(path, id)
            _check(text)
        except RowError as error:
            return BadRow(id_key(id), digest_of(str(error)), 1, str(error), id)
        return Document(id_key(id), digest_of(text, "{}"), text, {"id": id})


def _read(path: Path, name: str) -> str:
    """The text of the file that the row calls `name`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RowError(f"{name} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, ValueError) as error:  # ValueError: a name with a null character
        raise RowError(f"{name} is no UTF-8 text: {error}") from error


def _check(text: str) -> None:
    if not text.strip():
        raise RowError("the text is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError("the text holds half of a surrogate pair") from error
