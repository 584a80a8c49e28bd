"""A configuration in one vocabulary, whatever it was written in: a recipe, TrainingArguments, a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..units import UserError
from .reading import Reading
from .vocabulary import ASSIGNED, CALLED, CARDS, GPT2, KNOWN, NAMES, NOT_IN_TEXT, OPTIMIZERS, SWITCHES, WORDS


class Settings(dict[str, Any]):
    """Setting -> value, with where each came from in ``said``: (line number, words)."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.said: dict[str, tuple[int, str]] = {}

    def note(self, name: str, value: Any, line: int, words: str) -> None:
        """Set `name` as the text says it."""
        self[name] = value
        self.said[name] = (line, words)


def load(path: str | Path) -> Any:
    """The object in a JSON or YAML file. Raises `UserError` in one sentence for a file that cannot be used."""
    path = Path(path).expanduser()
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if not raw.strip():
        raise UserError(f"{path} is empty: a recipe, a configuration or a report is needed")
    if len(raw) > 2**26:
        raise UserError(f"{path} is too large for a recipe or a configuration ({len(raw) >> 20} MiB)")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text: a recipe or a configuration is JSON or YAML") from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        if path.suffix.lower() not in (".yaml", ".yml"):
            raise UserError(f"{path} is not JSON ({' '.join(str(error).split())})") from error
        found = _yaml(path, text)
    if not isinstance(found, dict):
        raise UserError(
            f'{path} is not a recipe: an object of fields, such as {{"model": "gpt2", "batch": 4}}, is needed'
        )
    return found


def _yaml(path: Path, text: str) -> Any:
    import yaml  # type: ignore[import-untyped]  # transformers and accelerate bring it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML ({' '.join(str(error).split())[:160]})") from error


def of(fields: Mapping[str, Any]) -> Settings:
    """The settings in a configuration: nested parts are read, names that say nothing here are left out.

    Raises `UserError` when no name is known.
    """
    flat = dict(_flat(fields))
    found = Settings()
    for name, value in flat.items():
        _take(found, name, value, 0, f"{name} = {value!r}")
    if not found and not any(name.rsplit(".", 1)[-1] in KNOWN for name in flat):
        raise UserError(
            "the configuration has no field that is known here: a recipe's, TrainingArguments' or a report's are"
        )
    return found


def _flat(fields: Mapping[str, Any], prefix: str = "", depth: int = 0) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in fields.items():
        if isinstance(value, Mapping) and depth < 4:
            if name in ("offload_optimizer", "offload_param") and value.get("device") not in (None, "none"):
                rows.append(("cpu_offload", True))
            if name in ("fp16", "bf16", "deepspeed") and "enabled" in value:
                rows.append((name, value["enabled"]))
            if name == "deepspeed" or name == "zero_optimization":
                rows.append(("deepspeed", True))
            rows += _flat(value, f"{prefix}{name}.", depth + 1)
        else:
            rows.append((f"{prefix}{name}", value))
    return rows


def _take(found: Settings, full: str, value: Any, line: int, words: str) -> None:
    """Set what one ``name = value`` says."""
    name = full.rsplit(".", 1)[-1].lower().replace("-", "_")
    text = str(value).strip().strip("'\"").lower()
    on = text in ("true", "1", "yes", "on", "")
    if (
        name in NAMES
        and name not in WORDS
        and name not in SWITCHES
        and name not in ("optimizer", "cards")
        and isinstance(value, (int, float, str, bool))
        and not any(name in names for names in CALLED.values())
    ):
        found.note(name, False if text == "none" else value, line, words)  # a recipe's own word
    elif name in WORDS:
        target, values = WORDS[name]
        if text in values and not (name in ("dtype", "torch_dtype") and target in found):
            found.note(target, values[text], line, words)
    elif name in SWITCHES:
        target, meaning = SWITCHES[name]
        if on or (name == "compile" and text in ("blocks", "whole")):
            found.note(target, meaning, line, words)
        elif text in ("false", "0", "no", "off", "none") and target not in found and target != "precision":
            found.note(target, 0 if target == "checkpoint" else False, line, words)
    elif name in ("optim", "optimizer", "optimizer_type"):
        kind = next((meaning for pattern, meaning in OPTIMIZERS if re.search(pattern, text)), None)
        if kind:
            found.note("optimizer", kind, line, words)
        if "paged" in text:
            found.note("paged", True, line, words)
    elif name in ("peft_config", "lora_r", "lora_rank", "lora_alpha", "peft_type", "lora_target") and text not in (
        "none",
        "0",
        "false",
        "",
    ):
        found.note("lora", True, line, words)
    elif name == "finetuning_type":
        found.note("lora", text == "lora", line, words)
    elif name == "device_map" and text not in ("none", ""):
        found.note("device_map", text, line, words)
    elif name in ("fsdp", "deepspeed") and text not in ("", "[]", "none", "false"):
        found.note("parallel", name, line, words)
    elif name == "distributed_type" and text not in ("no", "none"):
        found.note("parallel", {"multi_gpu": "ddp"}.get(text, text), line, words)
    elif name == "parallel_mode" and "not_distributed" in text:
        found.note("parallel", "dp", line, words)
    elif name in ("eval_strategy", "evaluation_strategy") and text not in ("no", "none"):
        found.note("evaluates", True, line, words)
    else:
        for target, names in CALLED.items():
            if name in names and (number := _value(target, value, text)) is not None:
                if name == "stage" and not full.startswith("zero"):
                    return
                found.note(target, number, line, words)


def _value(target: str, value: Any, text: str) -> Any:
    if target == "model":
        return str(value).strip("'\"") if text not in ("", "none") else None
    match = re.fullmatch(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", text)
    if not match:
        return None
    number = float(text)
    return int(number) if number == int(number) and target not in ("learning_rate", "clip", "dropout") else number


_BOOLEANS = ("true", "false", "0", "1", "yes", "no")


def said_in(reading: Reading) -> Settings:
    """The settings that a text shows: ``--name value``, ``name=value``, ``"name": value``, and the card it names."""
    found = Settings()
    for number, line in reading.lines():
        if len(line) < 3:
            continue
        for match in ASSIGNED.finditer(line):
            name = (match["flag"] or match["name"] or match["plain"]).lower().replace("-", "_").replace(" ", "_")
            value = match["of_flag"] or match["of_name"] or match["of_plain"] or ""
            if name not in KNOWN or name in NOT_IN_TEXT or (name == "model" and not GPT2.search(value)):
                continue
            if match["flag"] and name in SWITCHES and value.lower() not in _BOOLEANS:
                value = "true"  # a switch without a value, and then another word
            _take(found, name, value, number, match[0].strip())
        if "model" not in found and (named := GPT2.search(line)):
            size = (named[1] or named[2] or "").lower()
            found.note("model", f"gpt2-{size}" if size else "gpt2", number, named[0])
        if "capability" not in found:
            for pattern, capability in CARDS:
                if card := pattern.search(line):
                    found.note("capability", capability, number, card[0])
                    break
    return found
