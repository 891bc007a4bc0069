"""Checkpoints on Orbax, with checksums; the only module that imports orbax."""

import contextlib
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from jaxformer.parallel import is_first
from jaxformer.training.records import (
    SCHEMA,
    Stored,
    by_path,
    check_contents,
    differences,
    record,
    shortened,
    stored_in,
)

NONE = -1  # no step, where processes agree on one
UNFINISHED, TRASH = "*.orbax-checkpoint-tmp", ".trash"


class Checkpoints:
    """A folder of states by step, each whole or absent: the newest and the best.

        with Checkpoints("runs/first") as checkpoints:
            state = checkpoints.restore(None, jax.eval_shape(init, key))
            checkpoints.save(100, state, {"seed": 0})

    A state is saved as a flat dict of arrays by path ("params/decoder/final_norm/scale"), so what
    can be restored depends on the names of arrays and not on the containers around them. With it
    go a sum of the bits of each array and a digest of its description, since Orbax alone does not
    notice every changed byte. Leaving the `with` block waits for the save in progress. Where
    several processes train, all call every method alike, and all must see the folder. Each save
    leaves 18 kB in memory: statistics of TensorStore, for which Orbax 0.12 asks.

    Args:
        folder: Made at the first save; nothing is made for reading. What `etils.epath` knows, such
            as "gs://bucket/run"; relative paths are resolved.
        keep: How many of the newest stay, beside the best; others go after a newer one is complete.

    Raises:
        ValueError: `keep` is below 1, or `folder` is a file.
    """

    def __init__(self, folder: epath.PathLike, *, keep: int = 3):
        if keep < 1:
            raise ValueError(f"At least one checkpoint must stay; got keep={keep}.")
        self.folder = epath.Path(folder).expanduser().resolve()
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file, not a folder of checkpoints.")
        self.keep = keep
        self._losses: dict[int, float | None] = {}
        self._passed_over: list[int] = []
        self._saving: int | None = None
        self._manager: ocp.CheckpointManager | None = None  # of those who save
        # Parts of arrays made for each replica to write lose the bits of NaNs; shardings are given.
        handler = ocp.type_handlers.ArrayHandler(
            use_replica_parallel=False, enable_write_sharding_file=False
        )
        handlers = (jax.Array, handler), (np.ndarray, ocp.type_handlers.NumpyHandler())
        self._arrays = ocp.PyTreeCheckpointHandler(
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(*handlers)
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None or jax.process_count() == 1:  # else the others may not wait too
                self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()

    def save(
        self, step: int, state: Any, description: Mapping[str, Any], *, loss: float | None = None
    ) -> None:
        """Start an asynchronous save; returns once the arrays may be donated.

        Args:
            step: Not negative, and greater than that of every checkpoint in the folder but those
                `newest` passed over, which are renamed.
            state: Any pytree of arrays.
            description: What is needed to use the state, as JSON: configuration, tokenizer, seed.
            loss: By which the best checkpoint is the one with the lowest; None or NaN: not known.

        Raises:
            ValueError: The step is no such number, or the description is no JSON.
            OSError: This save, or the one before it, failed; says which checkpoint is good.
        """
        self.wait()
        if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
            raise ValueError(f"A step is a whole number from 0 on; got {step!r}.")
        step = int(step)
        if (latest := self.latest()) is not None and step <= latest:
            raise ValueError(
                f"Checkpoint {step} would not be the newest in {self.folder}, which holds "
                f"{self._listing()}. Use another folder, or delete the later ones."
            )
        arrays = by_path(state)
        contents = {
            "schema": SCHEMA,
            "loss": None if loss is None or math.isnan(loss) else loss,
            "arrays": record(arrays),
            "description": dict(description),
        }
        try:
            contents = json.loads(json.dumps(contents))
        except TypeError as error:
            raise ValueError(f"The description of a checkpoint must be JSON: {error}.") from error
        contents["digest"] = digest(contents)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays), description=ocp.args.JsonSave(contents)
        )
        try:
            manager = self._managed()
            self._losses[step] = contents["loss"]
            manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._failure(step, error) from error
        self._saving = step

    def wait(self) -> None:
        """Wait until the current save is finished.

        Raises:
            OSError: It failed; says which checkpoint is the last good one.
        """
        if self._saving is None or self._manager is None:
            return
        (step, self._saving), error = (self._saving, None), None
        try:
            self._manager.wait_until_finished()
        except Exception as raised:  # whatever the storage raises: OSError, ValueError, ...
            error = raised
        if agreed(error is not None) or error:  # raised when all processes are here
            raise self._failure(step, error or "the first process could not") from error
        self._sweep(TRASH)

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending.

        Nor are those that `newest` passed over.
        """
        complete = {one.step for one in ocp.path.step.standard_name_format().find_all(self.folder)}
        return sorted(complete.difference(self._passed_over))

    def latest(self) -> int | None:
        """Latest complete step, or None; arrays are not verified."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Step with the lowest saved loss (the later of equals), or None."""
        return self._best(self.steps())

    def newest(self, report: Callable[[str], None] = warnings.warn) -> int:
        """Latest step whose arrays all match their checksums.

        Args:
            report: Called with a message for each newer one; these no longer count.

        Raises:
            ValueError: There is no checkpoint, or none without damage.
        """
        self.wait()
        self._passed_over = []
        steps, valid_step = self.steps(), NONE
        for step in reversed(steps if is_first() else []):
            damage = self._damage(step)
            if not damage:
                valid_step = step
                break
            report(f"{self._damaged(step, damage)} It is passed over.")
        valid_step = agreed(valid_step)
        if valid_step == NONE:
            damaged = f": {self._listing()} are damaged" if steps else ""
            raise ValueError(f"There is no checkpoint in {self.folder}{damaged}.")
        self._passed_over = [step for step in steps if step > valid_step]
        return valid_step

    def describe(self, step: int | None = None) -> dict[str, Any]:
        """Description of a checkpoint (None: the latest valid one), with its schema.

        Raises:
            ValueError: There is no such checkpoint, it is damaged, or from another version.
        """
        contents = self._contents(self._find(step))
        return {**contents["description"], "schema": contents["schema"]}

    def restore(self, step: int | None, abstract_state: Any, *, partial: bool = False) -> Any:
        """Restore a state and verify its checksums.

        Args:
            step: Which checkpoint; None for the newest whole one.
            abstract_state: Tree of the state, of arrays or `jax.ShapeDtypeStruct`s. Each array goes
                where its `sharding` says; without one, to the first device.
            partial: Leave out what `abstract_state` does not have, such as the optimizer's state.

        Returns:
            The tree, of arrays that own their memory and can be donated.

        Raises:
            ValueError: There is no such checkpoint, its arrays are not those asked for, it is
                damaged, or from another version.
        """
        step = self._find(step)
        saved = stored_in(self._contents(step))
        expected = by_path(abstract_state)
        if lines := differences(saved, expected, partial=partial):
            raise ValueError(
                f"Checkpoint {step} in {self.folder} does not fit: {len(lines)} of "
                f"{len(saved | expected)} arrays differ.\n" + "\n".join(shortened(lines))
            )
        target = {path: placed(x) for path, x in expected.items()}
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        try:
            arrays = self._read(step, saved, target, restore_args)
        except Exception as error:
            raise self._damaged(step, error) from error
        # Buffers made by the reader are not always donatable; copies made by XLA are. One by one,
        # so that there need not be room for two states.
        owned = [jax.block_until_ready(jnp.copy(arrays.pop(path))) for path in expected]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), owned)

    def drop_old(self) -> None:
        """Delete what a killed process left: old steps and unfinished saves.

        For a run that goes on from the newest, or has nothing left to do; if the newest was
        damaged, all stay until it has saved.
        """
        if self._passed_over or not is_first():
            return
        steps = self.steps()
        for old in set(steps) - self._kept(steps):  # of which the manager does not know, if any
            (self.folder / TRASH).mkdir(exist_ok=True)
            (self.folder / str(old)).rename(self.folder / TRASH / str(old))
        self._sweep(UNFINISHED, TRASH)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax preservation policy: which steps stay after a save."""
        steps_to_keep = self._kept(sorted(one.step for one in checkpoints))
        return [one.step in steps_to_keep for one in checkpoints]

    def _managed(self) -> ocp.CheckpointManager:
        """The Orbax manager; renames damaged steps first."""
        passed_over, self._passed_over = self._passed_over, []
        for old in passed_over if is_first() else ():
            aside = self.folder / f"{old}.damaged"
            aside.rmtree(missing_ok=True)
            (self.folder / str(old)).rename(aside)
        if passed_over:
            agreed(0)  # the first process has renamed them
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self,
                todelete_subdir=TRASH,  # so that no step that is listed is half deleted
                cleanup_tmp_directories=True,
                # Else something may still be written to the folder of a save that failed.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            )
            items = {"state": self._arrays, "description": ocp.JsonCheckpointHandler()}
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=items)
        elif passed_over:
            self._manager.reload()
        return self._manager

    def _kept(self, steps: list[int]) -> set[int | None]:
        return {*steps[-self.keep :], self._best(steps)}

    def _best(self, steps: list[int]) -> int | None:
        rated = [(loss, -step) for step in steps if (loss := self._loss(step)) is not None]
        return -min(rated)[1] if rated else None

    def _loss(self, step: int) -> float | None:
        if step not in self._losses:
            try:
                contents = self._description(step)
            except ValueError:  # damaged, as whoever reads it will be told
                return None
            self._losses[step] = contents["loss"] if contents["schema"] == SCHEMA else None
        return self._losses[step]

    def _find(self, step: int | None) -> int:
        self.wait()
        if step is None or not self.steps():
            return self.newest()
        if step not in self.steps():
            raise ValueError(
                f"There is no checkpoint {step} in {self.folder}; it holds {self._listing()}."
            )
        return step

    def _contents(self, step: int) -> dict[str, Any]:
        try:
            contents = self._description(step)
        except ValueError as error:
            raise self._damaged(step, error) from error
        if contents["schema"] != SCHEMA:
            other = "a newer" if contents["schema"] > SCHEMA else "an earlier"
            raise ValueError(
                f"Checkpoint {step} in {self.folder} was written by {other} version of jaxformer: "
                f"its schema is {contents['schema']}, and this one reads {SCHEMA}."
            )
        return contents

    def _description(self, step: int) -> dict[str, Any]:
        if (self.folder / str(step) / "description.json").exists():
            return {"schema": 1}
        try:
            contents = ocp.JsonCheckpointHandler().restore(self.folder / str(step) / "description")
            whole = contents.pop("digest", None) == digest(contents)
        except Exception as error:
            raise ValueError(f"its description cannot be read: {error}") from error
        if not whole:
            raise ValueError("its description has changed")
        check_contents(contents)
        return contents

    def _damage(self, step: int) -> str:
        """Why a checkpoint is damaged; empty if its checksums match."""
        try:
            contents = self._description(step)
            if contents["schema"] != SCHEMA:
                return ""
            stored = stored_in(contents)
            for path in stored:  # one by one, for there need not be room for all in this process
                target = {path: jax.ShapeDtypeStruct(stored[path].shape, stored[path].dtype)}
                self._read(step, stored, target, {path: ocp.RestoreArgs(restore_type=np.ndarray)})
        except Exception as error:
            return str(error) or type(error).__name__
        return ""

    def _read(
        self, step: int, stored: dict[str, Stored], target: dict[str, Any], kinds: dict[str, Any]
    ) -> dict[str, Any]:
        args = ocp.args.PyTreeRestore(target, restore_args=kinds, partial_restore=True)
        arrays = self._arrays.restore(self.folder / str(step) / "state", args=args)
        wrong = [
            path for path, array_record in record(arrays).items() if array_record != stored[path]
        ]
        if wrong:
            raise ValueError(f"wrong checksum of {', '.join(shortened(wrong))}")
        return arrays

    def _listing(self) -> str:
        return ", ".join(map(str, self.steps())) or "none"

    def _damaged(self, step: int, reason: object) -> ValueError:
        return ValueError(
            f"Checkpoint {step} in {self.folder} is damaged: {str(reason)[:200].rstrip('.')}. "
            f"The folder holds {self._listing()}."
        )

    def _failure(self, step: int, error: object) -> OSError:
        if self._manager is not None:
            with contextlib.suppress(Exception):  # what else went wrong with it
                self._manager.wait_until_finished()
            self._sweep(UNFINISHED)
            self._manager.reload()  # it has forgotten the steps that it was about to delete
        last = self.latest()
        good = f"The last good checkpoint is {last}." if last is not None else ""
        return OSError(
            f"Saving checkpoint {step} in {self.folder} failed: {error}. "
            f"{good or 'There is no good checkpoint yet.'}"
        )

    def _sweep(self, *patterns: str) -> None:
        """Delete matching temporary and trash folders."""
        for pattern in patterns if is_first() and self.folder.exists() else ():
            for path in self.folder.glob(pattern):
                with contextlib.suppress(OSError):
                    path.rmtree()


def digest(contents: Mapping[str, Any]) -> str:
    """SHA-256 of JSON."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def placed(x: Any) -> jax.ShapeDtypeStruct:
    """ShapeDtypeStruct with a sharding; the first device if `x` has none."""
    sharding = getattr(x, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def agreed(number: int) -> int:
    """Broadcast an integer from process 0; also a barrier."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))
