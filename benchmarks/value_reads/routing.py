"""Blocks whose sizes inside depend on values of tensors: rows that are chosen, sorted, merged, packed or dropped."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.value_reads.stack import ROWS, WIDTH, Block

_SEQUENCES, _LENGTH = 8, ROWS // 8


def routed(block: Any, x: torch.Tensor) -> torch.Tensor:
    rows = (x.detach()[:, 0] > 0).nonzero().squeeze(1)
    return x.index_add(0, rows, block.wide(x[rows]))


def masked(block: Any, x: torch.Tensor) -> torch.Tensor:
    mask, result = x.detach()[:, 0] > 0, x.clone()
    result[mask] = x[mask] + block.wide(x[mask])
    return result


def experts(block: Any, x: torch.Tensor) -> torch.Tensor:
    weights, chosen = block.gate(x).softmax(-1).topk(2, -1)
    result = x + block.wide(x)
    for number, expert in enumerate(block.experts):
        rows, places = torch.where(chosen == number)
        result = result.index_add(0, rows, F.gelu(expert(x[rows])) * weights[rows, places, None])
    return result


def capacity_experts(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Drop the rows of an expert above its capacity; skip experts without rows."""
    weights, chosen = block.gate(x).softmax(-1).max(-1)
    result, capacity = x + block.wide(x), int(1.1 * ROWS / 4)
    for number, expert in enumerate(block.experts):
        rows = (chosen == number).nonzero().squeeze(1)[:capacity]
        if rows.numel() > 0:
            result = result.index_add(0, rows, F.gelu(expert(x[rows])) * weights[rows, None])
    return result


def hit_experts(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Loop over the experts that got rows, by ``one_hot``."""
    weights, chosen = block.gate(x).softmax(-1).topk(1, -1)
    mask, result = F.one_hot(chosen, 4).permute(2, 1, 0), x + block.wide(x)
    for number in (mask.sum((1, 2)) > 0).nonzero().flatten().tolist():
        _, rows = torch.where(mask[number])
        result = result.index_add(0, rows, F.gelu(block.experts[number](x[rows])) * weights[rows])
    return result


def expert_choice(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Each expert takes its best rows, as many as its share of the scores."""
    scores = block.gate(x).softmax(-1)
    result = x + block.wide(x)
    for count, score, expert in zip(scores.detach().sum(0).long().tolist(), scores.T, block.experts, strict=True):
        best = score.topk(min(count, ROWS))
        result = result.index_add(0, best.indices, expert(x[best.indices]) * best.values[:, None])
    return result


def sorted_experts(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Sort rows by expert and split them by their counts."""
    chosen = block.gate(x).argmax(-1)
    order = chosen.argsort(stable=True)
    parts = x[order].split(torch.bincount(chosen, minlength=4).tolist())
    made = torch.cat([F.gelu(expert(part)) for expert, part in zip(block.experts, parts, strict=True)])
    return x + block.wide(x) + torch.zeros_like(x).index_copy(0, order, made)


def hashed_experts(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Choose rows by lists of Python."""
    marks = (x.detach()[:, 0].abs() * 100).long().tolist()
    result = x + block.wide(x)
    for number, expert in enumerate(block.experts):
        rows = torch.tensor([row for row, mark in enumerate(marks) if mark % 4 == number], dtype=torch.long)
        result = result.index_add(0, rows, expert(x[rows]))
    return result


def gumbel_experts(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Noisy shares, and a threshold that lets an expert have any number of rows."""
    shares = F.gumbel_softmax(block.gate(x), tau=0.8)
    wide = block.wide(x)
    result = x + wide
    for share, expert in zip(shares.T, block.experts, strict=True):
        mask = share.detach() > 0.4
        if mask.any():
            result[mask] = result[mask] + expert(wide[mask]) * share[mask, None]
    return result


def depth_by_threshold(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Rows with a score above the threshold pass through the block (mixture of depths)."""
    scores = block.gate(x)[:, 0].sigmoid()
    rows = torch.where(scores.detach() > 0.5)[0]
    return x.index_add(0, rows, block.wide(x[rows]) * scores[rows, None])


def depth_by_rank(block: Any, x: torch.Tensor) -> torch.Tensor:
    """A fixed number of rows passes through the block (mixture of depths)."""
    best = block.gate(x)[:, 0].topk(ROWS // 4, sorted=False)
    rows = best.indices.sort().values
    return x.index_add(0, rows, block.wide(x[rows]) * best.values.sigmoid()[:, None])


def nucleus(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Keep the largest shares whose sum is 0.8 (top-p)."""
    wide = block.wide(x)
    values, places = wide.softmax(-1).sort(-1, descending=True)
    count = int((values.cumsum(-1) < 0.8).sum(-1).max()) + 1
    shares = torch.zeros_like(wide).scatter(1, places[:, :count], values[:, :count])
    return x + wide * shares * (WIDTH / 10)


def sorted_by_list(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Index by a list of Python numbers."""
    rows = x.detach()[:, 0].argsort().tolist()[: ROWS // 4]
    result = x.clone()
    result[rows] = result[rows] + block.wide(x[rows])
    return result


def sorted_by_length(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Process sequences in order of their lengths, cut to the longest of each half."""
    lengths = _lengths(x)
    order = lengths.argsort(descending=True)
    sequences = x.view(_SEQUENCES, _LENGTH, WIDTH)[order]
    made = []
    for half, longest in zip(sequences.chunk(2), lengths[order][:: _SEQUENCES // 2].tolist(), strict=True):
        made.append(F.pad(block.wide(half[:, :longest]), (0, 0, 0, _LENGTH - longest)))
    return x + torch.cat(made)[order.argsort()].view(ROWS, WIDTH)


def ragged_attention(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention in a loop over sequences of unequal length, whose ends are read as a list."""
    keys, ends = block.norm(x), F.pad(_lengths(x).cumsum(0), (1, 0)).tolist()
    made = []
    for start, end in itertools.pairwise(ends):
        part = keys[None, start:end]
        made.append(F.scaled_dot_product_attention(part, part, part)[0])
    made.append(keys[ends[-1] :])
    return x + torch.cat(made) + block.wide(x)


def unpadded(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Drop padding, compute, and pad again."""
    mask = (torch.arange(_LENGTH)[None] < _lengths(x)[:, None]).view(-1)
    rows = mask.nonzero().squeeze(1)
    return x + torch.zeros_like(x).index_put((rows,), block.wide(x[rows]))


def padded_parts(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Pad parts of unequal length to the longest of them."""
    lengths = _lengths(x).tolist()
    total = sum(lengths)
    padded = nn.utils.rnn.pad_sequence(list(x[:total].split(lengths)), batch_first=True)
    mask = torch.arange(padded.shape[1])[None] < torch.tensor(lengths)[:, None]
    return x + F.pad(block.wide(padded)[mask], (0, 0, 0, ROWS - total))


def repeated_rows(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Repeat each row as often as its duration says (the length regulator of speech models)."""
    durations = (x.detach()[:, 0].abs() * 1.5).long()
    longer = x.repeat_interleave(durations, 0)
    places = torch.arange(ROWS).repeat_interleave(durations)
    return x.index_add(0, places, block.wide(longer), alpha=0.5)


def unique_rows(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute once for each distinct mark, on the mean of its rows."""
    marks = (x.detach()[:, 0] * 40).long()
    _, places, counts = marks.unique(return_inverse=True, return_counts=True)
    means = x.new_zeros(len(counts), WIDTH).index_add(0, places, x) / counts[:, None]
    return x + block.wide(means)[places]


def segment_means(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Split where a boundary is predicted, and pool each segment."""
    wide = block.wide(x)
    starts = F.pad((wide.detach()[:, 0] > 0.3).nonzero().squeeze(1) + 1, (1, 1), value=0)
    starts[-1] = ROWS
    sizes = starts.diff()
    sizes = sizes[sizes > 0]
    means = torch.stack(
        [part.mean(0) for part in wide.split([*sizes.tolist()[:40], int(sizes[40:].sum())]) if len(part)]
    )
    return x + wide + means.mean(0)


def merged_rows(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Merge each even row with its best odd row, if they are similar enough (token merging)."""
    unit = F.normalize(x.detach(), dim=-1)
    best, partner = (unit[::2] @ unit[1::2].T).max(-1)
    is_merged = best > best.median()
    kept, merged = (~is_merged).nonzero().squeeze(1), is_merged.nonzero().squeeze(1)
    odd = x[1::2].index_add(0, partner[merged], x[::2][merged]) / 2
    made = block.wide(torch.cat([x[::2][kept], odd]))
    even = odd.new_zeros(ROWS // 2, WIDTH).index_copy(0, kept, made[: len(kept)])
    even = even.index_copy(0, merged, made[len(kept) :][partner[merged]])
    return x + torch.stack([even, made[len(kept) :]], 1).view(ROWS, WIDTH)


def pruned_beams(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Keep the beams within a margin of the best."""
    beams, scores = x[:64], x.new_zeros(64)
    for _ in range(3):
        wide = block.wide(beams)
        scores = scores + wide.mean(-1)
        is_kept = scores.detach() > scores.detach().max() - 0.15
        beams, scores = (beams + wide)[is_kept], scores[is_kept]
    return x + block.wide(x) + 0.1 * (beams * scores.softmax(0)[:, None]).sum(0)


def pruned_by_entropy(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Attend to the rows whose predictions are uncertain."""
    logs = block.gate(x).log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    kept = x[entropy.detach() > entropy.detach().mean()]
    return x + (x @ kept.T / math.sqrt(WIDTH)).softmax(-1) @ block.wide(kept)


def adaptive_span(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Attend to as many last positions as the learned span needs."""
    keys = block.norm(x).view(_SEQUENCES, _LENGTH, WIDTH)
    wanted = block.gate(x.mean(0, keepdim=True))[0, 0].sigmoid() * _LENGTH
    span = math.ceil(wanted.item())
    ramp = (wanted - torch.arange(span)).clamp(0, 4) / 4
    scores = (keys @ keys[:, -span:].mT / math.sqrt(WIDTH)).softmax(-1) * ramp
    return x + (scores @ keys[:, -span:]).view(ROWS, WIDTH) + block.wide(x)


def living_heads(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute the heads alone whose gate is open."""
    keys = block.norm(x).view(_SEQUENCES, _LENGTH, 4, WIDTH // 4).transpose(1, 2)
    gates = block.gate(x.mean(0, keepdim=True))[0].sigmoid()
    heads = (gates.detach() > 0.45).nonzero().squeeze(1)
    part = keys[:, heads]
    made = F.scaled_dot_product_attention(part, part, part) * gates[heads, None, None]
    full = torch.zeros_like(keys).index_copy(1, heads, made)
    return x + full.transpose(1, 2).reshape(ROWS, WIDTH) + block.wide(x)


def pooled_to_size(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Pool to a size that depends on the data, and interpolate back."""
    size = 8 + int(x.detach()[0].abs().mean() * 60)
    pooled = F.adaptive_avg_pool1d(block.wide(x).T[None], size)
    return x + F.interpolate(pooled, ROWS, mode="linear")[0].T


def cropped(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Crop at random, with sizes and places that are drawn."""
    size = int(torch.randint(ROWS // 4, ROWS, ()).item())
    start = int(torch.randint(0, ROWS - size + 1, ()).item())
    return torch.cat([x[:start], x[start : start + size] + block.wide(x[start : start + size]), x[start + size :]])


def attended_box(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Cut the box with the large values out of a picture, and resize it."""
    picture = block.wide(x).T.view(1, WIDTH, 16, ROWS // 16)
    heat = picture.detach().abs().mean(1)[0]
    rows, columns = torch.where(heat > heat.flatten().sort().values[-12])
    top, bottom, left, right = torch.stack([rows.min(), rows.max(), columns.min(), columns.max()]).tolist()
    box = picture[:, :, top : bottom + 1, left : right + 1]
    return x + F.interpolate(box, (16, ROWS // 16), mode="bilinear").view(WIDTH, ROWS).T


def low_rank(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Keep the singular values above a share of the largest."""
    wide = block.wide(x)
    left, values, right = torch.linalg.svd(block.experts[0].weight + wide.mean(0), full_matrices=False)
    rank = int((values.detach() > 0.3 * values.detach()[0]).sum())
    return x + wide + (x @ left[:, :rank] * values[:rank]) @ right[:rank] * 0.1


def spectral_modes(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Keep the eigenvectors that explain 90% of the variance."""
    wide = block.wide(x)
    values, vectors = torch.linalg.eigh(wide[:, :32].detach().T @ wide[:, :32].detach())
    count = int((values.flip(0).cumsum(0) < 0.9 * values.sum()).sum()) + 1
    modes = vectors[:, -count:]
    return x + wide + (wide[:, :32] @ modes @ modes.T).repeat(1, WIDTH // 32)


def radius_graph(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Messages between the rows that are close to each other."""
    with torch.no_grad():
        distances = torch.cdist(x[:, :3], x[:, :3])
        targets, sources = ((distances < 0.4) & (distances > 0)).nonzero(as_tuple=True)
    messages = F.silu(block.experts[0](x[sources] - x[targets]))
    return x.index_add(0, targets, messages, alpha=0.1) + block.wide(x)


def sparse_product(block: Any, x: torch.Tensor) -> torch.Tensor:
    """A sparse matrix of the large entries."""
    places = (x.detach() > 1.5).nonzero().T
    matrix = torch.sparse_coo_tensor(places, x[places[0], places[1]], (ROWS, WIDTH))
    return x + block.wide(x) + 0.1 * torch.sparse.mm(matrix, block.experts[0].weight)


def sampled_negatives(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Draw as many negatives as there are hard rows."""
    wide = block.wide(x)
    count = int((x.detach().norm(dim=-1) > 11.3).sum()) + 1
    drawn = torch.multinomial(torch.ones(ROWS), count)
    return x + wide - 0.1 * (wide @ wide[drawn].T / WIDTH).softmax(-1) @ wide[drawn]


def matched_targets(block: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss inside on the rows whose mark is not ignored."""
    wide = block.wide(x)
    marks = torch.where(x.detach()[:, 1] > 0, (x.detach()[:, 0].abs() * 4).long().clamp(max=3), -100)
    kept = marks != -100
    return x + wide + 0.01 * F.cross_entropy(block.gate(wide[kept]), marks[kept])


def aligned(block: Any, x: torch.Tensor) -> torch.Tensor:
    """A CTC loss inside, with targets of unequal length."""
    wide = block.wide(x)
    logs = wide[:, :16].view(_LENGTH, _SEQUENCES, 16).log_softmax(-1)
    lengths = (x.detach()[:_SEQUENCES, 0].abs() * 3).long().clamp(1, 5)
    targets = (x.detach()[:_SEQUENCES, :5].abs() * 7).long().clamp(1, 15)
    return x + wide + 0.01 * F.ctc_loss(logs, targets, torch.full((_SEQUENCES,), _LENGTH), lengths)


class PackedLstm(Block):
    """An LSTM over short sequences of unequal length."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequences = x.view(_LENGTH, _SEQUENCES, WIDTH)
        lengths = (sequences.detach()[:, 0, 0].abs() * 4).long().clamp(1, _SEQUENCES)
        packed = nn.utils.rnn.pack_padded_sequence(sequences, lengths, batch_first=True, enforce_sorted=False)
        made, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=_SEQUENCES)
        return x + made.reshape(ROWS, WIDTH) + self.wide(x)


class CachedMask(Block):
    """A cache of masks by size, in a dictionary of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = int((x.detach()[:, 0] > 0).sum()) // 8 * 8
        if count not in self.masks:
            self.masks[count] = torch.ones(ROWS, 1).index_fill(0, torch.arange(count), 0.5)
        return x + self.wide(x) * self.masks[count]


def _lengths(x: torch.Tensor) -> torch.Tensor:
    """Return a length from 1 to 64 for each of 8 sequences."""
    return (x.detach()[:: ROWS // _SEQUENCES, 0].abs() * 24).long().clamp(1, _LENGTH)


BLOCKS = (
    *(routed, masked, experts, capacity_experts, hit_experts, expert_choice, sorted_experts, hashed_experts),
    *(gumbel_experts, depth_by_threshold, depth_by_rank, nucleus, sorted_by_list, sorted_by_length, ragged_attention),
    *(unpadded, padded_parts, repeated_rows, unique_rows, segment_means, merged_rows, pruned_beams, pruned_by_entropy),
    *(adaptive_span, living_heads, pooled_to_size, cropped, attended_box, low_rank, spectral_modes, radius_graph),
    *(sparse_product, sampled_negatives, matched_targets, aligned, PackedLstm, CachedMask),
)
