"""Ahead-of-time compilation of a train step for absent TPUs or GPUs, and its HLO statistics."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxformer.config import TransformerConfig
from jaxformer.data import Batch, PairBatch
from jaxformer.layers import Transformer
from jaxformer.parallel import (
    MeshConfig,
    batch_spec,
    make_mesh,
    parameter_metadata,
    split_parameters,
)
from jaxformer.parallel.plan import Workload
from jaxformer.training.optimizers import Optimizer, OptimizerConfig, make_optimizer
from jaxformer.training.schedules import Constant
from jaxformer.training.train_step import abstract_train_state, make_train_step

LIBTPU_ENVIRONMENT = {  # libtpu without a TPU: no metadata server and no lock
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Hz of a TPU's cores, from its peak: 2 * units * 128**2 (256**2 on v6e) * Hz
TPU_CLOCK_HZ = {"TPU v4": 1.05e9, "TPU v5 lite": 1.5e9, "TPU v5": 1.75e9, "TPU v6 lite": 1.75e9}
# An H100 SXM as XLA's GpuTargetConfigProto, in text form.
H100_TARGET_CONFIG = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3" device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 threads_per_warp: 32
  device_memory_size: 84942979072 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 device_address_bits: 64
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_interconnect_info { active_links: 18 }
}
platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 patch: 0 }
"""
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")


class CompiledReport(NamedTuple):
    """The compiler's figures for one device: memory, kernels, collectives, estimated time.

    Attributes:
        peak_bytes: Peak memory.
        custom_kernels: Number of calls of each Pallas or cuDNN kernel in the program.
        sync_collective_bytes: Bytes received by synchronous collectives, by operation.
        async_collective_bytes: Bytes received by asynchronous collectives, by operation.
        estimated_seconds: XLA:TPU's estimate without collectives and custom kernels; None on GPUs.
    """

    peak_bytes: int
    custom_kernels: dict[str, int]
    sync_collective_bytes: dict[str, int]
    async_collective_bytes: dict[str, int]
    estimated_seconds: float | None


@cache
def topology_devices(topology: str, slices: int = 1) -> tuple[jax.Device, ...]:
    """Devices of a TPU or GPU topology to compile for.

    Args:
        topology: A TPU slice, as in "v5e:4x4", "v5p:2x2x4" or "v6e:16x16", or GPUs in hosts of
            eight, as in "h100:8" or "h100:64".
        slices: Number of TPU slices.

    Returns:
        Devices to compile for, which cannot run programs.

    Raises:
        ValueError: The topology is unknown, or its compiler is not installed.
    """
    from jax.experimental import topologies

    for name, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    name, options = topology, dict[str, Any](platform="tpu", num_slices=slices)
    if gpus := re.fullmatch(r"h100:([1-9]\d*)", topology):
        count = int(gpus[1])
        per_host = count if count < 8 else math.gcd(count, 8)
        grid = f"1x{count // per_host}x{per_host}"
        name, options = "", dict(platform="cuda", topology=grid, target_config=H100_TARGET_CONFIG)
    try:
        return tuple(topologies.get_topology_desc(name, **options).devices)
    except Exception as error:
        raise ValueError(
            f"Cannot compile for {topology!r}. Topologies are written as v5p:2x2x4 or h100:8; the "
            "compilers are in the extras aot-tpu and aot-gpu, each in a separate environment: "
            f"pip install 'jaxformer[aot-tpu]'. The error: {error}"
        ) from error


@contextmanager
def patched_gpu_checks() -> Iterator[None]:
    """Patch JAX's device checks, so that GPU kernels lower on a machine without a GPU.

    The lowering of these kernels reads the generation and the number of cores of the first device.
    """
    device = SimpleNamespace(core_count=132)
    check = "jax._src.cudnn.fused_attention_stablehlo.check_compute_capability"
    with mock.patch(check, lambda *_: True), mock.patch("jax.devices", lambda *_: [device]):
        yield


def abstract_batch(
    config: TransformerConfig, mesh: Mesh, rows: int, length: int, source_length: int
) -> Batch | PairBatch:
    """ShapeDtypeStructs of a batch, with shardings."""
    where = NamedSharding(mesh, batch_spec(mesh.shape))
    kind = PairBatch if config.topology.is_encoder_decoder else Batch

    def array(name: str) -> Any:
        wide = source_length if name.startswith("source") else length
        dtype = jnp.bool_ if name == "loss_mask" else jnp.int32
        return jax.ShapeDtypeStruct((rows, wide), dtype, sharding=where)

    return kind(*map(array, kind._fields))


def compile_update(
    config: TransformerConfig,
    sizes: Mapping[str, int],
    devices: tuple[jax.Device, ...],
    work: Workload,
) -> CompiledReport:
    """Compile a train step ahead of time and report memory, kernels and collectives.

    Args:
        config: Model configuration.
        sizes: Devices along each mesh axis.
        devices: From `topology_devices`, or real devices.
        work: Batch, precision, rematerialization and optimizer.

    Returns:
        Memory, kernels, collectives and estimated time.

    Raises:
        ValueError: The mesh does not fit the devices, or the program does not fit in memory.
    """
    mesh = make_mesh(MeshConfig(**sizes), devices)
    model = Transformer(
        config,
        dtype=jnp.dtype(work.dtype),
        remat=work.remat,
        expert_capacity_factor=work.expert_capacity_factor,
    )
    kind = {kind.__name__.lower(): kind for kind in get_args(Optimizer)}[work.optimizer]
    optimizer_config = OptimizerConfig(schedule=Constant(peak=1e-3), optimizer=kind())
    metadata = split_parameters(config.adapter, parameter_metadata(config))
    optimizer = make_optimizer(optimizer_config, 1, metadata.trained)
    accumulation = work.gradient_accumulation_steps
    update = make_train_step(model, optimizer, mesh, gradient_accumulation_steps=accumulation)
    batch_size = work.global_batch_size(sizes)
    batch = abstract_batch(config, mesh, batch_size, work.length, work.source_length)
    state = abstract_train_state(model, optimizer, mesh)
    without_device = devices[0].platform == "gpu" and devices[0] not in jax.devices()
    with patched_gpu_checks() if without_device else nullcontext():
        lowered = update.lower(state, batch)
    try:  # autotuning needs a GPU
        compiled = lowered.compile({"xla_gpu_autotune_level": 0} if without_device else None)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if not reason.startswith("RESOURCE_EXHAUSTED"):
            raise
        message = f"The program does not fit into the memory of one chip: {reason}"
        raise ValueError(message) from error
    memory = compiled.memory_analysis()
    peak = getattr(memory, "peak_memory_in_bytes", 0)
    total_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    hlo = HloModule(compiled.as_text())
    clock = TPU_CLOCK_HZ.get(devices[0].device_kind)
    return CompiledReport(
        peak or total_bytes,
        hlo.count_custom_kernels(),
        *hlo.collective_bytes(),
        None if clock is None else hlo.estimated_cycles() / clock,
    )


COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*)$")
SHAPE = re.compile(r"\b([a-z]+[0-9]+|pred)\[([0-9,]*)\]")
CUSTOM_KERNEL = re.compile(r'custom_call_target="(tpu_custom_call|mosaic_\w+|__cudnn\$\w+)"')
EXECUTED = {  # attributes with the computations that an operation executes
    "while": ("body",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "call": ("to_apply",),
}
DTYPE_BYTES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}


class HloInstruction(NamedTuple):
    """One HLO instruction: name, result type, operation and operands."""

    name: str
    result: str
    operation: str
    rest: str

    def called_computations(self, *words: str) -> list[str]:
        """Computations that the instruction calls under these attributes."""
        pattern = rf"\b(?:{'|'.join(words)})=\{{?([^,}}\s]+(?:, %[^,}}\s]+)*)"
        matches = re.findall(pattern, self.rest)
        return [name.strip().lstrip("%") for names in matches for name in names.split(",")]


class HloModule:
    """Parsed text of a compiled HLO module."""

    def __init__(self, text: str):
        self.computations: dict[str, list[HloInstruction]] = {}
        self.entry = name = ""
        for line in text.splitlines():
            if head := COMPUTATION.match(line):
                name = head[2]
                self.computations[name] = []
                self.entry = name if head[1] else self.entry
            elif name and (match := INSTRUCTION.match(line)):
                self.computations[name].append(HloInstruction(*match.groups()))

    def executed_instructions(
        self, computation: str, num_runs: int = 1
    ) -> Iterator[tuple[HloInstruction, int]]:
        """Yield each executed instruction with its number of runs; of branches, the last counts."""
        for instruction in self.computations[computation]:
            yield instruction, num_runs
            is_loop = instruction.operation == "while"
            runs = num_runs * self.trip_count(instruction) if is_loop else num_runs
            if words := EXECUTED.get(instruction.operation):  # a loop's body, the last branch
                name = instruction.called_computations(*words)[-1]
                yield from self.executed_instructions(name, runs)

    def trip_count(self, loop: HloInstruction) -> int:
        """Trip count of a while loop; 1 if unknown."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        (condition,) = loop.called_computations("condition")
        numbers = [one.rest for one in self.computations[condition] if one.operation == "constant"]
        constants = [int(n[1]) for rest in numbers if (n := re.match(r"(\d+)\)", rest))]
        return constants[0] if len(constants) == 1 else 1

    def estimated_cycles(self) -> int:
        """Sum of XLA:TPU's estimated cycles."""
        return sum(
            times * int(cycles_match[1])
            for one, times in self.executed_instructions(self.entry)
            if (cycles_match := re.search(r'"estimated_cycles":"(\d+)"', one.rest))
        )

    def count_custom_kernels(self) -> dict[str, int]:
        """Number of Pallas and cuDNN custom calls, by name."""
        counts = Counter[str]()
        for one in (one for part in self.computations.values() for one in part):
            if target := CUSTOM_KERNEL.search(one.rest):
                is_cudnn = target[1].startswith("__cudnn")
                counts[target[1].strip("_") if is_cudnn else re.sub(r"[.\d]+$", "", one.name)] += 1
        return dict(counts)

    def collective_bytes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Received bytes of synchronous and of asynchronous collectives, by operation."""
        received = Counter[str](), Counter[str]()  # synchronous, asynchronous
        for instruction, times in self.executed_instructions(self.entry):
            kind = instruction.operation.removesuffix("-start")
            if kind in COLLECTIVES:
                received[kind != instruction.operation][kind] += times * received_bytes(instruction)
            elif instruction.operation in ("fusion", "call-start", "async-start"):
                for name in instruction.called_computations("calls", "to_apply"):
                    body, in_fusion = self.computations.get(name, ()), kind == "fusion"
                    is_async = not in_fusion or has_custom_call(body, "AsyncCollectiveStart")
                    is_later_part = "async_collective" in name or has_custom_call(
                        body, "AsyncCollective"
                    )
                    if not is_async and is_later_part:
                        continue  # of a collective that is already counted
                    for one in (one for one in body if one.operation in COLLECTIVES):
                        received[is_async][one.operation] += times * received_bytes(one)
        return dict(+received[False]), dict(+received[True])


def has_custom_call(computation: Any, word: str) -> bool:
    """Whether a computation has a custom call whose text contains `word`."""
    return any(word in one.rest for one in computation if one.operation == "custom-call")


def received_bytes(instruction: HloInstruction) -> int:
    """Bytes that a collective receives."""
    if re.search(r"replica_groups=(\{\{\d+\}|\[\d+,1\])", instruction.rest):
        return 0  # each device is alone in its group
    sizes = [
        DTYPE_BYTES.get(dtype, int(re.sub(r"\D", "", dtype) or 8) // 8)
        * math.prod(int(n) for n in shape.split(",") if n)
        for dtype, shape in SHAPE.findall(instruction.result)
    ]
    match instruction.operation:
        case "collective-permute-start":
            return sizes[1]
        case "all-gather-start" | "reduce-scatter-start" | "all-to-all-start":
            return sum(sizes[len(sizes) // 2 :])
    return sum(sizes)
