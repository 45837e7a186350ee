"""Job files: options of a job in YAML, read with bounds, for a kilobyte of it can stand for gigabytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from offline_diffusion.errors import ConfigError

MAX_JOB_FILE_CHARS, MAX_JOB_FILE_LEVELS = 2**18, 20
"""Limits of a job file, its aliases resolved."""


def read_job_file(path: Path) -> dict[str, Any]:
    """Reads a YAML job file: a mapping of option names to values.

    Raises:
        ConfigError: The file cannot be read, is not a mapping, gives an option twice, or is larger or
            deeper than any job, its aliases resolved.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_JOB_FILE_CHARS + 1)
        if len(raw) > MAX_JOB_FILE_CHARS:
            raise _too_large(path)
        text = raw.decode("utf-8")
        _check_extent(yaml.parse(text, Loader=yaml.SafeLoader), path)
        _check_repeats(yaml.compose(text, Loader=yaml.SafeLoader), path)
        values = yaml.safe_load(text)
    except ConfigError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"job file {path}: {error}") from None
    except Exception as error:  # a YAMLError, or what a constructor raises: of the 32nd of May a ValueError
        raise ConfigError(f"job file {path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"job file {path} must hold a mapping of options, got {type(values).__name__}")
    return {_option_name(str(key)): value for key, value in values.items()}


def _option_name(key: str) -> str:
    return key.replace("-", "_")


def _too_large(path: Path) -> ConfigError:
    return ConfigError(f"job file {path} holds over {MAX_JOB_FILE_CHARS} characters, its aliases resolved")


@dataclass
class _Part:
    """A list or mapping of a job file; counts with its aliases resolved."""

    anchor: str | None
    num_chars: int = 0
    num_levels: int = 1

    def add(self, num_chars: int, num_levels: int) -> None:
        self.num_chars += num_chars + 1
        self.num_levels = max(self.num_levels, num_levels + 1)


def _check_extent(events: Iterable[yaml.Event], path: Path) -> None:
    """Refuses a file that is large or deep, be it by aliases of aliases, before anything is made of it."""
    stack, known = [_Part(None)], dict[str | None, tuple[int, int]]()
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append(_Part(event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            part = stack.pop()
            known[part.anchor] = part.num_chars, part.num_levels
            stack[-1].add(part.num_chars, part.num_levels)
        elif isinstance(event, yaml.ScalarEvent):
            known[event.anchor] = len(event.value), 0
            stack[-1].add(len(event.value), 0)
        elif isinstance(event, yaml.AliasEvent):
            # One that is not known is open still, so it holds itself, or is a fault that YAML tells.
            stack[-1].add(*known.get(event.anchor, (0, 0)))
            if any(part.anchor == event.anchor for part in stack):
                raise ConfigError(f"job file {path}: {event.anchor!r} holds itself")
        if stack[-1].num_chars > MAX_JOB_FILE_CHARS:
            raise _too_large(path)
        if len(stack) + stack[-1].num_levels > MAX_JOB_FILE_LEVELS:
            raise ConfigError(f"job file {path} is nested in over {MAX_JOB_FILE_LEVELS} levels")


def _check_repeats(node: yaml.Node | None, path: Path) -> None:
    """Refuses an option, or a column of ``map``, that is given twice: YAML would take the last."""
    if not isinstance(node, yaml.MappingNode):
        return
    _check_keys(node, path, _option_name)
    for key, value in node.value:
        if key.value == "map" and isinstance(value, yaml.MappingNode):
            _check_keys(value, path, str)


def _check_keys(node: yaml.MappingNode, path: Path, name_of: Callable[[str], str]) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        name, line = name_of(str(key.value)), key.start_mark.line + 1
        if name in lines:
            raise ConfigError(
                f"job file {path}: {name!r} is given twice, in lines {lines[name]} and {line}",
                hint="leave one of them",
            )
        lines[name] = line
