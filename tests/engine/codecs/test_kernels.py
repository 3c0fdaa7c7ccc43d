"""Kernels under Triton's interpreter, which has to be asked for before Triton is imported: in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plimsoll.engine.codecs.layout import runs_kernels

HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.long
@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_kernels_do_what_the_torch_form_does():
    cases = str(Path(__file__).with_name("interpreted.py"))
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", cases]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@pytest.mark.long
def test_codecs_do_not_import_triton_before_it_is_needed():
    script = (
        "import sys, torch; before = set(sys.modules); from plimsoll.engine.codecs.registry import find_codec; "
        "codec = find_codec('int8'); codec.decode(codec.encode(torch.ones(99))); print(*set(sys.modules) - before)"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "plimsoll.engine.codecs.registry" in loaded
    assert "triton" not in loaded


def test_kernels_are_for_cuda_alone():
    assert not runs_kernels(torch.device("cpu"))
    assert runs_kernels(torch.device("cuda")) == HAS_TRITON
