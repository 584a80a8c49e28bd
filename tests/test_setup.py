"""tools/setup.py: done once, goes on after an interruption, never throws an environment away unasked."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "setup.py"


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """The script in a repository of its own; `setup.calls` are the arguments that pip would have got."""
    spec = importlib.util.spec_from_file_location("setup_under_test", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / "with space" / ".venv"
    (venv.parent).mkdir()
    (venv.parent / "requirements.lock").write_text("rich==15.0.0\ntorch==2.13.0\n")
    (venv.parent / "pyproject.toml").write_text("[project]\n")
    for name, value in {
        "ROOT": venv.parent, "VENV": venv, "STAMP": venv / "labkit-setup.json", "LOG": venv / "setup.log",
        "PYTHON": venv / "bin" / "python",
    }.items():  # fmt: skip
        setattr(module, name, str(value))
    module.calls, module.made = [], []
    module.pip = lambda *arguments: module.calls.append(arguments)

    def make_venv():
        module.made.append(1)
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        python = venv / "bin" / "python"
        python.unlink(missing_ok=True)
        python.write_text(f'#!/bin/sh\n[ "$1" = -m ] || echo {sys.version_info[0]}.{sys.version_info[1]}\n')
        python.chmod(0o755)

    module.make_venv = make_venv
    return module


def test_it_is_done_once(setup):
    assert setup.set_up("", False) == 0
    assert setup.made == [1]
    assert setup.calls == [("-r", "requirements.lock"), ("--no-deps", "--no-build-isolation", "-e", ".")]
    start = time.perf_counter()
    assert setup.set_up("", False) == 0
    assert time.perf_counter() - start < 0.1
    assert len(setup.calls) == 2 and setup.made == [1]


@pytest.mark.parametrize("file", ["requirements.lock", "pyproject.toml"])
def test_a_changed_file_installs_again_into_the_same_environment(setup, file):
    setup.set_up("", False)
    Path(setup.ROOT, file).touch()
    setup.set_up("", False)
    assert len(setup.calls) == 2  # another time of change is no change
    with Path(setup.ROOT, file).open("a") as out:
        out.write("# changed\n")
    setup.set_up("", False)
    assert len(setup.calls) == 4 and setup.made == [1]


def test_an_interrupted_set_up_goes_on(setup):
    def failing(*arguments):
        raise setup.SetupError("no network")

    working, setup.pip = setup.pip, failing
    with pytest.raises(setup.SetupError):
        setup.set_up("", False)
    setup.pip = working
    setup.set_up("", False)
    assert setup.made == [1] and len(setup.calls) == 2


def test_another_index_is_remembered_and_torch_replaced_once(setup):
    setup.set_up("", False)
    setup.calls.clear()
    setup.set_up("https://index/cu126", False)
    assert setup.calls[0] == ("--force-reinstall", "--no-deps", "--index-url", "https://index/cu126", "torch==2.13.0")
    assert setup.calls[1] == ("--index-url", "https://index/cu126", "torch==2.13.0")
    setup.calls.clear()
    setup.set_up("", False)
    assert setup.calls == []
    Path(setup.ROOT, "requirements.lock").write_text("torch==2.14.0\n")
    setup.set_up("", False)
    assert setup.calls[0] == ("--index-url", "https://index/cu126", "torch==2.14.0")
    assert not any("--force-reinstall" in call for call in setup.calls)


def test_an_index_chosen_before_an_interruption_is_not_forgotten(setup):
    def failing(*arguments):
        raise setup.SetupError("no network")

    working, setup.pip = setup.pip, failing
    with pytest.raises(setup.SetupError):
        setup.set_up("https://index/cu126", False)
    setup.pip = working
    setup.set_up("", False)
    assert "--force-reinstall" in setup.calls[0] and "https://index/cu126" in setup.calls[0]


def test_only_a_python_asked_for_by_name_rebuilds(setup):
    setup.set_up("", False)
    stamp = json.loads(Path(setup.STAMP).read_text())
    Path(setup.STAMP).write_text(json.dumps({**stamp, "python": "3.10" if sys.version_info[1] != 10 else "3.11"}))
    setup.set_up("", False)
    assert setup.made == [1]
    setup.set_up("", True)
    assert setup.made == [1, 1]


def test_a_moved_folder_and_a_broken_environment_are_built_anew(setup):
    setup.set_up("", False)
    stamp = json.loads(Path(setup.STAMP).read_text())
    Path(setup.STAMP).write_text(json.dumps({**stamp, "root": "elsewhere"}))
    setup.set_up("", False)
    assert setup.made == [1, 1]
    Path(setup.PYTHON).unlink()
    setup.set_up("", False)
    assert setup.made == [1, 1, 1]


def test_a_damaged_stamp_is_no_stamp(setup):
    setup.set_up("", False)
    Path(setup.STAMP).write_text('{"content": ')
    setup.set_up("", False)
    assert setup.made == [1] and len(setup.calls) == 4


def test_pips_failure_is_one_line():
    spec = importlib.util.spec_from_file_location("setup_under_test", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    none = "ERROR: Could not find a version that satisfies the requirement rich==15.0.0 (from versions: none)"
    assert "check the network" in module.explain([none])
    assert "disk is full" in module.explain(
        ["ERROR: Could not install packages due to an OSError: [Errno 28] No space left"]
    )
    assert module.explain([]).startswith("pip failed")


def test_make_setup_is_instant_when_nothing_changed():
    """On the environment that runs these tests, where it was made by `make setup`."""
    root = SCRIPT.parents[1]
    if Path(sys.prefix) != root / ".venv":
        return
    outside = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}  # make itself may run these tests
    start = time.perf_counter()
    done = subprocess.run(["make", "setup"], cwd=root, capture_output=True, text=True, timeout=60, env=outside)
    assert done.returncode == 0 and done.stdout == ""
    assert time.perf_counter() - start < 3  # 0.15 s on an idle machine
