"""Compiled programs are kept on disk, so that the second start of a run compiles nothing."""

from pathlib import Path

import jax

FOLDER = Path("runs/cache/programs")


def keep_programs(folder: Path = FOLDER) -> None:
    """Keep what this process compiles, and take what another one compiled.

    JAX's own settings come first: where JAX_COMPILATION_CACHE_DIR names a folder it is that one,
    and JAX_ENABLE_COMPILATION_CACHE=0 keeps nothing. Programs for several CPU devices are never
    kept: those that XLA reads back from the disk may begin their messages in another order on each
    device, and then wait for each other until they abort (JAX 0.10.2 and 0.12.0).

    Args:
        folder: Made when there is something to keep. It may be deleted at any time.
    """
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)
    elif jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small ones are many
