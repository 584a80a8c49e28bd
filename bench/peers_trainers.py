"""The peers that own their loop: Hugging Face's Trainer, TRL's SFTTrainer, Unsloth."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from peers_loops import CLIP, DECAY, model_of, rate, tokens
from peers_trial import Probe, Trial

END = "<|endoftext|>"


def trainer(trial: Trial, probe: Probe) -> None:
    """Hugging Face's Trainer. ``how``: ``precision`` of the weights (``amp-bf16``: fp32 and autocast), others go to
    ``TrainingArguments``."""
    import transformers

    how = dict(trial.case.how)
    precision, activation = how.pop("precision", "amp-bf16"), how.pop("activation", "gelu_new")
    network = model_of(trial, probe.device, precision=precision, activation=activation)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            **_arguments(trial, probe, folder),
            bf16=precision == "amp-bf16",
            train_sampling_strategy="sequential",
            **how,
        )
        kind, stop = _watched(transformers.Trainer, probe)
        examples = [{"input_ids": row, "labels": row} for row in tokens(trial.seq)]
        kind(network, arguments, train_dataset=examples, callbacks=[stop]).train()


def sft(trial: Trial, probe: Probe) -> None:
    """TRL's SFTTrainer, with its own defaults for memory (bf16, checkpointing, a loss that never holds all logits)
    unless ``how`` says otherwise: ``precision`` of the weights, others go to ``SFTConfig``."""
    how = dict(trial.case.how)
    precision, activation = how.pop("precision", "amp-bf16"), how.pop("activation", "gelu_new")
    network = model_of(trial, probe.device, precision=precision, activation=activation)
    with tempfile.TemporaryDirectory() as folder:
        _tune(trial, probe, network, tokenizer(), folder, how)


def unsloth(trial: Trial, probe: Probe) -> None:
    """Unsloth's full fine-tuning: its loader and checkpointing, and SFTTrainer as it patches it. ``how`` goes to
    ``SFTConfig``; ``checkpointing`` is its ``use_gradient_checkpointing``."""
    import unsloth  # first: it patches what is imported after it  # noqa: I001
    import torch

    how = dict(trial.case.how)
    checkpointing = how.pop("checkpointing", "unsloth")
    with tempfile.TemporaryDirectory() as folder:
        made = model_of(trial, probe.device, precision="bf16", activation=how.pop("activation", "gelu_new"))
        made.save_pretrained(Path(folder, "model"))
        tokenizer().save_pretrained(Path(folder, "model"))
        del made
        torch.cuda.empty_cache()
        network, words = unsloth.FastModel.from_pretrained(
            str(Path(folder, "model")), max_seq_length=trial.seq, dtype=torch.bfloat16, full_finetuning=True,
            load_in_4bit=False, use_gradient_checkpointing=checkpointing,
        )  # fmt: skip
        _tune(trial, probe, network, words, folder, how)


def _tune(trial: Trial, probe: Probe, network: Any, words: Any, folder: str, how: dict[str, Any]) -> None:
    """SFTTrainer on rows that are tokenised already; `how` goes to ``SFTConfig``."""
    import datasets
    import trl

    rows = tokens(trial.seq).tolist()
    arguments = trl.SFTConfig(
        **_arguments(trial, probe, folder), max_length=trial.seq, train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True}, **how,
    )  # fmt: skip
    kind, stop = _watched(trl.SFTTrainer, probe)
    kind(
        network, arguments, train_dataset=datasets.Dataset.from_dict({"input_ids": rows, "labels": rows}),
        processing_class=words, callbacks=[stop],
    ).train()  # fmt: skip


def _arguments(trial: Trial, probe: Probe, folder: str) -> dict[str, Any]:
    """What all trainers get: the same optimizer settings as the loops, and nothing written."""
    return {
        "output_dir": folder, "per_device_train_batch_size": trial.batch, "max_steps": probe.most,
        "gradient_accumulation_steps": trial.case.accumulation, "learning_rate": rate(trial), "weight_decay": DECAY,
        "max_grad_norm": CLIP, "lr_scheduler_type": "constant", "report_to": "none", "save_strategy": "no",
        "logging_strategy": "no", "disable_tqdm": True, "use_cpu": probe.device.type == "cpu", "seed": 0,
    }  # fmt: skip


def _watched(kind: Any, probe: Probe) -> tuple[Any, Any]:
    """The trainer's class, keeping the losses of a step's micro-batches (it has divided them by their number), and the
    callback that hands their sum to the probe and stops the trainer when it is enough."""
    from transformers import TrainerCallback

    since: list[Any] = []

    class Kept(kind):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            since.append(loss.detach())
            return loss

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            loss = sum(since[1:], since[0])
            since.clear()
            control.should_training_stop = probe.done(loss)

    return Kept, Stop()


def tokenizer() -> Any:
    """One token for each byte and an end: SFTTrainer wants a tokenizer even for what is tokenised already."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {**{f"<{byte}>": byte for byte in range(256)}, END: 256}
    made = Tokenizer(models.WordLevel(words, unk_token=END))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END, unk_token=END)
