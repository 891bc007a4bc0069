"""Hashed n-grams against transformers' Qwen 4 (experimental) itself; needs the parity extra."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config import NgramEmbedding
from jaxformer.layers.attention.inputs import NgramInputs
from jaxformer.layers.ngram_embedding import NgramBranch
from jaxformer.layers.runtime import RuntimeConfig
from tests.small_models import BASE

torch = pytest.importorskip("torch", reason="compares with torch: pip install 'jaxformer[parity]'")
pytest.importorskip(
    "transformers", reason="compares with transformers: pip install 'jaxformer[parity]'"
)

from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig  # noqa: E402
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
EOS, STREAMS, WIDTH, EPS = 68, 3, 14, 1e-3
SIZES = {
    "trigrams": dict(ngram_size=3, heads_per_ngram=3, ple_embed_dim=24, ple_conv_kernel_size=3),
    "4-grams": dict(ngram_size=4, heads_per_ngram=1, ple_embed_dim=15, ple_conv_kernel_size=4),
    "large ids": dict(ngram_size=3, heads_per_ngram=2, ple_embed_dim=8, vocab_size=248_320, seed=7),
}


class Their:
    """A layer of Qwen 4 with random weights, and the option and parameters of ours."""

    def __init__(self, index, **sizes):
        fields = dict(vocab_size=96, ngram_vocab_size_base=37, seed=1234) | sizes
        config = Qwen4ExpTextConfig(
            hidden_size=WIDTH,
            hc_count=STREAMS,
            rms_norm_eps=EPS,
            eos_token_id=EOS,
            make_ngram_vocab_size_divisible_by=8,
            ple_layer_ids=[1, 2],
            **fields,
        )
        torch.manual_seed(0)
        self.layer = Qwen4ExpTextPLELayer(config, layer_idx=0, ple_layer_index=index).eval()
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape))
        self.option = NgramEmbedding.draw(
            2,
            vocab_size=config.vocab_size,
            rows=config.ngram_vocab_size_base,
            size=config.ngram_size,
            heads=config.heads_per_ngram,
            seed=config.seed,
            dim=config.ple_embed_dim,
            start_token=EOS,
            width=config.ple_conv_kernel_size,
            row_multiple=8,
        )[index]
        self.config = replace(
            BASE,
            vocab_size=config.vocab_size,
            model_dim=WIDTH,
            norm=c.RMSNorm(eps=EPS, scale_offset=1.0),
            residual=c.GatedStreams(num_streams=STREAMS),
            ngram_embedding=self.option,
        )

    def params(self):
        weights = {name: x.detach().numpy() for name, x in self.layer.named_parameters()}
        heads, width = len(self.option.vocab_sizes), self.option.head_dim

        def kernel(name, *outputs):  # [(outputs), (heads, features of a row)]
            by_head = weights[f"{name}_proj.weight"].reshape(*outputs, heads, width)
            return {"kernel": np.moveaxis(by_head, (-1, -2), (0, 1))}

        norms = {
            "query_norm": "norm_query",
            "key_norm": "norm_key",
            "convolution_norm": "norm_conv",
        }
        return {
            "table": weights["ple_embedding.ngram_embedding.weight"],
            "key": kernel("key", STREAMS, WIDTH),
            "value": kernel("value", WIDTH),
            "convolution": {"kernel": np.moveaxis(weights["conv1d.weight"], -1, 0).swapaxes(1, 2)},
            **{k: {"scale": weights[f"{x}.weight"].reshape(STREAMS, -1)} for k, x in norms.items()},
        }

    def inputs(self, vocab_size, rows=2, length=13):
        rng = np.random.default_rng(3)
        tokens = rng.integers(0, vocab_size, (rows, length))
        tokens[0, 4], tokens[1, 7:9] = EOS, EOS
        return tokens, np.float32(rng.normal(size=(rows, length, STREAMS, WIDTH)))

    @torch.no_grad()
    def output(self, tokens, streams, mask=None):
        flat = torch.from_numpy(streams).flatten(-2)
        mask = mask if mask is None else torch.from_numpy(mask).long()
        return self.layer(flat, torch.from_numpy(tokens), None, conv_mask=mask).numpy()


def ours(their, tokens, streams, valid=None):
    """Without a cache, or with one if tokens are masked."""
    branch = NgramBranch(their.config, their.config.layers[0], RuntimeConfig())
    recent, _ = F.recent_tokens(tokens, their.option.size, valid=valid)
    mixer = c.MixerInputs(np.zeros(tokens.shape, np.int32), None, valid)
    apply = jax.jit(lambda p, x: branch.apply({"params": p}, x, NgramInputs(recent, mixer))[0])
    return np.asarray(apply(their.params(), streams)).reshape(*tokens.shape, -1)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_multipliers_and_rows_are_theirs(sizes, index):
    their = Their(index, **sizes)
    table = their.layer.ple_embedding
    assert their.option.multipliers == tuple(table.layer_multipliers.tolist())
    assert their.option.vocab_sizes == tuple(table.ngram_heads_vocab_sizes.tolist())
    assert their.params()["table"].shape == (their.option.num_rows, their.option.head_dim)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_rows_and_output_are_theirs(sizes):
    their = Their(1, **sizes)
    tokens, streams = their.inputs(their.config.vocab_size)
    option = their.option
    recent, _ = F.recent_tokens(tokens, option.size)
    ids = F.ngram_ids(recent, option.multipliers, option.vocab_sizes, start_token=EOS)
    rows = their.params()["table"][np.asarray(ids)].reshape(*tokens.shape, -1)
    looked_up = their.layer.ple_embedding(torch.from_numpy(tokens), None).detach().numpy()
    np.testing.assert_array_equal(rows, looked_up)
    actual = ours(their, tokens, streams)
    np.testing.assert_allclose(actual, their.output(tokens, streams), rtol=0, atol=2e-5)


def test_padding_is_as_theirs():
    """Their padding counts as the token that ends a text, and has no values; ours is left out."""
    their = Their(0, **SIZES["trigrams"])
    tokens, streams = their.inputs(96)
    valid = np.ones(tokens.shape, bool)
    valid[0, :3], valid[1, :1] = False, False
    theirs = their.output(np.where(valid, tokens, EOS), streams, valid)
    actual = ours(their, tokens, streams, valid)
    np.testing.assert_allclose(actual[valid], theirs[valid], rtol=0, atol=2e-5)
