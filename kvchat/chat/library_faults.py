"""What the tokenizers library fails with becomes one typed error.

It raises bare Exception for most, and lets a panic of its Rust code through as a BaseException that
has no importable class: a regular expression that backtracks too far ends so.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kvchat.core.errors import KvchatError, ModelError


def is_library_fault(error: BaseException) -> bool:
    """Tell a library's failure, a panic included, from what only passes through: signals, exits."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def faults_as_model_errors(sentence: str, hint: str = "") -> Iterator[None]:
    """Raise ModelError with the sentence and the library's own words for whatever it fails with."""
    try:
        yield
    except KvchatError:
        raise
    except BaseException as error:
        if not is_library_fault(error):
            raise
        words = " ".join(str(error).split())[:200].rstrip(".")
        raise ModelError(f"{sentence}: {words or type(error).__name__}.", hint) from error
