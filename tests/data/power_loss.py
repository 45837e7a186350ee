"""What a disk may hold after a power loss, from a record of all that was done to a folder.

Sure is only what was synced: a file's content when the file was, a name when its folder was. A rename is
one change of two folders, as on file systems with a journal, and sure when either was synced. Of the rest the
disk may hold anything; this tries all lost, none lost (but for contents), and for each folder all of its own
lost and only its own kept.
"""

from __future__ import annotations

import builtins
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NEVER = 10**9

State = dict[str, bytes | None]
"""Path relative to the folder → content, None for a folder."""


@dataclass(eq=False)
class Node:
    """A file or a folder.

    Args:
        names: What is in a folder at present; None for a file.
        synced: When a file was synced, and what it then held.
    """

    names: dict[str, Node] | None = None
    synced: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(eq=False)
class Change:
    """A change of names, in one folder or in two at once.

    Args:
        at: When.
        edits: Folder, name and what has the name from now on.
        sure_at: When one of the folders was synced.
    """

    at: int
    edits: list[tuple[Node, str, Node | None]]
    sure_at: int = NEVER

    def is_of(self, folder: Node) -> bool:
        return any(at is folder for at, _, _ in self.edits)


class Disk:
    """Records what this process does to a folder, in any thread.

    Args:
        root: The folder; what is in it now is sure.
        skipped_sync: The number of a sync that is not done; ``skipped`` is then what it was of.
    """

    def __init__(self, root: Path, skipped_sync: int | None = None) -> None:
        self.root, self.skipped_sync = os.path.realpath(root), skipped_sync
        self.now = self.num_syncs = 0
        self.skipped: str | None = None
        self._top = Node({})
        self._changes: list[Change] = []
        self._lock = threading.RLock()
        for folder, folders, files in os.walk(self.root):
            for name in folders + files:
                path = os.path.join(folder, name)
                self._name(path, Node({}) if name in folders else Node(None, [(0, Path(path).read_bytes())]))
        for change in self._changes:
            change.at = change.sure_at = 0

    def _parts(self, path: Any) -> list[str] | None:
        """Folder and names of a path; None when it is elsewhere."""
        parts = os.path.relpath(os.path.abspath(os.fspath(path)), self.root).split(os.sep)
        return None if parts[0] == os.pardir else [part for part in parts if part != os.curdir]

    def _find(self, parts: list[str]) -> Node:
        node = self._top
        for name in parts:
            assert node.names is not None
            node = node.names[name]
        return node

    def _has(self, path: Any) -> bool:
        return self._parts(path) is not None and os.path.lexists(path)

    def _change(self, *edits: tuple[Any, Node | None]) -> None:
        """Paths and what has these names from now on."""
        found = []
        for path, node in edits:
            parts = self._parts(path)
            assert parts is not None, f"{path} is not in {self.root}"
            folder = self._find(parts[:-1])
            assert folder.names is not None
            found.append((folder, parts[-1], node))
        for folder, name, node in found:
            assert folder.names is not None
            if node is None:
                del folder.names[name]
            else:
                folder.names[name] = node
        self.now += 1
        self._changes.append(Change(self.now, found))

    def _name(self, path: Any, node: Node) -> None:
        self._change((path, node))

    def _move(self, source: Any, target: Any) -> None:
        parts = self._parts(source)
        assert parts is not None, f"{source} is not in {self.root}"
        node = self._find(parts)
        self._change((source, None), (target, node))

    def _sync(self, fd: int) -> None:
        parts = self._parts(os.readlink(f"/proc/self/fd/{fd}"))
        self.num_syncs += 1
        if parts is None:
            return
        if self.num_syncs - 1 == self.skipped_sync:
            self.skipped = "/".join(parts)
            return
        node = self._find(parts)
        self.now += 1
        if node.names is None:
            with open(f"/proc/self/fd/{fd}", "rb") as file:
                node.synced.append((self.now, file.read()))
        for change in self._changes:
            if change.is_of(node):
                change.sure_at = min(change.sure_at, self.now)

    def record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on until the patches are undone."""
        real = {name: getattr(os, name) for name in _CALLS}
        real_open = builtins.open

        def recorded(name: str) -> Callable[..., Any]:
            def call(*args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
                options = kwargs if dir_fd is None else kwargs | {"dir_fd": dir_fd}
                place = args[0] if dir_fd is None else f"{os.readlink(f'/proc/self/fd/{dir_fd}')}/{args[0]}"
                with self._lock:
                    was_there = name == "open" and self._has(place)
                    done = real[name](*args, **options)
                    if name == "fsync":
                        self._sync(args[0])
                    elif self._parts(place) is not None and not was_there:
                        _CALLS[name](self, place, *args[1:])
                return done

            return call

        def recorded_open(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            is_new = "x" in mode and not isinstance(path, int)
            with self._lock:
                file = real_open(path, mode, *args, **kwargs)
                if is_new and self._parts(path) is not None:
                    self._name(path, Node())
            assert not set("wa+") & set(mode) or self._parts(path) is None, f"{path} is overwritten in place"
            return file

        for name in _CALLS:
            monkeypatch.setattr(os, name, recorded(name))
        monkeypatch.setattr(builtins, "open", recorded_open)

    def _opened(self, path: Any, flags: int, *_: Any) -> None:
        if flags & os.O_CREAT:
            self._name(path, Node())

    def states(self, at: int) -> Iterator[State]:
        """What may be there after a power loss just after moment ``at``."""
        unsure = [change for change in self._changes if change.at <= at < change.sure_at]
        folders = {id(folder): folder for change in unsure for folder, _, _ in change.edits}
        yield self._state(at, set(map(id, unsure)))
        yield self._state(at, set())
        for folder in folders.values():
            own = {id(change) for change in unsure if change.is_of(folder)}
            yield self._state(at, own)
            yield self._state(at, set(map(id, unsure)) - own)

    def _state(self, at: int, lost: set[int]) -> State:
        names: dict[int, dict[str, Node]] = {}
        for change in itertools.takewhile(lambda change: change.at <= at, self._changes):
            if id(change) not in lost:
                for folder, name, node in change.edits:
                    own = names.setdefault(id(folder), {})
                    own.pop(name, None) if node is None else own.update({name: node})
        state: State = {}

        def walk(folder: Node, prefix: str) -> None:
            for name, node in names.get(id(folder), {}).items():
                if node.names is None:
                    contents = [content for when, content in node.synced if when <= at]
                    state[prefix + name] = contents[-1] if contents else b""
                else:
                    state[prefix + name] = None
                    walk(node, f"{prefix}{name}/")

        walk(self._top, "")
        return state


_CALLS: dict[str, Callable[..., None]] = {
    "open": Disk._opened,
    "mkdir": lambda disk, path, *_: disk._name(path, Node({})),
    "link": lambda disk, source, target: disk._name(target, disk._find(disk._parts(source) or [])),
    "rename": Disk._move,
    "replace": Disk._move,
    "unlink": lambda disk, path: disk._change((path, None)),
    "rmdir": lambda disk, path: disk._change((path, None)),
    "fsync": lambda *_: None,
}


def write_state(state: State, folder: Path) -> None:
    """Makes a folder of a state."""
    folder.mkdir()
    for name, content in state.items():
        path = folder / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
