"""Checkpoints on Orbax, with checksums; the only module that imports orbax."""

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import SingleDeviceSharding

from jaxformer.json_files import json_digest
from jaxformer.parallel import broadcast_from_process_0, is_primary_process
from jaxformer.parallel.sharding import flatten_to_paths
from jaxformer.training.array_records import (
    SCHEMA,
    ArrayRecord,
    check_contents,
    first_lines,
    mismatches,
    record_arrays,
    stored_in,
)

Records = dict[str, ArrayRecord]  # by path
NO_STEP = -1  # sent to the other processes if there is no step
UNFINISHED_PATTERN, TRASH_FOLDER = "*.orbax-checkpoint-tmp", ".trash"


class Checkpoints:
    """Checkpoints in one folder: keeps the newest `max_to_keep` and the best.

        with Checkpoints("runs/first") as checkpoints:
            state = checkpoints.restore(None, jax.eval_shape(init, key))
            checkpoints.save(100, state, {"seed": 0})

    A state is saved as a flat dict of arrays by path ("trained/decoder/final_norm/scale"), so
    restoring depends on these paths and not on the types of containers. A checksum of each array
    and of the description is saved too, since Orbax alone does not detect every changed byte.
    Leaving the `with` block waits for the save in progress. In a run of several processes all must
    call every method and see the folder. Each save leaks 18 kB: TensorStore statistics of
    Orbax 0.12.

    Args:
        folder: Local folder, or an address that `etils.epath` supports, such as "gs://bucket/run".
            Created by the first save; relative paths are resolved.
        max_to_keep: Number of newest checkpoints to keep, beside the best; older ones are deleted
            when a newer one is complete.

    Raises:
        ValueError: `max_to_keep` is below 1, or `folder` is a file.
    """

    def __init__(self, folder: epath.PathLike, *, max_to_keep: int = 3):
        if max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1; got {max_to_keep}.")
        self.folder = epath.Path(folder).expanduser().resolve()
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file, not a folder of checkpoints.")
        self.max_to_keep = max_to_keep
        self._losses: dict[int, float | None] = {}
        self._damaged_steps: list[int] = []
        self._saving: int | None = None
        self._manager: ocp.CheckpointManager | None = None  # opened by the first save
        # Replica-parallel writing changes the bits of NaNs; callers of `restore` pass shardings.
        handler = ocp.type_handlers.ArrayHandler(
            use_replica_parallel=False, enable_write_sharding_file=False
        )
        handlers = (jax.Array, handler), (np.ndarray, ocp.type_handlers.NumpyHandler())
        self._arrays = ocp.PyTreeCheckpointHandler(
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(*handlers)
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if error is None or jax.process_count() == 1:  # other processes may not wait after one
                self.wait_until_finished()
        finally:
            if self._manager is not None:
                self._manager.close()

    def save(
        self, step: int, state: Any, description: Mapping[str, Any], *, loss: float | None = None
    ) -> None:
        """Start an asynchronous save; returns once the arrays may be donated.

        Args:
            step: Not negative, and greater than every step in the folder. Steps that
                `latest_valid_step` found damaged do not count and are renamed.
            state: Any pytree of arrays.
            description: JSON that is needed to use the state: configuration, tokenizer, seed.
            loss: Loss by which the best checkpoint is chosen; None or NaN if unknown.

        Raises:
            ValueError: The step is invalid, or the description cannot be written as JSON.
            OSError: This save or the one before it failed; the message has the last good step.
        """
        self.wait_until_finished()
        if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
            raise ValueError(f"step must be a non-negative integer; got {step!r}.")
        step = int(step)
        if (latest := self.latest_step()) is not None and step <= latest:
            raise ValueError(
                f"Checkpoint {step} cannot be saved: {self.folder} has {self._steps_text()}, and "
                "steps must increase. Use another folder, or delete the later checkpoints."
            )
        arrays = flatten_to_paths(state)
        contents = {
            "schema": SCHEMA,
            "loss": None if loss is None or math.isnan(loss) else loss,
            "arrays": record_arrays(arrays),
            "description": dict(description),
        }
        try:
            contents = json.loads(json.dumps(contents))
        except TypeError as error:
            raise ValueError(
                f"The description of a checkpoint must be JSON-serializable: {error}."
            ) from error
        contents["digest"] = json_digest(contents)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays), description=ocp.args.JsonSave(contents)
        )
        try:
            manager = self._open_manager()
            self._losses[step] = contents["loss"]
            manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._save_error(step, error) from error
        self._saving = step

    def wait_until_finished(self) -> None:
        """Wait until the current save is finished.

        Raises:
            OSError: It failed; the message has the last good step.
        """
        if self._saving is None or self._manager is None:
            return
        (step, self._saving), error = (self._saving, None), None
        try:
            self._manager.wait_until_finished()
        except Exception as raised:  # whatever the storage raises: OSError, ValueError, ...
            error = raised
        # All processes raise together.
        if broadcast_from_process_0(lambda: error is not None) or error:
            raise self._save_error(step, error or "it failed in process 0") from error
        self._delete_matching(TRASH_FOLDER)

    def all_steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending, without steps found damaged."""
        complete = {one.step for one in ocp.path.step.standard_name_format().find_all(self.folder)}
        return sorted(complete.difference(self._damaged_steps))

    def latest_step(self) -> int | None:
        """Latest complete step, or None; arrays are not verified."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Step with the lowest saved loss (the later of equals), or None."""
        return self._lowest_loss_step(self.all_steps())

    def is_best(self, loss: float) -> bool:
        """Whether a loss is lower than the loss of each checkpoint; the same on all processes."""
        self.wait_until_finished()
        losses = map(self.saved_loss, self.all_steps())
        return loss < min((x for x in losses if x is not None), default=math.inf)

    def saved_loss(self, step: int) -> float | None:
        """Loss of a checkpoint; None if it is unknown."""
        if step not in self._losses:
            try:
                contents = self._load_description(step)
            except ValueError:  # damaged; reading it raises
                return None
            self._losses[step] = contents["loss"] if contents["schema"] == SCHEMA else None
        return self._losses[step]

    def latest_valid_step(self, report: Callable[[str], None] = warnings.warn) -> int:
        """Latest step whose arrays all match their checksums.

        Args:
            report: Called with a message for each newer, damaged checkpoint. Later calls ignore
                these checkpoints.

        Raises:
            ValueError: There is no checkpoint, or all are damaged.
        """
        self.wait_until_finished()
        self._damaged_steps = []
        steps, valid_step = self.all_steps(), NO_STEP
        for step in reversed(steps if is_primary_process() else []):
            damage = self._find_damage(step)
            if not damage:
                valid_step = step
                break
            report(f"{self._damage_error(step, damage)} An earlier one is used.")
        valid_step = broadcast_from_process_0(lambda: valid_step)
        if valid_step == NO_STEP:
            damaged = f": {self._steps_text()} are damaged" if steps else ""
            raise ValueError(f"There is no checkpoint in {self.folder}{damaged}.")
        self._damaged_steps = [step for step in steps if step > valid_step]
        return valid_step

    def read_description(self, step: int | None = None) -> dict[str, Any]:
        """Description of a checkpoint (None: the latest valid one), with its schema.

        Raises:
            ValueError: There is no such checkpoint, it is damaged, or from another version.
        """
        contents = self._checked_description(self._resolve_step(step))
        return {**contents["description"], "schema": contents["schema"]}

    def restore(self, step: int | None, abstract_state: Any, *, partial: bool = False) -> Any:
        """Restore a state and verify its checksums.

        Args:
            step: Step of the checkpoint; None for the latest valid one.
            abstract_state: Tree of arrays or `jax.ShapeDtypeStruct` objects, whose shardings the
                restored arrays get; without a sharding, the first device.
            partial: Whether `abstract_state` may be a part of the saved state, for example the
                parameters without the optimizer state.

        Returns:
            The tree, of arrays that can be donated.

        Raises:
            ValueError: There is no such checkpoint, its arrays differ from `abstract_state`, it is
                damaged, or from another version.
        """
        step = self._resolve_step(step)
        expected = flatten_to_paths(abstract_state)
        arrays = self._read_matching(step, expected, self._matching(step, expected, partial))
        # Buffers of the reader are not always donatable, copies by XLA are. One by one, so that
        # memory for two states is not needed.
        owned = [jax.block_until_ready(jnp.copy(arrays.pop(path))) for path in expected]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), owned)

    def restore_one_by_one(
        self, step: int | None, abstract_state: Any
    ) -> Iterator[tuple[str, jax.Array]]:
        """Restore a part of a state array by array, the largest first.

        Whoever converts each array and drops it needs no memory for two states.

        Args:
            step: Step of the checkpoint; None for the latest valid one.
            abstract_state: As in `restore`; it may be a part of the saved state.

        Yields:
            Path, such as "trained/decoder/final_norm/scale", and array.

        Raises:
            ValueError: As in `restore`.
        """
        step = self._resolve_step(step)
        expected = flatten_to_paths(abstract_state)
        saved = self._matching(step, expected, partial=True)
        for path in sorted(expected, key=lambda path: -expected[path].size):
            yield path, self._read_matching(step, {path: expected[path]}, saved)[path]

    def _matching(self, step: int, expected: dict[str, Any], partial: bool) -> Records:
        """Records of the saved arrays; ValueError if they differ from the expected ones."""
        saved = stored_in(self._checked_description(step))
        if lines := mismatches(saved, expected, partial=partial):
            raise ValueError(
                f"Checkpoint {step} in {self.folder} does not match the requested state: "
                f"{len(lines)} of {len(saved | expected)} arrays differ.\n"
                + "\n".join(first_lines(lines))
            )
        return saved

    def _read_matching(self, step: int, expected: dict[str, Any], saved: Records) -> dict[str, Any]:
        """Read arrays with the expected shardings and verify their checksums."""
        target = {path: with_sharding(x) for path, x in expected.items()}
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        try:
            return self._read_arrays(step, saved, target, restore_args)
        except Exception as error:
            raise self._damage_error(step, error) from error

    def delete_old(self) -> None:
        """Delete old steps and unfinished saves of a killed process.

        If the latest checkpoint is damaged, nothing is deleted until the next save.
        """
        if self._damaged_steps or not is_primary_process():
            return
        steps = self.all_steps()
        for old in set(steps) - self._steps_to_keep(steps):  # unknown to the manager
            (self.folder / TRASH_FOLDER).mkdir(exist_ok=True)
            (self.folder / str(old)).rename(self.folder / TRASH_FOLDER / str(old))
        self._delete_matching(UNFINISHED_PATTERN, TRASH_FOLDER)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax preservation policy: which steps stay after a save."""
        steps_to_keep = self._steps_to_keep(sorted(one.step for one in checkpoints))
        return [one.step in steps_to_keep for one in checkpoints]

    def _open_manager(self) -> ocp.CheckpointManager:
        """The Orbax manager; renames damaged steps first."""
        passed_over, self._damaged_steps = self._damaged_steps, []
        for old in passed_over if is_primary_process() else ():
            aside = self.folder / f"{old}.damaged"
            aside.rmtree(missing_ok=True)
            (self.folder / str(old)).rename(aside)
        if passed_over:
            broadcast_from_process_0(lambda: None)  # waits until process 0 has renamed them
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self,
                todelete_subdir=TRASH_FOLDER,  # so that a listed step is complete
                cleanup_tmp_directories=True,
                # Otherwise a failed save may still write to its folder.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            )
            items = {"state": self._arrays, "description": ocp.JsonCheckpointHandler()}
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=items)
        elif passed_over:
            self._manager.reload()
        return self._manager

    def _steps_to_keep(self, steps: list[int]) -> set[int | None]:
        return {*steps[-self.max_to_keep :], self._lowest_loss_step(steps)}

    def _lowest_loss_step(self, steps: list[int]) -> int | None:
        rated = [(loss, -step) for step in steps if (loss := self.saved_loss(step)) is not None]
        return -min(rated)[1] if rated else None

    def _resolve_step(self, step: int | None) -> int:
        self.wait_until_finished()
        if step is None or not self.all_steps():
            return self.latest_valid_step()
        if step not in self.all_steps():
            raise ValueError(
                f"There is no checkpoint {step} in {self.folder}; it has {self._steps_text()}."
            )
        return step

    def _checked_description(self, step: int) -> dict[str, Any]:
        try:
            contents = self._load_description(step)
        except ValueError as error:
            raise self._damage_error(step, error) from error
        if contents["schema"] != SCHEMA:
            other = "a newer" if contents["schema"] > SCHEMA else "an earlier"
            raise ValueError(
                f"Checkpoint {step} in {self.folder} was written by {other} version of jaxformer, "
                f"with schema {contents['schema']}; this version reads schema {SCHEMA}."
            )
        return contents

    def _load_description(self, step: int) -> dict[str, Any]:
        if (self.folder / str(step) / "description.json").exists():
            return {"schema": 1}
        try:
            folder = self.folder / str(step) / "description"
            contents = in_thread(ocp.JsonCheckpointHandler().restore, folder)
            whole = contents.pop("digest", None) == json_digest(contents)
        except Exception as error:
            raise ValueError(f"its description cannot be read: {error}") from error
        if not whole:
            raise ValueError("its description does not match its checksum")
        check_contents(contents)
        return contents

    def _find_damage(self, step: int) -> str:
        """Why a checkpoint is damaged; empty if its checksums match."""
        try:
            contents = self._load_description(step)
            if contents["schema"] != SCHEMA:
                return ""
            stored, on_host = stored_in(contents), ocp.RestoreArgs(restore_type=np.ndarray)
            for path, x in stored.items():  # one by one, as all may not fit in this memory
                target = {path: jax.ShapeDtypeStruct(x.shape, x.dtype)}
                self._read_arrays(step, stored, target, {path: on_host})
        except Exception as error:
            return str(error) or type(error).__name__
        return ""

    def _read_arrays(
        self, step: int, stored: Records, target: dict[str, Any], kinds: dict[str, Any]
    ) -> dict[str, Any]:
        args = ocp.args.PyTreeRestore(target, restore_args=kinds, partial_restore=True)
        arrays = in_thread(self._arrays.restore, self.folder / str(step) / "state", args=args)
        if wrong := [path for path, x in record_arrays(arrays).items() if x != stored[path]]:
            raise ValueError(f"wrong checksum of {', '.join(first_lines(wrong))}")
        return arrays

    def _steps_text(self) -> str:
        return ", ".join(map(str, self.all_steps())) or "none"

    def _damage_error(self, step: int, reason: object) -> ValueError:
        return ValueError(
            f"Checkpoint {step} in {self.folder} is damaged: {str(reason)[:200].rstrip('.')}. "
            f"The folder has {self._steps_text()}."
        )

    def _save_error(self, step: int, error: object) -> OSError:
        if self._manager is not None:
            with contextlib.suppress(Exception):  # further errors of the same save
                self._manager.wait_until_finished()
            self._delete_matching(UNFINISHED_PATTERN)
            self._manager.reload()  # it no longer lists the steps that it was about to delete
        last, good = self.latest_step(), "There is no good checkpoint yet."
        good = good if last is None else f"The last good checkpoint is {last}."
        return OSError(f"Saving checkpoint {step} in {self.folder} failed: {error}. {good}")

    def _delete_matching(self, *patterns: str) -> None:
        """Delete matching temporary and trash folders."""
        for pattern in patterns if is_primary_process() and self.folder.exists() else ():
            for path in self.folder.glob(pattern):
                with contextlib.suppress(OSError):
                    path.rmtree()


def in_thread(read: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a reader in another thread: signals are raised in this one.

    Orbax turns a KeyboardInterrupt in its event loop into an error that looks like damage.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(read, *args, **options).result()


def with_sharding(x: Any) -> jax.ShapeDtypeStruct:
    """ShapeDtypeStruct with a sharding; the first device if `x` has none."""
    sharding = getattr(x, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
