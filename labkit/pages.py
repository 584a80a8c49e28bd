"""HTML pages that stand alone: one file with everything in it, no script, nothing loaded from anywhere."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

from .stylesheet import CSS

_EMPTY = " class=empty"


def page(title: str, kicker: str, head: str, sections: Sequence[tuple[str, str, str]], foot: str = "") -> str:
    """A page: `title` and `kicker` are text, `head`, `foot` and the body of a section are HTML.

    A section is its id, its title and its body; one with an empty body is left out, the others are linked at the top.
    """
    there = [(name, text, body) for name, text, body in sections if body]
    nav = "".join(f'<a href="#{safe(name)}">{safe(text)}</a>' for name, text, _ in there)
    main = "".join(f'<section id="{safe(name)}"><h2>{safe(text)}</h2>{body}</section>' for name, text, body in there)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{safe(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        f"style-src 'unsafe-inline'\"><style>{CSS}</style></head><body>"
        f"<header><p class=kicker>{safe(kicker)}</p>{head}<nav>{nav}</nav></header><main>{main}</main>"
        f"<footer>{foot}</footer></body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], tones: Sequence[str]) -> str:
    """A table of cells that are HTML already; on a narrow screen each row becomes a card with its labels.

    `tones` gives each row one of ``good``, ``half``, ``bad``, ``plain``.
    """
    heads = "".join(f"<th>{h}</th>" for h in head)
    lines = []
    for row, tone in zip(rows, tones, strict=True):
        cells = "".join(
            f'<td data-label="{html.escape(h)}"{_EMPTY if c in ("", "–") else ""}><span>{c}</span></td>'
            for h, c in zip(head, row, strict=True)
        )
        lines.append(f"<tr class={tone}>{cells}</tr>")
    return f"<div class=wide><table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def safe(text: Any) -> str:
    """Any value as text for HTML, in or between tags; what no encoding can write becomes a question mark."""
    return html.escape(str(text).encode("utf-8", "replace").decode(), quote=True)


def rich(text: str) -> str:
    """`safe` text in which ``` `code` ``` is set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", safe(text))
