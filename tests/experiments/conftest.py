"""Experiments run in the test process as other programs do."""

from tests.run.conftest import compiled_before as compiled_before
from tests.run.conftest import eight_devices as eight_devices
