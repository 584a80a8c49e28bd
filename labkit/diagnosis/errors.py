"""Errors in a text: the exception, where it was raised from, and whether the run went on after it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .reading import Reading

# what stands before a line when several processes or a logger write it
PREFIX = re.compile(
    r"^(?:\[?rank ?\d+\]?:? ?|\d{1,4}: (?=\s*(?:File|Traceback|[\w.]+(?:Error|Exception)\b|  ))|"  # srun --label
    r"[\w.\-]{1,40}-\d+ {0,8}[|:] ?|\d+\.\d+s\t\d+\t|\[\d+\]:? |\(\w+ pid=\d+[^)]*\) |"  # compose, Kaggle, Ray
    r"\[?\d{4}-\d\d-\d\d[T ][\d:,.]+Z?\]? ?|[\d:,.]{8,} |"
    r"\[?(?:INFO|WARNING|ERROR|CRITICAL|DEBUG)\]?[:\s-]+|E {2,}|> |\| +)+"
)
_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line \d+, in (?P<name>.+)$'  # Python
    r"|^\s*File (?P<file2>\S+?):\d+,? in (?P<name2>[\w.<>]+)"  # IPython from 8.0 on
    r"|^\s*(?P<file3>\S+\.py|<ipython-input\S*>) in (?P<name3>[\w.<>]+)"  # IPython before
    r"|^\s*(?P<file4>\S+\.py):\d+: in (?P<name4>\w+)"  # pytest
)
_RAISED = re.compile(
    r"^\s*(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure|Failed|Timeout))\b(?::\s*(?P<message>.*))?$"
)
_COMPOSED = re.compile(r"[\w.\-]{1,40}-\d+ {0,8}[|:] ")
_RANK = re.compile(r"^\[?rank ?(\d+)\]?:|^(\d{1,4}): ", re.I)
_ARROW = re.compile(r"^-+> ?\d* ?")


@dataclass(frozen=True)
class Raised:
    """An exception: ``kind`` without its module, the first lines of its message, its line number, and its frames,
    outermost first, each as ``file:function:code`` in lower case. ``handled``: the run went on after it."""

    kind: str
    message: str
    line: int
    quote: str
    frames: tuple[str, ...] = ()
    handled: bool = False


def errors(reading: Reading) -> list[Raised]:
    """The exceptions of a text, in order. Of a chain, the one behind comes before the one that it led to."""
    found: list[Raised] = []
    held: dict[str, list[list[str]]] = {}
    ranks = {n: "".join(g or "" for g in m.groups()) for n, line in reading.lines() if (m := _RANK.match(line))}
    rows = [
        (n, PREFIX.sub("", line, count=1) if line[:1] in "[(0123456789IWECDrR>|" or _COMPOSED.match(line) else line)
        for n, line in reading.lines()
    ]
    for index, (number, line) in enumerate(rows):
        rank = ranks.get(number, "")
        frames = held.setdefault(rank, [])
        if frame := _FRAME.match(line):
            parts = [p for p in frame.groups() if p is not None]
            frames.append([parts[0].replace("\\", "/"), parts[1], ""])
        elif frames and (arrow := _ARROW.match(line)):
            frames[-1][2] = line[arrow.end() :].strip()
        elif frames and not frames[-1][2] and line[:4] == "    " and not line.lstrip().startswith(("^", "~", "File")):
            frames[-1][2] = line.strip()
        elif line.startswith(("Traceback (most recent", "During handling of", "The above exception was")):
            frames.clear()
        elif raised := _RAISED.match(line):
            kind = raised["kind"].rsplit(".", 1)[-1]
            if not frames and raised["message"] is None:
                continue  # the name of a class alone, as at the top of a traceback in a notebook
            if not frames and rank and held.get(""):  # the error alone has the prefix
                frames = held[""]
            following = list(_message([r for r in rows[index + 1 : index + 12] if ranks.get(r[0], "") == rank]))
            message = "\n".join([raised["message"] or "", *following]).strip()
            found.append(
                Raised(
                    kind, message, number, line.strip(), tuple(":".join(f).lower() for f in frames[-80:]),
                    _went_on(reading, number),
                )
            )  # fmt: skip
            frames.clear()
    return found[:20] + found[20:][-20:]


def _message(rows: list[tuple[int, str]]) -> Iterator[str]:
    for _, line in rows:
        if not line.strip() or _FRAME.match(line) or line.startswith("Traceback") or _RAISED.match(line):
            return
        yield line.strip()


def _went_on(reading: Reading, line: int) -> bool:
    """Whether the log tells of success, or of at least three more steps, after `line`."""
    return reading.series.done_line > line or reading.series.progress_after(line) >= 3


def final(found: list[Raised]) -> Raised | None:
    """The error that ended the run: the last one that nothing followed; None where every one was handled."""
    fatal = [e for e in found if not e.handled]
    for error in reversed(fatal):  # launchers report that a child failed: the child's own error says why
        if error.kind not in ("ChildFailedError", "CalledProcessError", "SystemExit", "ProcessRaisedException"):
            return error
    return fatal[-1] if fatal else None
