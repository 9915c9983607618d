"""Kernels are compiled by processes of their own, which may end at any time."""

import subprocess
import sys

import pytest

from kvchat_kernels.cpu import compiler
from kvchat_kernels.cpu.code import Code, _processor, compiled, written
from kvchat_kernels.cpu.compiler import Processes, Target, machine_code
from kvchat_kernels.cpu.object_cache import ObjectCache


def add_ones(count: int) -> str:
    """Return the text of a function that adds so many numbers to what its address holds."""

    def write(code: Code) -> None:
        for number in range(count):
            value = code.load(code.address, 0, code.address.type)
            code.store(value + (number + 1), code.address, 0)

    return written(None, write)


@pytest.fixture
def target() -> Target:
    processor = _processor()
    return Target(processor.name, processor.flags)


def test_a_process_compiles_what_this_one_would(target: Target) -> None:
    processes = Processes(target, 2)

    texts = [add_ones(count) for count in (1, 2, 3)]
    codes = [processes.begin(text) for text in texts]

    assert [code.result() for code in codes] == [machine_code(text, target) for text in texts]


@pytest.mark.parametrize("program", ["import sys; sys.stdin.buffer.read(8)", "print('a greeting')"])
def test_what_an_ended_process_left_is_compiled_here(program, target, monkeypatch):
    """After a greeting, whose beginning is a length that no memory has, loading never ended."""
    monkeypatch.setattr(compiler, "_PROGRAM", program)
    processes, text = Processes(target, 1), add_ones(1)

    assert processes.begin(text).result(60) == machine_code(text, target)


def test_a_path_for_modules_may_have_other_entries_than_texts(target, monkeypatch, tmp_path):
    """With one of pathlib's, loading never ended."""
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])

    assert Processes(target, 1).begin(add_ones(1)).result(60)


def test_without_processes_kernels_are_compiled_here(target, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(subprocess, "Popen", refuse)
    processes, text = Processes(target, 1), add_ones(1)

    assert processes.begin(text).result() == machine_code(text, target)


def test_wrong_code_raises_where_its_address_is_wanted(target: Target) -> None:
    with pytest.raises(RuntimeError):
        Processes(target, 1).begin("no code of LLVM").result()


def test_a_function_is_saved_once_it_is_wanted(tmp_path, monkeypatch):
    cache = ObjectCache(tmp_path / "kernels")
    monkeypatch.setattr(compiler, "object_cache", lambda: cache)
    monkeypatch.setattr(compiler, "_SHORT", 0)

    one = compiled("nothing", (), None, lambda code: None)

    assert one.address == one.address != 0
    [file] = cache.directory.iterdir()
    assert cache.load(file.name)
    writes: list[Code] = []
    assert compiled("nothing", (), None, writes.append).address
    assert not writes
