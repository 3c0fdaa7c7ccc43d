"""Which optimizers may step in chunks is found from what their steps do."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from plimsoll.engine.optimizer_state.by_parameter import check_steps_by_parameter
from plimsoll.errors import InvalidOption


class Own(optim.Optimizer):
    """A base class for optimizers of a user: each keeps ``m`` for each parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.begin()
        for group in self.param_groups:
            self.begin_group(group)
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["m"] = torch.zeros_like(parameter)
                self.update(group, parameter, state["m"])

    def begin(self):
        pass

    def begin_group(self, group):
        pass

    def update(self, group, parameter, m):
        parameter.sub_(torch.sign(m * 0.9 + parameter.grad * 0.1), alpha=group["lr"])
        m.mul_(0.99).add_(parameter.grad, alpha=0.01)


class GlobalNorm(Own):
    def begin(self):
        self.norm = sum(p.grad.norm() for group in self.param_groups for p in group["params"])

    def update(self, group, parameter, m):
        parameter.sub_(m.add_(parameter.grad / self.norm))


class Counting(Own):
    """Its group counts the steps, as in Prodigy and in schedule-free optimizers."""

    def begin_group(self, group):
        group["k"] = group.get("k", 0) + 1

    def update(self, group, parameter, m):
        parameter.sub_(m.add_(parameter.grad) / group["k"])


class CountingQuietly(Counting):
    def update(self, group, parameter, m):
        parameter.sub_(m.add_(parameter.grad))


class Noisy(Own):
    def update(self, group, parameter, m):
        parameter.sub_(m.add_(torch.randn_like(m)))


class Shared(Own):
    def begin(self):
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1


def parameters(*shapes, **options):
    return [nn.Parameter(torch.randn(shape, **options)) for shape in shapes or [(8, 8), (8, 4), (8,), (8, 8)]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.SGD(parameters(), momentum=0.9, nesterov=True),
        lambda: optim.Adam(parameters(), amsgrad=True),
        lambda: optim.AdamW(parameters(), foreach=True),
        lambda: optim.AdamW(parameters(), fused=True),
        lambda: optim.AdamW(parameters(), lr=torch.tensor(0.1)),
        lambda: optim.AdamW(parameters(dtype=torch.bfloat16)),
        lambda: optim.AdamW([{"params": parameters()}, {"params": parameters((4, 4)), "lr": 0.5}]),
        lambda: optim.NAdam(parameters()),
        lambda: optim.RAdam(parameters()),
        lambda: optim.Adagrad(parameters()),
        lambda: optim.Adafactor(parameters()),
        lambda: optim.Muon(parameters((8, 8), (8, 4))),
        lambda: Own(parameters()),
    ],
)
def test_optimizers_that_step_each_parameter_by_itself_pass_and_do_not_change(make):
    optimizer = make()
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    keys = {key: list(state) for key, state in optimizer.state.items()}
    random = torch.get_rng_state()

    check_steps_by_parameter(optimizer)

    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(map(torch.equal, before, after))
    assert {key: list(state) for key, state in optimizer.state.items()} == keys
    assert "step" not in vars(optimizer)
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (optim.LBFGS, "closure"),
        (optim.SparseAdam, "dense gradients"),
        (GlobalNorm, "differs"),
        (Counting, "differs"),
        (CountingQuietly, "entries of its parameter groups differ"),
        (Noisy, "differs"),
        (Shared, "belongs to no parameter"),
    ],
)
def test_optimizers_with_more_than_one_parameter_in_a_step_are_refused_in_words(make, why):
    with pytest.raises(InvalidOption, match="cannot run in chunks") as refusal:
        check_steps_by_parameter(make(parameters()))
    assert why in refusal.value.why
    assert "AdamW" in refusal.value.next


def test_real_parameters_are_not_copied():
    weight = nn.Parameter(torch.empty(10**6, 10**6, device="meta"))
    check_steps_by_parameter(optim.AdamW([weight]))
