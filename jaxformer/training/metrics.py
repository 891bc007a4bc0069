"""Metric writers: JSON lines, TensorBoard, Weights & Biases.

Every writer has `write(step, metrics)` and `close()`, and `MultiWriter` sends to several at once.
A writer that cannot store its metrics raises in the same call, so that a full disk ends the run
with a message instead of leaving a gap in the curves.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, SupportsFloat, runtime_checkable

from jaxformer.atomic_files import atomic_file
from jaxformer.extras import import_extra

RESERVED_NAMES = ("step", "time")
MAX_SHOWN_BYTES = 200  # of an invalid line, in the error message


@runtime_checkable
class MetricWriter(Protocol):
    """Protocol of metric writers."""

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Write the metrics of one step."""

    def close(self) -> None:
        """Flush and close."""


class MultiWriter(AbstractContextManager):
    """Writes metrics to several writers; the list may be empty.

        with MultiWriter([JsonLinesWriter("a.jsonl"), TensorBoardWriter("runs/a")]) as metrics:
            metrics.write(1, {"loss": 5.2})

    Args:
        writers: The writers. All are closed together, even if closing one of them fails.
    """

    def __init__(self, writers: Sequence[MetricWriter]) -> None:
        self._writers = tuple(writers)
        self._exits = ExitStack()
        for writer in self._writers:
            self._exits.callback(writer.close)

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Write the metrics of `step` to every writer."""
        for writer in self._writers:
            writer.write(step, metrics)

    def close(self) -> None:
        """Close every writer; a second call has no effect."""
        self._exits.close()

    def __exit__(self, *exception: object) -> None:
        """Close every writer."""
        self.close()


class JsonLinesWriter:
    """Writes one JSON object per line: step, time and metrics.

        {"step": 20, "time": 1767225600.0, "loss": 5.25, "learning_rate": 0.0003}

    `time` is in seconds since 1970. JSON has no NaN and no infinities, so these are written as the
    strings "NaN", "Infinity" and "-Infinity", which `float` parses. Lines are not buffered; a line
    that cannot be written completely is removed.

    Args:
        path: The file. Its folder is created if missing.
        resume_from: Step of the checkpoint that a resumed run starts from; None for a new run.
            Later lines and an incomplete last line are dropped; the file is replaced atomically.

    Raises:
        ValueError: The file already has lines and `resume_from` is None, or a line is invalid.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_from: int | None = None) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._drop_lines_after(resume_from)
        # Unbuffered, so that an error is raised by the `write` that caused it.
        self._file = open(self._path, "ab", buffering=0)

    def _drop_lines_after(self, resume_from: int | None) -> None:
        records = read_json_lines(self._path)
        if resume_from is None:
            if records:
                raise ValueError(
                    f"{self._path} already has {len(records)} lines, up to step "
                    f"{records[-1]['step']}. Pass resume_from, or write to another file."
                )
            return
        kept_lines = [_encode_line(x) for x in records if x["step"] <= resume_from]
        with (
            atomic_file(self._path) as temporary,
            _name_file_and_step(self._path, resume_from),
            open(temporary, "wb") as file,
        ):
            file.writelines(kept_lines)
            file.flush()
            os.fsync(file.fileno())

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Append one line.

        Raises:
            ValueError: A metric is called "step" or "time".
            OSError: The line could not be written; the file ends with the line before it.
        """
        if reserved := [name for name in RESERVED_NAMES if name in metrics]:
            raise ValueError(f"{reserved[0]!r} is a reserved name; rename the metric.")
        numbers = {name: float(value) for name, value in metrics.items()}
        line = _encode_line({"step": int(step), "time": time.time(), **numbers})
        end = os.fstat(self._file.fileno()).st_size
        with _name_file_and_step(self._path, step):
            try:
                remaining = line
                while remaining:  # on a nearly full disk a write is partial and the next one fails
                    remaining = remaining[self._file.write(remaining) :]
            except OSError:
                self._file.truncate(end)
                raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_json_lines(path: str | os.PathLike[str]) -> list[dict[str, float | int]]:
    """Read a file of `JsonLinesWriter`: one dict per line, with keys `step`, `time` and metrics.

    Args:
        path: The file.

    Returns:
        The lines in order, without an incomplete last line, which a crash may leave.

    Raises:
        ValueError: A line is not a JSON object of numbers with a step.
    """
    *lines, _ = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            numbers = {name: _parse_number(value) for name, value in json.loads(line).items()}
            if not isinstance(numbers["step"], int):
                raise ValueError("step must be an integer.")
            records.append({"step": numbers.pop("step"), **numbers})
        except (ValueError, AttributeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number} is not a line of metrics: {line[:MAX_SHOWN_BYTES]!r}. "
                "Remove the line, or move the file away."
            ) from error
    return records


def _parse_number(value: object) -> float | int:
    if isinstance(value, str):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise ValueError(f"{value} is not a number.")
    return value


def _encode_line(record: Mapping[str, float | int]) -> bytes:
    writable = {name: x if math.isfinite(x) else json.dumps(x) for name, x in record.items()}
    return json.dumps(writable, allow_nan=False, ensure_ascii=False).encode() + b"\n"


@contextmanager
def _name_file_and_step(path: str | os.PathLike[str], step: int) -> Iterator[None]:
    """Re-raise an OSError with the file and the step."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"Metrics of step {step} could not be written to {os.fspath(path)}: {error.strerror}.",
        ) from error


class TensorBoardWriter:
    """An event file that `tensorboard --logdir` reads. Needs the `train` extra.

    Args:
        folder: Folder of the event file; a resumed run adds another file to it.
        resume_from: Step of the checkpoint that a resumed run starts from; TensorBoard then hides
            later steps of earlier event files. None for a new run.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, resume_from: int | None = None) -> None:
        import_extra("tensorboardX")
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.record_writer import directory_check

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._folder = os.fspath(folder)
        directory_check(self._folder)
        # Not SummaryWriter: a full disk ends its thread, and the run then blocks on its queue
        # forever. The suffix distinguishes two writers of the same second.
        self._events = EventsWriter(os.path.join(self._folder, "events"), f".{time.time_ns()}")
        self._step = resume_from or 0
        if resume_from is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            purge = self._event(wall_time=time.time(), step=resume_from + 1, session_log=start)
            self._write_event(resume_from + 1, purge)

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Write one scalar per metric; a slash in a name makes a group in TensorBoard.

        Raises:
            OSError: The event could not be written.
        """
        scalar = self._summary.Value
        values = [scalar(tag=name, simple_value=float(x)) for name, x in metrics.items()]
        summary = self._summary(value=values)
        self._write_event(step, self._event(wall_time=time.time(), step=int(step), summary=summary))

    def _write_event(self, step: int, event: Any) -> None:
        self._step = step
        with _name_file_and_step(self._folder, step):
            self._events.write_event(event)
            self._events.flush()

    def close(self) -> None:
        """Close the event file."""
        with _name_file_and_step(self._folder, self._step):
            self._events.close()


def check_wandb_login() -> None:
    """Check the W&B login before training starts.

    Asks for a key on a terminal; does nothing if `WANDB_MODE` is offline or disabled.

    Raises:
        ImportError: wandb is not installed.
        ValueError: This machine is not logged in, or the server cannot be reached.
    """
    wandb = import_extra("wandb")
    try:
        wandb.login(verify=True)
    except wandb.Error as error:
        raise ValueError(
            f"Cannot log to Weights & Biases: {error} Run `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline to log to local files."
        ) from error


class WandbWriter:
    """A run on Weights & Biases. Needs the `wandb` extra.

    Args:
        project: Name of the project.
        name: Name of the run. A resumed run is another run of the same name.
        config: Configuration shown on the run's page.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, project: str, name: str, config: Mapping[str, Any]) -> None:
        self._run = import_extra("wandb").init(project=project, name=name, config=dict(config))

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Log the metrics of `step`. Steps must not decrease."""
        self._run.log({name: float(value) for name, value in metrics.items()}, step=int(step))

    def close(self) -> None:
        """Finish the run and wait for its upload."""
        self._run.finish()
