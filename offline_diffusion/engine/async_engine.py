"""An engine that takes requests while it runs, from any thread and any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import torch

from offline_diffusion.engine.engine import Engine
from offline_diffusion.errors import CrashError, OffdiffError, QueueFullError
from offline_diffusion.request import Request, RequestOutput

logger = logging.getLogger(__name__)

OnOutput = Callable[[RequestOutput], None]

MAX_NUM_REQUESTS = 1024
"""At hand unless told otherwise: enough to keep any device full, few enough to fit into memory."""


@dataclass(slots=True, eq=False)
class _Order:
    """A request on its way.

    Args:
        request: What is asked for.
        on_output: Takes its outputs, in the engine's thread.
        on_decided: Told when it is at hand, or refused.
        arrival: When it was asked for, in seconds on the engine's clock.
        refusal: Why it never will be at hand.
    """

    request: Request
    on_output: OnOutput
    on_decided: Callable[[], object]
    arrival: float
    refusal: OffdiffError | None = None

    def hand(self, output: RequestOutput) -> None:
        """A listener's fault, such as a closed event loop or an exit, is nobody else's."""
        try:
            self.on_output(output)
        except KeyboardInterrupt:
            raise  # by whoever steps the engine
        except BaseException as error:
            logger.warning("request %r: nobody takes its output: %r", output.request_id, error)

    def tell_decided(self) -> None:
        """Likewise."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self.on_decided()


class AsyncEngine:
    """Steps an engine in a thread of its own, which begins with the first request.

    Every request ends with one output that is ``finished``, whatever happens: where the engine itself
    breaks, with status ``failed`` and ``error_type`` ``crash``. All methods may be called from any thread.
    As a context manager it closes at the end.

    Args:
        engine: Nobody else may use it any more.
        max_num_requests: Most requests at hand, waiting, running and in decode; further ones are let in
            when others are finished, in the order in which they were asked for.
        threaded: False leaves the stepping to whoever calls `step`, who must not wait for a place.
    """

    def __init__(
        self, engine: Engine, *, max_num_requests: int = MAX_NUM_REQUESTS, threaded: bool = True
    ) -> None:
        self.engine = engine
        self._max_num_requests, self._threaded = max_num_requests, threaded
        self._device_index = _device_index(engine.model.device)
        self._changed = threading.Condition()  # guards all that follows
        self._at_hand: dict[str, _Order] = {}
        self._outside: dict[str, _Order] = {}  # in the order of their asking
        self._arrivals: list[_Order] = []  # at hand, but the engine does not know of them yet
        self._aborts: list[_Order] = []
        self._error: OffdiffError | None = None  # why nobody is let in any more
        self._ready = deque[RequestOutput]()  # on their way to their listeners; of the engine's thread
        self._is_broken = False  # likewise
        self._thread: threading.Thread | None = None

    # --- for everybody -----------------------------------------------------------------------

    def add_request(self, request: Request, on_output: OnOutput, *, timeout: float | None = None) -> None:
        """Hands over a request; ``on_output`` gets its previews, if any, and its end.

        While as many are at hand as may be, it waits.

        Args:
            request: With an id that no other request at hand has.
            on_output: Called in the engine's thread, which it must not hold up.
            timeout: Seconds to wait for a place; None is as long as it takes, 0 not at all.

        Raises:
            QueueFullError: There was no place in time.
            CrashError: The engine is broken.
            OffdiffError: It is closed.
            ValueError: Another request with this id is at hand.
        """
        decided = threading.Event()
        order = _Order(request, on_output, decided.set, self.engine.clock())
        self._ask(order)
        if not decided.wait(timeout) and self._withdraw(order):
            raise QueueFullError(
                f"the engine has {self._max_num_requests} requests at hand, its most",
                hint="wait for some to finish, or give a larger max_num_requests",
            )
        if order.refusal is not None:
            raise order.refusal

    def abort(self, request_id: str) -> None:
        """Drops a request: its output has status ``aborted``, unless it was past its last step.

        An id that is not at hand (any more) is no error.
        """
        with self._changed:
            order = self._at_hand.get(request_id) or self._outside.get(request_id)
        if order is not None:
            self._abort(order)

    async def generate(self, *requests: Request) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of ``requests`` as they come, each one's previews before its end.

        Waits for a place for each without holding up the event loop. Whoever stops listening aborts what is
        unfinished.

        Raises:
            CrashError: The engine is broken.
            OffdiffError: It is closed.
            ValueError: Another request with this id is at hand.
        """
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue[RequestOutput]()
        unfinished: dict[str, _Order] = {}

        def deliver(output: RequestOutput) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        try:
            for request in requests:
                decided = asyncio.Event()
                on_decided = partial(loop.call_soon_threadsafe, decided.set)
                order = _Order(request, deliver, on_decided, self.engine.clock())
                self._ask(order)
                unfinished[request.request_id] = order
                await decided.wait()
                if order.refusal is not None:
                    raise order.refusal
            while unfinished:
                output = await outputs.get()
                if output.finished:
                    del unfinished[output.request_id]
                yield output
        finally:
            for order in unfinished.values():
                self._abort(order)

    @property
    def num_requests(self) -> int:
        """At hand: waiting, running and in decode."""
        return len(self._at_hand)

    def close(self, *, abort: bool = False) -> None:
        """Lets nobody in any more and waits for what is at hand, which ``abort`` drops."""
        self._refuse_all(OffdiffError("the engine is closed"))
        if abort:
            for order in list(self._at_hand.values()):
                self._abort(order)
        if self._thread is not None:
            self._thread.join()
        else:
            while self._at_hand:
                self.step()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(abort=kind is not None)

    # --- getting in --------------------------------------------------------------------------

    def _ask(self, order: _Order) -> None:
        """Lets it in, or has it wait outside until there is a place."""
        request_id = order.request.request_id
        with self._changed:
            if self._error is not None:
                raise self._error
            if request_id in self._at_hand or request_id in self._outside:
                raise ValueError(f"request id {request_id!r} is already at hand")
            self._outside[request_id] = order
            self._let_in()
            if self._threaded and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
                self._thread.start()

    def _withdraw(self, order: _Order) -> bool:
        """Whether it was still outside."""
        with self._changed:
            if self._outside.get(order.request.request_id) is not order:
                return False
            del self._outside[order.request.request_id]
            return True

    def _let_in(self) -> None:
        """As many as there are places; the lock is held."""
        while self._outside and len(self._at_hand) < self._max_num_requests:
            request_id = next(iter(self._outside))
            order = self._at_hand[request_id] = self._outside.pop(request_id)
            self._arrivals.append(order)
            order.tell_decided()
        self._changed.notify_all()

    def _abort(self, order: _Order) -> None:
        request_id = order.request.request_id
        with self._changed:
            if self._at_hand.get(request_id) is order:
                self._aborts.append(order)
                self._changed.notify_all()
                return
            if self._outside.get(request_id) is not order:
                return
            del self._outside[request_id]
            order.tell_decided()
        order.hand(RequestOutput(order.request, "aborted"))

    def _refuse_all(self, error: OffdiffError) -> None:
        """Nobody is let in any more."""
        with self._changed:
            self._error = self._error or error
            refused = list(self._outside.values())
            self._outside.clear()
            for order in refused:
                order.refusal = self._error
                order.tell_decided()
            self._changed.notify_all()

    # --- in the engine's thread --------------------------------------------------------------

    def step(self) -> None:
        """Takes in what has come, steps the engine once and hands out what it gives.

        Raises:
            Exception: The engine broke; every request has been told.
        """
        try:
            self._take_in()
            if self.engine.has_unfinished:
                self._ready += self.engine.step()
            while self._ready:
                self._deliver(self._ready.popleft())
        except BaseException as error:
            self._break_off(error)
            raise

    def _take_in(self) -> None:
        with self._changed:
            arrivals, self._arrivals = self._arrivals, []
            aborts, self._aborts = self._aborts, []
            is_closed = self._error is not None
        for order in arrivals:
            self.engine.add_request(order.request, arrival=order.arrival)
        for order in aborts:
            if self._at_hand.get(order.request.request_id) is order:  # or else it has ended meanwhile
                self.engine.abort(order.request.request_id)
        if is_closed:
            self.engine.close_source()

    def _deliver(self, output: RequestOutput) -> None:
        with self._changed:
            order = self._at_hand[output.request_id]
            if output.finished:
                del self._at_hand[output.request_id]
                self._let_in()
        order.hand(output)

    def _work(self) -> None:
        try:
            if self._device_index is not None:
                torch.cuda.set_device(self._device_index)  # each thread has a device of its own
            while self._wait_for_work():
                self.step()
        except BaseException as error:
            self._break_off(error)

    def _wait_for_work(self) -> bool:
        """False when nothing is at hand and nothing will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._at_hand or self._error is not None)
            return bool(self._at_hand)

    def _break_off(self, error: BaseException) -> None:
        """Hands out what is ready and tells everybody else that the engine is broken; may be called again."""
        if not self._is_broken:
            logger.error("the engine is broken", exc_info=error)
        self._is_broken = True
        cause = f"{type(error).__name__}: {error}"
        self._refuse_all(CrashError(f"the engine is broken: {cause}", hint="start another one"))
        self._ready += self.engine.take_outputs()
        while self._ready:
            output = self._ready.popleft()
            if output.request_id in self._at_hand:
                self._deliver(output)
        with self._changed:
            orders = list(self._at_hand.values())
            self._at_hand.clear()
        for order in orders:
            order.hand(RequestOutput(order.request, "failed", error_type="crash", error=cause))


def _device_index(device: torch.device) -> int | None:
    """Of a GPU its number, of one without that of the calling thread's current one; None of a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index
