"""One interpreting process for all tests of kernels; see interpreter.py."""

import os
from collections.abc import Iterator

import pytest
from interpreter import Interpreter

# Here kernels are compiled; where they are interpreted, it is in a process of their own.
os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Calls functions where kernels run on CPU tensors."""
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()
