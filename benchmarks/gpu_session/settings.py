"""What has to be in place before torch is imported: paths and variables of the environment; and the folder of the results."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = {
    # cuDNN's attention is the default on an H100 and its backward does not repeat itself bit for bit.
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS repeats itself only with a workspace of fixed size
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # else the allocator warns once a second while memory is measured
}
"""Variables that hold in every stage, unless the caller has set them. They are read when torch or CUDA starts."""


def make_importable() -> None:
    """Make this checkout importable, also by processes that this one starts.

    Nothing has to be installed: not Plimsoll, nor the tests that the session runs.
    """
    paths = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests" / "support"), str(ROOT / "tests")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def set_variables(device: str) -> None:
    """Set the variables of the environment that stages run under."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    threads = "1" if device == "cpu" else str(min(16, os.cpu_count() or 1))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", threads)
    if device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # trying it out takes ten processor seconds


def results_folder() -> Path:
    """``$OUT``, or a folder of the checkout that git ignores."""
    return Path(os.environ.get("OUT") or ROOT / "build" / "gpu-session")
