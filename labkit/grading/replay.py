"""What runs a whole notebook again, inside the sandbox: top to bottom in one kernel, each cell with a time limit.

Reads the set-up and the notebook on standard input; writes one line for each cell that was run, with its outputs, as
soon as it is done, so that what was there before the kernel or this process died is kept; and the ledger at the end.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from pathlib import Path
from typing import Any

from ..results import Ledger
from .inside import reap, restrict
from .relay import Speaker

CELL_BYTES = 4 * 2**20  # of one cell's output that are kept
NOTEBOOK_BYTES = 32 * 2**20
FLOOD_BYTES = 64 * 2**20  # of one cell's output, after which it is stopped
LEDGER_BYTES = 8 * 2**20
STOP_SECONDS = 5.0  # that a cell has to stop when it is interrupted, in silence
DRAIN_SECONDS = 60.0  # and while output comes


def main() -> None:
    """Run the notebook that comes on standard input."""
    sys.path[:] = [p for p in sys.path if p not in ("", os.getcwd())]  # the notebook writes there
    setup = json.loads(sys.stdin.buffer.readline())
    requested = json.loads(sys.stdin.buffer.readline())
    out = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    restrict(setup)
    say = Speaker(out)
    kernel = Kernel()
    for cell in requested["cells"]:
        found = kernel.run(cell["source"], requested["seconds"])
        if setup.get("walled"):
            reap(kernel.process)
        say("cell", id=cell["id"], **found)
        if found["ending"] in ("died", "stuck"):
            break
    say("rows", rows=rows(Path(os.environ["LABKIT_RUN"]) / "ledger.jsonl"))
    kernel.close()
    say("end")


def rows(ledger: Path) -> list[dict[str, Any]]:
    """The rows of the ledger that the notebook has written, as far as they are readable and not too many."""
    if not ledger.is_file() or ledger.stat().st_size > LEDGER_BYTES:
        return []
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Ledger(ledger).rows()


class Kernel:
    """An IPython kernel that talks over sockets in a folder."""

    def __init__(self) -> None:
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import KernelManager

        class ThisPython(KernelManager):  # type: ignore[misc]
            @property
            def kernel_spec(self) -> Any:
                command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
                return KernelSpec(argv=command, display_name="Python 3", language="python", resource_dir="")

        self._manager = ThisPython(transport="ipc")
        self._manager.start_kernel(env={**os.environ, "IPYTHONDIR": f"{os.getcwd()}/.ipython"})
        self.process: int | None = getattr(self._manager.provisioner, "pid", None)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)
        self._left = NOTEBOOK_BYTES

    def run(self, source: str, seconds: float) -> dict[str, Any]:
        """Run one cell. ``ending``: ``ok``, ``error``, ``timeout``, ``flood`` (stopped for its output), ``stuck``
        (would not stop), ``died``."""
        message = self._client.execute(source, allow_stdin=False, stop_on_error=False)
        output, ending, interrupted = Output(min(CELL_BYTES, self._left)), "ok", False
        deadline = last = time.monotonic() + seconds
        while True:
            late = time.monotonic() > deadline
            if interrupted and late:
                ending = "stuck"
                break
            if not interrupted and (late or output.bytes > FLOOD_BYTES):
                ending, interrupted = "timeout" if late else "flood", True
                self._manager.interrupt_kernel()
                deadline = time.monotonic() + STOP_SECONDS
                last = time.monotonic() + DRAIN_SECONDS
            try:
                found = self._client.get_iopub_msg(timeout=0.5)
            except queue.Empty:
                if not self._manager.is_alive():
                    ending = "died"
                    break
                continue
            if found["parent_header"].get("msg_id") != message:
                continue
            if interrupted and time.monotonic() < last:  # what it had printed by then has to be read first
                deadline = time.monotonic() + STOP_SECONDS
            if found["msg_type"] == "status" and found["content"]["execution_state"] == "idle":
                break
            output.take(found)
        self._left -= min(output.bytes, CELL_BYTES, self._left)
        if ending == "ok" and output.failed:
            ending = "error"
        return {"ending": ending, "outputs": output.kept, "count": output.count, "cut": output.cut}

    def close(self) -> None:
        """End the kernel."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


class Output:
    """What a cell shows, as a notebook stores it, up to `most` bytes."""

    def __init__(self, most: int) -> None:
        self.kept: list[dict[str, Any]] = []
        self.bytes, self.count, self.failed = 0, None, False
        self._most = most

    @property
    def cut(self) -> bool:
        """Whether there was more than is kept."""
        return self.bytes > self._most

    def take(self, message: dict[str, Any]) -> None:
        """Add one message of the kernel."""
        kind, content = message["msg_type"], message["content"]
        if kind == "execute_input":
            self.count = content["execution_count"]
        if kind == "clear_output":
            self.kept.clear()
        if kind not in ("stream", "display_data", "execute_result", "error"):
            return
        self.failed = self.failed or kind == "error"
        self.bytes += len(content.get("text", "")) if kind == "stream" else len(json.dumps(content))
        if self.cut:
            return
        last = self.kept[-1] if self.kept else {}
        if kind == "stream":
            if last.get("output_type") == "stream" and last["name"] == content["name"]:
                last["text"] += content["text"]
            else:
                self.kept.append({"output_type": "stream", "name": content["name"], "text": content["text"]})
        elif kind == "error":
            fields = {k: content[k] for k in ("ename", "evalue", "traceback")}
            self.kept.append({"output_type": "error", **fields})
        else:
            shown = {"output_type": kind, "data": content["data"], "metadata": content["metadata"]}
            if kind == "execute_result":
                shown["execution_count"] = content["execution_count"]
            self.kept.append(shown)


if __name__ == "__main__":
    main()
