"""Which reader a file needs: told by its content, with the suffix as a tie-break."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from offline_diffusion.data.columns import KNOWN_COLUMNS, names_prompt
from offline_diffusion.data.readers.arrow import ParquetReader
from offline_diffusion.data.readers.base import BrokenRecord, DamagedError, Reader
from offline_diffusion.data.readers.delimited import DELIMITERS, DelimitedReader, read_header
from offline_diffusion.data.readers.document import ElementSplitter, JsonDocumentReader
from offline_diffusion.data.readers.files import (
    BOM,
    HEAD_BYTES,
    ByteStream,
    DataFile,
    detect_codec,
    iter_lines,
)
from offline_diffusion.data.readers.json_text import decode_json
from offline_diffusion.data.readers.lines import JsonLinesReader, PromptLinesReader
from offline_diffusion.errors import ManifestError

FORMATS_HINT = (
    "known are Parquet, JSONL, JSON, CSV, TSV and .txt (a prompt a line), the text formats also "
    "compressed with gzip, zstd, bz2, xz or lz4, and folders of them"
)
CODEC_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".xz", ".lz4")
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
DELIMITER_BY_SUFFIX = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
PROMPT_SUFFIXES = (".txt", ".text", ".prompts", ".lst", "")
DATA_SUFFIXES = (".parquet", ".pq", ".json", *JSON_LINES_SUFFIXES, *DELIMITER_BY_SUFFIX)
"""What counts as data in a folder, besides ``.txt``."""
NUM_LINES_LOOKED_AT = 100

_ARROW_FILE = "is an Arrow file"
_KNOWN_BUT_UNREADABLE = (
    (b"ARROW1", _ARROW_FILE, "give the folder that save_to_disk made, or write Parquet"),
    (b"\xff\xff\xff\xff", _ARROW_FILE, "give the folder that save_to_disk made, or write Parquet"),
    (b"PARE", "is an encrypted Parquet file", "decrypt it first"),
    (b"PK\x03\x04", "is a zip archive or a spreadsheet", "unpack it, or save the sheet as CSV"),
    (b"version https://git-lfs", "is a Git LFS pointer, not the file itself", "git lfs pull"),
    (b"\xff\xfe", "is UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "is UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"<!DOCTYPE", "is a web page", "was a login or an error page saved instead of the file?"),
    (b"<!doctype", "is a web page", "was a login or an error page saved instead of the file?"),
    (b"<html", "is a web page", "was a login or an error page saved instead of the file?"),
)


def suffix_of(name: str) -> str:
    """The suffix that names the format: in lower case, that of a compression left out."""
    path = PurePosixPath(name.lower())
    while path.suffix in CODEC_SUFFIXES:
        path = path.with_suffix("")
    return path.suffix


def open_reader(file: DataFile, *, suffix: str | None = None, prompt_columns: tuple[str, ...] = ()) -> Reader:
    """The reader for ``file``.

    Args:
        file: The file.
        suffix: The format's suffix where the name has none of its own.
        prompt_columns: More names of a prompt column, for telling a header from a prompt.

    Raises:
        ManifestError: The file is empty, or its content is none that is known.
    """
    head = file.head()
    if not head.removeprefix(BOM).strip():
        raise ManifestError(f"{file.name}: is empty")
    if head.startswith(b"PAR1"):
        return _parquet(file)
    for start, problem, hint in _KNOWN_BUT_UNREADABLE:
        if head.startswith(start):
            raise ManifestError(f"{file.name}: {problem}", hint=hint)
    if b"\0" in head:
        raise ManifestError(f"{file.name}: is neither text nor Parquet", hint=FORMATS_HINT)
    return _text_reader(file, head, suffix_of(file.name) if suffix is None else suffix, prompt_columns)


def _parquet(file: DataFile) -> ParquetReader:
    with file.open() as stream:
        if detect_codec(stream.read(8)) is not None:
            raise ManifestError(f"{file.name}: is a compressed Parquet file", hint="decompress it first")
    reader = ParquetReader(file)
    reader.check_codecs()
    return reader


def _text_reader(file: DataFile, head: bytes, suffix: str, prompt_columns: tuple[str, ...]) -> Reader:
    if (json_reader := _json_reader(file, head, suffix)) is not None:
        return json_reader
    if (delimited := _delimited_reader(file, head, suffix, prompt_columns)) is not None:
        return delimited
    if suffix in PROMPT_SUFFIXES:
        return PromptLinesReader(file)
    problem = "is no JSON list or object" if suffix == ".json" else "holds none of the known formats"
    raise ManifestError(f"{file.name}: {problem}", hint=FORMATS_HINT)


def _json_reader(file: DataFile, head: bytes, suffix: str) -> Reader | None:
    lines = [line for _, line in iter_lines(_as_stream(head)) if line.strip()]
    if len(head) == HEAD_BYTES:
        lines.pop()  # cut off, most likely
    values = [decode_json(line) for line in lines[:NUM_LINES_LOOKED_AT]]
    num_objects = sum(isinstance(value, dict) for value in values)
    is_lines = suffix in JSON_LINES_SUFFIXES or num_objects * 2 > len(values)
    if _is_document(head, values, suffix) or (is_lines and _maps_ids(values, suffix)):
        _refuse_single_object(file, head)
        return JsonDocumentReader(file)
    if is_lines or (not values and head.removeprefix(BOM).lstrip().startswith(b"{")):
        return JsonLinesReader(file)
    return None


def _is_document(head: bytes, values: list[Any], suffix: str) -> bool:
    """Whether the lines belong to one JSON value (``values`` is what each line holds on its own)."""
    opening = head.removeprefix(BOM).lstrip()[:1]
    if opening not in (b"[", b"{") or not _starts_document(head):
        return False
    if not values:  # the first line is longer than the head
        return opening == b"[" or not _is_one_long_row(head, suffix)
    if not isinstance(values[0], BrokenRecord):  # the first line is complete in itself
        return len(values) == 1 and isinstance(values[0], list)
    num_objects = sum(isinstance(value, dict) for value in values)
    # In a list that is written a row a line, the last row can be an object in itself: no comma follows it.
    return num_objects * 2 <= len(values) if opening == b"[" else not num_objects


def _is_one_long_row(head: bytes, suffix: str) -> bool:
    """Whether the object that fills the head is a row, not an object of ids."""
    entries = [entry for entry in islice(_elements(head), NUM_LINES_LOOKED_AT) if isinstance(entry, dict)]
    keys = [key for entry in entries for key in entry]
    if not entries or any(names_prompt(key) or key in KNOWN_COLUMNS for key in keys):
        return True
    values = [value for entry in entries for value in entry.values()]
    return suffix in JSON_LINES_SUFFIXES and not all(isinstance(value, dict) for value in values)


def _maps_ids(values: list[Any], suffix: str) -> bool:
    """Whether the only line is an object of ids to prompts or rows."""
    if len(values) != 1 or not isinstance(values[0], dict) or not values[0]:
        return False
    if "custom_id" in values[0] or any(names_prompt(key) for key in values[0]):
        return False
    return all(
        any(names_prompt(key) for key in entry)
        if isinstance(entry, dict)
        else isinstance(entry, str) and suffix not in JSON_LINES_SUFFIXES
        for entry in values[0].values()
    )


def _elements(head: bytes) -> Iterator[Any]:
    """What ``head`` holds of the elements of one JSON list or object: an entry is an object of one key."""
    splitter = ElementSplitter(_as_stream(head))
    try:
        for _, raw in splitter:
            yield decode_json(b"{" + raw + b"}" if splitter.is_object else raw)
    except DamagedError:  # the head ends before the document does
        return


def _starts_document(head: bytes) -> bool:
    """Whether ``head`` begins a list or an object whose first complete element is sound."""
    first = next(_elements(head), None)
    if first is not None:
        return not isinstance(first, BrokenRecord)
    # No element is complete: an empty document, or one element larger than the head.
    return len(head) == HEAD_BYTES or not head.strip(b" \t\r\n[]{}" + BOM)


def _refuse_single_object(file: DataFile, head: bytes) -> None:
    first = next(_elements(head), None)
    is_object = head.removeprefix(BOM).lstrip().startswith(b"{")
    if is_object and isinstance(first, dict) and any(names_prompt(key) for key in first):
        raise ManifestError(
            f"{file.name}: is one row written over several lines", hint="put it in a list: [{…}]"
        )


def _delimited_reader(
    file: DataFile, head: bytes, suffix: str, prompt_columns: tuple[str, ...]
) -> DelimitedReader | None:
    declared = DELIMITER_BY_SUFFIX.get(suffix)
    # A first line with commas may be a prompt; one with a tab beside a prompt column's name is a header.
    candidates = ["\t"] if declared is None and suffix in PROMPT_SUFFIXES else list(DELIMITERS)
    if declared is not None:
        candidates.remove(declared)
        candidates.insert(0, declared)
    for delimiter in candidates:
        header = _header_or_none(file, head, delimiter) or ()
        has_prompt = any(names_prompt(column) or column in prompt_columns for column in header)
        if has_prompt and (len(header) > 1 or delimiter == declared):
            return DelimitedReader(file, delimiter, header)
    return (
        None if declared is None else DelimitedReader(file, declared, read_header(file.name, head, declared))
    )


def _header_or_none(file: DataFile, head: bytes, delimiter: str) -> tuple[str, ...] | None:
    try:
        return read_header(file.name, head, delimiter)
    except ManifestError:
        return None


def _as_stream(head: bytes) -> ByteStream:
    return io.BufferedReader(io.BytesIO(head))
