"""What a configuration says about a model, in numbers: enough to refuse a layout and to count tokens. No torch here."""

from __future__ import annotations

import msgspec


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model and of the micro-batch it is asked about; ``None`` where its configuration does not say.

    A model of several towers (encoder and decoder, image and text) is described by its widest tower; ``layers`` are the blocks
    of all of them. ``batch`` is in samples. ``sequence`` is what one rank sees, in tokens of text.
    """

    name: str
    architecture: str
    batch: int | None = None
    sequence: int | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    vocabulary: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    parameters: int | None = None
    """Of the whole model; a tied one once."""
    active_parameters: int | None = None
    """Those that one token passes: of the experts, only as many as it is sent to."""

    @property
    def tokens(self) -> int | None:
        """Tokens of text in one micro-batch; ``None`` where samples are no text.

        Example:
            >>> ModelFacts(name="llama-3-8b", architecture="LlamaForCausalLM", batch=2, sequence=8192).tokens
            16384
        """
        return None if self.batch is None or self.sequence is None else self.batch * self.sequence
