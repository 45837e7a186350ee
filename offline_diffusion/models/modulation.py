"""What a model derives from a timestep alone, computed once per distinct timestep."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from offline_diffusion.kernels.linear import MIN_ROWS
from offline_diffusion.upload import upload

NUM_SLOTS = 256
"""Timesteps kept at first; Qwen-Image at full size takes 4.4 MB for each. In bfloat16 there are about 700
distinct ones from 0 to 1000."""


class ModulationTable:
    """Rows of modulation by timestep, the least recently used ones replaced.

    A row costs reading all modulation weights, whether one is computed or `MIN_ROWS`; so with the missing
    rows those that the requests will need next are computed too. A row's bits do not depend on the others.

    Args:
        width: W, channels of a row.
        compute: ``[n]`` float32 timesteps on the device → the rows' columns from left to right, in parts
            ``[n, …]``.
        dtype: Of the rows; timesteps that are equal in it share a row.
        device: Of the table.
        num_slots: Timesteps kept at first.
    """

    def __init__(
        self,
        width: int,
        compute: Callable[[Tensor], Iterable[Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        self._width, self._compute, self._dtype, self._device = width, compute, dtype, device
        self._num_slots = num_slots
        self._slots: OrderedDict[float, int] = OrderedDict()
        self._rows: Tensor | None = None  # allocated at the first use

    @property
    def rows(self) -> Tensor:
        """``[slots, W]``, as of the last `slots`."""
        assert self._rows is not None
        return self._rows

    def slots(self, timesteps: Sequence[float], later: Iterable[float] = ()) -> Tensor:
        """Rows of the table for ``timesteps``, computed where they are missing.

        The table moves only when there are more timesteps than ever before.

        Args:
            timesteps: One a request.
            later: Timesteps that will be wanted next, the most urgent first.

        Returns:
            ``[R]`` int64 on the device.
        """
        self._reserve(len(timesteps))
        wanted = self._keys(timesteps)
        for key in wanted:
            if key in self._slots:
                self._slots.move_to_end(key)
        missing = list(dict.fromkeys(key for key in wanted if key not in self._slots))
        if missing:
            self._fill(missing, later)
        slots = [self._slots[key] for key in wanted]
        return upload(torch.tensor(slots, dtype=torch.int64), self._device)

    def _keys(self, timesteps: Iterable[float]) -> list[float]:
        keys: list[float] = torch.tensor(list(timesteps), dtype=torch.float32).to(self._dtype).tolist()
        return keys

    def must_move(self, num_requests: int) -> bool:
        """Whether so many timesteps at once need another table: the old one is let go of then."""
        return self._rows is None or num_requests + MIN_ROWS > self._num_slots

    def _reserve(self, num_requests: int) -> None:
        needed = num_requests + MIN_ROWS
        if self.must_move(num_requests):
            num_slots = max(self._num_slots, needed if self._rows is None else 2 * needed)
            self._slots.clear()
            self._rows = None  # the device need not hold both
            self._rows = torch.empty(num_slots, self._width, dtype=self._dtype, device=self._device)
            self._num_slots = num_slots

    def _fill(self, missing: list[float], later: Iterable[float]) -> None:
        room = MIN_ROWS - len(missing)
        if room > 0:
            ahead = dict.fromkeys(key for key in self._keys(later) if key not in self._slots)
            missing = list(dict.fromkeys([*missing, *ahead]))[:MIN_ROWS]
        slots = []
        for key in missing:
            full = len(self._slots) >= self._num_slots
            slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
            self._slots[key] = slot
            slots.append(slot)
        try:
            self._compute_into(slots, missing)
        except BaseException:
            self._slots.clear()  # rows that are not there must not be found
            raise

    def _compute_into(self, slots: list[int], timesteps: list[float]) -> None:
        keys = upload(torch.tensor(timesteps, dtype=torch.float32), self._device)
        places = upload(torch.tensor(slots, dtype=torch.int64), self._device)
        column = 0
        for part in self._compute(keys):
            self.rows[:, column : column + part.shape[1]].index_copy_(0, places, part)
            column += part.shape[1]
        assert column == self._width
