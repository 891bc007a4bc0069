"""FLOPs and bytes of the logits."""

from jaxformer import config as c
from jaxformer import functional as F


def logit_flops(config: c.TransformerConfig, length: int) -> int:
    """FLOPs of the LM head for a sequence.

    Args:
        config: The model.
        length: Tokens of the sequence (of the target, for an encoder-decoder).

    Returns:
        FLOPs of one product with the head's kernel.
    """
    return 2 * length * (config.embedding.dim or config.model_dim) * config.vocab_size


def logit_bytes(
    config: c.TransformerConfig, tokens: int, *, tensor: int = 1, platform: str = "cpu"
) -> int:
    """Peak bytes of float32 logits and their gradient on one device.

    At one time a device holds the logits of `F.vocab_chunk_size` ids per token.

    Args:
        config: The model.
        tokens: Tokens of this device.
        tensor: Devices over which the vocabulary is sharded.
        platform: Platform of the devices, as in `F.vocab_chunk_size`.

    Returns:
        Bytes on each device.
    """
    chunk_size = F.vocab_chunk_size(tokens, config.vocab_size // tensor, platform=platform)
    return 2 * 4 * tokens * chunk_size


def recomputes_logits(
    config: c.TransformerConfig, tokens: int, *, tensor: int = 1, platform: str = "cpu"
) -> bool:
    """Whether the backward pass recomputes the logits, since they are chunked.

    Args:
        config: The model.
        tokens: Tokens of this device.
        tensor: Devices over which the vocabulary is sharded.
        platform: Platform of the devices, as in `F.vocab_chunk_size`.

    Returns:
        True if `F.vocab_chunk_size` is below the number of ids of the device.
    """
    local_vocab_size = config.vocab_size // tensor
    return F.vocab_chunk_size(tokens, local_vocab_size, platform=platform) < local_vocab_size
