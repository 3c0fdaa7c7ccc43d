"""Loops of one's own with ``plimsoll.attach``, as the examples of timm, diffusers, PyTorch Geometric and torchvision have them.

Models are small, with random weights. The libraries are imported where a model is made: rows of those that are not
installed are left out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import plimsoll
from benchmarks.stack_setups.set_up import Arm, SetUp, Watch
from plimsoll.tracing.meters.memory import storage_bytes


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a loop trains: the model, batches, the loss and what switches the library's own checkpointing on."""

    build: Callable[[], Any]
    batch: Callable[[], Any]
    """Makes the next one."""
    loss: Callable[[Any, Any], torch.Tensor]
    switch: Callable[[Any], object]


def train(
    watch: Watch,
    arm: Arm,
    steps: int,
    *,
    task: Task,
    precision: str = "fp32",
    accumulation: int = 1,
    averages: bool = False,
) -> nn.Module:
    """Train; ``averages``: diffusers' moving average of the weights is kept beside, and is no part of what is attached to."""
    with contextlib.nullcontext() if watch.meter is None else watch.meter:
        torch.manual_seed(0)
        model: nn.Module = task.build().train()
        average = _average(model) if averages else None
        if arm.own_switch:
            task.switch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        beside_bytes = 0 if average is None else storage_bytes(average.shadow_params)
        handle = None if arm.budget is None else plimsoll.attach(model, arm.budget - beside_bytes)
        watch.attached(model)
        losses = []
        for number in range(steps * accumulation):
            with torch.random.fork_rng():
                torch.manual_seed(number)
                batch = task.batch()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = task.loss(model, batch)
            (loss / accumulation).backward()
            losses.append(float(loss.detach()))
            if (number + 1) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
                if average is not None:
                    average.step(model.parameters())
                watch.stepped()
        if handle is not None:
            handle.remove()
    watch.ended(model, losses)
    return model


def _average(model: nn.Module) -> Any:
    from diffusers.training_utils import EMAModel

    return EMAModel(model.parameters(), use_ema_warmup=True)


def _pictures(rows: int, size: int) -> Any:
    return torch.randn(rows, 3, size, size), torch.randint(0, 10, (rows,))


def _classified(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def timm_task(name: str, *, rows: int, size: int, **changes: Any) -> Task:
    """A model of timm's that tells ten kinds of pictures apart."""

    def build() -> Any:
        import timm

        return timm.create_model(name, num_classes=10, **changes)

    return Task(
        build=build,
        batch=functools.partial(_pictures, rows, size),
        loss=_classified,
        switch=lambda model: model.set_grad_checkpointing(True),
    )


def denoising_task(name: str, *, rows: int, size: int, channels: int = 3, **changes: Any) -> Task:
    """A model of diffusers' that predicts the noise in pictures, as its training examples do; ``conditions`` are by keyword."""
    conditions = changes.pop("conditions", dict)

    def build() -> Any:
        import diffusers

        return getattr(diffusers, name)(sample_size=size, in_channels=channels, out_channels=channels, **changes)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        from diffusers import DDPMScheduler

        schedule = DDPMScheduler(num_train_timesteps=1000)
        noise = torch.randn(batch["pictures"].shape)
        steps = torch.randint(0, 1000, (rows,))
        noisy = schedule.add_noise(batch["pictures"], noise, steps)
        found = model(noisy, steps, **{key: value for key, value in batch.items() if key != "pictures"}).sample
        return F.mse_loss(found.float(), noise)

    return Task(
        build=build,
        batch=lambda: {"pictures": torch.randn(rows, channels, size, size), **conditions()},
        loss=loss,
        switch=lambda model: model.enable_gradient_checkpointing(),
    )


class DeeperNet(nn.Module):
    """DeeperGCN as PyTorch Geometric's example for proteins makes it."""

    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        from torch_geometric.nn import DeepGCNLayer, GENConv

        self.encoder = nn.Linear(16, width)
        self.layers = nn.ModuleList(
            DeepGCNLayer(
                GENConv(width, width, aggr="softmax", t=1.0, learn_t=True, num_layers=2, norm="layer"),
                nn.LayerNorm(width),
                nn.ReLU(inplace=True),
                block="res+",
                dropout=0.1,
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Logits of every node."""
        x = self.encoder(x)
        x = self.layers[0].conv(x, edges)
        for layer in self.layers[1:]:
            x = layer(x, edges)
        x = self.layers[0].act(self.layers[0].norm(x))
        logits: torch.Tensor = self.head(F.dropout(x, 0.1, self.training))
        return logits


def _graph(nodes: int, edges: int) -> Any:
    """A graph of so many nodes and edges, or up to a third more."""
    nodes = int(torch.randint(nodes, nodes * 4 // 3, ()))
    ends = torch.randint(0, nodes, (2, int(torch.randint(edges, edges * 4 // 3, ()))))
    return (torch.randn(nodes, 16), ends), torch.randint(0, 5, (nodes,))


def _checkpoint_layers(model: Any) -> None:
    for layer in model.layers:
        layer.ckpt_grad = True


def graph_task(nodes: int, edges: int) -> Task:
    """Graphs of other sizes in every step."""
    return Task(
        build=DeeperNet,
        batch=functools.partial(_graph, nodes, edges),
        loss=lambda model, batch: F.cross_entropy(model(*batch[0]), batch[1]),
        switch=_checkpoint_layers,
    )


def detection_task(name: str) -> Task:
    """A detector of torchvision's on a MobileNet, for pictures of any size with any number of boxes each."""

    def build() -> Any:
        from torchvision.models import detection
        from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead

        plain = {"weights": None, "weights_backbone": None, "num_classes": 5}
        if name == "SSDlite":
            return detection.ssdlite320_mobilenet_v3_large(**plain)
        made = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
            **plain, trainable_backbone_layers=6, min_size=160, max_size=256, box_batch_size_per_image=64
        )
        made.roi_heads.box_head = TwoMLPHead(256 * 49, 64)
        made.roi_heads.box_predictor = FastRCNNPredictor(64, 5)
        return made

    return Task(build=build, batch=_scenes, loss=lambda model, batch: sum(model(*batch).values()), switch=_by_block)


def _scenes(rows: int = 2) -> Any:
    images, targets = [], []
    for _ in range(rows):
        sides = torch.randint(160, 240, (2,))
        count = int(torch.randint(1, 9, ()))
        corners = torch.rand(count, 2) * sides.flip(0) * 0.5
        boxes = torch.cat([corners, corners + 10 + torch.rand(count, 2) * sides.flip(0) * 0.4], dim=1)
        images.append(torch.rand(3, *sides.tolist()))
        targets.append({"boxes": boxes, "labels": torch.randint(1, 5, (count,))})
    return images, targets


def _by_block(model: Any) -> None:
    """Put torch's own wrapper around every block, as torchvision has no switch."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torchvision.models.mobilenetv3 import InvertedResidual

    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, InvertedResidual))


_UNET = {
    "block_out_channels": (32, 64, 64),
    "norm_num_groups": 8,
    "layers_per_block": 2,
}
_EFFICIENT = {"drop_path_rate": 0.2, "drop_rate": 0.2}
_VIT = {"img_size": 64, "patch_size": 8, "depth": 6, "embed_dim": 96, "num_heads": 3, "drop_path_rate": 0.1}
_CONVNEXT = {"depths": (2, 2, 4, 2), "dims": (24, 48, 96, 192), "drop_path_rate": 0.1}
EFFICIENTNET = timm_task("efficientnet_b0", rows=8, size=96, **_EFFICIENT)
VIT = timm_task("vit_tiny_patch16_224", rows=16, size=64, **_VIT)
UNET = denoising_task(
    "UNet2DModel",
    rows=8,
    size=32,
    down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    **_UNET,
)
TEXT_UNET = denoising_task(
    "UNet2DConditionModel",
    rows=4,
    size=32,
    channels=4,
    down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=32,
    conditions=lambda: {"encoder_hidden_states": torch.randn(4, 20, 32)},
    **_UNET,
)


def dit(num_layers: int = 6) -> Task:
    """Diffusers' transformer on small latents."""
    return denoising_task(
        "DiTTransformer2DModel",
        rows=8,
        size=16,
        channels=4,
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=num_layers,
        patch_size=2,
        num_embeds_ada_norm=1000,
        conditions=lambda: {"class_labels": torch.randint(0, 10, (8,))},
    )


def _set_up(stack: str, requires: str, of_model: str, shapes: str, task: Task, **changes: Any) -> SetUp:
    return SetUp(
        stack=stack,
        model=of_model,
        precision=changes.get("precision", "fp32"),
        accumulation=changes.get("accumulation", 1),
        shapes=shapes,
        requires=requires,
        taught=changes.pop("taught", 5),
        train=functools.partial(train, task=task, **changes),
    )


_TIMM = functools.partial(_set_up, "timm", "timm")
_DIFFUSERS = functools.partial(_set_up, "diffusers", "diffusers")
_PYG = functools.partial(_set_up, "PyG", "torch_geometric", taught=40)
_DETECTION = functools.partial(_set_up, "torchvision", "torchvision", taught=20)
_SMALL = "8 x 96²"
SET_UPS = (
    _TIMM("EfficientNet-B0", _SMALL, EFFICIENTNET),
    _TIMM("EfficientNet-B0", _SMALL, EFFICIENTNET, accumulation=2),
    _TIMM("ViT", "16 x 64²", VIT),
    _TIMM("ViT", "16 x 64²", VIT, precision="bf16"),
    _TIMM("ConvNeXt", "16 x 64²", timm_task("convnext_atto", rows=16, size=64, **_CONVNEXT)),
    _DIFFUSERS("UNet2D", "8 x 32²", UNET, averages=True),
    _DIFFUSERS("UNet2DCondition", "4 x 32²", TEXT_UNET),
    _DIFFUSERS("DiT", "8 x 16²", dit()),
    _PYG("DeeperGCN", "300 to 400 nodes", graph_task(300, 2100)),
    _PYG("DeeperGCN", "1500 to 2000 nodes", graph_task(1500, 12000)),
    _DETECTION("SSDlite", "ragged", detection_task("SSDlite")),
    _DETECTION("Faster R-CNN", "ragged", detection_task("Faster R-CNN")),
)
