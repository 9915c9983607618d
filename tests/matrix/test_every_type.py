"""Every model type of transformers: what is exact stays exact, and the manual says what is.

The table of verdicts is `tests/support/type_verdicts.json`; `make model-table` measures it again
and rewrites `docs/models.md`. A spread of types runs always, and every type in the long run.
"""

import json
import re
from pathlib import Path

import pytest
import transformers
from transformers import CONFIG_MAPPING

from kvchat.core.errors import ModelUnsupported
from kvchat.model.hf.probe import probe
from support.every_type import causal_types, image_text_types
from support.matrix import spread
from support.models_page import PAGE, TABLE, is_exact_on, load_table, page
from support.type_matrix import EXACT, REFUSED, WRONG, verdict_of

# Two types, at least, of every mechanism. Those run always whose attention no other test has.
_PAGED = (
    "afmoe jetmoe llama gemma4_text gpt_oss gpt_neo deepseek_v3 nemotron qwen2_vl mistral3 smolvlm "
    "gemma3 glm4 cohere2 ernie4_5_moe hunyuan_v1_dense phimoe"
)
_GATHERED = (
    "bloom mpt falcon gptj roberta camembert bart marian llama4_text deepseek_v32 glm_moe_dsa "
    "diffllama hrm_text codegen"
)
SPREAD = {"paged": _PAGED.split(), "gathered": _GATHERED.split()}
_ALWAYS = [*("afmoe", "gemma4_text", "qwen2_vl"), *("bloom", "bart", "deepseek_v32")]
_TYPES = [(name, path) for path, names in SPREAD.items() for name in names]
_LEAST_EXACT_CAUSAL = 0.87  # of the causal types that the installed transformers has


@pytest.mark.parametrize(("name", "path"), spread(_TYPES, [t for t in _TYPES if t[0] in _ALWAYS]))
def test_a_spread_of_types_answers_as_a_full_recompute_does(name, path, tmp_path):
    verdict = verdict_of(name, tmp_path)

    assert verdict.outcome == EXACT, verdict
    assert verdict.why.startswith(path)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(load_table()))
def test_a_type_is_what_the_table_says(name: str, tmp_path: Path) -> None:
    if name not in (*causal_types(), *image_text_types()):
        pytest.skip("not a type of this version of transformers")
    known = load_table()[name]

    found = verdict_of(name, tmp_path)

    assert found.outcome == known.outcome, f"{found}; if that is better, run make model-table"


def test_no_type_gives_wrong_answers_and_most_are_exact() -> None:
    table = load_table()
    exact = {name for name, verdict in table.items() if verdict.outcome == EXACT}
    causal = set(causal_types())

    assert not [name for name, verdict in table.items() if verdict.outcome == WRONG]
    assert len(exact & causal) >= _LEAST_EXACT_CAUSAL * len(causal)
    for path, names in SPREAD.items():
        assert all(is_exact_on(path, table[name]) for name in names)


def test_every_type_that_does_not_run_has_a_reason() -> None:
    assert all(verdict.why for verdict in load_table().values())


_REFUSED = {name: v.why for name, v in load_table().items() if v.outcome == REFUSED}


@pytest.mark.parametrize("name", _REFUSED)
def test_a_refusal_is_one_sentence_without_the_words_of_an_exception(name: str) -> None:
    reason = _REFUSED[name]

    assert reason.endswith(".")
    assert reason.split()[0] in ("it", "its", "computed", "the"), reason
    assert not re.search(r"Error|Exception|__|\(\)|object has no|\w\.\w+\(", reason), reason
    assert "\n" not in reason
    assert len(reason) < 160


def test_a_refused_architecture_is_told_with_what_runs_instead() -> None:
    config = CONFIG_MAPPING["t5gemma2"]()

    with pytest.raises(ModelUnsupported, match="is not supported: it attends in both") as caught:
        probe(config)

    assert "run instead, such as Llama" in caught.value.hint


def test_the_manual_says_what_the_table_says() -> None:
    version = json.loads(TABLE.read_text())["transformers"]
    if transformers.__version__ != version:
        pytest.skip("the page sorts types by another version of transformers")

    assert PAGE.read_text() == page(load_table(), version, causal_types()), "run make model-table"
