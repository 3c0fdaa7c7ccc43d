"""The description of a training job: its layout over ranks, its precision, its techniques and the sizes of its model.

The dimensions of a layout have their usual names: ``dp`` data, ``tp`` tensor, ``cp`` context, ``pp`` pipeline, ``ep``
expert parallelism. A step runs on ``dp * tp * cp * pp`` ranks. Expert parallelism divides the experts among ranks of the
``dp * cp`` dimension and does not add ranks. Ranks are numbered with ``tp`` fastest, then ``cp``, ``dp``, and ``pp`` slowest
(torchtitan puts ``pp`` outermost too), so that tensor-parallel groups stay within a node.

The precisions ``bf16`` and ``fp16`` hold parameters, gradients and activations in the narrow type. ``bf16-mixed`` and
``fp16-mixed`` hold parameters in float32 and run the forward pass under autocast (Micikevicius et al. 2018, Mixed Precision
Training). ``fsdp-bf16`` is FSDP2's ``MixedPrecisionPolicy(param_dtype=bfloat16)``: shards, gradients and optimizer in
float32, gathered parameters and computation in bf16.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterator

import msgspec

from plimsoll.errors import InvalidOption


class PipelineSchedule(enum.StrEnum):
    """Names of pipeline schedules: the order of forwards and backwards of the micro-batches on a stage.

    ``GPIPE`` (Huang et al. 2019): all forwards, then all backwards. ``ONE_F_ONE_B`` (Narayanan et al. 2019): forwards and
    backwards alternate. ``INTERLEAVED`` (Narayanan et al. 2021): every rank holds several stages. ``ZERO_BUBBLE`` (Qi et
    al. 2023, ZB-H1): backward is split in two, and the half that computes weight gradients fills the bubble.
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"


class StageRule(enum.StrEnum):
    """Names of rules that decide how many blocks each stage of a pipeline gets.

    ``BLOCKS`` gives all stages equal numbers of blocks; if these do not divide evenly, the first and the last stage get fewer.
    ``COST`` makes the slowest stage as fast as possible, and counts embedding and head. The other rules copy a framework:
    nanotron weighs the blocks and the head by their parameters; Megatron-Core requires equal numbers of blocks
    (``MEGATRON_BOTH`` sets its options ``account_for_embedding_in_pipeline_split`` and
    ``account_for_loss_in_pipeline_split``); torchtitan counts embedding and head as one block each.
    """

    BLOCKS = "blocks"
    COST = "cost"
    NANOTRON = "nanotron"
    MEGATRON = "megatron"
    MEGATRON_BOTH = "megatron-embedding-loss"
    TORCHTITAN = "torchtitan"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Data: how one training step is divided among ranks, by dimension; the default is one rank.

    ``zero`` is the stage of ZeRO within the data-parallel and the context-parallel ranks: 0 replicates everything, 1 shards the
    optimizer state, 2 also gradients, 3 also parameters (what FSDP does). With ``replicas`` > 1 (HSDP), this many groups of
    ranks each shard the whole model, and gradients are reduced once more between the groups. ``micro_batches`` is the number of
    micro-batches that run before the optimizer steps, for gradient accumulation or a pipeline. ``virtual_stages`` is the number
    of stages per rank of an interleaved schedule. ``cut`` says how blocks are divided among stages: it is a rule, or the number
    of blocks in each stage.
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 0
    replicas: int = 1
    sequence_parallel: bool = False
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    virtual_stages: int = 1
    micro_batches: int = 1
    cut: StageRule | tuple[int, ...] = StageRule.BLOCKS

    @property
    def ranks(self) -> int:
        """The number of ranks that take part in a step."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def shards(self) -> int:
        """The number of ranks among which ZeRO divides one copy of the model."""
        return self.dp * self.cp // self.replicas

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline, virtual stages included."""
        return self.pp * self.virtual_stages

    def __str__(self) -> str:
        degrees = [
            f"{name}={getattr(self, name)}" for name in ("dp", "tp", "cp", "pp", "ep") if getattr(self, name) > 1
        ]
        degrees += ["sp"] if self.sequence_parallel else []
        degrees += [f"zero={self.zero}"] if self.zero else []
        degrees += [f"replicas={self.replicas}"] if self.replicas > 1 else []
        if self.pp > 1:
            degrees.append(f"schedule={self.schedule.value}")
            degrees += [f"virtual={self.virtual_stages}"] if self.virtual_stages > 1 else []
            if self.cut is not StageRule.BLOCKS:
                cut = self.cut.value if isinstance(self.cut, StageRule) else ",".join(map(str, self.cut))
                degrees.append(f"stages={cut}")
        degrees += [f"micro-batches={self.micro_batches}"] if self.micro_batches > 1 else []
        return ",".join(["one rank", *degrees] if self.ranks == 1 else degrees)


class Precision(enum.StrEnum):
    """Names of the floating-point types of a training step; the module's docstring explains them.

    Example:
        >>> Precision.BF16_MIXED.parameter_dtype, Precision.BF16_MIXED.autocast_dtype
        ('float32', 'bfloat16')
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    BF16_MIXED = "bf16-mixed"
    FSDP_BF16 = "fsdp-bf16"
    FP16_MIXED = "fp16-mixed"

    @property
    def is_mixed(self) -> bool:
        """Whether the forward pass runs under autocast, with parameters in float32."""
        return self in (Precision.BF16_MIXED, Precision.FP16_MIXED)

    @property
    def traced(self) -> Precision:
        """The precision of the step's computation.

        It is ``bf16`` for ``fsdp-bf16``, because FSDP gathers its float32 shards in bf16.
        """
        return Precision.BF16 if self is Precision.FSDP_BF16 else self

    @property
    def parameter_dtype(self) -> str:
        """The name that torch uses for the dtype of the parameters, such as ``bfloat16``."""
        return {Precision.BF16: "bfloat16", Precision.FP16: "float16"}.get(self, "float32")

    @property
    def autocast_dtype(self) -> str | None:
        """The name that torch uses for autocast's dtype, such as ``bfloat16``; ``None`` if autocast is off."""
        return {Precision.BF16_MIXED: "bfloat16", Precision.FP16_MIXED: "float16"}.get(self)


_ALIASES = {
    "float32": Precision.FP32,
    "f32": Precision.FP32,
    "32-true": Precision.FP32,
    "bfloat16": Precision.BF16,
    "bf16-true": Precision.BF16,
    "float16": Precision.FP16,
    "half": Precision.FP16,
    "16-true": Precision.FP16,
    "amp": Precision.FP16_MIXED,
    "16-mixed": Precision.FP16_MIXED,
}
"""Maps other names, which torch and trainers use, to precisions."""


def parse_precision(text: str | Precision | None) -> Precision | None:
    """Return the precision called ``text``; ``None`` stays ``None`` and means the model's own dtypes.

    Raises:
        InvalidOption: an unknown name, or a type that steps are not traced in (fp8, int8, tf32).

    Example:
        >>> parse_precision("BF16-mixed").value
        'bf16-mixed'
    """
    if text is None or isinstance(text, Precision):
        return text
    name = text.strip().lower().replace("_", "-").removeprefix("torch.")
    if name in _ALIASES:
        return _ALIASES[name]
    known = [precision.value for precision in Precision]
    if name in known:
        return Precision(name)
    if name.startswith(("fp8", "float8", "fp4", "mxfp", "nvfp", "int", "tf32")):
        raise InvalidOption(
            f"precision {text!r} is unsupported.",
            why="torch does not train in it, or only with kernels of other libraries, which Plimsoll does not trace",
            next=f"use one of {', '.join(known)}",
        )
    close = difflib.get_close_matches(name, [*known, *_ALIASES], n=2, cutoff=0.5)
    raise InvalidOption(
        f"{text!r} is not the name of a precision.",
        why=f"Plimsoll knows {', '.join(known)}",
        next=f"try {' or '.join(map(repr, close))}" if close else "use one of these",
    )


class Techniques(msgspec.Struct, frozen=True, kw_only=True):
    """The techniques that a training job uses to save memory or time; an empty string, 0 or ``False`` means "not used".

    ``gradients``: the dtype that gradients are accumulated and reduced in, if it is not the parameters' dtype (``fp32``;
    ``both``: the gradients in the parameters' dtype are held as well).
    ``reduce``: FSDP's ``reduce_dtype`` under ``fsdp-bf16`` (``fp32`` by default). ``loss``: ``chunked`` (head and loss in
    pieces, ``plimsoll.chunked``), ``fused`` (one kernel that writes the gradient over the logits), ``fused-linear`` (both),
    ``vocabulary-parallel`` (tensor parallelism does this here anyway). ``lora``, ``qlora``: the rank of low-rank adapters on
    frozen weights, which ``qlora`` holds in 4 bits, in the linear layers of ``lora_on`` (``qv``, ``attention``, ``all``).
    ``adapters``: the width of bottlenecks after attention and feed-forward modules. ``fp8``: a recipe of torchao
    (``tensorwise``, ``rowwise``) or Transformer Engine (``delayed``, ``current``, ``mxfp8``). ``offload``: what is held on the
    host, joined by ``+``: ``optimizer``, ``parameters`` (with gradients and the optimizer), ``activations``. ``packed``: tokens
    per document, several documents per sample. ``padded``: percent of the tokens that are padding. ``megatron``: blocks as
    Megatron-Core runs them on Transformer Engine. ``fp8_weights``: weights of matrix products are held only in fp8.
    ``comm_overlap``: hide the communication that Megatron's ``tp_comm_overlap`` and ``overlap_param_gather`` hide.
    ``expandable_segments``: the allocator's setting of that name. ``moe``: experts run in ``fused`` kernels, or in fused
    kernels with DeepEP between ranks (``deepep``).
    """

    gradients: str = ""
    reduce: str = ""
    loss: str = ""
    optimizer_in_backward: bool = False
    tf32: bool = False
    compile: bool = False
    fp8: str = ""
    offload: str = ""
    lora: int = 0
    qlora: int = 0
    lora_on: str = ""
    adapters: int = 0
    packed: int = 0
    padded: int = 0
    megatron: bool = False
    fp8_weights: bool = False
    comm_overlap: bool = False
    expandable_segments: bool = False
    moe: str = ""

    @property
    def is_fused(self) -> bool:
        """Whether neighbouring element-wise ops of a block run as one kernel."""
        return self.compile or self.megatron

    @property
    def on_host(self) -> frozenset[str]:
        """The kinds of tensors that are held on the host, as words of ``offload``.

        If parameters are offloaded, the optimizer is too.
        """
        words = frozenset(filter(None, self.offload.split("+")))
        return words | {"optimizer"} if "parameters" in words else words

    @property
    def is_adapting(self) -> bool:
        """Whether adapters (LoRA, for example) are trained instead of the model's own weights."""
        return bool(self.lora or self.qlora or self.adapters)

    def __str__(self) -> str:
        parts = []
        for name, value in msgspec.structs.asdict(self).items():
            if value:
                key = name.replace("_", "-")
                parts.append(
                    key if value is True else f"{key}={'+'.join(value) if isinstance(value, tuple) else value}"
                )
        return ",".join(parts)


_VALUES = {
    "gradients": ("fp32", "both"),
    "reduce": ("fp32", "bf16"),
    "loss": ("chunked", "fused", "fused-linear", "vocabulary-parallel"),
    "fp8": ("tensorwise", "rowwise", "delayed", "current", "mxfp8"),
    "offload": ("optimizer", "parameters", "activations"),
    "lora-on": ("qv", "attention", "all"),
    "moe": ("fused", "deepep"),
}
"""Maps each technique that takes a word to the words that it accepts."""
_SETS = ("offload",)
"""The techniques that accept several of their words, joined by ``+``."""
_FLAGS = (
    "optimizer-in-backward",
    "tf32",
    "compile",
    "megatron",
    "fp8-weights",
    "comm-overlap",
    "expandable-segments",
)
"""The techniques that do not take a value."""
_COUNTS = {"lora": 16, "qlora": 16, "adapters": 64, "packed": 1024, "padded": 30}
"""Maps each technique that takes a whole number above 0 to an example of this number, for error messages."""
_KEYS = (*_VALUES, *_FLAGS, *_COUNTS)


def read_techniques(text: str | Techniques) -> Techniques:
    """Return the techniques that a text lists, with commas between them: ``gradients=fp32, tf32``.

    Raises:
        InvalidOption: an unknown key or value, or a key twice.

    Example:
        >>> read_techniques("gradients=fp32, loss=fused-linear").loss
        'fused-linear'
    """
    if isinstance(text, Techniques):
        return text
    return msgspec.convert({key.replace("-", "_"): value for key, value in _entries(text)}, Techniques)


def _entries(text: str) -> Iterator[tuple[str, str | int]]:
    """Yield (technique, value) for each technique that a text lists. Raise InvalidOption for an unknown technique or value."""
    seen: set[str] = set()
    for part in text.split(",") if text.strip() else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in _KEYS or key in seen:
            close = difflib.get_close_matches(key, _KEYS, n=2, cutoff=0.4)
            raise InvalidOption(
                f"{key} is given twice." if key in seen else f"No technique is called {key!r}.",
                why="a technique can have only one value" if key in seen else f"the techniques are {', '.join(_KEYS)}",
                next=f"try {' or '.join(close)}" if close and key not in seen else "give each technique at most once",
            )
        seen.add(key)
        wanted = "" if key in _FLAGS else str(_COUNTS[key]) if key in _COUNTS else " or ".join(_VALUES[key])
        words = value.split("+") if key in _SETS else [value]
        if key in _VALUES:
            is_good = set(words) <= set(_VALUES[key]) and len(set(words)) == len(words)
        else:
            is_good = not equals if key in _FLAGS else value.isdecimal()
        if not is_good or value == "0":
            raise InvalidOption(
                f"{part.strip()} is not a valid technique.",
                why=f"{key} needs {'a whole number above 0' if key in _COUNTS else 'one of its values'}"
                if wanted
                else f"{key} does not have a value",
                next=f"write {key}={wanted}, or leave it out" if wanted else f"write only {key}, or leave it out",
            )
        yield key, int(value) if key in _COUNTS else value or True


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model and of one micro-batch; a size is ``None`` if the model's configuration does not give it.

    A model of several towers (encoder and decoder, image and text) is described by its widest tower; ``layers`` counts the
    blocks of all towers. ``batch`` is in samples. ``sequence`` is in text tokens on one rank.
    """

    name: str
    architecture: str
    batch: int | None = None
    sequence: int | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    head_size: int | None = None
    """The elements of one attention head. It is ``None`` for an encoder-decoder, whose tokens pass only one of the two stacks.
    If queries and values have different sizes (multi-head latent attention), it is their mean.
    """
    kv_heads: int | None = None
    intermediate: int | None = None
    vocabulary: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    parameters: int | None = None
    """The number of parameters (elements) of the whole model; a tied parameter counts once."""
    active_parameters: int | None = None
    """The number of parameters that compute one token's result: of the experts, only those of this token count."""

    @property
    def tokens(self) -> int | None:
        """The number of text tokens in one micro-batch; ``None`` if samples are not text.

        Example:
            >>> ModelFacts(name="llama-3-8b", architecture="LlamaForCausalLM", batch=2, sequence=8192).tokens
            16384
        """
        return None if self.batch is None or self.sequence is None else self.batch * self.sequence
