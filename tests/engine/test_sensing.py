"""The sensor: it sees what forms take and lose, the step that it watches is the unmanaged one, and it leaves nothing."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from contracts.harness import Block, Stack, batch, differences, equal_bits, manage, weigh
from engine.watching import gradients_of, region, watch
from plimsoll.engine.apply import apply_plan
from plimsoll.engine.codecs.registry import find_codec
from plimsoll.engine.sensing import Sensor
from plimsoll.engine.stored_forms import whole_storage
from samples import make_plan

WIDTH = 64
NAMES = ["blocks.0", "blocks.1", "blocks.2"]


def build(inner=lambda: nn.Dropout(0.2)):
    torch.manual_seed(0)
    return Stack(*(Block(inner(), WIDTH) for _ in range(3)), width=WIDTH)


def big(index=0):
    return batch(index, 128, 8)


def sensor_of(*codecs, calls=NAMES):
    return Sensor(codecs, {(name, 0) for name in calls}, wants_sensitivity=True)


def sensed(model, sensor):
    return apply_plan(model, make_plan(regions=tuple(map(region, NAMES))), sensor=sensor)


def step(model):
    weigh(model(big())).backward()


def autocast_step(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = weigh(model(big()))
    loss.backward()


def accumulating_step(model):
    for index in range(2):
        weigh(model(big(index))).backward()


@pytest.mark.parametrize("each", [step, autocast_step, accumulating_step])
@pytest.mark.parametrize("inner", [lambda: nn.Dropout(0.2), nn.ReLU, lambda: nn.Softmax(-1)])
def test_a_watched_step_has_the_gradients_of_the_unmanaged_one(each, inner):
    watched = watch(build(inner), NAMES, each)
    assert differences([watched.plain], [watched.seen]) == []
    assert watched.values("blocks.1")


@pytest.mark.parametrize("boundaries", [(), (1, 2)])
def test_a_watched_step_that_rebuilds_everything_has_them_too(boundaries):
    model = build()
    plain = gradients_of(model, step)
    sensor = sensor_of("int8", "bits")
    with manage(model, boundaries=boundaries) as handle:
        for each in handle.regions.values():
            each._shared = dataclasses.replace(each._shared, sensor=sensor)
        found = gradients_of(model, step)
        sensor.close()
        assert all(outcome.dropped_bytes for outcome in handle.outcomes())
        assert differences([plain], [found]) == []
        assert differences([plain], [gradients_of(model, step)]) == []
    assert all(sensor.seen[name, 0]["up::addmm#0"].flow_error > 0 for name in NAMES)


def test_a_trial_says_what_the_codec_takes_and_loses():
    model = build()
    kept = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(len(kept), t.detach().clone()), lambda t: t
    )
    torch.manual_seed(5)
    with hooks:
        model(big())
    watched = watch(model, NAMES, step)
    entry = watched.values("blocks.0")["up::addmm#0"]
    value = next(t for t in kept.values() if t.shape == (128, 2 * WIDTH))
    whole = whole_storage(value)
    for name in ("int8", "int4", "bf16"):
        codec = find_codec(name)
        payload = codec.encode(whole)
        assert entry.trials[name].payload_bytes == payload.bytes
        noise = float((codec.decode(payload) - whole).norm() / whole.norm())
        assert entry.trials[name].noise == pytest.approx(noise, rel=1e-4)
    assert entry.count == whole.numel()
    assert entry.readers == {"GeluBackward0"}


def test_only_sampled_calls_are_tried_but_all_are_seen():
    model = build()
    sensor = sensor_of("int8", calls=["blocks.1"])
    with sensed(model, sensor):
        gradients_of(model, step)
        sensor.close()
    assert sensor.seen.keys() == {(name, 0) for name in NAMES}
    for name in NAMES:
        tried = [value for value, entry in sensor.seen[name, 0].items() if entry.trials]
        assert bool(tried) == (name == "blocks.1")
        assert all(entry.readers for entry in sensor.seen[name, 0].values())


def test_without_a_wish_for_sensitivity_no_node_runs_twice():
    watched = watch(build(), NAMES, step, wants_sensitivity=False)
    assert differences([watched.plain], [watched.seen]) == []
    entries = [entry for name in NAMES for entry in watched.values(name).values()]
    assert not any(entry.parameter_error or entry.flow_error for entry in entries)
    assert any(entry.trials for entry in entries)


def test_what_is_not_finite_is_not_taken_by_lossy_codecs():
    def poisoned(model):
        rows = big()
        rows[3, 3] = float("nan")
        weigh(model(rows)).backward()

    watched = watch(build(), NAMES, poisoned)
    assert all(equal_bits(watched.plain[name], watched.seen[name]) for name in watched.plain)
    assert watched.values("blocks.0")["up::addmm#0"].trials["int8"].payload_bytes is None


def test_a_step_that_fails_leaves_the_model_as_it_was():
    model = build()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    sensor = sensor_of("int8")
    hook = model.head.register_full_backward_pre_hook(lambda *_: 1 / 0)
    with sensed(model, sensor):
        with pytest.raises(ZeroDivisionError):
            step(model)
        sensor.close()
    hook.remove()
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    plain = build()
    assert differences([gradients_of(plain, step)], [gradients_of(model, step)]) == []


def test_nothing_is_left_on_the_graph_the_model_or_in_memory():
    model = build()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    sensor = sensor_of("int8")
    storages = []
    for block in model.blocks:
        block.up.register_forward_hook(lambda _, __, out: storages.append(StorageWeakRef(out.untyped_storage())))
    gc.collect()
    gc.disable()
    try:
        with sensed(model, sensor):
            loss = weigh(model(big()))
            trackers = [weakref.ref(tracker) for tracker in sensor._trackers.values()]
            loss.backward(retain_graph=True)
            sensor.close()
            found = copy.deepcopy(sensor.seen)
            assert all(tracker() is None for tracker in trackers)
            loss.backward()
            del loss
            assert all(storage.expired() for storage in storages)
    finally:
        gc.enable()
    again = [(entry.parameter_error, entry.flow_error) for seen in sensor.seen.values() for entry in seen.values()]
    assert again == [(e.parameter_error, e.flow_error) for seen in found.values() for e in seen.values()]
    for block in model.blocks:
        block.up._forward_hooks.clear()
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
