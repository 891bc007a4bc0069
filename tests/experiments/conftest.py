"""Experiments run in the process of the tests, whose devices they may not change."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    """Start JAX before a run simulates devices, which would change them for the other tests."""
    assert len(jax.devices()) == 8
