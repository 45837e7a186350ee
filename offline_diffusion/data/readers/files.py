"""Bytes of manifest files, wherever they lie and however they are compressed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import pyarrow as pa

from offline_diffusion.data.readers.base import DamagedError, Stamp
from offline_diffusion.data.readers.remote_files import RemoteFiles
from offline_diffusion.errors import ManifestError, OffdiffError

try:
    import lzma
except ImportError:  # Python can be built without it
    lzma = None  # type: ignore[assignment]

READ_ERRORS: tuple[type[Exception], ...] = (DamagedError, OSError, EOFError, pa.ArrowException)
"""What a file that breaks off or is damaged raises."""
if lzma is not None:
    READ_ERRORS += (lzma.LZMAError,)

DAMAGED_HINT = "is the file cut off or damaged?"

ByteStream: TypeAlias = "io.BufferedReader[Any]"

HEAD_BYTES = 256 * 1024
MAX_LINE_BYTES = 16 * 2**20
MAX_PASSED_BYTES = 256 * 2**20
"""A row over ``MAX_LINE_BYTES`` is passed over; one that does not end within these stops the reading."""
MAX_LAYERS = 3
"""Of compression. There are files that hold themselves, compressed."""
MAX_XZ_BYTES = 256 * 2**20
"""What a file in xz may want for its dictionary; ``xz -9`` wants 64 MiB."""
BUFFER_BYTES = 128 * 1024
BOM = b"\xef\xbb\xbf"

_CODECS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bz2",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}
_SKIPPABLE_ZSTD = b"\x2a\x4d\x18"
"""Bytes 2 to 4 of the skippable frame that pzstd puts first."""


@dataclass(frozen=True)
class DataFile:
    """A file of a manifest.

    Args:
        name: As the user gave or globbed it.
        elsewhere: The file system it is on; None for the one here.
        path: Its path there.
        keep_alive: Something that must live as long as the file, such as a temporary file.
    """

    name: str
    elsewhere: RemoteFiles | None
    path: str
    keep_alive: Any = None

    @property
    def is_local(self) -> bool:
        return self.elsewhere is None

    def open(self) -> BinaryIO:
        """The raw bytes.

        Raises:
            ManifestError: It cannot be opened.
            JobInterrupted: What it lies on cannot be reached for too long; so for all that reads from it.
        """
        try:
            if self.elsewhere is None:
                return Path(self.path).open("rb")
            return cast(BinaryIO, self.elsewhere.open(self.path))
        except OffdiffError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise ManifestError(f"{self.name}: cannot be opened: {error}") from None

    @contextlib.contextmanager
    def open_decompressed(self) -> Iterator[ByteStream]:
        """The bytes with every layer of compression taken off, detected by content.

        Raises:
            ManifestError: It cannot be opened, or this installation lacks the codec.
        """
        with contextlib.ExitStack() as layers:
            stream: ByteStream = layers.enter_context(
                io.BufferedReader(cast(io.RawIOBase, self.open()), BUFFER_BYTES)
            )
            num_layers = 0
            while (codec := detect_codec(stream.peek(8)[:8])) is not None:
                num_layers += 1
                if num_layers > MAX_LAYERS:
                    raise DamagedError(f"it is compressed more than {MAX_LAYERS} times over")
                inner = layers.enter_context(_decompress(stream, codec, self.name))
                stream = layers.enter_context(io.BufferedReader(inner, BUFFER_BYTES))
            yield stream

    @cached_property
    def is_compressed(self) -> bool:
        """Whether it must be read from its beginning."""
        with self.open() as stream:
            return detect_codec(stream.read(8)) is not None

    def head(self) -> bytes:
        """Up to the first 256 KiB, decompressed.

        Raises:
            ManifestError: They cannot be read.
        """
        try:
            with self.open_decompressed() as stream:
                return bytes(stream.read(HEAD_BYTES))
        except READ_ERRORS as error:
            raise ManifestError(f"{self.name}: cannot be read: {error}", hint=DAMAGED_HINT) from None

    def stamp(self) -> Stamp:
        """What tells whether it was touched.

        Raises:
            ManifestError: The file is gone.
        """
        try:
            if self.elsewhere is None:
                status = os.stat(self.path)
                return Stamp(status.st_size, status.st_mtime_ns)
            return self.elsewhere.stamp(self.path, self.elsewhere.info(self.path))
        except FileNotFoundError:
            raise gone(self.name) from None
        except OSError as error:
            raise ManifestError(f"{self.name}: cannot be read: {error}") from None

    def digest(self) -> str:
        """BLAKE2b over the bytes as stored."""
        return digest_of(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """The bytes as stored, in small parts."""
        with self.open() as stream:
            yield from iter(lambda: stream.read(BUFFER_BYTES), b"")


def gone(name: str) -> ManifestError:
    """The error of a file that is not there when it is read."""
    return ManifestError(
        f"{name}: cannot be read: it is not there", hint="once it is there, the same command goes on"
    )


def digest_of(chunks: Iterator[bytes]) -> str:
    """BLAKE2b (32 hex digits) over the concatenation of ``chunks``."""
    digest = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def detect_codec(magic: bytes) -> str | None:
    """The name of the compression whose files start with ``magic``."""
    if magic[1:4] == _SKIPPABLE_ZSTD and 0x50 <= magic[0] <= 0x5F:
        return "zstd"
    return next((codec for start, codec in _CODECS.items() if magic.startswith(start)), None)


def _decompress(stream: ByteStream, codec: str, name: str) -> io.RawIOBase:
    # Arrow's streams, unlike Python's own for zstd, take several frames and tell when one is cut off.
    require_codec(name, codec)
    if codec == "xz":
        return _XzStream(stream)
    return cast(io.RawIOBase, pa.CompressedInputStream(pa.PythonFile(stream, "r"), codec))


class _XzStream(io.RawIOBase):
    """What ``lzma.LZMAFile`` reads, but with a limit on the memory that a file may ask for."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._decoder = self._new_decoder()

    @staticmethod
    def _new_decoder() -> Any:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_XZ_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """As `io.RawIOBase.readinto`.

        Raises:
            EOFError: The file is cut off.
            lzma.LZMAError: It is damaged, or wants more memory than it may.
        """
        data = b""
        while not data:
            if self._decoder.eof:
                rest = self._decoder.unused_data.lstrip(b"\0") or self._next_stream()
                if not rest:
                    return 0
                self._decoder = self._new_decoder()
            elif self._decoder.needs_input:
                if not (rest := self._stream.read1(BUFFER_BYTES)):
                    raise EOFError("the compressed data is cut off")
            else:
                rest = b""
            data = self._decoder.decompress(rest, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _next_stream(self) -> bytes:
        """What follows a stream and its padding of zeros."""
        while rest := self._stream.read1(BUFFER_BYTES):
            if rest := rest.lstrip(b"\0"):
                return rest
        return b""


def require_codec(name: str, codec: str) -> None:
    """Checks that this installation can read what is compressed with ``codec``.

    Raises:
        ManifestError: It cannot.
    """
    if not codec_works(codec):
        how = "install a Python with liblzma" if codec == "xz" else "pip install --force-reinstall pyarrow"
        raise ManifestError(f"{name}: is compressed with {codec}, which is not available here", hint=how)


def codec_works(codec: str) -> bool:
    """Whether this installation has a codec."""
    if codec == "xz":
        return lzma is not None
    try:
        return bool(pa.Codec.is_available(codec))
    except ValueError:  # one that Arrow does not know at all, such as lzo
        return False


def iter_lines(stream: ByteStream) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 and lines without their ending; see ``iter_whole_lines``."""
    for number, _, line in iter_whole_lines(stream):
        yield number, without_ending(line)


def without_ending(line: bytes) -> bytes:
    """``line`` without LF or CRLF at its end."""
    if line.endswith(b"\r\n"):
        return line[:-2]
    return line[:-1] if line.endswith(b"\n") else line


def iter_whole_lines(
    stream: ByteStream, number: int = 1, offset: int = 0
) -> Iterator[tuple[int, int, bytes]]:
    """Line numbers, byte offsets, and lines with their ending; a BOM is dropped.

    A line over ``MAX_LINE_BYTES`` comes cut to that length and one more byte.

    Args:
        stream: Where a line begins.
        number, offset: Of that line.

    Raises:
        DamagedError: A line does not end within ``MAX_PASSED_BYTES``.
    """
    if not offset and stream.peek(3)[:3] == BOM:
        offset = len(stream.read(3))
    read: Callable[[], bytes] = lambda: stream.readline(MAX_LINE_BYTES + 1)  # noqa: E731
    for numbered, line in enumerate(iter(read, b""), start=number):
        yield numbered, offset, line
        rest, num_bytes = line, len(line)
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = read()
            num_bytes += len(rest)
            if num_bytes > MAX_PASSED_BYTES:
                raise DamagedError(f"line {numbered} does not end within {MAX_PASSED_BYTES} bytes")
        offset += num_bytes
