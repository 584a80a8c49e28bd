import json
import multiprocessing
import os
import signal
import time
import warnings

import pytest

from labkit.results import SCHEMA, Failure, Holding, Ledger, Peaks, Report, Timeline, Timing, to_rows
from labkit.units import GiB, MiB, UserError


def example() -> Report:
    return Report(
        name="gpt2",
        status="ok",
        source="measured",
        card="NVIDIA H200",
        budget_bytes=8 * GiB,
        first=Peaks(5 * GiB, 4 * GiB, 6 * GiB, 7 * GiB),
        steady=Peaks(6 * GiB, 5 * GiB, 7 * GiB),
        timing=Timing(0.05, 0.001, 20, 0.4),
        tokens=8192,
        phase_peaks={"forward": GiB},
        alive=(Holding("block 0", "activation", "forward", 3 * MiB, 2), Holding("head", "activation", "forward", MiB)),
        timeline=Timeline(("forward", "backward"), ("a", "b"), ((1, 2), (3, 4)), ("activation",), ((4, 6),)),
        settings={"batch": 8},
    )


def failed() -> Report:
    failure = Failure(
        "backward",
        "transformer.h.9.attn",
        768 * MiB,
        212 * MiB,
        96 * MiB,
        (Holding("x", "activation", "forward", GiB),),
        ("batch 5 (7.80 GiB)",),
    )
    return Report(name="baseline", status="oom", source="predicted", card="h200", budget_bytes=8 * GiB, failure=failure)


def test_a_report_survives_json():
    for report in (example(), failed()):
        assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_a_row_of_a_newer_labkit_with_more_fields_still_reads():
    assert Report.from_dict({**example().to_dict(), "invented_later": 1}) == example()


def test_verdicts():
    report = example()
    assert report.peak_bytes == 6 * GiB and report.tokens_per_second == pytest.approx(163840)
    assert report.fits("7GiB") and not report.fits("6.9GiB")  # the budget bounds what is reserved
    assert failed().peak_bytes is None and not failed().fits("80GiB")
    assert report.held_by("category") == {"activation": 4 * MiB}
    assert list(report.held_by("module")) == ["block 0", "head"]
    assert report.timeline.totals == (4, 6)


def test_the_text_of_a_failure_names_place_sizes_and_a_way_out():
    text = str(failed())
    for part in (
        "out of memory in backward (transformer.h.9.attn)",
        "wanted 768.0 MiB",
        "212.0 MiB free",
        "96.0 MiB in pieces",
        "activation 1.00 GiB",
        "batch 5",
    ):
        assert part in text


def test_rows_come_back_in_order_with_schema(tmp_path):
    ledger = Ledger(tmp_path / "new" / "ledger.jsonl")
    for row in to_rows([example(), failed()]):
        ledger.append(row)
    rows = ledger.rows()
    assert [r["name"] for r in rows] == ["gpt2", "baseline"] and {r["schema"] for r in rows} == {SCHEMA}
    assert Report.from_dict(rows[1]) == failed()
    assert next(iter(ledger.frame()["steady.allocated_bytes"])) == 6 * GiB


def test_a_half_written_last_line_is_skipped_and_closed(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append({"n": 1})
    with open(ledger.path, "ab") as file:
        file.write(b'{"n": 2, "text": "cut off in the mid')
    ledger.append({"n": 3})
    with pytest.warns(UserWarning, match="line 2 is not a complete row"):
        assert [r["n"] for r in ledger.rows()] == [1, 3]


def test_lines_that_are_not_rows_are_named(tmp_path):
    path = tmp_path / "ledger.jsonl"
    lines = [
        b"[1]",
        b'{"schema": 999}',
        b"\xff\xfe",
        b'{"schema": "x"}',
        b'{"schema": null}',
        b"[" * 100_000,
        b'{"n": 4}',
    ]
    path.write_bytes(b"\n".join(lines))
    with pytest.warns(UserWarning) as caught:
        assert Ledger(path).rows() == [{"n": 4}]
    assert [str(w.message).split(": line ")[1][0] for w in caught] == list("123456")


def test_no_file_is_no_rows(tmp_path):
    assert Ledger(tmp_path / "none.jsonl").rows() == []


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        Ledger(tmp_path / "file" / "ledger.jsonl").append({})


def test_a_full_disk_is_one_clear_line_and_loses_nothing(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append({"n": 1})
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
    with pytest.raises(UserError, match="disk is full"):
        ledger.append({"n": 2})
    monkeypatch.undo()
    ledger.append({"n": 3})
    with pytest.warns(UserWarning):
        assert [r["n"] for r in ledger.rows()] == [1, 3]


def test_nan_is_refused_before_it_reaches_the_file(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        ledger.append({"n": float("nan")})
    assert ledger.rows() == []


def _append_for_ever(path):
    ledger, n = Ledger(path), 0
    while True:
        ledger.append({"n": n, "filler": "x" * 4000})
        n += 1


def test_a_kill_at_any_moment_loses_at_most_the_row_in_flight(tmp_path):
    path, written = tmp_path / "ledger.jsonl", 0
    for round_ in range(5):
        process = multiprocessing.get_context("fork").Process(target=_append_for_ever, args=(path,))
        process.start()
        time.sleep(0.05 + 0.013 * round_)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = Ledger(path).rows()
        numbers = [r["n"] for r in rows[written:]]
        assert numbers == list(range(len(numbers))) and numbers
        written = len(rows)
