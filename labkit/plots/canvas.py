"""What all figures share: the white canvas, the palette, the title, and the description that travels with the image."""

from __future__ import annotations

import base64
import functools
import html
import io
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..results import Report
from ..units import GiB, KiB, MiB, UserError, show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, CSS_DPI, PNG_DPI = 4.8, 100, 200  # 480 pixels on the page, drawn twice as fine for dense screens

# Okabe and Ito, "Color Universal Design" (2008): eight colours that colour-blind readers tell apart.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, DARK_RED = "#999999", "#A04000"  # the second for words about a vermillion line: darker, to be read

# Category -> (colour, hatch, plural): the hatch tells apart what a black-and-white print does not.
LOOKS: dict[str, tuple[str, str, str]] = {
    "parameter": (BLUE, "", "parameters"),
    "optimizer state": (GREEN, "\\\\\\", "optimizer state"),
    "workspace": (PURPLE, "xxx", "workspace"),
    "input": (GREY, "", "input"),
    "gradient": (ORANGE, "///", "gradients"),
    "activation": (SKY, "", "activations"),
    "temporary": (YELLOW, "...", "temporaries"),
}
OTHER_LOOKS = ((VERMILLION, "---"), (YELLOW, ""), (GREY, "..."), (ORANGE, "xxx"), (SKY, "\\\\\\"), (BLUE, "+++"))
ALIASES = {"weights": "parameter", "weight": "parameter"} | {names[2]: label for label, names in LOOKS.items()}
UNATTRIBUTED, UNEXPLAINED = "unattributed", "unexplained"
PIECES = "free, in pieces too small"  # what a failure calls scattered
PALE = "#DDDDDD"

MARKERS = "osD^vP*<>"
SERIES = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK)
DASHES = ("-", "--", "-.", ":")

FONT, SMALL = 8, 7.5  # points: 11 and 10 pixels
STYLE = {
    "font.size": FONT,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "hatch.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
}


@contextmanager
def styled() -> Iterator[None]:
    """The course's style, whatever the reader's own is; rcParams are as before afterwards."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


@contextmanager
def drawing(ax: Axes | None, height: float = 3.0) -> Iterator[Axes]:
    """Axes to draw on in the course's style: `ax`, or those of a new figure `height` inches tall."""
    with styled():
        if ax is None:
            ax = new_figure(WIDTH_INCHES, height).add_subplot()
            setattr(ax, "_repr_mimebundle_", functools.partial(bundle, ax))  # noqa: B010 - Axes does not declare it
        else:
            whiten(ax)
        yield ax


def new_figure(width: float, height: float) -> Figure:
    """An empty white figure, `width` x `height` inches, that pyplot does not know."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=PNG_DPI, layout="constrained", facecolor="white")


def whiten(ax: Axes) -> None:
    """Make axes that somebody else created (perhaps under a dark style) dark on white like ours."""
    ax.figure.patch.set_facecolor("white")
    ax.set_facecolor("white")
    ax.tick_params(colors=BLACK, labelsize=FONT)
    for side, spine in ax.spines.items():
        spine.set_color(BLACK)
        spine.set_visible(side in ("left", "bottom"))
    for label in (ax.xaxis.label, ax.yaxis.label):
        label.set_color(BLACK)
        label.set_fontsize(FONT)


def source_line(reports: Iterable[Report]) -> str:
    """``"measured · NVIDIA H200"``; several sources are joined by ``+``."""
    return " + ".join(dict.fromkeys(f"{r.source} · {r.card}" for r in reports))


def time_source(reports: Iterable[Report], memory: bool = True) -> str:
    """`source_line`, and where the times come from if elsewhere: ``"predicted · h200, times: reference · ..."``; that
    alone where all do and no `memory` is shown."""
    found = list(reports)
    borrowed = dict.fromkeys(r.timing.clock for r in found if r.timing and r.timing.clock.startswith("reference"))
    if not memory and borrowed and all(r.timing and r.timing.clock in borrowed for r in found):
        return " + ".join(borrowed)
    return source_line(found) + (f", times: {' + '.join(borrowed)}" if borrowed else "")


def entitle(ax: Axes, name: str, source: str, pad: float = 5) -> None:
    """Title `ax` with `name` (wrapped to the figure) above where its numbers come from, `pad` points above the axes."""
    lines = textwrap.wrap(name, 56)
    if len(lines) > 2:
        lines = [lines[0], textwrap.shorten(" ".join(lines[1:]), 56, placeholder=" ...")]
    ax.set_title("\n".join([*lines, *textwrap.wrap(source, 66)]), loc="left", pad=pad, color=BLACK)


def named(report: Report) -> str:
    """The report's name, and whether it ran out of memory."""
    return f"{report.name}: out of memory" if report.failure else report.name


def moment(reports: Iterable[Report], unit: str) -> str:
    """The label of an axis of bytes: held when."""
    failed = [bool(r.failure) for r in reports]
    when = "when memory ran out" if failed and all(failed) else "at the peak"
    return f"held {when} ({unit})"


def describe(ax: Axes, text: str) -> None:
    """Attach `text` to `ax` and, with those of its neighbours, to its figure."""
    ax.set_label(" ".join(text.split()))
    ax.figure.set_label(" ".join(str(a.get_label()) for a in ax.figure.axes if _described(a)))


def _described(ax: Axes) -> bool:
    label = str(ax.get_label())
    return bool(label) and not label.startswith("<")  # matplotlib names its colour bars <colorbar>


def alt(ax: Axes | tuple[Axes, ...]) -> str:
    """One sentence that says what the figure shows, with its numbers; for a pair, one for each.

    Raises `UserError` for axes that labkit did not draw.
    """
    axes = _members(ax)
    if not axes or not all(hasattr(a, "get_label") and _described(a) for a in axes):
        raise UserError("these axes have no description: they were not drawn by lab.plots")
    return " ".join(str(a.get_label()) for a in axes)


def _members(ax: Any) -> tuple[Axes, ...]:
    return tuple(ax) if isinstance(ax, tuple) else (ax,)


def png(ax: Axes | tuple[Axes, ...]) -> bytes:
    """The figure of `ax` as a PNG on white, 480 pixels wide at two dots a pixel, with `alt` as its ``Description``."""
    text, buffer = alt(ax), io.BytesIO()
    # A PNG's text is Latin-1; without Software the same figure gives the same bytes under any matplotlib.
    described = {"Description": text.encode("latin-1", "replace").decode("latin-1"), "Software": None}
    _root(ax).savefig(buffer, format="png", dpi=PNG_DPI, facecolor="white", metadata=described)
    return buffer.getvalue()


def img(ax: Axes | tuple[Axes, ...]) -> str:
    """The figure of `ax` as an HTML ``<img>`` that needs no other file and carries its `alt`."""
    return _tag(ax, base64.b64encode(png(ax)).decode())


def _tag(ax: Axes | tuple[Axes, ...], data: str) -> str:
    return (
        f'<img src="data:image/png;base64,{data}" width="{_css_width(ax)}" alt="{html.escape(alt(ax), quote=True)}"'
        ' style="max-width:100%;background:white">'
    )


def _css_width(ax: Axes | tuple[Axes, ...]) -> int:
    return round(_root(ax).get_size_inches()[0] * CSS_DPI)


def _root(ax: Axes | tuple[Axes, ...]) -> Figure:
    return _members(ax)[0].get_figure(root=True)  # type: ignore[return-value] # drawn axes have a figure


def show(ax: Axes | tuple[Axes, ...]) -> None:
    """Show the figure of `ax` in a notebook as an image with its description; elsewhere print the description."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = None
    if get_ipython is None or get_ipython() is None:
        print(alt(ax))
        return
    data, metadata = bundle(ax)
    display(data, metadata=metadata, raw=True)


def bundle(ax: Axes | tuple[Axes, ...], **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """What IPython shows: HTML, because JupyterLab drops the description of a bare PNG; the PNG for everything else."""
    data = base64.b64encode(png(ax)).decode()
    text = alt(ax)
    shown = {"text/html": _tag(ax, data), "image/png": data, "text/plain": text}
    return shown, {"image/png": {"alt": text, "width": _css_width(ax)}}


def scale(largest: float) -> tuple[int, str]:
    """The divisor and unit in which an axis up to `largest` bytes is easiest to read."""
    for divisor, unit in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if largest >= divisor:
            return divisor, unit
    return 1, "B"


def look(label: str, position: int = 0) -> tuple[str, str]:
    """Colour and hatch of a category; other labels take theirs by `position`."""
    label = ALIASES.get(label, label)
    if label in LOOKS:
        return LOOKS[label][:2]
    if label in (UNATTRIBUTED, UNEXPLAINED):
        return "white", "////"
    return OTHER_LOOKS[position % len(OTHER_LOOKS)]


def plural(label: str) -> str:
    """How a category is named in a figure."""
    return LOOKS[label][2] if label in LOOKS else label


def ordered(labels: Iterable[str]) -> list[str]:
    """Categories in the order in which figures stack them (what stays all step long first), others behind."""
    known = list(LOOKS)
    return sorted(labels, key=lambda label: known.index(label) if label in known else len(known))


def budget_near(budget_bytes: int | None, largest: float) -> bool:
    """Whether a budget can be drawn without squeezing what is held into the lower third of the axis."""
    return bool(budget_bytes) and budget_bytes <= 3 * largest  # type: ignore[operator]


def as_reports(reports: Report | Iterable[Report], function: str) -> list[Report]:
    """`reports` as a list. Raises `UserError` when there is none or something else is among them."""
    found = [reports] if isinstance(reports, Report) else list(reports)
    if not found:
        raise UserError(f"{function} has nothing to draw: no report was given")
    for item in found:
        if not isinstance(item, Report):
            raise UserError(f"{function} draws Reports, not {type(item).__name__}")
    return found


def listing(parts: Sequence[str], empty: str = "nothing") -> str:
    """``"a, b and c"``."""
    if len(parts) < 2:
        return parts[0] if parts else empty
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def plain(value: float) -> str:
    """A number for people: three significant digits, no exponent, thousands apart."""
    if value == int(value):
        return f"{int(value):,}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def hatch_colour(colour: str) -> str:
    """Lines that show on `colour`: white on the dark ones, dark on the light ones."""
    return "white" if colour in (BLUE, GREEN, PURPLE, GREY) else "#444444"


def legend_below(ax: Axes, columns: int = 4) -> None:
    """A legend under the axis label, where it hides nothing."""
    lines = ax.get_xlabel().count("\n")
    ax.legend(
        ncols=columns, loc="upper center", bbox_to_anchor=(0.45, 0), borderaxespad=4.4 + 1.5 * lines, handlelength=1.6,
        columnspacing=1.2,
    )  # fmt: skip


def wrapped(text: str, width: int) -> str:
    """`text` on at most three lines of about `width` characters."""
    return "\n".join(textwrap.wrap(text, width)[:3])


def budget_rule(ax: Axes, budget_bytes: int | None, divisor: int, largest: float = math.inf) -> None:
    """The budget as a vertical line with its size above; none when it lies far beyond what is drawn."""
    if not budget_bytes or budget_bytes > 1.5 * largest:
        return
    right = max(ax.get_xlim()[1], 1.02 * budget_bytes / divisor)
    ax.set_xlim(right=right)
    ax.axvline(budget_bytes / divisor, color=VERMILLION, linewidth=1.3)
    ax.annotate(
        f"budget {show_bytes(budget_bytes)}", (budget_bytes / divisor, 1), xycoords=("data", "axes fraction"),
        xytext=(0, 2), textcoords="offset points", va="bottom", fontsize=SMALL, color=DARK_RED,
        ha="right" if budget_bytes / divisor > 0.4 * right else "left",
    )  # fmt: skip


def budget_words(reports: Iterable[Report]) -> str:
    """``"; the budget is 8.00 GiB"``, or nothing."""
    budgets = dict.fromkeys(show_bytes(r.budget_bytes) for r in reports if r.budget_bytes)
    return f"; the budget is {listing(list(budgets))}" if budgets else ""
