"""What configurations refuse: fields against their annotations, and what cannot be built."""

import dataclasses
import math
import re
import typing
from dataclasses import replace

import numpy as np
import pytest

from jaxformer import checks, parallel
from jaxformer import config as c
from jaxformer.data import tokenizers
from jaxformer.generation import samplers
from jaxformer.parallel import plan
from jaxformer.training import gradient, optimizers, schedules
from jaxformer.training import skip_step as guard

BASE = c.TransformerConfig(
    vocab_size=31,
    model_dim=14,
    num_layers=3,
    attention=c.MultiHead(num_heads=4, num_kv_heads=2, head_dim=6),
    feed_forward=(c.GLU(hidden_dim=11),),
)


def change(attention=None, **fields):
    return replace(BASE, attention=replace(BASE.attention, **(attention or {})), **fields)


def latent(**fields):
    sizes = dict(num_heads=4, latent_dim=5, nope_dim=3, rope_dim=2, value_dim=6)
    return replace(BASE, attention=c.Latent(**(sizes | fields)))


# Every field of every choice, held against its annotation

CHECKED = [
    *(k for k in vars(c).values() if dataclasses.is_dataclass(k)),
    *(samplers.Sample, samplers.Beam),
    *(typing.get_args(schedules.Schedule)),
    *(typing.get_args(optimizers.Optimizer)),
    *(optimizers.OptimizerConfig, guard.SkipStepConfig, gradient.Objective, gradient.DPO),
    *(parallel.MeshConfig, parallel.DistributedConfig, plan.Workload, tokenizers.BPE),
]
NEEDED = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "num_key_heads": 2,
    "dim": 4,
    "key_dim": 4,
    "latent_dim": 4,
    "nope_dim": 4,
    "rope_dim": 4,
    "value_dim": 4,
    "hidden_dim": 8,
    "vocab_size": 31,
    "model_dim": 16,
    "num_layers": 2,
    "passes": 2,
    "max_length": 8,
    "original_max_length": 8,
    "factor": 2.0,
    "fraction": 0.5,
    "short_factors": (1.0,),
    "long_factors": (1.0,),
    "num_experts": 4,
    "num_groups": 2,
    "top_k": 1,
    "num_encoder_layers": 2,
    "attention": c.MultiHead(num_heads=4, num_kv_heads=2, head_dim=8),
    "kinds": (c.Decay(num_heads=4, head_dim=8),),
    "feed_forward": (c.MLP(hidden_dim=8),),
    "expert": c.MLP(hidden_dim=8),
    "width": 8,
    "step_rank": 2,
    "multipliers": (3, 5),
    "vocab_sizes": (7,),
    "start_token": 0,
    "alpha": 1.5,
    "peak": 0.1,
    "schedule": schedules.Constant(peak=0.1),
}
FIELDS = [
    pytest.param(kind, field.name, id=f"{kind.__name__}.{field.name}")
    for kind in CHECKED
    for field in dataclasses.fields(kind)
]


def needed(kind):
    """What a choice cannot be made without."""
    missing = dataclasses.MISSING
    without = [f.name for f in dataclasses.fields(kind) if f.init and f.default is missing]
    one_layer = {"feed_forward": c.MLP(hidden_dim=8)} if kind is c.Layer else {}
    return {name: (NEEDED | one_layer)[name] for name in without}


def leaves(hint):
    """The types and words that an annotation is made of, those inside tuples too."""
    args = [arg for arg in typing.get_args(hint) if arg is not ...]
    inner = [arg for arg in args if typing.get_origin(hint) is not typing.Literal]
    return {hint, *args}.union(*map(leaves, inner)) if inner else {hint, *args}


@pytest.mark.parametrize("kind, name", FIELDS)
def test_no_field_of_any_choice_takes_what_its_annotation_has_not(kind, name):
    hint = typing.get_type_hints(kind)[name]
    held = leaves(hint)
    wrong = [math.nan, math.inf, object(), 10**400 if int not in held else -math.inf]
    wrong += [] if bool in held else [True]
    wrong += [] if float in held else [2.5]
    wrong += [] if str in held else ["no such word"]
    wrong += [] if type(None) in held else [None]
    wrong += [(value,) for value in wrong] if typing.get_origin(hint) is tuple else []
    for value in wrong:
        with pytest.raises(ValueError, match=rf"^{kind.__name__}\.{name}(\[0\])? must be .*; got "):
            kind(**needed(kind) | {name: value})


CANNOT = {
    "num_layers=2.5": (lambda: change(num_layers=2.5), "num_layers must be an integer; got 2"),
    "model_dim=True": (lambda: change(model_dim=True), "model_dim must be an integer; got Tr"),
    "norm=None": (lambda: change(norm=None), "norm must be LayerNorm or RMSNorm; got None"),
    "windows=(2.5,)": (
        lambda: change(dict(windows=(2.5,))),
        r"windows\[0\] must be an in.*; got 2.5",
    ),
    "scale=nan": (
        lambda: change(dict(scale=math.nan)),
        "scale must be a finite float32 number or .* nan",
    ),
    "eps=inf": (
        lambda: c.RMSNorm(eps=math.inf),
        "RMSNorm.eps must be a finite float32 number; got inf",
    ),
    "too large": (
        lambda: c.Rope(base=1e39),
        r"Rope.base must be a finite float32 number; got 1e\+39",
    ),
    "no int32": (
        lambda: change(vocab_size=2**31),
        "vocab_size must be at most 2147483647; got 214",
    ),
    "NTK of one pair": (
        lambda: change(dict(head_dim=2, positions=(c.Rope(scaling=c.NTKScaling(factor=2.0)),))),
        "NTKScaling needs at least 4 rotated features .* got 2 of head_dim=2",
    ),
    "dynamic NTK of one pair": (
        lambda: latent(
            positions=(c.Rope(scaling=c.DynamicNTK(factor=2.0, original_max_length=8)),)
        ),
        "DynamicNTK needs at least 4 rotated features .* got 2 of rope_dim=2",
    ),
    "LongRoPE of length 1": (
        lambda: c.LongRope(
            short_factors=(1.0,), long_factors=(1.0,), original_max_length=1, max_length=8
        ),
        r"LongRope.original_max_length must be above 1 .* got 1",
    ),
    "LongRoPE by nothing": (
        lambda: c.LongRope(
            short_factors=(0.0,), long_factors=(1.0,), original_max_length=4, max_length=8
        ),
        r"LongRope.short_factors\[0\] must be positive; got 0.0",
    ),
    "tensor2tensor of one pair": (
        lambda: change(
            model_dim=2, embedding=c.Embedding(positions=c.Sinusoid(layout="tensor2tensor"))
        ),
        "tensor2tensor layout .* model_dim must be at least 4; got 2",
    ),
    "every id masked": (
        lambda: change(head=c.LMHead(masked_ids=tuple(range(31)))),
        "masked_ids must leave at least one id; it masks all 31",
    ),
    "angles of base 1": (lambda: c.Angles(base=1.0), "Angles.base must be above 1; got 1.0"),
    "temperature=nan": (
        lambda: samplers.Sample(temperature=math.nan),
        "Sample.temperature must be a finite float32 number; got nan",
    ),
    "num_beams=2.5": (lambda: samplers.Beam(num_beams=2.5), "num_beams must be an integer.* 2.5"),
    "learning rate": (
        lambda: schedules.Constant(peak=math.inf),
        "Constant.peak must be a finite float32 number; got inf",
    ),
    "half a device": (lambda: parallel.MeshConfig(data=1.5), "MeshConfig.data must be .*; got 1.5"),
}


@pytest.mark.parametrize("build, message", CANNOT.values(), ids=CANNOT)
def test_a_configuration_that_cannot_be_built_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranged(checks.Checked):
    """Ranges at every place of an annotation."""

    size: checks.Size | None = None
    rates: tuple[checks.Rate, ...] = ()
    even: typing.Annotated[checks.Size, checks.Must("be even", lambda n: n % 2 == 0, "As 2.")] = 2
    pair: tuple[checks.Rate, checks.Positive] = (0, 1)
    names: checks.Distinct[str] = ()
    lengths: checks.Cycle[checks.Positive | str | None] = (None,)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(size=0), "size must be positive; got 0."),
        (dict(size=2**31), "size must be at most 2147483647; got 2147483648."),
        (dict(size=1.5), "size must be an integer or None; got 1.5."),
        (dict(rates=(0, 1)), "rates[1] must be in [0, 1); got 1.0."),
        (dict(pair=(0.5, 0)), "pair[1] must be positive; got 0.0."),
        (dict(even=0), "even must be positive; got 0."),
        (dict(even=3), "even must be even; got 3. As 2."),
        (dict(names=("a", "b", "a")), "names must not repeat an entry; got ('a', 'b', 'a')."),
        (dict(lengths=()), "lengths must have at least one entry; got ()."),
        (dict(lengths=("any", None, -2)), "lengths[2] must be positive; got -2.0."),
    ],
)
def test_an_annotation_says_the_range_of_a_field(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(f'Ranged.{message}')}$"):
        Ranged(**fields)


def test_what_lies_in_its_range_is_kept():
    made = Ranged(size=1, rates=(0, 0.5), even=4, names=("a", "b"), lengths=(2, "any", None))
    assert made.rates == (0.0, 0.5) and made.lengths == (2.0, "any", None) and made.size == 1
    assert repr(checks.Rate) == "typing.Annotated[float, be in [0, 1)]"


def test_numpy_numbers_become_pythons_so_that_text_rebuilds_them():
    config = change(
        dict(num_heads=np.int64(4), scale=np.float32(0.5), windows=(np.int32(8), None)),
        vocab_size=np.uint8(31),
        final_norm=np.bool_(True),
        norm=c.RMSNorm(eps=1),
        dropout=c.Dropout(residual=np.float16(0.25)),
    )
    assert type(config.vocab_size) is type(config.attention.windows[0]) is int
    assert type(config.norm.eps) is type(config.attention.scale) is float
    assert config.final_norm is True and config.dropout.residual == 0.25
    plain = change(
        dict(scale=0.5, windows=(8, None)),
        norm=c.RMSNorm(eps=1.0),
        dropout=c.Dropout(residual=0.25),
    )
    assert config == plain and hash(config) == hash(plain) and repr(config) == repr(plain)
    assert c.from_json(c.TransformerConfig, c.to_json(config)) == config
