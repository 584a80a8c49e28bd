"""``labkit plan``: a plan as text or as one JSON document, and as a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def run(model: str, *, as_json: bool, export: Path | None, asked: dict[str, Any]) -> int:
    """Print the plan; returns the exit code: 0, or 1 when nothing fits. Raises `UserError` for bad input."""
    from ..predicting import only_ours

    with only_ours() as say:
        from . import planning

        found = planning.plan(model, **asked)
        if export is not None and found.choices:
            found.export(export)
        say(json.dumps(found.to_dict()) if as_json else str(found))
        if export is not None and found.choices and not as_json:
            say(f"written: {export}")
    return 0 if found.choices else 1
