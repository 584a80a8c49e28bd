"""What happens to memory during a run, event by event, and where in the program each event stands."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Place = tuple[str, str]  # phase, module path


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("identity", "pointer")
    identity: int
    pointer: int


class Recorder:
    """Births and deaths of storages in order, each with its phase and module.

    ``events`` holds an identity for a birth and its complement (``~identity``) for a death; ``where`` the index into
    ``places`` of each event. ``sizes`` and ``births`` (a place index) are by identity; ``kinds`` names the category
    where it is known for certain, ``owners`` the module that something belongs to wherever it was born.
    ``marks`` are (label, number of events so far), ``emptied`` the numbers of events before each ``empty_cache()``.
    ``stream`` is the CUDA stream that memory is asked for on, and ``streams`` that of every identity where it is not
    the main one (0).
    """

    def __init__(self) -> None:
        self.events: list[int] = []
        self.where: list[int] = []
        self.sizes: list[int] = []
        self.births: list[int] = []
        self.kinds: dict[int, str] = {}
        self.owners: dict[int, str] = {}
        self.streams: dict[int, int] = {}
        self.stream = 0
        self.marks: list[tuple[str, int]] = []
        self.emptied: list[int] = []
        self.places: list[Place] = []
        self._index: dict[Place, int] = {}
        self.here = self.place("build", "")
        self._alive: dict[int, _StorageRef] = {}
        self.by_pointer: dict[int, int] = {}

    def place(self, phase: str, module: str) -> int:
        """The index of a place, new or known."""
        key = (phase, module)
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.places)
            self.places.append(key)
        return index

    def mark(self, label: str) -> None:
        """Note that `label` begins now."""
        self.marks.append((label, len(self.events)))

    def empty_cache(self) -> None:
        """Cached memory goes back to the driver here."""
        self.emptied.append(len(self.events))

    def birth(self, nbytes: int) -> int:
        """A block of `nbytes` is born here; returns its identity."""
        identity = len(self.sizes)
        self.sizes.append(nbytes)
        self.births.append(self.here)
        self.events.append(identity)
        self.where.append(self.here)
        if self.stream:
            self.streams[identity] = self.stream
        return identity

    def death(self, identity: int) -> None:
        """The block dies here."""
        self.events.append(~identity)
        self.where.append(self.here)

    def watch(self, storage: torch.UntypedStorage, nbytes: int | None = None) -> int:
        """A birth for `storage`, whose death is recorded when the storage dies."""
        identity = self.birth(storage.nbytes() if nbytes is None else nbytes)
        reference = _StorageRef(storage, self._died)
        reference.identity = identity
        reference.pointer = storage._cdata
        self._alive[identity] = reference
        self.by_pointer[reference.pointer] = identity
        return identity

    def name(self, tensors: Iterable[Any], kind: str, owner: str | None = None) -> None:
        """Say what the watched storages of `tensors` are, and which module owns them."""
        for tensor in tensors:
            identity = None if tensor is None else self.by_pointer.get(tensor.untyped_storage()._cdata)
            if identity is not None:
                self.kinds[identity] = kind
                if owner is not None:
                    self.owners.setdefault(identity, owner)

    def relative(self, start: int, end: int) -> list[int] | None:
        """The events from `start` to `end` as sizes of births and ages of deaths; None unless everything that was
        born there died there, and nothing else did."""
        born: dict[int, int] = {}
        shape: list[int] = []
        for event in self.events[start:end]:
            if event >= 0:
                born[event] = len(shape)
                shape.append(self.sizes[event])
            else:
                since = born.pop(~event, None)
                if since is None:
                    return None
                shape.append(-1 - since)
        return None if born else shape

    def repeat(self, start: int, end: int) -> None:
        """The events from `start` to `end` happen once more (see `relative`: they are complete in themselves)."""
        new: dict[int, int] = {}
        shift = len(self.events) - start
        self.emptied += [at + shift for at in self.emptied if start <= at < end]
        for position in range(start, end):
            event, self.here = self.events[position], self.where[position]
            if event >= 0:
                self.here = self.births[event]
                new[event] = self.birth(self.sizes[event])
                if event in self.kinds:
                    self.kinds[new[event]] = self.kinds[event]
                if event in self.streams:
                    self.streams[new[event]] = self.streams[event]
                if event in self.owners:
                    self.owners[new[event]] = self.owners[event]
            else:
                self.death(new.pop(~event))

    def clear(self) -> None:
        """Forget what happened so far; nothing may be alive."""
        for record in (self.events, self.where, self.sizes, self.births, self.marks, self.emptied):
            record.clear()
        for names in (self.kinds, self.owners, self.streams):
            names.clear()
        self._alive.clear()
        self.by_pointer.clear()

    def stop(self) -> int:
        """Watch no longer; what is alive stays without a death. Returns how many storages are alive."""
        alive = sum(reference() is not None for reference in self._alive.values())
        self._alive.clear()
        self.by_pointer.clear()
        return alive

    def cut(self, end: int) -> None:
        """Forget the events from `end` on."""
        del self.events[end:], self.where[end:]

    def _died(self, reference: Any) -> None:
        if self._alive.pop(reference.identity, None) is not None:
            if self.by_pointer.get(reference.pointer) == reference.identity:
                del self.by_pointer[reference.pointer]
            self.death(reference.identity)
