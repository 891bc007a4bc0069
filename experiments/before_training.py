"""What can be known of a run before it trains is said, or refused, before it trains.

In two steps, since reading and packing text takes long: what the flags alone say, before it; what
the text and its tokenizer say, after it.
"""

from jax.sharding import Mesh

from experiments.export import export_note
from experiments.out_of_memory import TooLargeError, refuse_estimate
from experiments.training_run import Run, check_vocabulary
from jaxformer import costs, parallel
from jaxformer.data import Tokenizer
from jaxformer.parallel.memory import memory
from jaxformer.training.metrics import check_weights_and_biases
from jaxformer.training.progress import format_count


def check_before_text(run: Run, mesh: Mesh, *, length: int, source_length: int = 0) -> None:
    """Say what memory a device will need, and refuse what cannot be.

    Args:
        run: The run.
        mesh: Its devices.
        length: Tokens of a row, of its target where there is a source.
        source_length: Tokens of the longest source.

    Raises:
        ValueError: The devices have no room, or nobody is logged in where the run would log to.
    """
    check_memory(run, mesh, length=length, source_length=source_length)
    if (note := export_note(run.model)) is not None:
        print(note)
    check_login(run)


def check_before_training(run: Run, tokenizer: Tokenizer) -> None:
    """Refuse what the tokenizer shows to be impossible.

    Raises:
        ValueError: The model has no rows for some of its tokens.
    """
    check_vocabulary(run, tokenizer.vocab_size)


def check_memory(run: Run, mesh: Mesh, *, length: int, source_length: int) -> None:
    """Say what memory a device will need, before anything is allocated; refuse what is too much."""
    needed = memory(
        run.model,
        mesh.shape,
        batch_size=run.batch_size,
        length=length,
        source_length=source_length,
        accumulation=run.accumulation,
        remat=run.remat,
        dtype=run.dtype,
        expert_room=run.expert_room,
        optimizer=type(run.optimizer.optimizer).__name__.lower(),
        kernels=mesh.devices.flat[0].platform != "cpu",
    )
    parts = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in needed._asdict().items())
    print(
        f"Estimate per device: {needed.total / 2**20:.0f} MiB ({parts}); "
        f"{format_count(costs.parameters(run.model))} parameters in all."
    )
    if run.steps > run.schedule_steps:
        print(
            f"The schedule ends after {run.schedule_steps} updates; the learning rate then stays "
            "where it is. To train longer at a higher one, start with larger --schedule-steps."
        )
    try:
        refuse_estimate(run, needed)
    except TooLargeError as error:
        raise ValueError(str(error)) from error


def check_login(run: Run) -> None:
    """Refuse to log to Weights & Biases without a login; only the first process logs."""

    def check() -> str:
        if run.wandb is not None:
            try:
                check_weights_and_biases()
            except ImportError as error:
                raise ValueError(str(error)) from error
        return ""

    parallel.first_decides(check)
