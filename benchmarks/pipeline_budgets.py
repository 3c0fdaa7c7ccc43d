"""Every schedule of torch.distributed.pipelining under a budget on several ranks: gradients, transfers and peaks.

    python -m benchmarks.pipeline_budgets [SCHEDULE …] [--family llama gpt2] [--ranks 2 4] [--share 0.85]

The scenarios are those of ``tests/ranks/pipeline_scenarios.py`` (small stages, real ranks under gloo). The budget of a rank is
a share of what its step takes without a plan. Prints a table in Markdown; nothing in it depends on the machine's speed but
which of several plans is chosen.
"""

from __future__ import annotations

import argparse
import itertools

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from benchmarks.launching import launch
from benchmarks.page import format_table

_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "interleaved-zero-bubble", "zbv")


def main() -> None:
    """Run what was asked for, one launch per case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("schedules", nargs="*", default=_SCHEDULES, choices=[*_SCHEDULES, []])
    parser.add_argument("--family", nargs="+", default=["llama", "gpt2"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--share", type=float, default=0.85)
    asked = parser.parse_args()
    rows = []
    for ranks, name, family in itertools.product(asked.ranks, asked.schedules, asked.family):
        case = f"{family}, {name}, {ranks} ranks"
        try:
            found = launch(ranks, "ranks.pipeline_scenarios:under_budgets", [(family, name, asked.share)])
        except ChildFailedError as error:
            print(f"{case}: {str(error).strip().splitlines()[-4:]}", flush=True)
            continue
        for rank, by_case in enumerate(found):
            one = by_case[f"{family} {name}"]
            is_same = all(one["same"]) and one["same_after_removal"] and one["restored"]
            kib = [f"{one[key] / 1024:.1f}" for key in ("unmanaged", "budget", "predicted", "measured")]
            rows.append([case, str(rank), "equal" if is_same else "DIFFER", *kib])
            print(*rows[-1], sep=" | ", flush=True)
    head = ["case", "rank", "gradients, transfers", "unmanaged, KiB", "budget, KiB", "predicted, KiB", "measured, KiB"]
    print("\n" + "\n".join(format_table(head, rows)))


if __name__ == "__main__":
    main()
