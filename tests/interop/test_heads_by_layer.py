"""What config.json says of Laguna's and MiMo's layers, whose heads differ."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer.config import OutputGate, Rope
from jaxformer.interop import load_pretrained, save_pretrained
from jaxformer.interop.save import choose_family
from tests.interop.golden_files import read_golden, write_folder
from tests.interop.numpy_folders import config_from_fields
from tests.small_models import jitted_forward

FOUR = {"layer_types": ["full_attention"] * 3 + ["sliding_attention"], "num_key_value_heads": 1}


def attentions(kind, **fields):
    """The attention of each of four layers."""
    return [layer.attention for layer in config_from_fields(kind, **FOUR | fields).layers]


@pytest.mark.parametrize(
    "gating, over",
    [(True, "head"), ("per-head", "head"), ("per-element", "feature"), (False, "feature")],
)
def test_gates_of_laguna(gating, over):
    """False is no word for none: transformers then has a gate for each feature."""
    expected = OutputGate(over=over, activation="softplus")
    assert {x.output_gate for x in attentions("laguna", gating=gating)} == {expected}


def test_what_a_laguna_leaves_out():
    *_, full, sliding = attentions("laguna", head_dim=8)
    assert full.positions == (Rope(base=5e5, fraction=0.5),) and full.windows == (None,)
    assert sliding.positions == (Rope(base=1e4, fraction=1.0),) and sliding.windows == (512,)
    dense, *sparse = config_from_fields("laguna", **FOUR).layers
    assert not dense.feed_forward.is_moe and len({x.feed_forward for x in sparse}) == 1
    router = sparse[0].feed_forward.router
    assert (router.score, router.selection_bias, router.logit_softcap) == ("sigmoid", True, None)
    assert sparse[0].feed_forward.shared.expert.hidden_dim == 512


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"gating": "both"}, r"gating = 'both': .* must be True or 'per-head' or 'per-element'"),
        ({"gating": [1]}, r"gating = \[1\]: expected a value of type bool"),
        ({"num_attention_heads_per_layer": [4, 2]}, "expected a number for each of 4 layers"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input = True"),
        (
            {"rope_parameters": {x: {"rope_type": "proportional"} for x in FOUR["layer_types"]}},
            "rope_type = 'proportional': this family rotates a fraction of each head",
        ),
    ],
)
def test_what_laguna_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        config_from_fields("laguna", **FOUR | fields)


def test_mimo_says_its_window_without_the_query():
    *_, full, sliding = attentions("mimo_v2_flash", head_dim=18, sliding_window_size=7)
    assert (full.windows, sliding.windows) == ((None,), (8,))
    assert (full.num_kv_heads, sliding.num_kv_heads) == (1, 2)
    assert (full.sinks, sliding.sinks) == (False, True)
    assert (full.value_dim, full.positions) == (128, (Rope(base=5e6, fraction=0.334),))


@pytest.mark.parametrize("kind", ["laguna", "mimo_v2_flash"])
def test_layers_that_no_field_can_say_are_refused(kind):
    config = config_from_fields(kind, **FOUR, head_dim=8 if kind == "laguna" else 18)
    first, *others = (layer.attention for layer in config.layers)
    changed = replace(config, attention=(replace(first, head_dim=12, value_dim=None), *others))
    with pytest.raises(ValueError, match=f"The family {kind} cannot represent this configuration"):
        choose_family(changed, {}, kind)


@pytest.mark.slow
def test_the_factor_of_values_is_in_the_output(tmp_path):
    """A saved folder has 1 for it, and the same parameters are read."""
    golden = read_golden("mimo_v2_flash")
    config, params = load_pretrained(write_folder(golden, tmp_path / "theirs"))
    save_pretrained(tmp_path / "ours", config, params)
    again, same = load_pretrained(tmp_path / "ours")
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, same, params)
    logits = jitted_forward(config)(same, golden.examples[0].tokens)
    np.testing.assert_allclose(logits, golden.examples[0].logits, atol=5e-5)
