"""Fixture: a small Llama folder written without jaxformer."""

import pytest

from jaxformer.interop import load_pretrained
from tests.interop.numpy_folders import LLAMA, llama_shapes, random_tensors, write_folder


@pytest.fixture(scope="session")
def tensors():
    return random_tensors(llama_shapes())


@pytest.fixture(scope="session")
def source(tmp_path_factory, tensors):
    return write_folder(tmp_path_factory.mktemp("llama") / "source", LLAMA, tensors)


@pytest.fixture(scope="session")
def loaded(source):
    return load_pretrained(source)
