"""What `tidegate bench --vs FILE` compares, as data: servers with the commands that start them, and loads for each.

Knows no process and no HTTP. The prompts of a load are the same for every server and every start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from cluster.documents import DocumentError, Entry, read
from deploy.bench.load import Load
from deploy.config import ConfigError

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]


class Contender(Entry):
    """One server. `start` is a command (deploy.bench.servers says what may stand in it), `url` where it answers then,
    `model` the one to ask (None: its first). `reports`: it is a Tidegate, whose status says what it computed twice.
    `counters` are Prometheus metrics of its own to look at before and after each load."""

    name: Text
    url: Annotated[str, Field(pattern=r"^https?://")]
    start: Text
    model: Text | None = None
    reports: bool = False
    counters: list[Text] = Field(default_factory=list)


class Round(Entry):
    """One load at several `levels` of clients at once; what the rest means stands at `deploy.bench.load.Load`.
    `requests` are per client, so that every level lasts."""

    name: Text
    levels: Annotated[list[Count], Field(min_length=1)]
    requests: Count = 4
    prompts: Text = "random"
    prompt_words: Count = 128
    shared_words: Annotated[int, Field(ge=0)] = 0
    turns: Count = 4
    max_tokens: Count = 64
    ignore_eos: bool = True
    session: Text | None = None
    warmup: Annotated[int, Field(ge=0)] = 2

    def load(self, level: int, *, seed: int, timeout_s: float, key: str | None) -> Load:
        """The level with that index as a load of one level."""
        values: dict[str, Any] = self.model_dump(exclude={"name", "levels", "requests"})
        clients = self.levels[level]
        values |= {"seed": seed + 1000 * level, "timeout_s": timeout_s, "key": key}
        return Load(levels=(clients,), requests=self.requests * clients, **values)


class Contest(Entry):
    """Servers, each compared with the first; loads, one after the other on each start."""

    servers: Annotated[list[Contender], Field(min_length=1)]
    loads: Annotated[list[Round], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for entries in (self.servers, self.loads):
            names = [entry.name for entry in entries]
            if len(set(names)) < len(names):
                raise PydanticCustomError("twice", "two entries have one name: {names}", {"names": ", ".join(names)})
        return self

    @classmethod
    def read(cls, path: Path) -> Contest:
        """Raises ConfigError with file and key of the first fault."""
        try:
            return read(path.read_text(encoding="utf-8"), cls)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
        except DocumentError as error:
            raise ConfigError(f"{path}: {error}") from error
