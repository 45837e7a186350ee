"""The images of one shard, which of them are there and where they lie: some 20 bytes an image."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import accumulate
from pathlib import Path

from offline_diffusion.data.partial import ImageKey, Slot
from offline_diffusion.data.rows import ManifestRow, RowFault

_MISSING, _OK, _FAILED = 0, 1, 2


class ShardImages:
    """Every image that the rows of a shard ask for, numbered in manifest order; 8 bytes a row.

    Args:
        rows: The shard's rows, in order; a ``RowFault`` asks for no image.
    """

    def __init__(self, rows: Sequence[ManifestRow | RowFault]) -> None:
        self._first_row = rows[0].row if rows else 0
        self._starts = array("q", accumulate(map(_num_images, rows), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def span(self, row: int) -> range:
        """The numbers of a row's images; empty for a row of another shard."""
        place = row - self._first_row
        if not 0 <= place < len(self._starts) - 1:
            return range(0)
        return range(self._starts[place], self._starts[place + 1])

    def number(self, key: ImageKey) -> int | None:
        """The number of an image, or None when the shard does not ask for it."""
        row, image_index = key
        span = self.span(row)
        return span[image_index] if 0 <= image_index < len(span) else None

    def key(self, number: int) -> ImageKey:
        place = bisect_right(self._starts, number) - 1  # of rows without images the last is meant
        return self._first_row + place, number - self._starts[place]


def _num_images(row: ManifestRow | RowFault) -> int:
    return 0 if isinstance(row, RowFault) else row.params.num_images_per_prompt


class ImageKeys(Set[ImageKey]):
    """Some of a shard's images: a set of ``(row, image_index)`` that takes a byte an image and never changes.

    Args:
        images: All of them.
        chosen: For each number whether it is in; what lies beyond the end is not.
    """

    def __init__(self, images: ShardImages, chosen: bytes) -> None:
        self._images, self._chosen = images, chosen

    @classmethod
    def all_of(cls, images: ShardImages) -> ImageKeys:
        return cls(images, b"\1" * len(images))

    @classmethod
    def _from_iterable(cls, keys: Iterable[ImageKey]) -> Set[ImageKey]:  # type: ignore[override]
        return set(keys)

    def __contains__(self, key: object) -> bool:
        number = self._images.number(key) if isinstance(key, tuple) else None
        return number is not None and number < len(self._chosen) and self._chosen[number] != 0

    def __len__(self) -> int:
        return len(self._chosen) - self._chosen.count(0)

    def __iter__(self) -> Iterator[ImageKey]:
        return (self._images.key(number) for number, flag in enumerate(self._chosen) if flag)

    def num_in_row(self, row: int) -> int:
        """How many images of a row are in."""
        span = self._images.span(row)
        chosen = self._chosen[span.start : span.stop]
        return len(chosen) - chosen.count(0)


class SlotTable:
    """Where the finished images of a shard lie. It is as long as its last finished image asks for."""

    def __init__(self, images: ShardImages) -> None:
        self._images = images
        self._paths: list[Path] = []
        self._states = bytearray()
        self._files, self._offsets, self._lengths = array("i"), array("q"), array("q")
        self.num_ok = self.num_failed = 0

    def __len__(self) -> int:
        return self.num_ok + self.num_failed

    def __contains__(self, key: ImageKey) -> bool:
        return self.get(key) is not None

    def get(self, key: ImageKey) -> Slot | None:
        number = self._images.number(key)
        if number is None or number >= len(self._states) or self._states[number] == _MISSING:
            return None
        path = self._paths[self._files[number]]
        status = "ok" if self._states[number] == _OK else "failed"
        return Slot(path, self._offsets[number], self._lengths[number], status)

    def __getitem__(self, key: ImageKey) -> Slot:
        slot = self.get(key)
        assert slot is not None, f"image {key} is not finished"
        return slot

    def __setitem__(self, key: ImageKey, slot: Slot) -> None:
        number = self._images.number(key)
        assert number is not None, f"image {key} is not of this shard"
        self._reach(number)
        before, now = self._states[number], _OK if slot.status == "ok" else _FAILED
        self.num_ok += (now == _OK) - (before == _OK)
        self.num_failed += (now == _FAILED) - (before == _FAILED)
        self._states[number] = now
        self._files[number] = self._file(slot.path)
        self._offsets[number], self._lengths[number] = slot.offset, slot.length

    def _reach(self, number: int) -> None:
        more = number + 1 - len(self._states)
        if more > 0:
            self._states.extend(bytes(more))
            for column in (self._files, self._offsets, self._lengths):
                column.frombytes(bytes(more * column.itemsize))

    def _file(self, path: Path) -> int:
        if not self._paths or self._paths[-1] != path:  # images of one file come one after the other
            if path in self._paths:
                return self._paths.index(path)
            self._paths.append(path)
        return len(self._paths) - 1

    def keys(self) -> ImageKeys:
        """The finished images, as of now."""
        return ImageKeys(self._images, bytes(self._states))

    def missing(self) -> ImageKeys:
        """The others, as of now."""
        others = bytes(self._states.translate(_IS_MISSING))
        return ImageKeys(self._images, others + b"\1" * (len(self._images) - len(others)))


_IS_MISSING = bytes([1]) + bytes(255)
