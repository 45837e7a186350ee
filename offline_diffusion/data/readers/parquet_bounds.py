"""How many rows of a Parquet file may be decoded at once, whatever the file makes of few bytes.

A dictionary page of one long value serves any number of rows in a few bytes, and so do the levels of one
long list. What a batch may come to is therefore taken from the largest value, not from the mean.
"""

from __future__ import annotations

from typing import BinaryIO

import pyarrow.parquet as pq

from offline_diffusion.data.readers.base import DamagedError

MAX_BATCH_ROWS = 1024
MEAN_BATCH_BYTES = 8 * 2**20
MAX_BATCH_BYTES = 256 * 2**20
"""Reached only where every row of a batch has the longest value of a dictionary."""
MAX_DICTIONARY_BYTES = 64 * 2**20
"""Of one dictionary page; writers end one at 1 or 2 MiB."""
MAX_LIST_VALUES = 2**24
"""Of a batch, in one column of lists."""
MAX_PACKED_VALUES, MAX_VALUES_A_BYTE = 2**28, 1000
"""A row group with more values in a column of lists, and more of them in a byte, is refused."""

_PAGE_HEADER_BYTES = 16
_I32_FIELD = 0x15  # the next field of a struct, in Thrift's compact protocol
_DICTIONARY_PAGE = 2


def batch_rows_of(group: pq.RowGroupMetaData, schema: pq.ParquetSchema, stream: BinaryIO) -> int:
    """Rows of a row group that may be decoded at once, at least 1.

    Args:
        group: The row group.
        schema: Of the file.
        stream: The file, to look at the headers of dictionary pages.

    Raises:
        DamagedError: A column expands beyond all measure.
    """
    num_rows = max(1, group.num_rows)
    bytes_a_row = max(1, group.total_byte_size // num_rows)
    allowed = min(MAX_BATCH_ROWS, MEAN_BATCH_BYTES // bytes_a_row)
    longest = 0
    for index in range(group.num_columns):
        chunk = group.column(index)
        values_a_row = max(1, chunk.num_values // num_rows)
        if schema.column(index).max_repetition_level:
            _check_lists(chunk)
            allowed = min(allowed, MAX_LIST_VALUES // values_a_row)
        if chunk.physical_type == "BYTE_ARRAY":
            longest += _longest_value(chunk, stream) * values_a_row
    return int(max(1, min(allowed, MAX_BATCH_BYTES // max(1, longest))))


def _check_lists(chunk: pq.ColumnChunkMetaData) -> None:
    num_bytes = max(1, chunk.total_uncompressed_size)
    if chunk.num_values > max(MAX_PACKED_VALUES, MAX_VALUES_A_BYTE * num_bytes):
        raise DamagedError(
            f"column {chunk.path_in_schema} has {chunk.num_values} values in {num_bytes} bytes; lists of over "
            f"{MAX_PACKED_VALUES} values must not have more than {MAX_VALUES_A_BYTE} a byte"
        )


def _longest_value(chunk: pq.ColumnChunkMetaData, stream: BinaryIO) -> int:
    """Bytes that one value can have which takes up no room of its own; 0 where each takes up its own."""
    if "DELTA_BYTE_ARRAY" in chunk.encodings:  # each value may begin as the one before
        return int(chunk.total_uncompressed_size)
    start = chunk.data_page_offset
    if 0 < (chunk.dictionary_page_offset or 0) < start:
        start = chunk.dictionary_page_offset
    stream.seek(start)
    num_bytes = dictionary_bytes(stream.read(_PAGE_HEADER_BYTES))
    if num_bytes > MAX_DICTIONARY_BYTES:
        raise DamagedError(
            f"column {chunk.path_in_schema} has a dictionary of {num_bytes} bytes; "
            f"at most {MAX_DICTIONARY_BYTES} are allowed"
        )
    return num_bytes


def dictionary_bytes(header: bytes) -> int:
    """The size, uncompressed, of the dictionary page whose header begins so; 0 for any other page.

    A page's header begins with two 32-bit fields, its type and its size. A page that turns out to have
    another size is refused by Arrow.
    """
    kind, rest = _int_field(header)
    return _int_field(rest)[0] if kind == _DICTIONARY_PAGE else 0


def _int_field(data: bytes) -> tuple[int, bytes]:
    """The number in a field of Thrift's compact protocol, and what follows; 0 where there is no such field."""
    number = 0
    if data[:1] == bytes([_I32_FIELD]):
        for index, byte in enumerate(data[1:6]):
            number |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                return number >> 1, data[index + 2 :]
    return 0, b""
