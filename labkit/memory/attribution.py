"""Pictures of a recorded run: the peak, who was alive at it, phase by phase, and the timeline by module."""

from __future__ import annotations

from collections.abc import Sequence

from ..results import CATEGORIES, Holding, Report, Timeline
from .recorder import Recorder


def categories(recorder: Recorder) -> list[str]:
    """The category of every identity: what is known for certain, else by where it was born and how long it lived."""
    last: dict[int, int] = {}
    for position, event in enumerate(recorder.events):
        if event < 0:
            last[~event] = recorder.where[position]
    names: list[str] = []
    for identity, place in enumerate(recorder.births):
        known = recorder.kinds.get(identity)
        if known is not None:
            names.append(known)
            continue
        phase = recorder.places[place][0]
        end = recorder.places[last[identity]][0] if identity in last else None
        if phase == "build":
            names.append("input")
        elif phase == "optimizer":
            names.append("optimizer state" if end is None else "temporary")
        elif phase in ("forward", "recompute"):
            names.append("temporary" if end == phase else "activation")
        elif phase == "backward":
            names.append("gradient" if end in (None, "optimizer", "other", "forward") else "temporary")
        else:
            names.append("temporary")
    return names


def peak(recorder: Recorder, span: tuple[int, int] | None = None) -> tuple[int, int]:
    """The most bytes alive at once within `span` of the events, and the number of events until then."""
    first, end = span or (0, len(recorder.events))
    sizes, now, best, at = recorder.sizes, 0, -1, 0
    for position, event in enumerate(recorder.events[:end]):
        now += sizes[event] if event >= 0 else -sizes[~event]
        if position >= first and now > best:
            best, at = now, position + 1
    return max(best, 0), at


def alive(recorder: Recorder, until: int) -> tuple[Holding, ...]:
    """Who is alive after `until` events, summed by module, category and phase of birth, largest first."""
    living: dict[int, None] = {}
    for event in recorder.events[:until]:
        if event >= 0:
            living[event] = None
        else:
            living.pop(~event, None)
    kinds = categories(recorder)
    sums: dict[tuple[str, str, str], list[int]] = {}
    for identity in living:
        phase, module = recorder.places[recorder.births[identity]]
        module = recorder.owners.get(identity, module)
        entry = sums.setdefault((module, kinds[identity], phase), [0, 0])
        entry[0] += recorder.sizes[identity]
        entry[1] += 1
    holdings = [Holding(*key, nbytes=nbytes, count=count) for key, (nbytes, count) in sums.items()]
    return tuple(sorted(holdings, key=lambda h: -h.nbytes))


def difference(before: Report, after: Report, key: str = "category") -> dict[str, int]:
    """Bytes that `after` holds at its peak beyond `before`, by ``"category"``, ``"module"`` or ``"phase"``, the largest
    change first; what did not change is left out."""
    first, second = before.held_by(key), after.held_by(key)
    changes = {label: second.get(label, 0) - first.get(label, 0) for label in {**second, **first}}
    return dict(sorted(((k, v) for k, v in changes.items() if v), key=lambda item: -abs(item[1])))


def phase_peaks(recorder: Recorder, span: tuple[int, int] | None = None) -> dict[str, int]:
    """The most bytes alive at once in each phase within `span`."""
    first, end = span or (0, len(recorder.events))
    peaks: dict[str, int] = {}
    now = 0
    for position, event in enumerate(recorder.events[:end]):
        now += recorder.sizes[event] if event >= 0 else -recorder.sizes[~event]
        if position >= first:
            phase = recorder.places[recorder.where[position]][0]
            if now > peaks.get(phase, -1):
                peaks[phase] = now
    return peaks


class Rows:
    """The rows of a timeline: embedding, the blocks, final norm, head and loss, optimizer, other."""

    def __init__(self, modules: dict[str, str]):
        self.blocks = blocks(modules)
        self.labels = ["embedding", *(f"block {i}" for i in range(len(self.blocks))), "final norm", "head and loss",
                       "optimizer", "other"]  # fmt: skip
        self._block_rows = {path: i + 1 for i, path in enumerate(self.blocks)}
        first = self.blocks[0] if self.blocks else None
        self._before: set[str] = set()
        self._norms: set[str] = set()
        seen_block = False
        for path, kind in modules.items():
            if path == first:
                seen_block = True
            name = path.rpartition(".")[2].lower()
            if "embed" in kind.lower() or (first is not None and not seen_block and name in ("wte", "wpe", "drop")):
                self._before.add(path)
            elif "norm" in kind.lower() and self._row_of_block(path) is None:
                self._norms.add(path)
            elif kind == "Dropout" and self._row_of_block(path) is None and not seen_block:
                self._before.add(path)

    def _row_of_block(self, path: str) -> int | None:
        while path:
            row = self._block_rows.get(path)
            if row is not None:
                return row
            path = path.rpartition(".")[0]
        return None

    def __call__(self, phase: str, module: str) -> int:
        count = len(self.blocks)
        if phase == "optimizer":
            return count + 3
        row = self._row_of_block(module)
        if row is not None:
            return row
        if module in self._before:
            return 0
        if module in self._norms:
            return count + 1
        if "head" in module.rpartition(".")[2].lower() or (module == "" and phase in ("forward", "backward")):
            return count + 2
        return count + 4


def blocks(modules: dict[str, str]) -> list[str]:
    """Paths of the transformer blocks, in order: of all classes that stand as members of a ``ModuleList``, the one
    with the most members (the innermost where several have as many, as with checkpointed segments)."""
    groups: dict[str, list[str]] = {}
    for path, kind in modules.items():
        parent, _, last = path.rpartition(".")
        if last.isdigit() and modules.get(parent) == "ModuleList":
            groups.setdefault(kind, []).append(path)
    if not groups:
        return []
    return max(groups.values(), key=lambda paths: (len(paths), max(p.count(".") for p in paths)))


def timeline(
    recorder: Recorder,
    modules: dict[str, str],
    *,
    columns: int = 160,
    span: tuple[int, int] | None = None,
    extra: Sequence[tuple[str, int]] = (),
) -> Timeline:
    """Bytes held by each row through `span` of the events, in at most `columns` stretches that keep their maxima.

    A stretch never crosses a change of phase as long as there are fewer changes than columns. `extra` are constant
    holdings (category, bytes), shown in the row ``other``.
    """
    first, end = span or (0, len(recorder.events))
    rows = Rows(modules)
    kinds = categories(recorder)
    kind_index = {name: i for i, name in enumerate(CATEGORIES)}
    row_of = [rows(*place) for place in recorder.places]
    count, held, by_kind = len(rows.labels), [0] * len(rows.labels), [0] * len(CATEGORIES)
    for name, nbytes in extra:
        held[count - 1] += nbytes
        by_kind[kind_index[name]] += nbytes
    cells: list[tuple[str, list[int], list[int]]] = []
    span_length = max(1, end - first)
    width = max(1, -(-span_length // max(1, columns - 24)))
    best, best_phase, filled = -1, "", 0
    now = sum(held)
    keep: tuple[list[int], list[int]] = (held[:], by_kind[:])
    for position, event in enumerate(recorder.events[:end]):
        identity = event if event >= 0 else ~event
        nbytes = recorder.sizes[identity] if event >= 0 else -recorder.sizes[identity]
        born = recorder.births[identity]
        owner = recorder.owners.get(identity)
        row = row_of[born] if owner is None else rows("build", owner)
        held[row] += nbytes
        by_kind[kind_index.get(kinds[identity], 4)] += nbytes
        now += nbytes
        if position < first:
            continue
        phase = recorder.places[recorder.where[position]][0]
        if filled and (filled >= width or (phase != best_phase and len(cells) < columns - 2)):
            cells.append((best_phase, *keep))
            best, filled = -1, 0
        if now > best:
            best, keep = now, (held[:], by_kind[:])
        best_phase = phase
        filled += 1
    if filled:
        cells.append((best_phase, *keep))
    while len(cells) > columns:  # too many changes of phase: join the two neighbours that lose least
        sums = [sum(c[1]) for c in cells]
        i = min(range(len(cells) - 1), key=lambda j: abs(sums[j] - sums[j + 1]))
        cells[i : i + 2] = [max(cells[i], cells[i + 1], key=lambda c: sum(c[1]))]
    return Timeline(
        phases=tuple(c[0] for c in cells),
        modules=tuple(rows.labels),
        held=tuple(tuple(c[1][r] for c in cells) for r in range(count)),
        categories=CATEGORIES,
        by_category=tuple(tuple(c[2][k] for c in cells) for k in range(len(CATEGORIES))),
    )
