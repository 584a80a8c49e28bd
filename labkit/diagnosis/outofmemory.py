"""An out-of-memory message of PyTorch, in any of its wordings, as numbers; and in which part of a step it came."""

# ruff: noqa: E501 (a pattern stands on one line, where it can be searched for)
from __future__ import annotations

import re
from dataclasses import dataclass

from ..units import MiB, show_bytes
from .errors import Raised
from .reading import Reading
from .rule import compiled
from .series import nbytes

_SIZE = r"(\d+(?:\.\d+)? ?(?:[kmgt]i?b|bytes))"
# c10/cuda/CUDACachingAllocator.cpp, from PyTorch 1.0 ("cached") over 1.4 ("reserved in total") to 2.x; the last ones
# are what cudaMallocAsync's backend says
_PARTS = {
    "wanted": rf"tried to allocate {_SIZE}|requested *: *{_SIZE}",
    "total": rf"total capac?i?ty of {_SIZE}|{_SIZE} total capacity|device limit *: *{_SIZE}",
    "free": rf"of which {_SIZE} is free|{_SIZE} free[;)]|free \(according to cuda\) *: *{_SIZE}",
    "in_use": rf"this process has {_SIZE} memory in use",
    "allocated": rf"allocated memory {_SIZE} is allocated by pytorch|{_SIZE} already allocated|currently allocated *: *{_SIZE}",
    "scattered": rf"{_SIZE} is reserved by pytorch but unallocated|{_SIZE} cached\)",
    "reserved": rf"{_SIZE} reserved in total by pytorch",
    "pools": rf"with {_SIZE} allocated in private pools",
    "allowed": rf"{_SIZE} allowed;",
}
_ALONE = "including non-pytorch memory, this process"
_PROCESS = rf"(?<!this )process (\d+) has {_SIZE} memory in use"
_SURE = (
    r"(?:torch|cuda|hip)(?:\.cuda)?\.?outofmemoryerror\b|(?:cuda|hip) out of memory\. ?tried|cuda out of memory\."
    r"|cuda (?:driver |runtime )?error(?: \(?2\)?)? ?:? ?(?:\(2\) ?: ?)?out of memory|cudaerrormemoryallocation"
    r"|cuda_error_out_of_memory|allocation on device \d* ?(?:would exceed|failed)|cublas_status_alloc_failed"
    r"|outofmemoryerror: (?:cuda|allocation|out of memory)|runtimeerror: cuda out of memory"
)
_HYPOTHETICAL = re.compile(
    r"to avoid|to prevent|avoids|prevents|in case of|if you (?:get|see|run|hit|encounter)|if (?:it|this) |may (?:cause|lead|run|result)"
    r"|might (?:cause|lead|run)|could (?:cause|lead|run)|except |catch|raise |import |retry|recover|skipp|handled|#.*out of mem|should not"
)
PHASES = {  # asked in this order of all frames, outermost first
    "evaluation": r":(?:evaluation_loop|prediction_loop|prediction_step|evaluate|predict|validate|validation_step|nested_concat|nested_detach|nested_gather|_nested_gather|eval_step|evaluation_step|run_validation|eval_model|estimate_loss|validation_epoch\w*|run_eval\w*|test_epoch|do_eval\w*|compute_metrics|gather_for_metrics|preprocess_logits_for_metrics)(?=:)|:(?:trainer\.)?evaluat\w*:|:eval\w*:|:_?(?:on_)?(?:validation|evaluation|test)_epoch\w*:|:(?:test|validate_\w+|run_test)(?=:)|loops/evaluation_loop\.py",
    "generation": r":(?:generate|_sample|sample|greedy_search|_greedy_search|beam_search|_beam_search|_prefill|contrastive_search)(?=:)|generation/utils\.py",
    "loading": r":(?:from_pretrained|load_state_dict|_load_state_dict_into\w*|_load_pretrained_model|set_module_tensor_to_device|dispatch_model|load_checkpoint_\w+|_move_model_to_device|materialize\w*|init_empty_weights|_materialize_copy|caching_allocator_warmup)\b|core_model_loading|:torch\.load|serialization\.py",
    "ddp": r"parallel/distributed\.py:(?:__init__|_ddp_init_helper|_sync_module_states|_build_\w+)|:_ddp_init_helper|:_broadcast_coalesced|:_sync_module_states|sync_module_states",
    "gather": r"parallel/(?:data_parallel|scatter_gather|comm|_functions)\.py:(?:gather|replicate|forward|broadcast|scatter)|:gather\b.*comm|:replicate",
    "optimizer": r"/optim/(?!lr_scheduler)\w+\.py|/optim/\w+/\w+\.py|:(?:_init_group|init_state|_multi_tensor_adamw?|_single_tensor_adamw?|_fused_adamw?|init_8bit\w*|get_state_buffer)\b|optimizers?[\w.]*\.step\(|exp_avg|deepspeed/runtime/zero/\w+\.py:(?:step|_optimizer_step|initialize_optimizer_states)",
    "backward": r":(?:backward|_engine_run_backward|run_backward|_engine_run\w*)\b|\.backward\(",
    "moving": r":(?:_apply|convert|cuda|to|half|float)\b.*|\.to\(|\.cuda\(",
}  # fmt: skip
PLACES = {  # asked of the inner frames, in this order
    "loss": r"cross_entropy|loss_utils|causallmloss|nll_loss|log_softmax|shift_logits|logits\.float|logits\.contiguous|lm_head|\blogits = |logsumexp|loss_fct|loss_function|upcast|sequence_cross",
    "attention": r"eager_attention|attention_forward|:_attn\b|attn_weights|attention_probs|attention_scores|softmax\(|matmul\(q|query.*key|baddbmm|scaled_dot_product|self\.attn\b|attn_output|flash_attn",
    "checkpoint": r"utils/checkpoint\.py",
    "mlp": r"mlp|activations\.py|gelu|c_fc|c_proj|act\(|feed_forward|intermediate",
    "cache": r"cache_utils|past_key|key_cache|kv_cache|torch\.cat\(\[self\.key",
    "concat": r"nested_concat|torch\.cat\(|torch\.stack\(|torch_pad_and_concat",
}


@dataclass(frozen=True)
class OutOfMemory:
    """The numbers of a message in bytes (None where it does not give them), and where the error came.

    ``others`` is what other processes hold, as far as the message tells it. ``phase`` is a key of `PHASES`,
    ``"forward"`` or ``""``; ``place`` a key of `PLACES` or ``""``.
    """

    line: int
    quote: str
    wanted: int | None = None
    total: int | None = None
    free: int | None = None
    in_use: int | None = None
    allocated: int | None = None
    scattered: int | None = None
    pools: int | None = None
    allowed: int | None = None
    others: int | None = None
    phase: str = ""
    place: str = ""
    handled: bool = False

    def numbers(self) -> dict[str, int]:
        """The bytes that are known."""
        names = ("wanted", "total", "free", "in_use", "allocated", "scattered", "pools", "allowed", "others")
        return {f"{n}_bytes": getattr(self, n) for n in names if getattr(self, n) is not None}

    def __str__(self) -> str:
        said = {
            "wanted": "wanted", "total": "of a card with", "free": "free", "allocated": "in tensors",
            "scattered": "reserved but in pieces", "others": "held by others", "allowed": "allowed",
        }  # fmt: skip
        return ", ".join(
            f"{word} {show_bytes(getattr(self, n))}" for n, word in said.items() if getattr(self, n) is not None
        )


def find(reading: Reading, raised: list[Raised]) -> OutOfMemory | None:
    """The out-of-memory error that a text tells of: the one that ended the run, else the last one that was handled."""
    best: OutOfMemory | None = None
    matches = list(compiled(_SURE).finditer(reading.lower))
    for match in matches[:20] + matches[20:][-20:]:
        number, quote = reading.at(match.start())
        message = reading.lower[max(0, match.start() - 100) : match.end() + 1400]
        start = min(100, match.start())
        about = _parts(message[start:] if "tried to allocate" in message[start:] else message)
        low = quote.lower()
        if low.startswith("search for `cuda"):
            continue
        if about.get("wanted") is None and _HYPOTHETICAL.search(low) and not low.startswith(("runtimeerror", "torch.")):
            continue
        error = next((e for e in raised if e.line == number), None) or _holding(raised, number)
        phase, place = where(error.frames if error else ())
        handled = (
            error.handled if error else reading.series.done_line > number or reading.series.progress_after(number) >= 3
        )
        found = OutOfMemory(number, quote[:300], **about, phase=phase, place=place, handled=handled)
        if best is None or best.handled >= found.handled or not best.numbers():
            best = found if best is None or found.numbers() or not best.numbers() else best
    return best


def _holding(raised: list[Raised], number: int) -> Raised | None:
    """The error whose message, of several lines, holds that line."""
    near = [e for e in raised if 0 <= number - e.line <= 10]
    return near[-1] if near else None


def _parts(message: str) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name, pattern in _PARTS.items():
        match = compiled(pattern).search(message)
        found[name] = _bytes(next(g for g in match.groups() if g)) if match else None
    reserved = found.pop("reserved")
    if reserved is not None and found["allocated"] is not None:
        found["scattered"] = max(0, reserved - found["allocated"])
    found["others"] = _others(found, message, reserved)
    return found


def _others(found: dict[str, int | None], message: str, reserved: int | None) -> int | None:
    """What other processes hold: as the message lists them, else what is neither free nor this process's."""
    listed = [_bytes(size) for _, size in compiled(_PROCESS).findall(message)]
    total, free, mine = found["total"], found["free"], found["in_use"]
    if (
        mine is None and len(listed) == 1 and found["allocated"] is not None
    ):  # in a container its own number is not known
        held = found["allocated"] + (found["scattered"] or 0)
        if held <= listed[0] <= held + 1600 * MiB:
            return 0
    if listed:
        return sum(listed)
    if total is None or free is None:
        return None
    if mine is None:
        if reserved is None:
            return None
        mine = reserved + 700 * MiB  # its context: 287 to 750 MiB
    rest = total - free - mine
    return rest if rest > 256 * MiB else 0


def _bytes(size: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+)\s*(\w+)", size.strip()).groups()  # type: ignore[union-attr]
    return int(min(nbytes(number, "" if unit == "bytes" else unit), 2**62))


def where(frames: tuple[str, ...]) -> tuple[str, str]:
    """The phase of a step and the place in the model, from the frames of a traceback."""
    if not frames:
        return "", ""
    joined = "\n".join(frames)
    phase = next((name for name, pattern in PHASES.items() if compiled(pattern).search(joined)), "")
    if phase == "evaluation" and compiled(PHASES["generation"]).search(joined):
        phase = "generation"
    if compiled(r":_load_optimizer_and_scheduler:").search(joined):
        phase = "optimizer"
    if compiled(
        r":_?(?:full_)?state_dict\w*:|_state_dict_utils\.py:|:(?:save_checkpoint|_save_checkpoint|save_model|save_pretrained)(?=:)"
    ).search(joined):
        phase = "saving"
    place = ""
    for frame in reversed(frames[-6:]):
        place = next((name for name, pattern in PLACES.items() if compiled(pattern).search(frame)), "")
        if place:
            break
    if not phase and compiled(r":forward\b|:_call_impl\b|:_wrapped_call|:compute_loss|:training_step").search(joined):
        phase = "forward"
    if phase == "moving" and compiled(r":forward\b|:training_step").search(joined):
        phase = "forward"
    return phase, place
