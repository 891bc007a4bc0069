"""What XLA's compiler for GPUs makes of our updates. It needs the CUDA plugin, and no GPU.

pip install -e '.[aot-gpu]' -c .ci/constraints.txt
JAX_PLATFORMS=cpu python -m pytest -m gpu
"""

import math
import re
from dataclasses import replace
from importlib.util import find_spec
from unittest import mock

import pytest

from experiments import plan as command
from jaxformer import zoo
from jaxformer.parallel import MeshConfig, make_mesh, overlap, overlap_compiler_options
from jaxformer.parallel.plan import Workload
from jaxformer.training.aot_compile import (
    HloModule,
    compile_update,
    patched_gpu_checks,
    topology_devices,
)
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


@pytest.mark.parametrize("remat, backwards", [("none", 6), ("full", 9)])
def test_products_of_experts_are_hoppers(remat, backwards):
    """Three forwards; backwards, where "full" runs those again, in the loop and its last turn."""
    kernels = made_of(replace(zoo.get("mixtral-8x7b"), num_layers=2), remat).custom_kernels
    assert kernels["mpmd_map"] == 3 + 2 * backwards


def test_prompts_are_read_by_cudnn():
    """They attend to each other by a kernel; the tokens after them attend to a cache."""
    text = compiled_decode(
        narrow_preset("smollm2-1.7b"), topology_devices("h100:1")[0], patched_gpu_checks
    )
    assert HloModule(text).count_custom_kernels() == {"cudnn$fmhaSoftmax": 1}


def test_products_of_a_row_are_summed_by_the_matrix_units():
    """None is stored for a later sum, or summed by the scatter that writes it to the cache."""
    config = replace(narrow_preset("smollm2-1.7b"), num_layers=2).unroll()
    chip = topology_devices("h100:1")[0]
    text = compiled_decode(config, chip, patched_gpu_checks, prompts=(1, 64))
    parts = [  # results by operation, without those of integers
        {one.operation: one.result for one in part if re.match(r"b?f\d", one.result)}
        for part in HloModule(text).computations.values()
    ]
    assert sum("scatter" in part for part in parts) >= 8
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
