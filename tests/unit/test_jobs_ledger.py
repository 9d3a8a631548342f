"""The output: what a kill leaves of it, whose records count, what becomes of the others; as a file and as objects."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy.jobs.ledger import SUPERSEDED, FileLedger, LedgerError, scanned
from deploy.jobs.objects import PARTS, ObjectLedger
from deploy.jobs.records import Mark, Usage, error_line, mark_of, response_line, summary_line
from deploy.jobs.rows import BadRow, Document, Request, id_key
from deploy.jobs.tree import Node


def document(id: str, digest: str = "d") -> Document:
    return Document(id_key(id), digest, f"text of {id}", {"id": id})


def line(id: str, digest: str = "d", settings: str = "s", summary: str = "näïve 🙂\u2028 end") -> bytes:
    return summary_line(document(id, digest), settings, "m", Usage(), Node(0, 9, 3, summary))


def bad(number: int) -> bytes:
    return error_line(BadRow(f"line:{number}", "d", number, "no"), "documents", "s", "invalid_row", "no")


def ids(data: bytes) -> list[str]:
    return [json.loads(one)["id"] for one in data.splitlines()]


def valid(*names: str, digest: str = "d", settings: str = "s") -> dict[str, tuple[str, str]]:
    return {id_key(name): (digest, settings) for name in names}


LINES = [line("a"), bad(2), line("c"), line("d")]
WHOLE = b"".join(LINES)


def test_a_record_says_whose_it_is_and_is_one_line() -> None:
    record = json.loads(LINES[0])
    assert record["id"] == "a" and record["summary"].startswith("näïve") and LINES[0].count(b"\n") == 1
    assert mark_of(LINES[0]) == Mark("id:a", "d", "s", False)
    assert mark_of(LINES[1]) == Mark("line:2", "d", "s", True) and json.loads(LINES[1])["line"] == 2
    assert mark_of(b'{"id": "a"}\n') is None and mark_of(b"nonsense") is None


def test_records_of_requests_are_openais_batch_output() -> None:
    row = Request(id_key("r"), "d", "/v1/completions", {})
    record = json.loads(response_line(row, "s", 200, "req-1", {"choices": []}))
    assert record["custom_id"] == "r" and record["error"] is None and record["id"].startswith("batch_req_")
    assert record["response"] == {"status_code": 200, "request_id": "req-1", "body": {"choices": []}}
    refused = json.loads(response_line(row, "s", 400, "req-2", {"error": {"code": "x"}}))
    assert refused["response"]["status_code"] == 400 and refused["tidegate"]["failed"]
    failed = json.loads(error_line(row, "openai", "s", "server_failed", "gone"))
    assert failed["response"] is None and failed["error"] == {"code": "server_failed", "message": "gone"}


def test_a_file_cut_at_any_byte_is_repaired_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)  # a thousand waits for the disk
    path = tmp_path / "out.jsonl"
    for cut in range(len(WHOLE) + 1):
        path.write_bytes(WHOLE[:cut])
        whole = max(n for n in range(5) if not n or len(b"".join(LINES[:n])) <= cut + 1)  # its end may be lacking
        ledger = FileLedger(path)
        assert [mark.key for mark in ledger.marks] == ["id:a", "line:2", "id:c", "id:d"][:whole], cut
        ledger.append([line("z")])
        ledger.close()
        assert path.read_bytes() == b"".join(LINES[:whole]) + line("z"), cut


def test_a_record_is_on_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, synced = FileLedger(tmp_path / "out.jsonl"), []
    monkeypatch.setattr("os.fsync", lambda handle: synced.append((tmp_path / "out.jsonl").read_bytes()))
    ledger.append([line("a"), line("b")])
    assert synced == [line("a") + line("b")]
    ledger.close()


@pytest.mark.parametrize(
    "content",
    [b"hello\n", b"hello", b'{"id": "mine"}\n', b'{"id": "mine"}', WHOLE + b"\n", b"{}\n" + WHOLE, b"\xff\xfe"],
)
def test_a_file_of_somebody_elses_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"line \d is no record of"):
        FileLedger(path)
    assert path.read_bytes() == content


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    first = FileLedger(tmp_path / "out.jsonl")
    with pytest.raises(LedgerError, match="another run writes there"):
        FileLedger(tmp_path / "out.jsonl")
    first.close()
    FileLedger(tmp_path / "out.jsonl").close()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="--output"):
        FileLedger(tmp_path / "file" / "out.jsonl")


def finished(
    path: Path, given: bytes, valid: dict[str, tuple[str, str]], order: Sequence[str] | None
) -> tuple[bytes, bytes]:
    """(the output, what was put out of the way)."""
    path.write_bytes(given)
    ledger = FileLedger(path)
    ledger.finish(valid, order)
    ledger.close()
    aside = path.with_name(path.name + SUPERSEDED)
    assert {one.name for one in path.parent.iterdir()} <= {path.name, aside.name}
    return path.read_bytes(), aside.read_bytes() if aside.exists() else b""


def test_records_get_into_the_inputs_order(tmp_path: Path) -> None:
    given = line("c") + line("a") + line("b")
    order = [id_key("a"), id_key("b"), id_key("c")]
    assert finished(tmp_path / "o", given, valid("a", "b", "c"), order) == (line("a") + line("b") + line("c"), b"")
    assert finished(tmp_path / "o", given, valid("a", "b", "c"), None) == (given, b"")


@pytest.mark.parametrize("order", [None, [id_key("a"), id_key("b")]])
def test_what_is_out_of_date_is_put_out_of_the_way_and_not_lost(tmp_path: Path, order: list[str] | None) -> None:
    old = [line("a", digest="old"), line("b", settings="other"), bad(7), line("a", summary="first")]
    given = b"".join(old) + line("a") + line("b")
    assert finished(tmp_path / "o", given, valid("a", "b"), order) == (line("a") + line("b"), b"".join(old))


def test_records_of_other_ids_stay(tmp_path: Path) -> None:
    given = line("b") + line("x", settings="other") + line("a")
    order = [id_key("a"), id_key("b")]
    assert finished(tmp_path / "o", given, valid("a", "b"), order)[0] == given[len(line("b")) : -len(line("a"))] + line(
        "a"
    ) + line("b")


def test_a_last_line_without_its_end_gets_one_when_records_move(tmp_path: Path) -> None:
    kept, _ = finished(tmp_path / "o", (line("b") + line("a"))[:-1], valid("a", "b"), [id_key("a"), id_key("b")])
    assert kept == line("a") + line("b")


def test_a_scan_tells_what_is_whole() -> None:
    scan = scanned(io.BytesIO(WHOLE[:-1]), "x")
    assert scan.lacking and scan.whole == len(WHOLE) - 1
    assert scanned(io.BytesIO(WHOLE[:-9]), "x").whole == len(WHOLE) - len(LINES[-1])


def objects(folder: Path) -> ObjectLedger:
    return ObjectLedger(f"file://{folder}/out.jsonl")


def test_objects_hold_records_until_they_become_one(tmp_path: Path) -> None:
    ledger = objects(tmp_path)
    ledger.append([line("b")])
    assert not list(tmp_path.rglob("*.jsonl")), "it waits for others"
    ledger.flush()
    ledger.append([line("a")])
    ledger.close()
    assert len(list((tmp_path / f"out.jsonl{PARTS}").iterdir())) == 2
    again = objects(tmp_path)
    assert {mark.key for mark in again.marks} == {"id:a", "id:b"}
    again.append([line("a", digest="new")])
    again.finish(valid("b") | valid("a", digest="new"), [id_key("a"), id_key("b")])
    assert (tmp_path / "out.jsonl").read_bytes() == line("a", digest="new") + line("b")
    assert (tmp_path / f"out.jsonl{SUPERSEDED}").read_bytes() == line("a")
    assert not (tmp_path / f"out.jsonl{PARTS}").exists()
    assert {mark.key for mark in objects(tmp_path).marks} == {"id:a", "id:b"}


def test_many_records_do_not_wait(tmp_path: Path) -> None:
    ledger = objects(tmp_path)
    ledger.append([line(str(number)) for number in range(70)])
    assert len(objects(tmp_path).marks) == 70


def test_an_object_that_was_cut_loses_its_last_record_only(tmp_path: Path) -> None:
    ledger = objects(tmp_path)
    ledger.append([line("a"), line("b")])
    ledger.close()
    (part,) = (tmp_path / f"out.jsonl{PARTS}").iterdir()
    part.write_bytes(part.read_bytes()[:-20])
    again = objects(tmp_path)
    assert [mark.key for mark in again.marks] == ["id:a"]
    again.append([line("b")])
    again.finish(valid("a", "b"), None)
    assert ids((tmp_path / "out.jsonl").read_bytes()) == ["a", "b"]


def test_a_url_that_nobody_understands_is_told() -> None:
    with pytest.raises(LedgerError, match="nonsense"):
        ObjectLedger("nonsense://bucket/out.jsonl")
