"""What a peak consists of: `bars` (one stacked bar a report) and `waterfall` (term by term, or between two reports)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..results import Report
from ..units import UserError, show_bytes
from . import canvas
from .canvas import BLACK, UNATTRIBUTED, UNEXPLAINED, VERMILLION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Terms = Mapping[str, "tuple[int | None, int | None]"]  # name -> (bytes by formula, bytes measured)
SAME = 0.02  # a term that changes by less than this part of itself counts as the same


def bars(reports: Report | Iterable[Report], ax: Axes | None = None) -> Axes:
    """The peak of each report as one horizontal bar, stacked by category, against the budget.

    A report that ran out of memory shows what was alive, in pale grey what was free in pieces too small, and dashed
    what it still wanted. Raises `UserError` when there is no report or one of them does not say what was alive.
    """
    found = canvas.as_reports(reports, "bars")
    parts = [_parts(report, "bars") for report in found]
    wanted = [r.failure.wanted_bytes if r.failure else 0 for r in found]
    pieces = [r.failure.scattered_bytes if r.failure else 0 for r in found]
    largest = max(sum(p.values()) + s + w for p, s, w in zip(parts, pieces, wanted, strict=True))
    divisor, unit = canvas.scale(largest)
    with canvas.drawing(ax, height=1.75 + 0.42 * len(found)) as ax:
        labels = canvas.ordered(dict.fromkeys(label for p in parts for label in p))
        starts = [0.0] * len(found)
        for position, label in enumerate(labels):
            colour, hatch = canvas.look(label, position)
            lengths = [p.get(label, 0) / divisor for p in parts]
            ax.barh(
                range(len(found)), lengths, left=starts, height=0.62, color=colour, hatch=hatch, linewidth=0.4,
                edgecolor=canvas.hatch_colour(colour), label=canvas.plural(label),
            )  # fmt: skip
            starts = [s + n for s, n in zip(starts, lengths, strict=True)]
        if any(pieces):
            lengths = [n / divisor for n in pieces]
            ax.barh(range(len(found)), lengths, left=starts, height=0.62, color=canvas.PALE, label=canvas.PIECES)
            starts = [s + n for s, n in zip(starts, lengths, strict=True)]
        for row, (report, start) in enumerate(zip(found, starts, strict=True)):
            end = start + wanted[row] / divisor
            if report.failure:
                ax.barh(row, end - start, left=start, height=0.62, color="white", edgecolor=BLACK, linestyle="--")
            ax.annotate(
                canvas.wrapped(_bar_label(report, parts[row]), 17), (end, row), xytext=(4, 0),
                textcoords="offset points", va="center", fontsize=canvas.SMALL,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
        ax.set_yticks(range(len(found)), [canvas.wrapped(r.name, 18) for r in found] if len(found) > 1 else [""])
        ax.set_ylim(len(found) - 0.5, -0.7)
        ax.set_xlim(0, 1.28 * largest / divisor)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel(canvas.moment(found, unit))
        budgets = [r.budget_bytes for r in found]
        if len(set(budgets)) == 1:
            canvas.budget_rule(ax, budgets[0], divisor, largest=2 * largest)
        else:
            ax.vlines([], 0, 0, color=VERMILLION, label="budget")
            for row, budget in enumerate(budgets):
                if budget and budget <= 1.6 * largest:
                    ax.set_xlim(right=max(ax.get_xlim()[1], 1.03 * budget / divisor))
                    ax.vlines(budget / divisor, row - 0.45, row + 0.45, color=VERMILLION)
        canvas.legend_below(ax)
        title = canvas.named(found[0]) if len(found) == 1 else "What the peaks consist of"
        canvas.entitle(ax, title, canvas.source_line(found), pad=16)
    texts = [f"{r.name}, {_bar_label(r, p)}: {_spoken(p)}{_in_pieces(r)}" for r, p in zip(found, parts, strict=True)]
    words = canvas.budget_words(found)
    canvas.describe(ax, f"Bytes at the peak by category ({canvas.source_line(found)}): {'; '.join(texts)}{words}.")
    return ax


def waterfall(
    what: Report | Terms,
    other: Report | None = None,
    *,
    formula: Mapping[str, int] | None = None,
    report: Report | None = None,
    by: str = "category",
    ax: Axes | None = None,
) -> Axes:
    """What a peak consists of, term by term, or what changed between two peaks.

    ``waterfall(report)`` takes the terms from what was alive at the peak, by ``"category"``, ``"module"`` or
    ``"phase"``; `formula` (term -> bytes) puts a hollow bar under each. ``waterfall(terms, report=report)`` takes them
    as ``{term: (bytes by formula, bytes measured)}``, either of them None where there is none; what the report's peak
    holds beyond them is shown as ``unexplained``. ``waterfall(before, after)`` goes from one peak to the other and says
    of each term whether it shrank, stayed, grew or is new. Raises `UserError` when there are no terms.
    """
    if isinstance(what, Report) and other is not None:
        return _between(what, other, by, ax)
    if isinstance(what, Report):
        measured = _parts(what, "waterfall", by)
        names = canvas.ordered([*measured, *(name for name in formula or {} if name not in measured)])
        terms = {name: ((formula or {}).get(name), measured.get(name)) for name in names}
        return _terms(terms, what, ax)
    if other is not None or not isinstance(what, Mapping):
        raise UserError("waterfall takes a report, two reports, or {term: (bytes by formula, bytes measured)}")
    terms = dict(what)
    for name, pair in terms.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise UserError(f"waterfall: term {name!r} needs (bytes by formula, bytes measured), not {pair!r}")
    if report is not None and report.peak_bytes is not None and terms:
        rest = _counted(report) - sum(m or 0 for _, m in terms.values())
        if abs(rest) > 0.001 * report.peak_bytes:
            terms[UNEXPLAINED] = (None, rest)
    return _terms(terms, report, ax)


def _terms(terms: Terms, report: Report | None, ax: Axes | None) -> Axes:
    """Floating bars from the first term to the total; hollow ones below them are the formula's."""
    if not any(n is not None for pair in terms.values() for n in pair):
        raise UserError("waterfall has nothing to draw: no term has a value")
    has = [any(pair[i] is not None for pair in terms.values()) for i in (0, 1)]
    sums = [sum(pair[i] or 0 for pair in terms.values()) for i in (0, 1)]
    divisor, unit = canvas.scale(max(sums))
    known = [report] if report else []
    rows = [*terms.items(), ("total", (sums[0] if has[0] else None, sums[1] if has[1] else None))]
    with canvas.drawing(ax, height=1.25 + 0.27 * len(rows)) as ax:
        start = 0
        for y, (name, pair) in enumerate(rows):
            left = 0 if name == "total" else start
            colour, hatch = (BLACK, "") if name == "total" else canvas.look(name, y)
            if pair[1] is not None:
                ax.barh(
                    y - (0.14 if has[0] else 0), pair[1] / divisor, left=left / divisor, height=0.42 if has[0] else 0.6,
                    color=colour, hatch=hatch, edgecolor=canvas.hatch_colour(colour), linewidth=0.5,
                )  # fmt: skip
            if pair[0] is not None:
                ax.barh(
                    y + 0.25, pair[0] / divisor, left=left / divisor, height=0.26, color="white", edgecolor=BLACK,
                    linewidth=0.9,
                )  # fmt: skip
            end = left + (pair[1] if pair[1] is not None else pair[0] or 0)
            if y + 2 < len(rows):  # a thread to where the next term starts
                ax.plot([end / divisor] * 2, [y, y + 1], color=canvas.GREY, linewidth=0.7, zorder=0)
            start = end
        headers = [header for header, there in (("measured", has[1]), ("formula", has[0])) if there]
        if has[1]:
            headers[0] = report.source if report else "measured"
        cells = [[show_bytes(n) for n, there in ((pair[1], has[1]), (pair[0], has[0])) if there] for _, pair in rows]
        _table(ax, headers, cells)
        key = "; hollow: the formula" if all(has) else ""
        _rows(ax, [canvas.plural(name) for name, _ in rows], canvas.moment(known, unit) + key, max(sums) / divisor)
        if report is not None:
            canvas.budget_rule(ax, report.budget_bytes, divisor, largest=max(sums))
        title = canvas.named(report) if report else "What the peak consists of"
        canvas.entitle(ax, title, canvas.source_line(known), pad=16)
    said = [
        f"{canvas.plural(name)} {show_bytes(m)}" + (f" (formula {show_bytes(f)})" if f is not None else "")
        for name, (f, m) in rows
    ]
    whose = f"the peak of {report.name} ({canvas.source_line([report])})" if report else "the peak"
    canvas.describe(ax, f"Waterfall of {whose}: {canvas.listing(said)}{canvas.budget_words(known)}.")
    return ax


def _between(before: Report, after: Report, by: str, ax: Axes | None) -> Axes:
    """From one peak to another: each term's change as a floating bar, with what it was, is, and what became of it."""
    was, now = _parts(before, "waterfall", by), _parts(after, "waterfall", by)
    names = canvas.ordered(dict.fromkeys([*was, *now]))
    changes = {name: (was.get(name, 0), now.get(name, 0)) for name in names}
    start, end = sum(was.values()), sum(now.values())
    divisor, unit = canvas.scale(max(start, end))
    with canvas.drawing(ax, height=1.45 + 0.27 * (len(names) + 2)) as ax:
        ax.barh(0, start / divisor, height=0.6, color=BLACK)
        level = start
        for y, (a, b) in enumerate(changes.values(), start=1):
            verdict = _verdict(a, b)
            colour, hatch = {"shrank": (canvas.BLUE, ""), "gone": (canvas.BLUE, "")}.get(verdict, (VERMILLION, "////"))
            ax.barh(
                y, (b - a) / divisor, left=level / divisor, height=0.6, color=colour, hatch=hatch, edgecolor="white",
                linewidth=0,
            )  # fmt: skip
            ax.plot([level / divisor] * 2, [y - 1, y + 0.3], color=canvas.GREY, linewidth=0.7, zorder=0)
            level += b - a
            if verdict == "same":
                ax.plot(level / divisor, y, marker="|", color=BLACK, markersize=9)
        last = len(names) + 1
        ax.plot([level / divisor] * 2, [last - 1, last], color=canvas.GREY, linewidth=0.7, zorder=0)
        ax.barh(last, end / divisor, height=0.6, color=BLACK)
        cells = [[show_bytes(start), "", ""]]
        cells += [[show_bytes(a or None), show_bytes(b or None), _verdict(a, b)] for a, b in changes.values()]
        cells += [["", show_bytes(end), _verdict(start, end)]]
        _table(ax, ["before", "after", ""], cells)
        labels = ["peak before", *(canvas.plural(n) for n in names), "peak after"]
        _rows(ax, labels, canvas.moment([before, after], unit), max(start, end) / divisor)
        canvas.budget_rule(ax, after.budget_bytes, divisor, largest=max(start, end))
        canvas.entitle(ax, f"{before.name}  →  {after.name}", canvas.source_line([before, after]), pad=16)
    said = [
        f"{canvas.plural(name)} {_verdict(a, b)} ({show_bytes(a)} to {show_bytes(b)})"
        for name, (a, b) in changes.items()
    ]
    canvas.describe(
        ax,
        f"Waterfall from the peak of {before.name}, {show_bytes(start)}, to that of {after.name}, {show_bytes(end)} "
        f"({canvas.source_line([before, after])}): {canvas.listing(said)}.",
    )
    return ax


def _verdict(before: int, after: int) -> str:
    if not before and after:
        return "new"
    if before and not after:
        return "gone"
    if abs(after - before) <= SAME * before:
        return "same"
    return "shrank" if after < before else "grew"


def _counted(report: Report) -> int:
    """The peak at which `Report.alive` was taken: the steady step's, where there was one."""
    if report.steady:
        return report.steady.allocated_bytes
    return report.peak_bytes or sum(report.held_by().values())


def _parts(report: Report, function: str, by: str = "category") -> dict[str, int]:
    """Bytes at the peak by label, and what the trace did not see. Raises `UserError` when nothing is known."""
    if by not in ("category", "module", "phase"):
        raise UserError(f"{function} sums by category, module or phase, not by {by!r}")
    parts = {label: n for label, n in report.held_by(by).items() if n}
    if not parts:
        raise UserError(f"{function}: {report.name} does not say what was alive at its peak (it was not traced)")
    if report.ok and (rest := _counted(report) - sum(parts.values())) > 0:
        parts[UNATTRIBUTED] = rest
    return parts


def _bar_label(report: Report, parts: Mapping[str, int]) -> str:
    held = show_bytes(sum(parts.values()))
    return f"{held}, wanted {show_bytes(report.failure.wanted_bytes)} more" if report.failure else held


def _in_pieces(report: Report) -> str:
    scattered = report.failure.scattered_bytes if report.failure else 0
    return f", and {show_bytes(scattered)} {canvas.PIECES}" if scattered else ""


def _spoken(parts: Mapping[str, int]) -> str:
    return canvas.listing([f"{canvas.plural(label)} {show_bytes(n)}" for label, n in parts.items()])


def _rows(ax: Axes, labels: list[str], xlabel: str, right: float) -> None:
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.set_xlim(0, 1.02 * right)
    ax.set_xlabel(xlabel)


def _table(ax: Axes, headers: list[str], cells: list[list[str]]) -> None:
    """Columns of text to the right of the bars, one line a row, so that every bar has its number."""
    for column, header in enumerate(headers):
        # Points from the edge, not parts of the width: the layout then knows how much room the columns need.
        offset = (47 * (column + 1), 0)
        ax.annotate(
            header, (1, 1), xycoords="axes fraction", xytext=(offset[0], 2), textcoords="offset points", ha="right",
            va="bottom", fontsize=canvas.SMALL, color="#444444", annotation_clip=False,
        )  # fmt: skip
        for y, row in enumerate(cells):
            ax.annotate(
                row[column], (1, y), xycoords=("axes fraction", "data"), xytext=offset, textcoords="offset points",
                ha="right", va="center", fontsize=canvas.SMALL, annotation_clip=False,
            )  # fmt: skip
