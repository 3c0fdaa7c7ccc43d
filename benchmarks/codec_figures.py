"""Codecs on activations of small random-weight transformers: error, bytes and seconds, as in docs/project/lab-notes.md.

Run as ``python -m benchmarks.codec_figures``. Also has the experiments that decided: rotations by Hadamard matrices of several
orders, of which that of order 32 was kept, and keeping the largest entries in full, which was not.
"""

import time
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from plimsoll.engine.codecs.registry import find_codec

BASES = ("", ":unrotated")
NAMES = (
    "bf16",
    "fp8",
    "fp8:block=32",
    *(f"int8:block={block}{mode}{basis}" for basis in BASES for mode in ("", ":affine") for block in (32, 64, 128)),
    *(f"int4:block={block}{mode}{basis}" for basis in BASES for mode in ("", ":symmetric") for block in (32, 64, 128)),
    "topk",
)
EXPERIMENTS = ("int8:unrotated", "int8:block=128:affine:unrotated", "int4:unrotated", "int4:block=32:unrotated")


def activations(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Flat activations by kind, those of all layers in one."""
    torch.manual_seed(0)
    found: dict[str, list[torch.Tensor]] = {}

    def output(name: str) -> Callable[..., None]:
        def hook(_module, _args, out):
            out = out[0] if isinstance(out, tuple) else out
            found.setdefault(name, []).append(out.detach().flatten())

        return hook

    def first_input(name: str) -> Callable[..., None]:
        return lambda _module, args: found.setdefault(name, []).append(args[0].detach().flatten())

    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=4096)).to(dtype)
    for layer in llama.model.layers:
        layer.mlp.gate_proj.register_forward_hook(output("llama gate"))
        layer.mlp.up_proj.register_forward_hook(output("llama up"))
        layer.mlp.down_proj.register_forward_pre_hook(first_input("llama product"))
        layer.self_attn.o_proj.register_forward_pre_hook(first_input("llama attention"))
        layer.register_forward_hook(output("llama residual"))
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=512, n_layer=4, n_head=8, vocab_size=4096, bos_token_id=0, eos_token_id=0))
    gpt2 = gpt2.to(dtype).eval()
    for layer in gpt2.transformer.h:
        layer.mlp.act.register_forward_hook(output("gpt2 gelu"))
        layer.attn.c_proj.register_forward_pre_hook(first_input("gpt2 attention"))
        layer.register_forward_hook(output("gpt2 residual"))
    ids = torch.randint(0, 4096, (2, 256))
    llama(ids)
    gpt2(ids)
    kinds = {name: torch.cat(parts) for name, parts in found.items()}
    count = 2**20
    gate, up, normal = torch.randn(3, count)
    channels = normal.view(-1, 1024).clone()
    channels[:, [3, 77, 500]] *= 60
    kinds["wide swiglu"] = (torch.nn.functional.silu(3 * gate) * 3 * up).to(dtype)
    kinds["student t, 3"] = torch.distributions.StudentT(3.0).sample((count,)).to(dtype)
    kinds["outlier channels"] = channels.flatten().to(dtype)
    kinds["log-normal, 2"] = ((2 * gate).exp() * up.sign()).to(dtype)
    return kinds


def coded(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What comes back, and the bytes in between."""
    codec = find_codec(name)
    payload = codec.encode(tensor)
    assert payload is not None
    return codec.decode(payload), payload.bytes


def rotated(name: str, tensor: torch.Tensor, width: int) -> tuple[torch.Tensor, int]:
    """As ``coded``, but blocks of ``width`` are multiplied by a Hadamard matrix before, and by its inverse after."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix /= width**0.5
    rows = tensor.view(-1, width).float() @ matrix
    back, bytes_ = coded(name, rows.flatten())
    return (back.view(-1, width) @ matrix).flatten().to(tensor.dtype), bytes_


def with_outliers(name: str, tensor: torch.Tensor, share: float) -> tuple[torch.Tensor, int]:
    """As ``coded``, but the largest ``share`` of the entries is kept in full, with a position of 16 bits each."""
    kept = tensor.float().abs().topk(int(share * tensor.numel())).indices
    back, bytes_ = coded(name, tensor.index_fill(0, kept, 0))
    back[kept] = tensor[kept]
    return back, bytes_ + kept.numel() * (2 + tensor.element_size())


def error(back: torch.Tensor, tensor: torch.Tensor) -> float:
    """Relative L2 error."""
    return float((back.double() - tensor.double()).norm() / tensor.double().norm())


def table(
    title: str, ways: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, int]]], kinds: dict[str, torch.Tensor]
):
    print(f"\n{title}\n{'relative error, %':36}{'B/element':>10}  " + "".join(f"{kind:>17}" for kind in kinds))
    for name, way in ways.items():
        results = [(way(tensor), tensor) for tensor in kinds.values()]
        per_element = sum(bytes_ for (_, bytes_), _ in results) / sum(tensor.numel() for tensor in kinds.values())
        print(f"{name:36}{per_element:>10.3f}  " + "".join(f"{100 * error(back, t):17.3f}" for (back, _), t in results))


def seconds_of(function: Callable[[], object]) -> float:
    """The fastest of seven runs."""
    taken = []
    for _ in range(7):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return min(taken)


def speed() -> None:
    count = 2**22
    print(f"\nns per element, {count} elements, one thread\n{'':36}{'B/element':>10}{'encode':>10}{'decode':>10}")
    data = torch.randn(count)
    mask = torch.rand(count) < 0.1
    masks = {"bits": mask * 1.25, "narrow": torch.randint(-300, 300, (count,)), "zeros": torch.where(mask, data, 0)}
    names = (
        "bits",
        "narrow",
        "sign",
        "zeros",
        "bf16",
        "fp8",
        "int8",
        "int8:unrotated",
        "int8:affine",
        "int8:stochastic",
    )
    for name in (*names, "int4", "int4:unrotated", "int4:symmetric", "int4:stochastic", "topk"):
        codec, tensor = find_codec(name), masks.get(name, data)
        payload = codec.encode(tensor)
        assert payload is not None
        encode, decode = (
            seconds_of(lambda c=codec, t=tensor: c.encode(t)),
            seconds_of(lambda c=codec, p=payload: c.decode(p)),
        )
        print(f"{name:36}{payload.bytes / count:10.3f}{encode / count * 1e9:10.2f}{decode / count * 1e9:10.2f}")
    rows = data.view(-1, 128)
    for width in (16, 128):
        matrix = torch.randn(width, width)
        taken = seconds_of(lambda m=matrix, w=width: data.view(-1, w) @ m)
        print(f"{f'rotation by {width}x{width} alone':36}{'':10}{taken / count * 1e9:10.2f}{taken / count * 1e9:10.2f}")
    taken = seconds_of(lambda: rows.flatten().abs().topk(count // 100))
    print(f"{'topk of 1% alone':36}{'':10}{taken / count * 1e9:10.2f}{'':10}")


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}")
    for dtype in (torch.float32, torch.bfloat16):
        kinds = activations(dtype)
        names = [name for name in NAMES if find_codec(name).accepts(dtype)]
        table(f"codecs, {dtype}", {name: lambda t, n=name: coded(n, t) for name in names}, kinds)
    kinds = activations(torch.float32)
    ways: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, int]]] = {}
    for name in EXPERIMENTS:
        ways[name] = lambda t, n=name: coded(n, t)
        for width in (16, 32, 128):
            ways[f"  rotated by {width}"] = lambda t, n=name, w=width: rotated(n, t, w)
        for share in (0.001, 0.005, 0.01):
            ways[f"  {share:.1%} kept"] = lambda t, n=name, s=share: with_outliers(n, t, s)
        table("experiments, torch.float32", ways, kinds)
        ways.clear()
    speed()


if __name__ == "__main__":
    main()
