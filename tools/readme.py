"""Write the README's tables and picture, and docs/claims.md, from reference rows: no number there is typed.

python tools/readme.py            writes README.md and docs/claims.md
python tools/readme.py --check    exits 1 when they do not say what the rows say
python tools/readme.py --figure RUN    takes docs/heatmap.png from the executed lesson 01 of a run folder
"""

from __future__ import annotations

import base64
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from labkit.results import Ledger, Report
from labkit.units import show_bytes
from labkit.verdicts import DEPENDS, FAILS, HOLDS, Claim

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


def _claims() -> dict[str, dict[str, Claim]]:
    """What became of each lesson's claims on the H200, by lesson and key."""
    found: dict[str, dict[str, Claim]] = {}
    for row in Ledger(REFERENCE / "lessons-h200.jsonl"):
        if row["kind"] == "claim":
            claim = Claim.from_row(row)
            if row.get("remark"):
                claim = replace(claim, measured=f"{claim.measured} ({row['remark']})")
            found.setdefault(row["lesson"], {})[row["key"]] = claim
    return found


def _front(path: Path) -> dict[str, Any]:
    front: dict[str, Any] = json.loads(path.read_text())["metadata"]["labkit"]
    return front


def lessons() -> str:
    """Every lesson with its question, and what became of its claims."""
    lines = ["| lesson | question | its claims, on an H200 |", "| --- | --- | --- |"]
    settled = _claims()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        front = _front(path)
        outcomes = [claim.outcome for claim in settled.get(path.stem, {}).values()]
        words = ((HOLDS, "holds", "hold"), (DEPENDS, "depends", "depend"), (FAILS, "does not", "do not"))
        counts = [(outcomes.count(kind), one, many) for kind, one, many in words]
        said = ", ".join(f"{n} {one if n == 1 else many}" for n, one, many in counts if n)
        link = f"[{path.stem[:2]} {front['title']}](notebooks/{path.name})"
        lines.append(f"| {link} | {front['question']} | {said or 'not measured yet'} |")
    return "\n".join(lines)


def claims() -> str:
    """docs/claims.md: every claim of the course with its verdict and the number it rests on."""
    lines = [
        "# Claims of the field, and what was measured",
        "",
        "Each verdict was computed by a lesson's run on an H200 (`sm_90`) under a budget of 8 GiB, for that card.",
        "`labkit run` settles the same claims on yours. Rows: `data/reference/lessons-h200.jsonl`; made by",
        "`python tools/readme.py`.",
    ]
    for name, settled in sorted(_claims().items()):
        front = _front(ROOT / "notebooks" / f"{name}.ipynb")
        lines += ["", f"## [{name[:2]} {front['title']}](../notebooks/{name}.ipynb)", ""]
        lines += ["| claim | said by | measured | verdict |", "| --- | --- | --- | --- |"]
        for claim in settled.values():
            cells = (claim.text, claim.said_by, claim.measured or "", claim.verdict or "open")
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def readme(text: str) -> str:
    """`text` with its marked blocks written anew."""
    for name, block in (("results", results()), ("lessons", lessons()), ("accuracy", accuracy())):
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
    readme_file, claims_file = ROOT / "README.md", ROOT / "docs" / "claims.md"
    wanted = {readme_file: readme(readme_file.read_text()), claims_file: claims()}
    for path, text in wanted.items():
        if arguments != ["--check"]:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            raise SystemExit(f"{path.name} does not say what the reference rows say: python tools/readme.py")


if __name__ == "__main__":
    main(sys.argv[1:])
