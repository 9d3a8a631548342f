"""The file of keys while the service runs: changes are taken in, whatever way they come; faults change nothing."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import keys
from cluster.documents import DocumentError
from cluster.keys import KeyFile, read_secrets
from cluster.tenants import Tenant, hash_of


def text(*held: str) -> str:
    return f"tenants: [{{name: t, keys: [{', '.join(map(hash_of, held))}]}}]"


def opens(file: KeyFile, key: str) -> bool:
    return file.ring.tenant_of(key, 0.0) is not None


def overwrite(path: Path, content: str) -> None:
    path.write_text(content)


def replace(path: Path, content: str) -> None:
    (path.parent / "new").write_text(content)
    os.replace(path.parent / "new", path)


def keep_the_time(path: Path, content: str) -> None:
    before = path.stat()
    path.write_text(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [overwrite, replace, keep_the_time])
def test_a_changed_file_is_taken_in(tmp_path: Path, change: Callable[[Path, str], None]) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text("a"))
    file = KeyFile(path, Tenant())
    before = file.ring
    file.refresh()
    assert file.ring is before, "nothing changed"
    change(path, text("b"))
    file.refresh()
    assert (opens(file, "a"), opens(file, "b")) == (False, True)


def test_a_link_that_turns_to_another_folder_is_followed(tmp_path: Path) -> None:
    """As Kubernetes mounts a secret: keys.yaml -> ..data/keys.yaml, ..data -> a folder that is swapped."""
    for name, held in (("first", "a"), ("second", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys.yaml").write_text(text(held))
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    file = KeyFile(tmp_path / "keys.yaml", Tenant())
    assert opens(file, "a")
    (tmp_path / "..data_tmp").symlink_to("second")
    os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
    file.refresh()
    assert (opens(file, "a"), opens(file, "b")) == (False, True)


@pytest.mark.parametrize("broken", ["", "tenants: [", "tenants: [{name: t, keys: [plain-secret]}]", "\udcff", None])
def test_a_broken_file_keeps_the_keys_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text("a"))
    file = KeyFile(path, Tenant())
    path.unlink()
    if broken is not None:
        path.write_bytes(broken.encode("utf-8", "surrogateescape"))
    for _ in range(3):
        file.refresh()
        assert opens(file, "a")
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert str(path) in errors[0] and "stay as they are" in errors[0]
    assert "plain-secret" not in errors[0]
    path.write_text(text("b"))
    file.refresh()
    assert (opens(file, "a"), opens(file, "b")) == (False, True), "and a good one counts again"


@pytest.mark.parametrize("content", [None, "", "tenants: 1", text("a") + "x"])
def test_a_service_does_not_start_without_its_keys(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DocumentError, match=r"keys\.yaml"):
        KeyFile(path, Tenant())


def test_a_look_takes_changes_in_and_whatever_goes_wrong_stays_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text("a"))
    file = KeyFile(path, Tenant())
    refresh, calls = file.refresh, []

    def stumble() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("something nobody thought of")
        refresh()

    monkeypatch.setattr(file, "refresh", stumble)

    async def main() -> None:
        path.write_text(text("b"))
        await file.look()
        assert not opens(file, "b")
        await file.look()
        assert opens(file, "b")

    asyncio.run(main())
    assert len(calls) == 2


def test_a_revoked_key_is_refused_within_five_seconds() -> None:
    assert keys.CHECK_S <= 4, "one look at the file, and a second for it"


def test_secrets_are_the_bytes_of_their_files_in_order(tmp_path: Path) -> None:
    for name, content in (("new", b"n" * 16 + b"\n"), ("old", b"\0" * 32)):
        (tmp_path / name).write_bytes(content)
    assert read_secrets(str(tmp_path / name) for name in ("new", "old")) == (b"n" * 16 + b"\n", b"\0" * 32)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 15])
def test_a_secret_that_is_too_short_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ValueError, match=f"secret .*holds {len(content)} bytes"):
        read_secrets([str(tmp_path / "secret")])
