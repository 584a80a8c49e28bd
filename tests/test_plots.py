"""Figures against synthetic reports of a GPT-2 step: what is drawn, said and left behind."""

from __future__ import annotations

import base64
import dataclasses
import gc
import html
import io
import itertools
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from labkit import plots
from labkit.results import Failure, Holding, Peaks, Report, Timeline, Timing
from labkit.units import GiB, MiB, UserError, show_bytes

LAYERS = 12
MODULES = ("embedding", *(f"block {i}" for i in range(LAYERS)), "final norm", "head and loss", "optimizer")
WEIGHTS = {"embedding": 150 * MiB, "final norm": MiB // 100, "head and loss": 0} | {
    f"block {i}": 27 * MiB for i in range(LAYERS)
}


def gpt2_timeline(checkpoint: bool = False, layers: int = LAYERS) -> Timeline:
    """A step as GPT-2 takes it: activations pile up block by block, the head flashes, backward drains the pile, and
    the optimizer's copies come at the end. With checkpointing a block keeps its input only and is recomputed."""
    names = ("embedding", *(f"block {i}" for i in range(layers)), "final norm", "head and loss", "optimizer")
    weights = {name: WEIGHTS.get(name, 27 * MiB) for name in names} | {"optimizer": 0}
    full, kept, logits = 352 * MiB, 24 * MiB, 1570 * MiB
    live = dict.fromkeys(names, 0)
    gradient = dict.fromkeys(names, 0)
    temporary = dict.fromkeys(names, 0)
    state = sum(weights.values()) * 2
    columns: list[tuple[str, list[tuple[int, int, int]]]] = []

    def snap(phase: str) -> None:
        columns.append((phase, [(live[n], gradient[n], temporary[n]) for n in names]))

    live["embedding"] = 50 * MiB
    snap("forward")
    for i in range(layers):
        live[f"block {i}"] = full // 2
        snap("forward")
        live[f"block {i}"] = kept if checkpoint else full
        snap("forward")
    live["final norm"] = 24 * MiB
    snap("forward")
    for part in (1, 2, 2):
        live["head and loss"] = part * logits
        snap("forward")
    temporary["head and loss"] = logits
    snap("backward")
    live["head and loss"], temporary["head and loss"] = 0, 0
    gradient["embedding"] = weights["embedding"]
    live["final norm"] = 0
    snap("backward")
    for i in reversed(range(layers)):
        if checkpoint:
            live[f"block {i}"] = full // 2
            snap("recompute")
            live[f"block {i}"] = full
            snap("recompute")
        temporary[f"block {i}"] = 48 * MiB
        snap("backward")
        gradient[f"block {i}"] = weights[f"block {i}"]
        live[f"block {i}"], temporary[f"block {i}"] = 0, 0
        snap("backward")
    live["embedding"] = 0
    temporary["optimizer"] = sum(weights.values())
    for _ in range(4):
        snap("optimizer")
    held = tuple(
        tuple(weights[n] + (state if n == "optimizer" else 0) + sum(c[1][row]) for c in columns)
        for row, n in enumerate(names)
    )

    def total(which: int) -> tuple[int, ...]:
        return tuple(sum(cell[which] for cell in c[1]) for c in columns)

    constant = len(columns)
    return Timeline(
        phases=tuple(c[0] for c in columns),
        modules=names,
        held=held,
        categories=("parameter", "gradient", "optimizer state", "activation", "temporary"),
        by_category=(
            (sum(weights.values()),) * constant, total(1), (state,) * constant, total(0), total(2),
        ),
    )  # fmt: skip


def report(name: str = "gpt2 8x1024", checkpoint: bool = False, **changes: object) -> Report:
    """A report of that step, consistent with its timeline."""
    steps = gpt2_timeline(checkpoint)
    at = steps.totals.index(max(steps.totals))
    alive = tuple(
        Holding("transformer", category, "forward", row[at])
        for category, row in zip(steps.categories, steps.by_category, strict=True)
        if row[at]
    )
    peak = max(steps.totals) + 66 * MiB
    fields: dict[str, object] = {
        "name": name, "status": "ok", "source": "measured", "card": "NVIDIA H200", "budget_bytes": 12 * GiB,
        "steady": Peaks(peak, peak - 5 * MiB, peak + 300 * MiB, peak + 800 * MiB),
        "first": Peaks(peak - GiB, peak - GiB, peak, peak), "timing": Timing(0.212 if checkpoint else 0.163, 0.001, 12),
        "tokens": 8192, "alive": alive, "timeline": steps, "unattributed_bytes": 66 * MiB,
        "settings": {"model": "gpt2", "batch": 8, "seq": 1024},
    }  # fmt: skip
    return Report(**{**fields, **changes})  # type: ignore[arg-type]


def out_of_memory(name: str = "gpt2 8x1024 eager", **changes: object) -> Report:
    """The same step under a budget too small for it."""
    alive = (
        Holding("transformer.h", "activation", "forward", int(6.31 * GiB)),
        Holding("transformer", "parameter", "build", int(0.46 * GiB)),
        Holding("transformer", "gradient", "backward", int(0.17 * GiB)),
    )
    failure = Failure("backward", "transformer.h.9.attn", 768 * MiB, 212 * MiB, 96 * MiB, alive, ("batch 5",))
    fields: dict[str, object] = {
        "name": name, "status": "oom", "source": "predicted", "card": "h200", "budget_bytes": 8 * GiB,
        "failure": failure, "settings": {"model": "gpt2", "batch": 8, "seq": 1024},
    }  # fmt: skip
    return Report(**{**fields, **changes})  # type: ignore[arg-type]


def eight_sizes(exponent: float, name: str = "gpt2", budget: int | None = None, **changes: object) -> list[Report]:
    """Peaks of 1.4 GiB + 0.1 GiB * batch ** exponent for batch 1 to 8; those beyond the budget ran out of memory."""
    found = []
    for batch in range(1, 9):
        peak = int(1.4 * GiB + 0.1 * GiB * batch**exponent)
        settings = {"batch": batch}
        if budget and peak > budget:
            found.append(out_of_memory(f"{name} {batch}", budget_bytes=budget, settings=settings))
        else:
            peaks = Peaks(peak, peak, peak)
            row = report(f"{name} {batch}", first=None, steady=peaks, budget_bytes=budget, settings=settings)
            found.append(dataclasses.replace(row, **changes))  # type: ignore[arg-type]
    return found


GUESSES = [
    {"kind": "guess", "name": "peak", "guess": 7.1, "measured": 12.4, "formula": 12.5, "unit": "GiB", "lesson": "01"},
    {"kind": "guess", "name": "weights", "guess": 0.46, "measured": 0.47, "formula": 0.46, "unit": "GiB"},
    {"kind": "guess", "name": "step", "guess": 100.0, "measured": 163.0, "formula": None, "unit": "ms"},
    {"kind": "guess", "name": "logits", "guess": None, "measured": 1.57, "formula": 1.57, "unit": "GiB"},
    {"kind": "report", "name": "not a guess"},
]
PARETO = [
    report(name, first=None, steady=Peaks(int(gib * GiB), 0, 0), timing=Timing(seconds, 0.0, 5), budget_bytes=8 * GiB)
    for name, gib, seconds in (("small", 4.2, 0.170), ("fast", 7.0, 0.155), ("worse", 7.5, 0.180), ("same", 7.0, 0.16))
]
DRAWINGS: dict[str, Callable[[Any], Axes]] = {
    "heatmap": lambda ax: plots.heatmap(report(), ax=ax),
    "timeline": lambda ax: plots.timeline(report(), ax=ax),
    "bars": lambda ax: plots.bars([report(), out_of_memory()], ax=ax),
    "waterfall": lambda ax: plots.waterfall(report(), ax=ax),
    "change": lambda ax: plots.waterfall(report(), report("small", True), ax=ax),
    "sweep": lambda ax: plots.sweep(eight_sizes(2.0, budget=5 * GiB), ax=ax),
    "pareto": lambda ax: plots.pareto(PARETO, ax=ax),
    "calibration": lambda ax: plots.calibration(GUESSES, ax=ax),
}


def texts(ax: Axes) -> str:
    """Every word on the figure of `ax`."""
    return "\n".join(t.get_text() for t in ax.figure.findobj(Text) if t.get_text())


def top_strip(ax: Axes) -> Axes:
    return ax.child_axes[0]


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_figure_is_an_axes_with_title_units_and_description(name: str) -> None:
    ax = DRAWINGS[name](None)
    assert isinstance(ax, Axes)
    assert ax.get_xlabel()
    unit = re.compile(r"\((GiB|MiB|ms a step|sequences|each in its unit)\)")
    assert unit.search(ax.get_xlabel() + ax.get_ylabel()) or unit.search(texts(ax))
    if name != "calibration":
        assert "measured · NVIDIA H200" in ax.get_title(loc="left")
    sentence = plots.alt(ax)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert ax.figure.get_label() == sentence
    assert ax.figure.get_facecolor() == (1, 1, 1, 1)


@pytest.mark.parametrize("name", DRAWINGS)
def test_figures_fit_into_480_pixels(name: str) -> None:
    ax = DRAWINGS[name](None)
    with Image.open(io.BytesIO(plots.png(ax))) as image:
        assert image.width == 960  # 480 at two dots a pixel
        assert image.text["Description"][:40] == plots.alt(ax)[:40]
        pixels = numpy.asarray(image.convert("RGB"))
    border = numpy.concatenate([pixels[:2].reshape(-1, 3), pixels[-2:].reshape(-1, 3), pixels[:, 0], pixels[:, -1]])
    assert (border == 255).all(), "something is cut off at the edge of the figure"


@pytest.mark.parametrize("name", DRAWINGS)
def test_an_axes_of_the_readers_own_is_used(name: str) -> None:
    with style.context("dark_background"):
        mine = Figure(figsize=(5, 4), layout="constrained").add_subplot()
    assert DRAWINGS[name](mine) is mine
    assert mine.get_facecolor() == (1, 1, 1, 1)
    assert mine.xaxis.label.get_color() == "#000000"
    mine.figure.draw_without_rendering()


def test_a_hundred_figures_leave_nothing_behind() -> None:
    import matplotlib
    from matplotlib import pyplot

    before, settings = list(pyplot.get_fignums()), dict(matplotlib.rcParams)
    small = gpt2_timeline(layers=2)
    kept = [weakref.ref(plots.timeline(report(timeline=small)).figure) for _ in range(25)]
    kept += [weakref.ref(plots.bars(report()).figure) for _ in range(75)]
    gc.collect()
    assert pyplot.get_fignums() == before
    assert [figure for figure in kept if figure() is not None] == []
    assert dict(matplotlib.rcParams) == settings


def exit_code(code: str) -> int:
    """Of a fresh interpreter that runs `code` and finds this file."""
    root = Path(__file__).parents[1]
    found = os.pathsep.join([str(root), str(root / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": found}, check=False).returncode


def test_importing_plots_does_not_import_matplotlib() -> None:
    heavy = "{'matplotlib', 'numpy', 'torch', 'pandas', 'IPython'}"
    assert exit_code(f"import labkit.plots, sys; sys.exit(bool({heavy} & set(sys.modules)))") == 0


def test_drawing_never_imports_pyplot() -> None:
    drawing = "import test_plots as t; [t.plots.png(draw(None)) for draw in t.DRAWINGS.values()]"
    assert exit_code(f"{drawing}; import sys; sys.exit('matplotlib.pyplot' in sys.modules)") == 0


def test_heatmap_shows_every_module_the_peak_and_the_budget() -> None:
    steps = gpt2_timeline()
    ax = plots.heatmap(report())
    assert [t.get_text() for t in ax.get_yticklabels()] == list(steps.modules)
    assert ax.yaxis_inverted()  # the embedding stands on top
    peak = show_bytes(max(steps.totals))
    assert f"peak {peak}" in texts(ax)
    assert "budget 12.00 GiB" in texts(ax)
    assert f"a peak of {peak} in backward" in plots.alt(ax)
    assert "head and loss" in plots.alt(ax)
    total = top_strip(ax).lines[0].get_ydata()
    assert max(total) * GiB == pytest.approx(max(steps.totals))
    mesh = ax.collections[0]
    assert mesh.get_array().max() * GiB == pytest.approx(max(max(row) for row in steps.held))


def test_the_peaks_words_do_not_lie_on_the_curve_when_the_budget_is_near() -> None:
    largest = max(gpt2_timeline().totals)
    for room in (0.02, 0.1, 0.2):
        top = top_strip(plots.heatmap(report(budget_bytes=int((1 + room) * largest))))
        (words,) = [t for t in top.texts if t.get_text().startswith("peak")]
        assert words.xy[1] * GiB == pytest.approx((1 + room) * largest) and words.get_va() == "bottom"


def test_heatmap_names_the_groups_and_hatches_recomputation() -> None:
    plain, checkpointed = plots.heatmap(report()), plots.heatmap(report(checkpoint=True))
    assert [t.get_text() for t in plain.get_xticklabels()][:2] == ["forward", "backward"]
    assert "backward" in [t.get_text() for t in checkpointed.get_xticklabels()]
    hatched = [p for p in checkpointed.patches if p.get_hatch()]
    assert len(hatched) == LAYERS
    assert not [p for p in plain.patches if p.get_hatch()]
    assert "recomputation" in checkpointed.get_xlabel()
    assert "recomputation" not in plain.get_xlabel()


def test_heatmap_of_48_blocks_keeps_its_labels_apart() -> None:
    ax = plots.heatmap(report("gpt2-xl", timeline=gpt2_timeline(True, 48)))
    ax.figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in ax.get_yticklabels()]
    assert len(boxes) < 25
    centres = [(box.y0 + box.y1) / 2 for box in boxes]
    line = 0.7 * boxes[0].height
    assert all(a - b > line for a, b in itertools.pairwise(centres))
    assert {"embedding", "optimizer"} <= {t.get_text() for t in ax.get_yticklabels()}


def test_heatmap_says_when_the_counter_saw_more_than_the_trace() -> None:
    peak = max(gpt2_timeline().totals)
    text = plots.alt(plots.heatmap(report(steady=Peaks(2 * peak, peak, peak))))
    assert f"counter {show_bytes(2 * peak)}" in text


def test_heatmap_pair_shares_its_scales() -> None:
    whole = gpt2_timeline()
    half = dataclasses.replace(whole, held=tuple(tuple(n // 2 for n in row) for row in whole.held))
    pair = plots.heatmap_pair(report("checkpointed", timeline=half), report())
    left, right = (ax.collections[0] for ax in pair)
    assert left.norm.vmax == right.norm.vmax == pytest.approx(max(max(r) for r in whole.held) / GiB)
    assert left.get_array().max() == pytest.approx(right.get_array().max() / 2)
    assert top_strip(pair.left).get_ylim() == top_strip(pair.right).get_ylim()
    assert top_strip(pair.left).get_ylim()[1] * GiB > max(whole.totals)
    assert pair.left.figure is pair.right.figure
    assert "checkpointed" in plots.alt(pair)
    assert plots.alt(pair) == pair.left.figure.get_label()
    assert 'width="960"' in plots.img(pair)
    assert "image/png" in pair._repr_mimebundle_()[0]


def test_vmax_fixes_the_colours_of_a_single_heatmap() -> None:
    ax = plots.heatmap(report(), vmax=8 * GiB)
    assert ax.collections[0].norm.vmax == 8


def test_timeline_stacks_to_the_total() -> None:
    steps = gpt2_timeline()
    ax = plots.timeline(report())
    top = max(path.vertices[:, 1].max() for c in ax.collections for path in c.get_paths())
    assert top * GiB == pytest.approx(max(steps.totals))
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [
        "parameters", "optimizer state", "gradients", "activations", "temporaries",
    ]  # fmt: skip
    assert show_bytes(max(steps.totals)) in plots.alt(ax)


@pytest.mark.parametrize("draw", [plots.heatmap, plots.timeline, lambda r: plots.heatmap_pair(report(), r)])
def test_without_a_timeline_the_error_says_what_to_draw(draw: Callable[[Report], object]) -> None:
    with pytest.raises(UserError, match=r"ran out of memory in backward before a whole step was traced.*plots.bars"):
        draw(out_of_memory())
    with pytest.raises(UserError, match="holds no traced step"):
        draw(report(timeline=None))


def test_an_interrupted_step_can_be_drawn() -> None:
    whole = gpt2_timeline()
    end = whole.phases.index("backward") + 3
    cut = dataclasses.replace(
        whole,
        phases=whole.phases[:end],
        held=tuple(r[:end] for r in whole.held),
        by_category=tuple(r[:end] for r in whole.by_category),
    )
    for draw in (plots.heatmap, plots.timeline):
        ax = draw(out_of_memory(timeline=cut))
        assert "runs out of memory in backward (wanted 768.0 MiB)" in plots.alt(ax)
        assert "out of memory" in ax.get_title(loc="left")
        assert "until memory ran out" in ax.get_xlabel()


def test_bars_of_a_failure_show_what_was_alive_and_wanted() -> None:
    ax = plots.bars(out_of_memory())
    assert "wanted 768.0 MiB more" in texts(ax).replace("\n", " ")
    assert "activations 6.31 GiB" in plots.alt(ax)
    dashed = [p for p in ax.patches if p.get_linestyle() == "--"]
    assert [p.get_width() * GiB for p in dashed] == [768 * MiB]
    (pieces,) = [p for p in ax.patches if to_hex(p.get_facecolor()).upper() == plots.canvas.PALE]
    assert pieces.get_width() * GiB == 96 * MiB
    assert pieces.get_x() + pieces.get_width() == dashed[0].get_x()  # what was wanted comes after what lies in pieces
    assert "and 96.0 MiB free, in pieces too small" in plots.alt(ax)
    both = plots.bars([report(), out_of_memory()])  # each against its own budget
    rules = [path.vertices[0, 0] for c in both.collections for path in c.get_paths() if len(path.vertices)]
    assert rules == [12, 8]
    assert both.get_xlim()[1] > 12


def test_bars_add_up_to_the_peak_with_what_the_trace_missed() -> None:
    one = report()
    ax = plots.bars(one)
    assert one.steady is not None
    assert sum(p.get_width() for p in ax.patches) * GiB == pytest.approx(one.steady.allocated_bytes)
    assert "unattributed 66.0 MiB" in plots.alt(ax)
    assert len({(p.get_facecolor(), p.get_hatch()) for p in ax.patches}) == len(ax.patches)


def test_waterfall_starts_each_term_where_the_last_one_ended() -> None:
    one = report()
    ax = plots.waterfall(one)
    *terms, total = ax.patches
    for before, after in itertools.pairwise(terms):
        assert after.get_x() == pytest.approx(before.get_x() + before.get_width())
    assert one.steady is not None
    assert total.get_width() * GiB == pytest.approx(one.steady.allocated_bytes)
    assert f"total {show_bytes(one.steady.allocated_bytes)}" in plots.alt(ax)


def test_waterfall_sets_formulas_beside_measurements() -> None:
    one = report()
    assert one.peak_bytes is not None
    terms = {"weights": (497 * MiB, 474 * MiB), "logits": (4 * GiB, None), "activations": (7 * GiB, 7 * GiB)}
    ax = plots.waterfall(terms, report=one)
    words = texts(ax)
    for word in ("weights", "logits", "497.0 MiB", "474.0 MiB", "formula", "measured", "unexplained"):
        assert word in words
    rest = one.peak_bytes - 474 * MiB - 7 * GiB
    assert f"unexplained {show_bytes(rest)}" in plots.alt(ax)
    assert "logits – (formula 4.00 GiB)" in plots.alt(ax)
    by_category = plots.waterfall(one, formula={"parameter": 497 * MiB})
    assert "parameters 474.0 MiB (formula 497.0 MiB)" in plots.alt(by_category)


def test_waterfall_between_two_reports_says_what_became_of_each_term() -> None:
    after = (
        Holding("a", "parameter", "build", 474 * MiB),
        Holding("a", "16-bit copies", "forward", 237 * MiB),
        Holding("a", "optimizer state", "optimizer", 2 * 948 * MiB),
        Holding("a", "activation", "forward", 5 * GiB),
    )
    ax = plots.waterfall(report("fp32"), report("amp", alive=after, steady=Peaks(sum(h.nbytes for h in after), 0, 0)))
    text = plots.alt(ax)
    for words in (
        "parameters same",
        "activations shrank",
        "16-bit copies new",
        "temporaries gone",
        "optimizer state grew",
    ):
        assert words in text
    assert {"same", "shrank", "new", "gone", "grew"} <= {t.get_text() for t in ax.texts}


def test_fit_exponent_is_exact_on_exact_data() -> None:
    xs = [128, 256, 512, 768, 1024]
    plain = plots.fit_exponent(xs, [3.5 * x**1.7 for x in xs])
    assert plain.exponent == pytest.approx(1.7, abs=1e-9)
    assert plain.factor == pytest.approx(3.5, rel=1e-8)
    for exponent in (-1.0, 0.5, 1.0, 2.0, 2.37):
        ys = [1.5e9 + 2.5e4 * x**exponent for x in xs]
        fit = plots.fit_exponent(xs, ys, offset=True)
        assert fit.exponent == pytest.approx(exponent, abs=2e-3)
        assert fit.error < 1e-6
    square = plots.fit_exponent(xs, [1e9 + 4e3 * x**2 for x in xs], offset=True)
    assert (square.exponent, square.offset, square.factor) == pytest.approx((2, 1e9, 4e3), rel=1e-5)
    assert plots.fit_exponent(xs, [1e9 + 4e3 * x**2 for x in xs]).exponent < 1.5  # what the offset is for


@pytest.mark.parametrize(
    ("xs", "ys", "offset"),
    [([1], [1], False), ([1, 1], [1, 2], False), ([1, 2, 3], [1, 2, 3], True), ([1, 2], [0, 1], False),
     ([0, 1], [1, 1], False), ([1, 2, 3, 4], [5, 5, 5, 5], True), ([1, 2], [1, 2, 3], False), ([], [], False)],
)  # fmt: skip
def test_fit_exponent_refuses_what_has_no_exponent(xs: list[float], ys: list[float], offset: bool) -> None:
    with pytest.raises(UserError):
        plots.fit_exponent(xs, ys, offset=offset)


def test_sweep_prints_exponents_and_marks_what_ran_out() -> None:
    series = {"eager": eight_sizes(2.0, budget=5 * GiB), "sdpa": eight_sizes(1.0, budget=5 * GiB)}
    ax = plots.sweep(series, x="batch")
    legend = [t.get_text() for t in ax.get_legend().get_texts()]
    assert legend == ["eager: a + b·batch^2.00", "sdpa: a + b·batch^1.00", "out of memory"]
    crosses = [line for line in ax.lines if line.get_marker() == "X" and len(line.get_xdata())]
    assert [float(c.get_xdata()[0]) for c in crosses] == [7, 8]
    assert all(float(c.get_ydata()[0]) == 5 for c in crosses)  # GiB: the budget
    assert "out of memory at 7 and 8" in plots.alt(ax)
    assert "budget 5.00 GiB" in texts(ax)
    assert ax.get_ylabel() == "peak allocated (GiB)"
    lines = [line for line in ax.lines if line.get_marker() in ("o", "s")]
    assert len({line.get_marker() for line in lines}) == len({line.get_linestyle() for line in lines}) == 2


def test_sweep_says_flat_and_knows_time_and_logarithms() -> None:
    flat = plots.sweep(eight_sizes(0.0), x="batch")
    assert [t.get_text() for t in flat.get_legend().get_texts()] == ["flat"]
    timed = plots.sweep(eight_sizes(1.0), x="batch", y="time", log=True)
    assert timed.get_ylabel() == "one step (ms)"
    assert (timed.get_xscale(), timed.get_yscale()) == ("log", "log")
    timed.figure.draw_without_rendering()
    assert [t.get_text() for t in timed.get_xticklabels()] == list("12345678")
    assert "163.0 ms" in plots.alt(timed)
    requested = plots.sweep([report(steady=Peaks(3 * GiB, 2 * GiB, 4 * GiB), first=None)], y="requested")
    assert requested.get_ylabel() == "peak requested (GiB)"
    assert "2.00 GiB" in plots.alt(requested)
    only_failures = plots.sweep([out_of_memory()])
    assert "out of memory at 8" in plots.alt(only_failures)


def test_sweep_refuses_what_it_cannot_place() -> None:
    with pytest.raises(UserError, match=r"no setting 'sequence' \(it has: batch, model, seq\)"):
        plots.sweep([report()], x="sequence")
    with pytest.raises(UserError, match="must be a number"):
        plots.sweep([report()], x="model")
    with pytest.raises(UserError, match="peak, requested, reserved, time, throughput"):
        plots.sweep([report()], y="speed")
    with pytest.raises(UserError, match="has no one step"):
        plots.sweep([report(timing=None)], y="time")


def test_pareto_draws_the_front_and_names_the_beaten() -> None:
    ax = plots.pareto([*PARETO, out_of_memory("huge"), report("untimed", timing=None)])
    text = plots.alt(ax)
    assert "the front is small 4.20 GiB in 170 ms a step and fast 7.00 GiB in 155 ms a step" in text
    assert "beaten: same and worse" in text
    assert "out of memory: huge" in text
    assert "not timed: untimed" in text
    assert {"small", "fast", "worse", "same"} <= {t.get_text() for t in ax.texts}


def test_pareto_of_many_points_numbers_them() -> None:
    many = [dataclasses.replace(r, name=f"{r.name} {i}") for i in range(3) for r in PARETO]
    ax = plots.pareto(many)
    assert {str(n) for n in range(1, 13)} <= {t.get_text() for t in ax.texts}
    assert "fast 2" in [t.get_text() for t in ax.get_legend().get_texts()]


def test_pareto_compares_time_per_token_when_steps_differ() -> None:
    other = report("half a step", tokens=4096, timing=Timing(0.05, 0.0, 5))
    ax = plots.pareto([*PARETO, other])
    assert ax.get_ylabel() == "time (µs a token)"
    with pytest.raises(UserError, match="how many tokens"):
        plots.pareto([*PARETO, dataclasses.replace(other, tokens=None)])
    with pytest.raises(UserError, match="both a peak and a time"):
        plots.pareto([report(timing=None)])


def test_calibration_counts_the_guesses_within_the_band() -> None:
    ax = plots.calibration(GUESSES)
    assert ax.get_title(loc="left").startswith("1 of 3 guesses within ±20 %")
    assert "the furthest off is peak, guessed 7.10 and measured 12.4 GiB; 1 not guessed" in plots.alt(ax)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert {"peak", "step"} <= {t.get_text() for t in ax.texts}
    markers = {line.get_marker() for line in ax.lines if line.get_marker() not in (None, "None")}
    assert len(markers) == 2  # GiB and ms
    one_unit = plots.calibration([{**GUESSES[0], "source": "measured", "card": "NVIDIA H200"}])
    assert one_unit.get_xlabel() == "measured (GiB)"
    assert "measured · NVIDIA H200" in one_unit.get_title(loc="left")
    assert "1 not drawn" in plots.alt(plots.calibration([*GUESSES, {**GUESSES[0], "guess": 0}]))


@pytest.mark.parametrize(
    "draw",
    [lambda: plots.bars([]), lambda: plots.sweep([]), lambda: plots.sweep({}), lambda: plots.sweep({"a": []}),
     lambda: plots.pareto([]), lambda: plots.calibration([]), lambda: plots.calibration(GUESSES[3:]),
     lambda: plots.waterfall({}), lambda: plots.waterfall({"a": (None, None)}), lambda: plots.waterfall({"a": 3}),
     lambda: plots.waterfall({"a": (1, 1)}, report()), lambda: plots.waterfall(report(alive=())),
     lambda: plots.bars(report(alive=())), lambda: plots.bars(["gpt2"]), lambda: plots.waterfall(report(), by="colour"),
     lambda: plots.alt(Figure().add_subplot()), lambda: plots.alt(())],
)  # fmt: skip
def test_nothing_to_draw_is_one_clear_sentence(draw: Callable[[], object]) -> None:
    with pytest.raises(UserError) as caught:
        draw()
    assert 10 < len(str(caught.value)) < 200


def test_a_notebook_shows_the_figure_with_its_description() -> None:
    from IPython.core.formatters import DisplayFormatter

    one = dataclasses.replace(report(), name='a "quoted" <name>')
    ax = plots.bars(one)
    data, metadata = DisplayFormatter().format(ax)
    assert data["text/plain"] == plots.alt(ax)
    assert html.escape(plots.alt(ax), quote=True) in data["text/html"]
    assert "<name>" not in data["text/html"]
    assert data["text/html"].startswith("<img ")
    assert metadata["image/png"]["alt"] == plots.alt(ax)
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")


def test_show_prints_the_description_outside_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    ax = plots.bars(report())
    plots.show(ax)
    assert capsys.readouterr().out == plots.alt(ax) + "\n"


def test_show_displays_inside_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr("IPython.get_ipython", lambda: object())
    monkeypatch.setattr("IPython.display.display", lambda data, **options: shown.append((data, options)))
    ax = plots.bars(report())
    plots.show(ax)
    ((data, options),) = shown
    assert data["text/html"].startswith("<img ")
    assert plots.alt(ax) in data["text/html"]
    assert options["raw"]
    assert options["metadata"]["image/png"] == {"alt": plots.alt(ax), "width": 480}


def test_the_same_figure_gives_the_same_bytes() -> None:
    assert plots.png(plots.timeline(report())) == plots.png(plots.timeline(report()))
