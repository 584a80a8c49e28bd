"""A file that calls itself a notebook, read without being harmed by it: what it may cost is limited before it is paid.

A learner's notebook has outputs of any size, and those are cut; what no notebook has (millions of values, metadata of
megabytes) is refused, or left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

from ..units import UserError

FILE_BYTES = 512 * 2**20  # of a notebook; larger is not opened
OUTPUT_BYTES = 4 * 2**20  # of one cell's saved output that are kept
OUTPUTS_BYTES = 64 * 2**20  # of all together: every hand-in is in memory while it waits
METADATA_BYTES = 2**18  # of a cell, and of the notebook
MOST_CELLS = 1000  # the largest lesson has fewer than 60
SOURCE_CHARACTERS = 2 * 10**6  # of all code cells together; a lesson has fewer than 80,000
MOST_VALUES = 10**7  # of a file's JSON: one takes some 70 bytes and a microsecond, however short it is written
_SMALL = 2**23  # bytes of a file that cannot hold too many
_MARKS = (b",", b"[", b"{")
_KNOWN = ("cells", "metadata", "nbformat", "nbformat_minor", "worksheets")


def digest(file: Path) -> str:
    """What is in a file, in short; of one that is not opened, its size and time."""
    found = hashlib.sha256()
    with contextlib.suppress(OSError):
        about = file.stat()
        if about.st_size > FILE_BYTES:  # the size may be all that there is: a file can have holes
            found.update(f"{about.st_size} {about.st_mtime_ns}".encode())
            return found.hexdigest()[:16]
        with file.open("rb") as opened:
            while block := opened.read(2**20):
                found.update(block)
    return found.hexdigest()[:16]


def content(file: Path) -> bytes:
    """The bytes of a notebook's file. Raises `UserError` for one that is too large, or cannot be read."""
    try:
        if file.stat().st_size > FILE_BYTES:
            raise UserError(f"larger than {FILE_BYTES // 2**20} MiB")
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}") from error


def notebook(found: bytes) -> Any:
    """The notebook in bytes, its outputs cut to a size. Raises `UserError` for what is none."""
    import nbformat

    read = _json(found)
    cells = read.get("cells") if isinstance(read, dict) else None
    if isinstance(cells, list) and len(cells) > MOST_CELLS:
        raise UserError(f"a notebook of {len(cells)} cells; at most {MOST_CELLS} are graded")
    try:
        _cut(read)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cells that are there twice, one line each
            made = nbformat.convert(nbformat.from_dict({k: read[k] for k in _KNOWN if k in read}), 4)
            for cell in made.cells:
                cell.source = cell.source if isinstance(cell.source, str) else "".join(cell.source)
                cell.metadata = cell.get("metadata", nbformat.from_dict({}))
            nbformat.validate(made)
    except Exception as error:  # nbformat's own errors, and what a file that is nearly a notebook leads to
        raise UserError(f"not a notebook ({type(error).__name__})") from error
    if sum(len(cell.source) for cell in made.cells if cell.cell_type == "code") > SOURCE_CHARACTERS:
        raise UserError(f"its code cells hold more than {SOURCE_CHARACTERS} characters")
    if not made.cells:
        raise UserError("a notebook without cells")
    return made


def _json(found: bytes) -> Any:
    if not found.strip():
        raise UserError("the file is empty")
    if len(found) > _SMALL and values(found, MOST_VALUES) > MOST_VALUES:
        raise UserError(f"holds more than {MOST_VALUES:,} values, which no notebook has")
    try:
        return json.loads(found.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError("not a notebook: the file is no JSON") from error


def values(found: bytes, most: int) -> int:
    """How many values the JSON in `found` has at most: its commas, brackets and texts. Stops when it is past `most`."""
    everywhere = sum(found.count(mark) for mark in (*_MARKS, b'"'))
    if everywhere <= most:
        return everywhere
    count = at = 0  # without what stands in texts
    while count <= most:
        begin = found.find(b'"', at)
        end = begin if begin >= 0 else len(found)
        count += 1 + sum(found.count(mark, at, end) for mark in _MARKS)
        if begin < 0:
            break
        at = end + 1
        while (close := found.find(b'"', at)) >= 0:
            at = close + 1
            before = found[max(begin, close - 64) : close]
            if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
                break
        else:
            break  # a text without an end: json will say so
    return count


def _cut(read: Any) -> None:
    """Leave out, in place, outputs and metadata that are too large to keep."""
    left = OUTPUTS_BYTES
    for part in (read, *read["cells"]):
        if len(json.dumps(part.get("metadata", {}))) > METADATA_BYTES:
            part["metadata"] = {}
        for key in ("outputs", "attachments"):
            size = len(json.dumps(part[key])) if key in part else 0
            if size > min(OUTPUT_BYTES, left):
                part[key] = [] if key == "outputs" else {}
            else:
                left -= size
