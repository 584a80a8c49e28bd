"""Figures of plain numbers: what is drawn, what is left out, what is said."""

from __future__ import annotations

import math

import pytest

from labkit import plots
from labkit.plots import canvas
from labkit.results import Peaks, Report, Timing
from labkit.units import UserError

WHERE = {"title": "A title", "source": "cpu"}


def test_lines_draw_points_and_leave_gaps() -> None:
    ax = plots.lines({"a": ([2, 1, 3], [20, 10, None]), "b": ([1, 2], [math.inf, 5])}, x="n", y="ms", **WHERE)
    a, b = ax.lines[:2]
    assert list(a.get_xdata()) == [1, 2, 3] and list(a.get_ydata())[:2] == [10, 20] and math.isnan(a.get_ydata()[2])
    assert math.isnan(b.get_ydata()[0]) and b.get_ydata()[1] == 5
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("n", "ms")
    assert "a from 10 at 1 to 20 at 2" in plots.alt(ax)
    assert plots.png(ax).startswith(b"\x89PNG")


def test_lines_on_logarithmic_axes_drop_what_has_no_logarithm() -> None:
    ax = plots.lines({"a": ([0, 1, 10], [1, 0, 100])}, x="n", y="s", log="xy", marks={"here": 5}, **WHERE)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert list(ax.lines[0].get_xdata()) == [1, 10] and math.isnan(ax.lines[0].get_ydata()[0])
    assert "here" in [t.get_text() for t in ax.texts]


def test_bands_belong_to_their_series() -> None:
    ax = plots.lines({"a": ([1, 2], [1, 2])}, x="n", y="s", bands={"a": ([0.5, 1], [2, 3])}, **WHERE)
    heights = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.5, 3)


@pytest.mark.parametrize("series", [{}, {"a": ([1], [None])}, {"a": ([1], [math.nan])}])
def test_lines_without_anything_to_draw(series: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(UserError, match="nothing to draw"):
        plots.lines(series, x="n", y="s", **WHERE)


def test_lines_refuses_unknown_log() -> None:
    with pytest.raises(UserError, match="logarithmically"):
        plots.lines({"a": ([1], [1])}, x="n", y="s", log="z", **WHERE)


def test_grouped_bars() -> None:
    ax = plots.grouped({"bf16": [2.5, None], "int8": [1.25, 3]}, labels=["weights", "time"], unit="GiB", **WHERE)
    assert sorted(bar.get_width() for bar in ax.patches) == [1.25, 2.5, 3]
    assert {"2.50", "1.25", "3"} == {t.get_text() for t in ax.texts}
    assert "bf16: weights 2.50; int8: weights 1.25, time 3" in plots.alt(ax)
    with pytest.raises(UserError, match="2 values for 1 labels"):
        plots.grouped({"a": [1, 2]}, labels=["x"], unit="s", **WHERE)
    with pytest.raises(UserError, match="nothing to draw"):
        plots.grouped({"a": [None]}, labels=["x"], unit="s", **WHERE)


def test_histograms_count_what_is_not_finite() -> None:
    values = [0.0, 0.5, 1.0, math.inf]
    ax = plots.histograms({"a": values}, x="size", bins=[0, 0.75, 2], marks={"limit": 1.5}, **WHERE)
    steps = ax.patches[0].get_data()
    assert list(steps.values) == [50.0, 25.0]  # of all four: the one that is not finite has no bar
    assert "25 % not finite" in ax.get_legend().get_texts()[0].get_text()
    with pytest.raises(UserError, match="nothing to draw"):
        plots.histograms({"a": [math.nan]}, x="size", **WHERE)


def test_borrowed_times_are_named() -> None:
    peaks = Peaks(2**30, 2**30, 2**30)
    timing = Timing(0.1, 0.0, 5, clock="reference · NVIDIA H200")
    report = Report(name="a", status="ok", source="predicted", card="h200", steady=peaks, timing=timing, tokens=8)
    assert canvas.time_source([report]) == "predicted · h200, times: reference · NVIDIA H200"
    assert "times: reference · NVIDIA H200" in plots.pareto([report]).get_title(loc="left")
