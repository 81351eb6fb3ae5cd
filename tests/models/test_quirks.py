"""What a declaration says about serving engines: the section `engines`, and the names of an engine in one version."""

from pathlib import Path

import pytest

from reshard.adapter import registry
from reshard.errors import RequestError
from reshard.geometry.dtypes import F32
from reshard.models.declared.reader import parse_declaration
from reshard.models.engine_rules import EngineRules, ExtraTensor, Fusion, Rename, renames_of
from reshard.models.lookup import built_in_model_types, declaration_text, find_architecture, find_declaration, read_architecture
from reshard.models.model import Model
from reshard.serving.legality import refused


def declared(text, extends="llama"):
    return parse_declaration(f"language: 2\nmodel_type: mymodel\nextends: {extends}\n{text}".encode(), "my.yaml", find_declaration)


def renamed(name, quirks, version):
    return quirks.at(version).renamed(name)


def test_a_name_is_words_between_dots_in_the_versions_that_have_it():
    quirks = EngineRules(names=tuple(renames_of("mlp.gate", {(0, 15): "mlp.experts._gate", (0, 20): "mlp.gate", (0, 24): "x.gate"})))
    names = [renamed("model.layers.0.mlp.gate.weight", quirks, version) for version in ((0, 14), (0, 15), (0, 19, 1), (0, 20), (0, 32))]
    inner = ["mlp.gate", "mlp.experts._gate", "mlp.experts._gate", "mlp.gate", "x.gate"]
    assert names == [f"model.layers.0.{words}.weight" for words in inner]
    assert renamed("model.mlp.gate_proj.weight", quirks, (0, 32)) == "model.mlp.gate_proj.weight"
    assert renamed("model.amlp.gate.weight", quirks, (0, 32)) == "model.amlp.gate.weight"
    assert quirks.changes == {(0, 15), (0, 20), (0, 24)}


def test_a_section_is_read_into_quirks():
    quirks = declared(
        """engines:
  vllm:
    since: "0.32"
    names: {model.norm: model.last, lm_head: {"0.30": head, "0.9": out}}
    keep_fused: {attention.qkv: "0.31"}
    every_stage: [final_norm, head]
    unsupported: [attention.o.bias]
    assumes: {a: 1, head_dim: hidden / heads}
    extra_tensors:
      normalizer: {beside: embedding, square_root_of: hidden, until: "0.9.2"}
      scale: {beside: attention.q, ones: [hidden], dtype: fp32}
    notes: one
"""
    ).engines["vllm"]
    assert quirks.since == (0, 32) and quirks.every_stage == {"final_norm", "head"} and quirks.notes == ("one",)
    assert quirks.unsupported == {("attention.o", "bias")} and quirks.assumes == {"a": 1, "head_dim": "hidden / heads"}
    assert renamed("model.norm.weight", quirks, (0, 32)) == "model.last.weight"
    assert [renamed("lm_head.weight", quirks, (0, minor)) for minor in (8, 9, 30)] == ["lm_head.weight", "out.weight", "head.weight"]
    assert [quirks.at((0, minor)).keep_fused.keys() for minor in (30, 31)] == [set(), {"attention.qkv"}]
    normalizer = ExtraTensor("embedding", "normalizer", square_root_of="hidden", until=(0, 9, 2))
    scale = ExtraTensor("attention.q", "scale", 1.0, F32, ("hidden",))
    assert [quirks.at(version).extra_tensors for version in ((0, 9, 1), (0, 9, 2))] == [(normalizer, scale), (scale,)]


def test_engines_are_taken_over_by_like_and_not_by_extends():
    assert declared("").engines == {}
    assert declared("like: qwen2_moe").engines == find_architecture("qwen2_moe").engines
    own = declared("like: qwen2_moe\nengines: {vllm: {}}").engines
    assert own["vllm"] == EngineRules() and own["sglang"] == find_architecture("qwen2_moe").engines["sglang"]


def test_a_file_for_a_built_in_model_type_keeps_what_engines_do_differently_for_it(tmp_path):
    for text in ("extends: qwen3_moe", declaration_text("qwen3_moe").partition("\nengines:")[0].partition("model_type: qwen3_moe\n")[2]):
        (tmp_path / "my.yaml").write_text(f"language: 2\nmodel_type: qwen3_moe\n{text}\n")
        assert read_architecture(tmp_path / "my.yaml").engines == find_architecture("qwen3_moe").engines
    (tmp_path / "my.yaml").write_text("language: 2\nmodel_type: qwen3_moe\nextends: qwen3_moe\nengines: {vllm: {}}\n")
    assert read_architecture(tmp_path / "my.yaml").engines == {"vllm": EngineRules()}


@pytest.mark.parametrize(
    "section, complaint",
    [
        (
            "{vllm: {every_stages: [head]}}",
            r"line 4: engines > vllm > every_stages: there is no key 'every_stages' here\. The keys are of_class,",
        ),
        ("{vllm: {since: 0.32}}", r"line 4: engines > vllm > since: expected a version in quotes, such as \"0\.32\", found 0\.32"),
        ("{vllm: {names: {mlp.gate: {1.x: a}}}}", "expected a version in quotes"),
        ("{vllm: {names: {'mlp.(gate)': a}}}", "expected words of a name, with dots between them, found 'mlp.\\(gate\\)'"),
        (
            "{vllm: {every_stage: [mlp.up]}}",
            "expected one of embedding, position_embedding, embedding_norm, final_norm, head, .*found 'mlp.up'",
        ),
        ("{vllm: {unsupported: [attention.o]}}", "'attention.o' does not end in .weight or .bias"),
        ("{vllm: {tied_table_stored_as: none}}", "expected one of head, embedding, both"),
        ("{vllm: {assumes: {a: [1]}}}", "expected true, false, a whole number or a word, found a list"),
        ("{vllm: {assumes: {head_dim: hidden / head}}}", "line 4: engines > vllm > assumes > head_dim: no dimension is called 'head'"),
        ("{vllm: {refuses: {tp > expert: few}}}", r"line 4: engines > vllm > refuses > tp > expert: no dimension is called 'expert'"),
        ("{vllm: {refuses: {heads % ep or: few}}}", "refuses > heads % ep or: expected a key of the config"),
        ("{vllm: {refuses: {heads % ep: '{head} heads'}}}", "refuses > heads % ep: no dimension is called 'head'"),
        ("{vllm: {refuses: {pp > 1: [few]}}}", "expected a sentence, found a list"),
        ("{vllm: {of_class: {'a b': {}}}}", "expected a key of the config"),
        ("[vllm]", "expected a mapping"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(section, complaint):
    with pytest.raises(RequestError, match=complaint):
        declared(f"engines: {section}")


def test_the_built_in_declarations_name_engines_that_exist():
    named = {engine for model_type in built_in_model_types() for engine in find_architecture(model_type).engines}
    assert named == set(registry.serving_formats())


def test_no_file_of_an_engine_has_a_table_by_model_type():
    formats = Path(__file__).resolve().parents[2] / "formats"
    for file in (path for engine in ("vllm", "sglang") for path in (formats / engine).glob("*.py")):
        text = file.read_text()
        assert [model_type for model_type in built_in_model_types() if f'"{model_type}"' in text] == [], file.name


def test_the_class_that_the_config_names_has_its_own_quirks():
    """transformers saves phimoe under another class than the published one, and vLLM has a class for each."""
    phimoe = find_architecture("phimoe")
    published, saved = (Model(phimoe, {"architectures": [name]}).quirks_of("vllm") for name in ("PhiMoEForCausalLM", "PhimoeForCausalLM"))
    assert Model(phimoe, {}).quirks_of("vllm") == published == phimoe.engines["vllm"]
    assert renamed("x.block_sparse_moe.gate.weight", saved, (0, 32)) == "x.mlp.router.weight"
    assert renamed("x.block_sparse_moe.gate.weight", published, (0, 32)) == "x.block_sparse_moe.gate.weight"
    assert Model(phimoe, {}).quirks_of("trtllm") is None


def test_a_function_of_a_weight_is_one_that_reshard_computes():
    quirks = declared("engines: {vllm: {values: {ssm.a_log: -exp}, dtypes: {ssm.a_log: fp32, router: model}}}").engines["vllm"]
    assert (quirks.values, quirks.dtypes) == ({"ssm.a_log": "-exp"}, {"ssm.a_log": F32, "router": None})
    with pytest.raises(RequestError, match=r"values > ssm\.a_log: expected one of -exp, x-1, found 'exp'"):
        declared("engines: {vllm: {values: {ssm.a_log: exp}}}")


def test_two_roles_of_one_name_in_one_layer_are_refused():
    text = """layer_sets: {odd: {list: kinds, entries: odd}}
weights:
  model.layers.*.self_attn.q_proj.weight: [{role: attention.q, layers: odd}, {role: mla.q, shape: [8, 8], layers: odd}]
"""
    config = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 8, "vocab_size": 8}
    model = Model(declared(text), {**config, "kinds": ["odd", "even"]})
    with pytest.raises(RequestError, match=r"layers\.0\.self_attn\.q_proj.*declared twice, as attention\.q and as mla\.q"):
        model.weights  # noqa: B018
    assert "model.layers.0.self_attn.q_proj.weight" not in Model(declared(text), {**config, "kinds": ["even", "even"]}).weights


def test_the_names_of_a_set_of_layers_come_before_the_others():
    quirks = declared("""layer_sets: {odd: {first: start}}
engines: {vllm: {names: {mlp.gate: mlp.last}, names_in: {odd: {attn: other, mlp.gate: {"0.30": mlp.gate.own}}}}}""").engines["vllm"]
    rules = quirks.at((0, 32))
    assert [rules.renamed("a.attn.mlp.gate", sets) for sets in ((), ("odd",))] == ["a.attn.mlp.last", "a.other.mlp.last.own"]
    assert quirks.at((0, 29)).renamed("a.attn.mlp.gate", ("odd",)) == "a.other.mlp.last" and (0, 30) in quirks.changes


def test_quirks_of_a_class_around_a_language_model_join_those_of_its_class():
    fusions = (Fusion(("y",), "x"),)
    inner = EngineRules(
        every_stage=frozenset({"head"}), names=(Rename("a", "b"),), assumes={"a": 1}, refuses={"always": "b"}, since=(0, 30)
    )
    outer = EngineRules(
        every_stage=frozenset({"vision"}), names=(Rename("c", "d"),), fusions=fusions, assumes={"a": 2, "c": 3}, since=(0, 32)
    )
    joined = inner.with_quirks(outer)
    assert joined.every_stage == {"head", "vision"} and [rename.pattern for rename in joined.names] == ["a", "c"]
    assert joined.assumes == {"a": 2, "c": 3} and joined.refuses == inner.refuses
    assert joined.since == (0, 32) and joined.fusions == fusions


SIZES = {"hidden_size": 8, "num_hidden_layers": 4, "intermediate_size": 8, "vocab_size": 8, "num_attention_heads": 4}


@pytest.mark.distinct
@pytest.mark.parametrize(
    "when, sizes, reason",
    [
        ("tp > heads", {"tp": 8, "ep": 1}, "8 ranks, 4 heads"),
        ("tp > heads", {"tp": 4, "ep": 1}, None),
        ("heads % tp", {"tp": 3, "ep": 1}, "3 ranks, 4 heads"),
        ("tp > 1 and not ep > 1", {"tp": 3, "ep": 1}, "3 ranks, 4 heads"),
        ("tp > 1 and not ep > 1", {"tp": 3, "ep": 3}, None),
        ("not sparse_layers_of_stage", {"pp": 2, "stage": 0, "sparse_layers_of_stage": 0}, "{tp} ranks, 4 heads"),
        ("not sparse_layers_of_stage", {"tp": 2, "ep": 1}, None),
        ("pp > 1 and key is on or pp > 2", {"pp": 2, "stage": 0}, None),
        ("pp > 1 and key is off or pp > 2", {"pp": 2, "stage": 0}, "{tp} ranks, 4 heads"),
        ("always", {}, "{tp} ranks, 4 heads"),
        ("always", {"tp": 2, "ep": 1}, None),
        ("quantized or sparse_layers or quantized_router", {}, None),
        ("dense_layers > layers - 1", {}, "{tp} ranks, 4 heads"),
    ],
)
def test_a_refusal_holds_at_the_sizes_that_its_condition_names(when, sizes, reason):
    quirks = declared(f"engines: {{vllm: {{refuses: {{{when}: '{{tp}} ranks, {{heads}} heads'}}}}}}").engines["vllm"]
    assert refused(Model(declared(""), {**SIZES, "key": "off"}), quirks, **sizes) == reason


def test_keys_that_reshard_0_2_had_are_read_as_rows_with_a_warning(caplog):
    text = """engines:
  vllm: {assumed_settings: {qkv_bias: true}, derives_head_dim: true, tp_at_most_experts: true, one_stage: true, refuses: {tp > 8: few}}
  sglang: {one_stage_if: a.key, stages_need_experts: true, quantizes_router: true, all_layers_sparse: false, least_expert_width: 256}
  trtllm: {not_loadable: so it is}
"""
    old = declared(text, extends="qwen2_moe").engines
    assert old["vllm"].assumes == {"qkv_bias": True, "head_dim": "hidden / heads"}
    assert old["vllm"].refuses.keys() == {"tp > 8", "sparse_layers and tp > experts", "pp > 1"}
    assert old["sglang"].refuses.keys() == {
        "pp > 1 and a.key",
        "sparse_layers and not sparse_layers_of_stage",
        "quantized_router",
        "sparse_layers and tp > 1 and not ep > 1 and 256 > expert_intermediate / tp",
    }
    assert old["trtllm"].refuses == {"always": "so it is"}
    assert "my.yaml, line 5: engines > vllm > one_stage: reshard 0.4 will not read `one_stage`. Write a row of `refuses`" in caplog.text
    with pytest.raises(RequestError, match="line 4: engines > vllm > assumed_settings: expected a mapping"):
        declared("engines: {vllm: {assumed_settings: []}}")
