"""What the Ray tests find out about processes, which end while one looks."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from tests.ray.stage import command_line


def test_the_command_line_of_a_process_that_ended_is_empty() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = psutil.Process(process.pid)
    assert "input()" in command_line(found)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet reaped: a zombie
    assert command_line(found) == ""
    process.communicate()
    assert command_line(found) == ""
