"""Checkpoints that survive: written whole or not at all, checked when read, and complete enough that the run goes on as
if it had never stopped.

One file holds one checkpoint, ``step-00000120.loss-2.3456.<digest>.pt``: step, the metric that decides what is best,
and a digest of the content. It is written under another name, forced to the disk, and renamed; a rename is atomic
(POSIX), so that a file of this name is complete, whenever the process dies. What a broken disk does to it later, the
digest finds.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from .units import UserError

_NAME = re.compile(r"step-(\d{8,})\.([^.]+?)-([^/]*)\.([0-9a-f]{32})\.pt")
_NO_METRIC = "none"


@dataclass(frozen=True)
class Kept:
    """One checkpoint in the folder, as its name tells."""

    path: Path
    step: int
    metric: float | None
    digest: str

    @classmethod
    def of(cls, path: Path) -> Kept | None:
        """None when the name is not a checkpoint's."""
        match = _NAME.fullmatch(path.name)
        if not match:
            return None
        step, _, value, digest = match.groups()
        return cls(path, int(step), None if value == _NO_METRIC else float(value), digest)


@dataclass(frozen=True)
class Restored:
    """What `CheckpointManager.restore` found: the step that was done last, the data ``position`` and ``metrics`` that
    were saved with it, and ``damaged``: files that were newer, did not fit their digest and were set aside."""

    step: int
    position: Any
    metrics: Mapping[str, float]
    path: Path
    damaged: tuple[Path, ...] = field(default=())


class CheckpointManager:
    """Saves and restores a training run in `folder`, and keeps its last `keep_last` checkpoints and the `keep_best`
    ones with the best metric called `best` (smallest, or largest with ``larger_is_better``).

    Anything with ``state_dict`` and ``load_state_dict`` can be saved (model, optimizer, schedule, scaler, sampler).
    Random states of Python, NumPy, PyTorch and all cards are saved always. One process writes to a folder at a time.
    """

    def __init__(
        self, folder: str | Path, *, keep_last: int = 2, keep_best: int = 1, best: str = "loss",
        larger_is_better: bool = False,
    ):  # fmt: skip
        if keep_last < 1 or keep_best < 0:
            raise UserError("a checkpoint manager keeps at least the last one: keep_last >= 1, keep_best >= 0")
        if not re.fullmatch(r"\w+", best):
            raise UserError(f"{best!r} cannot stand in a file name: name the metric in letters and digits")
        self.folder, self.keep_last, self.keep_best = Path(folder), keep_last, keep_best
        self.best, self.larger_is_better = best, larger_is_better

    def kept(self) -> list[Kept]:
        """The checkpoints in the folder, oldest step first."""
        found = [Kept.of(path) for path in self.folder.glob("step-*.pt")]
        return sorted((k for k in found if k), key=lambda k: (k.step, k.path.stat().st_mtime_ns))

    def save(
        self, step: int, *, position: Any = None, metrics: Mapping[str, float] | None = None, **parts: Any
    ) -> Path:
        """Save `parts` (``model=model, optimizer=optimizer, ...``) after `step` steps; returns the file.

        `position` says where in the data the run is: plain numbers, texts, lists, dicts and tensors. Raises `UserError`
        when the disk refuses; what was saved before is then untouched.
        """
        import torch

        states = {name: part.state_dict() for name, part in parts.items() if part is not None}
        content = {
            "step": step, "position": position, "metrics": dict(metrics or {}), "states": states,
            "random": random_states(),
        }  # fmt: skip
        value = content["metrics"].get(self.best)
        unfinished = self.folder / f"unfinished-{os.getpid()}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                digested = _Digested(file)
                torch.save(content, cast(Any, digested))
                file.flush()
                os.fsync(file.fileno())
            shown = _NO_METRIC if value is None else repr(float(value))
            path = self.folder / f"step-{step:08d}.{self.best}-{shown}.{digested.digest()}.pt"
            os.replace(unfinished, path)
            _sync(self.folder)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError when a write fails
            unfinished.unlink(missing_ok=True)
            raise UserError(f"the checkpoint of step {step} was not written: {error}") from error
        self._prune(path)
        return path

    def restore(self, **parts: Any) -> Restored | None:
        """Bring `parts` and all random states to where the newest sound checkpoint has them; None in an empty folder.

        A checkpoint that does not fit its digest is renamed to ``*.damaged`` and the one before it taken. Build the
        loader's iterator *before* this call, or give the loader a generator of its own: it draws a random number.
        Raises `UserError` when every checkpoint is damaged, or one does not fit these parts.
        """
        return self._restore(list(reversed(self.kept())), parts)

    def restore_best(self, **parts: Any) -> Restored | None:
        """The same for the checkpoint with the best metric."""
        return self._restore(self._by_metric(), parts)

    def _restore(self, candidates: list[Kept], parts: dict[str, Any]) -> Restored | None:
        import torch

        damaged: list[Path] = []
        for kept in candidates:
            if _digest(kept.path) != kept.digest:
                aside = kept.path.with_suffix(".damaged")
                os.replace(kept.path, aside)
                damaged.append(aside)
                continue
            content = torch.load(kept.path, map_location="cpu", weights_only=True)
            wanted = {name for name, part in parts.items() if part is not None}
            if missing := wanted - content["states"].keys():
                raise UserError(f"{kept.path.name} holds no state of {', '.join(sorted(missing))}")
            for name in wanted:
                try:
                    parts[name].load_state_dict(content["states"][name])
                except (RuntimeError, ValueError, KeyError) as error:
                    raise UserError(f"{kept.path.name} does not fit this {name}: {error}") from error
            set_random_states(content["random"])
            return Restored(content["step"], content["position"], content["metrics"], kept.path, tuple(damaged))
        if damaged:
            raise UserError(f"every checkpoint in {self.folder} is damaged ({len(damaged)} files, now *.damaged)")
        return None

    def _by_metric(self) -> list[Kept]:
        """Those that have a metric, best first; of equals the newest first."""
        sign = -1 if self.larger_is_better else 1
        scored = [k for k in reversed(self.kept()) if k.metric is not None and not math.isnan(k.metric)]
        return sorted(scored, key=lambda k: sign * k.metric)  # type: ignore[operator]

    def _prune(self, newest: Path) -> None:
        """Drop what is neither among the last nor the best; only ever after a new one is safe."""
        step = Kept.of(newest).step  # type: ignore[union-attr]
        for kept in self.kept():  # this step, or later ones of a run that was gone back from
            if kept.path != newest and kept.step >= step:
                kept.path.unlink()
        stay = {k.path for k in self.kept()[-self.keep_last :]} | {k.path for k in self._by_metric()[: self.keep_best]}
        for kept in self.kept():
            if kept.path not in stay:
                kept.path.unlink()
        for left in self.folder.glob("unfinished-*.part"):  # of processes that were killed
            left.unlink()


def random_states() -> dict[str, Any]:
    """The random states of Python, NumPy, PyTorch and every card, as plain data and tensors."""
    import numpy
    import torch

    kind, keys, *rest = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, [int(k) for k in keys], *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Go back to `random_states`. States of cards that this machine does not have are left out."""
    import numpy
    import torch

    version, numbers, last = states["python"]
    random.setstate((version, tuple(numbers), last))
    kind, keys, *rest = states["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(states["torch"])
    for card, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, card)


class _Digested:
    """A file that digests what is written to it."""

    def __init__(self, file: Any):
        self.write_on: Callable[[bytes], int] = file.write
        self.flush = file.flush
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        return self.write_on(data)

    def digest(self) -> str:
        return self.hash.hexdigest()


def _digest(path: Path) -> str:
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            found.update(piece)
    return found.hexdigest()


def _sync(folder: Path) -> None:
    """Force the folder's new entry to the disk (POSIX; other systems have no such call)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
