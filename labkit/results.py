"""Results as data: `Report` (what one experiment used, how long it took) and `Ledger` (JSON lines that survive a kill).

Every class here is a frozen dataclass of plain values, so a report travels through JSON, a pickle or a process
boundary unchanged. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .units import UserError, show_bytes, show_seconds

SCHEMA = 1  # of a ledger row; raised when a field changes its meaning
METHOD = "1"  # of measuring; raised when the same experiment would give other numbers
SOURCES = ("measured", "predicted", "cpu", "reference")
PHASES = ("build", "forward", "backward", "recompute", "optimizer", "other")
CATEGORIES = ("parameter", "gradient", "optimizer state", "activation", "temporary", "workspace", "input")


@dataclass(frozen=True)
class Peaks:
    """The peak of one training step by four counters, in bytes.

    ``allocated``: live blocks as PyTorch's caching allocator rounds them; ``requested``: the same without rounding;
    ``reserved``: segments held by the allocator; ``device``: what the driver reports for the whole process, CUDA
    context included (None where it was not read, as in a prediction).
    """

    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int
    device_bytes: int | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds of one step: median and interquartile range over ``repeats``, and the first (cold) step."""

    median_seconds: float
    spread_seconds: float
    repeats: int
    first_seconds: float | None = None
    clock: str = "cuda events"

    def __str__(self) -> str:
        return f"{show_seconds(self.median_seconds)} ± {show_seconds(self.spread_seconds)}"


@dataclass(frozen=True)
class Holding:
    """Bytes alive at one moment that share an owner: the module that made them, what they are, the phase of birth."""

    module: str
    category: str
    phase: str
    nbytes: int
    count: int = 1


@dataclass(frozen=True)
class Timeline:
    """Who held how much through one traced step: ``held[row][column]`` bytes of ``modules[row]`` at a moment.

    A column stands for a stretch of the step and shows the moment of that stretch at which the total was largest,
    so that the peak is never lost to sampling. ``by_category[row][column]`` is the same cut by `CATEGORIES`.
    """

    phases: tuple[str, ...]  # of each column
    modules: tuple[str, ...]  # row labels, in the order of the forward pass
    held: tuple[tuple[int, ...], ...]
    categories: tuple[str, ...]
    by_category: tuple[tuple[int, ...], ...]

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes held in all, one value a column."""
        return tuple(sum(column) for column in zip(*self.held, strict=True))


@dataclass(frozen=True)
class Failure:
    """Where and why memory ran out. ``free_bytes`` counts what the budget still had, ``scattered_bytes`` the part of
    it that lies inside reserved segments in pieces too small for ``wanted_bytes``."""

    phase: str
    module: str
    wanted_bytes: int
    free_bytes: int
    scattered_bytes: int
    alive: tuple[Holding, ...] = ()
    nearest: tuple[str, ...] = ()
    message: str = ""

    @property
    def place(self) -> str:
        """``" in forward (transformer.h.4.mlp.act)"``; empty where the place was not looked for."""
        if self.phase == "other" and not self.module:
            return ""
        return f" in {self.phase}" + (f" ({self.module})" if self.module else "")


@dataclass(frozen=True)
class Report:
    """What one experiment used: memory, time and where the memory went, or why it ran out."""

    name: str
    status: str  # ok, oom
    source: str  # one of SOURCES
    card: str
    budget_bytes: int | None = None
    first: Peaks | None = None
    steady: Peaks | None = None
    timing: Timing | None = None
    tokens: int | None = None  # in one step
    loss: float | None = None  # of the last step, where numbers were really computed
    phase_peaks: dict[str, int] = field(default_factory=dict)  # allocated, bytes
    alive: tuple[Holding, ...] = ()  # at the steady peak, largest first
    timeline: Timeline | None = None
    failure: Failure | None = None
    unattributed_bytes: int | None = None  # true peak minus the peak of the traced pass
    leftover_bytes: int = 0  # still allocated after everything was torn down
    context_bytes: int | None = None  # CUDA context: outside the allocator and the budget
    band_bytes: tuple[int, int] | None = None  # of an estimate: where its steady allocated peak is expected to lie
    settings: dict[str, Any] = field(default_factory=dict)  # the sizes or the recipe that were asked for
    notes: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)
    method: str = METHOD

    @property
    def ok(self) -> bool:
        """Whether the experiment ran to its end."""
        return self.status == "ok"

    @property
    def peak_bytes(self) -> int | None:
        """The larger of the first and the steady step's allocated peak; None after running out of memory."""
        peaks = [p.allocated_bytes for p in (self.first, self.steady) if p]
        return max(peaks) if peaks and self.ok else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of one step over its median time; None where no time was measured."""
        return self.tokens / self.timing.median_seconds if self.tokens and self.timing else None

    def fits(self, budget: int | str) -> bool:
        """Whether the experiment ran and never reserved more than `budget`."""
        from .units import parse_size

        reserved = [p.reserved_bytes for p in (self.first, self.steady) if p]
        return self.ok and bool(reserved) and max(reserved) <= parse_size(budget)

    def held_by(self, key: str = "category") -> dict[str, int]:
        """Bytes alive at the peak (or at the failure), summed by ``"category"``, ``"module"`` or ``"phase"``."""
        sums: dict[str, int] = {}
        for holding in self.failure.alive if self.failure else self.alive:
            label = getattr(holding, key)
            sums[label] = sums.get(label, 0) + holding.nbytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Report:
        """The report in a row; fields that this version does not know are ignored."""
        return _build(cls, row)

    def __str__(self) -> str:
        where = f"{self.source} · {self.card}"
        if self.budget_bytes:
            where += f" · budget {show_bytes(self.budget_bytes)}"
        if self.failure:
            return _failure_text(self, where)
        lines = [f"{self.name}: fits{'' if self.budget_bytes else ' (no budget)'}    {where}"]
        for label, peaks in (("first step", self.first), ("steady", self.steady)):
            if peaks:
                line = (
                    f"  {label:10s} allocated {show_bytes(peaks.allocated_bytes)} · "
                    f"requested {show_bytes(peaks.requested_bytes)} · reserved {show_bytes(peaks.reserved_bytes)}"
                )
                lines.append(line + (f" · device {show_bytes(peaks.device_bytes)}" if peaks.device_bytes else ""))
        if self.band_bytes:
            low, high = map(show_bytes, self.band_bytes)
            lines.append(f"  estimate   the steady allocated peak lies between {low} and {high}")
        if self.timing:
            rate = f" · {self.tokens_per_second:,.0f} tokens/s" if self.tokens else ""
            lines.append(f"  step       {self.timing}{rate}")
        held = self.held_by()
        if held:
            lines.append("  at the peak " + " · ".join(f"{k} {show_bytes(v)}" for k, v in held.items() if v))
        if self.unattributed_bytes is not None:
            lines.append(f"  unattributed {show_bytes(self.unattributed_bytes)}")
        if self.leftover_bytes:
            lines.append(f"  left behind afterwards: {show_bytes(self.leftover_bytes)}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from .cards import report_html

        return report_html(self)


def _failure_text(report: Report, where: str) -> str:
    failure = report.failure
    assert failure is not None
    held = " · ".join(f"{label} {show_bytes(n)}" for label, n in report.held_by().items() if n)
    lines = [
        f"{report.name}: out of memory{failure.place}    {where}",
        f"  wanted {show_bytes(failure.wanted_bytes)}, {show_bytes(failure.free_bytes)} free"
        f" of which {show_bytes(failure.scattered_bytes)} in pieces too small",
    ]
    if held:
        lines.append(f"  alive: {held}")
    if failure.nearest:
        lines.append("  nearest that fits: " + " · ".join(failure.nearest))
    lines.append("  causes and changes: lab.diagnose(report), or in a terminal: labkit diagnose")
    return "\n".join([*lines, *(f"  note: {note}" for note in report.notes)])


class Ledger:
    """Append-only JSON lines. A row is written by one ``write`` and synced, so a kill loses at most the row in flight;
    a last line that was cut short is skipped with a warning when the file is read, and closed before the next append.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def append(self, row: dict[str, Any]) -> dict[str, Any]:
        """Write one row (``schema`` added) and return it. Raises `UserError` when the file cannot be written."""
        row = {"schema": SCHEMA, **row}
        line = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                if size:
                    os.lseek(descriptor, size - 1, os.SEEK_SET)
                    if os.read(descriptor, 1) != b"\n":
                        line = b"\n" + line
                if os.write(descriptor, line) != len(line):
                    raise OSError(28, "the disk is full: the row was cut short")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror or error}") from error
        return row

    def rows(self) -> list[dict[str, Any]]:
        """All readable rows, oldest first. A line that is not JSON gives a warning with its number and is skipped."""
        return list(self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror or error}") from error
        for number, line in enumerate(text.split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # the latter for a line that is nested too deeply
                row = None
            schema = row.get("schema", 0) if isinstance(row, dict) else None
            if not isinstance(row, dict) or not isinstance(schema, int):
                warnings.warn(f"{self.path.name}: line {number} is not a complete row; skipped", stacklevel=2)
                continue
            if schema > SCHEMA:
                warnings.warn(f"{self.path.name}: line {number} comes from a newer labkit; skipped", stacklevel=2)
                continue
            yield row

    def frame(self) -> Any:
        """The rows as a pandas DataFrame, nested fields as columns with dotted names."""
        import pandas

        return pandas.json_normalize(self.rows())


listeners: list[Callable[[Report], None]] = []  # the open lesson's ledger, while a lesson is open


def publish(report: Report) -> Report:
    """Hand a finished report to the open lesson (if any) and return it."""
    for listener in list(listeners):
        listener(report)
    return report


def to_rows(reports: Iterable[Report]) -> list[dict[str, Any]]:
    """Reports as ledger rows of kind ``report``."""
    return [{"kind": "report", **report.to_dict()} for report in reports]


def _build(kind: Any, value: Any) -> Any:
    """`value` (plain JSON) as the dataclass, tuple, dict or optional that the annotation `kind` names."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in args if a is not type(None)]
        return None if value is None else _build(inner[0], value)
    if origin is tuple:
        return tuple(_build(args[0], item) for item in value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        known = {f.name for f in dataclasses.fields(kind)}
        return kind(**{k: _build(hints[k], v) for k, v in value.items() if k in known})  # type: ignore[operator]
    return value
