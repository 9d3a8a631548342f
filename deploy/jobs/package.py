"""Package: what a job takes along to its node: this program, and what it is to work on, as one zip file."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

from deploy.house import PACKAGES, ROOT

BROUGHT = "brought"
"""The folder of what comes along besides the program."""


def pack(target: Path, brought: Path) -> int:
    """Write the zip file `target` with our code, and all that lies in the folder `brought`. Returns the code's bytes in
    it."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in code():
            archive.write(path, path.relative_to(ROOT).as_posix())
        size = sum(one.compress_size + len(one.filename) for one in archive.infolist())
        for path in sorted(brought.rglob("*")):
            if path.is_file():
                archive.write(path, f"{BROUGHT}/{path.relative_to(brought).as_posix()}")
    return size


def code() -> Iterator[Path]:
    """The files of the program."""
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))
