"""What it takes ranks to agree on a plan: exchanges, without the time in which they wait for a slower one to arrive.

    python -m benchmarks.agreement [--ranks 2 4]

Real processes under torchrun's agent with gloo, on this machine; a Llama under FSDP2. Of every exchange each rank notes when it
came and when it left. Leaving later than the last one came is the exchange's own time; what a rank waited before that is not.
Text of plans (to JSON and back, digests) and facts (fingerprints, signatures) are timed beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.launching import launch
from benchmarks.machine import device_name, versions

_HIDDEN, _LAYERS, _LENGTH = 128, 8, 128
_CALLS = ("plan", "apply", "attach, 4 steps", "verify")


def measure() -> dict[str, Any]:
    """On a rank: what each call exchanges, and when."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    import plimsoll

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=_HIDDEN,
        intermediate_size=3 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=_LENGTH,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ids = torch.randint(0, 256, (2, _LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    free = plimsoll.plan(model, batch, strategy="none")
    budget_bytes = (free.baseline_peak_bytes + free.floor_bytes) // 2
    found: dict[str, Any] = {}
    with _Watched() as watch:
        made = plimsoll.plan(model, batch, budget_bytes)
        found["plan"] = watch.take()
        plimsoll.apply(model, made).remove()
        found["apply"] = watch.take()
        handle = plimsoll.attach(model, 2 * free.baseline_peak_bytes)
        for _ in range(4):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()
        found["attach, 4 steps"] = watch.take()
        plimsoll.verify(model, batch, made, steps=1)
        found["verify"] = watch.take()
    dist.barrier()
    return found


class _Watched:
    """Notes the exchanges of this rank, and the seconds in what is done for them, until the block ends."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._text_seconds = 0.0
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> _Watched:
        from plimsoll.analysis.verify import evidence, verify
        from plimsoll.session import agreement
        from plimsoll.session.rendezvous.conversation import Conversation
        from plimsoll.session.task import TrainingTask

        self._replace(Conversation, "ask", self._noted)
        for home, names in (
            (agreement, ("to_json", "from_json", "plan_facts")),
            (TrainingTask, ("facts",)),
            (verify, ("plan_facts",)),
            (evidence, ("to_json", "from_json")),
        ):
            for name in names:
                self._replace(home, name, self._timed)
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()

    def take(self) -> dict[str, Any]:
        """What has been noted since the last time."""
        taken = {"spans": self._spans, "text_seconds": self._text_seconds}
        self._spans, self._text_seconds = [], 0.0
        return taken

    def _replace(self, home: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        before = getattr(home, name)
        setattr(home, name, wrap(before))
        self._undo.append(lambda: setattr(home, name, before))

    def _noted(self, call: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()  # one clock for all processes of a machine
            try:
                return call(*args, **kwargs)
            finally:
                self._spans.append((start, time.monotonic()))

        return noted

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._text_seconds += time.perf_counter() - start

        return timed


def figures(told: list[dict[str, Any]], call: str) -> tuple[int, float, float, float]:
    """Exchanges, seconds of them without waiting and in text (of the slowest rank), and seconds waited for others."""
    spans = [rank[call]["spans"] for rank in told]
    last_arrivals = [max(start for start, _ in exchange) for exchange in zip(*spans, strict=True)]
    own = [sum(end - last for (_, end), last in zip(rank, last_arrivals, strict=True)) for rank in spans]
    waited = [sum(last - start for (start, _), last in zip(rank, last_arrivals, strict=True)) for rank in spans]
    return len(spans[0]), max(own), max(rank[call]["text_seconds"] for rank in told), max(waited)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    asked = parser.parse_args()
    print(f"{device_name(torch.device('cpu'))}; {versions()}")
    print("| ranks | call | exchanges | exchange s | text and facts s | waited for others s |")
    print("|---|---|---|---|---|---|")
    for ranks in asked.ranks:
        told = launch(ranks, "benchmarks.agreement:measure", timeout_seconds=600.0)
        for call in _CALLS:
            count, own_seconds, text_seconds, waited_seconds = figures(told, call)
            print(f"| {ranks} | {call} | {count} | {own_seconds:.3f} | {text_seconds:.3f} | {waited_seconds:.2f} |")


if __name__ == "__main__":
    main()
