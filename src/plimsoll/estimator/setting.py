"""The setting of an estimate, apart from the model and its micro-batch, and the optimizer that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from plimsoll.artifacts.job import Layout, Precision, Techniques
from plimsoll.artifacts.memory_use import OptimizerUse, StepForm
from plimsoll.artifacts.trace import TraceParameter
from plimsoll.estimator.budget import has_caching_allocator
from plimsoll.estimator.optimizers import has_fused_form, optimizer_use
from plimsoll.estimator.parallelism.units import HeldTypes, in_f32
from plimsoll.planning.costing.devices import Device
from plimsoll.planning.sending import Sending
from plimsoll.planning.strategies import uses_link

AUTO, NOTHING, EVERYTHING = "auto", "none", "full"
"""Names of the strategies that this package treats specially. ``AUTO`` solves a plan, ``NOTHING`` recomputes nothing and keeps
everything, ``EVERYTHING`` recomputes everything.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Data: the options of an estimate other than the model and its micro-batch: device, layout, optimizer, strategy, budget
    and techniques.

    ``optimizer`` is ``None`` for a job without an optimizer.
    """

    device: Device
    layout: Layout
    optimizer: str | None
    has_master_weights: bool
    strategy: str
    budget_bytes: int | None
    precision: Precision | None = None
    how: Techniques = field(default_factory=Techniques)
    sending: Sending | None = None
    """Which of the values that ``strategy`` keeps are offloaded to the host, if a training framework's own switches offload.

    ``None`` if no such switch is set.
    """

    @property
    def held(self) -> HeldTypes:
        """Return which tensors (parameters, gradients) a rank holds or reduces in another dtype than the dtype that the model
        computes in.
        """
        on_host = "parameters" in self.how.on_host
        if self.precision is Precision.FSDP_BF16:
            return HeldTypes(shards=True, reduced=self.how.reduce != "bf16", gradients=True, on_host=on_host)
        is_wide = bool(self.how.gradients)
        return HeldTypes(
            reduced=is_wide, gradients=is_wide, on_host=on_host, own_gradients=self.how.gradients == "both"
        )

    @property
    def is_sending(self) -> bool:
        """Whether activations may be offloaded to the host."""
        return "activations" in self.how.on_host or uses_link(self.strategy)

    @property
    def is_gpu(self) -> bool:
        """Whether the device has a caching allocator and runs optimizers over all parameters at once."""
        return has_caching_allocator(self.device)


def optimizer_of(setting: Setting, parameters: Sequence[TraceParameter]) -> OptimizerUse | None:
    """Return the memory and work of the setting's optimizer for one rank's parameters, or ``None`` without an optimizer."""
    if setting.optimizer is None:
        return None
    is_early = setting.how.optimizer_in_backward

    def use(updated: Sequence[TraceParameter]) -> OptimizerUse:
        return optimizer_use(
            setting.optimizer or "",
            updated,
            form=None if setting.is_gpu and not is_early else StepForm.LOOP,
            has_master_weights=setting.has_master_weights,
            gradient_item_bytes=4 if setting.held.gradients else 0,
            is_flat=setting.layout.zero == 1,
        )

    found = use(parameters)
    if is_early and parameters:  # one optimizer per parameter: its temporaries are freed before the next one steps
        alone = use([max(parameters, key=lambda parameter: parameter.bytes * parameter.is_trainable)])
        found = replace(found, temporaries=alone.temporaries)
    if "optimizer" not in setting.how.on_host:
        return found
    if has_fused_form(setting.optimizer):  # as DeepSpeed's CPU Adam and torchao's CPUOffloadOptimizer run it
        fused = optimizer_use(
            setting.optimizer,
            parameters,
            form=StepForm.FUSED,
            has_master_weights=setting.has_master_weights,
            gradient_item_bytes=4 if setting.held.gradients else 0,
        )
        found = replace(found, moved_bytes=fused.moved_bytes)
    return _on_host(found, parameters, setting.held)


def _on_host(use: OptimizerUse, parameters: Sequence[TraceParameter], held: HeldTypes) -> OptimizerUse:
    """Return the same optimizer, but with its state on the host, where its step then runs.

    Gradients are sent to the host, and weights come back.
    """
    trained = [parameter for parameter in parameters if parameter.is_trainable]
    gradients = sum((in_f32(each) if held.gradients else each).bytes for each in trained)
    return replace(
        use,
        state_bytes={},
        master_bytes={},
        host_state_bytes=use.host_state_bytes + use.total_state_bytes + use.total_master_bytes,
        temporaries=(),
        moved_bytes=0,
        flops=0,
        host_bytes=use.moved_bytes,
        link_bytes=use.link_bytes + (0 if held.on_host else gradients + sum(each.bytes for each in trained)),
        notes=(
            *use.notes,
            "the host holds the optimizer state and runs the step for all ranks of a node; "
            + (
                "it also holds shards and their gradients"
                if held.on_host
                else "gradients stay on the device until then"
            ),
        ),
    )
