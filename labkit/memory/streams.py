"""CUDA streams and events during a prediction: work on them is done at once, memory belongs to the stream it was
asked for on, as in the caching allocator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .recorder import Recorder

DELAYED = (
    "tensors were marked with record_stream: a card gives their memory back only when the other stream's work is done, "
    "so it reserves more than predicted; allocated does not change by it"
)


class Stream:
    """Stands for ``torch.cuda.Stream``."""

    cuda_stream = 0
    _count = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        type(self)._count += 1
        self.stream_id, self.priority, self.device = self._count, priority, torch.device("cpu:0")

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Everything is done already."""

    def query(self) -> bool:
        """Everything is done already."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return event if event is not None else Event()

    def __enter__(self) -> Stream:
        self._context = torch.cuda.StreamContext(self)  # type: ignore[arg-type]
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)  # type: ignore[arg-type]


class Event:
    """Stands for ``torch.cuda.Event``; times are not known."""

    def __init__(self, enable_timing: bool = False, **_: Any):
        self.enable_timing = enable_timing

    def record(self, stream: Any = None) -> None:
        """It has happened."""

    def wait(self, stream: Any = None) -> None:
        """It has happened."""

    def synchronize(self) -> None:
        """It has happened."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """A prediction knows no time."""
        return float("nan")


def patches(recorder: Recorder, notes: dict[str, None]) -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and value of what stands for streams and events while a prediction into `recorder` runs."""
    main = Stream.__new__(Stream)
    main.stream_id, main.priority, main.device = 0, 0, torch.device("cpu:0")
    now = [main]

    def switch(stream: Any) -> None:
        if stream is not None:
            now[0] = stream
            recorder.stream = stream.stream_id

    class StreamContext:
        def __init__(self, stream: Any):
            self.stream = stream

        def __enter__(self) -> Any:
            self.before = now[0]
            switch(self.stream)
            return self.stream

        def __exit__(self, *_: Any) -> None:
            switch(self.before)

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        if tensor.get_device() == 0:
            notes[DELAYED] = None

    yield torch.cuda, "Stream", Stream
    yield torch.cuda, "Event", Event
    yield torch.cuda, "StreamContext", StreamContext
    yield torch.cuda, "stream", StreamContext
    yield torch.cuda, "set_stream", switch
    yield torch.cuda, "current_stream", lambda device=None: now[0]
    yield torch.cuda, "default_stream", lambda device=None: main
    yield torch.Tensor, "record_stream", record_stream
