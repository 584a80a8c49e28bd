"""Reference rows of another card: what goes into the file, and what no real card could have measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from labkit import cli, contributing
from labkit.units import GiB, UserError

REFERENCE = Path(__file__).resolve().parents[1] / "data" / "reference"
CARD = "NVIDIA GeForce RTX 3090"
BASE = {
    "schema": 1, "lesson": "01_a", "at": "2026-12-01T10:00:00Z", "card": CARD, "source": "measured", "method": "1",
    "versions": {"torch": "2.11.0"}, "command": "labkit run 01_a", "driver": "580.1",
}  # fmt: skip
PEAKS = {"allocated_bytes": 5 * GiB, "requested_bytes": 5 * GiB, "reserved_bytes": 6 * GiB, "device_bytes": 7 * GiB}
REPORT = {
    **BASE, "kind": "report", "name": "step", "status": "ok", "budget_bytes": 8 * GiB, "first": PEAKS, "steady": PEAKS,
    "timing": {"median_seconds": 0.4, "spread_seconds": 0.01, "repeats": 9, "clock": "cuda events"}, "tokens": 8192,
    "alive": [{"category": "parameter", "nbytes": GiB // 2}, {"category": "optimizer state", "nbytes": GiB}],
    "provenance": {"card": CARD, "driver": "580.1", "versions": {"torch": "2.11.0+cu130"}},
}  # fmt: skip
FACT = {**BASE, "kind": "fact", "name": "ceiling", "what": "product, float16", "value": 6e13, "unit": "FLOP/s"}


def timing(**changes: Any) -> dict[str, Any]:
    return {"timing": {**REPORT["timing"], **changes}}  # type: ignore[dict-item]


def peaks(**changes: Any) -> dict[str, Any]:
    return {"steady": {**PEAKS, **changes}}


@pytest.mark.parametrize("file", sorted(p.name for p in REFERENCE.glob("*.jsonl")))
def test_the_committed_rows_are_possible(file: str) -> None:
    assert contributing.check(REFERENCE / file) == []


@pytest.mark.parametrize("row", [REPORT, FACT, {**FACT, "value": 3, "unit": "%"}, {**FACT, "value": -3, "unit": "%"}])
def test_a_possible_row_passes(row: dict[str, Any]) -> None:
    assert contributing.problems([row]) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        # beyond the card
        ({**REPORT, "budget_bytes": None, **peaks(device_bytes=25 * GiB)}, "has 24.00 GiB"),
        ({**REPORT, **peaks(reserved_bytes=9 * GiB)}, "under a budget of 8.00 GiB"),
        ({**REPORT, **peaks(allocated_bytes=int(6.5 * GiB))}, "of only"),
        ({**REPORT, **timing(median_seconds=0.01)}, "needs at least"),  # 8192 tokens through 0.5 GiB of weights
        ({**REPORT, "tokens": None, **timing(median_seconds=1e-4)}, "needs at least"),  # weights are read once
        ({**FACT, "value": 9e13}, "the 16-bit rate"),
        ({**FACT, "what": "product, float32", "value": 6e13}, "the float32 rate"),
        ({**FACT, "what": "copy, 256 MiB", "unit": "bytes/s", "value": 1.2e12}, "the memory bandwidth"),
        ({**FACT, "name": "bus", "what": "to host, pinned", "unit": "GB/s", "value": 50.0}, "direction of the bus"),
        # no number
        ({**FACT, "value": -1.0}, "below nothing"),
        ({**FACT, "value": 0.0, "unit": "s"}, "is 0 s"),
        ({**FACT, "value": float("nan")}, "not a number"),
        ({**FACT, "value": float("inf")}, "not a number"),
        ({**REPORT, **timing(median_seconds=-0.4)}, "has a step of -0.4 s"),
        ({**REPORT, **timing(median_seconds=float("nan"))}, "not a number"),
        ({**REPORT, **peaks(requested_bytes=-1)}, "requested_bytes = -1"),
        ({**REPORT, **peaks(requested_bytes=1.5)}, "requested_bytes = 1.5"),
        # another method, no origin
        ({**REPORT, "method": "0"}, "method '0'"),
        ({**REPORT, "schema": 7}, "schema 7"),
        ({**FACT, "command": ""}, "does not say its command"),
        ({**FACT, "kind": "check"}, "is of kind 'check'"),
        ({**FACT, "source": "hearsay"}, "comes from 'hearsay'"),
        ({"recipe": {"model": "gpt2"}, "card": CARD, "driver": "580", "versions": {"torch": "2"}}, "its date, command"),
        # a prediction sold as a measurement
        ({**REPORT, **peaks(device_bytes=None)}, "the driver's own count is missing"),
        ({**REPORT, "provenance": {"card": None, "driver": None}}, "no such card and driver"),
        ({**REPORT, "provenance": {**REPORT["provenance"], "versions": {"torch": "2.13.0+cpu"}}}, "without CUDA"),  # type: ignore[dict-item]
        ({**REPORT, **timing(clock="reference · NVIDIA H200")}, "not by CUDA events"),
        ({**REPORT, "band_bytes": (1, 2)}, "the band of an estimate"),
        ({**FACT, "card": "rtx3090"}, "names a preset"),
        ({**FACT, "card": "ACME 9000"}, "add a preset first"),
        ({**FACT, "driver": None}, "neither driver nor compute capability"),
        # somebody's folders
        ({**FACT, "note": "File /home/ada/course/x.py"}, "names somebody's folder (/home/ada/course/x.py)"),
        ({**FACT, "note": r"C:\Users\ada\x"}, "names somebody's folder"),
        # damaged
        ({**REPORT, "timing": {"median_seconds": "fast"}}, "cannot be read"),
        ({**REPORT, "steady": 5}, "cannot be read"),
    ],
)  # fmt: skip
def test_an_impossible_row_is_refused(row: dict[str, Any], said: str) -> None:
    found = contributing.problems([row])
    assert any(said in one for one in found), found


def test_a_row_is_given_once() -> None:
    assert contributing.problems([FACT, {**FACT, "what": "another"}]) == []
    assert "says again what line 1 says" in contributing.problems([FACT, {**FACT, "value": 5e13}])[0]


def test_a_file_is_checked_line_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(FACT), '{"broken', '["no row"]', '{"value": NaN}', json.dumps({**FACT, "method": "0"})]
    file.write_text("\n".join(lines))
    with pytest.raises(SystemExit) as ended:
        cli.main(["submit-reference", "--check", str(file)])
    said = capsys.readouterr().out
    assert ended.value.code == 1
    for wanted in (
        "line 2: is not JSON",
        "line 3: is no row",
        "line 4: has NaN",
        "line 5: 01_a 'ceiling' was measured by",
    ):
        assert wanted in said
    assert "line 1:" not in said
    file.write_text("")
    assert contributing.check(file) == ["has no rows"]
    with pytest.raises(UserError, match="cannot read"):
        contributing.check(tmp_path / "nowhere")


def test_what_a_card_measured_becomes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guess = {**BASE, "kind": "guess", "name": "peak", "guess": 3.0, "error": 0.5, "good": False, "measured": 5.0}
    rows = [
        {"kind": "begin", "lesson": "01_a", "session": "1", "machine": {"driver": "580.1"}},
        {"kind": "commit", "lesson": "01_a", "name": "peak", "value": 3.0},
        {**REPORT, "status": "oom", "name": "old"}, REPORT, {**REPORT, "tokens": 4096},
        {**FACT, "driver": None, "note": "in /home/ada/course/lessons/x.py: 3 calls"},
        {**FACT, "name": "on the processor", "source": "cpu"}, {**REPORT, "name": "guessed", "source": "predicted"},
        {**BASE, "kind": "claim", "key": "open", "verdict": None}, guess,
    ]  # fmt: skip
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps({"schema": 1, **row}) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    target, count = contributing.submit(tmp_path)
    kept = [json.loads(line) for line in target.read_text().splitlines()]
    assert (target.name, count) == ("lessons-rtx3090.jsonl", 4)
    assert [row["name"] for row in kept] == ["old", "step", "ceiling", "peak"]
    assert kept[1]["tokens"] == 4096  # what was measured last
    assert kept[2]["note"] == "in ~/x.py: 3 calls" and kept[2]["driver"] == "580.1"
    assert [kept[3][field] for field in ("guess", "error", "good", "measured")] == [None, None, None, 5.0]
    assert contributing.check(target) == []


def test_nothing_is_written_of_a_run_that_measured_nothing_or_nonsense(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    with pytest.raises(UserError, match="holds no run"):
        contributing.submit(tmp_path, tmp_path / "out.jsonl")
    for row, said in (
        ({**FACT, "source": "cpu"}, "no card measured anything"),
        ({**FACT, "value": 9e15}, "16-bit rate"),
    ):
        ledger.write_text(json.dumps({**row, "capability": "sm_86"}) + "\n")
        with pytest.raises(UserError, match=said):
            contributing.submit(tmp_path, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_reference_rows_are_those_of_a_lessons_last_session(tmp_path: Path) -> None:
    """A run that went on after a change ran a lesson again: what it measured before is no longer what it does."""
    import runpy

    begin = {"kind": "begin", "lesson": "01_a", "machine": {"driver": "580.1", "card": CARD}}
    rows = [
        {**begin, "session": "1"}, {**REPORT, "session": "1"}, {**REPORT, "session": "1", "name": "gone since"},
        {**begin, "session": "2"}, {**REPORT, "session": "2", "tokens": 4096},
    ]  # fmt: skip
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps({"schema": 1, **row}) + "\n" for row in rows))
    main = runpy.run_path(str(REFERENCE.parents[1] / "tools" / "reference.py"))["main"]
    main(str(tmp_path), str(tmp_path / "out.jsonl"))
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["name"], row["tokens"], row["driver"]) for row in kept] == [("step", 4096, "580.1")]
