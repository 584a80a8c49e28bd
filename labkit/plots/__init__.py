"""Figures of what was measured or predicted: functions take Reports (or, in `charts`, plain numbers) and return a
matplotlib Axes.

Every figure is drawn for 480 pixels (half a notebook's width), says where its numbers come from in its title, tells
things apart by more than colour, and carries a description: `alt`. As the last line of a cell it shows itself,
description included; `show` does so anywhere else in a cell. No figure is known to pyplot, so none can leak.
"""

from __future__ import annotations

from .canvas import alt, img, png, show
from .charts import grouped, histograms, lines
from .curves import Fit, fit_exponent, sweep
from .front import pareto
from .guessing import calibration
from .peak import bars, waterfall
from .plan import picture
from .rates import rates
from .step import HeatmapPair, heatmap, heatmap_pair, timeline

__all__ = [
    "Fit",
    "HeatmapPair",
    "alt",
    "bars",
    "calibration",
    "fit_exponent",
    "grouped",
    "heatmap",
    "heatmap_pair",
    "histograms",
    "img",
    "lines",
    "pareto",
    "picture",
    "png",
    "rates",
    "show",
    "sweep",
    "timeline",
    "waterfall",
]
