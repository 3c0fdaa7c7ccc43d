"""Hugging Face's ``Trainer`` and TRL's trainers on small models with random weights, without anything from a hub.

Texts are the source of Python's own argparse module, byte by byte.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from torch.utils.data import Dataset

import zoo
from benchmarks.stack_setups.set_up import Arm, SetUp, Watch
from plimsoll.integrations.transformers import PlimsollCallback

_QUIET = {"report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "use_cpu": True}
_BYTES = {"vocab_size": 260, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256}
_LORA = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.1}


class Rows(Dataset[dict[str, Any]]):
    """Texts of random words that are their own labels, of the given lengths in turn."""

    def __init__(self, *lengths: int, count: int = 64) -> None:
        torch.manual_seed(1)
        wide = [lengths[i % len(lengths)] for i in range(count)]
        self.rows = [torch.randint(2, zoo.VOCABULARY, (length,)).tolist() for length in wide]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.tensor(self.rows[index])
        return {"input_ids": ids, "labels": ids}


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of several lengths as one batch."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def llama(**changes: Any) -> nn.Module:
    """A Llama whose activations are several times its weights."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 128}
    return zoo.build("llama", **{**sizes, **changes})


class Report(transformers.TrainerCallback):
    """Tells the watch; it comes after all others, which have put on by then what they put on."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.trainer: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._watch.attached(self.trainer.model_wrapped)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._watch.stepped()


def train(make: Callable[..., Any], watch: Watch, arm: Arm, resume: str | None = None, **options: Any) -> Any:
    """Train what ``make(callbacks, checkpoints)`` returns, a trainer; returns the trainer."""
    own = [] if arm.budget is None else [PlimsollCallback(arm.budget, **options)]
    with contextlib.ExitStack() as stack:
        if watch.meter is not None:
            stack.enter_context(watch.meter)
        report = Report(watch)
        report.trainer = trainer = make(callbacks=[*own, report], activation_checkpointing=arm.own_switch)
        if watch.meter is not None:
            trainer.data_collator = watch.meter.loading(trainer.data_collator)
        trainer.remove_callback(transformers.PrinterCallback)
        if type(trainer).__module__.startswith(
            "trl."
        ):  # whose head works on wide tiles, however small the vocabulary is
            stack.enter_context(mock.patch("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", _BYTES["vocab_size"]))
        trainer.train(resume_from_checkpoint=resume)
    kinds = ("loss", "eval_loss")
    watch.ended(trainer.model, [row[kind] for row in trainer.state.log_history for kind in kinds if kind in row])
    return trainer


def plain_trainer(
    folder: str, callbacks: list[Any], model: Callable[[], nn.Module] = llama, **changes: Any
) -> transformers.Trainer:
    """A ``Trainer`` of a language model on texts of one length, or of several (``lengths``)."""
    lengths = changes.pop("lengths", (64,))
    return transformers.Trainer(
        model=model(),
        args=_arguments(transformers.TrainingArguments, folder, **{"per_device_train_batch_size": 8, **changes}),
        train_dataset=Rows(*lengths, count=256),
        eval_dataset=Rows(*lengths, count=4),
        data_collator=pad if len(lengths) > 1 else None,
        callbacks=callbacks,
    )


def _arguments(kind: type[Any], folder: str, **changes: Any) -> Any:
    return kind(
        output_dir=folder, **{"max_steps": 3, "per_device_train_batch_size": 4, "bf16": False, **_QUIET, **changes}
    )


def byte_llama(**changes: Any) -> nn.Module:
    """The Llama with a vocabulary of bytes."""
    return llama(**{**_BYTES, **changes})


def sft_trainer(
    folder: str,
    callbacks: list[Any],
    model: Callable[[], nn.Module] = byte_llama,
    peft: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """TRL's supervised fine-tuning, of all weights or of an adapter."""
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model(),
        _arguments(SFTConfig, folder, max_length=96, **changes),
        train_dataset=_table(text=_texts(256)),
        processing_class=_tokenizer(),
        callbacks=callbacks,
        peft_config=_adapter(peft),
    )


def dpo_trainer(folder: str, callbacks: list[Any], peft: dict[str, Any] | None = None, **changes: Any) -> Any:
    """TRL's direct preference optimisation: a policy and a reference, which is the policy without its adapter if it has one."""
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        byte_llama(),
        ref_model=None if peft else byte_llama().eval(),
        args=_arguments(DPOConfig, folder, **changes),
        train_dataset=_pairs(),
        processing_class=_tokenizer(),
        callbacks=callbacks,
        peft_config=_adapter(peft),
    )


def reward_trainer(folder: str, callbacks: list[Any], **changes: Any) -> Any:
    """TRL's reward model."""
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(0)
    config = byte_llama().config
    config.num_labels = 1
    return RewardTrainer(
        transformers.LlamaForSequenceClassification(config),
        _arguments(RewardConfig, folder, **changes),
        train_dataset=_pairs().remove_columns("prompt"),
        processing_class=_tokenizer(),
        callbacks=callbacks,
    )


def grpo_trainer(folder: str, callbacks: list[Any], **changes: Any) -> Any:
    """TRL's group relative policy optimisation, which generates between training steps."""
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        byte_llama(),
        reward_funcs=lambda completions, **_: [float(len(set(each))) for each in completions],
        args=_arguments(GRPOConfig, folder, num_generations=4, max_completion_length=24, **changes),
        train_dataset=_table(prompt=[text[:24] for text in _texts(256)]),
        processing_class=_tokenizer(),
        callbacks=callbacks,
    )


def quantized_llama(bits: int) -> nn.Module:
    """The Llama of bytes on a base of 4 or 8 bits by bitsandbytes, with an adapter that is trained."""
    import bitsandbytes as bnb
    from peft import get_peft_model, prepare_model_for_kbit_training

    model: Any = byte_llama()
    for name, linear in list(model.model.named_modules()):
        if isinstance(linear, nn.Linear):
            sizes, weight = (linear.in_features, linear.out_features), linear.weight.data
            if bits == 4:
                packed = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
                packed.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=packed)
            else:
                packed = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
                packed.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            owner, _, attribute = name.rpartition(".")
            setattr(model.model.get_submodule(owner), attribute, packed.to("cpu"))
    setattr(model, f"is_loaded_in_{bits}bit", True)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(model, _adapter({}))


def _adapter(peft: dict[str, Any] | None) -> Any:
    if peft is None:
        return None
    from peft import LoraConfig

    return LoraConfig(**_LORA, **peft)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: at + 3 for at, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def _texts(count: int, lengths: tuple[int, ...] = (40, 64, 96)) -> list[str]:
    source, at, found = Path(argparse.__file__ or "").read_text(encoding="utf-8"), 0, []
    for number in range(count):
        found.append(source[at : at + lengths[number % len(lengths)]])
        at += lengths[number % len(lengths)]
    return found


def _table(**columns: list[str]) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_dict(columns)


def _pairs() -> Any:
    texts = _texts(256)
    first, second = texts[:128], texts[128:]
    return _table(
        prompt=[text[:16] for text in first],
        chosen=[text[16:] for text in first],
        rejected=[text[10:] for text in second],
    )


def _set_up(stack: str, of: str, shapes: str, make: Callable[..., Any], ranks: int = 1, **changes: Any) -> SetUp:
    def train_once(watch: Watch, arm: Arm, steps: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            train(functools.partial(make, folder, max_steps=steps, **changes), watch, arm)

    return SetUp(
        stack=stack,
        model=of,
        precision="bf16" if changes.get("bf16") else "fp32",
        accumulation=changes.get("gradient_accumulation_steps", 1),
        shapes=shapes,
        ranks=ranks,
        taught=5 if shapes.startswith("8 x 64") else 24,
        train=train_once,
    )


_WIDE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}
_ALL_LENGTHS = {"lengths": (24, 40, 64), "train_sampling_strategy": "group_by_length"}
_ACCUMULATING = {"gradient_accumulation_steps": 2}
_EVERY_SECOND = {"activation_checkpointing_kwargs": {"every_n_layers": 2}}
_DEEP = functools.partial(llama, num_hidden_layers=6)


def _zoo_model(name: str, **changes: Any) -> Callable[[], nn.Module]:
    return functools.partial(zoo.build, name, **changes)


SET_UPS = (
    _set_up("Trainer", "Llama", "8 x 64", plain_trainer),
    _set_up("TRL SFT", "Llama", "packed", sft_trainer, packing=True),
    _set_up("TRL SFT", "Llama + LoRA", "padded", sft_trainer, peft={}),
    _set_up("Trainer", "Llama, wide", "8 x 64", plain_trainer, model=functools.partial(llama, **_WIDE), bf16=True),
    _set_up("TRL DPO", "Llama + reference", "padded", dpo_trainer),
    _set_up("TRL GRPO", "Llama", "generated", grpo_trainer),
    _set_up("Trainer", "Llama", "8 x 24 to 64", plain_trainer, **_ALL_LENGTHS),
    _set_up("TRL SFT", "Llama in 4 bit + LoRA", "padded", sft_trainer, model=functools.partial(quantized_llama, 4)),
    _set_up("Trainer", "GPT-2", "8 x 64", plain_trainer, model=_zoo_model("gpt2", n_layer=4, n_embd=64)),
    _set_up("TRL reward", "Llama", "padded", reward_trainer),
    _set_up("Trainer", "Llama", "8 x 64", plain_trainer, **_ACCUMULATING),
    _set_up("TRL SFT", "Llama + DoRA", "padded", sft_trainer, peft={"use_dora": True}),
    _set_up("Trainer", "BERT", "8 x 64", plain_trainer, model=_zoo_model("bert", num_hidden_layers=4)),
    _set_up("TRL SFT", "Llama in 8 bit + LoRA", "padded", sft_trainer, model=functools.partial(quantized_llama, 8)),
    _set_up("TRL DPO", "Llama + LoRA", "padded", dpo_trainer, peft={}, bf16=True),
    _set_up("Trainer", "Mixtral", "8 x 64", plain_trainer, model=_zoo_model("mixtral", num_hidden_layers=3)),
    _set_up("TRL SFT", "Llama", "padded", sft_trainer, bf16=True, **_ACCUMULATING),
    _set_up("TRL SFT", "Llama + LoRA", "packed", sft_trainer, peft={}, packing=True, bf16=True),
    _set_up("Trainer", "Llama", "8 x 64", plain_trainer, bf16=True),
    _set_up("TRL SFT", "Llama", "padded", sft_trainer),
    _set_up("TRL GRPO", "Llama", "generated", grpo_trainer, bf16=True, **_ACCUMULATING),
    _set_up("Trainer", "Llama, wide", "8 x 64", plain_trainer, model=functools.partial(llama, **_WIDE)),
    _set_up("Trainer", "Llama, every 2nd layer", "8 x 64", plain_trainer, model=_DEEP, **_EVERY_SECOND),
    _set_up("Trainer", "T5", "8 x 64", plain_trainer, model=_zoo_model("t5", num_layers=3, num_decoder_layers=3)),
    _set_up("Trainer DDP", "Llama", "8 x 64", plain_trainer, 2),
    _set_up("TRL SFT DDP", "Llama + LoRA", "packed", sft_trainer, 2, peft={}, packing=True),
    _set_up("TRL DPO DDP", "Llama + LoRA", "padded", dpo_trainer, 2, peft={}),
    _set_up(
        "Trainer DDP",
        "GPT-2",
        "8 x 64",
        plain_trainer,
        2,
        model=_zoo_model("gpt2", n_layer=4, n_embd=64),
        **_ACCUMULATING,
    ),
)
