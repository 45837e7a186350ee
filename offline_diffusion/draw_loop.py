"""Steps an engine until the images of a task are drawn, and hands out what it gives. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offline_diffusion.data.previews import PreviewFolder
from offline_diffusion.data.sink import Sink
from offline_diffusion.engine.scheduler import LOOK_AHEAD
from offline_diffusion.engine_watch import EngineWatch
from offline_diffusion.feed import Feed
from offline_diffusion.progress import Observer, Phase, Say, StopFlag, Tally, plural
from offline_diffusion.request import RequestOutput
from offline_diffusion.stages import Stages
from offline_diffusion.time_limit import REASON, TimeLimit

if TYPE_CHECKING:
    from offline_diffusion.engine.engine import Engine

PROGRESS_INTERVAL_S = 0.25


@dataclass(kw_only=True)
class DrawLoop:
    """The loop of a task: admit, step, hand out, save.

    Args:
        engine: What draws.
        feed: Where its images come from.
        sink: Where finished ones go.
        watch: Notices when the engine breaks or hangs.
        previews: Where unfinished ones are shown.
        tally: Counts.
        time_limit: Says which images are not worth beginning any more.
        stop: Ends the loop.
        say: Called with lines for the user.
        observer: Called a few times a second.
        stages: Hears of the reading.
        on_step: Called after every iteration.
    """

    engine: Engine
    feed: Feed
    sink: Sink
    watch: EngineWatch
    previews: PreviewFolder
    tally: Tally
    time_limit: TimeLimit
    stop: StopFlag
    say: Say
    observer: Observer
    stages: Stages
    on_step: Callable[[], None]
    _last_report: float = 0.0

    def run(self) -> bool:
        """Steps until the shards are done, True, or the stop flag or the time left ends it early, False."""
        engine, feed = self.engine, self.feed
        while engine.has_unfinished or (feed.open and not feed.num_dropped):
            if self.stop.requests:
                self._stop()
                break
            self._admit()
            for output in self.watch.call(engine.step):
                self._take(output)
            feed.check_failures()  # others' may be too many, too
            feed.saver.tick(engine, feed.pending)
            self.on_step()
            self._report("running")
        self._report("finishing")
        return not feed.open and not feed.pending and not feed.num_dropped

    def _admit(self) -> None:
        """Fills the engine's queue, but for what cannot be finished in the time left."""
        engine, feed = self.engine, self.feed
        for _ in range(LOOK_AHEAD - engine.num_waiting):
            if feed.open and not feed.num_dropped:
                with self.stages.stage("read"):
                    feed.add_to(engine)
        if not self.time_limit.is_known:
            return
        for entry in list(engine.scheduler.waiting):
            if self.time_limit.is_too_late_for(entry.num_steps):
                if not feed.num_dropped:
                    self.say(f"{REASON}: too little time is left to begin more images")
                feed.num_dropped += 1
                engine.abort(entry.request_id)

    def _stop(self) -> None:
        """Keeps what is done: images past their last step, and of the others how far they have come."""
        if self.stop.requests > 1:
            self.say(f"{self.stop.why}: stopping without saving unfinished images")
            return
        count = plural(self.engine.num_running, "unfinished image")
        self.say(f"{self.stop.why}: saving {count} at their step; once more to stop without saving")
        for output in self.watch.call(self.engine.finish_decoding):
            self._take(output)
        self.feed.saver.save_now(self.engine, self.feed.pending)

    def _take(self, output: RequestOutput) -> None:
        feed, is_drawn = self.feed, output.status != "aborted"
        if not output.finished:
            self.previews.show(feed.pending[output.request_id][1].key, output)
            return
        shard_index, image = feed.take_back(output.request_id, is_drawn=is_drawn)
        if not is_drawn:
            return
        if output.status == "ok":
            self.time_limit.learn(output.metrics)
        self.sink.submit(shard_index, image, output)
        self.previews.drop(image.key)
        self.tally.num_ok += output.status == "ok"
        self.tally.num_failed += output.status == "failed"
        self.tally.num_truncated += output.metrics.truncated_tokens > 0
        self.tally.work_done += feed.work(image)
        feed.check_failures()

    def _report(self, phase: Phase) -> None:
        now = time.monotonic()
        if phase == "running" and now - self._last_report < PROGRESS_INTERVAL_S:
            return
        self._last_report = now
        self.observer(
            self.tally.progress(
                phase,
                step_fill=self.engine.stats.step_fill,
                num_running=self.engine.num_running,
                num_waiting=self.engine.num_waiting,
            )
        )
