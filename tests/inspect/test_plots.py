"""Plots of positions and sizes: arrays against formulas, figures by their contents."""

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.colors import to_rgba

from jaxformer import Transformer, costs, inspect, zoo
from jaxformer.config import (
    Alibi,
    Embedding,
    Encoder,
    EncoderDecoder,
    Latent,
    Learned,
    LinearScaling,
    MultiHead,
    Rope,
    Sinusoid,
    T5Bias,
)
from jaxformer.generation import prefill
from tests.small_models import BASE, random_params


@pytest.mark.slow
def test_sinusoids_are_sines_and_cosines(build):
    config, params, *_ = build(embedding=Embedding(positions=Sinusoid()))
    actual = inspect.position_embeddings(config, params, 9)
    rates = 10_000.0 ** (-np.arange(7) / 7)
    angles = np.arange(9)[:, None] * rates
    columns = np.sort(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), axis=1)
    np.testing.assert_allclose(np.sort(actual, axis=1), columns, atol=1e-6)


def test_a_learned_table_is_shown_from_its_offset(build):
    positions = Learned(max_length=8, offset=2)
    config, params, *_ = build(embedding=Embedding(positions=positions))
    table = params["embedding"]["positions"]["embedding"]
    np.testing.assert_array_equal(inspect.position_embeddings(config, params, 8), table[2:10])
    with pytest.raises(ValueError, match="8"):
        inspect.position_embeddings(config, params, 9)


def test_a_model_that_adds_no_positions_says_what_it_has(build):
    config, params, *_ = build()
    with pytest.raises(ValueError, match=r"adds no positions; the attention layers have \(Rope"):
        inspect.position_embeddings(config, params, 9)


def test_angles_grow_with_the_position_and_are_stretched(build):
    scaled = Rope(base=100.0, scaling=LinearScaling(factor=4.0))
    config, *_ = build(attention={"positions": (scaled, None, Rope(base=100.0))})
    plain = np.arange(5)[:, None] * 100.0 ** (-np.arange(3) / 3)
    np.testing.assert_allclose(inspect.rotation_angles(config, 5, layer=2), plain, rtol=1e-5)
    np.testing.assert_allclose(inspect.rotation_angles(config, 5, layer=0), plain / 4, rtol=1e-5)
    with pytest.raises(ValueError, match="Layer 1 has no RoPE; its positions are None"):
        inspect.rotation_angles(config, 5, layer=1)
    with pytest.raises(ValueError, match=r"layer must be in \[0, 2\]; got 3"):
        inspect.rotation_angles(config, 5, layer=3)


@pytest.mark.slow
def test_alibi_falls_by_its_slopes(build):
    config, *_ = build(attention={"positions": (Alibi(scale=0.5),)})
    bias = inspect.position_bias(config, {}, 6)
    slopes = 0.5 * 2.0 ** (-2.0 * np.arange(1, 5))
    for t, s in ((5, 0), (3, 1), (4, 4)):
        np.testing.assert_allclose(bias[:, t, s], -slopes * (t - s), rtol=1e-6)
    with pytest.raises(ValueError, match=r"4 heads between 6 tokens needs 576 B,.*to 576"):
        inspect.position_bias(config, {}, 6, max_bytes=575)
    assert inspect.position_bias(config, {}, 6, max_bytes=576).nbytes == 576
    falls = inspect.score_by_distance(config, 6)
    np.testing.assert_allclose(falls, -slopes[:, None] * np.arange(6), rtol=1e-6)


@pytest.mark.slow
def test_buckets_are_rows_of_the_table(build):
    kind = T5Bias(num_buckets=8, max_distance=14)
    config, params, *_ = build(
        attention={"positions": (kind,)}, topology=EncoderDecoder(num_encoder_layers=1)
    )
    table = params["decoder"]["relative_bias"]["embedding"]
    bias = inspect.position_bias(config, params, 5)
    np.testing.assert_array_equal(bias[:, 4, 2], table[2])  # causal: exact up to half the buckets
    both = params["encoder"]["relative_bias"]["embedding"]
    bias = inspect.position_bias(config, params, 5, stack="encoder")
    np.testing.assert_array_equal(bias[:, 1, 0], both[1])
    np.testing.assert_array_equal(bias[:, 0, 1], both[5])  # what follows has the other half
    falls = inspect.score_by_distance(config, 3, params=params)
    np.testing.assert_array_equal(falls, table[:3].T)
    with pytest.raises(ValueError, match="among encoder, decoder for this model; got 'both'"):
        inspect.position_bias(config, params, 5, stack="both")
    with pytest.raises(ValueError, match="T5Bias is learned; pass the model's parameters"):
        inspect.score_by_distance(config, 3)
    seen = inspect.score_by_distance(config, 3, params=params, stack="encoder")
    np.testing.assert_array_equal(seen, both[:3].T)


def test_scores_of_rotary_positions_are_mean_cosines(build):
    config, *_ = build(attention={"positions": (Rope(fraction=2 / 3, base=100.0),)})
    cosines = np.cos(np.arange(9)[:, None] * 100.0 ** (-np.arange(2) / 2)).sum(axis=1)
    actual = inspect.score_by_distance(config, 9)
    np.testing.assert_allclose(actual[0], (cosines + 1) / 3, atol=1e-6)


@pytest.mark.slow
def test_features_of_latent_keys_that_are_not_turned_count(build):
    latent = Latent(num_heads=4, latent_dim=8, nope_dim=4, rope_dim=2, value_dim=6)
    config, *_ = build(attention=latent)
    actual = inspect.score_by_distance(config, 5)[0]
    np.testing.assert_allclose(actual, (2 * np.cos(np.arange(5)) + 4) / 6, atol=1e-6)


@pytest.mark.parametrize("targets", [("v", "o"), ("q",), ("k", "v")])
def test_scores_follow_from_distance_where_queries_and_keys_are_turned(targets, build):
    config, *_ = build(attention={"positions": (Rope(targets=targets),)})
    with pytest.raises(ValueError, match="no score that depends on distance .* are Rope"):
        inspect.score_by_distance(config, 5)


@pytest.mark.parametrize("length", [0, -1, 2.5])
def test_lengths_that_cannot_be_are_refused(length, build):
    turned, *_ = build()
    falling, *_ = build(attention={"positions": (Alibi(),)})
    learned, params, *_ = build(embedding=Embedding(positions=Learned(max_length=8)))
    for draw in (
        lambda: inspect.rotation_angles(turned, length),
        lambda: inspect.score_by_distance(turned, length),
        lambda: inspect.score_by_distance(falling, length),
        lambda: inspect.position_bias(falling, {}, length),
        lambda: inspect.position_embeddings(learned, params, length),
    ):
        with pytest.raises(ValueError, match=f"an integer of at least 1; got {length}"):
            draw()


def test_the_encoder_of_a_pair_is_drawn_too(build):
    attention = MultiHead(num_heads=2, num_kv_heads=2, head_dim=4, positions=(Rope(base=100.0),))
    config, *_ = build(topology=EncoderDecoder(num_encoder_layers=1, attention=attention))
    angles = inspect.rotation_angles(config, 3, stack="encoder")
    np.testing.assert_allclose(angles, np.arange(3)[:, None] * [1, 0.1], rtol=1e-6)
    assert inspect.rotation_angles(config, 3).shape == (3, 3)
    with pytest.raises(ValueError, match=r"layer must be in \[0, 0\]; got 1"):
        inspect.rotation_angles(config, 3, stack="encoder", layer=1)


def test_positions_without_a_bias_say_so(build):
    config, params, *_ = build(topology=Encoder(), attention={"positions": (None,)})
    with pytest.raises(ValueError, match="Layer 0 of the encoder has no position bias"):
        inspect.position_bias(config, params, 5, stack="encoder")
    with pytest.raises(ValueError, match="no score that depends on distance .* are None"):
        inspect.score_by_distance(config, 5)


def test_the_table_of_parameters_counts_them_all(build):
    config, params, *_ = build()
    rows = inspect.parameter_table(params)
    assert sum(row.size for row in rows) == costs.num_parameters(config)
    assert sum(row.fraction for row in rows) == pytest.approx(1)
    query = next(row for row in rows if row.path.endswith("attention/query/kernel"))
    assert query.path == "decoder/layers/layer_0/attention/query/kernel"
    assert query.shape == (3, 14, 4, 6) and query.size == 3 * 14 * 24
    printed = inspect.format_parameters(params).splitlines()
    assert len(printed) == len(rows) + 1
    assert "3 x 14 x 4 x 6  1,008" in next(line for line in printed if "query/kernel" in line)
    assert printed[-1].split()[:2] == ["all", f"{costs.num_parameters(config):,}"]


@pytest.mark.parametrize(
    "show",
    [
        lambda config, params: inspect.position_bias(config, params, 5),
        lambda config, params: inspect.score_by_distance(config, 5, params=params),
        lambda config, params: inspect.position_embeddings(config, params, 5),
    ],
)
def test_positions_of_another_model_are_not_shown(show):
    learned = replace(BASE, embedding=Embedding(positions=Learned(max_length=8)))
    config = replace(learned, attention=replace(BASE.attention, positions=(T5Bias(),)))
    missing = "^1 parameter does not fit .*: decoder/relative_bias/embedding is missing.$"
    with pytest.raises(ValueError, match=missing):
        show(config, random_params(learned))
    with pytest.raises(
        ValueError, match=r"^9 parameters do not fit .* is \[3, 14\], not \[1, 14\]"
    ):
        show(replace(config, num_layers=1), random_params(config))


def test_a_table_needs_shapes_only():
    config = zoo.get("llama-2-70b")
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens)["params"]
    assert sum(row.size for row in inspect.parameter_table(shapes)) == costs.num_parameters(config)


def test_caches_grow_with_the_text_up_to_the_window():
    mistral = zoo.get("mistral-7b")
    sizes = inspect.cache_sizes(mistral, (1, 4096, 8192))
    assert sizes.tolist() == [2 * 32 * 8 * 128 * 2 * n for n in (1, 4096, 4096)]
    for lengths, more, message in (
        ((1, -3), {}, "A length must be an integer of at least 0; got -3"),
        ([1.5], {}, "A length must be an integer of at least 0; got 1.5"),
        (8, {}, r"lengths must be a sequence, such as \[1, 2048\]; got 8"),
        ([8], {"batch": 0}, "batch must be an integer of at least 1; got 0"),
        ([8], {"bytes_per_number": 0}, "bytes_per_number must be 1, 2 or 4; got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            inspect.cache_sizes(mistral, lengths, **more)
    with pytest.raises(ValueError, match="has no source; got source_length=5"):
        inspect.cache_sizes(mistral, (1,), source_length=5)
    with pytest.raises(ValueError, match="An Encoder has no KV cache"):
        inspect.cache_sizes(replace(mistral.tiny(), topology=Encoder()), (1,))


@pytest.mark.slow
def test_caches_hold_the_source_too(build):
    # Of the encoder: nothing of it stays.
    attention = MultiHead(num_heads=2, num_kv_heads=2, head_dim=4)
    config, params, _, inputs = build(
        topology=EncoderDecoder(num_encoder_layers=1, attention=attention)
    )
    prompts = jnp.ones((2, 3), int)
    lengths = jnp.array([3, 2])
    _, read = prefill(config, params, prompts, lengths, capacity=9, **inputs)
    num_bytes = sum(x.nbytes for x in jax.tree.leaves((read.cache.layers, read.cache.tail)))
    sizes = inspect.cache_sizes(config, (9,), batch=2, source_length=5, bytes_per_number=4)
    assert sizes.tolist() == [num_bytes]


def test_maps_are_drawn_as_they_are():
    maps = np.random.default_rng(0).dirichlet(np.ones(5), (3, 5))
    figure = inspect.plot_attention(maps, tokens=list("abcde"), title="three heads", columns=2)
    assert len(figure.axes) == 3 and figure.get_suptitle() == "three heads"
    np.testing.assert_allclose(figure.axes[2].images[0].get_array(), maps[2], rtol=1e-6)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == list("abcde")
    assert figure._repr_png_().startswith(b"\x89PNG")  # so a notebook shows it
    cross = inspect.plot_attention(maps[0, :, :3], tokens=list("abcde"), keys=list("xyz")).axes[0]
    assert [label.get_text() for label in cross.get_yticklabels()] == list("abcde")
    assert [label.get_text() for label in cross.get_xticklabels()] == list("xyz")
    named = inspect.plot_attention(maps[:2], heads=(3, 1))
    assert [axes.get_title() for axes in named.axes] == ["head 3", "head 1"]
    assert inspect.plot_attention(maps[0], heads=(2,)).axes[0].get_title() == "head 2"
    with pytest.raises(ValueError, match=r"shape \(1, 3, 5, 5\). Choose one layer and row"):
        inspect.plot_attention(maps[None])
    some = inspect.plot_attention(maps[:2], heads=np.array([3, 1]))
    assert [axes.get_title() for axes in some.axes] == ["head 3", "head 1"]
    with pytest.raises(ValueError, match="columns must be at least 1; got 0"):
        inspect.plot_attention(maps, columns=0)
    for names in ({"tokens": "abc"}, {"keys": "abcdef"}, {"heads": (1, 2)}):
        (name, values), count = next(iter(names.items())), 3 if "heads" in names else 5
        with pytest.raises(
            ValueError, match=f"{name} must have {count} entries; got {len(values)}"
        ):
            inspect.plot_attention(maps, **names)


def test_all_maps_at_once_are_neither_drawn_nor_summed():
    everything = inspect.AttentionMaps(decoder=jnp.ones((1, 1, 2, 3, 3)) / 3)
    with pytest.raises(ValueError, match=r"for example maps\.decoder\[0, 0\]"):
        inspect.plot_attention(everything)
    with pytest.raises(ValueError, match=r"for example maps\.decoder\."):
        inspect.attention_entropy(everything)


def test_heat_and_lines_hold_their_numbers():
    heat = inspect.plot_heatmap([[1.0, -3.0]], centered=True, xlabel="x", title="t").axes[0]
    assert heat.images[0].get_clim() == (-3, 3) and heat.get_xlabel() == "x"
    texts = [text.get_text() for text in heat.texts]
    labels = [label.get_text() for label in heat.get_xticklabels()]
    assert texts == ["1.00", "-3.00"] and labels == ["0", "1"]
    named = inspect.plot_heatmap([[np.nan, 2.0]], rows=["a"], columns=["$", "b"]).axes[0]
    assert [text.get_text() for text in named.texts] == ["2.00"]
    assert [label.get_text() for label in named.get_xticklabels()] == ["$", "b"]
    lines = inspect.plot_lines({"a": [1.0, 2.0], "b": [3.0, 4.0]}, x=[5, 7], logy=True).axes[0]
    assert [line.get_label() for line in lines.lines] == ["a", "b"]
    np.testing.assert_array_equal(lines.lines[1].get_xydata(), [[5, 3], [7, 4]])
    assert lines.get_yscale() == "log"
    with pytest.raises(ValueError, match=r"\[rows, columns\]; got shape \(3,\)"):
        inspect.plot_heatmap([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="rows must have 1 entries; got 2"):
        inspect.plot_heatmap([[1.0, 2.0]], rows=["a", "b"])


def test_dollars_are_drawn_as_dollars():
    """Matplotlib reads what stands between two of them as a formula, and refuses `$$`."""
    words = ["$$", "$x$", "a$b$c"]
    maps = inspect.plot_attention(np.eye(3), tokens=words)
    lens = inspect.plot_lens(np.log(np.full((1, 3, 3), 0.2) + np.eye(3)), tokens=words, names=words)
    drawn = maps.axes[0].get_xticklabels() + maps.axes[0].get_yticklabels()
    drawn += [*lens.axes[0].texts, *lens.axes[0].get_xticklabels()]
    assert [text.get_text() for text in drawn] == words * 4
    assert not any(text.get_parse_math() for text in drawn)
    assert all(figure._repr_png_().startswith(b"\x89PNG") for figure in (maps, lens))


def test_the_lens_is_drawn_with_the_likeliest_tokens():
    lens = np.log(np.array([[[0.7, 0.2, 0.1]], [[0.1, 0.2, 0.7]]]))
    axes = inspect.plot_lens(lens, tokens=["once"], names=["x", "y", "\n"]).axes[0]
    assert [text.get_text() for text in axes.texts] == ["x", r"\n"]
    np.testing.assert_allclose(axes.images[0].get_array(), [[0.7], [0.7]], rtol=1e-6)
    with pytest.raises(ValueError, match=r"shape \(2, 1, 1, 3\). Choose one row"):
        inspect.plot_lens(lens[:, None])
    with pytest.raises(ValueError, match="names must have 3 entries; got 2"):
        inspect.plot_lens(lens, names=["x", "y"])
    with pytest.raises(ValueError, match="tokens must have 1 entries; got 2"):
        inspect.plot_lens(lens, tokens=["once", "more"])


def test_the_lens_can_be_read_on_dark_cells():
    lens = np.log(np.array([[[0.34, 0.33, 0.33]], [[0.6, 0.2, 0.2]], [[0.98, 0.01, 0.01]]]))
    axes = inspect.plot_lens(lens).axes[0]
    image = axes.images[0]
    for text, chance in zip(axes.texts, (0.34, 0.6, 0.98), strict=True):
        assert contrast(image.cmap(image.norm(chance)), to_rgba(text.get_color())) > 3, chance


def test_the_numbers_of_a_heatmap_can_be_read_on_every_shade():
    shades = np.linspace(-1, 1, 50).reshape(5, 10)
    for centered in (False, True):
        axes = inspect.plot_heatmap(shades, centered=centered).axes[0]
        image = axes.images[0]
        for text, value in zip(axes.texts, shades.flat, strict=True):
            assert contrast(image.cmap(image.norm(value)), to_rgba(text.get_color())) > 4.5, value


@pytest.mark.parametrize("shape", [(2, 20), (10, 10), (50, 2)])
def test_numbers_of_a_heatmap_do_not_touch(shape):
    figure = inspect.plot_heatmap(np.full(shape, -0.25))
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == np.prod(shape)
    across = sorted({(box.x0, box.x1) for box in boxes})
    down = sorted({(box.y0, box.y1) for box in boxes})
    assert all(
        b[0] - a[1] > 1 for row in (across, down) for a, b in zip(row, row[1:], strict=False)
    )
    assert not inspect.plot_heatmap(np.full((1, 100), -0.25)).axes[0].texts  # no room


@pytest.mark.slow
def test_layers_and_positions_are_counted_in_whole_numbers():
    maps = np.full((2, 14, 19), 1 / 19)
    lens = np.log(np.full((2, 7, 3), 1 / 3))
    for figure in (
        inspect.plot_lines({"a": [3.0, 2.0, 1.0]}),
        inspect.plot_lines({"a": [3.0, 2.0, 1.0]}, x=[1, 2, 3]),
        inspect.plot_attention(maps, columns=2),
        inspect.plot_heatmap(np.zeros((3, 60))),
        inspect.plot_lens(lens),
    ):
        figure.draw_without_rendering()
        for axes in (axes for axes in figure.axes if axes.get_label() != "<colorbar>"):
            ticks = [*axes.get_xticks(), *(axes.get_yticks() if axes.images else ())]
            assert all(float(tick).is_integer() for tick in ticks), ticks
    between = inspect.plot_lines({"a": [3.0, 2.0, 1.0]}, x=[0.1, 0.2, 0.3]).axes[0]
    assert any(not float(tick).is_integer() for tick in between.get_xticks())


def test_names_of_columns_are_turned_only_where_they_would_touch():
    for words, turned in ((list("abcdefgh"), 0), (["a longer word"] * 8, 90)):
        figure = inspect.plot_attention(np.eye(8), tokens=words)
        assert {label.get_rotation() for label in figure.axes[0].get_xticklabels()} == {turned}
        assert {label.get_rotation() for label in figure.axes[0].get_yticklabels()} == {0}


def contrast(one, other):
    """By the Web Content Accessibility Guidelines, from 1 to 21; text needs 4.5, large text 3."""

    def luminance(colour):
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
        return np.dot(parts, [0.2126, 0.7152, 0.0722])

    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def test_the_legend_stands_beside_the_curves():
    figure = inspect.plot_lines({"a long name of a line": [1.0, 2.0], "other": [2.0, 2.0]})
    figure.draw_without_rendering()
    [axes] = figure.axes
    legend, curves = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert curves.x1 <= legend.x0 and legend.x1 <= figure.bbox.x1


def test_losses_colour_their_tokens():
    page = inspect.show_losses(["<b>", "c"], [2.0, 1.0])._repr_html_()
    assert "&lt;b&gt;" in page and "<b>" not in page
    assert 'title="2.00 nats" style="background: rgba(220, 60, 40, 1.00)"' in page
    assert 'title="1.00 nats" style="background: rgba(220, 60, 40, 0.50)"' in page
    page = inspect.show_losses(["a", "b", "c"], [2.0, np.nan, np.inf])._repr_html_()
    assert 'title="2.00 nats" style="background: rgba(220, 60, 40, 1.00)"' in page
    assert 'title="nan nats" style="background: black; color: white">b<' in page
    assert 'title="inf nats" style="background: black; color: white">c<' in page
    with pytest.raises(ValueError, match=r"got 1 texts and shape \(2,\)"):
        inspect.show_losses(["a"], [1.0, 2.0])


def test_a_tree_is_shown_with_its_names(build):
    _, params, *_ = build()
    page = inspect.show_tree(params)._repr_html_()
    assert "treescope-container" in page
    assert page != inspect.show_tree(params["embedding"])._repr_html_()


NO_PLOTS = """
import sys
sys.modules["matplotlib"] = sys.modules["matplotlib.figure"] = sys.modules["treescope"] = None
from jaxformer import inspect
for draw in (lambda: inspect.plot_heatmap([[1.0]]), lambda: inspect.show_tree({"a": 1})):
    try:
        draw()
    except ModuleNotFoundError as error:
        print(error.name, "|", error)
"""


@pytest.mark.slow
def test_without_matplotlib_the_extra_is_named():
    ran = subprocess.run(
        [sys.executable, "-c", NO_PLOTS], capture_output=True, text=True, check=True
    )
    matplotlib, treescope = ran.stdout.splitlines()
    assert matplotlib.startswith(
        "matplotlib | Plots need matplotlib: pip install 'jaxformer[plots]'"
    )
    assert treescope.startswith("treescope | Plots need treescope")
