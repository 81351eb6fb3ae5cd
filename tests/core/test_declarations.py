"""A user's declaration: llama's is the built-in llama, and whatever is wrong with one is said with its line."""

import json
import re
from pathlib import Path

import pytest

from reshard.errors import RequestError
from reshard.models.declared.reader import named_architecture, parse_declaration, read_declaration
from reshard.models.lookup import find_architecture
from reshard.models.model import Model
from reshard.models.roles import SPLITS, Column, Heads, Replicate, Row, Vocabulary

LLAMA = Path(__file__).resolve().parent.parent.parent / "docs" / "llama.yaml"
HEAD = """model_type: mymodel
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
    return parse_declaration(text.encode(), "my.yaml")


def one_weight(value, name="model.layers.*.x.weight", more=""):
    return declared(f"{HEAD}weights:\n  {name}: {value}\n{more}").weights[0]


def test_the_example_in_the_documentation_is_the_built_in_llama():
    own, built_in = read_declaration(LLAMA), find_architecture("llama")
    assert (own.model_type, own.dimensions, own.weights, own.tied) == (
        built_in.model_type, built_in.dimensions, built_in.weights, built_in.tied,
    )  # fmt: skip
    assert own.declared_in == str(LLAMA) and own.family == "llama"
    for name in (
        "model.rotary_emb.inv_freq",
        "model.layers.31.self_attn.rotary_emb.inv_freq",
        "model.norm.weight",
        "model.layers.x.weight",
    ):
        assert bool(Model(own, CONFIG).reason_to_drop(name)) == bool(Model(built_in, CONFIG).reason_to_drop(name))


def test_the_example_stands_in_the_documentation_as_it_is_in_the_file():
    assert LLAMA.read_text() in (LLAMA.parent / "architectures.md").read_text()


def test_the_documentation_tells_every_role_and_its_other_example_is_one():
    from reshard.models.declared.weights import ROLES

    text = (LLAMA.parent / "architectures.md").read_text()
    assert [role for role in ROLES if f"`{role}`" not in text] == []
    examples = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    names = [weight.name for weight in declared(examples[0]).weights]
    assert "model.layers.{layer}.mlp.adapter.weight" in names and "model.layers.{layer}.mlp.up_proj.weight" not in names


def test_json_is_a_declaration_too():
    text = json.dumps({"model_type": "mymodel", "like": "qwen3"})
    assert declared(text).weights == find_architecture("qwen3").weights


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "deepseek_v3", "gpt2", "gpt_neox", "gemma2", "phi3"]
)
def test_like_alone_is_that_model_under_another_name(model_type):
    own, built_in = declared(f"model_type: mymodel\nlike: {model_type}"), find_architecture(model_type)
    assert (own.weights, own.dimensions, own.tied, own.dropped, own.sparse, own.extra_layers, own.defaults) == (
        built_in.weights, built_in.dimensions, built_in.tied, built_in.dropped, built_in.sparse, built_in.extra_layers, built_in.defaults,
    )  # fmt: skip
    assert (own.model_type, own.family) == ("mymodel", model_type)


def test_like_with_plus_and_without_is_what_the_built_in_ones_are():
    qwen2 = declared(
        "model_type: qwen2\nlike: llama\nweights:\n"
        + "".join(f"  model.layers.*.self_attn.{which}_proj.bias: attention.{which}\n" for which in "qkv")
    )
    assert qwen2.weights == find_architecture("qwen2").weights
    mixtral = declared(
        """
model_type: mixtral
like: llama
without: "*.mlp.*"
dimensions: {experts: [num_local_experts, num_experts]}
weights:
  model.layers.*.block_sparse_moe.gate.weight: router
  model.layers.*.block_sparse_moe.experts.*.w1.weight: {role: expert.gate, shape: [intermediate, hidden]}
  model.layers.*.block_sparse_moe.experts.*.w2.weight: {role: expert.down, shape: [hidden, intermediate]}
  model.layers.*.block_sparse_moe.experts.*.w3.weight: {role: expert.up, shape: [intermediate, hidden]}
sparse: all
"""
    )
    built_in = find_architecture("mixtral")
    assert (mixtral.weights, mixtral.dimensions, mixtral.sparse) == (built_in.weights, built_in.dimensions, built_in.sparse)


def test_every_role_has_a_usual_shape_or_asks_for_one():
    from reshard.models.declared.weights import ROLES, SHAPES

    assert set(SHAPES) <= set(ROLES) <= set(SPLITS)
    assert {role for role in ROLES if role not in SHAPES} == {role for role in ROLES if role.startswith("extra.")}


@pytest.mark.parametrize(
    "value, shape",
    [
        ("attention.k", ("kv_heads * head_dim", "hidden")),
        ("{role: attention.k, shape: [hidden, 3]}", ("hidden", "3")),
        ("{role: mlp.up, transposed: true}", ("hidden", "intermediate")),
        ("{holds: [mlp.gate, mlp.up]}", ("intermediate + intermediate", "hidden")),
        ("{holds: [mlp.gate, mlp.up], transposed: true}", ("hidden", "intermediate + intermediate")),
        ("{holds: {mlp.gate: 2 * hidden, mlp.up: hidden}}", ("2 * hidden + hidden", "hidden")),
    ],
)
def test_a_shape_follows_from_the_role_unless_it_is_said(value, shape):
    assert one_weight(value).shape == shape


def test_a_bias_has_only_the_output_features():
    assert one_weight("mlp.down", name="model.layers.*.x.bias").shape == ("hidden",)


@pytest.mark.parametrize(
    "said, split",
    [
        ("column", Column()), ("row", Row()), ("vocabulary", Vocabulary()), ("replicate", Replicate()), ("{heads: heads}", Heads("heads")),
        ("{heads: kv_heads, copies: true}", Heads("kv_heads", copies=True)),
    ],
)  # fmt: skip
def test_a_role_of_ones_own_says_its_split(said, split):
    weight = one_weight(f"{{role: my.own, split: {said}, shape: [heads, hidden]}}")
    assert (weight.role, weight.split) == ("my.own", split)


@pytest.mark.parametrize(
    "said, name",
    [
        ("model.layers.*.mlp.experts.*.w.weight", "model.layers.{layer}.mlp.experts.{expert}.w.weight"),
        ("blocks_{layer}.w.weight", "blocks_{layer}.w.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_a_star_is_the_layers_number_and_a_second_one_the_experts(said, name):
    text = HEAD.replace("layers:", "experts: num_experts\n  layers:")
    assert declared(f"{text}weights:\n  {said}: mlp.norm\nsparse: all\n").weights[0].name == name


def test_experts_are_of_sparse_layers_which_are_to_be_named():
    text = HEAD.replace("layers:", "experts: num_experts\n  layers:") + "weights:\n  a.*.b.*.weight: mlp.norm\n"
    with pytest.raises(
        RequestError, match=r"a\.\*\.b\.\*\.weight: it is a sparse layer's, and nothing says which.*`sparse: all` if all are"
    ):
        declared(text)


def test_the_only_head_and_embedding_are_those_that_a_config_ties():
    text = HEAD + "weights:\n  a.in.weight: embedding\n  a.out.weight: head\n"
    assert declared(text).tied == ("a.out.weight", "a.in.weight")
    assert declared(text + "tied: {head: b.weight, embedding: a.in.weight}\n").tied == ("b.weight", "a.in.weight")
    like = "model_type: m\nlike: llama\nwithout: {}\nweights: {}\n".format
    assert declared(like("model.embed*", "{a.in.weight: embedding}")).tied == ("lm_head.weight", "a.in.weight")
    assert declared(like("lm_head.*", "{a.out.weight: head}")).tied == ("a.out.weight", "model.embed_tokens.weight")
    assert declared(like("lm_head.*", "{}")).tied == ("lm_head.weight", "model.embed_tokens.weight")
    with pytest.raises(RequestError, match=r"2 weights are heads and 1 embeddings.*`tied:"):
        declared(text + "  b.out.weight: head\n")


# What is wrong -> what the message says; the line is counted in the whole file.
WRONG = {
    "weights:\n  a.weight: {rolle: head}\n": r"line 12: weights > a\.weight > rolle: there is no key 'rolle' here\. Known are role, shape",
    "wheights: {}\n": r"line 11: wheights: there is no key 'wheights'",
    "weights:\n  a.weight: hed\n": r"line 12: weights > a\.weight: no role is called 'hed'\. Roles are embedding.*add `split:` with column",
    "weights:\n  a.weight: {role: '?'}\n": r"line 12: weights > a\.weight > role: a \? stands here\..*not guessed",
    "weights:\n  a.weight: {role: head, shape: [vocap, hidden]}\n": r"line 12: .*shape > 0: no dimension is called 'vocap'.*are vocab",
    "weights:\n  a.weight: {role: head, shape: [vocab - 1, hidden]}\n": r"'vocab - 1' stands here, a sum of products",
    "weights:\n  a.weight: {role: head, shape: [vocab / 0, hidden]}\n": r"'vocab / 0' stands here",
    "weights:\n  a.weight: {role: head, shape: [2.5, hidden]}\n": r"2\.5 stands here, a sum of products",
    "weights:\n  a.weight: {role: head, shape: []}\n": r"a list of 0 axes stands here",
    "weights:\n  a.weight: {role: router}\n": r"line 12: .*called 'experts'\. A router is \[experts, hidden\] unless `shape:`",
    "weights:\n  a.table: embedding\n": r"its shape is not said, and does not follow",
    "weights:\n  a.weight: {shape: [hidden]}\n": r"it says neither its role nor what it holds",
    "weights:\n  a.weight: 3\n": r"line 12: weights > a\.weight: 3 stands here, keys with values are expected",
    "weights:\n  a.weight:\n": r"nothing stands here, keys with values",
    "weights:\n  a.weight: {role: attention.qkv}\n": r"attention\.qkv is several roles in one\. Write `holds:`",
    "weights:\n  a.weight: {holds: [attention.q]}\n": r"holds: a weight that holds one role is that role",
    "weights:\n  a.weight: {holds: [mlp.gate, mlp.gate]}\n": r"holds > 1: mlp\.gate is held twice",
    "weights:\n  a.weight: {holds: [mlp.gate, my.own]}\n": r"how many rows a my\.own has is not known\. Write `holds: \{my\.own: ROWS",
    "weights:\n  a.weight: {holds: {mlp.gate: 3, my.own: 4}, split: row}\n": r"split: the role mlp\.gate says how it is split",
    "weights:\n  a.weight: {holds: [mlp.gate, mlp.up], role: mlp.gate}\n": r"role: a weight that holds several roles has none of its own",
    "weights:\n  a.weight: {holds: [mlp.gate, mlp.up], by: groups}\n": r"by: no dimension is called 'groups'",
    "weights:\n  a.weight: {holds: [mlp.gate, mlp.down]}\n": r"mlp\.gate and mlp\.down have different input features\. Add `shape:`",
    "weights:\n  a.weight: {role: head, by: heads}\n": r"by: it says by what the roles of `holds:` alternate, which is not there",
    "weights:\n  a.weight: {role: head, split: row}\n": r"split: the role head says how it is split",
    "weights:\n  a.weight: {role: my.own, split: diagonal, shape: [hidden]}\n": r"split: 'diagonal' stands here\. Known are column, row",
    "weights:\n  a.weight: {role: my.own, split: {copies: true}, shape: [hidden]}\n": r"split: it does not say by which dimension",
    "weights:\n  a.weight: {role: my.own, split: {heads: groups}, shape: [hidden]}\n": r"split > heads: no dimension is called 'groups'",
    "weights:\n  a.weight: {role: head, transposed: 1}\n": r"transposed: 1 stands here, true or false is expected",
    "weights:\n  a.weight: {role: head, when: no}\n": r"when: False stands here, a key of the config.*quotes",
    "weights:\n  a.weight: {role: head, layers: some}\n": r"layers: 'some' stands here\. Known are dense, sparse, extra",
    "weights:\n  a.weight: {role: head, layers: dense}\n": r"`layers: dense` is said of a weight that is no layer's",
    "weights:\n  a.*.weight: {role: mlp.norm, layers: sparse}\n": r"line 12: weights > a\.\*\.weight: .*nothing says which",
    "weights:\n  a.*.weight: {role: mlp.norm, layers: extra}\n": r"nothing says how many there are\. Add `extra_layers:`",
    "weights:\n  a.*.b.*.weight: mlp.norm\n": r"its name counts experts, and no dimension is called experts",
    "weights:\n  a.*.b.*.c.*.weight: mlp.norm\n": r"it is not clear which number each \* stands for.*Write \{layer\} and \{expert\}",
    "weights:\n  a.x*.weight: mlp.norm\n": r"it is not clear which number each \* stands for",
    "weights:\n  a.{layer}.*.weight: mlp.norm\n": r"it is not clear which number each \* stands for",
    "weights:\n  a.{level}.weight: mlp.norm\n": r"\{level\} stands in the name\. \{layer\} and \{expert\} may, once each",
    "weights:\n  a.{layer}.{layer}.weight: mlp.norm\n": r"\{layer\} stands in the name",
    "weights:\n  a b.weight: mlp.norm\n": r"this is no name of a weight",
    "weights:\n  a.*.weight: mlp.norm\n  a.0.weight: mlp.norm\n": r"a weight could be of this name and of a\.0\.weight",
    "weights:\n  a.*.weight: mlp.norm\n  a.{layer}.weight: mlp.norm\n": r"could be of this name and of a\.\{layer\}\.weight at once",
    "weights:\n  a.weight: head\n  a.weight: head\n": r"line 13: the key 'a\.weight' stands here a second time",
    "weights: {}\n": r"my\.yaml: it declares no weights",
    "weights: [a.weight]\n": r"line 11: weights: a list stands here, keys with values are expected",
    "weights: {a.weight: head}\ntied: {head: a.weight}\n": r"line 12: tied: it does not say the embedding",
    "weights: {a.weight: head}\ntied: {head: a.weight, embedding: b.weight}\n": r"embedding: no weight is called 'b\.weight'",
    "weights: {a.weight: head}\ndropped: {b.weight: ''}\n": r"dropped > b\.weight: '' stands here, the reason",
    "weights: {a.weight: head}\nsparse: some\n": r"line 12: sparse: 'some' stands here, .*Known are first, step",
    "weights: {a.weight: head}\nsparse: {offset: -1}\n": r"sparse > offset: -1 stands here, a whole number from 0 on",
    "weights: {a.weight: head}\nextra_layers: 2\n": r"extra_layers: 2 stands here, a key of the config is expected",
    "weights: {a.weight: head}\ndefaults: {x: [1]}\n": r"defaults > x: a list stands here, true, false",
    "weights: {a.weight: head}\nvocabulary_multiple: 0\n": r"vocabulary_multiple: 0 stands here, a whole number from 1 on",
    "weights: {a.weight: head}\nwithout: '*'\n": r"line 12: without: it takes weights away from those of `like:`, which is not there",
    "like: lama\n": r"line 11: like: no model is declared as 'lama'\. Known are deepseek_v2",
    "like: llama\nwithout: ['*.mlp.*', '*.mpl.*']\n": r"line 12: without > 1: no weight of llama is called '\*\.mpl\.\*'",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_with_a_declaration_is_one_paragraph_with_its_line(text):
    with pytest.raises(RequestError) as error:
        declared(HEAD + text)
    assert re.search(WRONG[text], str(error.value)), str(error.value)
    assert str(error.value).startswith("my.yaml") and "\n" not in str(error.value)


WRONG_DIMENSIONS = {
    "{hidden: hidden_size}": r"no dimension is called layers\. Add it under `dimensions`, such as `layers: num_hidden_layers`",
    "{layers: {keys: n, optional: true}}": r"dimensions > layers: layers cannot be optional",
    "{layers: n, Hidden: n}": r"dimensions > Hidden: the name of a dimension is a word in small letters",
    "{layers: n, hidden: {}}": r"dimensions > hidden: it says neither keys of the config nor a default",
    "{layers: n, hidden: {default: wide / 2}, wide: n}": r"dimensions > hidden: no dimension is called 'wide'.*stand before it",
    "{layers: n, a: {keys: n, optional: true}, b: {default: a}}": r"dimensions > b: the dimension a is optional",
    "{layers: n, hidden: {keys: 3}}": r"keys: 3 stands here, a key of the config is expected",
    "{layers: n, hidden: [a, [b]]}": r"hidden > 1: a list stands here, a key of the config",
    "{layers: n, hidden: {default: [a]}}": r"default: a list stands here, an expression of dimensions",
    "{layers: 0}": r"dimensions > layers: 0 stands here, a whole number from 1 on",
    "3": r"dimensions: 3 stands here, keys with values are expected",
}


@pytest.mark.parametrize("dimensions", WRONG_DIMENSIONS)
def test_what_is_wrong_with_dimensions_is_said(dimensions):
    with pytest.raises(RequestError, match=WRONG_DIMENSIONS[dimensions]):
        declared(f"model_type: mymodel\ndimensions: {dimensions}\nweights: {{a.weight: {{role: head, shape: [3]}}}}\n")


def test_a_role_needs_the_dimension_that_splits_it():
    with pytest.raises(RequestError, match=r"the role attention\.k is split by kv_heads, and no dimension is called so\. Add `kv_heads:`"):
        declared("model_type: m\ndimensions: {layers: 2}\nweights: {a.weight: {role: attention.k, shape: [4]}}")


@pytest.mark.parametrize(
    "content, what",
    [
        (b"model_type: m\nx: &a [1]\ny: *a\n", "line 2: &a marks a place"),
        (b"model_type: m\ny: *a\n", r"line 2: \*a refers to another place"),
        (b"model_type: !!python/object/apply:os.system ['true']\n", "line 1: .*os.system is a tag"),
        (b"a: {b: {c: {d: {e: {f: {g: {h: {i: 1}}}}}}}}\n", "more than 8 levels"),
        (b"[" * 200_000, "more than 8 levels"),
        (b"a: " + b"x" * (1 << 18), "at most 262,144 make sense"),
        (b"a: 1\n---\nb: 2\n", "it holds 2 documents"),
        (b"", "it holds no documents"),
        (b"a: {b\n", "line 2: it is not valid YAML"),
        (b"weights:\n  a: ?\n", r"line 2: it is not valid YAML.*a lone \?, go into quotes"),
        (b"*.x: 1\n", "line 1: it is not valid YAML.*quotes"),
        (b"\xff\xfe\x00", "my.yaml: it is not valid YAML"),
        (b"a: \x00\n", "my.yaml: it is not valid YAML"),
        (b"1: 2\n", "line 1: the key 1 is no word"),
        (b"{a}: 2\n", "line 1: a key is itself a list or mapping"),
        (b"a: 2024-01-01\n", "taken for a timestamp"),
        (b"<<: {a: 1}\n", "taken for a merge"),
        (b"a: " + b"9" * 5000, "is no number"),
        (b"3\n", "3 stands here, keys with values are expected"),
    ],
)
def test_only_plain_data_is_read(content, what):
    with pytest.raises(RequestError, match=what):
        parse_declaration(content, "my.yaml")


def test_sections_that_are_not_the_whole_tensor_are_refused_with_the_numbers():
    text = (
        HEAD
        + "weights:\n  a.weight: {holds: {attention.q: heads * head_dim, attention.k: kv_heads * head_dim}, shape: [3 * hidden, hidden]}\n"
    )
    with pytest.raises(RequestError, match=r"a\.weight: it has 48 output features, and what is fused in it has 16 \+ 8"):
        _ = Model(declared(text), CONFIG).weights
    text = HEAD + "weights:\n  a.weight: {holds: [mlp.gate, mlp.up], by: rounds}\n".replace("rounds", "vocab")
    with pytest.raises(RequestError, match=r"24 \+ 24 in 50 equal runs, one per each of the vocab"):
        _ = Model(declared(text), CONFIG).weights


@pytest.mark.parametrize(
    "said, config, what",
    [
        ("sparse: {first: first_one}", {"first_one": "two"}, "gives 'two' for first_one, a whole number"),
        ("sparse: {step: every}", {"every": [1]}, r"gives \[1\] for every, a whole number"),
        ("sparse: {dense: those}", {"those": 3}, "gives 3 for those, a list"),
        ("extra_layers: more", {"more": "one"}, "gives 'one' for more, a whole number"),
    ],
)
def test_a_config_that_says_something_else_under_a_key_is_refused(said, config, what):
    architecture = declared(f"{HEAD}{said}\nweights:\n  a.*.weight: {{role: mlp.norm, layers: dense}}\n")
    with pytest.raises(RequestError, match=what):
        _ = Model(architecture, {**CONFIG, **config}).weights


def test_a_dimension_that_nobody_declared_is_asked_for_by_name():
    model = Model(declared("model_type: m\ndimensions: {layers: 2}\nweights: {a.weight: {role: final_norm, shape: [4]}}"), CONFIG)
    with pytest.raises(RequestError, match=r"The declaration of m has no dimension 'heads'"):
        _ = model.dimensions["heads"]
    assert "heads" not in model.dimensions and model.dimensions.get("heads") is None


def test_a_name_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("qwen2").write_text("model_type: mine\nlike: llama\n")
    assert named_architecture("qwen2") is find_architecture("qwen2")
    assert named_architecture("./qwen2").model_type == "mine"
    assert named_architecture(Path("qwen2")).model_type == "mine"
    with pytest.raises(RequestError, match=r"--architecture my: no model is declared by that name\. Declared are .*qwen2.*\./my\.yaml"):
        named_architecture("my")
    with pytest.raises(RequestError, match=r"here is no file or directory 'my\.yaml'"):
        named_architecture("my.yaml")
    with pytest.raises(RequestError, match="this is a directory"):
        named_architecture("./")
