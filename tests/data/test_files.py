"""Local files: what is read, and every complaint in one line."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fullband.config import FilesSource
from fullband.data.files import LONGEST_LINE, PIECE, Files
from fullband.data.sources import START, TextSource


def read(*paths: Path | str, split: str = "train", start: tuple[int, int] = START, **options: Any) -> list[str]:
    source = Files(FilesSource(paths=[str(path) for path in paths], **({"validation_fraction": 0} | options)))
    return [text for _, text in source.documents(split, start)]


def refusal(*paths: Path | str, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        read(*paths, **options)
    message = str(caught.value)
    assert "\n" not in message
    folder = next((Path(path).parent for path in paths), Path())
    return message.replace(f"{folder}/", "")


def write_zst(path: Path, *frames: bytes) -> Path:
    zstandard = pytest.importorskip("zstandard")
    path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(frame) for frame in frames))
    return path


def write_parquet(path: Path, columns: dict[str, list[Any]], rows_in_group: int = 7) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), path, row_group_size=rows_in_group)
    return path


def test_every_format_gives_the_same_documents(tmp_path: Path, jsonl: Path, corpus: list[str]) -> None:
    raw = jsonl.read_bytes()
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(raw))
    write_zst(tmp_path / "c.jsonl.zst", raw[:1000], raw[1000:])  # two frames
    write_parquet(tmp_path / "c.parquet", {"id": list(range(60)), "text": corpus})
    for name in ("corpus.jsonl", "c.jsonl.gz", "c.jsonl.zst", "c.parquet"):
        assert read(tmp_path / name) == corpus
        source = Files(FilesSource(paths=[str(tmp_path / name)], validation_fraction=0.3))
        for split in ("train", "validation"):
            documents = list(source.documents(split))
            for at in (0, 3, len(documents) - 1):  # reading goes on from any cursor
                assert list(source.documents(split, documents[at][0])) == documents[at:]
    both = read(tmp_path / "corpus.jsonl", tmp_path / "c.parquet", start=(1, 58))
    assert both == corpus[58:]


def test_a_text_file_is_cut_at_line_ends_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    text = "".join(f"line {i} añ🙂\n" * (1 + i % 3) for i in range(8000)) + "no newline at the end"
    path.write_text(text, encoding="utf-8")
    pieces = read(path)
    assert "".join(pieces) == text and len(pieces) > 5
    assert all(piece.endswith("\n") and PIECE <= len(piece) < PIECE + 20 for piece in pieces[:-1])
    path.write_text("x" * 200_000, encoding="utf-8")  # one line
    assert next(len(piece) for piece in read(path)) == PIECE + LONGEST_LINE and "".join(read(path)) == "x" * 200_000
    path.write_bytes(b"\xef\xbb\xbfwindows\r\nlines\r\n")
    assert read(path) == ["windows\nlines\n"]


@pytest.mark.parametrize("name", ["one.txt", "one.jsonl", "many/*.md"])
def test_no_document_is_in_both_splits(tmp_path: Path, name: str) -> None:
    if name == "one.txt":
        (tmp_path / name).write_text("".join(f"{i:07d}\n" for i in range(60_000)))
    elif name == "one.jsonl":
        (tmp_path / name).write_text("".join(f'{{"text": "{i}"}}\n' for i in range(400)))
    else:
        (tmp_path / "many").mkdir()
        for i in range(40):
            (tmp_path / "many" / f"{i:02d}.md").write_text(str(i))
    training, held_out = (read(tmp_path / name, split=split, validation_fraction=0.2) for split in ("train", "validation"))
    everything = read(tmp_path / name)
    assert sorted(training + held_out) == sorted(everything) and not set(training) & set(held_out)
    assert 0.05 < len(held_out) / len(everything) < 0.4
    assert read(tmp_path / name, split="validation", validation_fraction=0.01)  # a small corpus still has something to validate on


def test_named_validation_files_are_taken_out_of_the_training_glob(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    options = {"validation_paths": [str(tmp_path / "b.txt")], "validation_fraction": 0.5}
    assert read(tmp_path / "*.txt", **options) == ["a", "c"]
    assert read(tmp_path / "*.txt", split="validation", **options) == ["b"]
    assert refusal(tmp_path / "b.txt", **options) == "b.txt: every file is also in validation_paths, so nothing is left to train on"


def test_blank_documents_and_half_surrogates(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": " \\n"}\n{"text": "\\ud83d cut"}\n')
    assert read(path) == ["one", "? cut"]


def test_what_can_be_refused_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(tmp_path / "no.txt") == "no.txt: no such file"
    assert refusal(tmp_path / "*.txt") == "*.txt: no file matches this pattern"
    (tmp_path / "folder").mkdir()
    assert refusal(tmp_path / "folder") == "folder: is a folder; name its files, for example folder/**/*.jsonl"
    (tmp_path / "empty.jsonl").touch()
    assert refusal(tmp_path / "empty.jsonl") == "empty.jsonl: the file is empty"
    for name in ("a.csv", "a.parquet.gz"):
        (tmp_path / name).write_text("x")
        kinds = "a .txt, .md, .jsonl or .parquet file; all but parquet also as .gz or .zst"
        assert refusal(tmp_path / name) == f"{name}: must be {kinds}"
    for name, package in (("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")):
        (tmp_path / name).write_text("x")
        monkeypatch.setitem(sys.modules, package, None)
        kind = name.rpartition(".")[2]
        assert refusal(tmp_path / name) == f"{name}: {kind} needs the package {package}: pip install 'fullband[data]'"


TOO_LONG = "Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "b"', "not valid JSON (Expecting ',' delimiter, column 13); fix or remove this line"),
        ('{"body": "b", "id": 3}', "no field 'text'; the fields there are body, id (set data.source.text_field)"),
        ("{}", "no field 'text'; the fields there are none (set data.source.text_field)"),
        ('{"text": null}', "the field 'text' must be text, got NoneType (set data.source.text_field)"),
        (f'{{"{"k" * 99}": 1}}', f"no field 'text'; the fields there are {'k' * 59}… (set data.source.text_field)"),
        ('{"n": ' + "9" * 5000 + "}", f"not readable as JSON ({TOO_LONG}); fix or remove this line"),
        ("[1]", "a list, not a JSON object with a field 'text'"),
        (b'{"text": "\xff"}', "not valid UTF-8; convert the file, for example with iconv -t UTF-8"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, complaint: str, compressed: bool) -> None:
    content = b'{"text": "a"}\n\n' + (line if isinstance(line, bytes) else line.encode()) + b'\n{"text": "c"}\n'
    path = tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl")
    path.write_bytes(gzip.compress(content) if compressed else content)
    assert refusal(path) == f"{path.name}:3: {complaint}"


def test_broken_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\n" * 5000 + b"caf\xe9\n")
    assert refusal(path) == "a.txt:5001: not valid UTF-8; convert the file, for example with iconv -t UTF-8"


def test_damaged_archives(tmp_path: Path) -> None:
    noise = json.dumps({"text": "".join(chr(97 + i * i % 26) for i in range(9000))}).encode() * 20
    whole = gzip.compress(noise)
    again = "make or download it again, or join its parts"
    for name, content in (("a.jsonl.gz", whole[: len(whole) // 2]), ("b.txt.gz", b"not gzip at all"), ("c.txt.gz", whole[:12] + b"\0" * 9)):
        (tmp_path / name).write_bytes(content)
        message = refusal(tmp_path / name)
        assert message.startswith(f"{name}: a damaged or cut short .gz file (") and message.endswith(again)
    zst = write_zst(tmp_path / "d.txt.zst", noise).read_bytes()
    for content in (zst[:-3], b"not zstd at all", zst + zst[:-3]):
        (tmp_path / "d.txt.zst").write_bytes(content)
        message = refusal(tmp_path / "d.txt.zst")
        assert message.startswith("d.txt.zst: a damaged or cut short .zst file (") and message.endswith(again)


def test_bad_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"id": [1], "body": ["x"]})
    assert refusal(path) == "a.parquet: no field 'text'; the fields there are id, body (set data.source.text_field)"
    assert refusal(path, text_field="id") == "a.parquet: the field 'id' must be text, got int64 (set data.source.text_field)"
    path.write_bytes(b"PAR1 but nothing after it")
    assert refusal(path).startswith("a.parquet: a damaged parquet file, or not one (")
    write_parquet(path, {"text": ["one", None, "three"]})
    assert read(path) == ["one", "three"]


def test_the_fingerprint_follows_content_names_and_settings(tmp_path: Path, jsonl: Path) -> None:
    def fingerprint(path: Path, **options: Any) -> dict[str, str]:
        source: TextSource = Files(FilesSource(paths=[str(path)], **options))
        return source.fingerprint()

    first = fingerprint(jsonl)
    (tmp_path / "moved").mkdir()
    moved = tmp_path / "moved" / jsonl.name
    moved.write_bytes(jsonl.read_bytes())
    assert fingerprint(moved) == first
    assert fingerprint(jsonl, validation_fraction=0.5) != first and fingerprint(jsonl, text_field="x") != first
    content = bytearray(jsonl.read_bytes())
    content[15] ^= 1
    moved.write_bytes(content)
    assert fingerprint(moved) != first
    assert fingerprint(jsonl, validation_paths=[str(moved)]).keys() == {"source", "files", "validation files"}


def test_closing_early_closes_the_file(jsonl: Path) -> None:
    documents = Files(FilesSource(paths=[str(jsonl)])).documents("train")
    assert isinstance(next(documents)[1], str)
    documents.close()


def test_archives_of_several_members_and_of_long_windows(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(40)]
    members = [b"".join(lines[:13]) + lines[13][:7], lines[13][7:], b"", b"".join(lines[14:])]  # a line over two of them, an empty one
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, members)) + bytes(512))  # padded, as tapes are
    zstandard = pytest.importorskip("zstandard")
    skippable = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"  # pzstd writes some
    write_zst(tmp_path / "a.jsonl.zst", *members)
    (tmp_path / "a.jsonl.zst").write_bytes(skippable + (tmp_path / "a.jsonl.zst").read_bytes() + skippable)
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, enable_ldm=True)  # zstd --long=31
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # of unknown size, so the window is as asked
    (tmp_path / "long.jsonl.zst").write_bytes(compressor.compress(b"".join(lines)) + compressor.flush())
    for name in ("a.jsonl.gz", "a.jsonl.zst", "long.jsonl.zst"):
        assert read(tmp_path / name) == [f"document {i}" for i in range(40)]


def test_names_that_look_like_patterns_and_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data [v1]" / "part*"
    folder.mkdir(parents=True)
    for name in ("a.txt", "b[2].txt", "c.txt"):
        (folder / name).write_text(name)
    assert read(folder / "*.txt") == ["a.txt", "b[2].txt", "c.txt"] == read(tmp_path / "data [v1]" / "**" / "*.txt")
    assert read(folder / "b[2].txt") == ["b[2].txt"] and read(folder / "[bc].txt") == ["c.txt"]
    assert read(tmp_path / "data [[]v1]" / "*" / "a.txt") == ["a.txt"], "escaped by hand"
    monkeypatch.setenv("HOME", str(folder.parent))
    assert read("~/part*/c.txt") == ["c.txt"]
    assert [text for _, text in Files(FilesSource(paths="~/part*/a.txt", validation_fraction=0)).documents("train")] == ["a.txt"]
    assert refusal("~nobody-of-this-name/x.txt").endswith("x.txt: no such file")


def test_text_columns_however_they_are_stored(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = ["a", "b", "a", None, "c"] * 3
    for kind in (
        arrow.dictionary(arrow.int32(), arrow.string()),
        arrow.dictionary(arrow.int8(), arrow.large_string()),
        arrow.large_string(),
    ):
        parquet.write_table(arrow.table({"text": arrow.array(texts).cast(kind)}), tmp_path / "a.parquet", row_group_size=4)
        assert read(tmp_path / "a.parquet") == ["a", "b", "a", "c"] * 3
    write_parquet(tmp_path / "numbers.parquet", {"text": [1, 2]})
    assert refusal(tmp_path / "numbers.parquet") == "numbers.parquet: the field 'text' must be text, got int64 (set data.source.text_field)"
    twice = arrow.Table.from_arrays([arrow.array(["a"]), arrow.array(["b"])], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    assert refusal(tmp_path / "twice.parquet") == (
        "twice.parquet: more than one column is called 'text'; rename all but one, or set data.source.text_field"
    )


@pytest.mark.parametrize(
    "texts",
    [
        ["a single document, of a few words. " * 30],
        ["one\n" * 40, "two\n" * 900],
        ["word " * 30],
        ["no-space-at-all" * 100],
        ["ab"],
        ["first", "a"],
    ],
)
@pytest.mark.parametrize("fraction", [0.02, 0.5, 0.97])
def test_a_source_too_small_for_a_split_has_its_end_held_out(tmp_path: Path, texts: list[str], fraction: float) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    training, held = (read(path, split=split, validation_fraction=fraction) for split in ("train", "validation"))
    assert "".join(training + held) == "".join(texts) and training and held
    if (characters := len("".join(texts))) > 100 and fraction == 0.02:
        assert 0.1 < len("".join(held)) / characters < 0.5
    source = Files(FilesSource(paths=str(path), validation_fraction=fraction))
    for split in ("train", "validation"):
        documents = list(source.documents(split))
        assert list(source.documents(split, documents[-1][0])) == documents[-1:], "reading goes on from any cursor"
    if source.notices():
        assert source.notices()[0].startswith(f"{path}: too few documents to hold out a whole one, so the end of the text is held out: ")


def test_a_single_character_is_not_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert sorted(
        read(tmp_path / "a.txt", validation_fraction=0.02) + read(tmp_path / "a.txt", split="validation", validation_fraction=0.02)
    ) == ["a"]


def test_a_large_source_is_not_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullband.data.files.SMALL", 100)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i:050d}"}) + "\n" for i in range(5)) + "not JSON\n")
    source = Files(FilesSource(paths=[str(path)], validation_fraction=1e-9))
    assert len(next(iter(source.documents("train")))[1]) == 50 and not source.notices()


def test_zst_reads_in_small_steps(tmp_path: Path) -> None:
    from fullband.data.compressed import _ZstdReader

    path = write_zst(tmp_path / "a.zst", b"abc" * 100_000, b"", b"end")
    reader = io.BufferedReader(_ZstdReader(path), buffer_size=7)
    assert reader.read(3) == b"abc" and reader.read() == b"abc" * 99_999 + b"end"
