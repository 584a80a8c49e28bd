"""What the ranks of one job do: join, count what they hold and what they send, measure a step side by side.

These run inside a worker that `labkit.launching` started::

    def worker(batch):
        place = parallel.join()                       # NCCL where each rank has a card, gloo on the processor
        model = DistributedDataParallel(build().to(place.device))
        with parallel.Traffic() as traffic:
            step()
        return {"sent": traffic.link_bytes(place.world)}
"""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import machine, measuring

# Bytes that one of W ranks sends for a payload, by the ring algorithm (Patarasuk and Yuan, 2009): an all-reduce is a
# reduce-scatter and an all-gather, each of which sends W - 1 pieces of the payload's W-th part.
_RING: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda world: 2 * (world - 1) / world,
    "all_gather": lambda world: (world - 1) / world,
    "reduce_scatter": lambda world: (world - 1) / world,
    "broadcast": lambda world: (world - 1) / world,
    "send": lambda world: 1,
}
# operators of c10d -> the collective that they are; what only waits or receives is not here
_OPERATORS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast_": "broadcast",
    "send": "send",
}

WATCHDOG_SECONDS = 0.2  # two looks of NCCL's watchdog


@dataclass(frozen=True)
class Place:
    """Where a rank computes: its number, how many there are, its device, and the library that carries messages."""

    rank: int
    world: int
    device: torch.device
    backend: str


def join(seconds: float = 300) -> Place:
    """Join the job's process group, once for a process: NCCL where there is a card for every rank, else gloo on the
    processor. A collective that takes longer than `seconds` is an error. Needs the environment that torchrun sets."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cards = machine.has_gpu() and torch.cuda.device_count() >= world
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cards else torch.device("cpu")
    if not dist.is_initialized():
        if cards:
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        limit = datetime.timedelta(seconds=seconds)
        dist.init_process_group("nccl" if cards else "gloo", timeout=limit, device_id=device if cards else None)
    return Place(rank, world, device, dist.get_backend())


class Traffic(TorchDispatchMode):
    """Counts the collectives that run inside it, forward and backward: ``calls`` and payload ``bytes`` by kind.

    The payload is the whole tensor that all ranks have, or have a part of: what is reduced, what comes out of a gather,
    what goes into a scatter. Local operations pass through unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            kind = _OPERATORS.get(func.name().split("::")[1].split(".")[0])
            if kind is not None:
                sizes = [t.numel() * t.element_size() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
                payload = sum(sizes) if kind in ("all_reduce", "broadcast", "send") else max(sizes)
                self.calls[kind] = self.calls.get(kind, 0) + 1
                self.bytes[kind] = self.bytes.get(kind, 0) + payload
        return func(*args, **(kwargs or {}))

    def link_bytes(self, world: int) -> int:
        """Bytes that each of `world` ranks sends, were every collective done by the ring algorithm."""
        return round(sum(_RING[kind](world) * nbytes for kind, nbytes in self.bytes.items()))

    def row(self, world: int) -> dict[str, Any]:
        """Plain values: ``calls``, ``bytes``, ``link_bytes``."""
        return {"calls": dict(self.calls), "bytes": dict(self.bytes), "link_bytes": self.link_bytes(world)}


class Buckets:
    """The buckets in which a `DistributedDataParallel` model averages its gradients, as its next backward fills them.

    A communication hook that does what DDP does without one, and remembers: ``sizes`` in bytes, in the order in which
    they were ready, and the storages. Only for a model without another hook.
    """

    def __init__(self, model: torch.nn.parallel.DistributedDataParallel):
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.sizes: list[int] = []

        def hook(state, bucket):  # type: ignore[no-untyped-def] # DDP reads the annotations, and wants none as text
            return self._averaged(state, bucket)

        model.register_comm_hook(model.process_group, hook)

    def _averaged(self, group: Any, bucket: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        buffer = bucket.buffer()
        if bucket.index() == 0 and self.sizes:  # the next backward
            self.sizes, self._storages = [], {}
        storage = buffer.untyped_storage()
        self._storages[storage.data_ptr()] = storage
        self.sizes.append(buffer.numel() * buffer.element_size())
        return allreduce_hook(group, bucket)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a view into one of the buckets."""
        return tensor.untyped_storage().data_ptr() in self._storages


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer, buckets: Buckets | None = None) -> dict[str, int]:
    """Bytes that this rank holds of weights, gradients, optimizer state, and buckets; a gradient that is a view into a
    bucket counts as bucket. Of a sharded tensor only the part that lies here counts."""
    parameters = [_local(p.detach()) for p in model.parameters()]
    gradients = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    states = [_local(v) for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    own = [g for g in gradients if buckets is None or not buckets.holds(g)]
    found = {"weights": _bytes(parameters), "gradients": _bytes(own), "optimizer state": _bytes(states)}
    return {**found, "buckets": sum(buckets.sizes) if buckets else 0}


@dataclass(frozen=True)
class Side:
    """What one rank measured of a step: ``status`` ``ok`` or ``oom``; peaks in bytes (None on a processor), what the
    driver counts on the card; the median step in seconds."""

    status: str
    allocated_bytes: int | None = None
    requested_bytes: int | None = None
    reserved_bytes: int | None = None
    device_bytes: int | None = None
    seconds: float | None = None
    loss: float | None = None
    message: str = ""


def measured(
    build: Callable[[], Callable[[], Any]], place: Place, *, budget: int | None = None, warmup: int = 3, steps: int = 8
) -> dict[str, Any]:
    """Build a step in every rank and run it side by side; this rank's `Side` as plain values.

    ``build()`` makes everything and returns ``step()``. On a card the allocator may reserve `budget` bytes at most, and
    running out of memory is a result, provided that all ranks run out at the same place; where only one does, the
    others wait for it, and the job's timeout ends them. Time is the host's, from one point at which all ranks and cards
    are idle to the next, over `steps` steps after `warmup` others. Peaks are those of one more step, once NCCL has let
    go of what it held (`let_go`).
    """
    on_card = place.device.type == "cuda"
    if on_card:
        measuring.warm_workspaces(place.device)
        measuring.release()  # what earlier workers left in this process
    try:
        with machine.budget(budget if on_card else None):
            found = _run(build, place, warmup, steps)
    except torch.OutOfMemoryError as error:
        found = Side("oom", message=str(error).splitlines()[0])
        measuring.forget(error)
    if on_card:
        measuring.release()
    return asdict(found)


def _run(build: Callable[[], Callable[[], Any]], place: Place, warmup: int, steps: int) -> Side:
    step = build()
    for _ in range(warmup):
        step()
    seconds = _seconds(step, place, steps) if steps else None
    if place.device.type != "cuda":
        return Side("ok", seconds=seconds, loss=_value(step()))
    let_go(place)
    torch.cuda.reset_peak_memory_stats()
    loss = _value(step())
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    peaks = {f"{name}_bytes": stats[f"{name}_bytes.all.peak"] for name in ("allocated", "requested", "reserved")}
    return Side("ok", seconds=seconds, loss=loss, device_bytes=machine.device_bytes(), **peaks)


def _seconds(step: Callable[[], Any], place: Place, steps: int) -> float:
    """Of one step, from one point at which all ranks and cards are idle to the next, over `steps` steps."""
    idle(place)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    idle(place)
    return (time.perf_counter() - start) / steps


def in_turn(
    builds: Mapping[str, Callable[[], Callable[[], Any]]],
    place: Place,
    *,
    warmup: int = 3,
    rounds: int = 5,
    steps: int = 5,
) -> dict[str, list[float]]:
    """Seconds of a step of each of `builds`, `rounds` values each, every one a mean over `steps` steps.

    All are built first and then run in turn, so that what changes on the host meanwhile meets them alike; compare what
    `medians` makes of all ranks. Where not all of them fit the card together, in every rank, there are no values.
    """
    found: dict[str, list[float]] = {name: [] for name in builds}
    running: dict[str, Callable[[], Any]] = {}
    try:
        running |= {name: build() for name, build in builds.items()}
        for step in running.values():
            for _ in range(warmup):
                step()
        for _ in range(rounds):
            for name, step in running.items():
                found[name].append(_seconds(step, place, steps))
    except torch.OutOfMemoryError as error:
        measuring.forget(error)
        found = {name: [] for name in builds}
    running.clear()
    step = None  # type: ignore[assignment] # the last one would keep its model
    if place.device.type == "cuda":
        measuring.release()
    return found


def medians(ranks: Sequence[Mapping[str, Any]], name: str) -> tuple[float | None, float | None]:
    """Seconds of a step, and half the distance from the fastest round to the slowest: of each round the slowest rank's
    time (all wait for it), of all rounds the median; None where there are no values. `ranks` are what `in_turn` gave
    in each of them."""
    rounds = [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)]
    if not rounds:
        return None, None
    return statistics.median(rounds), (max(rounds) - min(rounds)) / 2


def _value(loss: Any) -> float | None:
    return float(loss.detach()) if torch.is_tensor(loss) else None


def let_go(place: Place) -> None:
    """Wait until NCCL holds no tensors of collectives that are done.

    PyTorch keeps what an asynchronous collective works on alive until its watchdog, which looks every 100 ms, has seen
    that it is done, and another collective begins (ProcessGroupNCCL.cpp, ``shelvesToUnstash_``). When DDP has arranged
    its buckets anew in the second step, the old ones live on until then: 4 bytes a parameter.
    """
    idle(place)
    if place.world > 1 and place.backend == "nccl":
        time.sleep(WATCHDOG_SECONDS)
        dist.barrier()
        torch.cuda.synchronize()


def idle(place: Place) -> None:
    """Wait until all ranks, and the card of this one, have nothing left to do."""
    if place.device.type == "cuda":
        torch.cuda.synchronize()
    if place.world > 1:
        dist.barrier()
    if place.device.type == "cuda":
        torch.cuda.synchronize()


def all_reduce_seconds(nbytes: int, place: Place, repeats: int = 10) -> float:
    """Seconds of one all-reduce of a tensor of `nbytes`, nothing else going on; every rank must call it."""
    x = torch.zeros(nbytes // 4, device=place.device)
    for _ in range(2):
        dist.all_reduce(x)
    idle(place)
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(x)
    idle(place)
    return (time.perf_counter() - start) / repeats


def _local(tensor: Any) -> torch.Tensor:
    """The part of a tensor that lies in this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements of these tensors, shared storage counted once."""
    sizes: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        key = tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())
        sizes[key] = max(sizes.get(key, 0), tensor.numel() * tensor.element_size())
    return sum(sizes.values())
