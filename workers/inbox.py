"""What other threads want of the step thread: commands, and questions whose answers are futures.

Knows nothing of what they do. Everything runs in the order in which it came, when the step thread says so.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Command = Callable[[float], object]


class Inbox:
    """`work` is set whenever something comes in."""

    def __init__(self) -> None:
        self.work = threading.Event()
        self._lock = threading.Lock()
        self._commands: deque[Command] = deque()
        self._questions: set[Future[Any]] = set()
        self._closed: BaseException | None = None

    def post(self, command: Command) -> None:
        """Call `command(now)` in the next turn."""
        self._commands.append(command)
        self.work.set()

    def ask(self, question: Callable[[float], T]) -> Future[T]:
        """What `question(now)` returns in the next turn."""
        answer: Future[T] = Future()

        def reply(now: float) -> None:
            with self._lock:
                self._questions.discard(answer)
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(question(now))
            except BaseException as error:
                answer.set_exception(error)
                raise

        with self._lock:
            closed = self._closed
            if closed is None:
                self._questions.add(answer)
        if closed is None:
            self.post(reply)
        else:
            answer.set_exception(closed)
        return answer

    def run(self, now: float) -> bool:
        """Do all that came in; whether that was anything."""
        self.work.clear()
        busy = bool(self._commands)
        while self._commands:
            self._commands.popleft()(now)
        return busy

    def close(self, error: BaseException) -> None:
        """There will be no turn any more: whoever asked, or asks later, gets `error`."""
        with self._lock:
            self._closed = error
            questions, self._questions = self._questions, set()
        for question in questions:
            if question.set_running_or_notify_cancel():
                question.set_exception(error)
