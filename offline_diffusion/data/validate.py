"""Every fault of every row, without a model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from offline_diffusion.data.id_table import IdTable, repeated_rows
from offline_diffusion.data.manifest import Manifest, duplicate_fault
from offline_diffusion.data.rows import ManifestRow, RowDefaults, RowFault, resolve_row
from offline_diffusion.models.capabilities import Capabilities

MAX_REMEMBERED = 10_000

_what_a_model_sees = attrgetter(
    "height", "width", "num_inference_steps", "true_cfg_scale", "guidance_scale", "lora", "lora_scale"
)


class Validation:
    """Iterates over every fault of every row, once, as the files are read.

    The faults of a row come together and in the order of rows. Rows that repeat an id are known only at
    the end of the manifest, so their faults come last. ``num_rows``, ``num_images`` (of good rows) and
    ``num_faulty_rows`` are final after the last fault.

    Raises:
        ManifestError: A file cannot be read to its end.
    """

    def __init__(self, manifest: Manifest, capabilities: Capabilities | None, defaults: RowDefaults) -> None:
        self.num_rows = 0
        self.num_images = 0
        self.num_faulty_rows = 0
        self._manifest = manifest
        self._capabilities = capabilities
        self._defaults = defaults
        self._accepted: set[tuple[object, ...]] = set()
        self._faults = self._check()

    def __iter__(self) -> Iterator[RowFault]:
        return self._faults

    def _check(self) -> Iterator[RowFault]:
        ids = IdTable()
        for item in self._manifest.check():
            self.num_rows += 1
            if isinstance(item, ManifestRow):
                ids.add(item.id)
                fault = self._model_fault(item)
                faults = [] if fault is None else [fault]
                self.num_images += 0 if faults else item.params.num_images_per_prompt
            else:
                ids.add(None)
                faults = list(item)
            self.num_faulty_rows += bool(faults)
            yield from faults
        for row in repeated_rows(self._manifest, ids.repeated()):
            if self._model_fault(row) is None:
                self.num_faulty_rows += 1
                self.num_images -= row.params.num_images_per_prompt
            yield duplicate_fault(row)

    def _model_fault(self, row: ManifestRow) -> RowFault | None:
        # The model looks at the parameters, not at prompt or seed, and few sets of them are distinct.
        key = _what_a_model_sees(row.params)
        if self._capabilities is None or key in self._accepted:
            return None
        resolved = resolve_row(row, self._capabilities, self._defaults)
        if isinstance(resolved, RowFault):
            return resolved
        if len(self._accepted) < MAX_REMEMBERED:
            self._accepted.add(key)
        return None


def validate(manifest: Manifest, *, capabilities: Capabilities | None, defaults: RowDefaults) -> Validation:
    """Checks every row; see ``Validation``.

    Args:
        manifest: What to check.
        capabilities: Of the model; None checks only what holds for any model.
        defaults: The job's.
    """
    return Validation(manifest, capabilities, defaults)
