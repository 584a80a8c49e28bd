"""A learner's notebook as it may be shown to its reader.

Formgrader shows a notebook inside a page that may do everything its reader may do on the Jupyter server. Therefore only
text and sound PNG images of a learner's notebook get there: no HTML, no script, no prose that is not the lesson's own.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from ..submitting import grade_id, source
from . import figures

_TEXT = 20_000  # characters of one output
_WIDTH = 74  # characters of a line that formgrader shows whole inside JupyterLab
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def harmless(notebook: Mapping[str, Any], pristine: Mapping[str, Any]) -> dict[str, Any]:
    """A learner's executed notebook as it may be shown: the lesson's own prose and metadata, code, text and images.

    `pristine` is the lesson as learners get it. Prose of the learner's own is shown as text, an output of HTML as the
    words in it.
    """
    prose = {(c.get("id"), source(c)) for c in pristine["cells"] if c["cell_type"] == "markdown"}
    metadata = {grade_id(c): c["metadata"] for c in pristine["cells"] if grade_id(c)}
    cells: list[dict[str, Any]] = []
    for number, cell in enumerate(notebook["cells"]):
        text = source(cell)
        made: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}, "source": text}
        if cell["cell_type"] == "code":
            name = grade_id(cell)
            count = cell.get("execution_count")
            made |= {"cell_type": "code", "outputs": _outputs(cell), "metadata": metadata.pop(name, {}) if name else {}}
            if made["metadata"].get("nbgrader", {}).get("grade") and made["metadata"]["nbgrader"]["solution"]:
                made["outputs"] = [*_wrapped(text), *made["outputs"]]
            made["execution_count"] = count if isinstance(count, int) and not isinstance(count, bool) else None
        else:
            made["cell_type"] = "markdown"
            if (cell.get("id"), text) not in prose:
                fence = "`" * (3 + max((len(run) for run in re.findall(r"`+", text)), default=0))
                made["source"] = f"{fence}text\n{text}\n{fence}"
        cells.append(made)
    return {"cells": cells, "metadata": pristine["metadata"], "nbformat": 4, "nbformat_minor": 5}


def _wrapped(text: str) -> list[dict[str, Any]]:
    """A written answer once more in lines that fit a page, where it has longer ones: formgrader cuts those."""
    lines = text.split("\n")
    if max(map(len, lines)) <= _WIDTH:
        return []
    return [_stream("\n".join("\n".join(textwrap.wrap(line, _WIDTH)) for line in lines))]


def _outputs(cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    outputs = cell.get("outputs")
    for output in outputs if isinstance(outputs, list) else []:
        if not isinstance(output, dict):
            continue
        data = output.get("data")
        if output.get("output_type") == "error":
            lines = output.get("traceback")
            text = "\n".join(map(str, lines)) if isinstance(lines, list) else ""
            found.append(_stream(text or f"{output.get('ename')}: {output.get('evalue')}"))
        elif isinstance(data, dict):
            image = figures.sound(_joined(data.get("image/png")))
            words = _words(_joined(data.get("text/html"))) or _joined(data.get("text/plain"))
            if image:
                found.append({"output_type": "display_data", "data": {"image/png": image}, "metadata": {}})
            elif words:
                found.append(_stream(words))
        else:
            found.append(_stream(_joined(output.get("text"))))
    return [one for one in found if one.get("text") or one.get("data")]


def _stream(text: str) -> dict[str, Any]:
    plain = _ANSI.sub("", text).rstrip("\n")
    cut = plain if len(plain) <= _TEXT else f"{plain[:_TEXT]}\n… ({len(plain) - _TEXT} more characters)"
    return {"output_type": "stream", "name": "stdout", "text": f"{cut}\n" if cut else ""}


def _words(markup: str) -> str:
    """The words of a piece of HTML, one line for each row or block."""
    lines = re.sub(r"</(tr|div|p|li|h\d)>|<br\s*/?>", "\n", re.sub(r"</t[dh]>", "   ", markup[:_TEXT]))
    text = html.unescape(re.sub(r"<[^>]*>?", "", lines))
    return "\n".join(line.strip() for line in text.split("\n") if line.strip())


def _joined(value: Any) -> str:
    return "".join(map(str, value)) if isinstance(value, list) else value if isinstance(value, str) else ""
