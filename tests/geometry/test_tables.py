"""Results are tables: one short line as repr, rows when printed, HTML in a notebook, a DataFrame where pandas is; and keywords show."""

import inspect
import sys
from types import SimpleNamespace

import pytest
from helpers.fixture_places import FIXTURES

import reshard
from reshard.geometry.table import Table
from reshard.geometry.value import Tabular

LLAMA = FIXTURES / "hf" / "llama"
QWEN = FIXTURES / "hf" / "qwen3"
RESULTS = {
    "verify": lambda: reshard.verify(LLAMA, QWEN),
    "diff": lambda: reshard.diff(LLAMA, QWEN),
    "diff of headers": lambda: reshard.diff(LLAMA, QWEN, headers=True),
    "stats": lambda: reshard.stats(LLAMA),
    "degrees": lambda: reshard.degrees(LLAMA, to="vllm", gpu_memory=80 << 30),
    "estimate": lambda: reshard.estimate(LLAMA, seq_len=64, pp=2),
    "doctor": lambda: reshard.doctor(LLAMA),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_one_line_a_printed_table_and_a_page(name, monkeypatch):
    result = RESULTS[name]()
    assert isinstance(result, Tabular)
    assert len(repr(result)) <= 200 and "\n" not in repr(result) and repr(result).startswith(type(result).__name__)
    rows, printed, page = result.table(), str(result), result._repr_html_()
    assert len(rows) > 0 and all(len(row) == len(rows.columns) for row in rows.rows)
    assert printed.splitlines()[0] == repr(result) and len(printed.splitlines()) <= 23 and rows.columns[0] in printed.splitlines()[1]
    assert "<table>" in page and page.count("<tr>") >= len(rows) + 1 and rows.columns[-1] in page
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows, columns: (rows, columns)))
    assert result.to_pandas() == (list(rows.rows), list(rows.columns))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(reshard.RequestError, match="needs pandas, which is not installed"):
        result.to_pandas()


def test_the_rows_hold_what_the_result_holds():
    stats, degrees = reshard.stats(LLAMA), reshard.degrees(LLAMA, to="vllm", tp=(1, 2, 16))
    assert stats.table().column("name") == [each.name for each in stats] and stats[0].name == next(iter(stats)).name and len(stats) == 21
    assert stats.sorted_by("largest", reverse=True).rows[0][6] == max(each.largest for each in stats)
    assert degrees.table().column("gpus") == [1, 2, 16] and degrees.table().column("weights")[2] is None
    assert degrees.sorted_by("weights").column("tp") == [2, 1, 16]  # what is not known comes last, in both directions
    assert degrees.sorted_by("weights", reverse=True).column("tp") == [1, 2, 16]
    estimate = reshard.estimate(LLAMA, pp=2)
    assert estimate.table().column("total") == [rank.total for each in estimate.strategies for rank in each.stages]
    assert next(iter(reshard.verify(LLAMA, QWEN).table()))["kind"] == reshard.verify(LLAMA, QWEN).differences[0].kind


def test_a_misspelt_column_is_named_with_the_nearest():
    with pytest.raises(reshard.RequestError, match=r"no column 'larges'.*Did you mean largest[?]"):
        reshard.stats(LLAMA).sorted_by("larges")


def test_a_long_table_is_cut_when_it_is_printed_or_drawn():
    long = Table(("n",), tuple((number,) for number in range(1000)))
    assert "and 980 more rows" in str(long) and len(repr(long)) < 200
    assert "and 800 more rows" in long._repr_html_() and long._repr_html_().count("<tr>") == 201


def test_torch_and_pandas_say_how_to_install_them(monkeypatch):
    tensor = reshard.open(LLAMA)["model.norm.weight"]
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(reshard.RequestError, match=r"needs torch, which is not installed.*reshard\[torch\].*numpy"):
        tensor.torch()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(reshard.RequestError, match="needs pandas"):
        reshard.open(LLAMA).to_pandas()


@pytest.mark.parametrize("name", [name for name in reshard.__all__ if hasattr(getattr(reshard, name), "__wrapped__")])
def test_signatures_show_the_keywords_with_their_usual_values(name):
    parameters = inspect.signature(getattr(reshard, name)).parameters
    is_open = {"tp", "pp", "ep", "dp"} <= parameters.keys() and name not in ("degrees", "estimate")
    assert ("options" in parameters) == is_open, "only what lays out a target takes the options of other formats"
    assert all(
        parameter.default is not parameter.empty
        for each, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and each not in ("to", "into", "engine", "key")
    )


def test_help_names_the_keywords():
    assert "model=None" in str(inspect.signature(reshard.open)) and "format=None" in str(inspect.signature(reshard.open))
    assert inspect.signature(reshard.plan).parameters["tp"].default == 1
    assert inspect.signature(reshard.open(LLAMA).view).parameters["tp"].default == 1


def test_selection_and_storage_options_are_public(tmp_path):
    selection = reshard.Selection(include="*q_proj*")
    assert reshard.verify(LLAMA, LLAMA, selection=selection).tensors == 2
    with reshard.storage_options({"endpoint": "http://127.0.0.1:9"}):
        from reshard.storage.stores.urls import current_options

        assert current_options() == {"endpoint": "http://127.0.0.1:9"}
    assert not current_options()
