"""The shapes and dtypes that a trace notes for an op in, bytes out."""

from __future__ import annotations

import math

_BYTES_BY_TYPE = {
    "double": 8,
    "long int": 8,
    "long": 8,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
    "float": 4,
    "int": 4,
    "c10::half": 2,
    "c10::bfloat16": 2,
    "short int": 2,
    "short": 2,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "c10::float8_e4m3fn": 1,
    "c10::float8_e5m2": 1,
}


def input_bytes(dims: object, types: object) -> int | None:
    """Bytes of the tensors that an op was given: the least that it reads, if it reads all of them once.

    Args:
        dims: a list of sizes per argument, empty for what is no tensor; lists of tensors nest once more.
        types: the dtype of each argument, as C++ calls it.

    Returns:
        Bytes, or ``None`` where the trace has no shapes or a dtype is not known.

    Example:
        >>> input_bytes([[2, 8], [8], []], ["float", "c10::BFloat16", "Scalar"])
        80
    """
    if not isinstance(dims, list) or not isinstance(types, list) or len(dims) != len(types):
        return None
    total = 0
    for sizes, type_ in zip(dims, types, strict=True):
        if isinstance(sizes, str) and not sizes:
            continue
        if not isinstance(sizes, list):
            return None
        if not sizes or not isinstance(type_, str):
            continue
        width = _BYTES_BY_TYPE.get(type_.lower())
        tensors = sizes if isinstance(sizes[0], list) else [sizes]
        if width is None or not all(isinstance(size, int) for tensor in tensors for size in tensor):
            return None
        total += width * sum(math.prod(tensor) for tensor in tensors)
    return total
