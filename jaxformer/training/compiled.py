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

from jaxformer.config import EncoderDecoder, TransformerConfig
from jaxformer.data import Batch, PairBatch
from jaxformer.layers import Transformer
from jaxformer.parallel import MeshConfig, batch_spec, declarations, make_mesh
from jaxformer.parallel.plan import Work
from jaxformer.training.optimizers import Optimizer, OptimizerConfig, make_optimizer
from jaxformer.training.schedules import Constant
from jaxformer.training.step import abstract_state, make_update

ALONE = {  # libtpu without a TPU: it asks no server and holds no lock
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Hz of a TPU's cores, from its peak: 2 * units * 128**2 (256**2 on v6e) * Hz
CLOCKS = {"TPU v4": 1.05e9, "TPU v5 lite": 1.5e9, "TPU v5": 1.75e9, "TPU v6 lite": 1.75e9}
# What XLA asks of an H100 SXM, in the text form of its GpuTargetConfigProto.
H100 = """
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
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")


class Compiled(NamedTuple):
    """The compiler's figures for one device: memory, kernels, collectives, estimated time.

    Attributes:
        peak: Bytes that are held at most.
        kernels: How often the program names each kernel that is not XLA's own.
        waiting: Bytes that arrive by messages of each kind, in which nothing is computed.
        meanwhile: Bytes that arrive by messages that are begun and ended apart.
        seconds: XLA:TPU's estimate, in which neither messages nor kernels are; None elsewhere.
    """

    peak: int
    kernels: dict[str, int]
    waiting: dict[str, int]
    meanwhile: dict[str, int]
    seconds: float | None


@cache
def chips(topology: str, slices: int = 1) -> tuple[jax.Device, ...]:
    """Devices of a TPU or GPU topology to compile for.

    Args:
        topology: A TPU slice, as in "v5e:4x4", "v5p:2x2x4" or "v6e:16x16", or GPUs in hosts of
            eight, as in "h100:8" or "h100:64".
        slices: How many slices there are.

    Returns:
        Devices that can be compiled for and not be run on.

    Raises:
        ValueError: There are no such chips, or no compiler for them.
    """
    from jax.experimental import topologies

    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    gpus = re.fullmatch(r"h100:([1-9]\d*)", topology)
    try:
        if gpus:
            count = int(gpus[1])
            gpus_per_host = count if count < 8 else math.gcd(count, 8)
            options = dict(
                topology=f"1x{count // gpus_per_host}x{gpus_per_host}", target_config=H100
            )
            topology_desc = topologies.get_topology_desc("", platform="cuda", **options)
        else:
            topology_desc = topologies.get_topology_desc(
                topology, platform="tpu", num_slices=slices
            )
    except Exception as error:
        raise ValueError(
            f"Nothing can be compiled for {topology!r} here. Chips are named as in v5p:2x2x4 or "
            f"h100:8; compilers are in the extras aot-tpu and aot-gpu, in an environment each: "
            f"pip install 'jaxformer[aot-tpu]'. It said: {error}"
        ) from error
    return tuple(topology_desc.devices)


@contextmanager
def as_if_present() -> Iterator[None]:
    """Patch JAX's device checks, so that GPU kernels lower on a machine without a GPU.

    They ask the first device which generation it is, and how many cores it has.
    """
    device = SimpleNamespace(core_count=132)
    patched_function = "jax._src.cudnn.fused_attention_stablehlo.check_compute_capability"
    with (
        mock.patch(patched_function, lambda *_: True),
        mock.patch("jax.devices", lambda *_: [device]),
    ):
        yield


def abstract_batch(
    config: TransformerConfig, mesh: Mesh, rows: int, length: int, source_length: int
) -> Batch | PairBatch:
    """The shapes of a batch and where its rows are."""
    where = NamedSharding(mesh, batch_spec(mesh.shape))
    kind = PairBatch if isinstance(config.topology, EncoderDecoder) else Batch

    def array(name: str) -> Any:
        wide = source_length if name.startswith("source") else length
        dtype = jnp.bool_ if name == "mask" else jnp.int32
        return jax.ShapeDtypeStruct((rows, wide), dtype, sharding=where)

    return kind(*map(array, kind._fields))


def compile_update(
    config: TransformerConfig, sizes: Mapping[str, int], devices: tuple[jax.Device, ...], work: Work
) -> Compiled:
    """Compile a train step ahead of time and report memory, kernels and collectives.

    Args:
        config: The model.
        sizes: Devices along each axis.
        devices: From `chips`, or real ones.
        work: What they do.

    Returns:
        The compiler's figures.

    Raises:
        ValueError: The mesh does not fit, or a device has less memory than the program needs.
    """
    mesh = make_mesh(MeshConfig(**sizes), devices)
    model = Transformer(
        config, dtype=jnp.dtype(work.dtype), remat=work.remat, expert_room=work.expert_room
    )
    kinds = {kind.__name__.lower(): kind for kind in get_args(Optimizer)}
    optimizer_config = OptimizerConfig(
        schedule=Constant(peak=1e-3), optimizer=kinds[work.optimizer]()
    )
    optimizer = make_optimizer(optimizer_config, 1, declarations(config))
    update = make_update(model, optimizer, mesh, accumulation=work.accumulation)
    batch = abstract_batch(config, mesh, work.rows(sizes), work.length, work.source_length)
    state = abstract_state(model, optimizer, mesh)
    without_device = devices[0].platform == "gpu" and devices[0] not in jax.devices()
    with as_if_present() if without_device else nullcontext():
        lowered = update.lower(state, batch)
    try:  # there is no GPU to try kernels of XLA's on
        compiled = lowered.compile({"xla_gpu_autotune_level": 0} if without_device else None)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if not reason.startswith("RESOURCE_EXHAUSTED"):
            raise
        raise ValueError(
            f"A chip has no room for this program. The compiler says: {reason}"
        ) from error
    memory = compiled.memory_analysis()
    peak = getattr(memory, "peak_memory_in_bytes", 0)
    total_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    hlo = Program(compiled.as_text())
    clock = CLOCKS.get(devices[0].device_kind)
    return Compiled(
        peak or total_bytes,
        hlo.kernels(),
        *hlo.messages(),
        None if clock is None else hlo.cycles() / clock,
    )


COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*)$")
SHAPE = re.compile(r"\b([a-z]+[0-9]+|pred)\[([0-9,]*)\]")
WIDTHS = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}


class Instruction(NamedTuple):
    """One HLO instruction: name, result type, operation and operands."""

    name: str
    result: str
    operation: str
    rest: str

    def called(self, *words: str) -> list[str]:
        """Computations that the instruction calls under these attributes."""
        matches = re.findall(
            rf"\b(?:{'|'.join(words)})=\{{?([^,}}\s]+(?:, %[^,}}\s]+)*)", self.rest
        )
        return [name.strip().lstrip("%") for names in matches for name in names.split(",")]


class Program:
    """Parsed text of a compiled HLO module."""

    def __init__(self, text: str):
        self.parts: dict[str, list[Instruction]] = {}
        self.entry = name = ""
        for line in text.splitlines():
            if head := COMPUTATION.match(line):
                name = head[2]
                self.parts[name] = []
                self.entry = name if head[1] else self.entry
            elif name and (found := INSTRUCTION.match(line)):
                self.parts[name].append(Instruction(*found.groups()))

    def run(self, part: str, times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Yield each executed instruction with its number of runs; all branches count."""
        for instruction in self.parts[part]:
            yield instruction, times
            match instruction.operation:
                case "while":
                    (body,) = instruction.called("body")
                    yield from self.run(body, times * self.turns(instruction))
                case "conditional":
                    words = "branch_computations", "true_computation", "false_computation"
                    for branch in instruction.called(*words):
                        yield from self.run(branch, times)
                case "call":
                    for name in instruction.called("to_apply"):
                        yield from self.run(name, times)

    def turns(self, loop: Instruction) -> int:
        """Trip count of a while loop; 1 if unknown."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        (condition,) = loop.called("condition")
        numbers = [one.rest for one in self.parts[condition] if one.operation == "constant"]
        constants = [int(n[1]) for rest in numbers if (n := re.match(r"(\d+)\)", rest))]
        return constants[0] if len(constants) == 1 else 1

    def cycles(self) -> int:
        """Sum of XLA:TPU's estimated cycles."""
        return sum(
            times * int(cycles_match[1])
            for one, times in self.run(self.entry)
            if (cycles_match := re.search(r'"estimated_cycles":"(\d+)"', one.rest))
        )

    def kernels(self) -> dict[str, int]:
        """Number of Pallas and cuDNN custom calls, by name."""
        counts = Counter[str]()
        for one in (one for part in self.parts.values() for one in part):
            if target := re.search(
                r'custom_call_target="(tpu_custom_call|mosaic_\w+|__cudnn\$\w+)"', one.rest
            ):
                is_cudnn = target[1].startswith("__cudnn")
                counts[target[1].strip("_") if is_cudnn else re.sub(r"[.\d]+$", "", one.name)] += 1
        return dict(counts)

    def messages(self) -> tuple[dict[str, int], dict[str, int]]:
        """Received bytes of synchronous and of asynchronous collectives, by operation."""
        sync_bytes, async_bytes = Counter[str](), Counter[str]()
        for instruction, times in self.run(self.entry):
            kind = instruction.operation.removesuffix("-start")
            if kind in KINDS:
                is_async = kind != instruction.operation
                (async_bytes if is_async else sync_bytes)[kind] += times * arriving(instruction)
            elif instruction.operation in ("fusion", "call-start", "async-start"):
                for name in instruction.called("calls", "to_apply"):
                    body = self.parts.get(name, ())
                    is_async = instruction.operation != "fusion" or began(
                        body, "AsyncCollectiveStart"
                    )
                    if not is_async and (
                        "async_collective" in name or began(body, "AsyncCollective")
                    ):
                        continue  # it goes on with, or ends, what was begun
                    for inner in body:
                        if inner.operation in KINDS:
                            size = times * arriving(inner)
                            (async_bytes if is_async else sync_bytes)[inner.operation] += size
        return dict(+sync_bytes), dict(+async_bytes)


def began(part: Any, word: str) -> bool:
    """Whether a computation has a custom call whose text contains `word`."""
    return any(word in one.rest for one in part if one.operation == "custom-call")


def arriving(one: Instruction) -> int:
    """Bytes that a collective receives."""
    if re.search(r"replica_groups=(\{\{\d+\}|\[\d+,1\])", one.rest):
        return 0  # each device is alone in its group
    sizes = [
        WIDTHS.get(dtype, int(re.sub(r"\D", "", dtype) or 8) // 8)
        * math.prod(int(n) for n in shape.split(",") if n)
        for dtype, shape in SHAPE.findall(one.result)
    ]
    match one.operation:
        case "collective-permute-start":
            return sizes[1]
        case "all-gather-start" | "reduce-scatter-start" | "all-to-all-start":
            return sum(sizes[len(sizes) // 2 :])
    return sum(sizes)
