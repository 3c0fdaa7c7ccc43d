"""What torch.compile's front end captures of real models, and where it stops."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest
import torch
import torch._dynamo as dynamo
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters

import plimsoll
from plimsoll.analysis.advise.compiler_capture import ask_compiler, shorten
from plimsoll.artifacts.advice import Capture
from steps import Stack, conv_net, gpt2, llama, mean_square, stack
from unchanged import unchanged


class Chatty(Stack):
    """Prints between its blocks, and branches on a value at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        print("half way")
        x = self.blocks[1](x)
        if x.mean().item() > 0:
            x = x + 1
        return self.blocks[2](x)


class Closed(Stack):
    """Nothing of it may be captured."""

    @torch._dynamo.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Strict(Chatty):
    """Wants to be captured as a whole or not at all, and cannot be."""

    @torch._dynamo.error_on_graph_break(True)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Shrinking(Stack):
    """Writes one of its weights in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.blocks[0].up.weight.mul_(0.5)
        return super().forward(x)


class CountingLoss:
    """A loss with state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return mean_square(output)


def test_a_loss_and_weights_that_the_step_writes_are_restored():
    model, loss = Shrinking(), CountingLoss()
    before = model.blocks[0].up.weight.detach().clone()
    plimsoll.advise(model, torch.randn(4, 32), loss=loss)
    assert loss.calls == 0
    assert torch.equal(model.blocks[0].up.weight, before)


def ask(model: Stack) -> Capture:
    return ask_compiler(model, (torch.randn(4, 32),), {}, loss=mean_square)


@pytest.mark.long
def test_a_language_model_is_one_graph_with_all_of_its_backward():
    model, batch, _ = llama()
    model.model.layers = model.model.layers[:1]
    capture = ask_compiler(model, (), batch)
    assert (capture.is_asked, capture.failure, capture.graphs, capture.breaks) == (True, "", 1, ())
    captured = sum(op.is_captured for op in capture.backward)
    assert captured >= len(capture.backward) - 1  # autograd makes the loss's own gradient of ones


def test_breaks_name_the_line_the_reason_and_what_lies_between_them_is_captured(capsys):
    capture = ask(Chatty())
    codes = {entry.code: entry for entry in capture.breaks}
    assert set(codes) == {'print("half way")', "if x.mean().item() > 0:"}
    for code, entry in codes.items():
        assert linecache.getline(str(Path.cwd() / entry.file), entry.line).strip() == code
    assert "print" not in codes["if x.mean().item() > 0:"].reason
    assert capture.graphs == 3
    norms = [sum(key.startswith("aten.native_layer_norm") for key in keys) for keys in capture.forward]
    assert norms == [1, 1, 1]
    capsys.readouterr()


@pytest.mark.long
def test_a_break_inside_of_a_called_function_is_named_with_that_function():
    model, batch, _ = gpt2()
    model.transformer.h = model.transformer.h[:1]
    reasons = [entry.reason for entry in ask_compiler(model, (), batch).breaks]
    assert any("loss_function" in reason for reason in reasons)


def test_a_model_that_is_closed_to_the_compiler_is_a_result():
    capture = ask(Closed())
    assert capture.is_asked
    assert capture.graphs == 0
    assert capture.backward
    assert not any(op.is_captured for op in capture.backward)


def test_a_model_that_fails_under_the_compiler_is_a_result_with_its_reason():
    capture = ask(Strict())
    assert capture.is_asked
    assert "print" in capture.failure or "builtin" in capture.failure
    assert capture.forward == ()


def test_a_limit_of_time_ends_it_and_one_that_is_switched_off_is_not_asked():
    model, batch, _ = llama()
    with unchanged(model):
        capture = ask_compiler(model, (), batch, limit_seconds=1e-9)
    assert not capture.is_asked
    assert "longer than 1e-09 s" in capture.failure
    with dynamo.config.patch(disable=True):
        assert "switched off" in ask(Stack()).failure


def test_model_batch_and_random_state_are_left_as_they_were_and_running_statistics_do_not_move():
    model, batch, loss = stack()
    kept = batch.clone()
    with unchanged(model):
        ask_compiler(model, (batch,), {}, loss=loss)
    assert torch.equal(batch, kept)
    model, batch, loss = conv_net()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert ask_compiler(model, (batch,), {}, loss=loss).graphs == 1
    assert all(torch.equal(buffer, kept[name]) for name, buffer in model.named_buffers())


def test_the_compiler_is_left_as_it_was_and_compiled_functions_still_work():
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    compiled(torch.ones(3))
    seen: list[object] = []
    callback_handler.register_start_callback(seen.append)
    try:
        counted = {name: dict(counter) for name, counter in counters.items()}
        config = dynamo.config.save_config()
        callbacks = [*callback_handler.start_callbacks]
        ask(Stack())
        assert {name: dict(counter) for name, counter in counters.items()} == counted
        assert dynamo.config.save_config() == config
        assert callback_handler.start_callbacks == callbacks
    finally:
        callback_handler.remove_start_callback(seen.append)
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]


def test_it_is_asked_even_where_everything_else_is_to_run_eager():
    with torch.compiler.set_stance("force_eager"):
        assert ask(Stack()).graphs == 1
        compiled = torch.compile(lambda x: x + 1, backend=lambda graph, inputs: pytest.fail("compiled"))
        compiled(torch.ones(2))


def test_paths_are_those_that_people_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert shorten(str(tmp_path / "models" / "net.py")) == "models/net.py"
    assert shorten("/opt/python/site-packages/transformers/models/llama.py") == "transformers/models/llama.py"
    assert shorten("/somewhere/else/net.py") == "net.py"
