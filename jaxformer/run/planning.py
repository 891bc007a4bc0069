"""Estimate memory and time of a training step, without a device: jaxformer plan llama-3-70b."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from jaxformer import zoo
from jaxformer.checks import AtLeastOne, Checked, Size
from jaxformer.config import EncoderDecoder, LoRA, TransformerConfig, from_json
from jaxformer.layers.runtime import Remat
from jaxformer.parallel import plan_report
from jaxformer.parallel.chips import Chip, chip_from_device_kind, get_chip
from jaxformer.parallel.memory import OptimizerKind
from jaxformer.parallel.mesh import MeshConfig
from jaxformer.parallel.plan import Workload, plan, smallest_fitting_mesh, with_largest_batch
from jaxformer.run.command_line import run_program

SUMMARY = "Estimated memory and time of a training step, without a device."
DEFAULT_LENGTH = 4096


@dataclass(frozen=True, kw_only=True)
class Plan(Checked):
    """Arguments of the plan command.

    Attributes:
        name: Preset, such as llama-3-70b (`jaxformer zoo --list` lists all), or a .json
            file written by `jaxformer.config.to_json(config)`.
        adapter: Low-rank adapters, which alone are trained, such as
            'LoRA(rank=16, base_dtype="bfloat16")'.
        mesh: Devices along each mesh axis; the default searches for the smallest mesh that fits.
        devices: Number of devices; None is the product of the mesh, or the fewest that fit.
        chip: Kind of chip: h100, h200, a100, tpu-v5p, ...
        batch_size: Global batch size in rows; None is the largest that fits, up to 4 million
            tokens.
        length: Row length in tokens; None is 4096, or the maximum of the model if it is smaller.
        source_length: Source length in tokens, for an encoder-decoder; None is `length`.
        gradient_accumulation_steps: Number of microbatches of a step.
        remat: What the backward pass recomputes.
        dtype: Dtype of the computation.
        expert_capacity_factor: Capacity for the rows that a device sends to each other device's
            experts, as a multiple of an even distribution; None drops none.
        optimizer: Kind of optimizer.
        compile: TPU slice or GPUs for which to compile the step ahead of time too: v5e:4x4,
            v5p:2x2x4, v6e:16x16, ..., h100:8, h100:64. It sets `chip` and `devices`. Needs the
            extra aot-tpu or aot-gpu.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    adapter: LoRA | None = None
    mesh: MeshConfig = MeshConfig()
    devices: Size | None = None
    chip: str = "h100"
    batch_size: Size | None = None
    length: Size | None = None
    source_length: Size | None = None
    gradient_accumulation_steps: Size = 1
    remat: Remat = "full"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    expert_capacity_factor: AtLeastOne | None = None
    optimizer: OptimizerKind = "adamw"
    compile: str | None = None


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and print the plan."""
    run_program(lambda options: print(plan_text(options)), Plan, SUMMARY, arguments)


def plan_text(options: Plan) -> str:
    """The plan as text.

    Raises:
        ValueError: There is no such preset or chip, or the mesh does not fit the model.
    """
    chip = get_chip(options.chip)
    if options.name.endswith(".json"):
        config = from_json(TransformerConfig, Path(options.name).read_bytes())
    else:
        config = zoo.get(options.name)
    if options.adapter is not None:
        config = replace(config, adapter=options.adapter)
    if options.compile is not None:
        if options.devices is not None:
            raise ValueError(
                f"--compile {options.compile} sets the number of devices; leave out --devices."
            )
        from jaxformer.training import aot_compile as compiled

        jax.config.update("jax_platforms", "cpu")  # nothing is run
        devices = compiled.topology_devices(options.compile)
        known = chip_from_device_kind(devices[0].device_kind)
        if known is not None and options.chip not in (Plan.chip, known.name):
            raise ValueError(f"--compile {options.compile} sets {known.name}; leave out --chip.")
        chip = known or chip
        options = replace(options, devices=len(devices))
    work = make_workload(options, config)
    mesh_shape = choose_mesh_shape(options, config, chip, work)
    if options.batch_size is None:
        work = with_largest_batch(config, mesh_shape, chip, work)
    estimate = plan(config, mesh_shape, chip, work)
    text = plan_report.format_plan(options.name, config, estimate)
    if options.compile is None:
        return text
    compiled_report = compiled.compile_update(config, mesh_shape, devices, work)
    return f"{text}\n\n{plan_report.format_compiled(estimate, compiled_report)}"


def make_workload(options: Plan, config: TransformerConfig) -> Workload:
    """The training step of the arguments, with the lengths that suit the model."""
    max_length = config.max_length
    default_length = min(DEFAULT_LENGTH, max_length or DEFAULT_LENGTH)
    length = default_length if options.length is None else options.length
    if max_length is not None and length > max_length:
        raise ValueError(
            f"length {length} is more than the {max_length} learned positions of {options.name}."
        )
    has_source = isinstance(config.topology, EncoderDecoder)
    if options.source_length is not None and not has_source:
        raise ValueError(f"{options.name} is not an encoder-decoder; leave out --source-length.")
    settings: Any = {field.name: getattr(options, field.name) for field in fields(Workload)}
    settings["source_length"] = (options.source_length or length) if has_source else 0
    return Workload(**settings | {"length": length})


def choose_mesh_shape(
    options: Plan, config: TransformerConfig, chip: Chip, work: Workload
) -> dict[str, int]:
    """The mesh shape of the arguments, or the smallest one that fits."""
    if options.mesh == MeshConfig():
        return smallest_fitting_mesh(config, chip, work, devices=options.devices)
    mesh, devices = options.mesh, options.devices
    if devices is None:
        devices = (mesh.data or 1) * mesh.fsdp * mesh.tensor * mesh.context * mesh.expert
    return mesh.shape(devices)
