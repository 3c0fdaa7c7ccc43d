"""Runs what the documentation shows: Python snippets page by page, and commands in a directory that has what they name.

A page says what ``model`` is; ``SETUPS`` makes it, small, together with the other names that the page takes for granted. The
suite runs what is quick. ``make snippets`` runs everything, says what it took, and ends with 1 if something failed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = {str(page.relative_to(ROOT)): page for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])}
SNIPPET = re.compile(r"^( *)```python\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
HELP = "plimsoll --help"
"""Stands for a page: the help texts of all commands."""
Names = dict[str, Any]


def snippets_of(page: str) -> list[str]:
    """The Python snippets of a page, in order."""
    return [textwrap.dedent(code) for _, code in SNIPPET.findall(PAGES[page].read_text(encoding="utf-8"))]


def commands_of(page: str) -> list[str]:
    """The commands of a page, or of all helps, in order, one line each: those of plimsoll, also as torchrun starts them."""
    blocks = _shown_by_helps() if page == HELP else BLOCK.findall(PAGES[page].read_text(encoding="utf-8"))
    lines = [line.removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(r"plimsoll [a-z]|torchrun .*-m plimsoll ", line) and "…" not in line]


def _shown_by_helps() -> list[str]:
    """The first steps of ``plimsoll --help``, and the example of every command."""
    from plimsoll.ui.cli.app import app
    from plimsoll.ui.cli.commands import FIRST_STEPS

    texts = [(command.callback.__doc__ or "").partition("Example: ")[2] for command in app.registered_commands]
    return [*FIRST_STEPS, *texts]


@contextlib.contextmanager
def a_large_machine() -> Iterator[None]:
    """Budgets on the pages are those of large GPUs; here the CPU is the device, and is said to have as much."""
    from plimsoll.planning.costing import host

    kept = os.sysconf
    with unittest.mock.patch.object(host.os, "sysconf", lambda name: kept(name) * 64):
        yield


def step() -> Names:
    """A small language model with its batch, optimizer and data, as most pages have it."""
    import torch

    import plimsoll
    import steps

    model, batch, _ = steps.llama()
    optimizer = torch.optim.AdamW(model.parameters())

    def train(model: Any) -> None:
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return {
        "torch": torch, "plimsoll": plimsoll, "model": model, "batch": batch, "batches": [batch] * 3, "loss": None,
        "optimizer": optimizer, "train": train, "ids": batch["input_ids"], "labels": batch["labels"],
    }  # fmt: skip


def saved() -> Names:
    """The same, with a plan and a pair of profiles."""
    from analysis.diagnose.builders import recomputing_traces
    from plimsoll.artifacts.finding import OverheadCause

    names = step()
    plan = names["plimsoll"].plan(names["model"], names["batch"], strategy="full")
    recomputing_traces(Path())
    for name in ("baseline", "with-plan"):
        subprocess.run(["gzip", f"{name}.json"], check=True)
    return names | {"plan": plan, "OverheadCause": OverheadCause}


def hidden() -> Names:
    """A model and what its head takes."""
    import torch

    names = step()
    return names | {"hidden": torch.randn(2, 64, names["model"].config.hidden_size, requires_grad=True)}


def ranks() -> Names:
    """A process group of one rank, and what pages about ranks import."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    scaler, weight = torch.amp.GradScaler("cpu"), torch.nn.Parameter(torch.ones(2))
    scaler.scale(weight.sum()).backward()
    scaler.step(torch.optim.SGD([weight], lr=0.1))
    styles = {f"model.layers.{layer}.mlp.gate_proj": ColwiseParallel() for layer in range(2)}
    return step() | {
        "dist": dist, "init_device_mesh": init_device_mesh, "fully_shard": fully_shard, "styles": styles, "scaler": scaler,
        "parallelize_module": parallelize_module, "DistributedDataParallel": DistributedDataParallel,
        "device": "cpu", "nodes": 1, "gpus": 1,
    }  # fmt: skip


def stages() -> Names:
    """A pipeline of one stage, and the plan of it that an estimate would have saved."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    import steps

    names = ranks()
    torch.manual_seed(0)
    model = steps.Stack(width=32)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    batches = [(torch.randn(16, 32), torch.randn(16, 32)) for _ in range(3)]
    Path("plans").mkdir(exist_ok=True)
    plan = names["plimsoll"].plan(model, batches[0][0][:2], loss=steps.mean_square, strategy="full")
    plan.save("plans/rank-0-stage-0.json")
    return names | {
        "Schedule1F1B": Schedule1F1B, "stage": stage, "loss": torch.nn.functional.mse_loss, "batches": batches,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }  # fmt: skip


def front() -> Names:
    """What the second snippet of the README is about; the first brings all that it needs."""
    import torch

    names = stages()
    ddp_model = names["DistributedDataParallel"](torch.nn.Linear(4, 4))
    schedule = names["Schedule1F1B"](names["stage"], n_microbatches=8, loss_fn=names["loss"])
    return {"schedule": schedule, "ddp_model": ddp_model}


def pictures() -> Names:
    """A model of pictures and its data, for a loop of one's own."""
    import torch

    import plimsoll

    model = torch.nn.Sequential(torch.nn.Flatten(), *(torch.nn.Linear(48, 48) for _ in range(3)))
    rows = [(torch.randn(4, 3, 4, 4), torch.randint(0, 48, (4,))) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"plimsoll": plimsoll, "F": torch.nn.functional, "model": model, "rows": rows, "optimizer": optimizer}


def room() -> Names:
    """A step beside which there is always enough room."""
    import transformers

    return step() | {"transformers": transformers, "bytes_free_for_training": lambda: 1 << 40}


def checkpoints() -> Names:
    """What saving a run imports."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    return step() | {"os": os, "dcp": dcp, "get_state_dict": get_state_dict, "set_state_dict": set_state_dict}


def hugging_face() -> Names:
    """What transformers' and TRL's trainers take."""
    import torch
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

    names = step()
    ids = torch.randint(2, 128, (8, 32))
    data = [{"input_ids": row, "labels": row} for row in ids]
    kept = {"output_dir": "out", "max_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True}
    letters = Tokenizer(models.BPE(vocab={"<end>": 0} | {chr(code): code for code in range(1, 128)}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>", pad_token="<end>")
    return names | {
        "Trainer": Trainer, "args": TrainingArguments(**kept), "data": data, "LoraConfig": LoraConfig, "kept": kept,
        "tokenizer": tokenizer,
    }  # fmt: skip


def trl() -> Names:
    """The same for TRL's trainer."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    names = hugging_face()
    data = Dataset.from_dict({"input_ids": [list(map(int, row["input_ids"])) for row in names["data"]]})
    return names | {"SFTTrainer": SFTTrainer, "args": SFTConfig(**names["kept"], bf16=False), "data": data}


def accelerated() -> Names:
    """An accelerator on the CPU."""
    import torch
    from accelerate import Accelerator

    names = step()
    rows = [{name: column[0] for name, column in names["batch"].items()} for _ in range(4)]
    return names | {"accelerator": Accelerator(cpu=True), "rows": torch.utils.data.DataLoader(rows, batch_size=2)}


def lightning() -> Names:
    """A module and what runs it."""
    import torch
    from lightning import Fabric, LightningModule, Trainer

    names = step()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = names["model"]

        def training_step(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, labels=ids).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    rows = torch.utils.data.DataLoader(torch.randint(2, 128, (4, 32)), batch_size=2)
    return names | {"Trainer": Trainer, "Fabric": Fabric, "module": Module(), "rows": rows}


def arrays() -> Names:
    """A loss of JAX."""
    import jax
    import jax.numpy as jnp

    params = [jnp.full((8, 8), 0.1)] * 3

    def loss(params: list[Any], batch: Any) -> Any:
        for weights in params:
            batch = jnp.tanh(batch @ weights)
        return jnp.mean(batch**2)

    moments = SimpleNamespace(init=lambda params: [jax.tree.map(jnp.zeros_like, params) for _ in range(2)])
    optax = SimpleNamespace(adamw=lambda rate: moments)  # estimates ask an optimizer for its state alone
    return {"jax": jax, "loss": loss, "params": params, "batch": jnp.ones((4, 8)), "optax": optax}


def keras() -> Names:
    """A compiled model of Keras on JAX."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras
    import numpy

    model = keras.Sequential([keras.layers.Dense(8, activation="gelu"), keras.layers.Dense(1)])
    model.build((None, 4))
    model.compile("sgd", "mse")
    return {"model": model, "x": numpy.ones((64, 4), "float32"), "y": numpy.ones((64, 1), "float32")}


def layered() -> Names:
    """Blocks of TensorFlow, and a loss of them."""
    import tensorflow as tf

    class Block(tf.Module):
        def __init__(self, name: str) -> None:
            super().__init__(name=name)
            self.up, self.down = tf.Variable(tf.fill((64, 512), 0.01)), tf.Variable(tf.fill((512, 64), 0.01))

        def __call__(self, x: Any) -> Any:
            return x + tf.tanh(x @ self.up) @ self.down

    model = SimpleNamespace(blocks=[Block(f"block_{number}") for number in range(3)])

    def loss(x: Any, y: Any) -> Any:
        for each in model.blocks:
            x = each(x)
        return tf.reduce_mean((x - y) ** 2)

    return {"tf": tf, "model": model, "loss": loss, "x": tf.ones((1024, 64)), "y": tf.zeros((1024, 64))}


SETUPS: dict[str, Callable[[], Names]] = {
    "README.md": front,
    "docs/chunked-loss.md": hidden,
    "docs/compiled.md": ranks,
    "docs/diagnose.md": saved,
    "docs/distributed.md": ranks,
    "docs/gradient-compression.md": ranks,
    "docs/integrations/accelerate.md": accelerated,
    "docs/integrations/jax.md": arrays,
    "docs/integrations/keras.md": keras,
    "docs/integrations/lightning.md": lightning,
    "docs/integrations/loops.md": pictures,
    "docs/integrations/tensorflow.md": layered,
    "docs/integrations/transformers.md": hugging_face,
    "docs/integrations/trl.md": trl,
    "docs/out-of-memory.md": room,
    "docs/pipeline-parallel.md": stages,
    "docs/probe.md": saved,
    "docs/resume.md": checkpoints,
    "docs/sharded-data-parallel.md": ranks,
    "docs/tensor-parallel.md": ranks,
}
"""By page, what makes the names that its snippets take for granted; ``step`` elsewhere."""
NOT_HERE = {
    "docs/integrations/axolotl.md": "LLaMA-Factory is not installed",
    "docs/integrations/deepspeed.md": "DeepSpeed is not installed",
    "docs/integrations/torchtitan.md": "torchtitan is not installed",
}
"""Pages whose snippets nobody runs, and why."""
if importlib.util.find_spec("tensorflow") is None:
    NOT_HERE["docs/integrations/tensorflow.md"] = "TensorFlow is not installed"
SLOW = {"docs/compiled.md", "docs/diagnose.md", "docs/estimate.md", "docs/longest-sequence.md"}
"""Pages whose snippets take more than ten seconds: the suite leaves them to `make snippets`."""


def run_snippets(page: str) -> int:
    """Run the snippets of a page one after the other, in one namespace and in the current directory.

    Returns:
        How many were run.
    """
    names: Names = {}
    snippets = snippets_of(page)
    sys.path.insert(0, "")  # a snippet may import what another one wrote
    try:
        with a_large_machine():
            for number, code in enumerate(snippets, start=1):
                names |= SETUPS.get(page, step)()  # a model anew, beside what earlier snippets have made
                exec(compile(code, f"{page}, snippet {number}", "exec"), names)
    finally:
        sys.path.remove("")
        _leave_group()
    return len(snippets)


def _leave_group() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


MACHINE = """import os
kept = os.sysconf
os.sysconf = lambda name: kept(name) * (64 if name == "SC_PHYS_PAGES" else 1)
"""
"""Read by every Python that starts in the directory: the machine of the pages has more memory than this one."""
PROJECT = """import sys
import torch
import steps

def make_step():
    # The pages look at a step that saves memory by itself, and plan one that does not.
    is_own = {"verify", "explain"} & set(sys.argv) and not {"--plan", "--strategy"} & set(sys.argv)
    torch.manual_seed(0)
    batches = [torch.randn(16, 32) for _ in range(20)]
    given = batches if "--validate" in sys.argv else batches[0]
    return (steps.CheckpointedStack if is_own else steps.Stack)(), given, steps.mean_square

make = make_step
"""
PLANNED = "plimsoll plan llama-tiny --budget 90MiB --output plan.json"
OWN_STEP = "my_project.training:make_step"
BEFORE = {
    "docs/diagnose.md": [
        PLANNED,
        f"plimsoll verify {OWN_STEP} --strategy full --output receipt.json",
        f"plimsoll probe {OWN_STEP} --strategy full --steps 4 --output verdict.json",
    ],
    "docs/verify.md": [PLANNED],
    HELP: [
        PLANNED,
        "plimsoll verify llama-tiny --plan plan.json --output receipt.json",
        "plimsoll compare llama-tiny --budget 90MiB --output comparison.json",
    ],
}
"""Commands that make files which a page takes for granted."""
WITHOUT = ("--device cuda", "which needs a GPU")
LATER = {
    WITHOUT[0]: WITHOUT[1],
    "torchrun": "starts several processes",
    "llama-3.1-": "minutes: a model of billions of parameters is traced and solved",
    "llama-3-": "minutes: a model of billions of parameters is traced and solved",
    "llama-3.1-8b": "minutes: the same",
    "verify llama-tiny": "half a minute: measures the step with and without the plan",
    "report plan.json receipt.json": "is about the receipt of verify llama-tiny",
    "show traffic.json": "is about what the ranks of compress-gradients write",
    "advise llama-tiny": "ten seconds: plans and asks torch.compile",
    "compare llama-tiny": "a minute: measures strategies against each other",
    "diagnose llama-tiny": "half a minute: profiles two steps",
    "probe llama-tiny": "minutes: trains a thousand steps, twice",
    "fit llama-tiny": "a minute: traces and solves at many batches",
    "plimsoll demo": "minutes: trains, twice",
    "--compile": "a minute: the compiler's",
    "recompute,compress": "a quarter of a minute: measures codecs",
}
"""What the suite leaves to `make snippets`, by words of the command, and why."""


def prepare(folder: Path) -> None:
    """Put what the pages name into a directory: a project, a configuration, profiles of two steps."""
    import json

    from analysis.diagnose.builders import NsysBuilder, recomputing_traces

    (folder / "sitecustomize.py").write_text(MACHINE)
    for file in ("my_project/training.py", "my/module.py"):
        (folder / file).parent.mkdir()
        (folder / file).write_text(PROJECT)
    (folder / "path/to").mkdir(parents=True)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128, **sizes}
    (folder / "path/to/config.json").write_text(json.dumps(config))
    recomputing_traces(folder)
    for name in ("baseline", "with-plan"):
        subprocess.run(["gzip", str(folder / f"{name}.json")], check=True)
        export, end = NsysBuilder(), 60_000 if name == "baseline" else 80_000
        export.range("step 0", 0, end)
        export.kernel(2_000, 20_000, end)
        export.write(folder / f"{name}.sqlite")


def run_command(line: str, folder: Path) -> tuple[int, float, str]:
    """Run a command as it stands, in a directory.

    Returns:
        Its exit code, the processor seconds that it took, and what it said.
    """
    words = shlex.split(line, comments=True)
    start = {"plimsoll": ["plimsoll"], "torchrun": ["torch.distributed.run"]}[words[0]]
    paths = [str(folder), os.environ.get("PYTHONPATH", ""), str(ROOT / "tests" / "support"), str(ROOT / "src")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PLIMSOLL_CACHE_DIR": str(folder / "cache")}
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", *start, *words[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return done.returncode, seconds, done.stdout + done.stderr


def main(pages: list[str]) -> int:
    """Run everything on these pages, or on all; how much of it failed."""
    ran: Counter[str] = Counter()
    for page in pages or [*PAGES, HELP]:
        if page != HELP and (snippets := snippets_of(page)):
            ran[_try_snippets(page)] += len(snippets)
        commands = commands_of(page)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if commands:
                prepare(folder)
                for line in BEFORE.get(page, []):
                    run_command(line, folder)
            for line in commands:
                if WITHOUT[0] in line:
                    print(f"not run  {line}: {WITHOUT[1]}")
                    ran["not run"] += 1
                    continue
                code, seconds, said = run_command(line, folder)
                outcome = "failed" if code else "ran"
                _tell(outcome, seconds, f"{page}: {line}", said)
                ran[outcome] += 1
    print(", ".join(f"{count} {outcome}" for outcome, count in ran.items()))
    return ran["failed"]


def _try_snippets(page: str) -> str:
    """Run a page's snippets in a process of their own, and say how that went."""
    if page in NOT_HERE:
        print(f"not run  {page}: {NOT_HERE[page]}")
        return "not run"
    code = f"import snippets; snippets.run_snippets({page!r})"
    with tempfile.TemporaryDirectory() as folder:
        before = os.times()
        paths = [str(ROOT / "tests" / "support"), str(ROOT / "tests"), str(ROOT / "src")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        seconds = os.times().children_user - before.children_user
    outcome = "failed" if done.returncode else "ran"
    _tell(outcome, seconds, f"{page}: snippets", done.stderr)
    return outcome


def _tell(outcome: str, seconds: float, what: str, said: str) -> None:
    """One line, and of a failure the end of what was said."""
    print(f"{outcome:7} {seconds:6.1f} s  {what}")
    if outcome == "failed":
        print(textwrap.indent("\n".join(said.splitlines()[-12:]), "    "))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
