"""Which kind of place a URL names, decided here alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from offline_diffusion.data.hub_remote import HubRemote
from offline_diffusion.data.remote import Remote
from offline_diffusion.data.staged_remote import StagedRemote
from offline_diffusion.data.storage import Storage

if TYPE_CHECKING:
    from offline_diffusion.data.hub_storage import HubStorage

AnyStorage: TypeAlias = "Storage | HubStorage"

_HUB_REPO = re.compile(r"hf://(?!buckets/)")


def open_storage(url: str, **options: Any) -> AnyStorage:
    """The place that a URL names; a bucket of the Hub is object storage like any other.

    Args:
        url: Of a dataset repo on the Hub (``hf://datasets/…``), or of object storage.
        options: See `remote_folder.RemoteFolder`.

    Raises:
        ConfigError: There can be no such place.
    """
    if not _HUB_REPO.match(url):
        return Storage(url, **options)
    from offline_diffusion.data.hub_storage import HubStorage  # the Hub's library is slow to import

    return HubStorage(url, **options)


def remote_of(storage: AnyStorage, out: Path) -> Remote:
    """The far side of the output whose working folder is ``out``."""
    return StagedRemote(storage, out) if isinstance(storage, Storage) else HubRemote(storage, out)
