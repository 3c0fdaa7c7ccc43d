"""Small models in plain torch whose code reads values of tensors: detectors, trees, sparse convolutions, early exits."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.value_reads.stack import ROWS, WIDTH, Batch, Block, Checkpointable, Kind, generator, kind_of

_VOCABULARY, _TEXTS, _TOKENS = 128, 8, 64
_LEVELS = ((16, 16), (8, 8), (4, 4))
_OFFSETS = (0, -1, 1, -32, 32, -1024, 1024)
_SIDE, _CHANNELS, _BOXES = 64, 64, 48


class AdaptiveComputation(Block):
    """Repeat the block until every row has halted, at most six times (adaptive computation time)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halted, result = x.new_zeros(ROWS), torch.zeros_like(x)
        for number in range(6):
            x = x + 0.5 * self.wide(x)
            share = (self.gate(x)[:, 0] + 0.5 * number).sigmoid()
            rest = (1 - halted).clamp_min(0)
            share = torch.where(halted + share > 0.99, rest, share)
            result, halted = result + share[:, None] * x, halted + share
            if not (halted.detach() < 0.99).any():
                break
        return result


class _ExitingLayer(nn.Module):
    """A decoder layer that computes the tokens whose prediction is not confident yet. Others pass unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.pair = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out, self.confidence = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.confidence(x).sigmoid()
        texts, places = (scores.detach()[..., 0] < 0.55).nonzero(as_tuple=True)
        if len(texts) == 0:
            return x * scores
        keys, values = self.pair(self.norm(x)).chunk(2, -1)
        queries = self.query(self.norm(x[texts, places]))
        weights = torch.einsum("qw,qkw->qk", queries, keys[texts]) / math.sqrt(WIDTH)
        weights = weights.masked_fill(torch.arange(x.shape[1])[None] > places[:, None], -torch.inf).softmax(-1)
        moved = x[texts, places] + self.out(torch.einsum("qk,qkw->qw", weights, values[texts]))
        moved = moved + self.down(F.gelu(self.up(self.second_norm(moved))))
        return x.index_put((texts, places), moved * (1 + scores[texts, places]))


class EarlyExitDecoder(Checkpointable):
    """A language model of layers that tokens leave early, and that ends when nearly all have left."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(_ExitingLayer() for _ in range(6))
        self.head = nn.Linear(WIDTH, _VOCABULARY)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x, losses = self.embedding(words), []
        for layer in self.layers:
            x = self.run(layer, x)
            logits = self.head(x[:, :-1])
            losses.append(F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten()))
            if logits.detach().softmax(-1).amax(-1).mean().item() > 0.5:
                break
        return torch.stack(losses).mean()


class _TreeLayer(nn.Module):
    """A child-sum LSTM from the leaves of trees to their roots, one step per depth."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.forget = nn.Linear(2 * WIDTH, 3 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        hidden, cell = torch.zeros_like(x), torch.zeros_like(x)
        children, kept = torch.zeros_like(x), torch.zeros_like(x)
        for depth in range(int(depths.max()), -1, -1):
            nodes = (depths == depth).nonzero().squeeze(1)
            enter, leave, new = self.gates(torch.cat([x[nodes], children[nodes]], -1)).chunk(3, -1)
            its_cell = enter.sigmoid() * new.tanh() + kept[nodes]
            its_hidden = leave.sigmoid() * its_cell.tanh()
            hidden, cell = hidden.index_copy(0, nodes, its_hidden), cell.index_copy(0, nodes, its_cell)
            if depth > 0:
                above = parents[nodes]
                forget = self.forget(torch.cat([x[above], its_hidden], -1)).sigmoid()
                children = children.index_add(0, above, its_hidden)
                kept = kept.index_add(0, above, forget * its_cell)
        return x + hidden


class TreeLstm(Checkpointable):
    """Layers of a tree LSTM over trees that differ in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_TreeLayer() for _ in range(4))

    def forward(self, x: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.run(layer, x, parents, depths)
        return x.square().mean()


def _trees(step: int) -> Batch:
    source, nodes = generator(step), ROWS // 4
    parents = [0, *(int(torch.randint(node // 4, node, (), generator=source)) for node in range(1, nodes))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    rows = torch.randn(nodes, WIDTH, generator=source)
    return {"x": rows, "parents": torch.tensor(parents), "depths": torch.tensor(depths)}


class _SparseLayer(nn.Module):
    """Two convolutions over each occupied voxel and its six neighbours, by gather and scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(7, WIDTH, WIDTH) * 0.02) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        moved = x
        pairs = [self._pairs(keys, offset) for offset in _OFFSETS]
        for weight, norm in zip(self.weights, self.norms, strict=True):
            inner, moved = F.silu(norm(moved)), torch.zeros_like(moved)
            for matrix, (targets, sources) in zip(weight, pairs, strict=True):
                if targets.numel() > 0:
                    moved = moved.index_add(0, targets, inner[sources] @ matrix)
        return x + moved

    def _pairs(self, keys: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the voxels that have a neighbour at ``offset``, and these neighbours. Keys are sorted."""
        wanted = keys + offset
        places = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        targets = (keys[places] == wanted).nonzero().squeeze(1)
        return targets, places[targets]


class SparseConvolution(Checkpointable):
    """Convolutions over occupied voxels. Their number differs in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(_SparseLayer() for _ in range(4))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        cells = (points[:, :3] * 8).long() + 1
        keys, places = ((cells[:, 0] * 32 + cells[:, 1]) * 32 + cells[:, 2]).unique(return_inverse=True)
        x = self.stem(points.new_zeros(len(keys), 4).index_add(0, places, points))
        for layer in self.layers:
            x = self.run(layer, x, keys)
        return x.square().mean()


def _points(step: int) -> Batch:
    return {"points": torch.rand(ROWS, 4, generator=generator(step))}


class _DeformableLayer(nn.Module):
    """Multi-scale deformable attention and an MLP. Sizes of the levels are read from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.offsets, self.shares = nn.Linear(WIDTH, 4 * 3 * 4 * 2), nn.Linear(WIDTH, 4 * 3 * 4)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, places: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        inner = self.norm(x)
        values = self.value(inner).view(batch, length, 4, WIDTH // 4)
        offsets = self.offsets(inner).view(batch, length, 4, 3, 4, 2)
        points = places[:, :, None, None, None] + offsets / sizes.flip(-1)[None, None, None, :, None]
        shares = self.shares(inner).view(batch, length, 4, 12).softmax(-1)
        found = []
        for level, part in enumerate(values.split([height * width for height, width in sizes.tolist()], 1)):
            height, width = sizes[level].tolist()
            picture = part.permute(0, 2, 3, 1).reshape(batch * 4, WIDTH // 4, height, width)
            grid = 2 * points[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
            found.append(F.grid_sample(picture, grid, align_corners=False))
        weights = shares.transpose(1, 2).reshape(batch * 4, 1, length, 12)
        attended = (torch.cat(found, -1) * weights).sum(-1).view(batch, WIDTH, length).mT
        x = x + self.out(attended)
        return x + self.down(F.relu(self.up(self.second_norm(x))))


class DeformableEncoder(Checkpointable):
    """Layers of deformable attention over pictures of three sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_DeformableLayer() for _ in range(4))

    def forward(self, x: torch.Tensor, places: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.run(layer, x, places, sizes)
        return x.square().mean()


def _levels(step: int) -> Batch:
    cells = [torch.cartesian_prod((torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w) for h, w in _LEVELS]
    places = torch.cat(cells).flip(-1)[None].repeat(2, 1, 1)
    return {
        "x": torch.randn(2, places.shape[1], WIDTH, generator=generator(step)),
        "places": places,
        "sizes": torch.tensor(_LEVELS),
    }


class _Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(8, _CHANNELS) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norms[0](self.one(x)))
        return F.relu(x + self.norms[1](self.two(inner)))


class _BoxStage(nn.Module):
    """Drop boxes that overlap better ones, pool features in the rest, and refine them (a stage of a cascade)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_CHANNELS * 16, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.shift, self.score = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)

    def forward(
        self, features: torch.Tensor, boxes: torch.Tensor, scores: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kept = _suppress(boxes.detach(), scores.detach())
        boxes = boxes[kept]
        pooled = []
        for left, top, right, bottom in (boxes.detach() * 16).long().clamp(0, 15).tolist():
            part = features[0, :, top : max(bottom, top) + 1, left : max(right, left) + 1]
            pooled.append(F.adaptive_max_pool2d(part, 4).flatten())
        inner = F.relu(self.down(F.relu(self.up(torch.stack(pooled)))))
        refined, rated = boxes + 0.1 * self.shift(inner), self.score(inner)[:, 0]
        overlaps, nearest = _overlaps(refined.detach(), targets).max(-1)
        matched = (overlaps > 0.2).nonzero().squeeze(1)
        loss = F.binary_cross_entropy_with_logits(rated, (overlaps > 0.2).float())
        if len(matched) > 0:
            loss = loss + F.l1_loss(refined[matched], targets[nearest[matched]])
        return refined, rated, loss


class CascadeDetector(Checkpointable):
    """A two-stage detector with a cascade of heads: features, proposals, suppression of overlaps, pooling of regions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, _CHANNELS, 7, stride=4, padding=3)
        self.backbone = nn.ModuleList(_Convolution() for _ in range(4))
        self.proposals = nn.Conv2d(_CHANNELS, 5, 3, padding=1)
        self.stages = nn.ModuleList(_BoxStage() for _ in range(3))

    def forward(self, picture: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        features = self.stem(picture)
        for block in self.backbone:
            features = self.run(block, features)
        found = self.proposals(features)[0].flatten(1).T
        cells = torch.cartesian_prod(torch.arange(16), torch.arange(16)).flip(-1) / 16
        centers, sizes = cells + 0.1 * found[:, 1:3].tanh(), 0.1 + 0.3 * found[:, 3:].sigmoid()
        scores, best = found[:, 0].topk(_BOXES)
        boxes = torch.cat([centers - sizes / 2, centers + sizes / 2], -1)[best]
        losses = [F.softplus(scores).mean()]
        for stage in self.stages:
            boxes, scores, loss = self.run(stage, features, boxes, scores, targets[: int(counts)])
            losses.append(loss)
        return torch.stack(losses).sum()


def _overlaps(boxes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return intersection over union for every pair."""
    low = torch.maximum(boxes[:, None, :2], others[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], others[None, :, 2:])
    common = (high - low).clamp_min(0).prod(-1)
    one, two = ((each[:, 2:] - each[:, :2]).clamp_min(0).prod(-1) for each in (boxes, others))
    return common / (one[:, None] + two[None] - common + 1e-6)


def _suppress(boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the boxes that overlap no better box by more than a half."""
    left, kept = scores.argsort(descending=True), []
    while left.numel() > 0:
        kept.append(left[0])
        left = left[1:][_overlaps(boxes[left[:1]], boxes[left[1:]])[0] <= 0.5]
    return torch.stack(kept)


def _pictures(step: int) -> Batch:
    source = generator(step)
    corners = torch.rand(8, 2, generator=source) * 0.6
    sizes = 0.15 + 0.2 * torch.rand(8, 2, generator=source)
    return {
        "picture": torch.randn(1, 3, _SIDE, _SIDE, generator=source),
        "targets": torch.cat([corners, corners + sizes], -1),
        "counts": torch.randint(1, 9, (), generator=source),
    }


def _words(step: int) -> Batch:
    return {"words": torch.randint(0, _VOCABULARY, (_TEXTS, _TOKENS), generator=generator(step))}


KINDS = (
    kind_of(AdaptiveComputation),
    Kind(name="early-exit decoder", make=EarlyExitDecoder, batch_of=_words),
    Kind(name="tree LSTM", make=TreeLstm, batch_of=_trees),
    Kind(name="sparse convolution", make=SparseConvolution, batch_of=_points),
    Kind(name="deformable attention", make=DeformableEncoder, batch_of=_levels),
    Kind(name="cascade detector", make=CascadeDetector, batch_of=_pictures),
)
