"""What XLA's compiler for GPUs makes of our updates. It needs the CUDA plugin, and no GPU.

pip install -e '.[aot-gpu]' -c .ci/constraints.txt
JAX_PLATFORMS=cpu python -m pytest -m gpu tests/test_gpu.py
"""

import math
import re
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxformer import functional as F
from jaxformer import zoo
from jaxformer.layers import Transformer
from jaxformer.parallel import (
    MeshConfig,
    abstract_parameters,
    make_mesh,
    overlap,
    overlap_compiler_options,
)
from jaxformer.parallel.plan import Workload
from jaxformer.run import planning as command
from jaxformer.training import aot_compile
from jaxformer.training.aot_compile import (
    H100_TARGET_CONFIG,
    HloModule,
    compile_update,
    patched_gpu_checks,
    topology_devices,
)
from jaxformer.training.gradient import make_value_and_grad
from tests.compiled_decoding import compiled_decode, narrow_preset
from tests.small_models import model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        find_spec("jax_cuda13_plugin") is None,
        reason="The compiler for GPUs is in the aot-gpu extra.",
    ),
]


def made_of(config, remat="full"):
    """Without the options that write two layers into the loop."""
    work = Workload(batch_size=8, length=640, remat=remat)
    with mock.patch.object(overlap, "GPU_OPTIONS", {}):
        return compile_update(config, dict(fsdp=4), topology_devices("h100:4"), work)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("name", ["llama-2-70b", "falcon-7b", "olmo-2-7b", "mistral-7b"])
def test_attention_is_cudnns_once_each_way(name, remat):
    """In each form of segments: none, offsets, a mask.

    The last layer of the loop may stand beside it, so each is there at most twice.
    """
    kernels = made_of(model(name), remat).custom_kernels
    assert kernels.pop("cudnn$fmhaSoftmax") == 2 and kernels.pop("cudnn$fmhaScaleBiasSoftmax") == 1
    assert kernels.pop("cudnn$fmhaSoftmaxBackward") in (2, 4)
    assert kernels.pop("cudnn$fmhaScaleBiasSoftmaxBackward") in (1, 2) and not kernels


def test_packed_rows_have_no_array_of_pairs_of_tokens():
    """Offsets take their place if no row has more than 16 segments."""
    mesh, length = make_mesh(MeshConfig(), topology_devices("h100:1")), 640
    config = replace(model("llama-2-70b"), num_layers=2)

    def text(max_segments):
        bounded = Transformer(config, dtype=jnp.bfloat16, max_segments=max_segments)
        update = jax.jit(make_value_and_grad(bounded, mesh))
        batch = aot_compile.abstract_batch(config, mesh, 8, length, 0)
        step = jax.ShapeDtypeStruct((), "int32", sharding=NamedSharding(mesh, P()))
        with patched_gpu_checks():
            lowered = update.lower(abstract_parameters(config, mesh), {}, step, batch)
        return lowered.compile({"xla_gpu_autotune_level": 0}).as_text()

    pairs = re.compile(rf"\[[\d,]*\b{length},{length}[,\]]")
    packed = text(16)
    assert not pairs.search(packed) and pairs.search(text(None))
    assert HloModule(packed).count_custom_kernels().keys() == {
        "cudnn$fmhaSoftmax",
        "cudnn$fmhaSoftmaxBackward",
    }


@pytest.mark.parametrize("remat, backwards", [("none", 6), ("full", 9)])
def test_products_of_experts_are_hoppers(remat, backwards):
    """For each form of segments three forwards, and backwards, where "full" runs those again.

    Those of the loop's last turn stand beside it.
    """
    kernels = made_of(replace(zoo.get("mixtral-8x7b"), num_layers=2), remat).custom_kernels
    assert kernels["mpmd_map"] == 3 * (3 + 2 * backwards)


@pytest.mark.parametrize("devices", [1, 4])
def test_rows_of_experts_are_gathered_in_both_passes(devices):
    """A scatter would add a token's gradients in bfloat16 and in any order."""
    mesh = jax.sharding.Mesh(topology_devices(f"h100:{devices}"), ("expert",))
    axis_name = "expert" if devices > 1 else None

    def loss(x, logits, kernels):
        def expert(rows, sizes):
            return F.grouped_matmul(rows, kernels, sizes)

        routing, options = F.route(logits, top_k=4), dict(num_experts=16, axis_name=axis_name)
        return jnp.sum(F.mixture_of_experts(x, routing, expert, **options).astype(jnp.float32))

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("expert")))

    gradient = jax.shard_map(
        jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=P("expert"), out_specs=P("expert")
    )
    arrays = ((1024, 256), "bfloat16"), ((1024, 16), "float32"), ((16, 256, 256), "bfloat16")
    with patched_gpu_checks():
        lowered = jax.jit(gradient).lower(*(array(*x) for x in arrays))
    hlo = HloModule(lowered.compile().as_text())
    instructions = [one for part in hlo.computations.values() for one in part]
    assert any(one.operation == "gather" for one in instructions)
    assert not [x for x in instructions if x.operation == "scatter" and x.result[0] != "s"]


def test_products_of_experts_before_hopper_do_not_grow_with_their_number():
    """Of `jax.lax.ragged_dot`, XLA makes a product with a copy of the rows for each expert."""
    a100 = H100_TARGET_CONFIG.replace("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    a100 = a100.replace("major: 9 feature_extension: ACCELERATED_FEATURES", "major: 8")
    options = dict(platform="cuda", topology="1x1x1", target_config=a100)
    (chip,) = topologies.get_topology_desc("", **options).devices
    place = partial(jax.ShapeDtypeStruct, dtype="bfloat16", sharding=SingleDeviceSharding(chip))
    rows, kernels = place((16_384, 512)), place((64, 512, 512))

    def update(x, kernels, gradient, sizes):
        y, pullback = jax.vjp(lambda *a: F.grouped_matmul(*a, sizes), x, kernels)
        return y, *pullback(gradient)

    with jax.default_device(chip):
        lowered = jax.jit(update).lower(rows, kernels, rows, place((64,), dtype="int32"))
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < memory.argument_size_in_bytes + memory.output_size_in_bytes


def test_prompts_are_read_by_cudnn():
    """They attend to each other by a kernel; the tokens after them attend to a cache."""
    text = compiled_decode(
        narrow_preset("smollm2-1.7b"), topology_devices("h100:1")[0], patched_gpu_checks
    )
    assert HloModule(text).count_custom_kernels() == {"cudnn$fmhaSoftmax": 1}


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_products_of_a_step_are_summed_by_the_matrix_units(rows):
    """None is stored for a later sum, or summed by the scatter that writes it to the cache.

    Of a matrix product in four or eight parts, the scatter adds the parts: an operation on its own
    took longer on an H200.
    """
    config = replace(narrow_preset("smollm2-1.7b"), num_layers=2)
    chip, options = topology_devices("h100:1")[0], {"prompts": (rows, 64), "layout": "by_layer"}
    hlo = HloModule(compiled_decode(config, chip, patched_gpu_checks, **options))
    (loop,) = (one for one in hlo.computations[hlo.entry] if one.operation == "while")
    step = hlo.executed_instructions(*loop.called_computations("body"))
    parts = [  # results by operation of each kernel, without those of integers
        {x.operation: x.result for x in hlo.computations[name] if re.match(r"b?f\d", x.result)}
        for one, _ in step
        for name in one.called_computations("calls")
    ]
    assert sum("scatter" in part for part in parts) == 4
    sizes = [
        math.prod(int(n) for n in re.findall(r"\d+", part["multiply"].partition("{")[0])[1:])
        for part in parts
        if "multiply" in part and ("reduce" not in part or "scatter" in part)
    ]
    assert 0 < max(sizes) < config.model_dim**2


def test_the_compiler_takes_the_options_that_overlap_the_layers_messages():
    """An option that it does not know would leave out all of them."""
    gpus = topology_devices("h100:8")
    options = overlap_compiler_options(make_mesh(MeshConfig(fsdp=8), gpus))
    assert options and options == overlap.GPU_OPTIONS


def test_what_the_compiler_says_of_a_plan(capsys):
    """Memory within 15 % of what is planned, and no message that cannot travel apart."""
    command.main(["llama-3-8b", "--compile", "h100:8", "--mesh.fsdp", "8"])
    out = capsys.readouterr().out
    peak, planned = re.search(r"peak memory +(\S+) .*estimated (\S+)\n", out).groups()
    assert abs(float(planned) / float(peak) - 1) <= 0.15
    assert re.search(r"blocking collectives +none", out) and "cudnn$fmha" in out
