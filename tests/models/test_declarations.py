"""The language of declarations: the built-in ones are written in it, and whatever is wrong with a declaration is reported with its line."""

import json
import re
from pathlib import Path

import pytest
import yaml

from reshard.errors import RequestError
from reshard.models.architecture import ConfigKey, LayersOf
from reshard.models.declared.engines import ENGINE_KEYS
from reshard.models.declared.node import parse
from reshard.models.declared.reader import KEYS, LANGUAGE, parse_declaration
from reshard.models.declared.weights import WEIGHT_KEYS
from reshard.models.lookup import (
    built_in_model_types,
    built_in_towers,
    declaration_text,
    find_architecture,
    find_declaration,
    find_model,
    known_model_types,
    named_architecture,
    read_architecture,
    unknown_architecture,
)
from reshard.models.model import Model
from reshard.models.roles import COLUMN, DECLARED_ROLES, REPLICATE, ROLES, ROW, VOCABULARY, heads
from reshard.models.splits import SplitRules, problem

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTATION = ROOT / "docs" / "architectures.md"
VERSION_1 = ROOT / "tests" / "declared" / "version_1"
HEAD = """language: 2
model_type: mymodel
dimensions:
  vocab: vocab_size
  hidden: hidden_size
  layers: num_hidden_layers
  heads: num_attention_heads
  kv_heads: {keys: num_key_value_heads, default: heads}
  head_dim: {keys: head_dim, default: hidden / heads}
  intermediate: intermediate_size
  rank: {keys: lora_rank, optional: true}
"""
CONFIG = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip


def declared(text):
    return parse_declaration(text.encode(), "my.yaml", find_declaration)


def extending(text):
    return declared("language: 2\nmodel_type: mymodel\n" + text)


def one_weight(value, name="model.layers.*.x.weight", more=""):
    return declared(f"{HEAD}weights:\n  {name}: {value}\n{more}").weights[0]


# ---- the built-in declarations ----


@pytest.mark.parametrize("model_type", built_in_model_types())
def test_a_built_in_declaration_is_a_file_named_after_its_model_type(model_type):
    architecture = find_architecture(model_type)
    text = declaration_text(model_type)
    assert (architecture.model_type, architecture.declared_in) == (model_type, None)
    assert architecture.family == model_type or f"\nlike: {architecture.family}\n" in text
    assert f"\nlanguage: {LANGUAGE}\nmodel_type: {model_type}\n" in text and text.startswith("# ")
    assert find_architecture(model_type) is architecture


def test_only_the_declarations_of_the_model_at_hand_are_read(monkeypatch):
    from reshard.models import lookup

    paths, content = [], lookup._content
    monkeypatch.setattr(lookup, "_content", lambda path: (paths.append(path.stem), content(path))[1])
    lookup.find_declaration.cache_clear()
    find_architecture("qwen3_moe")
    assert paths == ["qwen3_moe", "qwen3", "llama"]


def test_every_shape_that_a_built_in_declaration_states_is_not_the_usual_one():
    for model_type in built_in_model_types():
        for name, value in (yaml.safe_load(declaration_text(model_type)).get("weights") or {}).items():
            if isinstance(value, dict) and {"role", "shape"} <= value.keys() and name.endswith(".weight"):
                assert value["role"] not in ROLES or tuple(value["shape"]) != ROLES[value["role"]].shape, (model_type, name)


def test_no_declaration_for_a_name_that_is_not_a_model_type():
    assert [find_architecture(name) for name in ("", "none", "../llama", "llama.yaml", "a/b", "llama\n")] == [None] * 6
    assert find_architecture("gpt-neox") is None or find_architecture("gpt-neox").model_type == "gpt_neox"
    assert find_architecture("RefinedWeb").model_type == "refinedweb"


# ---- the documentation ----


def examples():
    return re.findall(r"```yaml\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)


def test_the_examples_of_the_documentation_are_declarations():
    models = [declared(text) for text in examples() if "model_type:" in text]
    assert len(models) == len(examples()) >= 3
    names = [weight.name for weight in models[0].weights]
    assert "model.layers.{layer}.mlp.adapter.weight" in names and "model.layers.{layer}.mlp.up_proj.weight" not in names


def test_the_full_example_of_the_documentation_is_the_built_in_llama():
    assert declaration_text("llama") in examples()


def test_the_documentation_explains_every_key_and_every_role():
    text = DOCUMENTATION.read_text()
    assert [key for key in KEYS if f"**`{key}`**" not in text] == []
    assert [key for key in (*WEIGHT_KEYS, "of_class", "assumes", "refuses", *ENGINE_KEYS) if f"| `{key}` |" not in text] == []
    assert [role for role in DECLARED_ROLES if f"`{role}`" not in text] == []


# ---- frameworks ----


def test_a_declaration_says_how_a_framework_computes_the_model():
    sets = "layer_sets: {unrotated: {list: layer_types, entries: full}}\n"
    settings = "settings: {a: sigmoid, b: 0.5, c: {key: width, when: is_used}, d: {layers: unrotated}}"
    made = declared(f"language: 2\nmodel_type: mymodel\nextends: llama\n{sets}frameworks:\n  other: {{{settings}, assumes: {{x: 1}}}}\n")
    computation = made.frameworks["other"]
    assert computation.settings == {"a": "sigmoid", "b": 0.5, "c": ConfigKey("width", "is_used"), "d": LayersOf("unrotated")}
    assert computation.assumes == (("x", 1),) and computation.lacks is None
    assert not declared("language: 2\nmodel_type: mymodel\nextends: llama\n").frameworks
    assert declared("language: 2\nmodel_type: mymodel\nextends: llama\nlike: llama\n").frameworks.keys() == {"megatron"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("other: {setting: {a: 1}}", "there is no key 'setting' here"),
        ("other: {settings: {a: {layers: nowhere}}}", "no set of layers is called 'nowhere'"),
        ("other: {settings: {a: {key: one, layers: sparse}}}", "expected a value, {key: KEY}"),
        ("other: {settings: {a: [1]}}", "expected true, false, a number or a word"),
        ("other: {lacks: 3}", "expected what the framework lacks"),
    ],
)
def test_what_is_not_understood_about_a_framework_is_refused(text, reason):
    with pytest.raises(RequestError, match=re.escape(reason)):
        declared(f"language: 2\nmodel_type: mymodel\nextends: llama\nframeworks:\n  {text}\n")


# ---- extending a declared model ----


def test_json_is_a_declaration_too():
    text = json.dumps({"language": 2, "model_type": "mymodel", "extends": "qwen3"})
    assert declared(text).weights == find_architecture("qwen3").weights


@pytest.mark.parametrize("model_type", built_in_model_types())
def test_extends_alone_takes_over_everything_but_the_family(model_type):
    own, built_in = extending(f"extends: {model_type}"), find_architecture(model_type)
    fields = ("weights", "dimensions", "tied", "dropped", "sparse_layers", "mtp_layers", "defaults", "vocabulary_multiple")
    assert [getattr(own, field) for field in fields] == [getattr(built_in, field) for field in fields]
    assert (own.model_type, own.like, own.family) == ("mymodel", None, "mymodel")


def test_like_is_the_model_that_engines_take_it_for_and_nothing_else():
    own = extending("extends: llama\nlike: qwen2")
    assert own.weights == find_architecture("llama").weights and own.family == "qwen2"
    assert declared(f"{HEAD}like: gpt2\nweights: {{a.weight: head}}").family == "gpt2"
    with pytest.raises(RequestError, match=r"line 4: like: no model is declared as 'lama'\. `reshard architectures` lists"):
        extending("extends: llama\nlike: lama")


def test_a_declaration_that_is_extended_does_not_pass_on_its_like():
    """What engines know about a model, they need not know about one that changes it."""
    base = extending("extends: llama\nlike: llama\nvocabulary_multiple: 8")
    find = {"base": base, "llama": find_architecture("llama")}.get
    own = parse_declaration(b"language: 2\nmodel_type: own\nextends: base\n", "own.yaml", find)
    assert (own.vocabulary_multiple, own.like, own.declared_in) == (8, None, None)
    assert parse_declaration(b"language: 2\nmodel_type: own\nextends: base\nlike: base\n", "own.yaml", find).family == "llama"


def test_extends_with_weights_and_without_others():
    qwen2 = extending(
        "extends: llama\nwithout: ['*.o_proj.bias', '*.mlp.*.bias']\nweights:\n"
        + "".join(f"  model.layers.*.self_attn.{which}_proj.bias: attention.{which}\n" for which in "qkv")
    )
    assert qwen2.weights == find_architecture("qwen2").weights
    less = extending("extends: llama\nwithout: ['*.mlp.*', model.norm.weight]")
    assert [w.name for w in less.weights] == [
        w.name for w in find_architecture("llama").weights if ".mlp." not in w.name and w.name != "model.norm.weight"
    ]


# ---- the version of the language ----


@pytest.mark.parametrize("model_type", ["gpt_neox", "qwen3_moe"])
def test_a_file_of_reshard_0_1_0_is_read_as_before(model_type):
    """`like:` meant both: these weights, and that engines take the model for it."""
    old, built_in = read_architecture(VERSION_1 / f"{model_type}.yaml"), find_architecture(model_type)
    assert [weight.name for weight in old.weights] == [weight.name for weight in built_in.weights]
    assert [weight.role for weight in old.weights] == [weight.role for weight in built_in.weights]
    assert (old.dimensions, old.sparse_layers, old.family) == (built_in.dimensions, built_in.sparse_layers, model_type)


def test_every_key_and_word_of_version_1_has_its_successor():
    old = declared(
        HEAD.replace("language: 2\n", "").replace("layers:", "experts: num_experts\n  layers:")
        + """weights:
  a.in.weight: embedding
  a.out.weight: head
  a.*.eh_proj.weight: {role: extra.projection, shape: [hidden, 2 * hidden], layers: extra}
  a.*.enorm.weight: extra.embedding_norm
  a.*.qkv.weight: {holds: [attention.q, attention.k, attention.v], by: kv_heads}
  a.*.both.weight: {holds: {extra.final_norm: hidden, extra.hidden_norm: hidden}, shape: [2 * hidden]}
  a.*.e.*.up.weight: {role: mlp.up, layers: sparse}
extra_layers: more
sparse: all
"""
    )
    weights = {weight.name: weight for weight in old.weights}
    assert (weights["a.{layer}.eh_proj.weight"].role, weights["a.{layer}.eh_proj.weight"].layers) == ("mtp.projection", ("mtp",))
    assert weights["a.{layer}.enorm.weight"].role == "mtp.embedding_norm"
    assert weights["a.{layer}.qkv.weight"].role == "attention.qkv" and weights["a.{layer}.qkv.weight"].interleaved_by == "kv_heads"
    assert list(weights["a.{layer}.both.weight"].fuses) == ["mtp.final_norm", "mtp.hidden_norm"]
    assert old.mtp_layers == "more" and old.sparse_layers is not None


def test_an_error_in_a_file_of_version_1_has_its_line():
    with pytest.raises(RequestError, match=r"line 3: weights > a\.weight > interleaved_by: only the roles of a fused weight"):
        declared("model_type: m\nlike: llama\nweights: {a.weight: {role: head, by: heads}}")
    with pytest.raises(RequestError, match=r"line 2: extends: no model is declared as 'lama'"):
        declared("model_type: m\nlike: lama\n")


@pytest.mark.parametrize(
    "text, key",
    [
        ("extends: llama\n", "extends"), ("extends: llama\nmtp_layers: n\n", "extends"), ("sparse_layers: all\n", "sparse_layers"),
        ("weights:\n  a.weight: {fuses: [mlp.gate, mlp.up]}\n", "fuses"),
    ],
)  # fmt: skip
def test_a_new_key_without_the_version_is_refused_with_the_line_to_add(text, key):
    with pytest.raises(RequestError, match=rf"version 1 of the language has no key '{key}'.*Add the line `language: 2`"):
        declared("model_type: mymodel\n" + text)


def test_a_version_that_is_not_known_is_refused():
    with pytest.raises(RequestError, match=r"line 1: language: the declaration is in version 3 .* Install a newer reshard"):
        declared("language: 3\nmodel_type: m\n")
    with pytest.raises(RequestError, match=r"line 1: language: expected a whole number from 1 on, found 'two'"):
        declared("language: two\nmodel_type: m\n")
    assert declared("language: 1\nmodel_type: m\nlike: llama\n").family == "llama"


def test_declarations_that_extend_each_other_are_refused(monkeypatch, tmp_path):
    from reshard.models import lookup

    for name, base in (("one", "two"), ("two", "one")):
        (tmp_path / f"{name}.yaml").write_text(f"language: 2\nmodel_type: {name}\nextends: {base}\n")
    monkeypatch.setattr(lookup, "_BUILT_IN", tmp_path)
    with pytest.raises(RequestError, match=r"The declarations of one, two extend each other in a circle"):
        find_architecture("one")


# ---- weights ----


def test_every_role_can_be_declared_unless_it_is_fused_or_a_scale():
    assert {role for role in ROLES if role not in DECLARED_ROLES} == {
        "attention.qkv", "mlp.gate_up", "vision.qkv", "attention.k_scale", "attention.v_scale", "attention.k_scales", "attention.v_scales",
        "class_head",
    }  # fmt: skip


# Rows of other heads, which lie beside them; and of as many heads as the config says, whose width is not given.
WITHOUT_HEADS_IN_THE_SHAPE = ("attention.qkv_ranks", "delta.ba", "vision.q", "vision.k", "vision.v", "audio.q", "audio.k", "audio.v")


@pytest.mark.parametrize("role", ROLES.values(), ids=lambda role: role.name)
def test_a_role_is_consistent(role):
    """The law of the role table: a split needs its axis, quantized weights are matrices, and no two roles have the same usual name."""
    assert (len(role.shape) <= 2 or "conv" in role.name) and ROLES[role.name] is role
    if role.split == ROW:
        assert len(role.shape) == 2
    if role.split.heads and role.shape and role.name not in WITHOUT_HEADS_IN_THE_SHAPE:
        assert role.split.heads in role.shape[0]
    if role.quantized:
        assert len(role.shape) == 2 or role.fuses
    assert all(inner in DECLARED_ROLES for inner in role.fuses)
    others = [other for other in ROLES.values() if other is not role and other.in_layer == role.in_layer]
    assert not set(role.names.split()) & {name for other in others for name in other.names.split()}


@pytest.mark.parametrize(
    "value, shape",
    [
        ("attention.k", ("kv_heads * head_dim", "hidden")),
        ("{role: attention.k, shape: [hidden, 3]}", ("hidden", "3")),
        ("{role: mlp.up, transposed: true}", ("hidden", "intermediate")),
        ("{fuses: [mlp.gate, mlp.up]}", ("intermediate + intermediate", "hidden")),
        ("{fuses: [mlp.gate, mlp.up], transposed: true}", ("hidden", "intermediate + intermediate")),
        ("{fuses: {mlp.gate: 2 * hidden, mlp.up: hidden}}", ("2 * hidden + hidden", "hidden")),
    ],
)
def test_a_shape_follows_from_the_role_unless_it_is_written(value, shape):
    assert one_weight(value).shape == shape


def test_a_shape_can_depend_on_the_number_of_the_weight():
    """As the tables of LongCat-Flash-Lite, each of which has two rows more than the one before."""
    text = f"{HEAD}weights:\n  tables.{{kv_heads}}.weight: {{role: my.own, split: replicate, shape: [vocab + 2 * number + 1, hidden]}}\n"
    shapes = {weight.name: weight.shape for weight in Model(declared(text), CONFIG).weights.values()}
    assert shapes == {"tables.0.weight": (51, 16), "tables.1.weight": (53, 16)}
    with pytest.raises(RequestError, match="no dimension is called 'number'"):
        one_weight("{role: my.own, split: replicate, shape: [number, hidden]}")


def test_layers_of_experts_can_have_widths_of_their_own():
    """As in Nemotron 3 Puzzle."""
    blocks = [{"block_type": "moe", "moe_intermediate_size": width} for width in (1280, 2688)]
    config = {"model_type": "nemotron_h_puzzle", "layers_block_type": ["moe", "moe"], "block_configs": blocks, "hidden_size": 64}
    sizes = {"moe_latent_size": 32, "n_routed_experts": 2, "moe_shared_expert_intermediate_size": 48, "vocab_size": 50}
    weights = find_model({**config, **sizes, "num_attention_heads": 4, "n_groups": 1}).weights
    assert [weights[f"model.layers.{layer}.mixer.experts.1.up_proj.weight"].shape for layer in range(2)] == [(1280, 32), (2688, 32)]


def test_a_bias_has_only_the_output_features():
    assert one_weight("mlp.down", name="model.layers.*.x.bias").shape == ("hidden",)


@pytest.mark.parametrize(
    "written, split",
    [
        ("column", COLUMN), ("row", ROW), ("vocabulary", VOCABULARY), ("replicate", REPLICATE), ("{heads: heads}", heads("heads")),
        ("{heads: kv_heads, copies: true}", heads("kv_heads", copies=True)),
    ],
)  # fmt: skip
def test_a_new_role_has_a_split(written, split):
    weight = one_weight(f"{{role: my.own, split: {written}, shape: [heads, hidden]}}")
    assert (weight.role, weight.split) == ("my.own", split)


@pytest.mark.parametrize(
    "written, name",
    [
        ("model.layers.*.mlp.experts.*.w.weight", "model.layers.{layer}.mlp.experts.{expert}.w.weight"),
        ("blocks_{layer}.w.weight", "blocks_{layer}.w.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_a_star_is_the_layers_number_and_a_second_one_the_experts(written, name):
    text = HEAD.replace("layers:", "experts: num_experts\n  layers:")
    assert declared(f"{text}weights:\n  {written}: mlp.norm\nsparse_layers: all\n").weights[0].name == name


def test_experts_belong_to_sparse_layers_which_must_be_declared():
    text = HEAD.replace("layers:", "experts: num_experts\n  layers:") + "weights:\n  a.*.b.*.weight: mlp.norm\n"
    with pytest.raises(
        RequestError,
        match=r"a\.\*\.b\.\*\.weight: it belongs to a sparse layer, and the sparse layers are not.*`sparse_layers: all`",
    ):
        declared(text)


SHARED = "layer_sets: {hybrid: {list: kinds, entries: hybrid}}\nshared_blocks: {layers: hybrid, count: blocks}\n"


@pytest.mark.parametrize(
    "text, error",
    [
        ("weights: {a.*.weight: {role: mlp.norm, layers: shared_block}}\n", "the layers that share blocks are not declared"),
        (SHARED + "weights: {'a.{layer}.{use}.weight': mlp.norm}\n", "counts the uses of a shared block, and the weight is in none"),
        (SHARED.replace("layers: hybrid", "layers: other") + "weights: {a.weight: head}\n", "no set of layers is called 'other'"),
        (SHARED.replace(", count: blocks", "") + "weights: {a.weight: head}\n", "`count` the config's key for their number"),
    ],
)
def test_shared_blocks_need_layers_a_number_and_a_place(text, error):
    with pytest.raises(RequestError, match=error):
        declared(HEAD + text)


@pytest.mark.parametrize("tied, uses", [(True, {1: [0, 2], 2: [1]}), (False, {1: [0, 2], 2: [1], 4: [0, 2]})])
def test_a_shared_block_has_a_weight_for_each_use_and_other_names_in_other_layers(tied, uses):
    text = (
        SHARED.replace("blocks}", "blocks, when: tied}") + "weights: {'a.{layer}.{use}.weight': {role: mlp.norm, layers: shared_block}}\n"
    )
    kinds = ["m", "hybrid", "hybrid", "m", "hybrid"]
    model = Model(declared(HEAD + text), {**CONFIG, "num_hidden_layers": 5, "kinds": kinds, "blocks": 2, "tied": tied})
    assert list(model.weights) == [f"a.{layer}.{use}.weight" for layer, numbers in uses.items() for use in numbers]
    assert model.aliases == ({"a.4.0.weight": "a.1.0.weight", "a.4.2.weight": "a.1.2.weight"} if tied else {})


def test_the_only_head_and_embedding_are_those_that_a_config_ties():
    text = HEAD + "weights:\n  a.in.weight: embedding\n  a.out.weight: head\n"
    assert declared(text).tied == ("a.out.weight", "a.in.weight")
    assert declared(text + "tied: {head: b.weight, embedding: a.in.weight}\n").tied == ("b.weight", "a.in.weight")
    more = "language: 2\nmodel_type: m\nextends: llama\nwithout: {}\nweights: {}\n".format
    assert declared(more("model.embed*", "{a.in.weight: embedding}")).tied == ("lm_head.weight", "a.in.weight")
    assert declared(more("lm_head.*", "{a.out.weight: head}")).tied == ("a.out.weight", "model.embed_tokens.weight")
    assert declared(more("lm_head.*", "{}")).tied == ("lm_head.weight", "model.embed_tokens.weight")
    with pytest.raises(RequestError, match=r"2 weights are heads and 1 are embeddings.*`tied:"):
        declared(text + "  b.out.weight: head\n")


# What is wrong -> what the message says. Lines are counted in the whole file.
WRONG = {
    "weights:\n  a.weight: {rolle: head}\n": r"line 13: weights > a\.weight > rolle: there is no key 'rolle' here\. The keys are role",
    "wheights: {}\n": r"line 12: wheights: there is no key 'wheights'",
    "weights:\n  a.weight: hed\n": r"line 13: weights > a\.weight: there is no role 'hed'\. Did you mean head\? .*add `split:` with",
    "weights:\n  a.weight: {role: '?'}\n": r'line 13: weights > a\.weight > role: a "\?" marks an open question here\..*not guessed',
    "weights:\n  a.weight: {role: head, shape: [vocap, hidden]}\n": r"line 13: .*shape > 0: no dimension is called 'vocap'.*are vocab",
    "weights:\n  a.weight: {role: head, shape: [vocab % 2, hidden]}\n": r"expected a sum of products .*, found 'vocab % 2'",
    "weights:\n  a.weight: {role: head, shape: [vocab / 0, hidden]}\n": r"expected a sum of products .*, found 'vocab / 0'",
    "weights:\n  a.weight: {role: head, shape: [2.5, hidden]}\n": r"expected a sum of products .*, found 2\.5",
    "weights:\n  a.weight: {role: head, shape: [1, 1, 1, 1, 1, 1]}\n": r"expected at most 5 axes, found 6",
    "weights:\n  a.weight: {role: router}\n": r"line 13: .*called 'experts'\. The usual shape of router is \[experts, hidden\]; `shape:`",
    "weights:\n  a.table: embedding\n": r"it has no `shape`, and none follows from its role and name",
    "weights:\n  a.weight: {shape: [hidden]}\n": r"it has neither `role` nor `fuses`",
    "weights:\n  a.weight: 3\n": r"line 13: weights > a\.weight: expected a mapping of keys to values, found 3",
    "weights:\n  a.weight:\n": r"expected a mapping of keys to values, found nothing",
    "weights:\n  a.weight: {role: attention.qkv}\n": r"attention\.qkv is several roles in one weight\. Write `fuses: \[attention\.q, att",
    "weights:\n  a.weight: {fuses: [attention.q]}\n": r"fuses: a fused weight has at least two roles\. Write `role:`",
    "weights:\n  a.weight: {fuses: [mlp.gate, mlp.gate]}\n": r"fuses > 1: mlp\.gate occurs twice",
    "weights:\n  a.weight: {fuses: [mlp.gate, my.own]}\n": r"the number of rows of my\.own is not known\. Write `fuses: \{my\.own: ROWS",
    "weights:\n  a.weight: {fuses: {mlp.gate: 3, my.own: 4}, split: row}\n": r"split: the role mlp\.gate has a split already",
    "weights:\n  a.weight: {fuses: [mlp.gate, mlp.up], role: mlp.gate}\n": r"role: a fused weight has the roles in `fuses`",
    "weights:\n  a.weight: {fuses: [mlp.gate, mlp.up], interleaved_by: groups}\n": r"interleaved_by: no dimension is called 'groups'",
    "weights:\n  a.weight: {fuses: [mlp.gate, mlp.up], interleaved_by: 2 * heads}\n": r"interleaved_by: expected a.*, found '2 \* heads'",
    "weights:\n  a.weight: {fuses: [mlp.gate, mlp.down]}\n": r"mlp\.gate and mlp\.down have different input features\. Add `shape:`",
    "weights:\n  a.weight: {role: head, interleaved_by: heads}\n": r"interleaved_by: only the roles of a fused weight alternate",
    "weights:\n  a.weight: {role: head, split: row}\n": r"split: the role head has a split already",
    "weights:\n  a.weight: {role: my.own, split: diagonal, shape: [hidden]}\n": r"split: expected one of column, row.*found 'diagonal'",
    "weights:\n  a.weight: {role: my.own, split: {copies: true}, shape: [hidden]}\n": r"split: it does not name the dimension",
    "weights:\n  a.weight: {role: my.own, split: {heads: groups}, shape: [hidden]}\n": r"split > heads: no dimension is called 'groups'",
    "weights:\n  a.weight: {role: head, transposed: 1}\n": r"transposed: expected true or false, found 1",
    "weights:\n  a.weight: {role: head, when: no}\n": r"when: expected a key of the config.*, found False; put it into quotes",
    "weights:\n  a.*.weight: {role: mlp.norm, layers: some}\n": r"layers is called 'some'\. The sets are dense, sparse, mtp, shared_block;",
    "weights:\n  a.*.weight: {role: mlp.norm, layers: 3}\n": r"layers: expected a set of layers, or `not` and a set of layers, found 3",
    "weights:\n  a.weight: head\nlayer_sets: {dense: all}\n": r"a set of layers cannot be called 'dense'",
    "weights:\n  a.weight: head\nlayer_sets: {x: {list: y}}\n": r"`list` names a list of the config and `entries` which of its entries",
    "weights:\n  a.weight: {role: mlp.up, stacked: true}\n": r"no dimension is called 'experts'",
    "weights:\n  a.weight: {role: mlp.up, stacked: shared}\n": r"no dimension is called 'shared'",
    "weights:\n  a.weight: {role: mlp.up, stacked: 2}\n": r"stacked: expected true, or the dimension that counts the experts, found 2",
    "weights:\n  a.{hidden}.*.weight: mlp.norm\n": r"it is not clear which number each \* stands for",
    "weights:\n  a.{hidden}.{layer}.weight: mlp.norm\n": r"a name that counts a dimension cannot contain the number of a layer",
    "weights: {a.weight: head}\nrenamed: {a: b}\n": r"line 13: renamed: `renamed` is about the weights of the model that `extends:` names",
    "weights:\n  a.weight: {role: head, layers: dense}\n": r"`layers: dense` needs the number of the layer in the name",
    "weights:\n  a.*.weight: {role: mlp.norm, layers: sparse}\n": r"line 13: weights > a\.\*\.weight: .*sparse layers are not declared",
    "weights:\n  a.*.weight: {role: mlp.norm, layers: mtp}\n": r"number of layers for multi-token prediction is not .*Add `mtp_layers:`",
    "weights:\n  a.*.b.*.weight: mlp.norm\n": r"contains the number of an expert, and no dimension is called experts",
    "weights:\n  a.*.b.*.c.*.weight: mlp.norm\n": r"it is not clear which number each \* stands for.*Write \{layer\} and \{expert\}",
    "weights:\n  a.x*.weight: mlp.norm\n": r"it is not clear which number each \* stands for",
    "weights:\n  a.{layer}.*.weight: mlp.norm\n": r"it is not clear which number each \* stands for",
    "weights:\n  a.{level}.weight: mlp.norm\n": r"cannot contain \{level\} here\. It may contain \{layer\}, \{expert\} or a dimension",
    "weights:\n  a.{layer}.{layer}.weight: mlp.norm\n": r"a name cannot contain \{layer\} here",
    "weights:\n  a b.weight: mlp.norm\n": r"this is not the name of a weight",
    "weights:\n  a.*.weight: mlp.norm\n  a.0.weight: mlp.norm\n": r"one tensor could have this name and a\.0\.weight",
    "weights:\n  a.*.weight: [mlp.norm, attention.norm]\n": r"could have this name and .*name the layers or the condition of each",
    "weights:\n  a.*.weight: mlp.norm\n  a.{layer}.weight: mlp.norm\n": r"one tensor could have this name and a\.\{layer\}\.weight",
    "weights:\n  a.weight: head\n  a.weight: head\n": r"line 14: the key 'a\.weight' occurs twice",
    "weights: {}\n": r"my\.yaml: it declares no weights",
    "weights: [a.weight]\n": r"line 12: weights: expected a mapping of keys to values, found a list",
    "weights: {a.weight: head}\ntied: {head: a.weight}\n": r"line 13: tied: it does not name the embedding",
    "weights: {a.weight: head}\ntied: {head: a.weight, embedding: b.weight}\n": r"embedding: no weight is called 'b\.weight'",
    "weights: {a.weight: head}\ndropped: {b.weight: ''}\n": r"dropped > b\.weight: expected the reason .*, found ''",
    "weights: {a.weight: head}\nsparse_layers: some\n": r"line 13: sparse_layers: .*found 'some'\. The keys are when, list, entries",
    "weights: {a.weight: head}\nsparse_layers: {offset: -1}\n": r"sparse_layers > offset: expected a whole number from 0 on, found -1",
    "weights: {a.weight: head}\nmtp_layers: 2\n": r"mtp_layers: expected a key of the config, found 2",
    "weights: {a.weight: head}\ndefaults: {x: {y: 1}}\n": r"defaults > x: expected true, false, .*, found a mapping",
    "weights: {a.weight: head}\nvocabulary_multiple: 0\n": r"vocabulary_multiple: expected a whole number from 1 on, found 0",
    "weights: {a.weight: head}\nquantized_as: {mxfp4: {quant_method: mx4}}\n": r"quantized_as > mxfp4: it is no quantization_config",
    "weights: {a.weight: head}\nwithout: '*'\n": r"line 13: without: `without` is about the weights of the model that `extends:` names",
    "extends: lama\n": r"line 12: extends: no model is declared as 'lama'\. `reshard architectures` lists",
    "extends: llama\nwithout: ['*.mlp.*', '*.mpl.*']\n": r"line 13: without > 1: no weight of llama has a name like '\*\.mpl\.\*'",
}  # fmt: skip


@pytest.mark.distinct
@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_with_a_declaration_is_one_paragraph_with_its_line(text):
    with pytest.raises(RequestError) as error:
        declared(HEAD + text)
    assert re.search(WRONG[text], str(error.value)), str(error.value)
    assert str(error.value).startswith("my.yaml") and "\n" not in str(error.value)


WRONG_DIMENSIONS = {
    "{hidden: hidden_size}": r"no dimension is called layers\. Add it under `dimensions`, such as `layers: num_hidden_layers`",
    "{layers: {keys: n, optional: true}}": r"dimensions > layers: layers cannot be optional",
    "{layers: n, Hidden: n}": r"dimensions > Hidden: the name of a dimension is a word in lower case",
    "{layers: n, hidden: {}}": r"dimensions > hidden: it has neither `keys` nor `default`",
    "{layers: n, hidden: {default: wide / 2}, wide: n}": r"dimensions > hidden: no dimension is called 'wide'.*the dimensions before it",
    "{layers: n, a: {keys: n, optional: true}, b: {default: a}}": r"dimensions > b: the dimension a is optional",
    "{layers: n, hidden: {keys: 3}}": r"keys: expected a key of the config, found 3",
    "{layers: n, hidden: [a, [b]]}": r"hidden > 1: expected a key of the config, found a list",
    "{layers: n, hidden: {default: [a]}}": r"default: expected an expression of dimensions, found a list",
    "{layers: 0}": r"dimensions > layers: expected a whole number from 1 on, found 0",
    "3": r"dimensions: expected a mapping of keys to values, found 3",
}


@pytest.mark.parametrize("dimensions", WRONG_DIMENSIONS)
def test_what_is_wrong_with_dimensions_is_reported(dimensions):
    with pytest.raises(RequestError, match=WRONG_DIMENSIONS[dimensions]):
        extending(f"dimensions: {dimensions}\nweights: {{a.weight: {{role: head, shape: [3]}}}}\n")


def test_a_role_needs_the_dimension_that_splits_it():
    with pytest.raises(RequestError, match=r"the role attention\.k by kv_heads, and no dimension is called that\. Add `kv_heads:`"):
        extending("dimensions: {layers: 2}\nweights: {a.weight: {role: attention.k, shape: [4]}}")


@pytest.mark.distinct
@pytest.mark.parametrize("with_libyaml", [True, False])
@pytest.mark.parametrize(
    "content, what",
    [
        (b"model_type: m\nx: &a [1]\ny: *a\n", "line 2: &a is an anchor"),
        (b"model_type: m\nx: &a 1\n", "line 2: &a is an anchor"),
        (b"model_type: m\ny: *a\n", r"line 2: (\*a refers to another place|this is not valid YAML)"),
        (b"model_type: !!python/object/apply:os.system ['true']\n", "line 1: .*os.system is a tag"),
        (b"model_type: !!str m\n", "line 1: .*str is a tag"),
        (b"a: {b: {c: {d: {e: {f: {g: {h: {i: 1}}}}}}}}\n", "more than 8 levels"),
        (b"[" * 200_000, "more than 8 levels"),
        (b"a: " + b"x" * (1 << 18), "at most 262,144"),
        (b"a: 1\n---\nb: 2\n", "the file contains 2 documents"),
        (b"", "the file contains no documents"),
        (b"a: {b\n", "line 2: this is not valid YAML"),
        (b"weights:\n  a: ?\n", r"line 2: this is not valid YAML.*a \? alone, need quotes"),
        (b"*.x: 1\n", "line 1: this is not valid YAML.*quotes"),
        (b"\xff\xfe\x00", "my.yaml: this is not valid YAML"),
        (b"a: \x00\n", "my.yaml: this is not valid YAML"),
        (b"1: 2\n", "line 1: the key 1 is not a word"),
        (b"a: 1\nb: 2\na: 3\n", "line 3: the key 'a' occurs twice"),
        (b"{a}: 2\n", "line 1: this key is a list or a mapping"),
        (b"a: 2024-01-01\n", "YAML takes '2024-01-01' for a timestamp"),
        (b"<<: {a: 1}\n", "YAML takes '<<' for a merge"),
        (b"a: " + b"9" * 5000, "is not a number"),
        (b"3\n", "expected a mapping of keys to values, found 3"),
    ],
)
def test_only_plain_data_is_read(content, what, with_libyaml, monkeypatch):
    if with_libyaml and not yaml.__with_libyaml__:
        pytest.skip("PyYAML was built without libyaml")
    monkeypatch.setattr(yaml, "__with_libyaml__", with_libyaml)
    with pytest.raises(RequestError, match=what):
        declared(content.decode("latin-1")) if content.isascii() else parse_declaration(content, "my.yaml", find_declaration)


@pytest.mark.parametrize("model_type", built_in_model_types())
def test_both_parsers_read_the_same_document(model_type, monkeypatch):
    content = declaration_text(model_type).encode()
    documents = []
    for with_libyaml in {yaml.__with_libyaml__, False}:
        monkeypatch.setattr(yaml, "__with_libyaml__", with_libyaml)
        documents.append(parse(content, "my.yaml"))
    assert all(document == documents[0] for document in documents)
    assert documents[0].value == yaml.safe_load(content) and documents[0].lines["model_type",] > documents[0].lines["language",]


# ---- a declaration with the numbers of a config ----


def test_fused_rows_that_are_not_the_whole_tensor_are_refused_with_the_numbers():
    rows = "{attention.q: heads * head_dim, attention.k: kv_heads * head_dim}"
    text = HEAD + f"weights:\n  a.weight: {{fuses: {rows}, shape: [3 * hidden, hidden]}}\n"
    with pytest.raises(RequestError, match=r"a\.weight: it has 48 output features, and the roles fused in it have 16 \+ 8"):
        _ = Model(declared(text), CONFIG).weights
    text = HEAD + "weights:\n  a.weight: {fuses: [mlp.gate, mlp.up], interleaved_by: vocab}\n"
    with pytest.raises(RequestError, match=r"24 \+ 24 in 50 equal runs each, one per vocab"):
        _ = Model(declared(text), CONFIG).weights


@pytest.mark.parametrize(
    "line, config, what",
    [
        ("sparse_layers: {first: first_one}", {"first_one": "two"}, "gives 'two' for first_one; a whole number"),
        ("sparse_layers: {step: every}", {"every": [1]}, r"gives \[1\] for every; a whole number"),
        ("sparse_layers: {dense: those}", {"those": 3}, "gives 3 for those; a list"),
        ("mtp_layers: more", {"more": "one"}, "gives 'one' for more; a whole number"),
    ],
)
def test_a_config_with_another_kind_of_value_under_a_key_is_refused(line, config, what):
    architecture = declared(f"{HEAD}{line}\nweights:\n  a.*.weight: {{role: mlp.norm, layers: dense}}\n")
    with pytest.raises(RequestError, match=what):
        _ = Model(architecture, {**CONFIG, **config}).weights


def test_a_dimension_that_is_not_declared_is_asked_for_by_name():
    model = Model(extending("dimensions: {layers: 2}\nweights: {a.weight: {role: final_norm, shape: [4]}}"), CONFIG)
    with pytest.raises(RequestError, match=r"The declaration of mymodel has no dimension 'heads'"):
        _ = model.dimensions["heads"]
    assert "heads" not in model.dimensions and model.dimensions.get("heads") is None


# ---- by name or by file ----


def test_a_name_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("qwen2").write_text("language: 2\nmodel_type: mine\nextends: llama\n")
    assert named_architecture("qwen2") is find_architecture("qwen2")
    assert named_architecture("./qwen2").model_type == "mine" and named_architecture("./qwen2").declared_in == "./qwen2"
    assert named_architecture(Path("qwen2")).model_type == "mine"
    with pytest.raises(RequestError, match=r"`architecture=my`: no model is declared by that name\..*Known: .*\d+ more; .*\./my\.yaml"):
        named_architecture("my")
    with pytest.raises(RequestError, match=r"here is no file or directory 'my\.yaml'"):
        named_architecture("my.yaml")
    with pytest.raises(RequestError, match="this is a directory"):
        named_architecture("./")


def test_every_declared_model_has_a_text():
    for model_type in known_model_types():
        assert f"model_type: {model_type}" in declaration_text(model_type)
    with pytest.raises(RequestError, match=r"No model is declared as 'lama'\. Did you mean llama\? Known: .*lists all"):
        declaration_text("lama")


# ---- forms of a dimension ----


@pytest.mark.parametrize(
    "config, kv_heads",
    [
        ({"num_attention_heads": 8, "num_kv_heads": 2, "new_decoder_architecture": True}, 2),
        ({"num_attention_heads": 71, "num_kv_heads": 71}, 1),
        ({"num_attention_heads": 71, "num_kv_heads": 71, "multi_query": False}, 71),
    ],
)
def test_a_dimension_has_another_form_where_a_key_is_not_set(config, kv_heads):
    sizes = {"vocab_size": 10, "hidden_size": 8 * 71, "num_hidden_layers": 1}
    assert Model(find_architecture("falcon"), {**sizes, **config}).dimensions["kv_heads"] == kv_heads


def test_a_form_of_a_dimension_needs_a_condition_and_another_form():
    with pytest.raises(RequestError, match=r"dimensions > rank: `when` says for which models .*Write both"):
        extending("extends: llama\ndimensions: {rank: {keys: lora, when: has_lora}}")
    with pytest.raises(RequestError, match="no dimension is called 'width'"):
        extending("extends: llama\ndimensions: {rank: {keys: lora, when: has_lora, otherwise: {default: width}}}")


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"layer_types": ["conv", "full_attention", "conv"]}, {1}),
        ({"full_attn_idxs": [0, 2]}, {0, 2}),
        ({"layer_types": ["full_attention", "conv", "conv"], "full_attn_idxs": [2]}, {0}),
    ],
)
def test_a_set_of_layers_comes_from_a_list_of_the_config(config, expected):
    sizes = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "conv_L_cache": 3}
    model = Model(find_architecture("lfm2"), {**sizes, "intermediate_size": 10, "block_multiple_of": 4, **config})
    assert model.layer_sets["full_attention"] == expected == set(range(3)) - model.layer_sets["not full_attention"]
    assert model.dimensions["intermediate"] == 8  # 20 / 3, rounded down to 6, up to a multiple of 4


def test_a_weight_that_replaces_removed_ones_takes_their_place():
    names = [weight.name.removeprefix("model.layers.{layer}.") for weight in find_architecture("deepseek_v3").weights]
    assert names.index("self_attn.o_proj.weight") < names.index("mlp.gate_proj.weight") < names.index("input_layernorm.weight")


def test_a_bias_comes_after_its_weight():
    names = [weight.name for weight in find_architecture("nemotron").weights]
    assert names.index("model.layers.{layer}.input_layernorm.bias") == names.index("model.layers.{layer}.input_layernorm.weight") + 1


@pytest.mark.parametrize("last, sparse", [(-1, {1, 2, 3}), (2, {1, 2}), (9, {1, 2, 3})])
def test_the_last_sparse_layer_may_be_in_the_config(last, sparse):
    config = {
        **CONFIG, "num_hidden_layers": 4, "moe_num_experts": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 1,
        "moe_layer_end_index": last,
    }  # fmt: skip
    assert Model(find_architecture("ernie4_5_moe"), config).sparse_layers == sparse


# ---- layers that differ ----

PER_LAYER = HEAD.replace(
    "heads: num_attention_heads",
    'heads: {keys: ["per_layer.{layer}.heads", num_attention_heads], in: {wide: {keys: wide_heads, default: 2 * heads}}}',
).replace("intermediate: intermediate_size", 'intermediate: ["intermediate_size.{layer}", intermediate_size]')
SETS = "layer_sets: {wide: {list: layer_types, entries: wide, when: has_wide}}\n"
WEIGHTS = """weights:
  model.embed_tokens.weight: embedding
  model.layers.*.q.weight: attention.q
  model.layers.*.up.weight: mlp.up
  lm_head.weight: head
"""
DIFFERENT = {**CONFIG, "num_hidden_layers": 3, "head_dim": 4, "layer_types": ["plain", "wide", "plain"], "has_wide": True}


def rows(config, name, text=PER_LAYER + WEIGHTS + SETS):
    model = Model(declared(text), config)
    return [model.weights[f"model.layers.{layer}.{name}.weight"].shape[0] for layer in range(3)]


def test_a_dimension_has_another_form_in_the_layers_of_a_set():
    assert rows(DIFFERENT, "q") == [16, 32, 16]
    assert rows({**DIFFERENT, "wide_heads": 6}, "q") == [16, 24, 16]
    assert rows({**DIFFERENT, "has_wide": False}, "q") == [16, 16, 16], "the set is empty"
    model = Model(declared(PER_LAYER + WEIGHTS + SETS), DIFFERENT)
    assert [model.dimensions_in(layer)["heads"] for layer in (None, 0, 1, 2)] == [4, 4, 8, 4]
    assert model.dimensions_in(0) is model.dimensions_in(2) is model.dimensions
    assert [kind.layers for kind in model.layer_kinds] == [(0, 2), (1,)]


def test_the_heads_of_a_layer_decide_how_ranks_share_it():
    parts = [
        part for part in Model(declared(PER_LAYER + WEIGHTS + SETS), {**DIFFERENT, "wide_heads": 6}).parts() if part.role == "attention.q"
    ]
    assert [problem(part, 4, SplitRules()) for part in parts] == [None, "4 ranks do not divide its 6 attention heads", None]


def test_a_key_can_name_the_entry_of_each_layer():
    assert rows({**DIFFERENT, "intermediate_size": [8, 16]}, "up") == [8, 16, 16], "a layer beyond the list is like the last one"
    assert Model(declared(PER_LAYER + WEIGHTS + SETS), {**DIFFERENT, "intermediate_size": [8, 16, 12]}).dimensions["intermediate"] == 16
    assert rows({**DIFFERENT, "has_wide": False, "per_layer": {"2": {"heads": 8}}}, "q") == [16, 16, 32]


def test_sets_of_layers_at_the_end_and_from_a_text():
    text = (
        HEAD
        + WEIGHTS.replace("mlp.up", "{role: mlp.up, layers: last}")
        + "layer_sets: {last: {at_end: shared}, listed: {indices: numbers}}\n"
    )
    sets = Model(declared(text), {**DIFFERENT, "shared": 2, "numbers": "0, 2"}).layer_sets
    assert (sets["last"], sets["listed"]) == ({1, 2}, {0, 2})
    assert Model(declared(text), DIFFERENT).layer_sets["last"] == frozenset()


def test_conditions_compare_values_and_expressions_subtract():
    weight = "{role: mlp.new, split: replicate, shape: [vocab - 2 * hidden], when: vision.kind is rms}"
    text = f"{HEAD}weights:\n  a.weight: {weight}\n  b.weight: {weight.replace('when: ', 'when: not ')}\n"
    assert {name: w.shape for name, w in Model(declared(text), {**CONFIG, "vision": {"kind": "rms"}}).weights.items()} == {
        "a.weight": (18,)
    }
    assert list(Model(declared(text), CONFIG).weights) == ["b.weight"]
    with pytest.raises(RequestError, match="'vocab - 2 \\* hidden' is below 0"):
        _ = Model(declared(text), {**CONFIG, "vocab_size": 20}).weights


def test_dimensions_take_the_defaults_of_the_declaration():
    text = (
        HEAD
        + WEIGHTS.replace("model.layers.*.q.weight: attention.q\n  model.layers.*.up.weight: mlp.up\n  ", "")
        + "defaults: {vocab_size: 70}\n"
    )
    without = {key: value for key, value in CONFIG.items() if key != "vocab_size"}
    assert [Model(declared(text), config).dimensions["vocab"] for config in (CONFIG, without)] == [50, 70]


@pytest.mark.parametrize(
    "written, message",
    [
        ("heads: {keys: n, in: {none: m}}", "no set of layers is called 'none'"),
        ("layers: {keys: n, in: {sparse: m}}", "layers is the same in all layers"),
        ('layers: "n.{layer}"', "layers is the same in all layers"),
    ],
)
def test_what_is_wrong_with_the_forms_of_a_dimension_is_reported(written, message):
    name = written.partition(":")[0]
    text = "\n".join(f"  {written}" if line.startswith(f"  {name}:") else line for line in HEAD.splitlines())
    with pytest.raises(RequestError, match=message):
        declared(text + "\n" + WEIGHTS)


# ---- a language model that the config names ----


def test_the_config_names_the_language_model_inside_a_declared_model():
    inner = dict(CONFIG)
    vision = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "image_size": 4, "patch_size": 2}
    models = {
        kind: find_model({"model_type": "internvl", "text_config": {**inner, "model_type": kind}, "vision_config": vision})
        for kind in ("qwen2", "qwen3")
    }
    names = {kind: {name for name in model.weights if ".layers.0.self_attn." in name} for kind, model in models.items()}
    assert {name.rpartition("self_attn.")[2] for name in names["qwen2"] - names["qwen3"]} == {"q_proj.bias", "k_proj.bias", "v_proj.bias"}
    assert {name.rpartition("self_attn.")[2] for name in names["qwen3"] - names["qwen2"]} == {"q_norm.weight", "k_norm.weight"}
    unnamed = find_model({"model_type": "internvl", "text_config": inner, "vision_config": vision})
    assert list(unnamed.weights) == list(models["qwen2"].weights), "the usual one, if the config names none"
    assert models["qwen3"].quirks_of("vllm").unsupported == find_architecture("qwen3").engines["vllm"].unsupported
    config = {"model_type": "internvl", "text_config": {**inner, "model_type": "mystery"}}
    assert find_model(config) is None
    assert "rchitecture 'internvl' is declared, its language model 'mystery' is not" in str(unknown_architecture(config))


# ---- towers ----

TOWER = """language: 2
tower: mytower
dimensions:
  vision_layers: depth
  vision_hidden: {keys: width, default: 4}
  vision_ratio: {keys: ratio, when: gated, otherwise: {default: 2}}
weights:
  inner.blocks.{vision_layers}.up.weight: {role: vision.up, shape: [vision_ratio * vision_hidden, vision_hidden]}
  inner.gate: {role: vision.whole, shape: [vision_hidden], when: gated and not plain or kind is old}
  head: {role: vision.whole, shape: [vision_hidden]}
carried: {inner.pooler.*: not used}
defaults: {depth: 3}
engines: {vllm: {every_stage: [vision]}}
"""
AROUND = """language: 2
model_type: mymodel
extends: {text_config: llama, vision_config: mytower}
renamed: {model: language_model.model, lm_head: language_model.lm_head}
towers:
  newline: {role: vision.whole, shape: [hidden]}
  tower: {tower: vision_config}
  projector.weight: {role: vision.whole, shape: [hidden, vision_hidden]}
"""


def found(name, named=()):
    if name == "around":
        return around(AROUND + "engines: {vllm: {every_stage: [embedding]}}\n", dict(named))
    return declared(TOWER) if name == "towers/mytower" else None if name.startswith("towers/") else find_architecture(name)


def around(text=AROUND, named=None):
    return parse_declaration(text.encode(), "my.yaml", found, named)


def test_a_tower_has_the_names_and_keys_of_its_place():
    model = around()
    assert [weight.name for weight in model.weights][:5] == [
        "newline", "tower.inner.blocks.{vision_layers}.up.weight", "tower.inner.gate", "tower.head", "projector.weight",
    ]  # fmt: skip
    assert model.weights[2].when == "vision_config.gated and not vision_config.plain or vision_config.kind is old"
    assert model.weights[-1].name == "language_model.lm_head.weight" and model.text_config == "text_config"
    assert model.carried == {r"tower\.inner\.pooler\..*": "not used"} and model.chosen == {
        "text_config": "llama",
        "vision_config": "mytower",
    }
    for inner, shape, blocks in (({}, (8, 4), 3), ({"depth": 2, "width": 6, "gated": True, "ratio": 5}, (30, 6), 2)):
        weights = Model(model, {"text_config": CONFIG, "vision_config": inner}).weights
        assert weights["tower.inner.blocks.0.up.weight"].shape == shape and f"tower.inner.blocks.{blocks}.up.weight" not in weights
        assert ("tower.inner.gate" in weights) is bool(inner)


def test_a_module_of_a_tower_can_be_placed_alone():
    model = around(AROUND.replace("{tower: vision_config}", "{tower: vision_config, inside: inner}"))
    assert [weight.name for weight in model.weights][1:3] == ["tower.blocks.{vision_layers}.up.weight", "tower.gate"]
    assert model.carried == {r"tower\.pooler\..*": "not used"}


def test_parts_are_chosen_by_the_config_unless_they_are_the_only_ones():
    assert any("q_norm" in weight.name for weight in around(named={"text_config": "qwen3"}).weights)
    only = around(AROUND.replace("text_config: llama", "text_config: {only: llama}"), {"text_config": "qwen3"})
    assert not any("q_norm" in weight.name for weight in only.weights) and only.chosen == {"vision_config": "mytower"}
    with pytest.raises(RequestError, match="line 3: extends > vision_config: no tower is declared as 'other'"):
        around(named={"vision_config": "other"})
    with pytest.raises(RequestError, match="no tower is declared as 'llama'"):
        around(AROUND.replace("mytower", "llama"))


def test_an_engine_counts_if_it_was_compared_with_every_part():
    rules = "engines: {vllm: {since: '0.32', every_stage: [embedding]}, sglang: {}}\n"
    assert around(AROUND + rules).engines.keys() == {"vllm"}
    assert around(AROUND + rules).engines["vllm"].every_stage == {"vision", "embedding"}
    of_class = "engines: {vllm: {of_class: {Other: {every_stage: [head]}}}}\n"
    assert around(AROUND + of_class).engines["vllm"].of_class["Other"].every_stage == {"vision", "head"}


EXTENDS = """language: 2
model_type: other
extends: around
defaults: {text_config.model_type: qwen3}
engines: {vllm: {every_stage: [head]}}
"""


def test_a_model_that_extends_one_with_towers_has_its_parts():
    model = around(EXTENDS)
    assert model.chosen == {"text_config": "qwen3", "vision_config": "mytower"} and model.text_config == "text_config"
    assert any("q_norm" in weight.name for weight in model.weights)
    assert not any("q_norm" in weight.name for weight in around(EXTENDS, {"text_config": "llama"}).weights)
    # The tower's rules are taken over, those of the class around it are not.
    assert model.engines["vllm"].every_stage == {"vision", "head"}
    like = around(EXTENDS.replace("engines: {vllm: {every_stage: [head]}}", "like: around"), {"text_config": "gemma2"})
    assert like.engines == found("around", (("text_config", "gemma2"),)).engines and like.like == "mymodel"
    assert any("pre_feedforward_layernorm" in weight.name for weight in like.weights)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("  tower: {tower: vision_config}\n", "", "each other one is a tower, which needs a place"),
        ("{text_config: llama, vision_config: mytower}", "llama", "`extends` does not say which tower"),
        ("{text_config: llama, vision_config: mytower}", "{text_config: llama}", "`extends` names no tower for vision_config"),
        ("  newline", "  other: {tower: vision_config}\n  newline", "the tower of vision_config has two places"),
        ("{tower: vision_config}", "{tower: vision_config, inside: nothing}", "no weight of mytower is in nothing"),
        ("{tower: vision_config}", "{tower: vision_config, of: inner}", "there is no key 'of' here"),
        ("text_config: llama", "text_config: {just: llama}", "there is no key 'just' here"),
        ("text_config: llama, ", "", "`renamed` is about the weights of the model"),
    ],
)
def test_what_is_wrong_with_parts_is_reported(old, new, message):
    assert old in AROUND
    with pytest.raises(RequestError, match=message):
        around(AROUND.replace(old, new))


def test_built_in_towers_are_placed_by_models_and_are_no_models():
    towers = built_in_towers()
    texts = "".join(map(declaration_text, built_in_model_types())) + "".join(declaration_text(f"towers/{name}") for name in towers)
    assert [name for name in towers if not re.search(rf"(: |only: ){name}\b", texts)] == []
    for name in towers:
        assert re.match(rf"#(.|\n)*\ntower: {name}\n", declaration_text(f"towers/{name}"))
        assert name in built_in_model_types() or declaration_text(name) == declaration_text(f"towers/{name}")
    only_towers = sorted(set(towers) - set(built_in_model_types()))
    assert not any(find_architecture(name) or find_architecture(f"towers/{name}") for name in only_towers)


def test_the_config_chooses_the_tower_inside_a_declared_model():
    config = {"model_type": "llava", "text_config": {**CONFIG, "model_type": "qwen2"}, "vision_config": {"model_type": "pixtral"}}
    assert "vision_tower.patch_conv.weight" in find_model(config).weights
    assert "vision_tower.vision_model.post_layernorm.bias" in find_model({**config, "vision_config": {}}).weights
    strange = {**config, "vision_config": {"model_type": "pixtrall"}}
    assert find_model(strange) is None
    assert "its tower 'pixtrall' (vision_config) is not" in str(unknown_architecture(strange))
    assert "Did you mean pixtral?" in str(unknown_architecture(strange))


@pytest.mark.parametrize(
    "changes, meant",
    [
        ({}, "deepseek_vl_v2"),
        ({"architectures": ["DeepseekVLV2ForCausalLM"]}, "deepseek_vl_v2"),
        ({"architectures": ["DeepseekOCRForCausalLM"]}, "deepseek_ocr"),
        ({"architectures": ["DeepseekOCR2ForCausalLM"]}, "deepseek_ocr2"),
    ],
)
def test_a_config_means_another_model_by_its_class(changes, meant):
    """The model_type of all of them is deepseek_vl_v2, and the inner config has a class, too."""
    config = {"model_type": "deepseek_vl_v2", "language_config": {"architectures": ["DeepseekV2ForCausalLM"]}, "vision_config": {}}
    assert find_model({**config, **changes}).architecture.model_type == meant


@pytest.mark.parametrize("rows, q_proj", [(0, "attention.q"), (16, "mla.q")])
def test_an_inner_config_means_another_model_too(rows, q_proj):
    """DeepSeek-VL2-Tiny has the usual attention under the model_type deepseek_v2."""
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    text = {**CONFIG, **experts, "qk_nope_head_dim": rows, "qk_rope_head_dim": rows, "q_lora_rank": None}
    for inner in (text, {"model_type": "deepseek_v2", **text}):
        model = find_model({"model_type": "deepseek_vl_v2", "language_config": inner, "vision_config": {}, "projector_config": {}})
        assert model.weights["language.model.layers.0.self_attn.q_proj.weight"].role == q_proj
    assert find_model({"model_type": "deepseek_v2", **text}).weights["model.layers.0.self_attn.q_proj.weight"].role == q_proj
    assert find_architecture("deepseek_v3").instead == {}, "it is not taken over"


def test_every_model_that_is_meant_instead_is_declared():
    others = {other for model_type in built_in_model_types() for other in find_architecture(model_type).instead}
    assert others and all(map(find_architecture, others))


def test_blocks_of_a_tower_can_be_in_sets():
    tower = "t.{blocks}.x: [{role: vision.whole, shape: [2], layers: not wide}, {role: vision.whole, shape: [9], layers: wide}]"
    sets, text = "layer_sets: {wide: {indices: wide_blocks}}", "model.embed_tokens.weight: embedding"
    made = declared(f"{HEAD}  blocks: 4\n{sets}\ntowers:\n  {tower}\nweights:\n  {text}\n")
    weights = Model(made, {**CONFIG, "wide_blocks": [1, 3]}).weights
    assert [weights[f"t.{number}.x"].shape for number in range(4)] == [(2,), (9,), (2,), (9,)], "there are two layers and four blocks"


def test_a_weight_can_have_another_shape_under_another_condition():
    both = "[{role: attention.q_norm, when: narrow}, {role: attention.q_norm, shape: [hidden], when: %s}]"
    name = "model.layers.0.q_norm.weight"
    made = declared(f"{HEAD}weights:\n  model.layers.*.q_norm.weight: {both % 'not narrow'}\n")
    assert [Model(made, {**CONFIG, "narrow": narrow}).weights[name].shape for narrow in (True, False)] == [(4,), (16,)]
    made = declared(f"{HEAD}weights:\n  model.layers.*.q_norm.weight: {both % 'wide'}\n")
    with pytest.raises(RequestError, match="it is declared twice"):
        _ = Model(made, {**CONFIG, "narrow": True, "wide": True}).weights


# ---- tables whose rows are a sum of primes, in pieces ----

PRIMES = (
    HEAD
    + """  start: first
  count: tables
  step: rounded_to
  rows: {primes: {from: start, count: count, layers: hashed}, multiple_of: step}
  parts: pieces
layer_sets: {hashed: {indices: hashed_layers}}
weights:
  model.embed_tokens.weight: embedding
  model.layers.*.table.weight: {role: my.table, split: column, shape: [rows, hidden], pieces: "piece_{parts}.weight", layers: hashed}
"""
)
HASHED = {**CONFIG, "num_hidden_layers": 4, "hashed_layers": [0, 3], "first": 100, "tables": 2, "rounded_to": 5, "pieces": 3}


def test_each_layer_takes_the_primes_that_the_layers_before_it_left():
    model = Model(declared(PRIMES), HASHED)
    rows = {weight.layer: weight.shape[0] for weight in model.weights.values() if weight.role == "my.table"}
    assert rows == {0: 205, 3: 220}  # 101 + 103 = 204; 107 + 109 = 216


def test_published_pieces_are_runs_of_rows_of_which_the_last_is_shorter():
    model = Model(declared(PRIMES), HASHED)
    shapes = {name: weight.shape[0] for name, weight in model.as_published().items() if "piece" in name}
    rows = {0: (69, 69, 67), 3: (74, 74, 72)}
    assert shapes == {f"model.layers.{layer}.table.piece_{n}.weight": rows[layer][n] for layer in rows for n in range(3)}
    assert "model.layers.0.table.weight" in model.as_published(whole=["model.layers.0.table.weight"])


def test_a_config_with_more_primes_than_any_model_has_is_refused():
    with pytest.raises(RequestError, match="tables of n-grams"):
        list(Model(declared(PRIMES), {**HASHED, "tables": 5_000}).weights)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("primes: {from: start, count: count, layers: none}", "no set of layers is called 'none'"),
        ("primes: {from: begin, count: count, layers: hashed}", "no dimension is called 'begin'"),
        ("primes: {from: start, count: count}", "a start, a count and a set of layers"),
    ],
)
def test_a_sum_of_primes_names_dimensions_and_a_set(wrong, message):
    with pytest.raises(RequestError, match=message):
        declared(PRIMES.replace("primes: {from: start, count: count, layers: hashed}", wrong))


def test_pieces_are_counted_by_a_dimension():
    with pytest.raises(RequestError, match="no dimension is called 'many'"):
        declared(PRIMES.replace("piece_{parts}", "piece_{many}"))


def test_the_config_chooses_the_parts_of_a_declaration_of_the_user(tmp_path):
    (tmp_path / "my.yaml").write_text("language: 2\nmodel_type: mine\nextends: llava\n")
    mine = read_architecture(tmp_path / "my.yaml")
    config = {"model_type": "mine", "text_config": {**CONFIG, "model_type": "qwen3"}, "vision_config": {"model_type": "pixtral"}}
    model = find_model(config, mine)
    assert "vision_tower.patch_conv.weight" in model.weights and model is find_model(config, mine)
    assert any("q_norm" in name for name in model.weights) and model.architecture.declared_in == mine.declared_in
    assert not any("q_norm" in name for name in find_model({**config, "text_config": CONFIG}, mine).weights)
