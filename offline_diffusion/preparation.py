"""What comes before a job's first image: the manifest is read through and the output folder taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from offline_diffusion.config import JobConfig
from offline_diffusion.data.disk_full import Patience
from offline_diffusion.data.files import disk_errors
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.manifest import Manifest, open_manifest, same_manifest
from offline_diffusion.data.remotes import open_storage
from offline_diffusion.data.requests_again import GIVE_UP_AFTER_S, RequestsAgain
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.data.scan import ManifestIndex, scan
from offline_diffusion.data.work import ShardCosts, WorkMeter
from offline_diffusion.errors import JobInterrupted
from offline_diffusion.feed import row_defaults
from offline_diffusion.identity import job_identity
from offline_diffusion.models.modes import check_mode
from offline_diffusion.models.registry import Checkpoint, find_checkpoint
from offline_diffusion.progress import Observer, Progress, Say, StopFlag
from offline_diffusion.stages import Stages

SCAN_REPORT_ROWS = 5_000


def ledger_of(
    config: JobConfig,
    *,
    say: Say = lambda _: None,
    stop: StopFlag | None = None,
    give_up_after_s: float = GIVE_UP_AFTER_S,
) -> Ledger:
    """The books of a job's output; see `Storage` for what it does where that cannot be reached."""
    if isinstance(config.out, Path):
        return Ledger(config.out)
    stop = stop or StopFlag()
    storage = open_storage(
        config.out, say=say, stopped=lambda: stop.requests > 0, give_up_after_s=give_up_after_s
    )
    return Ledger(config.folder, storage)


def manifest_of(config: JobConfig, *, say: Say, stopped: Callable[[], bool] = lambda: False) -> Manifest:
    """A job's manifest; one that lies elsewhere is waited for, see `RequestsAgain` for the arguments.

    Raises:
        ManifestError, JobInterrupted: As of `open_manifest`.
    """
    requests = RequestsAgain(say=say, stopped=stopped)
    return open_manifest(config.manifests, column_map=config.map, limit=config.limit, requests=requests)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job that may begin."""

    manifest: Manifest
    checkpoint: Checkpoint
    ledger: Ledger
    index: ManifestIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Gets a job ready.

    Args:
        config: The job.
        observer: Hears how many rows were read.
        stop: Ends the reading.
        say: Called with lines for the user.
        stages: Hears of the scan.
        patience: Waits for space in the output folder.
    """

    config: JobConfig
    observer: Observer
    stop: StopFlag
    say: Say
    stages: Stages
    patience: Patience

    def run(self) -> Prepared:
        """Reads the manifest through, unless an earlier run did, and takes the output folder for the job.

        Raises:
            JobInterrupted: Asked to stop before the manifest was read through, the disk stayed full, or what
                lies elsewhere could not be reached.
            OffdiffError: The job cannot start.
        """
        config = self.config
        manifest = manifest_of(config, say=self.say, stopped=lambda: self.stop.requests > 0)
        checkpoint = find_checkpoint(config.model, config.revision)
        check_mode(config, checkpoint.capabilities)
        ledger = ledger_of(config, say=self.say, stop=self.stop)
        index_folder = ledger.out / "_state" / "manifest"
        index = self._index(manifest, index_folder, checkpoint)
        for note in manifest.notes:
            self.say(note)
        if config.num_tasks > 1 and not manifest.can_jump:
            self.say("the manifest cannot be read in jumps: other tasks' shards are taken in order")
        identity = job_identity(config, checkpoint, index)

        def take_folder() -> None:
            ledger.open(identity, allow_manifest_change=config.allow_manifest_change)
            with disk_errors(index_folder):
                index.save(index_folder)

        self.patience.do(take_folder)
        if ledger.remote is not None and (danger := ledger.remote.danger(config.num_tasks)) is not None:
            self.say(f"warning: {config.out} {danger}")
        return Prepared(manifest, checkpoint, ledger, index)

    def _index(self, manifest: Manifest, folder: Path, checkpoint: Checkpoint) -> ManifestIndex:
        """The index of an earlier run where manifest and shards are the same, else one pass over all rows."""
        index, shard_size = ManifestIndex.load(folder), self.config.shard_size
        is_usable = index is not None and index.shard_size == shard_size
        if index is not None and is_usable and not same_manifest(index.fingerprint, manifest):
            manifest.recall(index.places, index.row_counts)
            # With the new stamps: what was only touched is not read through at each start from now on.
            return replace(index, fingerprint=manifest.known_fingerprint())
        num_rows = 0

        def count(_: ManifestRow | RowFault) -> None:
            nonlocal num_rows
            num_rows += 1
            if self.stop.requests:
                raise JobInterrupted(
                    f"{self.stop.why}: stopped while scanning the manifest, at row {num_rows:,}",
                    hint="the same command starts again",
                )
            if num_rows % SCAN_REPORT_ROWS == 0:
                self.observer(Progress(phase="scanning", num_rows_scanned=num_rows))

        meter = WorkMeter(checkpoint.capabilities, row_defaults(self.config))
        with self.stages.stage("scan"):
            return scan(manifest, on_row=count, costs=ShardCosts(meter, shard_size))
