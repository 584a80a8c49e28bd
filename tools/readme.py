"""Write the README's tables and picture from reference rows: no number there is typed.

python tools/readme.py            writes README.md
python tools/readme.py --check    exits 1 when README.md does not say what the rows say
python tools/readme.py --figure RUN    takes docs/heatmap.png from the executed lesson 01 of a run folder
"""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from labkit.results import Ledger, Report
from labkit.units import show_bytes

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "data" / "reference"
STEPS = {  # names of lesson 01's reports, and what the README says about them
    "GPT-2 124M, 8 x 1024, eager": "batch 8 x 1024, eager attention",
    "GPT-2 124M, 2 x 1024, eager": "batch 2 x 1024, eager attention",
    "32 at once": "32 x 512, eager attention, at once",
    "8 x 4 accumulated": "the same 32 x 512 as 8 micro-batches of 4",
    "1 x 2048": "1 x 2048, eager attention",
    "1 x 2048, SDPA": "1 x 2048, SDPA",
}


def results() -> str:
    """What fits in 8 GiB: predicted without a GPU, and measured on one."""
    found: dict[str, dict[str, Report]] = {}
    for file in ("lessons-predicted.jsonl", "lessons-h200.jsonl"):
        for row in Ledger(REFERENCE / file):
            if row["kind"] == "report" and row["lesson"] == "01_baseline_oom" and row["name"] in STEPS:
                found.setdefault(row["name"], {})[row["source"]] = Report.from_dict(row)
    lines = [
        "| GPT-2 124M, fp32, AdamW, budget 8 GiB | predicted without a GPU | measured on an H200 |",
        "| --- | --- | --- |",
    ]
    for name, words in STEPS.items():
        lines.append(f"| {words} | {_cell(found[name]['predicted'])} | {_cell(found[name]['measured'])} |")
    return "\n".join(lines)


def _cell(report: Report) -> str:
    if report.failure:
        return f"out of memory{report.failure.place.replace('(', '(`').replace(')', '`)')}"
    return f"{show_bytes(report.peak_bytes)} ({report.peak_bytes:,} bytes)"


def accuracy() -> str:
    """The errors of predictions, from the bench's own reports."""
    lines = ["| peak of | random recipes | median error | 95th percentile | worst |", "| --- | --- | --- | --- | --- |"]
    for file, what in (("memory.md", "not used for fitting"), ("memory-fresh.md", "drawn afterwards")):
        text = (ROOT / "bench" / "results" / file).read_text()
        count = re.search(r"^(\d+) random recipes", text, re.MULTILINE)
        for peak in ("steady allocated", "steady requested", "steady reserved"):
            row = re.search(rf"^\| {peak} \| ([^|]*) \| ([^|]*) \| ([^|]*) \|", text, re.MULTILINE)
            if not (count and row):
                raise SystemExit(f"{file}: no row for {peak}")
            lines.append(f"| {peak} | {count[1]}, {what} | {row[1]} | {row[2]} | {row[3]} |")
    return "\n".join(lines)


def readme(text: str) -> str:
    """`text` with its marked blocks written anew."""
    for name, block in (("results", results()), ("accuracy", accuracy())):
        start, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        before, rest = text.split(start)
        text = f"{before}{start}\n{block}\n{end}{rest.split(end)[1]}"
    return text


def figure(run: Path) -> None:
    """The heatmap that lesson 01 drew in `run`, as docs/heatmap.png."""
    notebook = json.loads((run / "notebooks" / "01_baseline_oom.ipynb").read_text())
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if "Heatmap" in "".join(output.get("data", {}).get("text/plain", "")):
                target = ROOT / "docs" / "heatmap.png"
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(base64.b64decode("".join(output["data"]["image/png"])))
                return
    raise SystemExit(f"{run}: lesson 01 drew no heatmap there")


def main(arguments: list[str]) -> None:
    """See the module's text."""
    if arguments[:1] == ["--figure"]:
        figure(Path(arguments[1]))
        return
    path = ROOT / "README.md"
    text = path.read_text()
    wanted = readme(text)
    if arguments == ["--check"]:
        if text != wanted:
            raise SystemExit("README.md does not say what the reference rows say: python tools/readme.py")
        return
    path.write_text(wanted)


if __name__ == "__main__":
    main(sys.argv[1:])
