"""Saved states, and how they are found again. The only module that knows orbax."""

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from jaxformer.parallel import is_first
from jaxformer.training.folders import Folder, shortened
from jaxformer.training.records import Stored, by_path, checksums, differences, record

SCHEMA = 1
NONE = -1  # no step, where processes agree on one


class Checkpoints:
    """A folder of states by step, each whole or absent.

        with Checkpoints("runs/first") as checkpoints:
            state = checkpoints.restore(None, jax.eval_shape(init, key))
            checkpoints.save(100, state, {"seed": 0})

    A state is saved as a flat dict of arrays by path ("params/decoder/final_norm/scale"), so what
    can be restored depends on the names of arrays and not on the containers around them. Leaving
    the `with` block waits for the save in progress. Where several processes train, all call every
    method alike; the first of them tends the folder, which all must see.

    Args:
        folder: Made at the first save; nothing is made for reading. Relative paths are resolved.
        keep: How many of the newest stay, beside the best; others go after a newer one is complete.

    Raises:
        ValueError: `keep` is below 1, or `folder` is a file.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3):
        if keep < 1:
            raise ValueError(f"At least one checkpoint must stay; got keep={keep}.")
        self.folder = Path(folder).expanduser().resolve()
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file, not a folder of checkpoints.")
        self._folder = Folder(self.folder, keep=keep)
        _keep_no_statistics()
        # Parts of arrays made for each replica to write lose the bits of NaNs; shardings are given.
        handler = ocp.type_handlers.ArrayHandler(
            use_replica_parallel=False, enable_write_sharding_file=False
        )
        handlers = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(type_handler_registry=handlers),
            # Else something may still be written to the folder of a save that failed.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._background = ThreadPoolExecutor(max_workers=1)
        self._saving: tuple[int, Future[None]] | None = None
        self._whole: int | None = None  # `newest` saw so; `restore` need not look again

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
            self._background.shutdown()
            self._orbax.close()

    def save(
        self, step: int, state: Any, description: Mapping[str, Any], *, loss: float | None = None
    ) -> None:
        """Start saving; return once the arrays may change or be donated.

        Args:
            step: Not negative, and greater than that of every checkpoint in the folder but those
                `newest` passed over, which are renamed once this one is complete.
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
                f"{self._folder.listing()}. Use another folder, or delete the later ones."
            )
        try:
            json.dumps(dict(description))
        except TypeError as error:
            raise ValueError(f"The description of a checkpoint must be JSON: {error}.") from error
        arrays = by_path(state)
        contents = {
            "schema": SCHEMA,
            "loss": None if loss is None or math.isnan(loss) else loss,
            "arrays": record(arrays),
            "description": dict(description),
        }
        try:
            if is_first():
                self._folder.prepare()
            args = ocp.args.PyTreeSave(arrays)
            self._orbax.save(self._folder.beside(step) / "state", args=args)
        except Exception as error:
            raise self._failure(step, error) from error
        self._saving = step, self._background.submit(self._complete, step, contents)

    def wait(self) -> None:
        """Return when the save in progress is complete.

        Raises:
            OSError: It failed; says which checkpoint is the last good one.
        """
        if self._saving is None:
            return
        (step, future), self._saving = self._saving, None
        error = future.exception()  # whatever the storage raised: OSError, ValueError, Exception
        if agreed(error is not None) or error:  # raised when all processes are here
            raise self._failure(step, error or "the first process could not") from error

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order; one still being saved is not there.

        Nor are those that `newest` passed over.
        """
        return self._folder.steps()

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step saved with the lowest loss, the later of two; None if no loss is known."""
        return self._folder.best()

    def newest(self, report: Callable[[str], None] = warnings.warn) -> int:
        """The newest checkpoint of which every file is as it was saved.

        Args:
            report: Called with a message for each newer one; these no longer count.

        Raises:
            ValueError: There is no checkpoint, or none without damage.
        """
        self.wait()
        self._folder.passed_over = []
        steps, found = self.steps(), NONE
        for step in reversed(steps if is_first() else []):
            damage = self._folder.damage(step)
            if not damage:
                found = step
                break
            report(f"{self._folder.damaged(step, damage)} It is passed over.")
        found = agreed(found)
        if found == NONE:
            damaged = f": {self._folder.listing()} are damaged" if steps else ""
            raise ValueError(f"There is no checkpoint in {self.folder}{damaged}.")
        self._folder.passed_over = [step for step in steps if step > found]
        self._whole = found
        return found

    def describe(self, step: int | None = None) -> dict[str, Any]:
        """The description saved with a checkpoint (None: the newest whole one), and its "schema".

        Raises:
            ValueError: There is no such checkpoint, it is damaged, or from a newer jaxformer.
        """
        contents = self._contents(self._find(step))
        return {**contents["description"], "schema": contents["schema"]}

    def restore(self, step: int | None, abstract_state: Any, *, partial: bool = False) -> Any:
        """Read a state, bit for bit as it was saved.

        Args:
            step: Which checkpoint; None for the newest whole one.
            abstract_state: Tree of the state, of arrays or `jax.ShapeDtypeStruct`s. Each array goes
                where its `sharding` says; without one, to the first device.
            partial: Leave out what `abstract_state` does not have, such as the optimizer's state.

        Returns:
            The tree, of arrays that own their memory and can be donated.

        Raises:
            ValueError: There is no such checkpoint, its arrays are not those asked for, it is
                damaged, or from a newer jaxformer.
        """
        step = self._find(step)
        if step != self._whole:
            damage = self._folder.damage(step) if is_first() else ""
            if agreed(len(damage)):
                raise self._folder.damaged(step, damage or "the first process says how")
        arrays = self._contents(step)["arrays"]
        stored = {path: Stored(d, tuple(shape), s) for path, (d, shape, s) in arrays.items()}
        wanted = by_path(abstract_state)
        if lines := differences(stored, wanted, partial=partial):
            raise ValueError(
                f"Checkpoint {step} in {self.folder} does not fit: {len(lines)} of "
                f"{len(stored | wanted)} arrays differ.\n" + "\n".join(shortened(lines))
            )
        arrays = self._read_arrays(step, wanted)
        wrong = [path for path, s in checksums(arrays).items() if s != stored[path].checksum]
        if wrong:
            reason = f"wrong checksum of {', '.join(shortened(wrong))}"
            raise self._folder.damaged(step, reason)
        # Buffers made by the reader are not always donatable; copies made by XLA are. One by one,
        # so that there need not be room for two states.
        owned = [jax.block_until_ready(jnp.copy(arrays.pop(path))) for path in wanted]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), owned)

    def drop_old(self) -> None:
        """Remove what a process that was killed while saving left: all but the newest and the best.

        For a run that goes on from the newest, or has nothing left to do; if the newest was
        damaged, all stay until it has saved.
        """
        if is_first() and not self._folder.passed_over:
            self._folder.drop_unfinished()
            self._folder.drop_old()

    def _complete(self, step: int, contents: dict[str, Any]) -> None:
        """In the background: when all arrays are written, make a checkpoint of them."""
        self._orbax.wait_until_finished()
        if is_first():
            self._folder.complete(step, contents)
        self._folder.passed_over = []

    def _find(self, step: int | None) -> int:
        self.wait()
        if step is None or not self.steps():
            return self.newest()
        if step not in self.steps():
            raise ValueError(
                f"There is no checkpoint {step} in {self.folder}; it holds "
                f"{self._folder.listing()}."
            )
        return step

    def _contents(self, step: int) -> dict[str, Any]:
        contents = self._folder.description(step)
        if contents["schema"] > SCHEMA:
            raise ValueError(
                f"Checkpoint {step} in {self.folder} was written by a newer jaxformer: "
                f"its schema is {contents['schema']}, and this one reads up to {SCHEMA}."
            )
        return contents

    def _read_arrays(self, step: int, wanted: dict[str, Any]) -> dict[str, Array]:
        target = {path: placed(x) for path, x in wanted.items()}
        args = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        )
        try:
            return self._orbax.restore(self._folder.at(step) / "state", args=args)
        except Exception as error:
            raise self._folder.damaged(step, error) from error

    def _failure(self, step: int, error: object) -> OSError:
        with contextlib.suppress(Exception):  # what else went wrong with it
            self._orbax.wait_until_finished()
        if is_first():
            self._folder.abandon(step)
        last = self.latest()
        return OSError(
            f"Saving checkpoint {step} in {self.folder} failed: {error}. "
            + (
                "There is no good checkpoint yet."
                if last is None
                else f"The last good checkpoint is {last}."
            )
        )


def _keep_no_statistics() -> None:
    """Orbax asks TensorStore at every save how much it wrote so far, which never frees 18 kB."""
    with contextlib.suppress(ImportError):  # where Orbax does not ask there
        from orbax.checkpoint._src.serialization import tensorstore_utils

        tensorstore_utils.get_tensorstore_raw_bytes = lambda direction=None: 0


def placed(x: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and the devices to put it on: the first one if `x` does not say."""
    sharding = getattr(x, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def agreed(number: int) -> int:
    """The first process's number, in every process; returns when all have asked."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))
