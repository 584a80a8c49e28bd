"""Rare parts: looked for, and missed with a sentence that says what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import labkit as lab
from labkit import extras

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def test_every_extra_exists_in_the_project() -> None:
    text = PROJECT.read_text()
    for extra, (module, _) in extras.EXTRAS.items():
        assert re.search(rf'^{extra} = \["{module}', text, re.M), extra


def test_what_is_missing_is_said_and_what_is_there_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras.util, "find_spec", lambda name: None)
    assert not extras.has("deepspeed") and extras.version("deepspeed") is None
    extras.missing("deepspeed", "ZeRO-Offload is not measured")
    said = capsys.readouterr().out
    assert "so ZeRO-Offload is not measured" in said and "pip install 'gpt2-small-gpu-lab[deepspeed]'" in said
    monkeypatch.setattr(extras.util, "find_spec", lambda name: object())
    assert extras.has("deepspeed") and extras.version("deepspeed") is None  # on the path, not installed
    extras.missing("deepspeed", "ZeRO-Offload is not measured")
    assert capsys.readouterr().out == ""


def test_another_name_is_refused() -> None:
    with pytest.raises(lab.UserError, match="deepspeed"):
        extras.has("nothing")
