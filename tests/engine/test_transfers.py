"""Transfers between regions: when they end, when they begin again, what they free, and who may stay on the way."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from contracts.harness import Block, Stack, assert_unchanged, batch, differences, manage, train, weigh
from engine.models import Births, Through, region_plan, step_on
from engine.offload.simulated import SimulatedLink
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import ValueDecision
from plimsoll.engine.apply import apply_plan
from plimsoll.engine.codecs.registry import find_codec
from plimsoll.engine.offload.disk import DiskLink
from plimsoll.errors import OffloadFailed
from plimsoll.tracing.meters.memory import PeakMeter
from samples import make_plan

pytestmark = pytest.mark.usefixtures("without_the_collector")

WIDTH, ROWS = 64, 128
WIDE = ROWS * 2 * WIDTH * 4
"""Bytes of what ``up`` makes."""


def build(count=3):
    torch.manual_seed(0)
    return Stack(*(Block(nn.Identity(), WIDTH) for _ in range(count)), width=WIDTH)


def big(index=0):
    return batch(index, ROWS, 8)


STEP = step_on(big)


@dataclass
class Diary:
    """What happened, in order."""

    lines: list[str] = field(default_factory=list)

    def watch(self, model):
        """Note when each block's forward ends and when its backward begins."""
        for index, block in enumerate(model.blocks):
            block.register_forward_hook(lambda *_, i=index: self.lines.append(f"forward {i} ended"))
            block.register_full_backward_pre_hook(lambda *_, i=index: self.lines.append(f"backward {i} begins"))


class SpyLink:
    """A simulated link that keeps a diary; its tensors are numbered as they come."""

    def __init__(self, diary, **settings):
        self.name = "spied"
        self.inner = SimulatedLink(**settings)
        self.count = 0
        self.sources = []
        self._diary = diary

    def store(self, tensor):
        self.sources.append(StorageWeakRef(tensor.untyped_storage()))
        number, self.count = self.count, self.count + 1
        self._diary.lines.append(f"store {number}")
        return SpyTicket(self._diary, number, self.inner.store(tensor))


class SpyTicket:
    def __init__(self, diary, number, inner):
        self._diary, self._number, self._inner = diary, number, inner

    def settle(self):
        self._diary.lines.append(f"settle {self._number}")
        self._inner.settle()

    def prefetch(self):
        self._diary.lines.append(f"prefetch {self._number}")
        self._inner.prefetch()

    def read(self):
        self._diary.lines.append(f"read {self._number}")
        return self._inner.read()


def spied(steps=1):
    """A model that has run ``steps`` steps with what ``up`` makes over a spied link."""
    model, diary = build(), Diary()
    link = SpyLink(diary)
    handle = manage(model, packs={"up::": "spied"}, kept=("",), link=link)
    for index in range(steps):
        weigh(model(big(index))).backward()
    model.zero_grad()
    diary.lines.clear()
    link.count = 0
    link.sources.clear()
    return model, diary, link, handle


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_region_s_tensors_settle_when_the_next_one_returns_and_come_back_when_its_backward_begins(steps):
    model, diary, _, handle = spied(steps)
    handle.remove()
    diary.watch(model)
    with manage(model, packs={"up::": "spied"}, kept=("",), link=SpyLink(diary)):
        for index in range(steps):
            weigh(model(big(index))).backward()
        diary.lines.clear()
        loss = weigh(model(big(5)))
        forward = [line.rsplit(" ", 1)[0] if "forward" not in line else line for line in diary.lines]
        diary.lines.clear()
        loss.backward()
    # The wrapper is the module's forward, so it is through before the module's own hook is called.
    assert ", ".join(forward) == (
        "store, forward 0 ended, settle, store, forward 1 ended, settle, store, forward 2 ended"
    )
    base = 3 * steps
    assert diary.lines == [
        "backward 2 begins",
        f"prefetch {base + 1}",
        f"read {base + 2}",
        "backward 1 begins",
        f"prefetch {base}",
        f"read {base + 1}",
        "backward 0 begins",
        f"read {base}",
    ]


def test_sources_are_freed_when_the_next_region_returns():
    model, _, link, _ = spied()
    freed = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: freed.append([source.expired() for source in link.sources]))
    loss = weigh(model(big()))
    assert freed == [[False], [True, False], [True, True, False]]
    loss.backward()
    assert all(source.expired() for source in link.sources)


def test_nothing_is_fetched_that_nobody_waits_for():
    def cut(blocks, x):
        """No gradient reaches what is before the last block."""
        return blocks[2](blocks[1](blocks[0](x)).detach())

    model, diary = Through(*build().blocks, way=cut, width=WIDTH), Diary()
    link = SpyLink(diary)
    with manage(model, packs={"up::": "spied"}, kept=("",), link=link):
        for index in range(2):
            weigh(model(big(index))).backward()
    assert not [line for line in diary.lines if "prefetch" in line]
    assert [line for line in diary.lines if "read" in line] == ["read 2", "read 5"]
    assert link.inner.resident_bytes == 0


def test_a_graph_that_is_thrown_away_takes_its_tensors_with_it():
    model, diary, link, _ = spied()
    loss = weigh(model(big()))
    assert link.inner.resident_bytes == 3 * WIDE
    del loss
    assert link.inner.resident_bytes == 0
    assert all(source.expired() for source in link.sources)
    assert not [line for line in diary.lines if "prefetch" in line or "read" in line]


def test_a_second_backward_fetches_again():
    model, diary, link, _ = spied()
    loss = weigh(model(big()))
    diary.lines.clear()
    loss.backward(retain_graph=True)
    first = list(diary.lines)
    diary.lines.clear()
    loss.backward()
    assert diary.lines == first
    assert link.inner.resident_bytes == 0


def test_a_region_without_gradients_in_front_is_read_all_the_same():
    def frozen():
        model = build()
        for part in (model.entrance, model.blocks[0]):
            part.requires_grad_(False)
        return model

    assert_unchanged(frozen, STEP, steps=2, engine=None, packs={"": "simulated"}, link=SimulatedLink())


def offloading(region):
    return region_plan(region, ValueDecision(value="up::addmm#0", decision=Decision.OFFLOAD, bytes=WIDE, form="disk"))


def test_removing_while_a_graph_is_unfinished_keeps_its_tensors_and_lets_the_link_go_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("plimsoll.engine.offload.disk.is_in_memory", lambda directory: False)
    plain, model = build(), build()
    expected = train(plain, STEP, 1)[0]
    plan = make_plan(regions=tuple(offloading(f"blocks.{i}") for i in range(3)), link="disk")
    handle = apply_plan(model, plan)
    link = weakref.ref(handle._shared.packer._link)
    assert link().directory == str(tmp_path)
    loss = weigh(model(big()))
    handle.remove()
    del handle
    copied = copy.deepcopy(model)
    names = model.state_dict().keys()
    assert names == plain.state_dict().keys()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[f"gradient {name}"])
    del loss
    assert link() is None
    assert not list(tmp_path.iterdir())
    del copied


def test_a_region_that_only_hides_transfers_ends_them():
    """The plan leaves the middle region untouched; what the first one sent settles when it returns all the same."""
    model, diary = build(), Diary()
    diary.watch(model)
    regions = (offloading("blocks.0"), region_plan("blocks.1"), region_plan("blocks.2"))
    with apply_plan(model, make_plan(regions=regions, link="disk"), link=SpyLink(diary)):
        for _ in range(2):
            diary.lines.clear()
            weigh(model(big())).backward()
            start = [line.rstrip("01 ") if "forward" not in line else line for line in diary.lines[:4]]
            assert start == ["store", "forward 0 ended", "settle", "forward 1 ended"]
            before = diary.lines.index("backward 1 begins")
            assert diary.lines[before + 1].startswith("prefetch")


FAULTS = {
    "no room in the steady call": (1, {"fail_store": {4}}),
    "no room in the recording call": (0, {"fail_store": {1}}),
    "a copy-out fails in the steady call": (1, {"fail_settle": {4}}),
    "a copy-out fails in the recording call": (0, {"fail_settle": {0}}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_transfer_that_fails_ends_the_step_leaks_nothing_and_the_next_step_is_right(fault):
    before, settings = FAULTS[fault]
    plain, model = build(), build()
    expected = train(plain, STEP, 1)
    link = SimulatedLink(**settings)
    with manage(model, packs={"up::": "simulated"}, link=link):
        for _ in range(before):
            weigh(model(big(3))).backward()
        model.zero_grad()
        parameters = copy.deepcopy(model.state_dict())
        with Births() as births, pytest.raises(OffloadFailed):
            model(big())
        assert all(torch.equal(parameters[name], value) for name, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        gc.collect()  # the error's traceback
        assert link.resident_bytes == 0
        assert all(size < WIDE for _, size in births.alive)
        assert differences(expected, train(model, STEP, 1)) == []


def test_a_copy_in_that_fails_ends_the_step_and_the_next_one_is_right():
    plain, model = build(), build()
    expected = train(plain, STEP, 1)
    link = SimulatedLink(fail_load={1, 2, 3, 4})
    with manage(model, packs={"up::": "simulated"}, link=link):
        for _ in range(4):
            loss = weigh(model(big()))
            with pytest.raises(OffloadFailed):
                loss.backward()
            del loss
            model.zero_grad()
            gc.collect()
            assert link.resident_bytes == 0
        assert differences(expected, train(model, STEP, 1)) == []


def test_the_same_graph_may_be_tried_again_when_a_copy_in_has_failed():
    plain, model = build(), build()
    expected = train(plain, STEP, 1)[0]
    with manage(model, packs={"up::": "simulated"}, link=SimulatedLink(fail_load={1})):
        loss = weigh(model(big()))
        with pytest.raises(OffloadFailed):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[f"gradient {name}"])


def test_a_failed_copy_out_that_nobody_settles_is_read_from_its_source():
    plain, model = build(), build()
    expected = train(plain, STEP, 2)
    with manage(model, packs={"": "simulated"}, link=SimulatedLink(fail_settle=range(18, 99))) as handle:
        handle._shared.transfers.leave = lambda output: None
        assert differences(expected, train(model, STEP, 2)) == []


def held_bytes(model, index):
    """What is held between forward and backward, and the step's gradients."""
    with PeakMeter("cpu") as meter:
        meter.mark("forward")
        loss = weigh(model(big(index)))
        meter.mark("backward")
        loss.backward()
    del loss
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return meter.window("forward").resident_bytes, gradients


@pytest.mark.parametrize("form", ["int8", "bf16", "disk"])
def test_what_is_held_until_backward_falls_by_what_the_payload_saves(form, tmp_path):
    payload = 0 if form == "disk" else find_codec(form).payload_bytes(WIDE // 4, torch.float32)
    model = build()
    held_bytes(model, 0)
    plain, _ = held_bytes(model, 1)
    with DiskLink(str(tmp_path)) as link, manage(model, packs={"up::": form}, kept=("",), link=link):
        held_bytes(model, 0)
        for index in range(2):
            packed, _ = held_bytes(model, index)
            away = 2 if form == "disk" else 3  # the last region's source is held: no region follows
            assert abs((plain - packed) - away * (WIDE - payload)) < 0.02 * WIDE
