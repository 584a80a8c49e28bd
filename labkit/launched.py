"""The other end of `labkit.launching`: what torchrun starts in each process, to wait for workers and run them."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing import connection as wire
from pathlib import Path
from typing import Any

from . import quiet
from .launching import KEY, LEAVE_SECONDS


def main(port: int, folder: Path, imports: list[str]) -> int:
    """What each process runs: workers as they come, and at the end of the line the end of the process group."""
    for name in imports:
        importlib.import_module(name)
    quiet.imports_are_no_garbage()
    rank = os.environ["RANK"]
    stack = open(folder / f"stack-{rank}", "w")  # noqa: SIM115 - for as long as the process lives
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    connection = wire.Connection(socket.create_connection(("127.0.0.1", port)).detach())
    wire.answer_challenge(connection, bytes.fromhex(os.environ.pop(KEY)))
    connection.send_bytes(json.dumps({"rank": int(rank), "pid": os.getpid()}).encode())
    tasks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(connection, tasks, busy), daemon=True).start()
    while (task := tasks.get()) is not None:
        connection.send_bytes(json.dumps(_done(task)).encode())
        busy.clear()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _listen(connection: Any, tasks: queue.SimpleQueue[bytes | None], busy: threading.Event) -> None:
    """Take tasks in until the other side is gone. A rank that is computing then ends at once: whoever asked has ended,
    perhaps by force, and nobody waits for the answer; an idle one may leave its process group by itself."""
    while True:
        try:
            task = connection.recv_bytes()
        except (EOFError, OSError):
            break
        busy.set()
        tasks.put(task)
    if busy.is_set():
        os._exit(1)
    tasks.put(None)
    time.sleep(LEAVE_SECONDS)
    os._exit(1)


def _done(task: bytes) -> dict[str, Any]:
    """What came of one task: its row, or its error."""
    import cloudpickle

    try:
        worker, arguments = cloudpickle.loads(task)
        row = worker(**arguments) or {}
        json.dumps(row)
        return {"row": row}
    except BaseException as error:
        end = "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
        return {"error": f"{type(error).__name__}: {error}\n{end}"}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
