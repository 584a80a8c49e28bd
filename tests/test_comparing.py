"""Two runs side by side: what is held to a band, what is only shown, and what people see of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from labkit import cli, comparing, sidebyside
from labkit.comparing import AGREES, DIFFERS, ONLY_A, ONLY_B, SHOWN
from labkit.units import GiB, MiB, UserError

H200, T4 = "NVIDIA H200", "Tesla T4"


def report(name: str = "step", peak: int = 4 * GiB, seconds: float | None = 0.1, **more: Any) -> dict[str, Any]:
    peaks = {"allocated_bytes": peak, "requested_bytes": peak, "reserved_bytes": peak, "device_bytes": None}
    timing = {"median_seconds": seconds, "spread_seconds": 0.001, "repeats": 9} if seconds else None
    row = {"kind": "report", "lesson": "01_a", "name": name, "status": "ok", "source": "measured", "card": H200}
    return {**row, "budget_bytes": 8 * GiB, "first": peaks, "steady": peaks, "timing": timing, **more}


def fact(value: Any, unit: str, **more: Any) -> dict[str, Any]:
    row = {"kind": "fact", "lesson": "01_a", "name": "rate", "source": "measured", "card": H200}
    return {**row, "value": value, "unit": unit, **more}


def claim(outcome: str, **more: Any) -> dict[str, Any]:
    row = {"kind": "claim", "lesson": "01_a", "key": "linear", "source": "measured", "card": H200}
    return {**row, "outcome": outcome, **more}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"schema": 1, **row}) + "\n" for row in rows))
    return path


def verdicts(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> dict[str, str]:
    found = comparing.compare(write(tmp_path / "a.jsonl", a), write(tmp_path / "b.jsonl", b))
    return {line.quantity: line.verdict for line in found.lines}


@pytest.mark.parametrize(
    ("a", "b", "allocated", "step"),
    [
        (report(), report(peak=int(4.03 * GiB), seconds=0.12), AGREES, AGREES),
        (report(), report(peak=int(4.05 * GiB), seconds=0.21), DIFFERS, DIFFERS),
        (report(), report(peak=int(3.94 * GiB), seconds=0.04), DIFFERS, DIFFERS),
        # another card: the peak is held to its band, give or take what cuBLAS holds there; the time is shown
        (report(), report(card=T4, seconds=9.0), AGREES, SHOWN),
        (report(), report(card=T4, peak=4 * GiB - 80 * MiB), AGREES, SHOWN),
        (report(), report(card=T4, peak=4 * GiB - 100 * MiB), DIFFERS, SHOWN),
        (report(card=T4), report(card="NVIDIA GeForce RTX 2070", peak=4 * GiB - 80 * MiB), DIFFERS, SHOWN),
        # measured beside other work, or scattering by itself
        (report(), report(seconds=9.0, remark="rough"), AGREES, SHOWN),
        (report(), report(timing={"median_seconds": 0.22, "spread_seconds": 0.3, "repeats": 5}), AGREES, AGREES),
        # a prediction of this card is about the same peak, and about no time
        (report(card="h200", source="predicted", seconds=None), report(peak=4 * GiB + 64 * MiB), AGREES, None),
        (report(card="h200", source="predicted", seconds=None), report(peak=4 * GiB + 80 * MiB), DIFFERS, None),
    ],
)
def test_peaks_are_held_tightly_and_times_loosely(
    tmp_path: Path, a: dict[str, Any], b: dict[str, Any], allocated: str, step: str | None
) -> None:
    found = verdicts(tmp_path, a, b)
    assert (found["allocated, steady step"], found.get("step")) == (allocated, step)
    assert verdicts(tmp_path, b, a) == found  # neither side is the right one


def test_an_estimate_is_held_to_its_own_band(tmp_path: Path) -> None:
    guess = report(card="h200", source="predicted", seconds=None, band_bytes=(3 * GiB, 5 * GiB))
    for peak, verdict in ((5 * GiB, AGREES), (5 * GiB + 1, DIFFERS)):
        assert verdicts(tmp_path, guess, report(peak=peak))["allocated, steady step"] == verdict


def test_out_of_memory_on_one_side_only(tmp_path: Path) -> None:
    failed = report(status="oom", first=None, steady=None, timing=None)
    assert verdicts(tmp_path, report(), failed) == {"outcome": DIFFERS}
    assert verdicts(tmp_path, failed, failed) == {"outcome": AGREES}
    assert verdicts(tmp_path, report(), {**failed, "budget_bytes": 4 * GiB}) == {"outcome": SHOWN}


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (fact(50.0, "GB/s"), fact(45.0, "GB/s"), AGREES),
        (fact(50.0, "GB/s"), fact(20.0, "GB/s"), DIFFERS),
        (fact(50.0, "GB/s"), fact(25.0, "GB/s", card=T4), SHOWN),
        (fact(50.0, "GB/s"), fact(25.0, "GB/s", source="cpu"), SHOWN),
        (fact(2.0, "times"), fact(3.0, "times"), SHOWN),
        (fact(-1.0, "%"), fact(3.0, "%"), SHOWN),
        (claim("holds"), claim("holds"), AGREES),
        (claim("holds"), claim("does not hold"), DIFFERS),
        (claim("holds"), claim("does not hold", card=T4), SHOWN),
    ],
)
def test_facts_and_claims(tmp_path: Path, a: dict[str, Any], b: dict[str, Any], verdict: str) -> None:
    assert list(verdicts(tmp_path, a, b).values()) == [verdict]


def test_the_bands_are_as_wide_as_runs_lie_apart() -> None:
    text = (Path(__file__).resolve().parents[1] / "bench" / "results" / "spread.md").read_text()
    rows = {cells[0]: cells for line in text.splitlines() if len(cells := line.strip("| ").split(" | ")) > 4}
    for quantity, band in (("allocated", "peak"), ("reserved", "reserved"), ("step", "time")):
        measured = float(rows[quantity][3].removesuffix(" %")) / 100  # the 95th percentile
        factor = comparing.BANDS[band].factor - 1
        assert measured <= factor <= max(2 * measured, 0.05), f"{band}: x {1 + factor:g}, measured {measured:.3f}"


def test_rows_without_a_partner_are_counted_and_lessons_that_ran_on_one_side_are_not(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", report(), report("mine"), report(lesson="02_b"))
    b = write(tmp_path / "b.jsonl", report(), report("yours"), report(settings={"batch": 2}))
    found = comparing.compare(a, b)
    assert [line.name for line in found.of(ONLY_A)] == ["mine"]
    assert sorted(line.name for line in found.of(ONLY_B)) == ["step", "yours"]


def test_the_last_session_of_a_lesson_counts(tmp_path: Path) -> None:
    rows = [
        {"kind": "begin", "lesson": "01_a", "session": "1"}, report(peak=GiB, session="1"), report("gone", session="1"),
        {"kind": "begin", "lesson": "01_a", "session": "2"}, report(session="2"),
    ]  # fmt: skip
    folder = write(tmp_path / "run" / "ledger.jsonl", *rows).parent
    found = comparing.compare(folder, write(tmp_path / "b.jsonl", report()))
    assert {line.verdict for line in found.lines} == {AGREES}


def test_without_b_the_reference_rows_of_the_same_card_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    write(tmp_path / "home/data/reference/lessons-h200.jsonl", report())
    for card, expected in ((H200, H200), (T4, H200), ("h200", H200)):
        assert comparing.compare(write(tmp_path / "a.jsonl", report(card=card))).b.card == expected
    write(tmp_path / "home/data/reference/lessons-t4.jsonl", report(card=T4))
    assert comparing.compare(write(tmp_path / "a.jsonl", report(card=T4))).b.card == T4


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl", report())
    with pytest.raises(UserError, match="holds no run"):
        comparing.compare(tmp_path / "nowhere", good)
    with pytest.raises(UserError, match="no row in common"):
        comparing.compare(good, write(tmp_path / "b.jsonl", report(lesson="02_b")))
    with pytest.raises(UserError, match="nothing was measured"):
        comparing.compare(good, write(tmp_path / "c.jsonl", {"kind": "begin", "lesson": "01_a"}))
    damaged = write(tmp_path / "d.jsonl", report(timing="soon"))
    assert "cannot be read" in sidebyside.text(comparing.compare(good, damaged), everything=True)


def test_what_people_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.jsonl", report(), report("<big>", peak=GiB))
    b = write(tmp_path / "b.jsonl", report(seconds=0.11), report("<big>", peak=2 * GiB))
    page = tmp_path / "out" / "page.html"
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", str(a), str(b), "--html", str(page)])
    said = capsys.readouterr().out
    assert ended.value.code == 1  # something differs
    assert "6 of 10 numbers that are held to a band lie in it" in said
    assert "2.0000" in said and "1.1000" not in said  # only what lies outside its band is listed
    html = page.read_text()
    assert "&lt;big&gt;" in html and "<big>" not in html and "1.1000" in html
    assert "script" not in html and "http" not in html.replace("http-equiv", "")
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", str(a), str(a), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0 and document["same_card"] and {line["ratio"] for line in document["lines"]} == {1.0}
