"""What a trace says about the model's parameters."""

from __future__ import annotations

import torch

from plimsoll.artifacts.trace import Category
from plimsoll.tracing.trace import trace


def test_every_parameter_is_listed_with_shape_storage_and_whether_it_is_trained():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False))
    model[1].weight.requires_grad_(requires_grad=False)
    step = trace(model, torch.ones(5, 4), loss=torch.sum)
    assert [(p.name, p.shape, p.dtype, p.bytes, p.is_trainable) for p in step.parameters] == [
        ("0.weight", (3, 4), "f32", 48, True),
        ("0.bias", (3,), "f32", 12, True),
        ("1.weight", (2, 3), "f32", 24, False),
    ]
    storages = [step.storages[p.storage] for p in step.parameters]
    assert all(storage.category is Category.PARAMETER for storage in storages)
    assert [storage.label for storage in storages] == ["parameter:0.weight", "parameter:0.bias", "parameter:1.weight"]


def test_a_tied_parameter_is_listed_once_with_its_other_names():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    step = trace(model, torch.ones(2, 4), loss=torch.sum)
    assert [(p.name, p.aliases) for p in step.parameters] == [("0.weight", ("1.weight",))]
