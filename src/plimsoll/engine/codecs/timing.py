"""Measures how long a codec takes on this device.

Timed on data of the dtype: normal numbers, coin flips for booleans, small counts for integers. Tensors above 4 Mi elements
are scaled up from there, because a codec works through any tensor in the same chunks. Median of three runs on one
thread, on the clock that ops are timed with.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from dataclasses import dataclass

import torch

from plimsoll.engine.codecs.protocol import Codec
from plimsoll.engine.codecs.registry import find_codec
from plimsoll.tracing.meters.timing import clock_for, one_thread

_MOST_ELEMENTS = 1 << 22
_RUNS = 3


@dataclass(frozen=True, slots=True)
class CodecSeconds:
    """Seconds of encoding and of decoding one tensor."""

    encode: float
    decode: float


@functools.lru_cache(maxsize=512)
def measure_codec(name: str, dtype: torch.dtype, count: int, device: str) -> CodecSeconds:
    """Seconds of one codec on a tensor of ``count`` elements; the random state stays as it is.

    Args:
        name: of the codec.
        dtype: one that it accepts.
        count: elements.
        device: where the tensor lies.
    """
    codec, clock = find_codec(name), clock_for(torch.device(device))
    measured = min(count, _MOST_ELEMENTS)
    tensor = _data(codec, dtype, measured, device)
    encode, decode = [], []
    threads = one_thread() if torch.device(device).type == "cpu" else contextlib.nullcontext()
    with torch.no_grad(), threads:
        for run in range(_RUNS + 1):
            payload, encode_seconds = clock.time(functools.partial(codec.encode, tensor))
            decode_seconds = 0.0 if payload is None else clock.time(functools.partial(codec.decode, payload))[1]
            if run:  # the first one makes memory that later ones find
                encode.append(encode_seconds)
                decode.append(decode_seconds)
    scale = count / max(measured, 1)
    return CodecSeconds(statistics.median(encode) * scale, statistics.median(decode) * scale)


def _data(codec: Codec, dtype: torch.dtype, count: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype is torch.bool:
        data = torch.rand(count, generator=generator) < 0.9
    elif dtype.is_floating_point:
        data = torch.randn(count, generator=generator)
        if codec.is_lossless and not codec.keeps_sign_only:  # of floats they take mostly-zero and two-valued ones
            data = data.clamp_min(1.0) - 1.0 if codec.name.startswith("zeros") else (data > 0).float()
    else:
        data = torch.randint(0, 100, (count,), generator=generator)
    return data.to(dtype).to(device)
