"""Runs functions in a process where Triton interprets kernels on CPU tensors.

Triton decides when it is imported whether kernels are compiled or interpreted, so the two cannot
share a process. The interpreter does not show races, instructions or limits of the hardware, and
its bfloat16 arithmetic is silently wrong.
"""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


class Interpreter:
    """One process that interprets; started by the first call, ended by `close`."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_interpret_kernels)

    def __call__(self, function: Callable[..., Any], *args: object) -> Any:
        """Return `function(*args)` from over there, or raise what it raised.

        The function lives at the top of a module; its arguments and its result are pickled.
        """
        return self._pool.submit(function, *args).result()

    def close(self) -> None:
        self._pool.shutdown()


def _interpret_kernels() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton  # not before this process is told to interpret

    if triton.__version__.startswith("3.6."):
        _let_loops_count_with_numpy_2_4()
    _patch_the_language_once_a_kernel()
    _compute_what_is_looked_at()


def _let_loops_count_with_numpy_2_4() -> None:
    """Triton 3.6 makes numbers of arrays with one element, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch_as_shipped = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_as_shipped(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _compute_what_is_looked_at() -> None:
    """Triton computes each sum and product of whole numbers again in 64 bits, to assert that the
    first has not overflowed, and asserts nothing unless it debugs: a third of its time."""
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    assert not options.debug
    object.__setattr__(options, "sanitize_overflow", False)


def _patch_the_language_once_a_kernel() -> None:
    """Triton patches all of its language at each call within a kernel, a third of its whole time.

    What the kernel's own patches, or those of an earlier call of it, have done is not done again. A
    Triton without the function that patches is as slow as it is.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang"):
        return
    patch_as_shipped = interpreter._patch_lang
    patched: set[int] = set()  # globals of the functions that the running kernel has called

    def patch(function: Any) -> Any:
        is_kernel, names = not patched, id(function.__globals__)
        if names in patched:
            return None  # a call within a kernel restores nothing
        scope = patch_as_shipped(function)
        patched.add(names)
        if is_kernel:
            restore_as_shipped = scope.restore

            def restore() -> None:
                patched.clear()
                restore_as_shipped()

            scope.restore = restore
        return scope

    interpreter._patch_lang = patch
