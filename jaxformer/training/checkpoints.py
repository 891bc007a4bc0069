"""Saved states, and how they are found again. The only module that knows orbax."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from jax.tree_util import keystr, tree_flatten_with_path
from jaxtyping import Array, Shaped, UInt32

SCHEMA = 1
LISTED = 10  # lines of a message before the rest is only counted


class Stored(NamedTuple):
    """What the description records of one array."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Checkpoints:
    """A folder of states by step, each whole or absent.

        with Checkpoints("runs/first") as checkpoints:
            state = checkpoints.restore(None, jax.eval_shape(init, key))
            checkpoints.save(100, state, {"seed": 0})

    A state is saved as a flat dict of arrays by path ("params/decoder/final_norm/scale"), so what
    can be restored depends on the names of arrays and not on the containers around them. Leaving
    the `with` block waits for the save in progress.

    Args:
        folder: Made at the first save; nothing is made for reading. Relative paths are resolved.
        keep: How many checkpoints stay; older ones go after a newer one is complete.

    Raises:
        ValueError: `keep` is below 1, or `folder` is a file.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3):
        if keep < 1:
            raise ValueError(f"At least one checkpoint must stay; got keep={keep}.")
        self.folder = Path(folder).expanduser().resolve()
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file, not a folder of checkpoints.")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=False)
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._saving: int | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        finally:
            self._manager.close()

    def save(self, step: int, state: Any, description: Mapping[str, Any]) -> None:
        """Start saving; return once the arrays may change or be donated.

        Args:
            step: Greater than that of every checkpoint in the folder.
            state: Any pytree of arrays.
            description: What is needed to use the state, as JSON: configuration, tokenizer, seed.

        Raises:
            ValueError: The step is not the newest, or the description is no JSON.
            OSError: This save, or the one before it, failed; says which checkpoint is good.
        """
        self.wait()
        if (latest := self.latest()) is not None and step <= latest:
            raise ValueError(
                f"Checkpoint {step} would not be the newest in {self.folder}, which holds "
                f"{self._listing()}. Use another folder, or delete the later ones."
            )
        try:
            json.dumps(dict(description))
        except TypeError as error:
            raise ValueError(f"The description of a checkpoint must be JSON: {error}.") from error
        arrays = by_path(state)
        sums = checksums(arrays)
        record = {path: Stored(x.dtype.name, x.shape, sums[path]) for path, x in arrays.items()}
        contents = {"schema": SCHEMA, "arrays": record, "description": dict(description)}
        self._saving = step
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(arrays), description=ocp.args.JsonSave(contents)
                ),
                force=True,
            )
        except Exception as error:
            raise self._failure(error) from error

    def wait(self) -> None:
        """Return when the save in progress is complete.

        Raises:
            OSError: It failed; says which checkpoint is the last good one.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # whatever the storage raised: OSError, ValueError, Exception
            raise self._failure(error) from error

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order; one still being saved is not there."""
        return sorted(ocp.utils.checkpoint_steps(self.folder))

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def describe(self, step: int | None = None) -> dict[str, Any]:
        """The description saved with a checkpoint (None: the latest), and its "schema".

        Raises:
            ValueError: There is no such checkpoint, it is damaged, or from a newer jaxformer.
        """
        schema, _, description = self._read_record(self._find(step))
        return {**description, "schema": schema}

    def restore(self, step: int | None, abstract_state: Any, *, partial: bool = False) -> Any:
        """Read a state, bit for bit as it was saved.

        Args:
            step: Which checkpoint; None for the latest.
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
        _, stored, _ = self._read_record(step)
        wanted = by_path(abstract_state)
        if lines := differences(stored, wanted, partial=partial):
            raise ValueError(
                f"Checkpoint {step} in {self.folder} does not fit: {len(lines)} of "
                f"{len(stored | wanted)} arrays differ.\n" + "\n".join(shortened(lines))
            )
        arrays = self._read_arrays(step, wanted)
        wrong = [path for path, s in checksums(arrays).items() if s != stored[path].checksum]
        if wrong:
            raise self._damage(step, f"wrong checksum of {', '.join(shortened(wrong))}")
        # Buffers made by the reader are not always donatable; copies made by XLA are.
        owned = [jnp.copy(arrays.pop(path)) for path in wanted]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), owned)

    def _find(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise ValueError(f"There is no checkpoint in {self.folder}.")
        if step is not None and step not in steps:
            raise ValueError(
                f"There is no checkpoint {step} in {self.folder}; it holds {self._listing()}."
            )
        return steps[-1] if step is None else step

    def _read_record(self, step: int) -> tuple[int, dict[str, Stored], dict[str, Any]]:
        try:
            args = ocp.args.Composite(description=ocp.args.JsonRestore())
            contents = self._manager.restore(step, args=args).description
            schema = int(contents["schema"])
        except Exception as error:
            raise self._damage(step, error) from error
        if schema > SCHEMA:
            raise ValueError(
                f"Checkpoint {step} in {self.folder} was written by a newer jaxformer: "
                f"its schema is {schema}, and this one reads up to {SCHEMA}."
            )
        try:
            stored = {
                path: Stored(dtype, tuple(shape), checksum)
                for path, (dtype, shape, checksum) in contents["arrays"].items()
            }
            return schema, stored, dict(contents["description"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damage(step, error) from error

    def _read_arrays(self, step: int, wanted: dict[str, Any]) -> dict[str, Array]:
        target = {path: placed(x) for path, x in wanted.items()}
        args = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        )
        try:
            return self._manager.restore(step, args=ocp.args.Composite(state=args)).state
        except Exception as error:
            raise self._damage(step, error) from error

    def _listing(self) -> str:
        return ", ".join(map(str, self.steps())) or "none"

    def _failure(self, error: Exception) -> OSError:
        self._manager.reload()  # it would count the failed checkpoint among those to keep
        return OSError(
            f"Saving checkpoint {self._saving} in {self.folder} failed: {error}. "
            f"The last good checkpoint is {self.latest()}."
        )

    def _damage(self, step: int, reason: object) -> ValueError:
        return ValueError(
            f"Checkpoint {step} in {self.folder} is damaged: {str(reason)[:200]}. "
            f"The folder holds {self._listing()}."
        )


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their names joined with "/"."""
    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def placed(x: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and the devices to put it on: the first one if `x` does not say."""
    sharding = getattr(x, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def differences(
    stored: Mapping[str, Stored], wanted: Mapping[str, Any], *, partial: bool
) -> list[str]:
    """One line per array whose dtype or shape in the checkpoint is not the one asked for."""
    paths = wanted if partial else {**stored, **wanted}
    lines = []
    for path in sorted(paths):
        saved, here = str(stored.get(path, "nothing")), "nothing"
        if path in wanted:
            here = str(Stored(np.dtype(wanted[path].dtype).name, wanted[path].shape, 0))
        if saved != here:
            lines.append(f"  {path}: saved {saved}, asked for {here}")
    return lines


def shortened(lines: list[str]) -> list[str]:
    """The first few, and how many more there are."""
    more = len(lines) - LISTED
    return lines if more <= 0 else [*lines[:LISTED], f"  and {more} more"]


def checksums(arrays: Mapping[str, Array]) -> dict[str, int]:
    """Sum of the words of each array, modulo 2 ** 32: any one changed bit changes it."""
    sums = {path: sum_of_words(x) for path, x in arrays.items()}  # dispatched, then read
    return {path: int(x) for path, x in jax.device_get(sums).items()}


@jax.jit
def sum_of_words(x: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """Of the bits of each element, read as an unsigned number."""
    return jnp.sum(x.view(f"uint{8 * x.dtype.itemsize}"), dtype=jnp.uint32)
