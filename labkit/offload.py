"""What backward keeps, kept elsewhere or kept smaller: hooks on saved tensors.

Autograd calls one function for every tensor that an operator saves for backward, and another when backward wants it
back (`torch.autograd.graph.saved_tensors_hooks`). `Prefetching` puts such tensors into pinned memory of the host on a
stream of its own, and fetches them ahead of backward; `Compressed` keeps them where they are, in 16 or 8 bits::

    hooks = offload.Prefetching(keep=model)
    with hooks:
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()

Both work by storage: the tensors that share one (the three parts of q k v, a view and what it views) are handled once,
and weights, which are there anyway, are left alone. PyTorch's own `save_on_cpu` does neither.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .units import MiB, UserError, parse_size

KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
INT8_BLOCK = 256  # values that share one scale, as in 8-bit optimizers (Dettmers et al. 2022, arXiv:2110.02861)


class _Saved:
    """One storage that autograd saved; subclasses say how it is kept. Lives as long as the graph needs it."""

    storage: StorageWeakRef
    dtype: torch.dtype
    nbytes: int


class _View:
    """What autograd gets in place of a tensor: which storage, and where in it the tensor lies."""

    __slots__ = ("offset", "saved", "size", "stride")

    def __init__(self, saved: Any, tensor: torch.Tensor):
        self.saved = saved
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()


class _ByStorage(saved_tensors_hooks, ABC):
    """Hooks that treat each saved storage once, and leave small tensors and those in `keep` as they are."""

    def __init__(self, keep: torch.nn.Module | Iterable[torch.Tensor], least_bytes: int | str):
        super().__init__(self._pack, self._unpack)
        self._least = parse_size(least_bytes)
        tensors = keep.parameters() if isinstance(keep, torch.nn.Module) else keep
        self._kept = {t.untyped_storage()._cdata: StorageWeakRef(t.untyped_storage()) for t in tensors}
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], _Saved] = weakref.WeakValueDictionary()
        self.taken_bytes = 0  # of storages that were taken so far
        self.count = 0

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        number, nbytes = storage._cdata, storage.nbytes()
        kept = self._kept.get(number)
        if nbytes < self._least or (kept is not None and not kept.expired()) or not self._takes(tensor):
            return tensor
        key = number, tensor.dtype, tensor._version  # a storage that was written to since is another one
        found = self._known.get(key)
        if found is None or found.storage.expired():  # the number alone may belong to a later storage by now
            found = self._put(tensor.detach().as_strided((nbytes // tensor.element_size(),), (1,), 0))
            found.storage = StorageWeakRef(storage)
            self.taken_bytes += nbytes
            self.count += 1
            self._known[key] = found
        return _View(found, tensor)

    def _unpack(self, packed: torch.Tensor | _View) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        return self._get(packed.saved).as_strided(packed.size, packed.stride, packed.offset)

    def _takes(self, tensor: torch.Tensor) -> bool:
        return True

    @abstractmethod
    def _put(self, flat: torch.Tensor) -> _Saved:
        """Take a storage, given as one flat tensor."""

    @abstractmethod
    def _get(self, saved: Any) -> torch.Tensor:
        """The flat tensor again, on the device where it was."""


def drop_hooks_with(owner: Any, model: torch.nn.Module) -> None:
    """When `owner` (a step function) is collected, empty the post-accumulate-grad hooks of `model`'s parameters.

    A hook that refers to its own parameter, as those of torchao's `CPUOffloadOptimizer` do, makes a circle through
    C++ that Python's collector does not see: without this, model and optimizer stay in memory until the process ends.
    """
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters() if p._post_accumulate_grad_hooks is not None]
    weakref.finalize(owner, _clear, hooks)


def _clear(hooks: list[Any]) -> None:
    for one in hooks:
        one.clear()


# ------------------------------------------------------------------------------------------ on the host


class _Away(_Saved):
    """A storage that is, or was, on the host: ``here`` is what of it is on the card now, ``host`` its buffer there."""

    def __init__(self, owner: Prefetching, flat: torch.Tensor):
        self.owner, self.dtype, self.device = owner, flat.dtype, flat.device
        self.count, self.nbytes = flat.numel(), flat.numel() * flat.element_size()
        self.index = 0  # in the order of saving
        self.here: torch.Tensor | None = flat
        self.host: torch.Tensor | None = None
        self.left: Any = None  # events: the copy to the host is done; the copy back is done
        self.arrived: Any = None

    def __del__(self) -> None:
        if self.arrived is not None:  # fetched and never used: nobody may get its memory before the copy is over
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        if self.host is not None:
            self.owner._give(self.host)


class Prefetching(_ByStorage):
    """Saved tensors go to the host on a side stream while forward computes, and come back ahead of backward.

    keep: the model (its parameters stay), or an iterable of tensors that stay.
    window: bytes (or ``"256MiB"``) that may wait on the card for their copy to the host, and that backward has fetched
    before they are asked for. Computing waits when the bus is more than this behind. More hides more and saves less,
    unless `let_go` is called when forward is over, and `fetch` when backward begins.
    least_bytes: storages smaller than this stay on the card: a copy has a fixed cost of some microseconds.

    The buffers on the host are pinned where there is a card, and are used again in the next step. ``taken_bytes`` and
    ``count`` say what was taken so far, ``host_bytes`` what the buffers hold. The order of fetching is the reverse of
    the order of saving. Numbers do not change: a copy is exact. (The design follows that of torchtune's
    ``OffloadActivations``; PyTorch's ``save_on_cpu`` copies on the stream that computes.)
    """

    def __init__(
        self,
        keep: torch.nn.Module | Iterable[torch.Tensor] = (),
        *,
        window: int | str = 256 * MiB,
        least_bytes: int | str = MiB,
    ):
        super().__init__(keep, least_bytes)
        self._window = parse_size(window) if window != 0 else 0
        self._order: list[weakref.ref[_Away]] = []
        self._before: list[int] = []  # bytes saved before each of them
        self._total = 0
        self._edge = 0  # what was saved from here on is on the card, as far as backward has fetched it
        self._leaving: deque[tuple[weakref.ref[_Away], int]] = deque()  # on the card still, oldest first
        self._leaving_bytes = 0
        self._free: dict[int, list[torch.Tensor]] = {}
        self._streams: dict[torch.device, Any] = {}
        self.host_bytes = 0

    @property
    def buffers(self) -> dict[int, int]:
        """How many buffers of how many bytes are free on the host: all of them, between steps."""
        return {nbytes: len(found) for nbytes, found in self._free.items() if found}

    def let_go(self) -> None:
        """Drop all that still waits on the card; computing waits until it is copied. For the end of forward, when the
        window is so large that nothing had to go before."""
        while self._leaving:
            self._let_go(*self._leaving.popleft())

    def fetch(self) -> None:
        """Start to bring back what was saved last, up to the window. For the beginning of backward, when other work
        comes before the first tensor that is asked for."""
        self._fetch_up_to(self._total)

    def _put(self, flat: torch.Tensor) -> _Away:
        while self._order and self._order[-1]() is None:  # of a graph that is gone
            self._order.pop()
            self._total = self._before.pop()
        saved = _Away(self, flat)
        saved.host = self._take(saved.nbytes).view(flat.dtype)
        stream = self._stream(flat.device)
        if stream is None:
            saved.host.copy_(flat)
        else:
            stream.wait_stream(torch.cuda.current_stream(flat.device))
            with torch.cuda.stream(stream):
                saved.host.copy_(flat, non_blocking=True)
                saved.left = stream.record_event()
        saved.index = len(self._order)
        self._order.append(weakref.ref(saved))
        self._before.append(self._total)
        self._total += saved.nbytes
        self._edge = len(self._order)
        self._leaving.append((self._order[-1], saved.nbytes))
        self._leaving_bytes += saved.nbytes
        while self._leaving_bytes > self._window:
            self._let_go(*self._leaving.popleft())
        return saved

    def _let_go(self, reference: weakref.ref[_Away], nbytes: int) -> None:
        """Drop what is on the card once its copy to the host is done."""
        self._leaving_bytes -= nbytes
        saved = reference()
        if saved is None:  # its graph is gone already
            return
        if saved.left is not None:
            torch.cuda.current_stream(saved.device).wait_event(saved.left)
        saved.here = None

    def _get(self, saved: _Away) -> torch.Tensor:
        self._leaving.clear()  # backward has begun: what is still on the card stays for it
        self._leaving_bytes = 0
        self._fetch(saved)
        self._edge = min(self._edge, saved.index)
        self._fetch_up_to(self._before[saved.index])
        if saved.arrived is not None:
            torch.cuda.current_stream(saved.device).wait_event(saved.arrived)
            saved.arrived = None
        assert saved.here is not None
        return saved.here

    def _fetch_up_to(self, total: int) -> None:
        """Fetch, latest first, what lies less than the window before the place `total` in the order of saving."""
        while self._edge > 0 and total - self._before[self._edge - 1] <= self._window:
            self._edge -= 1
            earlier = self._order[self._edge]()
            if earlier is not None:
                self._fetch(earlier)

    def _fetch(self, saved: _Away) -> None:
        """Start the copy back, unless it is on the card: into memory of the stream that computes, which may still be
        at work with what lay there before."""
        if saved.here is not None:
            return
        assert saved.host is not None
        here = torch.empty(saved.count, dtype=saved.dtype, device=saved.device)
        stream = self._stream(saved.device)
        if stream is None:
            here.copy_(saved.host)
        else:
            stream.wait_stream(torch.cuda.current_stream(saved.device))
            with torch.cuda.stream(stream):
                here.copy_(saved.host, non_blocking=True)
                saved.arrived = stream.record_event()
        saved.here = here
        self._give(saved.host)  # whoever writes to it next does so on the same stream, after this copy
        saved.host = None

    def _stream(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _take(self, nbytes: int) -> torch.Tensor:
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        self.host_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())

    def _give(self, buffer: torch.Tensor) -> None:
        flat = buffer.view(torch.uint8)
        self._free.setdefault(flat.numel(), []).append(flat)


# ------------------------------------------------------------------------------------------ in fewer bits


class _Small(_Saved):
    def __init__(self, flat: torch.Tensor, kind: torch.dtype):
        self.dtype, self.count = flat.dtype, flat.numel()
        self.nbytes = flat.numel() * flat.element_size()
        self.scale: torch.Tensor | None = None
        if kind is torch.int8:
            blocks = torch.nn.functional.pad(flat, (0, -self.count % INT8_BLOCK)).view(-1, INT8_BLOCK)
            self.scale = blocks.abs().amax(1, keepdim=True).float().clamp_min(1e-30) / 127
            self.values = (blocks / self.scale).round_().to(torch.int8)
        else:
            self.values = flat.to(kind)

    def restored(self) -> torch.Tensor:
        if self.scale is None:
            return self.values.to(self.dtype)
        return (self.values * self.scale).to(self.dtype).view(-1)[: self.count]


class Compressed(_ByStorage):
    """Saved tensors stay where they are, in fewer bits, and are restored to their dtype when backward asks.

    to: ``"bfloat16"``, ``"float16"`` (values beyond 65504 become infinite) or ``"int8"`` (blocks of 256 values, each
    with a scale of its own, its largest magnitude / 127).
    keep, least_bytes: as for `Prefetching`. Only floating-point tensors with more bits than `to` are taken.

    Gradients change: what the loss is computed from does not, only what backward sees. ``taken_bytes`` and
    ``stored_bytes`` say what was taken so far and what it became. Raises `UserError` for another `to`.
    """

    def __init__(
        self,
        to: str = "bfloat16",
        keep: torch.nn.Module | Iterable[torch.Tensor] = (),
        *,
        least_bytes: int | str = MiB,
    ):
        if to not in KINDS:
            raise UserError(f"saved tensors can be kept as {', '.join(KINDS)}, not {to!r}")
        super().__init__(keep, least_bytes)
        self._kind = KINDS[to]
        self.stored_bytes = 0

    def _takes(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and tensor.element_size() > self._kind.itemsize

    def _put(self, flat: torch.Tensor) -> _Small:
        small = _Small(flat, self._kind)
        for part in (small.values, small.scale):
            self.stored_bytes += part.numel() * part.element_size() if part is not None else 0
        return small

    def _get(self, saved: _Small) -> torch.Tensor:
        return saved.restored()
