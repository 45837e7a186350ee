"""An output in a dataset repo of the Hub: a shard is published by one commit, tables and marker together.

A commit is all or nothing, and it names its parent: of several that would publish the same shard one wins.
So nothing is staged over there, and there is nothing to roll forward. As every write is a commit, and these
are counted, claims and signs of life stay in the working folder.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from offline_diffusion.data.files import move_away, to_json
from offline_diffusion.data.layout import (
    SHARDS,
    TABLES,
    Shard,
    StagedFolder,
    publication_name,
    staged_file,
    table_file,
)
from offline_diffusion.data.marker import Marker
from offline_diffusion.data.publication import Publications
from offline_diffusion.data.remote import Remote, RemotePublications
from offline_diffusion.data.state_files import FolderFiles

if TYPE_CHECKING:
    from offline_diffusion.data.hub_storage import HubStorage


@dataclass(slots=True)
class HubRemote(Remote):
    """An output on the Hub, and its working folder.

    Workers that share the working folder, as those of one machine do, share claims and signs of life.
    """

    storage: HubStorage

    @property
    def files(self) -> FolderFiles:
        return FolderFiles(self.out)

    @property
    def publications(self) -> HubPublications:
        base = Publications.of(self.out)
        return HubPublications(base.out, base.markers, base.staged, base.scratch, self)

    def danger(self, num_tasks: int) -> str | None:
        if num_tasks == 1:
            return None
        return (
            "keeps no claims: tasks on several machines would make the same shards, and one of each would be "
            "kept; give it one machine at a time"
        )

    # What follows goes by way of object storage; here it stays in the working folder.

    def pull_heartbeats(self) -> None:
        pass

    def push_heartbeat(self, *_: object) -> None:
        pass

    def drop_old_heartbeats(self, *_: object) -> None:
        pass

    def park(self, _: str, *, until: float) -> None:
        pass

    def unpark(self, _: str) -> None:
        pass

    def drop_parked(self, *_: object) -> None:
        pass


@dataclass(frozen=True, slots=True)
class HubPublications(RemotePublications):
    """Publications that are commits.

    Args:
        remote: Where to.
    """

    remote: HubRemote

    def commit(self, staged: StagedFolder, marker: Marker) -> bool:
        self.remote.check_current()
        name = publication_name(staged.stem, staged.number)
        won = self.remote.storage.publish(
            {file.path: staged_file(staged.path, file.path) for file in marker.files},
            surplus=self._surplus(staged, marker),
            marker=(f"{SHARDS}/{name}.json", to_json(asdict(marker))),
            message=f"shard {marker.shard}: {marker.stop - marker.start} rows",
        )
        self.remote.pull_marker(staged.stem, staged.number)
        return won

    def move(self, staged: StagedFolder, _: Marker) -> None:
        """Its files are in their places by now: what is left of them here goes."""
        for here in (staged, *self._others(staged)):
            move_away(here.path, self.scratch)

    def discard(self, staged: StagedFolder) -> bool:
        if self.is_committed(staged):
            return False
        move_away(staged.path, self.scratch)
        return True

    def roll_forward(self, shard: Shard | None = None) -> None:
        self.clear_staged(shard)

    def _surplus(self, staged: StagedFolder, marker: Marker) -> set[str]:
        """Files that publications before may have and this one has not; their markers may be gone."""
        first = {f"{table}/{table_file(staged.stem, 0)}" for table in TABLES}
        return (self.earlier_paths(staged) | first) - {file.path for file in marker.files}
