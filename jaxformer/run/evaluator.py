"""A model to evaluate: options of an evaluation, and the loaded model with its likelihoods."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import tyro
from jax.sharding import Mesh

from jaxformer import data
from jaxformer.checks import Checked, Size
from jaxformer.errors import with_fields
from jaxformer.generation import LogLikelihood, log_likelihoods
from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.run.loading import MAX_DEFAULT_LENGTH, LoadedModel, load_run
from jaxformer.run.run_config import check_uses, select_devices, simulate_cpu_devices

ScoringRequest = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Evaluate(Checked):
    """Options: the model, and the text, questions or tasks to evaluate it on.

    Attributes:
        checkpoint: Output folder of a run, or a Hugging Face folder.
        text: Text or instructions.
        chat_template: Chat template of instructions and tasks, instead of the folder's: a Jinja
            file, or "chatml". Tasks are then rendered by it.
        apply_chat_template: Whether tasks are rendered by the chat template.
        system_instruction: System message of tasks, or text before their prompts.
        choices: JSON Lines file of questions, each with its choices and the index of the right one.
        tasks: Names of lm-evaluation-harness tasks.
        task_folder: Folder of custom task definitions.
        limit: Maximum number of questions of each task; None is all.
        step: Step of the run's checkpoint; None is the newest, "best" the one with the lowest
            held-out loss.
        length: Maximum context in tokens; None is the run's row length, or of a Hugging Face folder
            its max_position_embeddings: of tasks all, else at most 1024.
        stride: Tokens from one window of a longer text to the next; None is half of the length. A
            smaller stride is slower and gives each token a longer context.
        batch_size: Windows or choices in a batch.
        dtype: Dtype of the parameters and of the computation.
        mesh: Sizes of the mesh axes.
        devices: Number of devices to use; None is all. On a CPU, the number to simulate.
        output: JSON file for the metrics.
        ignore: Attributes of a Hugging Face config.json to ignore, if they do not affect the model.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    text: data.TextFiles | data.Instructions | data.StandardLibrary | None = None
    chat_template: str | None = None
    apply_chat_template: bool = False
    system_instruction: str | None = None
    choices: Path | None = None
    tasks: tuple[str, ...] = ()
    task_folder: Path | None = None
    limit: Size | None = None
    step: int | Literal["best"] | None = None
    length: Size | None = None
    stride: Size | None = None
    batch_size: Size = 8
    dtype: Literal["float32", "bfloat16"] = "float32"
    mesh: MeshConfig = MeshConfig()
    devices: Size | None = 1
    output: Path | None = None
    ignore: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        of_tasks = ("limit", "task_folder", "apply_chat_template", "system_instruction")
        check_uses(self, needs={"stride": "text"} | dict.fromkeys(of_tasks, "tasks"))
        if self.text is None and self.choices is None and not self.tasks:
            raise ValueError(with_fields("Nothing to evaluate: pass --text, --choices or --tasks."))
        templated = self.tasks or isinstance(self.text, data.Instructions)
        if self.chat_template is not None and not templated:
            raise ValueError(
                with_fields("--chat-template needs --text 'Instructions(...)' or --tasks.")
            )


class Evaluator(NamedTuple):
    """A loaded model with the options of its evaluation."""

    model: LoadedModel
    mesh: Mesh
    run: Evaluate

    @property
    def length(self) -> int:
        """Maximum context in tokens."""
        most = self.model.config.max_length
        length = self.run.length or self.model.row_length or MAX_DEFAULT_LENGTH
        return length if most is None else min(length, most)

    def log_likelihoods(self, requests: Iterable[ScoringRequest]) -> Iterator[LogLikelihood]:
        """Log-likelihood of each continuation given its context."""
        return log_likelihoods(
            self.model.config,
            self.model.params,
            requests,
            max_length=self.length,
            batch_size=self.run.batch_size,
            dtype=self.run.dtype,
            mesh=self.mesh,
        )


def load_evaluator(run: Evaluate) -> Evaluator:
    """Load the model of --checkpoint onto the mesh."""
    simulate_cpu_devices(run.devices)
    mesh = make_mesh(run.mesh, select_devices(run.devices))
    model = load_run(
        run.checkpoint,
        run.step,
        ignore=run.ignore,
        mesh=mesh,
        dtype=run.dtype,
        layout="stacked",  # one program for each length of batches: a scan compiles faster
    )
    evaluator = Evaluator(model._replace(chat_template=run.chat_template), mesh, run)
    model.print_length_warning("contexts have up to", evaluator.length, "Pass a smaller --length.")
    return evaluator
