"""The page of a run: one file, nothing loaded from anywhere, everything in it, nothing lost by a damaged ledger."""

from __future__ import annotations

import html.parser
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest

from labkit import report, summary
from labkit.results import Failure, Ledger, Peaks, Report, Timing
from labkit.runs import Run, State
from labkit.units import GiB, MiB, UserError

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
MACHINE = {
    "card": "NVIDIA GeForce RTX 2070", "capability": [7, 5], "memory_bytes": 8 * GiB, "driver": "580.95",
    "driver_cuda": "13.0", "torch": "2.13.0", "cuda": "13.0", "python": "3.12.1", "system": "Linux x86_64", "cards": 1,
}  # fmt: skip


def rows(session: str = "s1", lesson: str = "01_baseline_oom") -> list[dict[str, Any]]:
    common = {
        "lesson": lesson,
        "session": session,
        "card": "h200",
        "versions": {"transformers": "5.24.0", "labkit": "0.1"},
    }
    ok = Report(
        "baseline", "ok", "measured", "RTX 2070", 8 * GiB, steady=Peaks(7 * GiB, 7 * GiB, 7 * GiB + MiB),
        timing=Timing(0.25, 0.01, 9), tokens=1024, settings={"batch": 2, "seq": 512},
    )  # fmt: skip
    oom = Report("big", "oom", "measured", "RTX 2070", failure=Failure("backward", "h.9", 768 * MiB, 0, 0))
    found = [
        {"kind": "begin", "budget_bytes": 8 * GiB, "machine": MACHINE},
        {"kind": "claim", "key": "lin", "text": "grows linearly", "said_by": "blog posts"},
        {"kind": "claim", "key": "lin", "text": "grows linearly", "said_by": "blog posts", "measured": "exponent 0.97",
         "verdict": "holds when activations dominate", "source": "measured", "scope": "sm_75"},
        {"kind": "guess", "name": "peak", "question": "How much is `peak`?", "unit": "GiB", "guess": 7.1,
         "formula": 12.5, "measured": 12.4, "source": "measured", "note": None, "error": 0.43, "good": False},
        {"kind": "choice", "name": "fits", "question": "Fits?", "unit": None, "guess": True, "formula": None,
         "measured": False, "source": "measured", "note": None},
        {"kind": "check", "exercise": "e1", "points": 1, "maximum": 2, "status": "partial", "message": "m",
         "manual": False},
        {"kind": "report", **ok.to_dict()},
        {"kind": "report", **oom.to_dict()},
        {"kind": "finish", "checklist": "Count first."},
    ]  # fmt: skip
    return [{**common, **row} for row in found]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "2026-12-01T10-22-rtx2070"
    states = (
        State("00_environment", "Is it ready?", "x", "done", 41.0),
        State(
            "01_baseline_oom",
            "Where do 8 GB go?",
            "x",
            "failed",
            72.0,
            14,
            "account-3",
            "ValueError: <no>",
            "Trace <b>",
        ),
        State("02_mixed_precision", "Half", "x"),
    )
    folder.mkdir()
    Run("2026-12-01T10:22:00Z", MACHINE, "line", states, finished="2026-12-01T10:25:00Z").save(folder)
    ledger = Ledger(folder / "ledger.jsonl")
    for row in rows():
        ledger.append(row)
    book = nbformat.v4.new_notebook()
    bare = nbformat.v4.new_output(
        "display_data", data={"image/png": PNG}, metadata={"image/png": {"alt": "A triangle & <more>"}}
    )
    tag = nbformat.v4.new_output(
        "display_data", data={"text/html": f'<img src="data:image/png;base64,{PNG}" alt="Two &amp; one">'}
    )
    book.cells = [nbformat.v4.new_code_cell("plot()", id="look-1", outputs=[bare, tag])]
    (folder / "notebooks").mkdir()
    nbformat.write(book, folder / "notebooks" / "01_baseline_oom.ipynb")
    return folder


class Page(html.parser.HTMLParser):
    """Tags, references and text of a page; complains when tags do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.stack: list[str] = []
        self.references: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.stack, self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.references += [str(known[k]) for k in ("src", "href") if k in known]
        self.ids += [str(known["id"])] if "id" in known else []
        assert tag not in ("script", "link", "iframe", "object")
        assert not any(name.startswith("on") for name in known)
        if tag == "img":
            self.images.append(known)
        if tag not in ("meta", "img", "br"):
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] not in ("style",):
            self.words.append(data)


def page_of(folder: Path) -> tuple[str, Page]:
    text = report.write(folder).read_text(encoding="utf-8")
    return text, Page(text)


def test_the_page_stands_alone(run: Path) -> None:
    text, page = page_of(run)
    assert page.references and all(r.startswith(("data:", "#")) for r in page.references)
    assert not re.search(r"https?://|url\(|@import", text)
    assert "default-src 'none'" in text
    assert {r[1:] for r in page.references if r.startswith("#")} <= set(page.ids)


def test_everything_of_the_run_is_on_the_page(run: Path) -> None:
    words = " ".join(" ".join(page_of(run)[1].words).split())
    for part in (
        "NVIDIA GeForce RTX 2070", "8.00 GiB", "sm_75", "580.95 (carries CUDA 13.0)", "2.13.0, CUDA 13.0", "5.24.0",
        "1 of 3 lessons done", "Where do 8 GB go?", "✗ failed", "○ not run", "1:12", "7.00 GiB, 1 OOM", "0/2 in 20 %",
        "1 of 2",
        "cell 14 (account-3): ValueError: <no>", "Trace <b>",
        "grows linearly", "blog posts", "exponent 0.97", "◐ holds when activations dominate", "sm_75 · measured",
        "7.1 GiB", "12.5 GiB", "12.4 GiB", "43 %", "wrong", "Count first.",
        "baseline", "batch 2 seq 512", "out of memory in backward, wanted 768.0 MiB", "250.0 ms", "4,096",
        "A triangle & <more>", "Two & one",
    ):  # fmt: skip
        assert part in words, part


def test_figures_carry_their_description(run: Path) -> None:
    page = page_of(run)[1]
    assert [i["alt"] for i in page.images] == ["A triangle & <more>", "Two & one"]
    assert all(str(i["src"]).startswith("data:image/png;base64,") for i in page.images)


def test_text_of_a_lesson_cannot_break_the_page(run: Path) -> None:
    evil = '"><script>alert(1)</script>'
    for row in rows("s2"):
        changes = {
            k: evil for k in ("text", "question", "said_by", "measured_", "name", "checklist", "key") if k in row
        }
        Ledger(run / "ledger.jsonl").append({**row, **changes})
    text, _ = page_of(run)  # the parser refuses scripts
    assert "<script" not in text


def test_only_the_last_session_of_a_lesson_counts(run: Path) -> None:
    assert len(summary.by_lesson(rows())["01_baseline_oom"].reports) == 2
    later = [{**rows("s2")[0]}, {**rows("s2")[1]}]
    found = summary.by_lesson([*rows(), *later])["01_baseline_oom"]
    assert not found.reports and len(found.claims) == 1 and not found.finished


def test_a_damaged_ledger_is_said_and_the_rest_is_shown(run: Path) -> None:
    path = run / "ledger.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], '{"kind": "claim", "le', "[1, 2]", "\x00", *lines[2:], '{"half']))
    text, page = page_of(run)
    assert text.count("is not a complete row") == 4 and "exponent 0.97" in text


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "report", "lesson": "01_baseline_oom", "session": "s1"},
        {"kind": "guess", "lesson": "01_baseline_oom", "session": "s1", "name": "x"},
        {"kind": "claim", "lesson": "01_baseline_oom", "session": "s1", "key": "x"},
        {"kind": "check", "lesson": "01_baseline_oom", "session": "s1", "exercise": "x"},
        {"kind": "claim", "lesson": "01_baseline_oom", "session": "s1", "key": "x", "text": "t", "verdict": "perhaps"},
        {"kind": "unheard of", "lesson": "01_baseline_oom", "session": "s1"},
        {"kind": "report"},
        {"lesson": 3},
    ],
)
def test_a_row_that_lacks_something_does_not_lose_the_page(run: Path, row: dict[str, Any]) -> None:
    Ledger(run / "ledger.jsonl").append(row)
    assert "exponent 0.97" in page_of(run)[0]


def test_without_a_gpu_the_page_says_predicted(run: Path) -> None:
    before = Run.load(run)
    assert before is not None
    nothing = dict.fromkeys(MACHINE) | {"torch": "2.13.0+cpu", "python": "3.11", "system": "Linux x86_64"}
    replace(before, machine=nothing).save(run)
    words = " ".join(page_of(run)[1].words)
    assert "No GPU: memory predicted" in words and "h200, predicted" in words and "0.0 GB" not in words


def test_interactive_lessons_have_a_page_too(tmp_path: Path) -> None:
    for row in rows():
        Ledger(tmp_path / "ledger.jsonl").append(row)
    assert "grows linearly" in page_of(tmp_path)[0]


@pytest.mark.parametrize("machine", [3, {"card": "x", "capability": 3}, {"card": "x", "memory_bytes": "8"}])
def test_a_strange_machine_in_a_row_does_not_lose_the_page(tmp_path: Path, machine: Any) -> None:
    for row in rows():
        Ledger(tmp_path / "ledger.jsonl").append({**row, **({"machine": machine} if row["kind"] == "begin" else {})})
    assert "exponent 0.97" in page_of(tmp_path)[0]


def test_an_unfinished_run_has_a_page(run: Path) -> None:
    state = json.loads((run / "run.json").read_text())
    state["finished"], state["lessons"][2]["status"] = None, "running"
    (run / "run.json").write_text(json.dumps(state))
    text = page_of(run)[0]
    assert "Not finished" in text and "interrupted" in text


def test_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        report.write(tmp_path)
    with pytest.raises(UserError, match="holds no run"):
        report.write(tmp_path / "nowhere")


def test_a_page_that_cannot_be_written_is_one_sentence(run: Path) -> None:
    (run / "report.html").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        report.write(run)
