"""How many steps an engine takes for a stream of images, without drawing any. Free of torch."""

from __future__ import annotations

import heapq
from bisect import insort
from typing import NamedTuple

NUM_SIZES = 8
"""Sizes are told apart by eighths of the budget, as the scheduler does in the tail."""


class _Waiting(NamedTuple):
    """Sorts the most work first; equals keep their order."""

    less_work: int
    order: int
    num_tokens: int
    num_steps: int
    key: int


class PackingModel:
    """The engine's schedule, nearly: of the images waiting in the window, those with the most work that fit.

    Leaves out what seldom matters for the number of steps: the turn of an image that many others have
    passed, and the budget of the text stream. Its memory does not grow with the number of images.

    Args:
        max_num_batched_tokens: Token budget of a step; a single larger image runs alone.
        max_num_seqs: Most images in a step.
        look_ahead: Waiting images to choose from; 1 takes them strictly in order.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int, look_ahead: int = 1) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.look_ahead = look_ahead
        self._window: list[_Waiting] = []
        self._least_waiting = 0  # no image in the window has fewer tokens
        self._running: list[tuple[int, int]] = []  # (last step, tokens), a heap
        self._key = 0  # of those running
        self._room = max_num_batched_tokens
        self._step = 0
        self._end = 0
        self._num_added = 0
        self._token_steps = 0

    def add(self, num_tokens: int, num_steps: int, key: int = 0) -> None:
        """One more image of ``num_tokens`` in all its sequences for ``num_steps`` steps.

        Only images of one ``key`` share a step.
        """
        num_tokens = min(num_tokens, self.max_num_batched_tokens)
        self._token_steps += num_tokens * num_steps
        self._num_added += 1
        insort(self._window, _Waiting(-num_tokens * num_steps, self._num_added, num_tokens, num_steps, key))
        self._least_waiting = min(self._least_waiting, num_tokens)
        while len(self._window) >= self.look_ahead:
            self._advance()

    def drain(self) -> None:
        """No more images come: the rest of the window is run, chains that would outlast the others first."""
        work = sum(image.num_tokens * image.num_steps for image in self._window)
        work += sum(tokens * (end - self._step) for end, tokens in self._running)
        num_steps_left = work / self.max_num_batched_tokens

        def preference(image: _Waiting) -> tuple[int, int, int]:
            outlasting = image.num_steps if image.num_steps >= num_steps_left else 0
            return -outlasting, image.num_tokens * -NUM_SIZES // self.max_num_batched_tokens, -image.num_steps

        self._window.sort(key=preference)
        while self._window:
            self._advance()

    def _advance(self) -> None:
        """Admits what fits; when nothing does, goes on to the step at which the next images are done."""
        if self._admit():
            return
        self._step = self._running[0][0]
        while self._running and self._running[0][0] == self._step:
            self._room += heapq.heappop(self._running)[1]

    def _admit(self) -> bool:
        """Whether there was an image that fits."""
        num_before, index = len(self._window), 0
        while len(self._running) < self.max_num_seqs and self._room >= self._least_waiting:
            index = self._first_that_fits(index)
            if index == len(self._window):
                self._least_waiting = min((image.num_tokens for image in self._window), default=0)
                break
            image = self._window.pop(index)
            self._room -= image.num_tokens
            self._key = image.key
            end = self._step + image.num_steps
            heapq.heappush(self._running, (end, image.num_tokens))
            self._end = max(self._end, end)
        return len(self._window) < num_before

    def _first_that_fits(self, start: int) -> int:
        room = self._room
        key = self._key if self._running else None
        for index in range(start, len(self._window)):
            image = self._window[index]
            if image.num_tokens <= room and (key is None or image.key == key):
                return index
        return len(self._window)

    @property
    def num_steps(self) -> int:
        """Engine steps until the last admitted image is done."""
        return self._end

    @property
    def step_fill(self) -> float:
        """Share of the token budget in use over all steps, 0 to 1."""
        return self._token_steps / (self._end * self.max_num_batched_tokens) if self._end else 0.0
