"""What models do besides computing, and what planning and checking leave of it: nothing."""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

import plimsoll
from contracts.harness import Block, Stack, batch, differences, plain_step, train, weigh
from long_cases import some
from plimsoll.artifacts.receipt import ReceiptVerdict
from plimsoll.errors import BudgetBelowFloor, InvalidBatch, TracingFailed
from plimsoll.tracing.recorder.untouched import RandomState


class Busy(Block):
    """Counts, remembers, averages, draws from every generator, and makes a part of itself and a mask in its first call."""

    def __init__(self):
        super().__init__(nn.Tanh())
        self.calls, self.scale, self.spare = 0, 1.0, None
        self.seen, self.recent, self.kinds = [], collections.deque(maxlen=3), {"all": set()}
        self.own, self.dice = torch.Generator().manual_seed(1), random.Random(1)
        self.register_buffer("total", torch.zeros(()))
        self.mean, self.given = (nn.Parameter(torch.zeros(16), requires_grad=False) for _ in range(2))
        self.within = {"counts": [[0]], "sums": (torch.zeros(()),)}

    def forward(self, x):
        self.within["counts"][0][0] += 1
        self.within["sums"][0].add_(x.detach().sum())
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.given.data = self.given.data + 1
        if self.calls == 0:
            self.late = nn.Identity()
            self.register_buffer("mask", torch.ones(16), persistent=False)
        self.calls += 1
        self.seen.append(self.calls)
        self.recent.append(x.sum())
        self.kinds[self.calls] = self.calls
        self.total += 1
        self.spare, self.scale = self.scale, self.scale * 1.01
        drawn = random.random() + np.random.rand() + self.dice.random() + float(torch.rand((), generator=self.own))
        return super().forward(self.late(x * self.mask)) * drawn


def state_of(model):
    """Everything that modules hold, with what lies in their containers, as text."""

    def shown(value):
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
        return value.getstate() if isinstance(value, random.Random) else repr(value)

    return {
        f"{name}.{key}": shown(value) for name, module in model.named_modules() for key, value in vars(module).items()
    }


def busy():
    torch.manual_seed(0)
    return Stack(Busy(), Busy())


def plan_of(model, **options):
    return plimsoll.plan(model, batch(0), loss=weigh, **options)


CALLS: list[int] = []
WORK = {
    "plan": (lambda model: plan_of(model, strategy="full"), 3),
    "plan for a budget": (lambda model: plan_of(model, budget="10MiB"), 5),
    "plan without its device": (lambda model: plan_of(model, device_profile="H100-SXM"), 1),
    "verify": (
        lambda model: plimsoll.verify(model, batch(0), plan_of(copy.deepcopy(model), strategy="full"), loss=weigh),
        None,
    ),
    "explain": (lambda model: plimsoll.explain(model, batch(0), loss=weigh), None),
}


@pytest.mark.filterwarnings("ignore:plimsoll")
@pytest.mark.parametrize("name", WORK)
def test_a_model_that_counts_and_draws_is_left_as_it_was(name):
    work, forwards = WORK[name]
    model = busy()
    CALLS.clear()
    if name == "plan without its device":
        for block in model.blocks:  # whose float(...) has no value there
            block.forward = lambda x, block=block: Block.forward(block, x)
    model.entrance.register_forward_hook(lambda *_: CALLS.append(1))  # a global, which is not restored
    before, generators = state_of(model), RandomState()
    work(model)
    after = state_of(model)
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] != after[key]] == []
    assert generators.is_current()
    assert forwards is None or len(CALLS) == forwards


def test_attaching_trains_as_without_it_where_a_model_counts():
    class Counting(Block):
        def __init__(self):
            super().__init__(nn.Tanh())
            self.calls, self.within = 0, {"calls": [0]}
            self.mean = nn.Parameter(torch.zeros(16), requires_grad=False)

        def forward(self, x):
            self.calls += 1
            self.within["calls"][0] += 1
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return super().forward(x + self.mean) * (1 + 0.1 * min(self.calls, 2)) * (1 + 0.1 * self.within["calls"][0])

    torch.manual_seed(0)
    plain = Stack(Counting(), Counting())
    model = copy.deepcopy(plain)
    with plimsoll.attach(model, "1GiB"):
        assert differences(train(plain, plain_step, 3), train(model, plain_step, 3)) == []
    assert [block.calls for block in model.blocks] == [3, 3]


class Tracker:
    """What models hold for themselves, in a class of their own."""

    def __init__(self):
        self.calls, self.seen, self.mean = 0, [], torch.zeros(())


class Schedule:
    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return 1 + self.calls / 10


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0

    def count(self):
        self.calls += 1
        return self.calls


class History(list):
    """A list of the user's own class."""


class Holding(Block):
    """Keeps its state in objects, in bytes, in generators of numpy's and in iterators."""

    def __init__(self):
        super().__init__(nn.Tanh())
        self.dice, self.bytes, self.numbers = np.random.RandomState(0), bytearray(4), array.array("d", [0.0])
        self.tracker, self.schedule = Tracker(), Schedule()
        self.count, self.items, self.within = itertools.count(), iter([1.0, 2.0] * 40), [itertools.count()]
        self.bits, self.slotted, self.history = np.random.PCG64(0), Slotted(), History()
        self.counting, self.pair = Slotted().count, ("count", itertools.count())

    def forward(self, x):
        self.bytes[0] += 1
        self.numbers[0] += 1
        self.tracker.calls += 1
        self.tracker.seen.append(self.tracker.calls)
        self.tracker.mean.add_(1)
        drawn = self.dice.rand() + next(self.count) + next(self.items) + next(self.within[0])
        drawn += self.bits.random_raw() % 7 + self.slotted.count() + self.counting() + next(self.pair[1])
        self.history.append(drawn)
        held = (
            len(self.history)
            + self.bytes[0]
            + self.numbers[0]
            + self.tracker.calls
            + len(self.tracker.seen)
            + self.schedule()
        )
        return super().forward(x) * float(drawn + held + len(self.history) + self.tracker.mean)


def holding():
    torch.manual_seed(0)
    return Stack(Holding(), Holding())


@pytest.mark.filterwarnings("ignore:plimsoll")
@pytest.mark.parametrize("name", ["plan", "verify", "explain"])
def test_objects_bytes_and_iterators_of_a_model_are_put_back(name):
    plain, model = holding(), holding()
    plan = plan_of(holding(), strategy="full") if name == "verify" else None
    iterators = [(block.count, block.items, block.within[0]) for block in model.blocks]
    if plan is None:
        WORK[name][0](model)
    else:
        plimsoll.verify(model, batch(0), plan, loss=weigh)
    for block, found in zip(model.blocks, iterators, strict=True):
        assert all(a is b for a, b in zip(found, (block.count, block.items, block.within[0]), strict=True))
    assert differences(train(plain, plain_step, 3), train(model, plain_step, 3)) == []


@pytest.mark.filterwarnings("ignore:plimsoll")
def test_attaching_trains_as_without_it_where_a_model_holds_objects_bytes_and_iterators():
    plain, model = holding(), holding()
    with plimsoll.attach(model, "1GiB"):
        assert differences(train(plain, plain_step, 3), train(model, plain_step, 3)) == []


class Drawing(Block):
    """Multiplies by the next item of an iterator."""

    def __init__(self, iterator):
        super().__init__(nn.Tanh())
        self.drawn = iterator

    def forward(self, x):
        return super().forward(x) * next(self.drawn)


RUNNING = {
    "generator": lambda: (number for number in range(9)),
    "map": lambda: map(float, range(9)),
    "enumerate": lambda: enumerate("abcdef"),
    "cycle": lambda: itertools.cycle([1]),
}


@pytest.mark.parametrize("make", RUNNING.values(), ids=RUNNING.keys())
@pytest.mark.parametrize("work", [plan_of, lambda model, strategy: plimsoll.attach(model, "1GiB").model(batch(0))])
def test_an_iterator_that_nobody_can_put_back_is_not_advanced(work, make):
    iterator = make()
    model = Stack(Block(nn.Tanh()), Drawing(iterator))
    with pytest.raises(InvalidBatch, match=f"advances a Python {type(iterator).__name__}"):
        work(model, strategy="full")
    assert model.blocks[1].drawn is iterator
    assert list(itertools.islice(iterator, 5)) == list(itertools.islice(make(), 5))


class Given(nn.Module):
    """Is handed an iterator in its call."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(nn.Tanh()) for _ in range(2))

    def forward(self, x, drawn):
        for block in self.blocks:
            x = block(x) * (1 + next(drawn))
        return x


@pytest.mark.parametrize("options", [{}, {"device_profile": "H100-SXM"}])
def test_an_iterator_among_the_arguments_is_where_it_was(options):
    count, generator = itertools.count(1), map(float, range(9))
    plimsoll.plan(Given(), (batch(0, 5, 16), count), strategy="full", loss=weigh, **options)
    assert next(count) == 1
    with pytest.raises(InvalidBatch, match="advances a Python map"):
        plimsoll.plan(Given(), (batch(0, 5, 16), generator), strategy="full", loss=weigh, **options)
    assert next(generator) == 0


class Sparse(nn.Module):
    """Embeddings whose gradients are sparse, before and inside of the blocks."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16, sparse=True)
        self.bags = nn.EmbeddingBag(50, 16, sparse=True, mode="sum")
        self.blocks = nn.ModuleList(Looking() for _ in range(2))

    def forward(self, words):
        x = self.words(words) + self.bags(words)[:, None]
        for block in self.blocks:
            x = block(x, words)
        return x


class Looking(Block):
    def __init__(self):
        super().__init__(nn.Tanh())
        self.table = nn.Embedding(50, 16, sparse=True)

    def forward(self, x, words):
        return super().forward(x) * self.table(words).sigmoid()


@pytest.mark.parametrize("accumulates", some([False, True], 1))
@pytest.mark.parametrize(
    "options", [{"strategy": "full"}, {"budget": "10MiB"}, {"strategy": "int8", "allow": "compress", "max_error": 0.9}]
)
def test_sparse_gradients_are_planned_and_verified(options, accumulates):
    torch.manual_seed(0)
    model, words = Sparse(), torch.randint(0, 50, (64, 32))
    if accumulates:
        weigh(model(words)).backward()
    plan = plimsoll.plan(model, words, loss=weigh, **options)
    receipt = plimsoll.verify(model, words, plan, loss=weigh)
    assert receipt.verdict in (ReceiptVerdict.VERIFIED, ReceiptVerdict.WITHIN_ERROR)
    assert model.words.weight.grad is None or model.words.weight.grad.is_sparse


def test_sparse_adam_trains_under_a_plan_as_without():
    def trained(managed):
        torch.manual_seed(0)
        model, words = Sparse(), torch.randint(0, 50, (64, 32))
        tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
        optimizer = torch.optim.SparseAdam(tables)
        with plimsoll.attach(model, "1GiB") if managed else contextlib.nullcontext():
            for _ in range(3):
                optimizer.zero_grad()
                weigh(model(words)).backward()
                optimizer.step()
        return tables

    assert all(map(torch.equal, trained(False), trained(True)))


def test_the_state_of_sparse_adam_is_left_to_the_user():
    model = Sparse()
    optimizer = torch.optim.SparseAdam([model.words.weight])
    with pytest.raises(TracingFailed, match="plan without optimizer="):
        plimsoll.plan(model, torch.randint(0, 50, (4, 6)), loss=weigh, budget="10MiB", optimizer=optimizer)


class Cache:
    """What calls hand to each other, in a class of its own."""

    def __init__(self):
        self.parts, self.length = [], 0


class Remembering(nn.Module):
    """Reads what earlier calls have left in a cache, and leaves its own there."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(nn.Tanh()) for _ in range(3))

    def forward(self, x, cache):
        for block in self.blocks:
            x = block(x)
        cache.parts.append(x)
        cache.length += len(x)
        return torch.cat(cache.parts).square().mean() * cache.length


class Totals:
    """A cache that has its memory from the start, and is written in place."""

    def __init__(self):
        self.sums, self.calls = [torch.zeros(16)], torch.zeros((), dtype=torch.long)


class Summing(Remembering):
    def forward(self, x, totals):
        for block in self.blocks:
            x = block(x)
        totals.calls += 1
        totals.sums[0] += x.detach().mean(0)
        return (x * totals.sums[0]).square().mean() * totals.calls


@pytest.mark.parametrize("verb", ["plan", "verify", "attach"])
def test_a_cache_among_the_arguments_that_is_written_in_place_is_put_back(verb):
    def summed(managed):
        torch.manual_seed(0)
        model, totals, call = Summing(), Totals(), batch(0, 7, 16)
        if managed and verb != "attach":
            plan = plimsoll.plan(model, (call, totals), strategy="full")
            assert verb == "plan" or plimsoll.verify(model, (call, totals), plan).regions
        with plimsoll.attach(model, "1GiB") if managed and verb == "attach" else contextlib.nullcontext():
            for _ in range(3):
                model(call, totals).backward()
        return [*(each.grad for each in model.parameters()), totals.sums[0], totals.calls]

    assert all(map(torch.equal, summed(False), summed(True)))


def remembers(model, sizes):
    """Two calls before one backward, the second of which reads what the first has made."""
    model.zero_grad()
    cache = Cache()
    sum(model(batch(index, rows, 16), cache) for index, rows in enumerate(sizes)).backward()
    assert len(cache.parts) == 2


def test_planning_leaves_a_cache_among_the_arguments_and_the_graph_behind_it_alone():
    torch.manual_seed(0)
    plain = Remembering()
    managed = copy.deepcopy(plain)
    remembers(plain, (7, 4))
    with plimsoll.attach(managed, "10MiB"):
        for _ in range(2):
            remembers(managed, (7, 7))
        with pytest.warns(UserWarning, match="graph of an earlier call"):
            remembers(managed, (7, 4))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), managed.parameters(), strict=True))


def test_a_plan_for_a_call_that_reads_an_earlier_graph_is_refused_before_its_backward():
    model, cache = Remembering(), Cache()
    first = model(batch(0, 4, 16), cache)
    with pytest.raises(InvalidBatch, match="graph of an earlier call"):
        plimsoll.plan(model, (batch(1, 4, 16), cache), "10MiB")
    assert len(cache.parts) == 1
    first.backward()


class Quantized(nn.Module):
    """Trains with weights that are quantized by channel. The observer resizes its buffers in its first call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.quantize = FakeQuantize(
            observer=MovingAveragePerChannelMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
        )

    def forward(self, x):
        return x + torch.tanh(nn.functional.linear(x, self.quantize(self.weight)))


def quantized():
    torch.manual_seed(0)
    return nn.Sequential(Quantized(), Quantized())


def test_buffers_that_the_first_step_resizes_are_put_back():
    model = quantized()
    buffers = dict(model.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    weights = [parameter.data_ptr() for parameter in model.parameters()]
    plan_of(model)
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert {name: buffer.tolist() for name, buffer in buffers.items()} == {
        k: each.tolist() for k, each in before.items()
    }
    assert [parameter.data_ptr() for parameter in model.parameters()] == weights


def test_attaching_trains_as_without_it_where_a_step_resizes_buffers():
    def trained(budget):
        model, tries = quantized(), []

        def step():
            tries.append([tuple(buffer.shape) for buffer in model.buffers()])
            weigh(model(batch(0))).backward()
            if len(tries) == 1 and budget:
                raise torch.OutOfMemoryError

        with plimsoll.attach(model, budget) if budget else contextlib.nullcontext() as handle:
            for _ in range(2):
                handle.step(step) if handle else step()
        assert tries[0] == tries[-2]
        return [each.tolist() for each in (*model.buffers(), *(p.grad for p in model.parameters()))]

    assert trained("1GiB") == trained(None)


@pytest.mark.parametrize("way", ["resize_", "data", "set_"])
def test_a_buffer_that_forward_gives_other_memory_is_put_back(way):
    class Growing(Block):
        def __init__(self):
            super().__init__(nn.Tanh())
            self.register_buffer("bank", torch.zeros(1, 4))

        def forward(self, x):
            larger = torch.cat([self.bank, torch.ones(1, 4)])
            if way == "resize_":
                self.bank.resize_(larger.shape).copy_(larger)
            elif way == "set_":
                self.bank.set_(larger)
            else:
                self.bank.data = larger
            return super().forward(x)

    model = Stack(Growing())
    bank = model.blocks[0].bank
    with plimsoll.attach(model, "1GiB"):
        for count in range(2):
            assert len(bank) == count + 1
            weigh(model(batch(count))).backward()
    assert bank.tolist() == [[0.0] * 4, [1.0] * 4, [1.0] * 4]
    model.blocks[0].bank = bank = torch.zeros(1, 4)
    plan_of(model)
    assert bank.tolist() == [[0.0] * 4]


class Renormalising(nn.Module):
    """Its forward writes its weights: an embedding of a largest norm, and weights that are clipped."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 32, max_norm=1.0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            with torch.no_grad():
                block[0].weight.clamp_(-0.05, 0.05)
            x = x + block(x)
        return x


@pytest.mark.parametrize("allow", ["recompute", "recompute,tile"])
@pytest.mark.parametrize("budget", ["1KiB", "1GiB"])
def test_weights_that_forward_writes_are_as_before_after_a_plan_and_after_a_refusal(allow: str, budget: str):
    torch.manual_seed(0)
    model, tokens = Renormalising(), torch.arange(50).repeat(8, 1)
    before = copy.deepcopy(model.state_dict())
    with contextlib.suppress(BudgetBelowFloor):
        plimsoll.plan(model, tokens, budget, loss=lambda y: y.square().mean(), allow=allow)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
