"""Sampling follows the model wherever the user wished for nothing else."""

from dataclasses import replace
from pathlib import Path

from kvchat.chat import answer_settings
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.chat_model import read_chat_model
from kvchat.chat.controller import ChatController
from kvchat.chat.host import ChatHost
from kvchat.chat.store import SessionStore
from kvchat.core.types import SamplingParams
from kvchat.model.checkpoint.source import find_model
from support.scripted_engine import Script, scripted_build, write_text_checkpoint


def test_what_a_model_recommends_counts_where_nothing_was_chosen() -> None:
    chosen = AskOptions(SamplingParams(top_p=0.5), chosen=frozenset({"top_p"}))

    recommended = chosen.for_model({"temperature": 0.2, "top_p": 0.9, "top_k": 20.0})

    assert recommended.sampling == SamplingParams(temperature=0.2, top_p=0.5, top_k=20)
    assert isinstance(recommended.sampling.top_k, int)
    assert recommended.for_model({}).sampling == SamplingParams(top_p=0.5)


def test_a_model_that_recommends_nothing_has_what_is_usual(tmp_path: Path) -> None:
    """At temperature 0.7 alone a small model drew from its whole vocabulary and lost itself."""
    plain = write_text_checkpoint(tmp_path / "plain")
    own = write_text_checkpoint(tmp_path / "own")
    (own / "generation_config.json").write_text('{"temperature": 0.3}')

    usual = {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "min_p": 0.05}
    assert read_chat_model(find_model(str(plain))).sampling_defaults == usual
    assert read_chat_model(find_model(str(own))).sampling_defaults == {"temperature": 0.3}


def test_another_model_brings_its_own_sampling_but_keeps_what_was_set(model, tmp_path):
    """/model kept the first model's temperature, which the user had not asked for."""
    store = SessionStore(tmp_path / "sessions")
    build = scripted_build(model, lambda question, _: Script("Yes."))
    other = replace(model, sampling_defaults={"temperature": 0.3, "top_k": 20, "min_p": 0.1})
    first, second = (ChatHost(each, build, store) for each in (model, other))  # type: ignore[arg-type]
    options = AskOptions(chosen=frozenset()).for_model({"temperature": 0.9, "top_p": 0.8})
    controller = ChatController(first, lambda *_: second, None, options)
    controller.options = answer_settings.changed(controller.options, "min-p", "0.2")

    controller.change_host(second).close()
    controller.host.close()

    assert controller.options.sampling == SamplingParams(temperature=0.3, top_k=20, min_p=0.2)
