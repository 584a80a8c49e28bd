"""labkit.toolchain: a compiler that got ready has its tries behind it, and one that cannot says nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch._inductor.codecache as codecache

from labkit import compiling, toolchain

CACHE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.mark.slow
def test_the_compiler_has_tried_itself_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE, raising=False)
    ready = toolchain.preparing("cpu", tmp_path)
    ready.join(timeout=300)
    assert not ready.is_alive()
    assert len(list(tmp_path.rglob("*.main.cpp"))) == 1 and list(tmp_path.rglob("*.main.so"))
    assert CACHE not in os.environ


@pytest.mark.parametrize("outside", [None, "/elsewhere"])
def test_a_failure_is_left_to_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: str | None
) -> None:
    seen: list[str | None] = []

    def fails(*_: Any) -> None:
        seen.append(os.environ.get(CACHE))
        raise RuntimeError("no such compiler")

    monkeypatch.setattr(compiling, "why_not", lambda device: None)
    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_pybinding", fails)
    monkeypatch.delenv(CACHE, raising=False) if outside is None else monkeypatch.setenv(CACHE, outside)
    toolchain.preparing("cpu", tmp_path).join(timeout=60)
    assert seen == [str(tmp_path)] and os.environ.get(CACHE) == outside


def test_nothing_is_done_for_a_card_or_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.preparing("cuda", tmp_path).join(timeout=60)
    monkeypatch.setattr(compiling, "why_not", lambda device: "no C++ compiler was found")
    toolchain.preparing("cpu", tmp_path).join(timeout=60)
    assert list(tmp_path.iterdir()) == []
