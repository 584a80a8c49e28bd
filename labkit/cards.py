"""A report as a notebook shows it: what came out, what is alive at the peak against the budget, and what would fit."""

from __future__ import annotations

from . import show
from .plots.canvas import LOOKS, ordered, plural
from .results import Report
from .units import show_bytes


def report_html(report: Report) -> str:
    """`report` as a card: verdict, bar of what is alive at the peak, the counters; or where and why memory ran out."""
    where = f"{report.source} · {report.card}"
    where += f" · budget {show_bytes(report.budget_bytes)}" if report.budget_bytes else ""
    head = f"<b>{show.inline(report.name)}</b>: {show.inline(_verdict(report))}"
    lines = [
        f'<div style="display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 2em"><span>{head}</span>'
        f'<span style="opacity:0.75">{show.inline(where)}</span></div>',
        _bar(report),
        *(_failure(report) if report.failure else [_counters(report)]),
        *(f"<div>Note: {show.inline(note)}</div>" for note in report.notes),
    ]
    return show.card("".join(lines), "bad" if report.failure else "good" if report.ok else "plain")


def _verdict(report: Report) -> str:
    if report.failure:
        module = report.failure.module
        place = report.failure.place.replace(module, f"`{module}`") if module else report.failure.place
        return f"✗ **out of memory**{place}"
    if not report.ok:
        return report.status
    return "✓ **fits**" if report.budget_bytes else "ran, without a budget"


def _bar(report: Report) -> str:
    """What is alive at the peak (or at the failure), drawn to scale, with the budget as a line."""
    sizes = report.held_by()
    held = {label: sizes[label] for label in ordered(sizes) if sizes[label] > 0}
    if not held:
        return ""
    wanted = report.failure.wanted_bytes if report.failure else 0
    scattered = report.failure.scattered_bytes if report.failure else 0
    full = max(sum(held.values()) + scattered + wanted, report.budget_bytes or 0)
    parts = [(label, size, LOOKS[label][0] if label in LOOKS else "#999999") for label, size in held.items()]
    bar = "".join(_piece(size / full, colour) for _, size, colour in parts)
    if wanted:
        stripes = f"repeating-linear-gradient(45deg,{show.TONES['bad']} 0 3px,transparent 3px 6px)"
        striped = f"rgba(213,94,0,0.35);background-image:{stripes}"  # a front end may drop the image
        bar += _piece(scattered / full, "rgba(127,127,127,0.3)") + _piece(wanted / full, striped)
    if report.budget_bytes:
        at = 100 * report.budget_bytes / full
        rule = f"position:absolute;left:{at:.2f}%;top:-3px;bottom:-3px;border-left:2px solid {show.TONES['bad']}"
        bar += f'<span style="{rule}"></span>'
    legend = "".join(
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:0.7em;height:0.7em;'
        f'border-radius:2px;background:{colour}"></span> {show.inline(plural(label))} {show_bytes(size)}</span>'
        for label, size, colour in parts
    )
    return (
        f'<div style="position:relative;display:flex;height:1.1em;margin:0.45em 2px 0.35em 0">{bar}</div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:0 1.2em">{legend}</div>'
    )


def _piece(share: float, background: str) -> str:
    return f'<span style="width:{100 * share:.2f}%;background-color:{background}"></span>'


def _failure(report: Report) -> list[str]:
    failure = report.failure
    assert failure is not None
    wanted = (
        f"wanted **{show_bytes(failure.wanted_bytes)}** more; {show_bytes(failure.free_bytes)} free, of which "
        f"{show_bytes(failure.scattered_bytes)} in pieces too small"
    )
    lines = [f"<div>{show.inline(wanted)}</div>"]
    if failure.nearest:
        lines.append(f"<div>Nearest that fits: {show.inline(' · '.join(failure.nearest))}</div>")
    return lines


def _counters(report: Report) -> str:
    cells = []
    for label, peaks in (("first step", report.first), ("steady", report.steady)):
        if peaks:
            counters = {"allocated": peaks.allocated_bytes, "requested": peaks.requested_bytes}
            counters |= {"reserved": peaks.reserved_bytes}
            counters |= {"device": peaks.device_bytes} if peaks.device_bytes else {}
            cells.append(f"{label}: " + " · ".join(f"{name} {show_bytes(size)}" for name, size in counters.items()))
    if report.band_bytes:
        cells.append(f"estimate: steady allocated peak between {' and '.join(map(show_bytes, report.band_bytes))}")
    if report.timing:
        rate = f" · {report.tokens_per_second:,.0f} tokens/s" if report.tokens_per_second else ""
        cells.append(f"step: {report.timing}{rate}")
    if report.unattributed_bytes:
        cells.append(f"unattributed: {show_bytes(report.unattributed_bytes)}")
    if report.leftover_bytes:
        cells.append(f"left behind afterwards: {show_bytes(report.leftover_bytes)}")
    return "".join(f"<div>{show.inline(cell)}</div>" for cell in cells)
