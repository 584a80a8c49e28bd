"""labkit.toolchain: a compiler that got ready has its tries behind it, and one that cannot says nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit import compiling, toolchain

CACHE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.mark.slow
def test_the_compiler_has_tried_itself_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE, raising=False)
    ready = toolchain.preparing(tmp_path, "cpu")
    assert ready.is_alive()
    ready.join(timeout=300)
    assert not ready.is_alive()
    assert len(list(tmp_path.rglob("*.main.cpp"))) == 1 and list(tmp_path.rglob("*.main.so"))
    assert CACHE not in os.environ


def test_a_failure_is_left_to_the_first_call(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is raised and nothing is said, whatever the process does; waiting ends when it is told to."""
    ready = toolchain.preparing(tmp_path / "nowhere" / "\x7f", "no such device")
    ready.join(timeout=120)
    assert not ready.is_alive()
    slow = toolchain.Preparing(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
    slow.join(timeout=0.1)
    assert slow.is_alive()
    slow._process.kill()
    slow.join()
    assert capfd.readouterr() == ("", "")


def test_nothing_is_done_for_a_card_or_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    assert toolchain.prepare(str(tmp_path), "cuda") is False
    monkeypatch.setattr(compiling, "why_not", lambda device: "no C++ compiler was found")
    assert toolchain.prepare(str(tmp_path), "cpu") is False
    assert list(tmp_path.iterdir()) == []
