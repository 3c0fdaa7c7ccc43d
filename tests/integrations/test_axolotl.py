"""Axolotl's plugin, against Axolotl itself: its configuration takes a budget, and its trainers get the callback."""

from __future__ import annotations

import pytest
from benchmarks.stack_setups.hugging_face import plain_trainer

from metering import LiveStorages
from plimsoll.integrations.transformers import PlimsollCallback

pytestmark = pytest.mark.long

plugins = pytest.importorskip(
    "axolotl.integrations.base", reason="axolotl is no test extra: it pins half of Hugging Face"
)
PLUGIN = "plimsoll.integrations.axolotl.PlimsollPlugin"


@pytest.fixture
def manager():
    found = plugins.PluginManager.get_instance()
    found.plugins.clear()
    found.register(PLUGIN)
    return found


@pytest.mark.parametrize(
    ("budget", "options"), [("9MiB", None), (9 * 2**20, {"allow": ["recompute"], "verify_every": 50})]
)
def test_a_budget_in_the_configuration_is_kept_in_every_step(manager, budget, options, tmp_path):
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault

    _, fields = merge_input_args()
    assert {"memory_budget", "memory_budget_options"} <= set(fields.model_fields)
    cfg = DictDefault({"memory_budget": budget, "memory_budget_options": options})
    with LiveStorages() as meter:
        trainer = plain_trainer(str(tmp_path), [], activation_checkpointing=True)
        for callback in manager.add_callbacks_post_trainer(cfg, trainer):
            trainer.add_callback(callback)
        meter.watch(trainer.model)
        trainer.train()
    assert 0 < max(meter.peaks) <= 9 * 2**20
    assert any(isinstance(each, PlimsollCallback) for each in trainer.callback_handler.callbacks)


def test_without_a_budget_there_is_no_callback(manager):
    from axolotl.utils.dict import DictDefault

    assert manager.add_callbacks_post_trainer(DictDefault({}), None) == []
