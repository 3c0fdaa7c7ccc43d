"""Joint graphs of torch.compile as kernels and buffers, and the step that has them in the places of eager ops."""

import functools
from collections import Counter
from uuid import uuid4

import pytest
import torch
from torch import fx, nn
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.utils.checkpoint import CheckpointPolicy

from long_cases import some
from plimsoll.artifacts.trace import Category, Phase
from plimsoll.engine.compiled.partitioner import PlannedPartitioner
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import find_extremes
from plimsoll.session.device_costs import measured_costs
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.compiled.capture import capture
from plimsoll.tracing.compiled.joint import OUTSIDE, JointGraph
from plimsoll.tracing.compiled.nodes import node_bytes, obstacle
from plimsoll.tracing.compiled.seconds import kernel_key, timed
from plimsoll.tracing.compiled.step import with_compiled
from plimsoll.tracing.compiled.units import find_units, in_place
from plimsoll.tracing.trace import trace

WIDTH = 32
ROWS = 64
BLOCKS = ("blocks.0", "blocks.1")
VALUE = ROWS * WIDTH * 4


def tanh_gelu(x):
    return nn.functional.gelu(x, approximate="tanh")


class Block(nn.Module):
    def __init__(self, width, dropout, activation):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = dropout
        self.activation = activation

    def forward(self, x):
        y = self.down(self.activation(self.up(self.norm(x))))
        return x + nn.functional.dropout(y, self.dropout) if self.dropout else x + y


class Net(nn.Module):
    def __init__(self, dropout=0.0, width=WIDTH, activation=nn.functional.silu):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, dropout, activation) for _ in BLOCKS)

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean(), "last": x}


@functools.cache
def caught(how, dropout=0.0, width=WIDTH, rows=ROWS, activation=nn.functional.silu):
    """A model, its units, its step, and its eager step and compiled parts."""
    torch.manual_seed(0)
    model = Net(dropout, width, activation).train()
    for module in [model] if how == "whole" else model.blocks:
        module.compile(dynamic=False)
    units = find_units(model)
    batch = {"x": torch.randn(rows, width)}
    modules = {unit.path: unit.module for unit in units}
    with in_place(units, lambda unit: None):
        eager = trace(model, batch, regions=modules, repeats=1)
    step = TrainingStep(model, (), batch)
    regions = {unit.path: BLOCKS if how == "whole" else ("",) for unit in units}
    return units, step, eager, capture(units, regions, step.run)


def graph_of(dropout=0.0) -> JointGraph:
    (graph,) = caught("whole", dropout)[3]["", 0].graphs
    return graph


def test_fused_ops_are_one_kernel_and_only_what_lies_between_kernels_has_memory():
    graph = graph_of()
    forward = [kernel for kernel in graph.kernels if not kernel.is_backward]
    assert Counter(k.region for k in forward if not k.is_fused) == {"outside": 1, "blocks.0": 2, "blocks.1": 2}
    names = {name for name in graph.names.values() if name.startswith("blocks.0")}
    assert {"blocks.0.up:addmm", "blocks.0.norm:add", "blocks.0:add"} <= names
    assert not any("sigmoid" in name or "rsqrt" in name for name in names)


def test_a_kernel_comes_after_those_that_it_reads_from_and_backward_after_forward():
    graph = graph_of()
    made = {node: at for at, kernel in enumerate(graph.kernels) for node in kernel.writes}
    for at, kernel in enumerate(graph.kernels):
        assert all(made.get(node, -1) < at for node in kernel.reads)
    assert [kernel.is_backward for kernel in graph.kernels] == sorted(kernel.is_backward for kernel in graph.kernels)


def test_equal_blocks_have_equal_buffers():
    names = graph_of().names.values()
    first, second = ({n.removeprefix(b) for n in names if n.startswith(b)} for b in BLOCKS)
    assert first == second


def test_seeds_collectives_and_writes_may_not_run_again():
    (seeds,) = [kernel for kernel in graph_of(0.1).kernels if kernel.obstacle]
    assert (seeds.name, seeds.obstacle) == ("inductor_seeds", "draws random numbers")
    graph = fx.Graph()
    x = graph.placeholder("x")
    cases = {
        torch.ops._c10d_functional.all_reduce.default: ((x, "sum", "0"), "is a collective"),
        torch.ops.aten.add_.Tensor: ((x, x), "writes to its inputs"),
        torch.ops.aten.add.Tensor: ((x, x), ""),
    }
    for target, (args, reason) in cases.items():
        assert obstacle(graph.call_function(target, args)) == reason


def test_a_mask_may_be_drawn_again_from_its_seeds_and_what_it_is_applied_to_may_run_again():
    graph = graph_of(0.1)
    (seeds,) = (kernel.writes[0] for kernel in graph.kernels if kernel.obstacle)
    for block in BLOCKS:
        (drawing,) = (
            kernel
            for kernel in graph.kernels
            if seeds in kernel.reads and kernel.region == block and not kernel.is_backward
        )
        (mask,) = drawing.writes
        assert mask in graph.masks
        assert node_bytes(mask) == VALUE // 4  # a byte for each element, no number
        (applied,) = (kernel for kernel in graph.kernels if mask in kernel.reads and not kernel.is_backward)
        assert (drawing.obstacle, applied.obstacle) == ("", "")
        readers = graph.read_by_backward()
        assert {*readers[mask]} <= {*readers[seeds]}


def test_numbers_that_are_drawn_into_a_tensor_have_no_seeds_and_are_not_drawn_again():
    model, rows = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.AlphaDropout(0.2)), torch.randn(ROWS, WIDTH)
    model.compile(dynamic=False)
    (graph,) = capture(find_units(model), {"": ("",)}, lambda: model(rows).sum().backward())["", 0].graphs
    assert "draws random numbers" in {kernel.obstacle for kernel in graph.kernels}


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = x + self.first(x)
        return y + self.second(self.norm(y))


def test_one_of_several_buffers_of_a_kernel_is_made_again_from_the_others():
    model, rows = Summed(), torch.randn(ROWS, WIDTH)
    model.compile(dynamic=False)
    (graph,) = capture(find_units(model), {"": ("",)}, lambda: model(rows).sum().backward())["", 0].graphs
    (kernel,) = (kernel for kernel in graph.kernels if kernel.apart)
    reads = {graph.names[again.writes[0]]: {*map(graph.names.get, again.reads)} - {None} for again in kernel.again}
    assert reads == {
        ":add": {"first:addmm"},
        "norm:var_mean": {":add"},
        "norm:add": {":add", "norm:var_mean", "norm:var_mean#2"},
    }


@pytest.mark.parametrize("how", some(["whole", "blocks"], 1))
def test_the_step_has_the_kernels_in_the_places_of_the_units_ops(how):
    _, _, eager, parts = caught(how)
    step = with_compiled(eager, parts, torch.device("cpu"))
    kernels = sum(len(graph.kernels) for part in parts.values() for graph in part.graphs)
    assert len(step.ops) == sum(op.region < 0 for op in eager.ops) + kernels
    assert tuple(call.name for call in step.regions) == BLOCKS
    phases = [op.phase for op in step.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD)]
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.BACKWARD].index)
    for storage in step.storages:
        assert -1 <= storage.born < storage.dies <= len(step.ops)
    kept = (Category.PARAMETER, Category.GRADIENT)
    totals = [Counter({c: sum(s.bytes for s in t.storages if s.category is c) for c in kept}) for t in (eager, step)]
    assert totals[0][Category.PARAMETER] == totals[1][Category.PARAMETER] == totals[1][Category.GRADIENT]


def test_a_product_of_an_expanded_gradient_is_timed():
    class SummedUp(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum()

    model = SummedUp(WIDTH, WIDTH)
    model.compile(dynamic=False)
    units = find_units(model)
    batch = (torch.randn(ROWS, WIDTH),)
    with in_place(units, lambda unit: None):
        eager = trace(model, batch, regions={"": model}, repeats=1)
    captured = capture(units, {"": ("",)}, TrainingStep(model, batch, {}).run)
    step = with_compiled(eager, captured, torch.device("cpu"))
    products = [op for op in step.ops if op.name in ("mm", "addmm")]
    assert len(products) >= 2
    assert all(min(step.timings[op.cost_key]) > 0 for op in products)


def test_an_op_that_divides_rows_among_experts_is_timed_with_rows_for_each():
    given = []

    @torch.library.custom_op("plimsoll_test::experts", mutates_args=())
    def experts(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        given.append(offs.tolist())
        return rows @ weights[0]

    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("rows", "weights", "offs")]
    shapes = ((ROWS, WIDTH), (4, WIDTH, WIDTH), (4,))
    for node, shape, dtype in zip(nodes, shapes, (torch.float32, torch.float32, torch.int32), strict=True):
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    call = graph.call_function(torch.ops.plimsoll_test.experts.default, tuple(nodes))
    call.meta["val"] = torch.empty(ROWS, WIDTH, device="meta")
    graph.output((call,))
    [kernel] = JointGraph(graph, 1, ("",)).kernels
    assert timed([kernel], torch.device("cpu"))[kernel_key(kernel)]
    assert given
    assert all(ends == sorted(ends) and ends[-1] == ROWS for ends in given)


def test_zeros_stand_for_the_gradient_of_an_output_that_has_none():
    _, _, eager, parts = caught("whole")
    zeros = [
        s for s in with_compiled(eager, parts, torch.device("cpu")).storages if s.label.startswith("zero gradient")
    ]
    assert [storage.bytes for storage in zeros if storage.bytes > 64] == [VALUE]


def test_what_another_blocks_backward_reads_is_saved_whatever_is_dropped():
    graph = graph_of()
    nodes = {name: node for node, name in graph.names.items()}
    read = graph.read_by_backward()
    regions = {node: {graph.kernels[at].region for at in at_} for node, at_ in read.items()}
    dropped = {block: frozenset(n.removeprefix(block + ".") for n in nodes if n.startswith(block)) for block in BLOCKS}
    PlannedPartitioner(dropped).mark(graph.nodes[0].graph, num_fwd_outputs=len(graph.forward_outputs))
    marks = {name: node.meta["recompute"] for name, node in nodes.items()}
    assert marks["blocks.0.up:addmm"] is CheckpointPolicy.MUST_RECOMPUTE
    others = [n for n, node in nodes.items() if node in regions and not any(n.startswith(r) for r in regions[node])]
    assert others
    assert {marks[name] for name in others} == {CheckpointPolicy.MUST_SAVE}
    assert max(node_bytes(nodes[name]) for name in others) == VALUE


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.heads(x).view(4, ROWS // 4, 3, 2, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(query, key, value)
        return x + nn.functional.dropout(self.out(y.transpose(1, 2).flatten(0, 1).flatten(1)), 0.1)


@pytest.mark.long
def test_what_is_computed_again_can_be_captured_in_a_cuda_graph():
    class Watched(PlannedPartitioner):
        def uuid(self):
            return uuid4().hex  # not from torch's caches: None would be a key like another

        def __call__(self, *args, **options):
            modules.extend(super().__call__(*args, **options))
            return modules[-2:]

    modules = []
    model, rows = Attention(), torch.randn(ROWS, WIDTH)
    model.compile(mode="reduce-overhead", dynamic=False)
    (unit,) = find_units(model)
    (graph,) = capture([unit], {"": ("",)}, lambda: model(rows).sum().backward())["", 0].graphs
    every = Watched({"": frozenset(graph.names[node] for node in graph.read_by_backward() if node in graph.names)})
    with in_place([unit], lambda unit: functools.partial(unit.call.compile(**every.options), model)):
        model(rows).sum().backward()
    forward, backward = modules
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert attention in {node.target for node in backward.graph.nodes}
    assert [get_first_incompatible_cudagraph_node(module) for module in (forward, backward)] == [None, None]


def test_what_is_held_for_another_region_is_no_sign_of_another_graph():
    units, step, eager, parts = caught("whole", 0.1)
    traced = with_compiled(eager, parts, None)
    regions = {region.name: region.graph for region in traced.regions if region.is_compiled}
    known = {name: frozenset(graph.values[slot.value].name for slot in graph.slots) for name, graph in regions.items()}
    assert "blocks.0:add" in known["blocks.1"] - known["blocks.0"]
    keeps = PlannedPartitioner(dict.fromkeys(known, frozenset()), known)
    run = lambda module, *_, **__: make_boxed_func(module.forward)  # noqa: E731
    with in_place(units, lambda unit: functools.partial(unit.call.captured(keeps, run), unit.module)):
        step.run()


class Nested(Block):
    forward = torch.compiler.nested_compile_region(Block.forward)


@pytest.mark.long
def test_nested_regions_are_decided_on_one_by_one():
    model, rows = nn.Sequential(*(Nested(WIDTH, 0.1, tanh_gelu) for _ in range(3))), torch.randn(ROWS, WIDTH)
    model.compile(dynamic=False)
    names, user_s = ("0", "1", "2"), torch._dynamo.variables.builder.is_invoke_subgraph
    (graph,) = capture(find_units(model), {"": names}, lambda: model(rows).sum().backward())["", 0].graphs
    seeded = [kernel.name for kernel in graph.kernels if kernel.region == OUTSIDE]
    kernels_of = Counter(k.region for k in graph.kernels if not k.is_backward and k.region != OUTSIDE)
    assert seeded == ["inductor_seeds"]
    assert {*kernels_of} == {*names}
    assert len({*kernels_of.values()}) == 1
    assert torch._dynamo.variables.builder.is_invoke_subgraph is user_s  # whose own compilation has its regions


@pytest.mark.long
@pytest.mark.parametrize("activation", [nn.functional.silu, tanh_gelu])  # both make their exponential, or tanh, twice
def test_predicted_peaks_are_those_of_the_compiled_step(activation):
    units, step, eager, parts = caught("whole", 0.0, 128, 1024, activation)
    compiled = with_compiled(eager, parts, torch.device("cpu"))
    costs = measured_costs(compiled)
    most = find_extremes(compiled, costs).unmanaged_peak_bytes
    planner = Planner(StepIndex(compiled, costs))
    floor = solve(planner, budget_bytes=most, strategy="auto").floor_bytes
    for budget in (most, floor):
        plan = solve(planner, budget_bytes=budget, strategy="auto")
        dropped = {region.name: region.dropped for region in plan.regions}
        made = {}
        for unit in units:
            partitioner = PlannedPartitioner({block: dropped[block] for block in BLOCKS})
            made[unit] = functools.partial(unit.call.compile(**partitioner.options), unit.module)
        with in_place(units, made.__getitem__):
            step.run()
            measured = step.measure_peak().peak_bytes
        assert plan.predicted_peak_bytes == pytest.approx(measured, rel=0.01)
