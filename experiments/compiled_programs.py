"""Compiled programs are kept on disk, so that the second start of a run compiles nothing."""

from pathlib import Path

import jax

FOLDER = Path("runs/cache/programs")


def keep_programs(folder: Path = FOLDER) -> None:
    """Keep what this process compiles, and take what another one compiled.

    JAX's own settings come first: where JAX_COMPILATION_CACHE_DIR names a folder it is that one,
    and JAX_ENABLE_COMPILATION_CACHE=0 keeps nothing.

    Args:
        folder: Made when there is something to keep. It may be deleted at any time.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small ones are many
