"""Values that are packed: lossless forms change no bit, lossy ones are close and repeatable, and what goes wrong is said."""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from contracts.harness import Block, Stack, assert_unchanged, batch, differences, manage, plain_step, train, weigh
from engine.models import Lined, Through, UpDown, region_plan, step_on
from engine.offload.simulated import SimulatedLink
from long_cases import some
from plimsoll.artifacts.decision import Decision, Engine
from plimsoll.artifacts.plan import ValueDecision
from plimsoll.engine import stored_forms as runtime_packed
from plimsoll.engine.apply import apply_plan
from plimsoll.engine.codecs.protocol import Codec, Payload
from plimsoll.engine.codecs.registry import find_codec
from plimsoll.engine.offload.disk import DiskLink
from plimsoll.engine.stored_forms import Packer, Refused, Sent
from plimsoll.errors import ReplayMismatch, SavedTensorModified
from plimsoll.session.training_step import relative_error
from samples import make_plan
from steps import Net


@dataclass
class Exact(Codec):
    """Holds a copy; counts, and lies on request."""

    is_lossless = True
    keeps_sign_only = False
    name: str = "exact"
    lies: bool = False
    encoded: int = 0
    decoded: int = 0
    limits: list[int | None] = field(default_factory=list)
    autocast: list[bool] = field(default_factory=list)

    def accepts(self, dtype):
        return True

    def payload_bytes(self, count, dtype):
        return None

    def workspace_bytes(self, count, dtype):
        return 0

    def encode(self, tensor, *, seed=0, most_bytes=None):
        self.encoded += 1
        self.limits.append(most_bytes)
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        return Payload((tensor.clone(),), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def decode(self, payload):
        self.decoded += 1
        tensor = payload.parts[0].clone()
        if self.lies:
            tensor.add_(1)
        return tensor


@pytest.fixture
def exact(monkeypatch):
    """A codec of that name that every region can use."""
    codec = Exact()
    monkeypatch.setattr(runtime_packed, "find_codec", lambda name: codec if name == "exact" else find_codec(name))
    return codec


@dataclass
class Log:
    """What was packed: (form, seed, what is held) in order."""

    entries: list = field(default_factory=list)

    def count(self, form, kind=object):
        return sum(name == form and isinstance(held, kind) for name, _, held in self.entries)

    @property
    def seeds(self):
        return [seed for _, seed, _ in self.entries]


@pytest.fixture
def log(monkeypatch):
    log, pack = Log(), Packer.pack

    def spied(self, source, form, *, seed, most_bytes):
        held = pack(self, source, form, seed=seed, most_bytes=most_bytes)
        log.entries.append((form, seed, held))
        return held

    monkeypatch.setattr(Packer, "pack", spied)
    return log


@pytest.fixture(params=["simulated", "disk"])
def link(request, tmp_path):
    with SimulatedLink() if request.param == "simulated" else DiskLink(str(tmp_path)) as link:
        yield link


@pytest.fixture
def simulated():
    return SimulatedLink()


def pool(up, down, x):
    """Saves indices of a pooling, and an activation that is mostly zero."""
    pooled = nn.functional.max_pool1d(torch.relu(up(x) - 0.8).unsqueeze(1), 2).squeeze(1)
    return x + down(torch.cat([pooled, pooled.square()], 1))


def first_again(blocks, x):
    """The first block runs again after the last."""
    for block in (*blocks, blocks[0]):
        x = block(x)
    return x


def mixed_blocks():
    return Block(nn.Dropout(0.3)), UpDown(pool, 64), Block(nn.Sequential(nn.ReLU(), nn.Dropout(0.2)))


def mixed():
    return Stack(*mixed_blocks())


def shared():
    model = mixed()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def twice():
    return Through(*mixed_blocks(), way=first_again)


def three(inner=nn.Tanh):
    return Stack(*(Block(inner()) for _ in range(3)))


def autocast(model, index):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = weigh(model(batch(index)))
    loss.backward()
    return loss


def accumulation(model, index):
    return [plain_step(model, 10 * index + part) for part in range(3)]


def retained(model, index):
    loss = weigh(model(batch(index)))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    return [loss, *first]


def double_backward(model, index):
    x = batch(index).requires_grad_()
    gradients = torch.autograd.grad(weigh(model(x)), [x, *model.parameters()], create_graph=True)
    loss = sum(gradient.square().sum() for gradient in gradients)
    loss.backward()
    return [loss, x.grad]


def two_forwards(model, index, order=1):
    losses = [weigh(model(batch(10 * index + part))) for part in range(2)]
    for loss in losses[::order]:
        loss.backward()
    return losses


def evaluation(model, index):
    loss = weigh(model(batch(index)))
    model.eval()
    with torch.no_grad():
        seen = model(batch(77))
    with_gradients = model(batch(78)).sum()
    model.train()
    loss.backward()
    return [loss, seen, with_gradients]


def failure(model, index):
    hook = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch(index))
    hook.remove()
    return plain_step(model, index)


STEPS = {
    "plain": (mixed, plain_step),
    "autocast": (mixed, autocast),
    "accumulation": (mixed, accumulation),
    "shared weights": (shared, plain_step),
    "a region twice": (twice, plain_step),
    "retained": (mixed, retained),
    "double backward": (mixed, double_backward),
    "two forwards": (mixed, two_forwards),
    "two forwards, backwards": (mixed, functools.partial(two_forwards, order=-1)),
    "evaluation in between": (mixed, evaluation),
    "a failure": (mixed, failure),
}

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def assert_no_bit_changes(build, step, regions=None, **settings):
    """Three steps with and without; every region must be served by recipes."""
    report = assert_unchanged(build, step, engine=None, regions=regions, **settings)
    assert report.engines == {Engine.RECIPE}, report.outcomes
    return report.obstacles


@pytest.mark.parametrize("circumstances", STEPS)
def test_lossless_codecs_beside_recomputation_change_no_bit(circumstances, log):
    packs = {"div_": "bits", "max_pool": "narrow", "relu": "zeros"}
    assert_no_bit_changes(*STEPS[circumstances], BLOCKS, packs=packs, kept=("addmm",))
    assert all(log.count(codec) > log.count(codec, Refused) for codec in packs.values())


@pytest.mark.parametrize("circumstances", some(STEPS, 6))
def test_everything_over_a_link_changes_no_bit(circumstances, link, log):
    assert_no_bit_changes(*STEPS[circumstances], BLOCKS, packs={"": link.name}, link=link)
    assert log.count(link.name, Sent) > 20


@pytest.mark.parametrize("circumstances", some(STEPS, 6))
def test_a_link_a_codec_recomputation_and_keeping_together_change_no_bit(circumstances, link, log):
    packs = {"div_": "bits", "norm": link.name, "input": link.name}
    assert_no_bit_changes(*STEPS[circumstances], BLOCKS, packs=packs, kept=("relu",), link=link)
    assert log.count("bits")
    assert log.count(link.name)


@pytest.mark.parametrize("boundaries", [(1,), (1, 2)])
def test_a_dropped_boundary_beside_packed_values_changes_no_bit(boundaries, link):
    for packs in ({"": link.name}, {"addmm": link.name}, {"div_": "bits"}):
        assert_no_bit_changes(mixed, retained, BLOCKS, packs=packs, boundaries=boundaries, link=link)


def test_a_packed_value_that_recipes_read_is_decoded_once_per_backward(exact):
    model = three(nn.Identity)
    with manage(model, packs={"up::addmm": "exact"}):
        plain_step(model, 0)
        loss = weigh(model(batch(1)))
        assert exact.encoded == 6
        exact.decoded = 0
        loss.backward(retain_graph=True)
        assert exact.decoded == 3
        loss.backward()
        assert exact.decoded == 6


def test_a_packed_region_input_frees_the_input(exact):
    seen = []
    model = three()
    with manage(model, packs={"input": "exact"}):
        plain_step(model, 0)
        model.blocks[1].register_forward_pre_hook(
            lambda _, args: seen.append(torch.multiprocessing.reductions.StorageWeakRef(args[0].untyped_storage()))
        )
        loss = weigh(model(batch(1)))
        assert seen[0].expired()
        loss.backward()
    assert_no_bit_changes(three, retained, packs={"input": "exact"})


def under_views(up, down, x):
    """One value that backward reads transposed, sliced, expanded, as other numbers and whole."""
    y = up(x).exp()
    turned = (y.t() * y.t().sin()).t()
    part = y[:, 4:20] * y[:, :1].expand(-1, 16)
    return x + down(turned).mul(0.1) + part * y.view(-1, 2, 16)[:, 1]


def written_in_place(up, down, x):
    """Writes in place to copies of what is packed."""
    y = up(x).exp()
    z = torch.cat([y[:, :16], y[:, 16:]], 1).mul_(2)
    z[:, 3:7] = 1.0
    return x + down(z.add_(y).sigmoid_() * y)


@pytest.mark.parametrize("function", [under_views, written_in_place])
@pytest.mark.parametrize("packs", [{"exp": "exact"}, {"up": "exact"}, {"exp": "simulated"}, {"": "simulated"}])
def test_a_packed_value_under_several_views_or_beside_writes_in_place_changes_no_bit(function, packs, exact, simulated):
    build = lambda: Stack(UpDown(function), UpDown(function))  # noqa: E731
    assert_no_bit_changes(build, retained, packs=packs, link=simulated)


def writing(after):
    """Writes to what the first block returned, after the second or the third one has saved it."""

    def way(blocks, x):
        for index, block in enumerate(blocks):
            y = block(x)
            if index == after:
                x.detach().add_(1)
            x = y
        return x

    return Through(*(Block(nn.Tanh()) for _ in range(3)), way=way)


class Nan(Exact):
    """Refuses everything, as a codec does with NaN."""

    def encode(self, tensor, *, seed=0, most_bytes=None):
        return None


def test_a_write_to_a_value_that_was_refused_is_found_as_in_the_unmanaged_model(monkeypatch):
    monkeypatch.setattr(runtime_packed, "find_codec", lambda name: Nan())
    model = writing(after=1)
    with pytest.raises(RuntimeError):
        plain_step(model, 0)
    with manage(model, packs={"input": "exact"}), pytest.raises(SavedTensorModified):
        plain_step(model, 0)


@pytest.mark.parametrize("after", [1, 2])
def test_a_write_to_a_value_that_is_still_on_its_way_out_is_found(after, simulated):
    model = writing(after)
    with manage(model, packs={"input": "simulated"}, link=simulated), pytest.raises(SavedTensorModified):
        plain_step(model, 0)


def test_a_write_to_a_value_that_is_away_does_not_matter(simulated):
    def later(blocks, x):
        """Writes to the first block's output when the second's tensors have arrived at the link."""
        first = blocks[0](x)
        x = blocks[2](blocks[1](first))
        first.detach().zero_()
        return x

    untouched = three()
    model = Through(*copy.deepcopy(untouched.blocks), way=later)
    model.load_state_dict(untouched.state_dict())
    with manage(model, packs={"input": "simulated"}, link=simulated):
        found = train(model, plain_step, 2)
    assert differences(train(untouched, plain_step, 2), found) == []


def outside():
    """Reads two tensors that are nobody's parameters: one and the same at first."""
    way = lambda net, x: x + (net.line(x) * net.scales[0]).tanh() * net.scales[1]  # noqa: E731
    return Net(way, line=nn.Linear(16, 16), scales=[torch.full((5, 16), 2.0)] * 2)


def test_tensors_from_outside_that_stop_being_one_tensor_are_not_taken_for_one(exact):
    def step(subject, index):
        if index:
            for block in subject.blocks:
                block.scales = [torch.full((5, 16), 2.0), torch.full((5, 16), 3.0)]
        return plain_step(subject, index)

    assert_no_bit_changes(lambda: Stack(outside(), outside()), step, packs={"external#0": "exact"})
    assert exact.encoded


# Lossy forms.


def spacious(inner=nn.Identity, seed=0):
    torch.manual_seed(seed)
    return Stack(*(Block(inner(), 64) for _ in range(3)), width=64)


def big(index):
    return batch(index, 128, 8)


def gradients_of(model, index=0, data=big):
    model.zero_grad()
    weigh(model(data(index))).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("codec", "most"), [("bf16", 0.005), ("int8", 0.01), ("int8:stochastic", 0.02), ("int4", 0.15), ("fp8", 0.05)]
)
def test_lossy_forms_are_close_and_the_same_step_gives_the_same_bits(codec, most, log):
    plain, model = spacious(), spacious()
    expected = [gradients_of(plain, index) for index in range(3)]
    runs = []
    for _ in range(2):
        with manage(model, packs={"up::": codec, "gelu": codec}):
            runs.append([gradients_of(model, index) for index in range(3)])
    assert all(torch.equal(a[n], b[n]) for a, b in zip(*runs, strict=True) for n in a)
    errors = [relative_error(want, got) for want, got in zip(expected, runs[0], strict=True)]
    assert all(0 < error < most for error in errors), errors
    assert not log.count(codec, Refused)


def test_every_call_and_every_value_rounds_with_a_seed_of_its_own(log):
    model = spacious()
    with manage(model, packs={"up::": "int8:stochastic", "gelu": "int8:stochastic"}):
        for _ in range(3):
            gradients_of(model)
    assert len(log.seeds) == len(set(log.seeds)) == 3 * 3 * 2


def test_calls_of_one_region_with_plans_of_their_own_round_differently(log):
    model = Through(*(Block(nn.Identity(), 64) for _ in range(2)), way=first_again, width=64)
    regions = [compressing("blocks.0", "up::addmm#0", "int8:stochastic", call=call) for call in range(2)]
    with apply_plan(model, make_plan(regions=tuple(regions))):
        gradients_of(model)
    assert len(log.seeds) == len(set(log.seeds)) == 2


@pytest.mark.parametrize("codec", ["int8", "int4", "bf16", "fp8", "int8:stochastic"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_finite_is_kept_and_the_outcome_names_the_codec(codec, poison):
    def data(index):
        rows = big(index)
        rows[3, 2] = poison
        return rows

    plain, model = spacious(), spacious()
    with manage(model, packs={"up::": codec}) as handle:
        for index in range(2):
            expected, found = gradients_of(plain, index, data), gradients_of(model, index, data)
            assert differences([expected], [found]) == []
        assert all(codec in outcome.reason and "up::addmm" in outcome.reason for outcome in handle.outcomes())
        assert relative_error(gradients_of(plain), gradients_of(model)) < 0.2


def test_a_codec_that_does_not_take_the_dtype_leaves_the_value_as_it_is():
    step = step_on(lambda index: batch(index).double())
    assert_no_bit_changes(lambda: three(lambda: nn.Dropout(0.2)).double(), step, packs={"": "narrow"})


def rectified(also=None):
    """Nobody but ReLU itself reads what ReLU makes, unless asked to."""
    read = also or nn.Identity()
    return Net(lambda net, x: x + net.read(torch.relu(net.up(x))), up=nn.Linear(16, 16), read=read)


@pytest.mark.parametrize("step", [plain_step, retained])
def test_signs_are_exact_where_only_relu_reads(step, log):
    assert_no_bit_changes(lambda: Stack(rectified(), rectified()), step, packs={"relu": "sign"})
    assert log.count("sign") == 6


@pytest.mark.parametrize("also", [torch.square, nn.Linear(16, 16)])
def test_signs_are_refused_to_a_node_that_reads_more(also):
    model = Stack(rectified(also), rectified(also))
    before = copy.deepcopy(model.state_dict())
    with (
        manage(model, packs={"relu": "sign"}),
        pytest.raises(ReplayMismatch, match=r"only the signs of .*relu.*Backward0"),
    ):
        plain_step(model, 0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_signs_are_refused_to_thresholds_because_those_compare_with_another_number():
    blocks = [Lined(lambda line, x: x + nn.functional.threshold(line(x), 0.5, 0.0), width=16) for _ in range(2)]
    with manage(model := Stack(*blocks), packs={"line": "sign"}), pytest.raises(ReplayMismatch):
        plain_step(model, 0)


def test_nothing_is_rebuilt_from_signs():
    build = lambda: Stack(rectified(torch.exp), rectified(torch.exp))  # noqa: E731
    obstacles = assert_no_bit_changes(build, plain_step, packs={"relu": "sign"})
    assert "sign" in obstacles["blocks.0"]["exp#0"]


# What comes back wrong.


LIES = {
    "a value that only its slot reads": ({"tanh": "exact"}, ("norm", "addmm")),
    "a value that recipes read": ({"up::addmm": "exact"}, ()),
    "the region's input": ({"input": "exact"}, ("norm", "addmm", "gelu", "mul")),
    "an input that recipes read": ({"input": "exact"}, ()),
    "a value beside lossy ones": ({"norm::native_layer_norm#0.1": "exact", "input": "int8"}, ()),
}


@pytest.mark.parametrize("case", LIES)
def test_an_exact_form_that_comes_back_wrong_is_found_before_the_optimizer(case, exact):
    packs, kept = LIES[case]
    torch.manual_seed(0)
    plain = three()
    model = copy.deepcopy(plain)
    with manage(model, packs=packs, kept=kept) as handle:
        plain_step(model, 0)
        model.zero_grad()
        exact.lies = True
        with pytest.raises(ReplayMismatch, match="exact"):
            plain_step(model, 1)
        model.zero_grad()
        exact.lies = False
        if "int8" not in packs.values():
            found = train(model, plain_step, 2)
            assert differences(train(plain, plain_step, 2), found) == []
        assert Engine.KEEP in {outcome.engine for outcome in handle.outcomes()} or "int8" in packs.values()


def test_lossy_forms_trip_no_sentinel():
    model = spacious()
    with manage(model, packs={"up::": "int4", "input": "int4"}) as handle:
        for index in range(3):
            gradients_of(model, index)
        assert {outcome.engine for outcome in handle.outcomes()} == {Engine.RECIPE}


# Plans.


def compressing(region, value, form, *, nbytes=1 << 15, held=1 << 13, decision=Decision.COMPRESS, call=0):
    choice = ValueDecision(value=value, decision=decision, bytes=nbytes, form=form, held_bytes=held)
    return region_plan(region, choice, call=call)


def test_payloads_of_a_larger_batch_may_be_larger_in_proportion(exact):
    model = spacious()
    nbytes = 128 * 128 * 4
    plan = make_plan(regions=(compressing("blocks.0", "up::addmm#0", "exact", nbytes=nbytes, held=nbytes // 4),))
    with apply_plan(model, plan):
        for rows in (128, 256, 32):
            weigh(model(batch(0, rows, 8))).backward()
    assert exact.limits == [nbytes // 4, nbytes // 2, nbytes // 16]


def test_a_larger_batch_than_planned_is_still_compressed(log):
    model = spacious()
    plan = make_plan(regions=(compressing("blocks.0", "up::addmm#0", "int8", nbytes=128 * 128 * 4, held=17000),))
    with apply_plan(model, plan) as handle:
        weigh(model(batch(0, 512, 8))).backward()
        assert handle.outcomes()[0].reason == ""
    assert log.count("int8") == 1
    assert not log.count("int8", Refused)


def test_a_plan_for_one_link_runs_over_another(log):
    plain, model = spacious(), spacious()
    region = compressing("blocks.0", "up::addmm#0", "disk", held=0, decision=Decision.OFFLOAD)
    plan = make_plan(regions=(region, compressing("blocks.1", "up::addmm#0", "zeros")), link="disk")
    with apply_plan(model, plan, link=SimulatedLink()):
        assert differences([gradients_of(plain)], [gradients_of(model)]) == []
    assert log.count("disk", Sent) == 1


def test_codecs_compute_outside_of_autocast(exact):
    model = spacious()
    with manage(model, packs={"up::": "exact"}):
        for index in range(2):
            autocast(model, index)
    assert len(exact.autocast) >= 6
    assert not any(exact.autocast)


def test_of_every_value_one_thing_is_held(log, simulated):
    """No value is packed twice in one call, whatever number of slots shows it."""
    model = Stack(UpDown(under_views), UpDown(under_views))
    with manage(model, packs={"exp": "simulated"}, link=simulated):
        plain_step(model, 0)
    assert Counter(form for form, _, _ in log.entries) == {"simulated": 2}
