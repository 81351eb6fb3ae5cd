"""What all formats of serving engines share: a new engine is rules and names, and importing a format loads little."""

import re
import subprocess
import sys
import types
from importlib.metadata import EntryPoint

import pytest
from helpers.fixture_places import HF, stored

import reshard
from reshard.adapter import registry
from reshard.adapter.serving_format import ServingFormat
from reshard.errors import CheckpointError, RequestError
from reshard.models.engine_rules import EngineRules, Fusion, Rename

ENGINES = sorted(registry.serving_formats())


class MadeUpEngine(ServingFormat):
    """An engine that fuses gate and up, calls attention's output `out`, and never has biases in its attention."""

    name = "made-up"
    summary = "an engine of this test"
    owns = ("slice-*.safetensors",)
    refines = ("hf",)
    engine = "MadeUp"
    producer = "MadeUp checkpoint"
    sizes = ("tp",)
    file_pattern = re.compile(r"slice-(?P<rank>\d+)\.safetensors")

    def file_name(self, parallel, pp_rank, tp_rank, part):
        return f"slice-{tp_rank}.safetensors"

    def rules(self, model, target):
        return EngineRules(
            engine=self.engine,
            fusions=(Fusion(("mlp.gate", "mlp.up"), "gate_up"),),
            names=(Rename(r"\.self_attn\.o_proj\.", ".self_attn.out."),),
            assumes={"attention_bias": False},
            notes=("it is made up",),
        )


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_up", types.SimpleNamespace(FORMAT=MadeUpEngine()))
    monkeypatch.setitem(registry.others(registry.GROUP), "made-up", EntryPoint("made-up", "made_up:FORMAT", registry.GROUP))


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_made_up_engine_writes_and_reads_with_nothing_but_rules_and_names(made_up, tp, tmp_path):
    plan = reshard.plan(HF / "llama", to="made-up", tp=tp)
    assert reshard.roundtrip(plan).losses == () and "it is made up" in plan.layout.notes
    reshard.convert(plan, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").glob("slice-*")) == [f"slice-{rank}.safetensors" for rank in range(tp)]
    names = stored(tmp_path / "out" / f"slice-{tp - 1}.safetensors")
    assert {"model.layers.0.mlp.gate_up.weight", "model.layers.1.self_attn.out.weight"} < names.keys()
    opened = reshard.open(tmp_path / "out")
    assert (opened.format, opened.index.facts.producer, opened.index.facts.parallel) == ("made-up", "MadeUp checkpoint", {"tp": tp})
    assert reshard.verify(HF / "llama", tmp_path / "out").equal


def test_what_a_made_up_engine_does_not_serve_is_refused(made_up, tmp_path):
    with pytest.raises(RequestError, match="split by tp only"):
        reshard.plan(HF / "llama", to="made-up", pp=2)
    with pytest.raises(RequestError, match="works as if attention_bias were false, the config says true"):
        reshard.plan(HF / "llama-biased", to="made-up")
    with pytest.raises(RequestError, match=r"Legal tensor-parallel sizes are 1, 2, 4, 8\."):
        reshard.plan(HF / "llama", to="made-up", tp=3)
    reshard.convert(reshard.plan(HF / "llama", to="made-up", tp=2), tmp_path / "out")
    (tmp_path / "out" / "slice-0.safetensors").unlink()
    (tmp_path / "out" / "reshard.json").unlink()
    with pytest.raises(CheckpointError, match=r"slice-0\.safetensors: the file of rank 0 is not there"):
        reshard.open(tmp_path / "out")


def test_a_made_up_engine_is_compared_at_several_degrees(made_up):
    rows = reshard.degrees(HF / "llama", to="made-up", tp=(1, 2, 3)).rows
    assert [row.problem is None for row in rows] == [True, True, False]
    assert rows[0].fullest.weights > rows[1].fullest.weights > rows[1].fullest.replicated > 0


@pytest.mark.parametrize("name", ENGINES)
def test_importing_an_engines_format_loads_neither_numpy_nor_its_rules(name):
    module = type(registry.named(name)).__module__
    script = f"import sys, {module}\nprint(chr(10).join(sys.modules))"
    loaded = set(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split())
    assert module in loaded and not loaded & {"numpy", "torch", f"{module}.rules", "reshard.serving", "reshard.index"}


def test_files_of_runs_with_and_without_stages_are_not_mixed(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="vllm", pp=2), tmp_path / "out")
    (tmp_path / "out" / "model-rank-0-part-0.safetensors").write_bytes(
        (tmp_path / "out" / "model-pp-0-tp-0-part-0.safetensors").read_bytes()
    )
    with pytest.raises(CheckpointError, match="files of a run with pipeline stages and files of a run without"):
        reshard.open(tmp_path / "out")


def test_two_files_of_a_rank_do_not_hold_one_name(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="vllm"), tmp_path / "out")
    (tmp_path / "out" / "model-rank-0-part-1.safetensors").write_bytes((tmp_path / "out" / "model-rank-0-part-0.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"two files of the rank hold it: model-rank-0-part-0\.safetensors and model-rank-0-part-1"):
        reshard.open(tmp_path / "out")
