"""What is made and checked before any text is read: output folders, mesh and model of a run."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from etils import epath
from jax.sharding import Mesh

from jaxformer import parallel
from jaxformer.config import TransformerConfig
from jaxformer.extras import import_extra
from jaxformer.interop.save import choose_family
from jaxformer.layers import Transformer
from jaxformer.run import object_store as stores
from jaxformer.run.memory_checks import check_memory
from jaxformer.run.run_config import RunConfig, length_warning, select_devices
from jaxformer.training import metrics


class TrainSetup(NamedTuple):
    """Output folders, mesh and model of a run.

    Attributes:
        local_folder: Output folder; of a run in an object store the folder of its small files.
        resumes_from: The same folder if the run resumes from a checkpoint, else None.
        storage: Where checkpoints are written.
        mesh: The mesh.
        model: The module.
    """

    local_folder: Path
    resumes_from: Path | None
    storage: epath.Path
    mesh: Mesh
    model: Transformer


def make_train_setup(
    run: RunConfig,
    output: Path,
    *,
    resumes_from: Path | None = None,
    length: int,
    source_lengths: Sequence[int] = (),
    exact: bool = True,
) -> TrainSetup:
    """Build the mesh and the model of a run, before any text is read.

    Prints the estimated memory of a device, and whether the model cannot be exported.

    Args:
        run: The run.
        output: Local output folder.
        resumes_from: The same folder if the run resumes from a checkpoint.
        length: Row length in tokens; with an encoder, of the targets.
        source_lengths: Padded lengths of the sources, increasing.
        exact: Whether length and batch size are final; else they may become smaller.

    Raises:
        ValueError: Model or batch do not divide evenly over the mesh or do not fit in memory, or
            this machine is not logged in to Weights & Biases.
        ImportError: tensorboardX is needed and not installed.
    """
    mesh = parallel.make_mesh(run.mesh, select_devices(run.devices))
    parallel.check_divisible(
        run.model,
        mesh.shape,
        batch_size=run.batch_size,
        lengths=[*source_lengths, length],
        gradient_accumulation_steps=run.gradient_accumulation_steps,
    )
    source_length = max(source_lengths, default=0)
    check_memory(run, mesh, length=length, source_length=source_length, exact=exact)
    known = run.model.max_position_embeddings
    remedy = "scale RoPE for a longer context by --model.attention.positions."
    if note := length_warning("rows have", length, known, f"Pass --length {known}, or {remedy}"):
        print(note)
    print_export_note(run.model)
    if run.tensorboard:
        import_extra("tensorboardX")
    if run.wandb is not None:
        parallel.broadcast_from_process_0(check_wandb)
    storage = stores.storage_path(run.output or output)
    return TrainSetup(output, resumes_from, storage, mesh, make_model(run))


def make_model(run: RunConfig) -> Transformer:
    """The module of a run."""
    return Transformer(
        run.model,
        dtype=run.dtype,
        remat=run.remat,
        scan=run.scan,
        expert_capacity_factor=run.expert_capacity_factor,
        attention_implementation=run.attention_implementation,
    )


def print_export_note(config: TransformerConfig) -> None:
    """Print why `export` cannot write this model, where it cannot."""
    try:
        choose_family(dataclasses.replace(config, adapter=None), {})
    except ValueError as error:
        print("Note: jaxformer export cannot write this model.", *str(error).split()[:60])


def check_wandb() -> None:
    """Raise unless this machine is logged in to Weights & Biases."""
    try:
        metrics.check_wandb_login()
    except ImportError as error:
        raise ValueError(str(error)) from error


def check_vocabulary(
    model: TransformerConfig,
    tokens: int,
    remedy: str = "pass --model.vocab-size",
    *,
    init: str | None = None,
) -> None:
    """Raise if the tokenizer has more tokens than the model's embedding."""
    if model.vocab_size >= tokens:
        return
    if init is not None:
        raise ValueError(
            f"The tokenizer has {tokens} tokens, but the model of {init} has {model.vocab_size}. "
            "Pass the tokenizer of that model as --tokenizer, or train a new model without --init."
        )
    raise ValueError(
        f"The tokenizer has {tokens} tokens, but model.vocab_size is {model.vocab_size}; {remedy} "
        f"{tokens}."
    )
