"""Cards and tables: HTML in a notebook, plain text elsewhere, readable on a light and on a dark page.

Colours are the Okabe-Ito set (told apart by colour-blind readers) and never stand alone: a word or sign goes with them.
Everything is styled inline, because notebook front ends drop style sheets from outputs.
"""

from __future__ import annotations

import html as _html
import re
import sys
from collections.abc import Sequence

TONES = {"plain": "#8a8f98", "good": "#009e73", "bad": "#d55e00", "half": "#e69f00", "info": "#3b8fc9"}
_FONT = "font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:0.95em;line-height:1.45"


def in_kernel() -> bool:
    """Whether this process is a notebook kernel, so that HTML will be seen."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


def emit(text: str, html: str) -> None:
    """Show `html` in a notebook (with `text` beside it for other readers), print `text` elsewhere."""
    if in_kernel():
        from IPython.display import display

        display({"text/plain": text, "text/html": html}, raw=True)  # type: ignore[no-untyped-call]
    else:
        print(text)


class Silent:
    """What the functions of a lesson return: they have shown it already, so a notebook does not echo it again."""

    def _ipython_display_(self) -> None:
        """Nothing: see the class."""


def inline(text: str) -> str:
    """`text` as HTML: escaped, with `` `code` `` and ``**bold**`` understood."""
    text = _html.escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text)


def card(body: str, tone: str = "plain") -> str:
    """`body` (HTML) in a box with a coloured edge."""
    return (
        f'<div style="{_FONT};border-left:4px solid {TONES[tone]};background:rgba(127,127,127,0.09);'
        f'padding:0.45em 0.9em;margin:0.35em 0;max-width:52em;border-radius:0 4px 4px 0">{body}</div>'
    )


def bars(rows: Sequence[tuple[str, float, str, str]]) -> str:
    """Horizontal bars on one scale: each row is label, value, the value as text, tone."""
    top = max((abs(value) for _, value, _, _ in rows), default=0.0) or 1.0
    lines = []
    for label, value, shown, tone in rows:
        width = max(0.6, 100 * abs(value) / top)
        lines.append(
            f'<div style="display:flex;align-items:center;gap:0.7em">'
            f'<span style="flex:0 0 6.5em;text-align:right;opacity:0.85">{inline(label)}</span>'
            f'<span style="flex:1 1 auto;max-width:24em"><span style="display:block;height:0.75em;width:{width:.1f}%;'
            f'background:{TONES[tone]};border-radius:2px"></span></span>'
            f'<span style="flex:0 0 8em;font-variant-numeric:tabular-nums">{inline(shown)}</span></div>'
        )
    return "".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], tones: Sequence[str] | None = None) -> str:
    """An HTML table of text cells; `tones` colours the left edge of each row."""
    edge = [TONES[t] for t in tones] if tones else ["transparent"] * len(rows)
    line = "border-bottom:1px solid rgba(127,127,127,0.35)"
    cells = "".join(f'<th style="text-align:left;padding:0.25em 0.8em;{line}">{inline(h)}</th>' for h in head)
    body = []
    for row, colour in zip(rows, edge, strict=True):
        tds = "".join(
            f'<td style="text-align:left;vertical-align:top;padding:0.25em 0.8em;{line};white-space:normal'
            f'{f";border-left:4px solid {colour}" if i == 0 else ""}">{inline(cell)}</td>'
            for i, cell in enumerate(row)
        )
        body.append(f'<tr style="background:none">{tds}</tr>')
    return (
        f'<table style="{_FONT};border-collapse:collapse;margin:0.4em 0;max-width:62em">'
        f"<thead><tr>{cells}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], limit: int = 60) -> str:
    """The same table in columns of plain text; cells longer than `limit` are cut."""
    cut = [[cell if len(cell) <= limit else cell[: limit - 1] + "…" for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cut) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cut]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def number(value: float | bool | str | None, unit: str | None = None) -> str:
    """``12.4 GiB``: three significant digits, thousands grouped; ``yes``, ``no`` for truth values; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    size = abs(value)
    if size >= 1e15 or (0 < size < 1e-3):
        shown = f"{value:.2e}"
    elif size >= 100 or value == int(value):
        shown = f"{value:,.0f}"
    else:
        shown = f"{value:.3g}"
    return f"{shown} {unit}" if unit else shown
