"""Parameters whose memory changes between calls, or between forward and backward: gradients stay right, memory is freed."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import GPT2Config, GPT2LMHeadModel

import plimsoll
from contracts.harness import assert_unchanged, batch, manage, plain_step, stack_of, weigh
from long_cases import some


def dropping():
    return stack_of(lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.2)), count=2)


@contextlib.contextmanager
def averaged(model):
    """Train with the average of the weights and what they are moved by."""
    own = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.75
    yield
    for parameter, data in zip(model.parameters(), own, strict=True):
        parameter.data = data


def under_averages(model, index):
    with averaged(model):
        loss = weigh(model(batch(index)))
    loss.backward()
    return loss


def flattened_in_mid_run(model, index):
    if index == 2:
        vector_to_parameters(parameters_to_vector(model.parameters()).detach(), model.parameters())
    return plain_step(model, index)


def moved_in_one_storage(model, index):
    """Two buffers by turns, as loops have them that load the next weights while these are in use."""
    halves = torch.stack([parameters_to_vector(model.parameters()).detach()] * 2)
    vector_to_parameters(halves[index % 2], model.parameters())
    return plain_step(model, index)


def moved_before_backward(model, index):
    loss = weigh(model(batch(index)))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    loss.backward()
    return loss


STEPS = [under_averages, flattened_in_mid_run, moved_in_one_storage, moved_before_backward]


@pytest.mark.filterwarnings("ignore:plimsoll")
@pytest.mark.parametrize("boundaries", [(), (1,)], ids=["", "linked"])
@pytest.mark.parametrize("step", STEPS)
def test_parameters_with_other_memory_keep_every_bit(step, boundaries):
    assert_unchanged(dropping(), step, steps=6, boundaries=boundaries)


def test_no_memory_of_parameters_is_held_between_steps():
    torch.manual_seed(0)
    model = dropping()()
    with manage(model):
        for index in range(3):
            plain_step(model, index)
        old = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
            parameter.grad = None
        gc.collect()
        assert all(reference.expired() for reference in old)


@pytest.mark.parametrize("drops", some([0.0, 0.1], 1))
def test_a_gpt2_whose_weights_are_perturbed_for_forward_has_right_gradients_at_its_floor(drops):
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = drops
    plain = GPT2LMHeadModel(config).train()
    managed = copy.deepcopy(plain)
    ids = torch.randint(0, 64, (2, 16))
    inputs = {"input_ids": ids, "labels": ids}

    def gradients(model):
        found = []
        for index in range(4):
            torch.manual_seed(index)
            with averaged(model):
                loss = model(**inputs).loss
            loss.backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
        return found

    expected = gradients(plain)
    plan = plimsoll.plan(managed, inputs, strategy="full")
    with plimsoll.apply(managed, plan):
        assert all(torch.equal(one, other) for one, other in zip(expected, gradients(managed), strict=True))
