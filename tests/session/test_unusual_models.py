"""Models and loops that train without a budget, and either train under one with the same bits or are refused in one message."""

from __future__ import annotations

import copy
import gc
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

import plimsoll
from long_cases import some
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.trace import Category, Phase
from plimsoll.errors import BudgetBelowFloor, InvalidBatch, InvalidLoss, InvalidModel, TracingFailed
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.trace import trace
from plimsoll.units import MIB
from steps import mean_square
from unchanged import unchanged

WIDTH, ROWS = 64, 512


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, dtype=dtype), nn.Linear(4 * width, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def blocks(count: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dtype=dtype) for _ in range(count)))


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.abs().square().mean()


def between(model: nn.Module, batch: Any, loss: Callable[[Any], torch.Tensor] = squares) -> int:
    """A budget halfway between the floor and the unmanaged peak."""
    lowest = plimsoll.plan(model, batch, loss=loss, strategy="full").predicted_peak_bytes
    return (lowest + plimsoll.plan(model, batch, loss=loss, strategy="none").predicted_peak_bytes) // 2


def trained(
    model: nn.Module, batches: list[Any], around: Callable[[], Any], inner: nn.Module | None = None
) -> list[float]:
    """Losses of a loop with one batch a step."""
    optimizer, losses = torch.optim.SGD((inner or model).parameters(), lr=1e-2), []
    for batch in batches:
        with around():
            optimizer.zero_grad()
            loss = squares(model(batch))
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", some([torch.float64, torch.complex64, torch.complex128], 1))
def test_a_budget_is_kept_in_double_and_complex_precision(dtype: torch.dtype):
    model, batch = blocks(dtype=dtype), torch.randn(ROWS, WIDTH, dtype=dtype)
    plan = plimsoll.plan(model, batch, between(model, batch), loss=squares, allow="recompute,compress", max_error=0.01)
    assert any(decision.decision is not Decision.KEEP for region in plan.regions for decision in region.decisions)
    assert plimsoll.verify(model, batch, plan, loss=squares, steps=1).verdict.is_pass


@pytest.mark.long
def test_attach_trains_a_model_that_returns_complex_numbers():
    plain = blocks(dtype=torch.complex64)
    managed, batch = copy.deepcopy(plain), torch.randn(ROWS, WIDTH, dtype=torch.complex64)
    expected = trained(plain, [batch] * 4, torch.enable_grad)
    with plimsoll.attach(managed, between(managed, batch)) as attachment:
        assert trained(managed, [batch] * 4, torch.enable_grad) == expected
        assert attachment.plan is not None


class OfNestedRows(nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.blocks, self.layout = blocks(), layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nested.as_nested_tensor([x[:100], x[100:]], layout=self.layout)
        return torch.nested.to_padded_tensor(self.blocks(rows), 0.0)


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(30, WIDTH), torch.randn(50, WIDTH)], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("verb", ["plan", "attach"])
@pytest.mark.parametrize(
    ("build", "make_batch", "loss"),
    [
        (blocks, jagged, lambda output: output.values().square().mean()),
        (lambda: OfNestedRows(torch.jagged), lambda: torch.randn(ROWS, WIDTH), squares),
        (lambda: OfNestedRows(torch.strided), lambda: torch.randn(ROWS, WIDTH), squares),
    ],
    ids=["jagged batch", "jagged inside", "strided inside"],
)
def test_nested_tensors_are_refused_in_one_message_with_the_model_unchanged(
    build: Callable[[], nn.Module],
    make_batch: Callable[[], torch.Tensor],
    loss: Callable[[Any], torch.Tensor],
    verb: str,
):
    model, batch = build(), make_batch()
    with unchanged(model):
        if verb == "attach":
            plimsoll.attach(model, MIB)
        with pytest.raises(InvalidBatch, match="nested tensor") as caught:
            model(batch) if verb == "attach" else plimsoll.plan(model, batch, "1MiB", loss=loss)
    assert "offsets" in caught.value.next


@pytest.mark.parametrize("mode", [lambda: FlopCounterMode(display=False), ModuleTracker])
@pytest.mark.parametrize("first", some([0, 1], 1))
def test_counters_of_flops_and_modules_may_run_around_every_step(mode: Callable[[], Any], first: int):
    plain, batch = blocks(), torch.randn(ROWS, WIDTH)
    managed = copy.deepcopy(plain)
    expected = trained(plain, [batch] * 4, torch.enable_grad)
    with plimsoll.attach(managed, between(managed, batch)) as attachment:
        losses = trained(managed, [batch] * first, torch.enable_grad) + trained(managed, [batch] * (4 - first), mode)
        assert any(region.dropped for region in attachment.plan.regions)
    assert losses == expected


LAZY = {
    "linear": lambda: nn.Sequential(nn.LazyLinear(WIDTH), *blocks()),
    "batch norm": lambda: nn.Sequential(nn.LazyBatchNorm1d(), *blocks()),
    "in a block": lambda: nn.Sequential(*blocks(), nn.Sequential(nn.LazyLinear(WIDTH))),
}


@pytest.mark.parametrize("build", LAZY.values(), ids=LAZY)
def test_a_lazy_module_is_refused_until_it_has_run(build: Callable[[], nn.Module]):
    model, batch = build(), torch.randn(ROWS, WIDTH)
    for call in (lambda: plimsoll.plan(model, batch, loss=squares), lambda: plimsoll.attach(model, MIB)):
        with pytest.raises(InvalidModel, match="parameters without a shape") as caught:
            call()
        assert "run the model once" in caught.value.next
    with torch.no_grad():
        model(batch)
    assert plimsoll.plan(model, batch, loss=squares).status.is_usable


def scripted(module: nn.Module) -> nn.Module:
    return torch.jit.script(module)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    "build",
    [
        lambda: scripted(blocks()),
        lambda: nn.Sequential(*map(scripted, blocks())),
        lambda: nn.Sequential(scripted(blocks())),
    ],
    ids=["model", "every block", "one part"],
)
def test_a_scripted_model_is_refused_in_one_message(build: Callable[[], nn.Module]):
    with pytest.raises(InvalidModel, match="TorchScript"):
        plimsoll.plan(build(), torch.randn(ROWS, WIDTH), "1MiB", loss=squares)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripted_blocks_are_left_alone_and_the_others_are_planned():
    model = nn.Sequential(*(scripted(each) if index == 1 else each for index, each in enumerate(blocks())))
    batch = torch.randn(ROWS, WIDTH)
    with pytest.warns(UserWarning, match="region '1' is not managed"):
        plan = plimsoll.plan(model, batch, strategy="full", loss=squares)
    assert [region.name for region in plan.regions if region.dropped] == ["0", "2", "3"]
    assert plimsoll.verify(model, batch, plan, loss=squares, steps=1).verdict.is_pass


class Raises(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.error = inside, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return self.inside(x)


class OwnError(ValueError):
    pass


@pytest.mark.parametrize("error", some([OwnError("mine"), RuntimeError("mine"), KeyError("mine")], 1), ids=type)
def test_an_error_of_the_model_reaches_the_loop_as_it_is_and_the_budget_stays(error: Exception):
    model, batch = Raises(blocks()), torch.randn(ROWS, WIDTH)
    with plimsoll.attach(model, between(model, batch)) as attachment:
        model.error = error
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                model(batch)
            assert caught.value is error
        model.error = None
        trained(model, [batch] * 3, torch.enable_grad)
        assert any(region.dropped for region in attachment.plan.regions)


def shared_keys() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A Gemma 3n whose last layers read keys and values of earlier layers without getting them as arguments."""
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
        laurel_rank=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 5,
    )
    ids = torch.randint(2, 64, (2, 32))
    return transformers.Gemma3nForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


@pytest.mark.long
def test_blocks_that_read_several_values_of_other_blocks_are_planned():
    model, batch = shared_keys()
    unmanaged = plimsoll.plan(model, batch, strategy="none")
    budget = (3 * unmanaged.floor_bytes + unmanaged.predicted_peak_bytes) // 4
    plan = plimsoll.plan(model, batch, budget)
    names = [decision.value for region in plan.regions for decision in region.decisions]
    assert {"external#0", "external#1"} <= set(names)
    receipt = plimsoll.verify(model, batch, plan, steps=1)
    assert receipt.verdict.is_pass
    assert receipt.measured_peak_bytes <= plan.budget_bytes


needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")


@pytest.fixture
def forgets_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.long
@needs_a_compiler
@pytest.mark.usefixtures("forgets_compiled_code")
@pytest.mark.parametrize("is_loose", [False, True])
def test_a_model_compiled_as_a_whole_may_be_evaluated_at_any_time_under_a_budget(*, is_loose: bool):
    inner, batch = blocks(), torch.randn(ROWS, WIDTH)
    twin = copy.deepcopy(inner)
    model, plain = torch.compile(inner), torch.compile(twin)
    peak_bytes = TrainingStep(plain, (batch,), {}, loss=squares).measure_peak().peak_bytes
    plain.zero_grad()

    def loop(model: Any, inner: nn.Module) -> list[float]:
        losses = []
        for _ in range(3):
            model.eval()
            with torch.no_grad():
                losses.append(squares(model(batch)).item())
            model.train()
            losses += trained(model, [batch], torch.enable_grad, inner)
        return losses

    expected = loop(plain, twin)
    with plimsoll.attach(model, 100 * MIB if is_loose else round(0.75 * peak_bytes)) as attachment:
        assert loop(model, inner) == expected
        assert any(region.dropped for region in attachment.plan.regions) is not is_loose
    assert squares(model(batch)).item() == squares(plain(batch)).item()


def test_a_model_that_is_never_called_as_a_whole_says_that_nothing_is_managed():
    model, batch = blocks(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with plimsoll.attach(model, 4096, optimizer=optimizer):
        for number in range(3):
            inside = model[1](model[0](batch))
            inside.retain_grad()
            mean_square(inside).backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            # The first step may have begun before attach was called.
            assert any("nothing is managed" in str(each.message) for each in caught) is (number == 1)


def test_a_budget_that_is_attached_between_forward_and_backward_is_not_said_to_manage_nothing():
    model, batch = blocks(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loss = mean_square(model(batch))
    with plimsoll.attach(model, 64 * MIB, optimizer=optimizer) as attached, warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(2):
            mean_square(model(batch)).backward()
            optimizer.step()
        assert attached.plan is not None


@pytest.mark.long
def test_a_budget_below_the_floor_is_refused_where_gradients_of_intermediates_are_retained():
    class Probed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.inside = blocks(), []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inside = []
            for block in self.blocks:
                x = block(x)
                self.inside.append(x)
            return x

    model, batch = Probed(), torch.randn(ROWS, WIDTH)

    def loop() -> None:
        for _ in range(5):  # gradients accumulate, and a refusal waits until two such steps were measured
            model(batch)
            for each in model.inside:
                each.retain_grad()
            sum(map(mean_square, model.inside)).backward()

    plimsoll.attach(model, 4096)
    with pytest.raises(BudgetBelowFloor):
        loop()


class AttrDict(dict[str, Any]):
    """A common idiom: what it does not hold raises KeyError, not AttributeError."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class SlottedDict(dict[str, Any]):
    __slots__ = ()
    __getattr__ = dict.__getitem__


class Raising:
    """Raises what it likes where it is asked for an attribute that it does not have."""

    def __init__(self, **known: Any) -> None:
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"do not ask for {name}")


SETTINGS = AttrDict(scale=0.5)


class OfSettings(nn.Module):
    """A block that holds settings, and names others of its file."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.inner, self.settings = Block(), settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.settings["scale"] if isinstance(self.settings, dict) else self.settings.scale
        return scale * self.inner(x) + SETTINGS.scale * x


@pytest.mark.parametrize("kind", some([AttrDict, SlottedDict, Raising], 1))
@pytest.mark.parametrize("verb", ["apply", "attach", "verify"])
def test_settings_that_raise_for_unknown_attributes_are_not_asked_for_any(kind: Callable[..., Any], verb: str):
    settings = kind(scale=0.5)
    plain, managed = nn.Sequential(), nn.Sequential()
    for model in (plain, managed):  # Python cannot copy such settings
        torch.manual_seed(0)
        model.extend(OfSettings(settings) for _ in range(4))
    batch = torch.randn(ROWS, WIDTH)
    expected, budget = trained(plain, [batch] * 3, torch.enable_grad), between(managed, batch)
    plan = plimsoll.plan(managed, batch, budget, loss=squares)
    assert any(decision.decision is not Decision.KEEP for region in plan.regions for decision in region.decisions)
    if verb == "verify":
        assert plimsoll.verify(managed, batch, plan, loss=squares, steps=1).verdict.is_pass
        return
    with plimsoll.attach(managed, budget) if verb == "attach" else plimsoll.apply(managed, plan):
        assert trained(managed, [batch] * 3, torch.enable_grad) == expected


class WithOutputIn(nn.Module):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks, self.kind = blocks(), kind

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind(hidden=self.blocks(x))


class Criterion(AttrDict):
    def __call__(self, output: Any) -> torch.Tensor:
        return squares(output["hidden"])


def test_an_output_and_a_loss_that_raise_for_unknown_attributes_are_taken():
    model, batch = WithOutputIn(AttrDict), torch.randn(ROWS, WIDTH)
    assert plimsoll.plan(model, batch, "100MiB", loss=Criterion()).predicted_peak_bytes
    with pytest.raises(InvalidLoss, match="the model returned AttrDict"):
        plimsoll.plan(model, batch, "100MiB")
    with pytest.raises(InvalidLoss, match="the model returned Raising"):
        plimsoll.plan(WithOutputIn(Raising), batch, "100MiB")
    with plimsoll.attach(model, "100MiB") as attachment:
        squares(model(batch)["hidden"]).backward()
        assert attachment.plan is not None


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for block in self.blocks:
            x = block(x)
            yield x


def test_a_forward_that_is_a_generator_is_planned_with_a_loss_that_reads_it():
    def loss(output: Iterator[torch.Tensor]) -> torch.Tensor:
        return torch.stack([squares(each) for each in output]).sum()

    plain, managed, batch = Lazy(), Lazy(), torch.randn(ROWS, WIDTH)
    managed.load_state_dict(plain.state_dict())
    loss(plain(batch)).backward()
    with plimsoll.attach(managed, "100MiB"), pytest.raises(InvalidLoss, match="forward returned a generator") as caught:
        loss(managed(batch)).backward()
    assert "plimsoll.plan with a loss=" in (caught.value.next or "")
    plan = plimsoll.plan(managed, batch, strategy="full", loss=loss)
    assert plan.predicted_peak_bytes < plan.baseline_peak_bytes
    with plimsoll.apply(managed, plan):
        loss(managed(batch)).backward()
    for expected, found in zip(plain.parameters(), managed.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


def graph(layout: torch.layout) -> torch.Tensor:
    """The adjacency of a random graph; in no layout two of them have as many edges."""
    dense = (torch.rand(ROWS, ROWS) < 0.02).float()
    return dense.to_sparse() if layout is torch.sparse_coo else dense.to_sparse_csr()


class OfGraph(nn.Module):
    """A layer of a graph network. The adjacency is an argument, a buffer, or an attribute."""

    def __init__(self, held_as: str, layout: torch.layout) -> None:
        super().__init__()
        self.inner = Block()
        if held_as == "buffer":
            self.register_buffer("edges", graph(layout))
        elif held_as == "attribute":
            self.edges = graph(layout)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return x + self.inner(torch.sparse.mm(getattr(self, "edges", edges), x))


class WithWeights(OfGraph):
    """The edges' weights are trained, so that backward reads a sparse tensor that the region makes."""

    def __init__(self, held_as: str, layout: torch.layout) -> None:
        super().__init__(held_as, layout)
        self.weight = nn.Parameter(torch.rand(ROWS))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ROWS).expand(2, ROWS)
        return super().forward(x, torch.sparse_coo_tensor(places, self.weight.tanh(), (ROWS, ROWS)))


class OfGraphs(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, given: Any) -> torch.Tensor:
        x, edges = given
        for layer in self.layers:
            x = layer(x, edges)
        return x


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", some([torch.sparse_coo, torch.sparse_csr], 1), ids=str)
@pytest.mark.parametrize(
    "layer",
    [
        lambda layout: OfGraph("argument", layout),
        lambda layout: OfGraph("buffer", layout),
        lambda layout: OfGraph("attribute", layout),
        lambda layout: WithWeights("argument", layout),
    ],
    ids=["argument", "buffer", "attribute", "made inside"],
)
def test_layers_that_read_sparse_tensors_train_with_the_same_bits(
    layer: Callable[[torch.layout], nn.Module], layout: torch.layout
):
    plain, managed = (OfGraphs(lambda: layer(layout)) for _ in range(2))
    batches = [(torch.randn(ROWS, WIDTH), graph(layout)) for _ in range(4)]
    expected, first = trained(plain, batches, torch.enable_grad), (batches[0],)
    budget = between(managed, first)
    plan = plimsoll.plan(managed, first, budget, loss=squares)
    assert any(decision.decision is Decision.RECOMPUTE for region in plan.regions for decision in region.decisions)
    assert plimsoll.verify(managed, first, plan, loss=squares, steps=1).verdict.is_pass
    with plimsoll.attach(managed, budget):
        assert trained(managed, batches, torch.enable_grad) == expected


class Thinned(Block):
    """Makes a sparse tensor, which autograd saves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.sparse.mm((x @ x.T).clamp_min(0.0).to_sparse(), x))


def test_the_bytes_of_sparse_tensors_count():
    model, x = OfGraphs(lambda: OfGraph("argument", torch.sparse_coo)), torch.randn(ROWS, WIDTH)
    for layout, index_bytes in ((torch.sparse_coo, 2 * 8), (torch.sparse_csr, 8)):
        peaks = []
        for edges in (64, 4096):
            dense = torch.zeros(ROWS, ROWS).flatten().index_fill(0, torch.arange(edges) * 64, 1.0).view(ROWS, ROWS)
            given = (x, dense.to_sparse(layout=layout))
            peaks.append(plimsoll.plan(model, (given,), strategy="none", loss=squares).predicted_peak_bytes)
        assert peaks[1] - peaks[0] >= (4096 - 64) * (index_bytes + 4)

    step = trace(nn.Sequential(Thinned()), x, loss=squares)
    edges = int(((x @ x.T) > 0).sum())
    assert sum(each.bytes for each in step.storages if "to_sparse" in each.label) == edges * (2 * 8 + 4)

    step = trace(nn.Sequential(Block(), Thinned()), x, loss=squares)
    backward = next(tick for tick, op in enumerate(step.ops) if op.phase is Phase.BACKWARD)
    made = [each for each in step.storages if "to_sparse" in each.label]
    assert len(made) == 2
    assert all(each.dies > backward for each in made)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("held_as", ["argument", "buffer"])
def test_sparse_tensors_are_refused_in_one_message_where_no_device_is_there(held_as: str, layout: torch.layout):
    model, given = OfGraphs(lambda: OfGraph(held_as, layout)), (torch.randn(ROWS, WIDTH), graph(layout))
    with pytest.raises(TracingFailed, match="tensor cannot be traced without its device"):
        plimsoll.plan(model, (given,), "1GiB", loss=squares, device_profile="H100-SXM")


class Metric(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.rand(WIDTH, 8 * WIDTH))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return squares(output @ self.weight)


def test_an_optimizer_may_train_more_than_the_model():
    plain, managed, losses = blocks(), blocks(), {}
    for model in (plain, managed):
        metric = Metric()
        optimizer = torch.optim.AdamW([*model.parameters(), *metric.parameters()])
        if model is managed:
            batch = torch.randn(ROWS, WIDTH)
            step = trace(model, batch, loss=metric, optimizer=optimizer)
            states = sum(each.bytes for each in step.storages if each.category is Category.OPTIMIZER_STATE)
            weights = metric.weight.nbytes + sum(each.nbytes for each in model.parameters())
            assert states == pytest.approx(2 * weights, rel=0.01)  # AdamW's two averages
            metric.zero_grad()
            handle = plimsoll.attach(model, "100MiB", optimizer=optimizer)
        torch.manual_seed(2)
        for _ in range(3):
            optimizer.zero_grad()
            loss = metric(model(torch.randn(ROWS, WIDTH)))
            loss.backward()
            optimizer.step()
            losses.setdefault(model, []).append(loss.item())
    handle.remove()
    assert losses[managed] == losses[plain]


@pytest.mark.parametrize("how", some(["pruned", "replaced"], 1))
@pytest.mark.parametrize("is_named", [True, False], ids=["named", "found"])
def test_parameters_that_leave_the_model_in_mid_run_do_not_end_the_training(how: str, is_named: bool):
    losses = []
    for is_managed in (False, True):
        model = blocks()
        optimizer = torch.optim.AdamW(model.parameters())
        if is_managed:
            handle = plimsoll.attach(model, "100MiB", **({"optimizer": optimizer} if is_named else {}))
        torch.manual_seed(3)
        for step in range(6):
            if step == 2 and how == "pruned":
                del model[1]
            elif step == 2:
                model.load_state_dict({name: each * 0.5 for name, each in model.state_dict().items()}, assign=True)
            optimizer.zero_grad()
            loss = squares(model(torch.randn(ROWS if step < 4 else ROWS // 2 * 3, WIDTH)))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    handle.remove()
    assert losses[:6] == losses[6:]


def test_attach_refuses_an_optimizer_of_another_model():
    with pytest.raises(InvalidModel, match="AdamW does not hold any parameter of Sequential"):
        plimsoll.attach(blocks(), "1GiB", optimizer=torch.optim.AdamW(blocks().parameters()))


def exchanged_by_loading(model: nn.Module) -> None:
    model.load_state_dict({name: each * 0.5 for name, each in model.state_dict().items()}, assign=True)


def exchanged_by_assignment(model: nn.Module) -> None:
    for module in model.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(each.detach() * 0.5, requires_grad=each.requires_grad))


@pytest.mark.parametrize("exchange", some([exchanged_by_loading, exchanged_by_assignment], 1))
@pytest.mark.parametrize("verb", ["apply", "attach", "attach with room"])
def test_parameters_that_are_exchanged_in_mid_run_are_freed(verb: str, exchange: Callable[[nn.Module], None]):
    model, batch = blocks(), torch.randn(ROWS, WIDTH)
    model[0].up.bias.requires_grad_(False)
    budget = between(model, batch)
    if verb == "apply":
        handle = plimsoll.apply(model, plimsoll.plan(model, batch, budget, loss=squares))
    else:
        handle = plimsoll.attach(model, budget if verb == "attach" else "100MiB")
    trained(model, [batch] * 3, torch.enable_grad)
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    exchange(model)
    trained(model, [batch] * 3, torch.enable_grad)
    gc.collect()
    assert not any(reference() is not None for reference in before)
    handle.remove()


class Branched(nn.Module):
    """Runs two branches in threads: modules, or functions alone."""

    def __init__(self, *, with_modules: bool) -> None:
        super().__init__()
        self.one, self.other, self.with_modules = Block(), Block(), with_modules

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = (self.one, self.other) if self.with_modules else (torch.sigmoid, torch.tanh)
        with ThreadPoolExecutor(2) as pool:
            return x + sum(each.result() for each in [pool.submit(branch, self.one(x)) for branch in branches])


@pytest.mark.parametrize("with_modules", [True, False], ids=["modules", "functions"])
@pytest.mark.parametrize("verb", ["plan", "attach"])
def test_branches_in_threads_are_refused_with_the_reason(verb: str, *, with_modules: bool):
    model, batch = nn.Sequential(*(Branched(with_modules=with_modules) for _ in range(3))), torch.randn(ROWS, WIDTH)
    squares(model(batch)).backward()
    reason = "modules in other threads" if with_modules else "or of another thread"
    with unchanged(model):
        if verb == "attach":
            plimsoll.attach(model, "1GiB")
        with pytest.raises(InvalidBatch, match=reason):
            model(batch) if verb == "attach" else plimsoll.plan(model, batch, "1GiB", loss=squares)


class Remembering(nn.Module):
    """Hands its hidden state to the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.hidden = blocks(), torch.zeros(ROWS, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.inner(x + self.hidden)
        return self.hidden


def test_a_graph_of_an_earlier_call_is_named_as_such():
    model, batch = Remembering(), torch.randn(ROWS, WIDTH)
    model(batch)
    with pytest.raises(InvalidBatch, match="graph of an earlier call"):
        plimsoll.plan(model, batch, "1GiB", loss=squares)


class TransformsBetween(nn.Module):
    """Runs transforms of torch.func between its blocks: derivatives with respect to outputs of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.scale = blocks(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = x + torch.func.vmap(torch.func.grad(lambda row: torch.tanh(row * self.scale).sum()))(x)
        return x


def inner_derivatives(output: torch.Tensor) -> torch.Tensor:
    return squares(torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(output))


@pytest.mark.parametrize(
    ("make", "loss"), [(TransformsBetween, squares), (blocks, inner_derivatives)], ids=["model", "loss"]
)
@pytest.mark.parametrize("verb", ["attach", "apply"])
def test_transforms_outside_of_regions_do_not_stop_planning(
    make: Callable[[], nn.Module], loss: Callable[[Any], torch.Tensor], verb: str
):
    plain, batch = make(), torch.randn(ROWS, WIDTH)
    managed = copy.deepcopy(plain)

    def losses(model: nn.Module) -> list[float]:
        optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-2), []
        for _ in range(4):
            value = loss(model(batch))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(value.item())
        return found

    expected = losses(plain)
    plan = plimsoll.plan(managed, batch, strategy="full", loss=loss)
    assert plan.predicted_peak_bytes < plan.baseline_peak_bytes
    budget = (plan.predicted_peak_bytes + plan.baseline_peak_bytes) // 2
    with plimsoll.attach(managed, budget) if verb == "attach" else plimsoll.apply(managed, plan):
        assert losses(managed) == expected


class Image(torch.Tensor):
    """A batch of a class of its own with an attribute, as MONAI's and torchvision's."""

    @classmethod
    def of(cls, batch: torch.Tensor, scale: float) -> torch.Tensor:
        image = batch.as_subclass(cls)
        image.scale = scale  # type: ignore[attr-defined]
        return image


def with_attribute(batch: torch.Tensor, scale: float) -> torch.Tensor:
    batch.scale = scale  # type: ignore[attr-defined]
    return batch


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, image: Any) -> torch.Tensor:
        return self.blocks(image.as_subclass(torch.Tensor) * image.scale)


class Positioned(Block):
    """Grows a buffer when it meets more rows, as caches of positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.zeros(0, 4 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.positions) < len(x):
            self.positions = torch.linspace(0, 1, len(x))[:, None].repeat(1, 4 * WIDTH)
        return x + self.down(torch.tanh(self.up(x) + self.positions[: len(x)]))


def validated() -> nn.Sequential:
    """A model whose buffers a validation made in inference mode."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Positioned() for _ in range(4)))
    with torch.inference_mode():
        model(torch.randn(ROWS, WIDTH))
    return model


class Fallible(Block):
    """Refuses its first way, which its owner then does without."""

    def forward(self, x: torch.Tensor, is_fast: bool = False) -> torch.Tensor:
        if is_fast:
            self.up(x)
            raise RuntimeError("no fast way here")
        return super().forward(x)


class TriesTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Fallible() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            try:
                x = block(x, is_fast=True)
            except RuntimeError:
                x = block(block(x))
        return x


class WithoutModule(Block):
    """Holds a function that says no module, as those of ``sympy.lambdify``."""

    def __init__(self) -> None:
        super().__init__()
        names: dict[str, Any] = {"__name__": None, "tanh": torch.tanh}
        exec("def act(x): return x * tanh(x)", names)
        self.act = names["act"]
        assert self.act.__module__ is None  # as `exec` leaves it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


def roomy(model: nn.Module, batch: Any) -> int:
    """A budget above the unmanaged peak."""
    return 64 * MIB


def without_modules() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(WithoutModule() for _ in range(4)))


@pytest.mark.parametrize(
    ("make", "batch", "budget"),
    [
        (Scaled, lambda: Image.of(torch.randn(ROWS, WIDTH), 0.5), between),
        (Scaled, lambda: with_attribute(torch.randn(ROWS, WIDTH), 0.5), between),
        (validated, lambda: torch.randn(ROWS, WIDTH), roomy),  # to copy the buffers takes as much as a plan frees
        (TriesTwice, lambda: torch.randn(ROWS, WIDTH), between),
        (without_modules, lambda: torch.randn(ROWS, WIDTH), between),
    ],
    ids=["class of its own", "attribute", "inference buffer", "caught error", "function without module"],
)
def test_a_budget_is_kept_with_the_same_bits(
    make: Callable[[], nn.Module], batch: Callable[[], torch.Tensor], budget: Callable[[nn.Module, torch.Tensor], int]
):
    plain, managed, given = make(), make(), batch()
    expected = trained(plain, [given] * 4, torch.enable_grad)
    with plimsoll.attach(managed, budget(managed, given)) as attachment:
        assert trained(managed, [given] * 4, torch.enable_grad) == expected
        assert attachment.plan is not None
        assert all(region.is_left_alone for region in attachment.plan.regions) == (budget is roomy)
    assert all(map(torch.equal, plain.parameters(), managed.parameters()))


class Clipping(Block):
    """Writes a weight through ``.data``, which autograd does not count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.down.weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


def test_a_trial_restores_clipped_weights_while_a_graph_waits_for_its_backward():
    def weights(*, is_managed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Clipping() for _ in range(3)))
        # The second forward is of another shape and finds too little room, so plans are tried before the backward.
        handle = plimsoll.attach(model, "1.05MiB") if is_managed else None
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(3):
            (squares(model(torch.randn(32, WIDTH))) + squares(model(torch.randn(48, WIDTH)))).backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            handle.remove()
        return [each.detach() for each in model.parameters()]

    assert all(map(torch.equal, weights(is_managed=False), weights(is_managed=True)))


class Turning(nn.Linear):
    """Transposes its weight in each forward, at the same address."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data.t()
        return torch.tanh(super().forward(x))


def test_planning_leaves_weights_that_forward_transposes_as_they_were():
    model = nn.Sequential(*(Turning(WIDTH, WIDTH) for _ in range(3)))
    before = [(each.stride(), each.detach().clone()) for each in model.parameters()]
    plimsoll.plan(model, torch.randn(ROWS, WIDTH), loss=squares)
    assert all(
        each.stride() == stride and torch.equal(each, copy)
        for each, (stride, copy) in zip(model.parameters(), before, strict=True)
    )


def test_the_copies_of_small_buffers_that_recipes_read_are_planned():
    """Each block adds a buffer as large as the value that it saves: to rebuild that value, the buffer is copied."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Positioned() for _ in range(4))), torch.randn(ROWS, WIDTH)
    model(batch)
    plan = plimsoll.plan(model, batch, loss=squares, strategy="full")
    assert plan.predicted_peak_bytes > plan.baseline_peak_bytes
    assert plimsoll.verify(model, batch, plan, loss=squares, steps=1).verdict.is_pass
    # A plan under a budget does not pay for nothing.
    assert plimsoll.plan(model, batch, "1GiB", loss=squares).predicted_peak_bytes == plan.baseline_peak_bytes
