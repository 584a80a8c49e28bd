"""Rules for every test: `gpu` tests are skipped, and counted, where they cannot run; nothing else may be skipped."""

from __future__ import annotations

import gc
import os
import signal

import pytest

# started in the background, pytest ignores Ctrl-C, and every process that it starts would, too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:  # workers that each take every core get in each other's way
    os.environ.setdefault("OMP_NUM_THREADS", "1")

NO_CARD = "needs a CUDA card: make test-gpu on a machine with one"
FEWER = "needs more cards than this machine has: make test-gpu on one that has them"
SHARED = "needs the card for itself: make test-gpu"
GPU_ITEMS = pytest.StashKey[list[str]]()
MODULES = pytest.StashKey[set[str]]()
_skipped: list[tuple[str, str]] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.stash[GPU_ITEMS] = sorted({item.nodeid.split("[")[0] for item in gpu})
    config.stash[MODULES] = {item.nodeid.split("::")[0] for item in items}
    if not gpu:
        return
    from labkit import machine

    reason = NO_CARD if not machine.has_gpu() else SHARED if "PYTEST_XDIST_WORKER" in os.environ else None
    for item in gpu:
        marker = item.get_closest_marker("gpu")
        enough = reason is None and marker.kwargs.get("cards", 1) <= machine.here().cards  # type: ignore[union-attr]
        if not enough:
            item.add_marker(pytest.mark.skip(reason=reason or FEWER))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        where = report.longrepr
        _skipped.append((report.nodeid, where[2] if isinstance(where, tuple) else str(where)))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:  # a whole module that skips itself
        _skipped.append((report.nodeid, str(report.longrepr)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _unexpected() and session.exitstatus == 0 and "PYTEST_XDIST_WORKER" not in os.environ:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    known = len(_skipped) - len(_unexpected())
    if known:
        terminalreporter.write_line(f"{known} gpu tests skipped, listed in tests/gpu_tests.txt")
    for nodeid, reason in _unexpected():
        terminalreporter.write_line(f"FAILED {nodeid}: skipped ({reason}); only gpu tests may be", red=True)


def _unexpected() -> list[tuple[str, str]]:
    return [(nodeid, why) for nodeid, why in _skipped if not any(known in why for known in (NO_CARD, FEWER, SHARED))]


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the variables of the person who runs it."""
    for name in ("LABKIT_BUDGET", "LABKIT_CARD", "LABKIT_HOME", "LABKIT_RUN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _quick_collections(request: pytest.FixtureRequest) -> None:
    """Take what imports and earlier tests left out of the collector's sight: `measure` collects often, and a pass over
    the objects of every imported library takes a quarter of a second. On a card those objects can hold its memory."""
    if not request.node.get_closest_marker("gpu"):
        gc.freeze()
