"""How many rows of a Parquet file may be decoded at once, whatever the file makes of few bytes.

A dictionary page of one long value serves any number of rows in a few bytes, and so do the levels of one
long list. What a batch may come to is therefore taken from the largest value, not from the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from offline_diffusion.data.readers.base import DamagedError
from offline_diffusion.data.readers.thrift import ThriftError, read_struct

MAX_BATCH_ROWS = 1024
MEAN_BATCH_BYTES = 8 * 2**20
MAX_BATCH_BYTES = 64 * 2**20
"""Reached only where every row of a batch has the longest value of a dictionary."""
MAX_DICTIONARY_BYTES = 64 * 2**20
"""Of one dictionary page; writers end one at 1 or 2 MiB."""
MAX_LIST_VALUES = 2**24
"""Of a batch, in one column of lists."""
MAX_PACKED_VALUES, MAX_VALUES_A_BYTE = 2**28, 1000
"""A row group with more values in a column of lists, and more of them in a byte, is refused."""
MAX_FOOTER_BYTES = 256 * 2**20

_TAIL_BYTES = 8  # the footer's length and the magic
_PAGE_HEADER_BYTES = 1024
_BYTE_ARRAY, _REPEATED, _DICTIONARY_PAGE, _DELTA_BYTE_ARRAY = 6, 2, 2, 7  # parquet.thrift

# Fields of parquet.thrift by number.
_SCHEMA, _ROW_GROUPS = 2, 4
_REPETITION, _NAME, _NUM_CHILDREN = 3, 4, 5
_COLUMNS, _TOTAL_BYTES, _NUM_ROWS = 1, 2, 3
_META = 3
_TYPE, _ENCODINGS, _PATH, _NUM_VALUES, _NUM_BYTES, _DATA_OFFSET, _DICTIONARY_OFFSET = 1, 2, 3, 5, 6, 9, 11
_PAGE_TYPE, _PAGE_BYTES = 1, 2

Struct = dict[int, Any]


class ParquetBounds:
    """The bounds of one file.

    Args:
        stream: The file; only its end is read.

    Raises:
        DamagedError: Its metadata makes no sense.
    """

    def __init__(self, stream: BinaryIO) -> None:
        with _damage():
            footer = _footer(stream)
            self._groups = footer.get(_ROW_GROUPS, [])
            self._in_list = _columns_in_lists(footer[_SCHEMA])
            if sum(group[_NUM_ROWS] for group in self._groups) != footer[_NUM_ROWS]:
                raise ThriftError("its row groups have not as many rows as the file")

    def batch_rows(self, group: int, stream: BinaryIO) -> int:
        """Rows of a row group that may be decoded at once, at least 1.

        Args:
            group: The row group's index.
            stream: The file; the headers of its first pages are read.

        Raises:
            DamagedError: Its metadata makes no sense, or a column expands beyond all measure.
        """
        with _damage():
            return _batch_rows(self._groups[group], self._in_list, stream)


@contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except ThriftError as error:
        raise DamagedError(str(error)) from None
    except (LookupError, TypeError, AttributeError, ValueError):  # a field is not there, or is something else
        raise DamagedError("its metadata is damaged") from None


def _footer(stream: BinaryIO) -> Struct:
    end = stream.seek(0, 2)
    stream.seek(max(0, end - _TAIL_BYTES))
    num_bytes = int.from_bytes(stream.read(4), "little")
    if num_bytes > min(MAX_FOOTER_BYTES, end - _TAIL_BYTES):
        raise ThriftError(f"{num_bytes} bytes of metadata in {end} bytes")
    stream.seek(end - _TAIL_BYTES - num_bytes)
    return read_struct(stream.read(num_bytes))


def _columns_in_lists(schema: list[Struct]) -> list[bool]:
    """For each column whether it lies in a list; the schema is a tree, written depth first."""
    leaves = []
    open_nodes = [(schema[0].get(_NUM_CHILDREN, 0), False)]
    for node in schema[1:]:
        while open_nodes and not open_nodes[-1][0]:
            open_nodes.pop()
        num_left, in_list = open_nodes.pop()
        open_nodes.append((num_left - 1, in_list))
        in_list = in_list or node.get(_REPETITION) == _REPEATED
        if num_children := node.get(_NUM_CHILDREN, 0):
            open_nodes.append((num_children, in_list))
        else:
            leaves.append(in_list)
    return leaves


def _batch_rows(group: Struct, columns_in_lists: list[bool], stream: BinaryIO) -> int:
    if group[_NUM_ROWS] < 0:
        raise ThriftError("a row group has fewer than no rows")
    if not group[_NUM_ROWS]:
        return 1  # it has no pages either
    num_rows = group[_NUM_ROWS]
    allowed = min(MAX_BATCH_ROWS, MEAN_BATCH_BYTES // max(1, group[_TOTAL_BYTES] // num_rows))
    longest = 0
    for column, in_list in zip(group[_COLUMNS], columns_in_lists, strict=True):
        chunk = column[_META]
        values_a_row = max(1, chunk[_NUM_VALUES] // num_rows)
        if not in_list and chunk[_NUM_VALUES] != group[_NUM_ROWS]:
            raise ThriftError(f"column {_name(chunk)} has not as many values as its row group has rows")
        if in_list:
            _check_lists(chunk)
            allowed = min(allowed, MAX_LIST_VALUES // values_a_row)
        if chunk[_TYPE] == _BYTE_ARRAY:
            longest += _longest_value(chunk, stream) * values_a_row
    return int(max(1, min(allowed, MAX_BATCH_BYTES // max(1, longest))))


def _name(chunk: Struct) -> str:
    return ".".join(part.decode("utf-8", "backslashreplace") for part in chunk[_PATH])


def _check_lists(chunk: Struct) -> None:
    num_values, num_bytes = chunk[_NUM_VALUES], max(1, chunk[_NUM_BYTES])
    if num_values > max(MAX_PACKED_VALUES, MAX_VALUES_A_BYTE * num_bytes):
        raise DamagedError(
            f"column {_name(chunk)} has {num_values} values in {num_bytes} bytes; lists of over "
            f"{MAX_PACKED_VALUES} values must not have more than {MAX_VALUES_A_BYTE} a byte"
        )


def _longest_value(chunk: Struct, stream: BinaryIO) -> int:
    """Bytes that a value can have without taking up room of its own; 0 where each takes up its own."""
    if _DELTA_BYTE_ARRAY in chunk[_ENCODINGS]:  # each value may begin as the one before
        return int(chunk[_NUM_BYTES])
    start, dictionary = chunk[_DATA_OFFSET], chunk.get(_DICTIONARY_OFFSET, 0)
    stream.seek(dictionary if 0 < dictionary < start else start)
    header = read_struct(stream.read(_PAGE_HEADER_BYTES))
    # A page that turns out to have another size than its header says is refused by Arrow.
    num_bytes = int(header[_PAGE_BYTES]) if header[_PAGE_TYPE] == _DICTIONARY_PAGE else 0
    if num_bytes > MAX_DICTIONARY_BYTES:
        raise DamagedError(
            f"column {_name(chunk)} has a dictionary of {num_bytes} bytes; "
            f"at most {MAX_DICTIONARY_BYTES} are allowed"
        )
    return num_bytes
