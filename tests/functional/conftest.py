import jaxtyping
import pytest


@pytest.fixture
def no_checks_of_annotations():
    """Annotations off, so that the function's own message is what a user sees."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
