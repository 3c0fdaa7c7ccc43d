"""Names for people: ``layers.0–31`` instead of 32 names, one row for labels that differ only in numbers, and values without
the marks that only overrides need.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from plimsoll.artifacts.plan import Holder
from plimsoll.units import format_bytes

_NUMBER = re.compile(r"\d+")
_VALUE = re.compile(r"(?:(?P<place>[\w.]+)::)?(?P<op>[\w.]+)#(?P<number>\d+)(?:\.(?P<output>\d+))?")
_INPUT = re.compile(r"\binput:(\d+)")
_BACKWARD = re.compile(r"_backward(_data|_input|_weight)?$")
_NODE = re.compile(r"(\w+)Backward\d+")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ATTENTION = re.compile(r"scaled_dot_product_(\w+_)?attention(_for_cpu)?")


def name_call(name: str, call: int) -> str:
    """Return the name of one call of a region (a module that a plan decides about): the module's name, followed by the call's
    number from the second call on.
    """
    shown = name or "(the model)"
    return shown if call == 0 else f"{shown} (call {call + 1})"


def plain_name(label: str) -> str:
    """Return a label with the names of its values in plain words, for charts and tables about memory.

    A value's own name (``mlp.act_fn::silu#0``) says module, op, how many such ops came before, and which output of the op it
    is. Overrides need these names; people do not.

    Example:
        >>> plain_name("layers.3.mlp.act_fn::silu#0"), plain_name("_log_softmax_backward_data#0")
        ('layers.3.mlp.act_fn silu', 'gradient of log_softmax')
        >>> plain_name("self_attn::scaled_dot_product_attention#0.1"), plain_name("self_attn::cat#2")
        ('self_attn attention, output 2', 'self_attn cat (3)')
    """
    return _INPUT.sub(_plain_input, _VALUE.sub(_plain_value, label))


def plain_op(op: str) -> str:
    """Return the name of an op without its parts that only torch needs. All kernels of fused attention are ``attention``.

    Example:
        >>> plain_op("_log_softmax"), plain_op("nll_loss_backward"), plain_op("mylib.scan")
        ('log_softmax', 'gradient of nll_loss', 'mylib.scan')
        >>> plain_op("_scaled_dot_product_flash_attention_for_cpu")
        'attention'
    """
    made = _ATTENTION.sub("attention", _BACKWARD.sub("", op).lstrip("_"))
    return f"gradient of {made}" if _BACKWARD.search(op) else made


def plain_place(module: str, op: str) -> str:
    """Return where an op runs: its module, and its own name in brackets. In backward, an op outside of the model's modules has
    the name of a node of autograd for a module.

    Example:
        >>> plain_place("layers.0.mlp", "mul"), plain_place("LogSoftmaxBackward0", "_log_softmax_backward_data")
        ('layers.0.mlp (mul)', 'log_softmax')
        >>> plain_place("PowBackward0", "mul")
        'pow (mul)'
    """
    node = _NODE.fullmatch(module)
    if node is None:
        return f"{module} ({op})"
    place = plain_op(_CAPITAL.sub("_", node[1]).lower())
    return place if place == plain_op(op).removeprefix("gradient of ") else f"{place} ({op})"


def _plain_value(found: re.Match[str]) -> str:
    op = plain_op(found["op"])
    gradient = "gradient of " if op.startswith("gradient of ") else ""
    place = f"{found['place']} " if found["place"] else ""
    number = f" ({int(found['number']) + 1})" if int(found["number"]) else ""
    output = f", output {int(found['output']) + 1}" if int(found["output"] or 0) else ""
    return f"{gradient}{place}{op.removeprefix(gradient)}{number}{output}"


def _plain_input(found: re.Match[str]) -> str:
    return f"input {int(found[1]) + 1}" if int(found[1]) else "input"


def compress_names(names: Sequence[str]) -> str:
    """Return the names as one text with commas; names that differ only in one number become a range.

    Example:
        >>> compress_names(["layers.0", "layers.1", "layers.2", "layers.5", "head"])
        'layers.0–2,5, head'
    """
    runs: dict[tuple[str, str], list[int]] = {}
    places: dict[tuple[str, str], str] = {}
    for name in names:
        found = _varying_number(name, names)
        if found is None:
            places[name, ""] = name
            continue
        key = (name[: found.start()], name[found.end() :])
        runs.setdefault(key, []).append(int(found.group()))
        places.setdefault(key, "")
    return ", ".join(f"{key[0]}{_ranges(runs[key])}{key[1]}" if key in runs else alone for key, alone in places.items())


def _varying_number(name: str, names: Sequence[str]) -> re.Match[str] | None:
    """Return the match of the number in ``name`` that varies between names; ``None`` if no number does.

    It is the first number in ``name`` whose replacement by another number gives one of ``names``.
    """
    for found in _NUMBER.finditer(name):
        before, after = name[: found.start()], name[found.end() :]
        pattern = re.compile(re.escape(before) + r"\d+" + re.escape(after))
        if any(other != name and pattern.fullmatch(other) for other in names):
            return found
    return None


def _ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as text with ranges: ``[0, 1, 2, 5]`` becomes ``0–2,5``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts)


def group_holders(holders: Sequence[Holder]) -> list[tuple[str, int]]:
    """Sum up rows of a table about memory: return (label, bytes), largest first. Holders (tensors that take memory) whose
    labels differ only in numbers become one row.

    Example:
        >>> group_holders([Holder(label="layers.0::mm#1", bytes=2), Holder(label="layers.1::mm#1", bytes=2)])
        [('layers.0::mm#1 (2 alike)', 4)]
    """
    groups: dict[str, list[Holder]] = {}
    for holder in holders:
        groups.setdefault(kind_of(holder.label), []).append(holder)
    rows = []
    for members in groups.values():
        label = members[0].label if len(members) == 1 else f"{members[0].label} ({len(members)} alike)"
        rows.append((label, sum(member.bytes for member in members)))
    return sorted(rows, key=lambda row: -row[1])


def with_rest(rows: Sequence[tuple[str, int]], most: int) -> list[tuple[str, int]]:
    """Return the first ``most`` rows of (label, bytes) in plain words, and one more row with the sum of the remaining rows."""
    named = [(plain_name(label), size) for label, size in rows[:most]]
    rest = [size for _, size in rows[most:]]
    return [*named, (f"{len(rest)} others", sum(rest))] if rest else named


def name_largest(rows: Sequence[tuple[str, int]], most: int = 3) -> str:
    """Return a text with the first ``most`` rows of (label, bytes), and the sum of the others.

    For example: ``4.1 GiB parameters; 0.4 GiB in other tensors``.
    """
    named = [f"{format_bytes(size)} {plain_name(label)}" for label, size in rows[:most]]
    rest = sum(size for _, size in rows[most:])
    return "; ".join([*named, f"{format_bytes(rest)} in other tensors"] if rest else named)


def region_in_label(label: str, regions: Iterable[str]) -> str:
    """Return the name of the region that a tensor's label belongs to, or an empty string if no region matches.

    With regions ``layers.0`` and ``layers.1``, the label ``layers.1.mlp::mul#0`` belongs to ``layers.1``, and
    ``layers.10::add#0`` to none.
    """
    inside = (name for name in regions if label.startswith((f"{name}.", f"{name}:", f"{name} ")))
    return max(inside, key=len, default="")


def kind_of(region: str) -> str:
    """Return the name of a region with its numbers replaced by ``*``, so that equal blocks have equal names."""
    return re.sub(r"\d+", "*", region)
