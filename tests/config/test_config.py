import ast
import dataclasses
import inspect
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import experiments.translate.runs
import jaxformer
import jaxformer.run.pretraining
import jaxformer.run.run_config
import jaxformer.run.text_generation
from jaxformer import config as c
from jaxformer import costs, parallel, zoo
from jaxformer.data import corpus, tokenizers
from jaxformer.generation import samplers
from jaxformer.interop.config_comparison import canonical
from jaxformer.training import optimizers, schedules
from jaxformer.training import train_step as step
from tests.layers.test_every_option import CONFIGS as EVERY_OPTION


def dataclasses_of(*modules):
    """The dataclasses among a module's names, those of its own package only."""
    members = [kind for module in modules for kind in vars(module).values()]
    ours = [k for k in members if dataclasses.is_dataclass(k) and isinstance(k, type)]
    return sorted(
        {k for k in ours if k.__module__.split(".")[0] in ("jaxformer", "experiments")},
        key=lambda k: (k.__module__, k.__name__),
    )


CONFIG = dataclasses_of(c)
ALL = dataclasses_of(
    c,
    samplers,
    optimizers,
    schedules,
    step,
    corpus,
    tokenizers,
    jaxformer.run.pretraining,
    jaxformer.run.text_generation,
)
CHOICES = [kind for kind in ALL if kind.__name__ not in ("Transformer",)]
PACKAGE = Path(jaxformer.__file__).parent
# Written for every configuration alike or for none, so what they read has no effect by itself.
BESIDE = ("config/tiny.py", "config/serialization.py", "checks.py")
SOURCES = [
    p
    for p in [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "experiments").rglob("*.py")]
    if not p.as_posix().endswith(BESIDE)
]
KINDS = {kind.__name__: kind for kind in CONFIG}


def names_read(node):
    """Attributes read and fields matched, except where a configuration only checks itself."""
    if isinstance(node, ast.FunctionDef) and node.name in ("__post_init__", "_check_rope"):
        return
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr
    if isinstance(node, ast.MatchClass):
        yield from node.kwd_attrs
    for child in ast.iter_child_nodes(node):
        yield from names_read(child)


@cache
def all_read():
    return {name for path in SOURCES for name in names_read(ast.parse(path.read_text()))}


def test_the_reader_of_sources_knows_what_reading_is():
    source = """
class A:
    def __post_init__(self):
        self.checked > 0
def f(x):
    x.written = x.read
    match x:
        case A(matched=y):
            pass
"""
    assert set(names_read(ast.parse(source))) == {"read", "matched"}


@pytest.mark.parametrize("kind", CHOICES, ids=lambda k: k.__name__)
def test_every_field_is_read_somewhere(kind):
    arguments = inspect.signature(kind.formula).parameters if hasattr(kind, "formula") else ()
    read = all_read() | {*arguments}
    unread = [f.name for f in dataclasses.fields(kind) if f.name not in read]
    assert not unread, f"{kind.__name__}: {unread} change nothing; use them or delete them."


@pytest.mark.parametrize("kind", CHOICES, ids=lambda k: k.__name__)
def test_frozen_keyword_only_and_hashable(kind):
    assert kind.__dataclass_params__.frozen
    assert all(f.kw_only for f in dataclasses.fields(kind))
    assert kind.__hash__ is not None
    assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")


DOCUMENTED = [k for k in CHOICES if k in CONFIG or k in dataclasses_of(samplers)]
DOCUMENTED += [jaxformer.run.run_config.RunConfig, jaxformer.run.pretraining.Pretrain]
DOCUMENTED += [experiments.translate.runs.Translate, jaxformer.run.text_generation.Generate]
DOCUMENTED += [parallel.MeshConfig, parallel.DistributedConfig]


@pytest.mark.parametrize("kind", DOCUMENTED, ids=lambda k: k.__name__)
def test_every_field_is_documented(kind):
    """In order, where it is first, and nothing that is no field. --help is taken from there."""
    text = inspect.cleandoc(kind.__doc__)  # as Python 3.13 does on its own
    section = text.partition("Attributes:\n")[2].split("\n\n")[0]
    documented = re.findall(r"^ {4}(\w+): [A-Z\"'\d]", section, flags=re.MULTILINE)
    inherited = {
        f.name
        for base in kind.__mro__[1:-1]
        if dataclasses.is_dataclass(base)
        for f in dataclasses.fields(base)
    }
    own_fields = [f.name for f in dataclasses.fields(kind) if f.name in kind.__annotations__]
    own_fields = [name for name in kind.__annotations__ if name in {*own_fields} - inherited]
    assert documented == own_fields


def test_frozen_defaults_are_values():
    """Two equal configs are one static argument of jax.jit: no second compilation."""
    assert c.Rope() == c.Rope() and hash(c.Rope()) == hash(c.Rope())
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.Rope().base = 3.0


# Text that is refused

BASE = c.TransformerConfig(
    vocab_size=31,
    model_dim=14,
    num_layers=3,
    attention=c.MultiHead(num_heads=4, num_kv_heads=2, head_dim=6),
    feed_forward=(c.GLU(hidden_dim=11),),
)


@pytest.mark.parametrize(
    "before, after, message",
    [
        ('"vocab_size": 31', '"vocab": 31', "TransformerConfig: .* has no field vocab; its fields"),
        ('"vocab_size": 31, ', "", "^TransformerConfig needs vocab_size"),
        ('"vocab_size": 31', '"vocab_size": "31"', "TransformerConfig.vocab_size: expected int"),
        ('"vocab_size": 31', '"vocab_size": true', "vocab_size: expected int, got True"),
        ('"vocab_size": 31', '"vocab_size": 31.0', "vocab_size: expected int, got 31.0"),
        ('"vocab_size": 31', '"vocab_size": null', "vocab_size: expected int, got None"),
        ('"final_norm": true', '"final_norm": 1', "final_norm: expected bool, got 1"),
        ('"hidden_dim": 11', '"hidden": 11', r"feed_forward\[0\]: GLU has no field hidden"),
        ('"type": "GLU"', '"type": "SwiGLU"', r"feed_forward\[0\]: .*'MoE'.*, got .*'SwiGLU'"),
        ('"type": "LMHead"', '"type": "Tail"', "TransformerConfig.head: expected .* type LMHead"),
        ('"block": "serial"', '"block": "series"', "block: expected one of .*, got 'series'"),
        ('"windows": [null]', '"windows": [2.5]', r"attention.windows\[0\]: expected int, got 2.5"),
        ('"windows": [null]', '"windows": 4', "attention.windows: expected a list, got 4"),
        ('"scaling": null', '"scaling": 4', r"positions\[0\].scaling: expected an object .* got 4"),
        ('"num_kv_heads": 2', '"num_kv_heads": 3', "num_heads=4, num_kv_heads=3"),
        ('{"type"', "{type", "property name"),
    ],
)
def test_wrong_json_names_the_path(before, after, message):
    text = c.to_json(BASE)
    assert before in text
    with pytest.raises(ValueError, match=message):
        c.from_json(c.TransformerConfig, text.replace(before, after))


def test_json_of_another_type_is_refused():
    with pytest.raises(ValueError, match="GLU: expected an object of type GLU, got"):
        c.from_json(c.GLU, c.to_json(c.MLP(hidden_dim=3)))


def test_whole_numbers_serve_as_floats_and_defaults_may_be_left_out():
    assert c.from_json(c.RMSNorm, '{"type": "RMSNorm", "eps": 1}') == c.RMSNorm(eps=1.0)


@pytest.mark.parametrize(
    "text, value",
    [
        ("None", None),
        (" 4096 ", 4096),
        ("-1.5", -1.5),
        ("'abc'", "abc"),
        ("RMSNorm(eps=1e-5)", c.RMSNorm(eps=1e-5)),
        ("Rope(base=500000)", c.Rope(base=500_000.0)),
        ("(RMSNorm(), None)", (c.RMSNorm(), None)),
        (
            "Rope(targets=('q', 'v'), scaling=LinearScaling(factor=4.0))",
            c.Rope(targets=("q", "v"), scaling=c.LinearScaling(factor=4.0)),
        ),
        ("BlockSparse(block_size=-(-2))", None),
    ],
)
def test_python_that_is_read(text, value):
    if text.startswith("BlockSparse"):  # arithmetic is no literal
        with pytest.raises(ValueError, match="Cannot parse"):
            c.from_python(text, KINDS)
    else:
        assert c.from_python(text, KINDS) == value


@pytest.mark.parametrize(
    "text, message",
    [
        ("__import__('os').getcwd()", "Cannot parse .*__import__.*expected a number"),
        ("open('x')", r"Cannot parse \"open\('x'\)\""),
        ("[x for x in (1, 2)]", "Cannot parse"),
        ("RMSNorm.eps", "Cannot parse 'RMSNorm.eps'"),
        ("RMSNorm(1e-5)", r"Cannot parse 'RMSNorm\(1e-05\)'.*with keywords"),
        ("RMSNorm(eps=open('x'))", "Cannot parse"),
        ("{[]: 1}", "Cannot parse"),
        ("RMSNorm(", "as a configuration"),
        ("", "as a configuration"),
        ("RMSNorm(epsilon=1.0)", "RMSNorm has no field epsilon; its fields are eps, eps_position"),
        ("RMSNorm(**{'eps': 1.0})", "has no field None"),
        ("Zeros(std=1.0)", "Zeros has no field std; its fields are none"),
        ("GLU()", "GLU needs hidden_dim"),
        ("RMSNorm(eps=1, eps=2)", r"RMSNorm\(eps=1, eps=2\) has a keyword twice"),
        (f"RMSNorm(eps=1{'0' * 400})", "RMSNorm.eps must be a finite float32 number; got 1000"),
        ("GLU(hidden_dim=3.5)", "GLU.hidden_dim: expected int, got 3.5"),
        ("Rope(base='big')", "Rope.base: expected float, got 'big'"),
        ("Rope(targets='qk')", "Rope.targets: expected a list, got 'qk'"),
        ("Rope(scaling=RMSNorm())", "Rope.scaling: expected one of .*got type 'RMSNorm'"),
        ("Rope(pairing='thirds')", "Rope.pairing: expected one of .*got 'thirds'"),
        ("Rope(fraction=2.0)", r"in \(0, 1\]; got 2.0"),
    ],
)
def test_python_that_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        c.from_python(text, KINDS)


# Choices that cannot be


def shared_kv(**fields):
    return replace(BASE, attention=c.SharedKV(**{"num_heads": 4, "head_dim": 6, **fields}))


def differential(**fields):
    sizes = dict(num_heads=4, num_kv_heads=2, head_dim=6)
    return replace(BASE, attention=c.Differential(**(sizes | fields)))


def latent(**fields):
    sizes = dict(num_heads=4, latent_dim=5, nope_dim=3, rope_dim=2, value_dim=6)
    return replace(BASE, attention=c.Latent(**(sizes | fields)))


def change(attention=None, **fields):
    return replace(BASE, attention=replace(BASE.attention, **(attention or {})), **fields)


ROPE_AND_NONE = replace(BASE.attention, positions=(c.Rope(), None, None), windows=(3, None))
HYBRID = replace(BASE, attention=(c.Decay(num_heads=2, head_dim=4), ROPE_AND_NONE))
SHORT, LONG = (1.0, 1.1), (1.0, 2.0, 4.0)
LONG_ROPE = c.LongRope(short_factors=SHORT, long_factors=LONG, original_max_length=4, max_length=16)


@pytest.mark.parametrize(
    "build, message",
    [
        (
            lambda: change(norm_placement=("pre", "post"), post_norm=c.RMSNorm()),
            "post_norm needs a norm after branches, .* 'sandwich' or 'res_post'; got post, pre",
        ),
        (
            lambda: change(final_norm=False, last_norm=c.RMSNorm()),
            r"which final_norm=False leaves out; got RMSNorm\(eps=1e-06",
        ),
        (lambda: change(vocab_size=0), "TransformerConfig.vocab_size must be positive; got 0"),
        (lambda: change(model_dim=-2), "TransformerConfig.model_dim must be positive; got -2"),
        (lambda: change(num_layers=0), "num_layers must be positive; got 0"),
        (lambda: change(dict(num_heads=0)), "MultiHead.num_heads must be positive; got 0"),
        (lambda: change(dict(num_kv_heads=0)), "num_kv_heads must be positive; got 0"),
        (lambda: change(dict(head_dim=0)), "head_dim must be positive; got 0"),
        (lambda: change(dict(num_kv_heads=3)), "multiple .* num_heads=4, num_kv_heads=3"),
        (lambda: change(dict(head_dim=7)), r"even and above 0; got 7 of head_dim=7 \(fraction 1"),
        (
            lambda: change(dict(positions=(c.Alibi(), c.Rope(fraction=0.5)))),
            r"got 3 of head_dim=6 \(fraction 0.5\)",
        ),
        (
            lambda: change(dict(positions=(c.Rope(fraction=0.1),))),
            r"got 0 of head_dim=6 \(fraction 0.1\)",
        ),
        (
            lambda: change(dict(positions=(c.Rope(scaling=LONG_ROPE),))),
            "one factor per feature pair, 3 of them; got 2 short and 3 long",
        ),
        (
            lambda: change(dict(positions=())),
            r"MultiHead.positions must have at least one entry; got \(\)",
        ),
        (
            lambda: change(norm_placement=()),
            r"TransformerConfig.norm_placement must have .* one entry; got \(\)",
        ),
        (lambda: shared_kv(num_kv_heads=3), "got num_heads=4, num_kv_heads=3"),
        (lambda: c.QueryScaling(original_max_length=0), r"QueryScaling\.original_max_.* got 0\."),
        (lambda: c.QueryScaling(beta=-0.1, original_max_length=9), r"g\.beta must .* got -0\.1\."),
        (lambda: shared_kv(head_dim=0), "SharedKV.head_dim must be positive; got 0"),
        (
            lambda: shared_kv(positions=(c.TransformerXL(),)),
            r"SharedKV.positions\[0\] must be Rope or ScoreBias or None; got TransformerXL",
        ),
        (
            lambda: shared_kv(qk_norm=c.QKNorm(placement="after_rope")),
            r"SharedKV normalises before RoPE, so qk_norm\.placement .* got 'after_rope'",
        ),
        (lambda: differential(num_kv_heads=1), r"num_kv_heads must be even, for pairs; got 1\."),
        (
            lambda: differential(positions=(c.Rope(targets=("q", "k", "v")),)),
            r"\[0\] must have no targets but q and k, .*; got Rope\(.*\('q', 'k', 'v'\)",
        ),
        (
            lambda: differential(positions=(c.TransformerXL(),)),
            r"Differential.positions\[0\] must be Rope or ScoreBias or None; got TransformerXL",
        ),
        (lambda: latent(latent_dim=0), "Latent.latent_dim must be positive; got 0"),
        (lambda: latent(query_latent_dim=-1), "Latent.query_latent_dim must be positive; got -1"),
        (lambda: latent(rope_dim=3), r"rotated width must be even .* got 3 of rope_dim=3"),
        (
            lambda: latent(positions=(c.Rope(targets=("q", "k", "v", "o")),)),
            r"must have no targets but q and k, .*; got Rope\(.*\('q', 'k', 'v', 'o'\)",
        ),
        (
            lambda: latent(positions=(c.Rope(targets=("o",)),)),
            r"no targets but q and k, .*; got Rope\(.*\('o',\)",
        ),
        (
            lambda: latent(positions=(c.TransformerXL(),)),
            r"Latent.positions\[0\] must be Rope or ScoreBias or None; got TransformerXL",
        ),
        (lambda: latent(windows=(0,)), r"Latent.windows\[0\] must be positive; got 0"),
        (lambda: latent(biases=("out", "out")), r"biases must not repeat .* \('out', 'out'\)"),
        (lambda: latent(biases=("query_latent",)), "needs query_latent_dim; got None"),
        (
            lambda: replace(
                BASE,
                attention=c.SharedKV(num_heads=4, head_dim=6),
                topology=c.EncoderDecoder(num_encoder_layers=2),
            ),
            r"EncoderDecoder needs MultiHead, .* got SharedKV\. \(The encoder may",
        ),
        (
            lambda: change(dict(windows=())),
            r"MultiHead.windows must have at least one entry; got \(\)",
        ),
        (lambda: change(feed_forward=()), r"feed_forward must have at least one entry; got \(\)"),
        (lambda: change(dict(windows=(3, 0))), r"windows\[1\] must be positive; got 0"),
        (
            lambda: change(dict(windows=(2**31,))),
            r"windows\[0\] must be at most 2147483647; got 2147483648",
        ),
        (
            lambda: change(dict(head_dim=10**9)),
            "at most 65536 features; got 1000000000 of head_dim",
        ),
        *(
            (
                lambda width=width: c.ShortConvolution(num_heads=2, head_dim=3, width=width),
                f"ShortConvolution.width must be from 2 to 256; got {width}",
            )
            for width in (1, 257)
        ),
        (lambda: change(dict(logit_softcap=0.0)), "MultiHead.logit_softcap .* got 0.0"),
        (lambda: change(dict(clip_qkv=-1.0)), "MultiHead.clip_qkv must be positive; got -1.0"),
        (
            lambda: change(dict(positions=(c.T5Bias(), c.T5Bias(num_buckets=8)))),
            "may share one score bias, .*; got T5Bias.*, T5Bias",
        ),
        (
            lambda: replace(BASE, attention=()),
            r"TransformerConfig.attention must have at least one entry; got \(\)",
        ),
        (
            lambda: replace(
                BASE,
                attention=tuple(
                    replace(BASE.attention, num_heads=n, positions=(c.T5Bias(),)) for n in (2, 4)
                ),
            ),
            r"may share one score bias, and then need the same num_heads; got T5B.* \[2, 4\] heads",
        ),
        (
            lambda: HYBRID.with_positions(c.Rope()),
            "A cycle of kinds has no positions to replace; got .Rope",
        ),
        (
            lambda: replace(HYBRID, topology=c.Encoder()),
            "Decay is causal, so it needs a Decoder; got Encoder",
        ),
        (lambda: c.T5Bias(num_buckets=7), "even and at least 4; got 7"),
        (lambda: c.T5Bias(num_buckets=2), "even and at least 4; got 2"),
        (
            lambda: c.T5Bias(num_buckets=2**32, max_distance=2**40),
            "T5Bias.num_buckets must be at most 2147483647; got 4294967296",
        ),
        (
            lambda: c.T5Bias(max_distance=2**31),
            "T5Bias.max_distance must be at most 2147483647; got 2147483648",
        ),
        (lambda: c.T5Bias(num_buckets=32, max_distance=16), "got max_distance=16, num_buckets=32"),
        (lambda: c.Rope(fraction=0.0), r"fraction must be in \(0, 1\]; got 0.0"),
        (lambda: c.Rope(fraction=1.5), r"in \(0, 1\]; got 1.5"),
        (lambda: c.Rope(base=1.0), "Rope.base must be above 1; got 1.0"),
        (lambda: c.Rope(targets=("q", "q")), r"not repeat .* \('q', 'q'\)"),
        (lambda: c.Chunks(size=0), "Chunks.size must be positive; got 0"),
        (
            lambda: change(dict(windows=(c.Chunks(size=2**31),))),
            r"size must be at most .* got 2147483648",
        ),
        (lambda: c.QueryScaling(original_max_length=9, offset=-1), r"offset must be .* got -1\."),
        (lambda: c.BlockSparse(block_size=0), "BlockSparse.block_size must be positive; got 0"),
        (lambda: c.BlockSparse(local_blocks=0), "local_blocks must be positive; got 0"),
        (lambda: c.BlockSparse(stride=-1), "stride must be positive; got -1"),
        (lambda: c.MLP(hidden_dim=0), "MLP.hidden_dim must be positive; got 0"),
        (lambda: c.GLU(hidden_dim=-3), "GLU.hidden_dim must be positive; got -3"),
        (lambda: c.ClampedGEGLU(hidden_dim=3, limit=0.0), "limit must be positive; got 0.0"),
        (lambda: c.Learned(max_length=0), "Learned.max_length must be positive; got 0"),
        (lambda: c.Learned(max_length=3, offset=-1), "offset must be at least 0; got -1"),
        (lambda: c.Embedding(dim=0), "Embedding.dim must be positive; got 0"),
        (lambda: c.LMHead(softcap=0.0), "LMHead.softcap must be positive; got 0.0"),
        (lambda: c.Dropout(attention=1.0), r"Dropout.attention must be in \[0, 1\); got 1.0"),
        (lambda: c.Dropout(residual=-0.1), "Dropout.residual .* got -0.1"),
        (lambda: c.EncoderDecoder(num_encoder_layers=0), "num_encoder_layers .* got 0"),
        (
            lambda: c.EncoderDecoder(num_encoder_layers=1, feed_forward=()),
            r"EncoderDecoder\.feed_forward must have at least one entry; got \(\)",
        ),
        (
            lambda: c.EncoderDecoder(num_encoder_layers=1, source_vocab_size=0),
            "source_vocab_size must be positive; got 0",
        ),
        (lambda: c.LinearScaling(factor=0.0), "LinearScaling.factor .* got 0.0"),
        (lambda: c.PRope(fraction=0.0), r"PRope.fraction must be in \(0, 1\]; got 0.0"),
        (lambda: c.NTKScaling(factor=-1.0), "NTKScaling.factor .* got -1.0"),
        (lambda: c.DynamicNTK(factor=2.0, original_max_length=0), "original_max_length .* got 0"),
        (lambda: c.Yarn(factor=2.0, original_max_length=0), "original_max_length .* got 0"),
        (lambda: replace(LONG_ROPE, max_length=0), "LongRope.max_length .* got 0"),
        (
            lambda: c.Llama3Scaling(factor=8.0, low_freq_factor=5.0),
            "high_freq_factor must be at least low_freq_factor; got 4.0 and 5.0",
        ),
        (
            lambda: c.MoE(expert=c.GLU(hidden_dim=3), num_experts=4, top_k=5),
            "top_k must be at most num_experts; got top_k=5, num_experts=4",
        ),
        (
            lambda: c.MoE(expert=c.GLU(hidden_dim=3), num_experts=0),
            "MoE.num_experts must be positive; got 0",
        ),
        (
            lambda: change(attention=dict(sinks=True, normalizer="relu")),
            r"MultiHead\.sinks needs normalizer=\"softmax\"; got 'relu'",
        ),
        (
            lambda: change(
                block="parallel",
                feed_forward=(c.MoE(expert=c.GLU(hidden_dim=3), num_experts=4, norm=c.RMSNorm()),),
            ),
            "MoE.norm and MoE.output_norm need the serial block; got 'parallel'",
        ),
        (
            lambda: change(
                block="parallel_shared_norm",
                feed_forward=(
                    c.MoE(expert=c.GLU(hidden_dim=3), num_experts=4, output_norm=c.RMSNorm()),
                ),
            ),
            "MoE.output_norm need the serial block; got 'parallel_shared_norm'",
        ),
        (
            lambda: change(block="parallel_shared_norm", norm_placement="pre_feed_forward"),
            "'pre_feed_forward' needs a norm for each branch, so block must not be 'parallel_sha",
        ),
        (lambda: c.Router(capacity=0), "Router.capacity must be positive; got 0"),
        (lambda: c.SparseMixer(jitter=0.0), "SparseMixer.jitter must be positive; got 0.0"),
        (
            lambda: change(model_dim=13, attention=dict(positions=(c.TransformerXL(),))),
            "TransformerXL needs an even model_dim .* got 13",
        ),
        (
            lambda: c.Yarn(factor=2.0, original_max_length=9, beta_fast=1.0, beta_slow=2.0),
            "beta_fast must exceed beta_slow; got 1.0 and 2.0",
        ),
        (
            lambda: c.Yarn(factor=2.0, original_max_length=9, attention_factor=1e30),
            r"must have a square of at most 3\.4e\+38, .*; got 1e\+30",
        ),
        (
            lambda: replace(LONG_ROPE, attention_factor=1e30),
            r"LongRope\.attention_factor must have a square of at most 3\.4e\+38, .*; got 1e\+30",
        ),
        (lambda: c.RMSNorm(eps=-1.0), "RMSNorm.eps must be positive; got -1.0"),
        (lambda: c.LayerNorm(eps=0.0), "LayerNorm.eps must be positive; got 0.0"),
        (lambda: c.Normal(std=-1.0), "Normal.std must be positive; got -1.0"),
        (lambda: c.FanIn(gain=0.0), "FanIn.gain must be positive; got 0.0"),
        (lambda: c.FanAverage(gain=-2.0), "FanAverage.gain must be positive; got -2.0"),
        (
            lambda: change(topology=c.Encoder(), attention=dict(windows=(c.BlockSparse(),))),
            "BlockSparse windows are causal, so they need a Decoder; got Encoder",
        ),
        (
            lambda: change(attention=dict(biases=("query", "query"))),
            "biases must not repeat .*query.*query",
        ),
        (
            lambda: change(model_dim=13, embedding=c.Embedding(positions=c.Sinusoid())),
            "Sinusoid needs an even model_dim .* got 13",
        ),
        (
            lambda: change(head=c.LMHead(masked_ids=(3, 31, -1))),
            r"masked_ids must be from 0 to vocab_size - 1 = 30; got \[31, -1\]",
        ),
    ],
)
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: change(dict(positions=c.Rope())), r"positions must be a tuple, .* got Rope\("),
        (lambda: change(dict(windows=4096)), "windows must be a tuple, each .*; got 4096"),
        (
            lambda: change(attention=dict(value_dim=5, positions=(c.Rope(targets=("v", "o")),))),
            r"MultiHead\.value_dim must be head_dim where RoPE .* got value_dim 5 and head_dim",
        ),
        (
            lambda: c.MoE(expert=c.GLU(hidden_dim=3, sub_norm=c.RMSNorm()), num_experts=4),
            r"Experts cannot have a sub_norm; got RMSNorm\(",
        ),
        (lambda: c.OutputGate(activation="relu"), r"OutputGate\.activation must be .*'relu'"),
        (lambda: c.Router(logit_softcap=0.0), r"Router\.logit_softcap must be positive; got 0\.0"),
        (lambda: c.OutputGate(over="heads"), r"OutputGate\.over must be one of .*; got 'heads'"),
        (lambda: latent(output_gate="head"), r"Latent\.output_gate must be .* got 'head'"),
        (lambda: change(feed_forward=c.GLU(hidden_dim=3)), r"feed_forward .* got GLU\("),
        (lambda: c.Rope(targets=("q", "x")), r"targets\[1\] must be one of 'q', .*; got 'x'"),
        (lambda: c.Rope(targets="qk"), "Rope.targets must be a tuple, each .*; got 'qk'"),
        (lambda: change(block="series"), "TransformerConfig.block must be one of .*; got 'series'"),
        (lambda: change(norm=c.RMSNorm(parameters="all")), "RMSNorm.parameters .* got 'all'"),
        (
            lambda: change(norm=c.RMSNorm(eps="small")),
            "eps must be a finite float32 number; got 'small'",
        ),
        (lambda: change(dict(biases=("query", "gate"))), r"MultiHead.biases\[1\] .* got 'gate'"),
        (lambda: change(dict(biases="query")), "MultiHead.biases must be a tuple.*'query'"),
        (
            lambda: change(dict(positions=(None, c.Rope(pairing="thirds")))),
            "Rope.pairing must be one of .*'neighbours'.*; got 'thirds'",
        ),
        (
            lambda: change(feed_forward=(c.MLP(hidden_dim=3, activation="tanh"),)),
            "MLP.activation must be one of .*; got 'tanh'",
        ),
        (lambda: change(initialisation=c.Initialisation(residual="wide")), "got 'wide'"),
    ],
)
def test_wrong_words_and_patterns_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# Patterns over the layers


def test_patterns_cycle_and_the_period_is_their_common_multiple():
    narrow, wide = c.GLU(hidden_dim=3), c.GLU(hidden_dim=5)
    config = change(
        dict(positions=(c.Rope(), None), windows=(4, 5, None)),
        feed_forward=(narrow, narrow, narrow, wide),
        num_layers=14,
    )
    assert config.segments("decoder") == (0, 12, 1, 2)
    for i in range(14):
        choice = config.layers[i]
        assert choice.positions == (c.Rope(), None)[i % 2]
        assert choice.window == (4, 5, None)[i % 3]
        assert choice.feed_forward.hidden_dim == (3, 3, 3, 5)[i % 4]
    assert config.layers[13] == config.layers[1] != config.layers[2]


def test_norms_stand_elsewhere_from_layer_to_layer():
    config = change(norm_placement=("pre", "res_post"), num_layers=5)
    places = ["pre", "res_post", "pre", "res_post", "pre"]
    assert config.segments("decoder") == (0, 2, 2, 1)
    assert [layer.norm_placement for layer in config.layers] == places
    long = replace(config, norm_placement=("pre", "res_post") * 8, num_layers=16)
    assert long.tiny().norm_placement == ("pre", "res_post")
    rows = change(norm_placement=("pre",) * 8 + ("post",), num_layers=9)
    assert rows.tiny().norm_placement == ("pre", "post")


def test_layers_of_several_kinds_have_the_patterns_of_their_kinds():
    """The second kind's positions and windows are cycled over all layers, as they are alone."""
    hybrid = replace(HYBRID, num_layers=12)
    assert hybrid.segments("decoder") == (0, 6, 2, 0)
    for i in range(12):
        alone = replace(hybrid, attention=hybrid.attention[i % 2])
        assert hybrid.layers[i] == alone.layers[i]
    assert [layer.window for layer in hybrid.layers[:4]] == [1, None, 1, None]
    assert [hybrid.layers[i].positions for i in (1, 3, 5)] == [None, c.Rope(), None]
    tiny_kinds = [type(layer.attention) for layer in HYBRID.tiny().layers]
    assert tiny_kinds[:2] == [c.Decay, c.MultiHead]
    tiny = zoo.get("nemotron-3-nano").tiny()  # of 48 layers with one branch each
    branches = [(bool(x.attention.parts), x.feed_forward.is_moe) for x in tiny.layers]
    assert branches == [(True, False), (False, True), (True, False), (True, False)]
    kinds = zoo.get("lfm-2.5-1.2b").tiny().layers  # of 15, in runs of one or two
    convolution, attention = c.ShortConvolution, c.MultiHead
    assert [type(layer.attention) for layer in kinds] == [convolution, attention, convolution]


def test_two_spellings_of_one_model_are_equal():
    spelled = [
        change(dict(windows=(4, None)), num_layers=4),
        change(dict(windows=(4, None, 4, None)), num_layers=4, norm_placement=("pre",)),
        replace(
            BASE, num_layers=4, attention=(replace(BASE.attention, windows=(4,)), BASE.attention)
        ),
    ]
    assert len(set(spelled)) == 1 and len(set(map(repr, spelled))) == 3
    assert len({repr(canonical(config)) for config in spelled}) == 1
    assert spelled[0].layers[0] is spelled[0].layers[2]
    assert spelled[0] != change(dict(windows=(4, 4, None)), num_layers=4)
    own = c.EncoderDecoder(num_encoder_layers=2, attention=BASE.attention)
    shared = c.EncoderDecoder(num_encoder_layers=2)
    assert change(topology=own) == change(topology=shared)
    assert change(topology=own) != change(topology=c.EncoderDecoder(num_encoder_layers=3))


def test_layers_of_several_kinds_cost_what_each_does():
    both = replace(HYBRID, attention=(c.Decay(num_heads=2, head_dim=4), BASE.attention))
    alone = [replace(both, attention=both.layers[i].attention, num_layers=1) for i in range(3)]
    flops = sum(costs.forward_flops(config, 7) for config in alone)
    assert costs.forward_flops(both, 7) == flops - 2 * costs.logit_flops(both, 7)
    assert costs.cache_bytes(both, 7) == sum(costs.cache_bytes(config, 7) for config in alone)


def test_what_follows_from_the_choices():
    assert BASE.residual_init_divisor == math.sqrt(6)
    plain = change(initialisation=c.Initialisation(residual="plain"))
    assert plain.residual_init_divisor == 1.0
    assert BASE.max_length is None
    assert change(embedding=c.Embedding(positions=c.Sinusoid())).max_length is None
    learned = c.Embedding(positions=c.Learned(max_length=9, offset=2))
    assert change(embedding=learned).max_length == 9
    assert c.Rope(fraction=0.25).rotary_dim(256) == 64


# The same designs, small


def changed(name, attention=None, **fields):
    """A preset with another design in it."""
    config = zoo.get(name)
    if attention is None or isinstance(attention, dict):
        attention = replace(config.attention, **(attention or {}))
    return replace(config, attention=attention, **fields)


def latent_heads(**attention):
    """DeepSeek-V2's widths."""
    widths = dict(latent_dim=512, nope_dim=128, rope_dim=64, value_dim=128)
    return c.Latent(num_heads=128, **widths, **attention)


PARTS = tuple(c.Rope(fraction=fraction) for fraction in (0.1, 0.3, 0.95))
YARN = c.Yarn(factor=4.0, original_max_length=32_768)
GROWTH = c.QueryScaling(original_max_length=16_384)
DESIGNS = {name: zoo.get(name) for name in zoo.names()} | {
    "late windows": changed(
        "llama-3.1-8b",
        dict(
            windows=(None,) * 21 + (32_768,) * 7,
            positions=(c.Rope(scaling=YARN),),
            biases=("query", "key", "value"),
        ),
        num_layers=28,
    ),
    "alternating, spelled out": changed(
        "llama-2-7b", dict(windows=(256, None) * 24), num_layers=48
    ),
    "shared": changed(
        "llama-2-7b",
        c.SharedKV(
            num_heads=64,
            head_dim=512,
            positions=(c.Rope(fraction=0.125, targets=("q", "k", "v", "o")), None),
            windows=(128, None),
            qk_norm=c.QKNorm(),
        ),
        num_layers=43,
    ),
    "differential": changed(
        "llama-2-7b",
        c.Differential(
            num_heads=64,
            num_kv_heads=16,
            head_dim=64,
            positions=(c.Rope(), None),
            windows=(512, None),
            scale=0.3,
            norm=c.RMSNorm(eps=1e-3),
            biases=("query", "out"),
        ),
    ),
    "latent": changed(
        "llama-2-7b",
        latent_heads(
            query_latent_dim=1536,
            positions=(c.Rope(pairing="neighbours"), None),
            windows=(None, 512),
        ),
    ),
    "chunks": changed(
        "mixtral-8x7b",
        dict(
            windows=(c.Chunks(size=4096), None),
            query_scaling=c.QueryScaling(beta=0.2, original_max_length=8192, offset=1),
        ),
        feed_forward=(
            c.MoE(expert=c.GLU(hidden_dim=8192), num_experts=16, top_k=1, router=c.InputRouter()),
        ),
    ),
    "dense before experts": changed(
        "mixtral-8x7b",
        feed_forward=(c.GLU(hidden_dim=11_008),) * 2 + zoo.get("mixtral-8x7b").feed_forward * 32,
        num_layers=34,
    ),
    "latent, scaled": changed(
        "llama-2-7b",
        latent_heads(scale=192**-0.5, positions=(c.Rope(scaling=YARN),), query_scaling=GROWTH),
    ),
    "odd fractions": changed(
        "llama-2-7b",
        dict(
            head_dim=80,
            positions=PARTS,
            qk_norm=c.QKNorm(over="each_head"),
            clip_qkv=8.0,
            query_scaling=c.QueryPower(exponent=0.2, length=9),
            output_gate=c.OutputGate(over="head", bias=True, activation="softplus"),
        ),
        num_layers=7,
        feed_forward=(c.MLP(hidden_dim=10_240), c.GLU(hidden_dim=10_240)),
    ),
}


def skeleton(value):
    """Kinds, words and switches of a configuration, with every size replaced by its type."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: skeleton(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return (type(value).__name__, tuple(fields.items()))
    if isinstance(value, tuple):
        return frozenset(skeleton(item) for item in value)
    if value is None or isinstance(value, str | bool) or value == 1.0:
        return value
    return type(value).__name__


@pytest.mark.parametrize("name", DESIGNS)
def test_tiny_keeps_every_choice(name):
    config = DESIGNS[name]
    tiny = config.tiny()
    assert skeleton(tiny) == skeleton(config)
    assert tiny.dropout == config.dropout and tiny.initialisation == config.initialisation
    before, after = (  # of hybrids, the attention layers
        ([kind for kind in kinds if kind.has_scores] or kinds)[-1]
        for kinds in ([layer.attention for layer in x.layers] for x in (config, tiny))
    )
    has_heads = not isinstance(before, c.SelectiveScan | c.TimeMixing | c.ChannelMixing)
    if has_heads and not isinstance(before, c.Latent):
        shared = [getattr(x, "num_kv_heads", None) or x.num_key_heads for x in (before, after)]
        assert (before.num_heads == shared[0]) == (after.num_heads == shared[1])
        assert (shared[0] == 1) == (shared[1] == 1)
    if has_heads:
        assert (before.num_heads.bit_count() == 1) == (after.num_heads.bit_count() == 1)
    widths = [max(layer.attention.heads_width for layer in x.layers) for x in (config, tiny)]
    assert (widths[0] == config.model_dim) == (widths[1] == tiny.model_dim)
    pairs, tiny_pairs = ({(x.positions, x.window) for x in y.layers} for y in (config, tiny))
    assert {skeleton(pair) for pair in tiny_pairs} == {skeleton(pair) for pair in pairs}
    assert tiny.tiny() == tiny


OF_MANY_KINDS = "llama-2-70b", "gemma-3-27b", "t5-11b", "latent"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in OF_MANY_KINDS else pytest.mark.exhaustive)
        for name in DESIGNS
    ],
)
@pytest.mark.slow(but=["llama-2-70b", "latent"])
def test_tiny_has_few_parameters(name):
    assert costs.num_parameters(DESIGNS[name].tiny()) < 1_000_000


def test_tiny_scales_follow_their_width():
    tiny = {name: config.tiny() for name, config in DESIGNS.items()}
    assert tiny["gemma-2-27b"].embedding.scale == tiny["gemma-2-27b"].model_dim ** 0.5
    assert tiny["gemma-2-27b"].attention.scale == 144**-0.5  # of no width in the model: kept
    assert tiny["gemma-3-1b"].attention.scale == 16**-0.5
    assert tiny["t5-11b"].head.multiplier == tiny["t5-11b"].model_dim ** -0.5
    assert tiny["t5-11b"].attention.scale == 1.0
    assert tiny["latent, scaled"].attention.scale == 32**-0.5
    assert tiny["phi-3-small"].head.multiplier == 1 / 8


def test_tiny_windows_and_lengths_are_short_enough_to_matter():
    tiny = DESIGNS["late windows"].tiny()
    assert [layer.window for layer in tiny.layers] == [None, 6, 6]
    assert tiny.attention.positions[0].scaling.original_max_length == 16
    assert DESIGNS["opt-350m"].tiny().max_length == 64
    assert DESIGNS["alternating, spelled out"].tiny().attention.windows == (6, None)


def test_rotary_positions_are_stretched_in_every_layer_that_has_them():
    scaling = c.LinearScaling(factor=2.0)
    small = zoo.get("llama-2-70b").tiny()
    mixed = replace(small, attention=replace(small.attention, positions=(c.Rope(base=5e5), None)))
    stretched = mixed.with_rope_scaling(scaling)
    assert stretched.attention.positions == (c.Rope(base=5e5, scaling=scaling), None)
    assert stretched.with_rope_scaling(None) == mixed
    bare = replace(small, attention=replace(small.attention, positions=(c.Alibi(),)))
    topology = c.EncoderDecoder(num_encoder_layers=1, attention=small.attention)
    encoder = replace(bare, topology=topology).with_rope_scaling(scaling).encoder_layers[0]
    assert encoder.attention.positions == (replace(*small.attention.positions, scaling=scaling),)
    with pytest.raises(ValueError, match=r"a layer with Rope; got positions \(Alibi\(scale=1\.0\)"):
        bare.with_rope_scaling(scaling)
    assert small.with_positions(c.Alibi()) == bare
    decay = replace(small, attention=c.Decay(num_heads=2, head_dim=4))
    with pytest.raises(ValueError, match=r"Decay has no positions, .*; got \(Alibi\("):
        decay.with_positions(c.Alibi())


# Text, and back

# What neither a preset nor a row of tests/layers/test_every_option.py has away from its default.
OTHERS = [
    change(
        initialisation=c.Initialisation(
            embedding=c.Normal(std=0.5),
            projection=c.FanAverage(gain=2.0),
            query=c.FanIn(gain=0.5),
            residual="plain",
            head=c.Zeros(),
        ),
        dropout=c.Dropout(embedding=0.1, attention=0.2, feed_forward=0.3, residual=0.4),
        feed_forward=(
            c.ClampedGEGLU(hidden_dim=3, limit=2.0, alpha=1.5, bias=False),
            c.GLU(hidden_dim=3, bias=True),
            c.XIELU(hidden_dim=3),
            c.MoE(
                expert=c.MLP(hidden_dim=3),
                num_experts=4,
                top_k=3,
                router=c.Router(
                    score="sigmoid",
                    bias=True,
                    selection_bias=True,
                    groups=c.ExpertGroups(num_groups=2, top_k=2, score="max"),
                    renormalise=False,
                    scale=2.5,
                    capacity=2,
                ),
                shared=c.SharedExpert(expert=c.MLP(hidden_dim=3), gated=True),
            ),
        ),
        norm=c.RMSNorm(parameters="none"),
        topology=c.Encoder(),
        attention=dict(positions=(c.Alibi(scale=2.0), c.TransformerXL())),
        embedding=c.Embedding(positions=c.Sinusoid(layout="halves", offset=2)),
    ),
    change(
        topology=c.EncoderDecoder(
            num_encoder_layers=2,
            source_vocab_size=5,
            attention=c.SharedKV(num_heads=4, head_dim=6, scale=0.5),
            feed_forward=(c.MLP(hidden_dim=3),),
        ),
        attention=dict(
            positions=tuple(
                c.Rope(scaling=scaling)
                for scaling in (
                    c.NTKScaling(factor=2.0),
                    c.DynamicNTK(factor=2.0, original_max_length=4),
                    c.Llama3Scaling(
                        factor=8.0, low_freq_factor=2.0, high_freq_factor=3.0, original_max_length=9
                    ),
                    c.Yarn(
                        factor=2.0,
                        original_max_length=9,
                        beta_fast=9.0,
                        beta_slow=2.0,
                        attention_factor=1.5,
                        truncate=False,
                    ),
                    replace(LONG_ROPE, short_factors=LONG, attention_factor=1.5),
                )
            )
        ),
    ),
    latent(norm=c.LayerNorm(eps=0.1)),
    change(
        norm_placement=("sandwich", "pre", "res_post", "pre_feed_forward"),
        head=c.LMHead(transform=c.HeadTransform(activation="relu", bias=True, norm=c.RMSNorm())),
    ),
    replace(
        BASE,
        attention=(
            BASE.attention,
            c.NoAttention(),
            c.ShortConvolution(num_heads=2, head_dim=3, width=4, biases=("in",)),
            c.RGLRU(num_heads=2, head_dim=3, convolution_width=3, activation="relu"),
            c.TimeMixing(width=6),
            c.ChannelMixing(hidden_dim=5),
            c.SelectiveScan(
                width=6,
                step_rank=2,
                state_dim=3,
                norm=c.RMSNorm(parameters="none"),
                convolution_width=3,
                biases=("in",),
            ),
            c.LinearAttention(
                num_heads=4,
                num_key_heads=2,
                key_dim=3,
                value_dim=5,
                decay=c.StepDecay(over="feature", rank=2, min_step=0.1, max_step=0.5),
                delta_rule=False,
                beta="one",
                max_beta=2.0,
                unit_vectors=False,
                scale=0.3,
                skip=True,
                convolution_width=None,
                output=c.GatedNorm(
                    norm=None, over="group", activation="sigmoid", placement="before_norm", rank=2
                ),
                biases=("in",),
            ),
            c.LinearAttention(
                num_heads=4,
                num_key_heads=2,
                key_dim=3,
                value_dim=5,
                decay=c.SlopeDecay(scale=0.5),
                output=c.GatedNorm(over="all"),
            ),
        ),
        residual=c.DeepNorm(alpha=1.5),
        head=c.LMHead(unit_rows=True),
        adapter=c.LoRA(
            rank=3,
            alpha=5.0,
            targets=("query",),
            rslora=True,
            dora=True,
            dropout=0.1,
            trained=("head",),
            base_dtype="bfloat16",
        ),
        feed_forward=(c.NoFeedForward(), c.MLP(hidden_dim=3)),
    ),
    change(residual=c.DepthScaledSum()),
    change(norm_placement="sandwich", post_norm=c.RMSNorm(eps=0.1), last_norm=c.LayerNorm()),
    change(residual=c.HyperConnections(num_streams=3, dynamic=False)),
    change(loop=c.Loop(passes=3, start=1, stop=2, enter="sum")),
    change(multi_token_prediction=True),
    change(
        residual=c.ManifoldHyperConnections(
            num_streams=2, iterations=3, output="mean", eps=0.1, norm_eps=0.2
        )
    ),
    change(
        residual=c.IdentityHyperConnections(num_streams=2, magnitude=1.5, eps=0.1, norm_eps=0.2)
    ),
    change(residual=c.GatedStreams(num_streams=2, rank=3, norm_eps=0.2)),
    change(residual=c.AltUp(num_streams=2, norm_eps=0.2, branches=c.Laurel(rank=3, norm_eps=0.1))),
    replace(
        change(residual=c.AltUp(layer_embedding=c.OtherStreams())),
        layer_embedding=c.LayerEmbedding(dim=3, vocab_size=11),
        feed_forward=(c.GLU(hidden_dim=3, sparsity=0.5), c.MLP(hidden_dim=3, sparsity=0.9)),
    ),
    change(residual=c.EmbeddingSkip()),
    change(residual=c.DepthWeightedAverage(num_layers=3)),
    change(residual=c.UNetSkips(num_layers=3)),
    change(residual=c.AttentionResiduals(num_layers=3, block_layers=2, norm_eps=0.1)),
    replace(BASE, attention=(BASE.attention, replace(BASE.attention, value_residual=True))),
    change(residual=c.BranchScale(over="branch", start=0.0)),
    change(residual=c.ResidualGate(temperature=0.7)),
    change(residual=c.ResidualScaling()),
    change(residual=c.SphericalInterpolation(initial_rate=0.3, parameter_scale=0.2, eps=0.1)),
    change(residual=c.WeightedSum(attention=(2.0, 0.5), recurrent=(1.5, 1), feed_forward=(1, 3.0))),
    replace(
        BASE,
        attention=(BASE.attention, replace(BASE.attention, cross_layer_kv=True, num_heads=2)),
        layer_embedding=c.LayerEmbedding(dim=3, activation="silu"),
    ),
    change(
        ngram_embedding=c.NgramEmbedding.draw(
            2, vocab_size=BASE.vocab_size, dim=16, start_token=2, width=3, row_multiple=5
        )
    ),
    replace(
        BASE,
        attention=c.Decay(
            num_heads=4, head_dim=6, max_memory=99.0, angles=c.Angles(base=9.0, learned=True)
        ),
    ),
]
WRITTEN = [*DESIGNS.values(), *EVERY_OPTION.values(), *OTHERS]


def test_text_rebuilds_the_config():
    for config in WRITTEN:
        for text in (c.to_json(config), c.to_json(config, indent=2)):
            assert c.from_json(c.TransformerConfig, text) == config
        rebuilt = eval(repr(config), dict(KINDS))
        assert rebuilt == config and hash(rebuilt) == hash(config)
        assert c.from_python(repr(config), KINDS) == config


def away_from_default(value):
    """Each kind and field of a configuration that says something."""
    if isinstance(value, tuple):
        return {name for item in value for name in away_from_default(item)}
    if not dataclasses.is_dataclass(value):
        return set()
    names = {type(value).__name__}
    for field in dataclasses.fields(value):
        setting = getattr(value, field.name)
        names |= away_from_default(setting)
        if setting != field.default:
            names.add(f"{type(value).__name__}.{field.name}")
    return names


def test_every_field_of_every_kind_is_written_and_read():
    names = {f"{k.__name__}.{f.name}" for k in CONFIG for f in dataclasses.fields(k)}
    names |= {kind.__name__ for kind in CONFIG}
    for name in ("model_type", "max_position_embeddings"):  # which comparisons ignore
        names.remove(f"TransformerConfig.{name}")
    names = {name for name in names if name.partition(".")[0] != "Layer"}  # what cycles become
    names.remove("TransformerConfig.residual")  # of a person's own: test_custom_residual.py
    assert not names - away_from_default(tuple(WRITTEN))


@pytest.mark.parametrize("count", [0, 200_000])
def test_options_that_repeat_too_often_or_never_are_refused(count):
    text = c.to_json(change(feed_forward=(c.MLP(hidden_dim=3),) * 3)).replace(
        '"times": 3', f'"times": {count}'
    )
    with pytest.raises(ValueError, match=f"at most 100,000 items together; got 1 items {count} t"):
        c.from_json(c.TransformerConfig, text)
    with pytest.raises(ValueError, match=f"got 1 items {count} times"):
        c.from_python(f"(MLP(hidden_dim=3),) * {count}", KINDS)
