"""A plan as a training script: plain PyTorch on a text file, every switch of the recipe in the open.

What PyTorch and its usual companions lack (gradients that wait on the host, fp32 masters there, a loss summed in place,
prefetched activations, segments of several blocks) is imported from labkit, and only where the recipe uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from ..models import GPT2_SIZES
from ..units import UserError

if TYPE_CHECKING:
    from ..machine import Card
    from ..recipes import Recipe

_SCRIPT = Template('''\
"""Trains $model on a text file, as `labkit plan` chose it for $card: $recipe.

    python $name text.txt --steps 1000 --out trained

It needs $needs. Without --from-scratch it starts from the model's released weights.
"""

import argparse
$environment
from pathlib import Path

$imports

MODEL = "$model"
BATCH, ACCUMULATION, SEQ = $batch, $accumulation, $seq  # sequences at a time, times in a step, tokens in each


def sequences(path, tokenizer):
    """The text as rows of SEQ tokens; the rest of the last row is left out."""
    text = Path(path).read_text(encoding="utf-8")
    if tokenizer == "bytes":
        ids = list(text.encode("utf-8"))
    else:
        ids = AutoTokenizer.from_pretrained(tokenizer)(text)["input_ids"]
    rows = len(ids) // SEQ
    if rows < BATCH * ACCUMULATION:
        raise SystemExit(f"{path}: {len(ids)} tokens, and one step takes {BATCH * ACCUMULATION * SEQ}")
    return torch.tensor(ids[: rows * SEQ]).view(rows, SEQ)


def build(device, from_scratch):
    config = AutoConfig.from_pretrained(MODEL, use_cache=False)
$config
    if from_scratch:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=$dtype, attn_implementation="$attention")
    else:
        model = AutoModelForCausalLM.from_pretrained(
            MODEL, config=config, dtype=$dtype, attn_implementation="$attention"
        ).to(device)
    model.train()
$changes
    return model


$loss


def set_rate(group, lr):
    if torch.is_tensor(group["lr"]):  # a compiled step keeps its rate in a tensor
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file in UTF-8")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--out", help="a folder for the trained model")
    parser.add_argument("--tokenizer", default=MODEL, help="a name or a folder; 'bytes' takes the file's bytes")
    parser.add_argument("--from-scratch", action="store_true", help="random weights")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = sequences(args.text, args.tokenizer)
    model = build(device, args.from_scratch)
$optimizer
    warm_up = 100  # steps
    order = torch.Generator().manual_seed(args.seed)
    for number in range(1, args.steps + 1):
        began = time.perf_counter()
        for group in $groups:
            set_rate(group, args.lr * min(1.0, number / warm_up))
        chosen = rows[torch.randint(len(rows), (ACCUMULATION, BATCH), generator=order)].to(device)
        total = 0.0
        for tokens in chosen:
            with $around:
                loss = $call / ACCUMULATION
            $backward
            total += loss.detach()
$step
        if number % 10 == 0 or number == args.steps:
            rate = chosen.numel() / (time.perf_counter() - began)
            print(f"step {number}: loss {float(total):.4f}, {rate:,.0f} tokens/s", flush=True)
    if args.out:
        model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
''')

_EXPANDABLE = """\
import os
import time

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # before torch is imported
"""
_FULL = """\
def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss"""
_CHUNKED = '''\
def loss_of(model, tokens):
    """The mean loss of the next token, its logits computed in $chunks pieces, each once more in backward."""
    hidden = model.base_model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    head = model.get_output_embeddings()

    def part(h, y):
        return torch.nn.functional.cross_entropy(head(h).float(), y, reduction="sum")

    parts = zip(hidden.chunk($chunks), targets.chunk($chunks))
    return torch.stack([checkpoint(part, h, y, use_reentrant=False) for h, y in parts]).sum() / targets.numel()'''
_IN_PLACE = """\
def loss_of(model, tokens):
    return loss_in_place(model, tokens, $chunks)"""


@dataclass
class _Parts:
    """What the script is put together from."""

    imports: list[str] = field(default_factory=lambda: ["import torch"])
    needs: list[str] = field(default_factory=lambda: ["torch", "transformers"])
    changes: list[str] = field(default_factory=list)
    optimizer: list[str] = field(default_factory=list)
    step: list[str] = field(default_factory=list)
    loss: str = _FULL
    around: str = "nullcontext()"
    backward: str = "loss.backward()"
    call: str = "loss_of(model, tokens)"
    groups: str = "optimizer.param_groups"

    def use(self, line: str, package: str = "labkit") -> None:
        """Import something, from a package that the script then needs."""
        self.imports.append(line)
        name = {"labkit": "labkit (of this course)"}.get(package, package)
        if name not in self.needs:
            self.needs.append(name)


def script(recipe: Recipe, *, card: Card, name: str = "train.py") -> str:
    """The source of the script. Raises `UserError` for a recipe with no optimizer that a script would want."""
    if recipe.gradients == "two-backward-passes" or recipe.optimizer in ("sgd", "sgd-momentum"):
        raise UserError(f"no script is written for {recipe}: its step is there to be compared with, not to train")
    parts = _Parts()
    _model(recipe, parts)
    _loss(recipe, parts)
    _optimizer(recipe, parts)
    _step(recipe, parts)
    libraries = "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer"
    imports = sorted(
        {*parts.imports, libraries}, key=lambda line: (line.split()[1].startswith("labkit"), line.split()[1], line)
    )
    if parts.around == "nullcontext()":
        imports.insert(0, "from contextlib import nullcontext\n")
    return _SCRIPT.substitute(
        model=recipe.model if recipe.model in GPT2_SIZES or not Path(recipe.model).is_dir()
        else str(Path(recipe.model).resolve()),
        card=card.title, recipe=str(recipe), name=name, needs=", ".join(parts.needs), imports="\n".join(imports),
        environment=_EXPANDABLE if recipe.expandable_segments else "import time",
        batch=recipe.batch, accumulation=recipe.accumulation, seq=recipe.seq, dtype=_dtype(recipe),
        attention=recipe.attention, config=_indented(_config(recipe)), changes=_indented(parts.changes),
        loss=Template(parts.loss).substitute(chunks=recipe.loss_chunks), optimizer=_indented(parts.optimizer),
        around=parts.around, backward=parts.backward, call=parts.call, groups=parts.groups,
        step=_indented(parts.step, 8),
    )  # fmt: skip


def write(recipe: Recipe, path: str | Path, *, card: Card) -> Path:
    """Write the script to `path`. Raises `UserError` when it cannot be written."""
    target = Path(path)
    text = script(recipe, card=card, name=target.name)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def _indented(lines: list[str], by: int = 4) -> str:
    return "\n".join(" " * by + line for line in lines) or " " * by + "pass"


def _dtype(recipe: Recipe) -> str:
    return {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(recipe.precision, "torch.float32")


def _config(recipe: Recipe) -> list[str]:
    from .. import models

    configuration, lines = models.config(recipe.model), []
    for name in ("activation_function", "hidden_act"):
        if getattr(configuration, name, None) == "gelu_new" and recipe.activation != "gelu_new":
            lines.append(f'config.{name} = "{recipe.activation}"  # the same function in one kernel')
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout"):
        if hasattr(configuration, name):
            lines.append(f"config.{name} = {recipe.dropout}")
    return lines


def _model(recipe: Recipe, parts: _Parts) -> None:
    if recipe.compile == "blocks":
        parts.use("from labkit import models")
        parts.changes += ["for block in models.blocks(model):", "    block.compile()"]
    if recipe.compile == "whole":
        parts.changes.append("model.compile()" if recipe.loss == "full" else "model.base_model.compile()")
    if recipe.checkpoint == 1 and recipe.compile == "none":
        parts.changes.append('model.gradient_checkpointing_enable({"use_reentrant": False})  # every block')
    elif recipe.checkpoint:
        parts.use("from labkit import checkpointing")
        parts.changes.append(f"checkpointing.segments(model, {recipe.checkpoint})  # so many blocks together")


def _loss(recipe: Recipe, parts: _Parts) -> None:
    if recipe.loss == "chunked":
        parts.loss = _CHUNKED
        parts.use("from torch.utils.checkpoint import checkpoint", "torch")
    if recipe.loss == "in-place":
        parts.loss = _IN_PLACE
        parts.use("from labkit.losses import loss_in_place")
        if recipe.precision == "fp16":  # it makes its gradients itself: they are born scaled
            parts.loss = _IN_PLACE.replace("tokens):", "tokens, scale):").replace("$chunks)", "$chunks, scale)")
            parts.call = "loss_of(model, tokens, optimizer.loss_scale / ACCUMULATION)"


def _optimizer(recipe: Recipe, parts: _Parts) -> None:
    lines, away = parts.optimizer, recipe.offload.startswith("optimizer")
    make = _maker(recipe, parts)
    if recipe.precision == "fp16":
        parts.use("from labkit import optimizers, stepping")
        parts.use("from labkit.masters import Masters")
        inner = "optimizers.adamw_on_host(args.lr)" if away else make
        waiting = recipe.gradients == "host" or recipe.offload == "optimizer+gradients"
        lines += [
            "optimizer = Masters(", f"    stepping.by_block(model), {inner}, on_host={away}, clip={recipe.clip},",
            f"    gradients_on_host={waiting},", ")",
        ]  # fmt: skip
    elif away:
        parts.use("from torchao.optim import CPUOffloadOptimizer", "torchao")
        send = recipe.offload == "optimizer+gradients"
        lines += [
            "optimizer = CPUOffloadOptimizer(",
            f"    model.parameters(), torch.optim.AdamW, offload_gradients={send}, lr=args.lr", ")",
        ]  # fmt: skip
    elif recipe.offload.startswith("states"):
        parts.use("from labkit import stepping")
        parts.use("from labkit.streaming import StatesOnHost")
        lines += [
            "optimizer = StatesOnHost(", f"    stepping.by_block(model), {make},",
            f"    gradients_on_host={recipe.gradients == 'host'}, clip={recipe.clip},", ")",
        ]  # fmt: skip
    elif recipe.flat and recipe.gradients == "card":
        parts.use("from labkit import stepping")
        parts.use("from labkit.flat import FlatSteps")
        lines.append(f"optimizer = FlatSteps(stepping.by_block(model), {make}, clip={recipe.clip})")
    elif recipe.gradients == "host":
        parts.use("from labkit import stepping")
        lines.append(f"optimizer = stepping.GradientsOnHost(stepping.by_block(model), {make}, clip={recipe.clip})")
    elif recipe.gradients.startswith("in-backward"):
        parts.use("from labkit import stepping")
        each = recipe.clip if recipe.gradients.endswith("clipped") else None
        if recipe.flat:
            parts.use("from labkit.flat import BlocksInBackward")
            lines.append(f"steps = BlocksInBackward(stepping.by_block(model), {make})  # backward steps")
        else:
            lines.append(f"steps = stepping.InBackward(model.parameters(), {make}, clip_each={each})  # backward steps")
        parts.groups = "[group for optimizer in steps.optimizers for group in optimizer.param_groups]"
    else:
        lines.append(f"optimizer = ({make})(model.parameters())")
    if recipe.precision == "amp-fp16":
        lines.append("scaler = torch.amp.GradScaler(device.type)")


def _maker(recipe: Recipe, parts: _Parts) -> str:
    """A function of parameters, as source."""
    how = {"adamw": "foreach=True", "adamw-fused": "fused=True", "adamw-forloop": "foreach=False"}
    if recipe.optimizer in how:
        return f"lambda weights: torch.optim.AdamW(weights, lr=args.lr, {how[recipe.optimizer]})"
    if recipe.optimizer == "adam8bit":
        parts.use("import bitsandbytes", "bitsandbytes")
        return "lambda weights: bitsandbytes.optim.Adam8bit(weights, lr=args.lr)"
    name = {"adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit"}[recipe.optimizer]
    parts.use(f"from torchao.optim import {name}", "torchao")
    rounding = f", bf16_stochastic_round={recipe.stochastic_rounding}"
    return f"lambda weights: {name}(weights, lr=args.lr, block_size=64{rounding})"


def _step(recipe: Recipe, parts: _Parts) -> None:
    if recipe.precision.startswith("amp"):
        kind = "bfloat16" if recipe.precision == "amp-bf16" else "float16"
        parts.around = f"torch.autocast(device.type, dtype=torch.{kind})"
    if recipe.offload.endswith("activations"):
        parts.use("from labkit.offload import Prefetching")
        parts.optimizer.append("hooks = Prefetching(keep=model)  # what backward needs waits on the host")
        parts.around = "hooks" if parts.around == "nullcontext()" else f"{parts.around}, hooks"
    if recipe.gradients.startswith("in-backward"):
        return  # backward has stepped already
    own_clip = recipe.clip is not None and recipe.gradients == "card" and recipe.precision != "fp16"
    own_clip = own_clip and not recipe.in_place
    clip = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {recipe.clip})"
    if recipe.precision == "amp-fp16":
        parts.backward = "scaler.scale(loss).backward()"
        parts.step += ["scaler.unscale_(optimizer)", clip] if own_clip else []
        parts.step += ["scaler.step(optimizer)", "scaler.update()"]
    else:
        if recipe.precision == "fp16":
            parts.backward = "optimizer.scaled(loss).backward()"
        parts.step += [clip] if own_clip else []
        parts.step.append("optimizer.step()")
    parts.step.append("optimizer.zero_grad(set_to_none=True)")
