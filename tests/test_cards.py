"""A report as a card: what is said, drawn to scale, and safe to show."""

from __future__ import annotations

import re
from dataclasses import replace

from labkit import cards
from labkit.results import Failure, Holding, Peaks, Report, Timing
from labkit.units import GiB, MiB

ALIVE = (
    Holding("transformer.h", "activation", "forward", 5 * GiB),
    Holding("transformer", "parameter", "build", GiB),
    Holding("transformer", "optimizer state", "optimizer", 1 * GiB),
)
FITS = Report(
    "GPT-2 2 x 1024", "ok", "measured", "NVIDIA H200", 8 * GiB, first=Peaks(GiB, GiB, GiB), alive=ALIVE, tokens=2048,
    steady=Peaks(7 * GiB, 7 * GiB - MiB, 7 * GiB + MiB, 8 * GiB), timing=Timing(0.25, 0.01, 9), notes=("a note",),
    unattributed_bytes=3 * MiB, leftover_bytes=5 * MiB,
)  # fmt: skip
OOM = Report(
    "GPT-2 8 x 1024", "oom", "predicted", "h200", 8 * GiB,
    failure=Failure("backward", "h.9.attn", 768 * MiB, 1024 * MiB, 512 * MiB, ALIVE, ("batch 5 (7.8 GiB)",)),
)  # fmt: skip


def widths(html: str) -> list[float]:
    return [float(w) for w in re.findall(r"<span style=\"width:([0-9.]+)%", html)]


def test_a_step_that_fits() -> None:
    html = cards.report_html(FITS)
    for part in (
        "✓ <b>fits</b>", "measured · NVIDIA H200 · budget 8.00 GiB", "activations 5.00 GiB", "optimizer state 1.00 GiB",
        "reserved 7.00 GiB", "device 8.00 GiB", "250.0 ms", "8,192 tokens/s", "unattributed: 3.0 MiB", "Note: a note",
        "left behind afterwards: 5.0 MiB",
    ):  # fmt: skip
        assert part in html, part


def test_the_bar_is_to_scale_with_the_budget() -> None:
    assert widths(cards.report_html(FITS)) == [12.5, 12.5, 62.5]  # of 8 GiB: parameters, optimizer state, activations
    assert "left:100.00%" in cards.report_html(FITS)
    small = cards.report_html(replace(FITS, budget_bytes=4 * GiB))
    assert "left:57.14%" in small and sum(widths(small)) > 99.9


def test_out_of_memory_says_where_how_much_and_what_fits() -> None:
    html = cards.report_html(OOM)
    for part in (
        "✗ <b>out of memory</b> in backward", "<code>h.9.attn</code>", "wanted <b>768.0 MiB</b> more", "1.00 GiB free",
        "512.0 MiB in pieces too small", "Nearest that fits: batch 5 (7.8 GiB)", "predicted · h200 · budget 8.00 GiB",
    ):  # fmt: skip
        assert part in html, part
    assert sum(widths(html)) > 99.9  # alive, scattered and wanted together go beyond the budget


def test_a_report_with_little_in_it() -> None:
    bare = Report("x", "ok", "cpu", "processor")
    assert "ran, without a budget" in cards.report_html(bare) and bare._repr_html_() == cards.report_html(bare)
    assert "budget" in cards.report_html(replace(OOM, failure=None, status="failed"))


def test_names_cannot_break_the_page() -> None:
    assert "<script>" not in cards.report_html(replace(FITS, name="<script>", notes=("<script>",)))


def test_an_estimate_says_its_band() -> None:
    estimate = replace(FITS, source="predicted", band_bytes=(6 * GiB, 8 * GiB))
    for text in (cards.report_html(estimate), str(estimate)):
        assert "6.00 GiB" in text and "8.00 GiB" in text and "estimate" in text
    assert "estimate" not in cards.report_html(FITS) + str(FITS)
    assert Report.from_dict(estimate.to_dict()) == estimate
