"""What the compiler for TPUs makes of our programs. It needs libtpu, and no TPU.

pip install -e '.[aot-tpu]' -c .ci/constraints.txt
python -m pytest -m tpu tests/test_tpu.py
"""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.run import planning as command
from jaxformer.training.aot_compile import topology_devices
from tests.compiled_decoding import compiled_decode, narrow_preset
from tests.compiled_steps import train_step_on
from tests.small_models import model

pytestmark = pytest.mark.tpu
T = 640  # no width of any model
SGD = optax.sgd(1.0)


@pytest.fixture(autouse=True)
def as_it_is_used():
    """With what the compiler does by default, which other tests switch off."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def devices(topology, **options):
    """Devices that programs are compiled for, of which none need be there."""
    pytest.importorskip("libtpu", reason="The compiler for TPUs is in the aot-tpu extra.")
    return topology_devices(topology, **options)


KINDS = {  # kinds of layers, each of which has a kernel forwards and two backwards
    "llama-2-70b": 1,  # groups of heads
    "gemma-2-9b": 2,  # soft cap; windows and none
    "mixtral-8x7b": 1,
    "falcon-7b": 1,  # one head of keys
    "olmo-2-7b": 1,
}


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("name", KINDS)
def test_attention_in_a_step_is_a_kernel_once_each_way(name, remat):
    """Of packed rows, without an array of all pairs of tokens."""
    options = dict(rows=8, length=T, dtype=jnp.bfloat16, remat=remat)
    step = train_step_on(model(name), dict(fsdp=4), SGD, devices=devices("v5e:2x2"), **options)
    text = step.compiled.as_text()
    calls = re.findall(r"splash_m[hq]a_(fwd|dq|dkv)\w*\S* = .*custom-call\(", text)
    assert sorted(calls) == sorted(KINDS[name] * ["fwd", "dq", "dkv"])
    assert not re.search(rf"\b(pred|bf16|f32|s32)\[(\d+,)*{T},{T}\]", text)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_products_of_experts_are_kernels(remat):
    """Three forwards, and two backwards of each; with "full" remat those forwards run again."""
    options = dict(rows=8, length=T, dtype=jnp.bfloat16, remat=remat)
    step = train_step_on(
        model("mixtral-8x7b"), dict(fsdp=4), SGD, devices=devices("v5e:2x2"), **options
    )
    calls = re.findall(r"%(t?gmm)\S* = .*custom-call\(", step.compiled.as_text())
    assert sorted(calls) == ["gmm"] * {"none": 6, "full": 9}[remat] + ["tgmm"] * 3


@pytest.mark.parametrize("chips", ["v5p:2x2x1", "v6e:2x2"])
def test_kernels_of_layers_are_gathered_and_scattered_by_sparse_cores(chips):
    """Seven of a layer, forwards and again backwards."""
    options = dict(rows=8, length=T, dtype=jnp.bfloat16, remat="full")
    step = train_step_on(model("llama-2-70b"), dict(fsdp=4), SGD, devices=devices(chips), **options)
    lines = re.findall(r".* (?:all-gather|reduce-scatter)\(.*layer_0.*", step.compiled.as_text())
    assert len(lines) >= 7 + 7 and all("DEVICE_TYPE_SPARSECORE" in line for line in lines)


def divisions(count):
    """Ways to give devices to three of four axes at most, in powers of two."""
    log = count.bit_length() - 1
    for powers in itertools.product(range(log + 1), repeat=4):
        if sum(powers) == log and 0 in powers:
            yield dict(
                zip(("data", "fsdp", "expert", "tensor"), (2**n for n in powers), strict=True)
            )


@pytest.mark.parametrize("slice_", ["v5e:4x4", "v5p:2x2x4", "v5p:4x4x4", "v5p:4x4x8", "v6e:16x16"])
def test_every_division_of_a_slice_has_a_mesh(slice_):
    chips = devices(slice_)
    for sizes in divisions(len(chips)):
        mesh = make_mesh(MeshConfig(**sizes), chips)
        assert set(mesh.devices.flat) == set(chips) and dict(mesh.shape).items() <= sizes.items()


def test_two_slices_are_crossed_by_rows_alone():
    chips = devices("v5e:4x4", slices=2)
    for sizes in divisions(len(chips)):
        build = partial(make_mesh, MeshConfig(**sizes), chips)
        if sizes["tensor"] == 32:
            with pytest.raises(ValueError, match="2 slices are connected by a slow net"):
                build()
        else:
            lines = build().devices.reshape(-1, sizes["tensor"])
            assert all(len({chip.slice_index for chip in line}) == 1 for line in lines)


@pytest.mark.parametrize("name", ["smollm2-1.7b", "llama-2-7b", "gemma-2-2b"])
def test_a_token_copies_no_cache(name):
    """No loop brings the keys of all layers into another order; before them, the program may."""
    config, (chip, *_) = narrow_preset(name), devices("v5e:2x2")
    text = compiled_decode(config, chip)
    loops, _, entry = text.partition("\nENTRY ")
    pattern = rf"bf16\[{config.segments('decoder').repeats},8,8,\d+,{config.attention.head_dim}\]"
    assert re.search(pattern, entry) and not re.search(rf" = {pattern}\S* copy\(", loops)
    assert "splash_mha_fwd" in text  # prompts attend to each other


SAID = re.compile(
    r"peak memory +(\S+) .*estimated (\S+)\n.* kernels +(.*)\nblocking coll.*by XLA +(\d+) ms",
    re.DOTALL,
)
ROWS = [
    ("smollm2-1.7b", "v5e:4x4", "--batch-size 32 --length 2048", 500, 1),
    ("llama-3-8b", "v5p:2x2x4", "--batch-size 16", 710, 1),
    ("gemma-2-9b", "v5p:2x2x4", "--batch-size 16", 980, 2),
]


@pytest.mark.parametrize("name, chips, flags, most, kinds", ROWS)
def test_what_the_compiler_says_of_a_plan(name, chips, flags, most, kinds, capsys):
    """Its milliseconds, attention's kernels each way, and memory within 15 % of what is planned."""
    pytest.importorskip("libtpu", reason="The compiler for TPUs is in the aot-tpu extra.")
    command.main([name, "--compile", chips, "--mesh.fsdp", "16", *flags.split()])
    peak, planned, kernels, milliseconds = SAID.search(capsys.readouterr().out).groups()
    assert abs(float(planned) / float(peak) - 1) <= 0.15
    assert int(milliseconds) <= most
    actual = re.findall(r"splash_mha_(fwd|dq|dkv)\w*\s+(\d+)", kernels)
    assert sorted(actual) == [(way, str(kinds)) for way in ("dkv", "dq", "fwd")]


def test_a_program_too_large_is_refused_with_the_compilers_numbers(capsys):
    with pytest.raises(SystemExit, match="^1$"):
        command.main(["llama-2-7b", "--compile", "v5e:2x2", "--mesh.fsdp", "4"])
    message = r"error: .* not fit .* one chip: .*\(\S+G\).* HBM \(15.75G\)"
    assert re.match(message, capsys.readouterr().err)
