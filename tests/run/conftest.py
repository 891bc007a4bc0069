"""Fixtures that run experiments in the test process without changing its devices."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxformer.run import run_config as run


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    """Start JAX before a run simulates devices, which would change them for the other tests."""
    assert len(jax.devices()) == 8


@pytest.fixture(scope="module", autouse=True)
def compiled_before(tmp_path_factory):
    """Keep programs of runs on one device for the next run of the same model.

    Those of several devices are never kept, see `run.enable_compilation_cache`.
    """

    def keep(devices):
        jax.config.update("jax_enable_compilation_cache", devices == 1)
        compilation_cache.reset_cache()  # or else JAX goes on as at the first program

    settings = {
        "jax_enable_compilation_cache": False,
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "simulate_cpu_devices", keep)
        patch.setattr(run, "enable_compilation_cache", lambda: None)
        for values in (settings, before):
            for name, value in values.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            if values is settings:
                yield
