"""What a batch consists of: files, folders, OpenAI's batch format, bad rows; templates; where outputs may be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.jobs import places
from deploy.jobs.documents import Input, InputError
from deploy.jobs.rows import BadRow, Document, Request, Row
from deploy.jobs.template import SUMMARY, Template, TemplateError


def rows_of(path: Path, *lines: object, **options: object) -> list[Row]:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text, encoding="utf-8")
    return list(Input(path, **options).rows())  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


def test_rows_have_a_text_or_a_file(file: Path) -> None:
    (file.parent / "b.txt").write_text("from a file")
    first, second, third = rows_of(
        file, {"id": "a", "text": "hi", "title": "T"}, "", {"id": 7, "path": "b.txt"}, {"id": "c", "text": "x"}
    )
    assert isinstance(first, Document) and (first.key, first.text, first.fields["title"]) == ("id:a", "hi", "T")
    assert isinstance(second, Document) and (second.key, second.text) == ("id:7", "from a file")
    assert third.key == "id:c"


def test_a_digest_changes_with_the_text_and_with_other_fields(file: Path) -> None:
    digests = [
        rows_of(file, row)[0].digest
        for row in ({"id": "a", "text": "x"}, {"id": "a", "text": "y"}, {"id": "a", "text": "x", "t": 1})
    ]
    assert len(set(digests)) == 3
    (file.parent / "b.txt").write_text("x")
    assert rows_of(file, {"path": "b.txt", "id": "a"})[0].digest == digests[0], "wherever the text comes from"


@pytest.mark.parametrize(
    ("row", "key", "reason"),
    [
        ("{half", "line:2", "not JSON"),
        ("[1]", "line:2", "expected a JSON object, got list"),
        ({"text": "x"}, "line:2", "id must be a text"),
        ({"id": True, "text": "x"}, "line:2", "id must be a text"),
        ({"id": "", "text": "x"}, "line:2", "id must be a text"),
        ({"id": "b"}, "id:b", "either text or path"),
        ({"id": "b", "text": "x", "path": "y"}, "id:b", "either text or path"),
        ({"id": "b", "text": 3}, "id:b", "text must be a text, got 3"),
        ({"id": "b", "text": " \n"}, "id:b", "the text is empty"),
        ({"id": "b", "path": "gone.txt"}, "id:b", "gone.txt cannot be read: No such file"),
        ({"id": "b", "path": "bytes.txt"}, "id:b", "bytes.txt is no UTF-8 text"),
        ({"id": "b", "path": 3}, "id:b", "path must be a file's name"),
        ('{"id": "b", "text": "\\ud800"}', "id:b", "half of a surrogate pair"),
        ({"id": "first", "text": "again"}, "line:2", 'a row before this one has the id "first" already'),
    ],
)
def test_a_bad_row_is_a_row_with_its_reason(file: Path, row: object, key: str, reason: str) -> None:
    (file.parent / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    first, second, third = rows_of(file, {"id": "first", "text": "x"}, row, {"id": "last", "text": "y"})
    assert isinstance(second, BadRow) and second.key == key and reason in second.reason and second.line == 2
    assert isinstance(first, Document) and isinstance(third, Document)


def test_bytes_that_are_no_utf8_are_a_bad_row(file: Path) -> None:
    file.write_bytes(b'{"id": "a", "text": "\xff"}\n{"id": "b", "text": "x"}\n')
    first, second = Input(file).rows()
    assert isinstance(first, BadRow) and first.reason == "not UTF-8" and isinstance(second, Document)


def test_a_folder_gives_its_texts_in_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.md", "sub/c.TXT", "no.pdf"):
        (tmp_path / name).write_text(f"in {name}")
    (tmp_path / "empty.txt").write_text("")
    rows = list(Input(tmp_path).rows())
    assert [row.key for row in rows] == ["id:a.md", "id:b.txt", "id:empty.txt", "id:sub/c.TXT"]
    assert isinstance(rows[2], BadRow) and rows[2].reason == "the text is empty"


def test_openais_format_is_known_by_its_first_row(file: Path) -> None:
    request = {
        "custom_id": "r",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": []},
    }
    rows = rows_of(file, "nonsense", request, {"id": "a", "text": "x"})
    assert Input(file).settled() == "openai" and isinstance(rows[1], Request)
    assert (rows[1].key, rows[1].url, rows[1].body) == ("id:r", request["url"], request["body"])
    assert [type(row) for row in (rows[0], rows[2])] == [BadRow, BadRow]
    assert isinstance(rows_of(file, request, format="documents")[0], BadRow)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"method": "GET"}, "method must be POST"),
        ({"url": "/v1/embeddings"}, "url must be /v1/chat/completions or"),
        ({"body": 3}, "body must be an object"),
        ({"body": {"stream": True}}, "answers of a batch come whole"),
        ({"custom_id": None}, "custom_id must be a text"),
    ],
)
def test_a_bad_request_is_a_row_with_its_reason(file: Path, change: dict[str, object], reason: str) -> None:
    request = {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": {}}
    (row,) = rows_of(file, request | change, format="openai")
    assert isinstance(row, BadRow) and reason in row.reason


def test_an_input_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no \.txt or \.md file"):
        Input(tmp_path).check()
    with pytest.raises(InputError, match="cannot be read"):
        Input(tmp_path / "gone").check()


def test_a_copy_needs_no_other_file_and_has_the_same_rows(file: Path, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("from a file")
    lines = (
        {"id": "a", "text": "hi"},
        "",
        "{bad",
        {"id": "b", "path": "b.txt", "n": 1},
        {"id": "c", "path": "gone.txt"},
    )
    before = rows_of(file, *lines)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Input(file).copy_to(elsewhere / "in.jsonl")
    assert list(Input(elsewhere / "in.jsonl").rows()) == before
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "x.md").write_text("hello")
    Input(folder).copy_to(elsewhere / "folder")
    assert list(Input(elsewhere / "folder").rows()) == list(Input(folder).rows())


def test_a_template_takes_the_text_and_fields_of_the_row() -> None:
    template = Template("{title}: {{json}} {text}!")
    assert template.render("a {title} b", {"title": "T"}) == "T: {json} a {title} b!"
    with pytest.raises(TemplateError, match=r"asks for \{title\}"):
        template.render("x", {})
    assert SUMMARY.endswith("{text}"), "the instruction goes first: all documents share it"


@pytest.mark.parametrize("source", ["no place", "{text} {text}", "{{text}}"])
def test_a_template_needs_one_place_for_the_text(tmp_path: Path, source: str) -> None:
    (tmp_path / "t").write_text(source)
    with pytest.raises(TemplateError, match=r"--prompt-template .* must hold"):
        Template.read(tmp_path / "t")


MOUNTS = [("/", "ext4"), ("/dev/shm", "tmpfs"), ("/mnt/nfs", "nfs4"), ("/mnt/nfs/deep", "tmpfs"), ("/data", "ext4")]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("out.jsonl", "is relative"),
        ("./out.jsonl", "is relative"),
        ("/home/me/out.jsonl", "on the root file system"),
        ("/mnt/nfsx/out.jsonl", "on the root file system"),
        ("/dev/shm/out.jsonl", "/dev/shm (tmpfs)"),
        ("/mnt/nfs/deep/out.jsonl", "/mnt/nfs/deep (tmpfs)"),
        ("/mnt/nfs/../out.jsonl", "on the root file system"),
        ("file:///mnt/nfs/out.jsonl", "on this node alone"),
        ("/mnt/nfs/out.jsonl", None),
        ("/data/a/b/out.jsonl", None),
        ("s3://bucket/out.jsonl", None),
    ],
)
def test_a_jobs_output_must_outlive_its_node(output: str, reason: str | None) -> None:
    fault = places.fault(output, MOUNTS)
    assert fault is None if reason is None else fault is not None and reason in fault and "--return" in fault


def test_mounts_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text("/dev/sda / ext4 rw 0 0\nserver:/x /mnt/my\\040share nfs4 rw 0 0\n")
    assert places.mounts_here(tmp_path / "mounts") == [("/", "ext4"), ("/mnt/my share", "nfs4")]
    assert ("/proc", "proc") in places.mounts_here()
