"""State and temporaries of optimizers, counted from shapes, against torch's own optimizers, traced and run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import nn

from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.memory_use import OptimizerUse, StepForm
from plimsoll.artifacts.trace import TraceParameter
from plimsoll.errors import InvalidOption, UnknownOptimizer
from plimsoll.estimator.optimizers import known_optimizers, optimizer_use
from plimsoll.tracing.meters.memory import PeakMeter
from plimsoll.tracing.optimizer import OptimizerLog, trace_optimizer
from plimsoll.tracing.recorder.opkey import dtype_name
from plimsoll.tracing.torch_internals import is_at_least
from samples import filled

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SHAPES = ((128, 64), (64,), (64, 128), (128,), (3, 48, 40), (8, 3, 5, 5), (96, 100), (64, 64))
TORCH: dict[str, Make] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "muon": torch.optim.Muon,
}
FUSED = ("sgd", "sgd-momentum", "adam", "adamw", "adagrad")
FORMS = [(name, form) for name in TORCH for form in (StepForm.LOOP, StepForm.FOREACH)]
FORMS += [(name, StepForm.FUSED) for name in FUSED]


class Shapes(nn.Module):
    """Nothing but parameters, of a dtype that their place decides."""

    def __init__(self, shapes: Iterable[tuple[int, ...]], dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> None:
        super().__init__()
        for position, shape in enumerate(shapes):
            dtype = dtypes[position % len(dtypes)]
            self.register_parameter(f"weight{position}", nn.Parameter(torch.randn(shape, dtype=dtype)))


def model_for(name: str, *dtypes: torch.dtype) -> Shapes:
    return Shapes([s for s in SHAPES if name != "muon" or len(s) == 2], dtypes or (torch.float32,))


def described(model: nn.Module) -> list[TraceParameter]:
    return [
        filled(
            TraceParameter,
            name=name,
            shape=tuple(p.shape),
            dtype=dtype_name(p.dtype),
            bytes=p.nbytes,
            is_trainable=p.requires_grad,
        )
        for name, p in model.named_parameters()
    ]


def with_form(make: Make, form: StepForm) -> Make:
    if make is torch.optim.Muon:
        return make
    options = {"fused": True} if form is StepForm.FUSED else {"foreach": form is StepForm.FOREACH}
    return partial(make, **options)


def traced(name: str, form: StepForm, model: nn.Module) -> OptimizerLog:
    optimizer = with_form(TORCH[name], form)(model.parameters())
    return trace_optimizer(optimizer, model, frozenset(), on_gpu=False)


def peak_of(log: OptimizerLog) -> int:
    tracer = log.tracer
    change = [0] * (tracer.tick + 1)
    for storage, born in tracer.born.items():
        if born >= 0:
            change[born] += tracer.first_value(storage).bytes
            change[tracer.dies.get(storage, tracer.tick)] -= tracer.first_value(storage).bytes
    level = peak = 0
    for each in change:
        level += each
        peak = max(peak, level)
    return peak


def counted(use: OptimizerUse) -> int:
    return use.total_state_bytes + use.host_state_bytes


F32, MIXED = (torch.float32,), (torch.bfloat16, torch.float32)
CASES = [(name, form, F32) for name, form in FORMS]
CASES += [(name, form, MIXED) for name, form in FORMS if name in ("adamw", "adagrad", "adafactor", "muon")]


@pytest.mark.parametrize(("name", "form", "dtypes"), CASES)
def test_state_and_highest_moment_are_those_of_torchs_own_optimizer(
    name: str, form: StepForm, dtypes: tuple[torch.dtype, ...]
):
    model = model_for(name, *dtypes)
    log = traced(name, form, model)
    use = optimizer_use(name, described(model), form=form)
    assert counted(use) == sum(log.tracer.first_value(storage).bytes for storage in log.states)
    assert use.temporary_bytes == peak_of(log)
    # One entry per tensor: what an allocator would be asked for.
    largest = max((p.numel() * p.element_size() for p in model.parameters()), default=0)
    assert all(temporary.bytes <= largest for temporary in use.temporaries)
    assert use.basis is Basis.EXACT
    assert use.relative_error == 0


@pytest.mark.parametrize("dtype", MIXED)
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_traffic_and_arithmetic_of_a_step_are_those_of_its_ops(name: str, form: StepForm, dtype: torch.dtype):
    model = model_for(name, dtype)
    log = traced(name, form, model)
    specs = [log.tracer.specs[op.cost_key] for op in log.tracer.ops]
    use = optimizer_use(name, described(model), form=form)
    # Since torch 2.15 Muon copies gradients that are in bfloat16 already; what is written down is torch 2.13's.
    copies = name == "muon" and dtype is torch.bfloat16 and is_at_least(2, 15)
    assert use.moved_bytes == pytest.approx(sum(spec.moved_bytes for spec in specs), rel=0.04 if copies else 0.02)
    if form is not StepForm.FUSED:  # one op, of which nobody tells how much it computes
        assert use.flops == pytest.approx(sum(spec.flops for spec in specs), rel=0.02)


@pytest.mark.parametrize("name", sorted(TORCH))
@pytest.mark.parametrize("form", [StepForm.LOOP, StepForm.FOREACH])
def test_a_real_step_takes_what_was_counted(name: str, form: StepForm):
    model = Shapes([(96, 200), (200, 96), (96, 96)])
    optimizer = with_form(TORCH[name], form)(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state_bytes = sum(t.untyped_storage().nbytes() for s in optimizer.state.values() for t in s.values())
    with PeakMeter("cpu") as meter:
        optimizer.step()
    use = optimizer_use(name, described(model), form=form)
    assert counted(use) == state_bytes
    # Beside what was counted there are only scalars, and on the CPU what Muon's products in bf16 take inside: where the
    # processor multiplies in bf16 or has tiles for it, copies of the operands.
    inside_bytes = 2 * 2 * 96 * 200 if name == "muon" else 64
    assert -64 <= meter.peak_bytes - use.temporary_bytes <= inside_bytes


def test_small_tensors_stay_in_32_bits_beside_8bit_states():
    parameters = described(Shapes([(64, 64), (63, 64), (513, 100)]))
    use = optimizer_use("adamw-8bit", parameters)
    # Compared with bitsandbytes 0.50.2: state1, state2 of one byte; absmax1, absmax2 of 16 and 201 blocks.
    assert use.state_bytes == {
        "weight0": 2 * (4096 + 16 * 4),
        "weight1": 2 * 63 * 64 * 4,
        "weight2": 2 * (51300 + 201 * 4),
    }
    assert use.temporaries == ()
    assert use.basis is Basis.MODELLED
    assert use.relative_error == pytest.approx(2048 / use.total_state_bytes)


def test_lion_keeps_one_moment_and_makes_two_copies_of_one_parameter():
    use = optimizer_use("lion", described(Shapes([(100, 10), (30, 10)])))
    assert use.total_state_bytes == 4 * 1300
    assert use.temporary_bytes == 2 * 4000


def test_lamb_has_two_moments_and_makes_its_update_in_the_gradients_place():
    weight = TraceParameter(name="w", shape=(64, 32), dtype="f32", bytes=8192, storage=0)
    use = optimizer_use("FusedLAMB", [weight])
    assert use.name == "lamb"
    assert use.form is StepForm.FUSED
    assert (use.total_state_bytes, use.temporary_bytes) == (2 * 8192, 0)
    # Gradients read for their norm; four read and three written for the update; both norms; weights and updates to new weights.
    assert use.moved_bytes == (1 + 7 + 2 + 3) * 8192


def test_muon_leaves_embeddings_heads_and_vectors_to_adamw():
    module = nn.ModuleDict({"embed_tokens": nn.Embedding(50, 8), "up": nn.Linear(8, 16), "lm_head": nn.Linear(8, 50)})
    use = optimizer_use("muon", described(module))
    assert use.state_bytes["up.weight"] == 4 * 128
    assert use.state_bytes["embed_tokens.weight"] == 2 * 4 * 400
    assert use.state_bytes["lm_head.weight"] == 2 * 4 * 400
    assert use.state_bytes["up.bias"] == 2 * 4 * 16
    assert "embed_tokens.weight, up.bias, lm_head.weight and 1 more" in use.notes[-1]


def test_muon_updates_the_output_layers_inside_of_blocks():
    block = nn.ModuleDict({"output": nn.ModuleDict({"dense": nn.Linear(16, 8, bias=False)})})
    module = nn.ModuleDict({"layers": nn.ModuleList([block]), "output": nn.Linear(8, 50, bias=False)})
    use = optimizer_use("muon", described(module))
    assert use.state_bytes["layers.0.output.dense.weight"] == 4 * 128
    assert use.state_bytes["output.weight"] == 2 * 4 * 400


def test_master_weights_are_f32_copies_of_what_is_not_f32():
    model = Shapes([(32, 32), (16,)], (torch.bfloat16, torch.float32))
    use = optimizer_use("adamw", described(model), has_master_weights=True)
    assert use.master_bytes == {"weight0": 4 * 1024}
    assert use.state_bytes == {"weight0": 8 * 1024, "weight1": 8 * 16}
    assert [(each.label, each.bytes) for each in use.temporaries] == [
        ("denominators", 4 * 1024),
        ("denominators", 4 * 16),
        ("gradients in f32", 4 * 1024),
    ]
    assert use.basis is Basis.ASSUMED
    assert 0 < use.relative_error < 0.3


def test_frozen_parameters_have_no_state():
    model = Shapes([(32, 32), (16,)])
    model.weight0.requires_grad_(False)
    assert optimizer_use("adam", described(model)).state_bytes == {"weight1": 8 * 16}


@pytest.mark.parametrize(
    ("spelling", "name", "form"),
    [
        ("AdamW", "adamw", StepForm.FOREACH),
        ("torch.optim.SGD", "sgd", StepForm.FOREACH),
        ("adamw_torch_fused", "adamw", StepForm.FUSED),
        ("adamw_bnb_8bit", "adamw-8bit", StepForm.FUSED),
        ("paged_adamw_8bit", "paged-adamw-8bit", StepForm.FUSED),
        ("AdamW4bit", "adamw-4bit", StepForm.FUSED),
        ("SGD momentum", "sgd-momentum", StepForm.FOREACH),
        ("lion", "lion", StepForm.LOOP),
    ],
)
def test_optimizers_are_known_by_the_names_that_people_use(spelling: str, name: str, form: StepForm):
    use = optimizer_use(spelling, described(Shapes([(8, 8)])))
    assert (use.name, use.form) == (name, form)


@pytest.mark.parametrize("spelling", ["adamm", "paged_adamw_4bit", "shampoo", ""])
def test_an_unknown_optimizer_shows_the_closest_names(spelling: str):
    with pytest.raises(UnknownOptimizer) as caught:
        optimizer_use(spelling, [])
    assert all(name in caught.value.why for name in known_optimizers())
    assert ("adamw" in caught.value.next) == ("adam" in spelling)


def test_a_form_that_an_optimizer_lacks_is_refused():
    with pytest.raises(InvalidOption, match="adafactor does not have a fused implementation"):
        optimizer_use("adafactor", [], form=StepForm.FUSED)
