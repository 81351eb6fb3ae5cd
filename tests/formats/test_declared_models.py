"""A model that is not built in, declared by its user: every command makes of it what it makes of the built-in one, bit by bit.

The config's model_type is changed to `mymodel`; the oracle is what real vLLM ranks held of the same weights (fixtures/vllm), or what the
built-in declaration makes of them.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from helpers.fixture_places import DCP, FIXTURES, FSDP, HF, VLLM, has_a_layer_per_stage, ranks, read_reference, stored
from helpers.reshard_command import command, reshard, tree

import reshard as library
from reshard.errors import CheckpointError, RequestError
from reshard.models.lookup import declaration_text, find_model, read_architecture

DECLARED = Path(__file__).resolve().parent.parent / "declared"


def alone(model):
    """A declaration that extends a model, without a word about engines."""
    return f"language: 2\nmodel_type: mymodel\nextends: {model}\n"


def own_file(model):
    """The built-in declaration as that of somebody else's model."""
    return declaration_text(model).replace(f"\nmodel_type: {model}\n", "\nmodel_type: mymodel\n")


# The model under its name in fixtures/hf -> the declaration of somebody else's model that is the same.
DECLARATIONS = {
    "llama": own_file("llama"),
    "llama-tied": own_file("llama"),
    "qwen2": alone("qwen2") + "like: qwen2\n",
    "qwen3": own_file("qwen3"),
    "gpt2": (DECLARED / "gpt2.yaml").read_text(),
    # In the language of reshard 0.1.0.
    "gpt_neox": (DECLARED / "version_1" / "gpt_neox.yaml").read_text(),
    "qwen3_moe": (DECLARED / "version_1" / "qwen3_moe.yaml").read_text(),
}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The path of each declaration."""
    folder = tmp_path_factory.mktemp("declarations")
    for model, text in DECLARATIONS.items():
        (folder / f"{model}.yaml").write_text(text)
    return {model: folder / f"{model}.yaml" for model in DECLARATIONS}


def renamed(folder, to):
    """A copy of a folder with a config that calls its model `mymodel`."""
    copy = shutil.copytree(folder, to)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "mymodel"}))
    return copy


def without_config(folder):
    """The files that hold no name of the model."""
    named = ("config.json", "reshard.architecture.yaml", "reshard.json", "reshard.digests")
    return {path: data for path, data in tree(folder).items() if path not in named}


@pytest.mark.parametrize("model", DECLARATIONS)
def test_a_declared_model_is_weight_by_weight_the_built_in_one(model, files):
    config = json.loads((HF / model / "config.json").read_text())
    own, built_in = find_model(config, read_architecture(files[model])), find_model(config)
    assert own.architecture is not built_in.architecture

    def facts(weight):
        return weight.name, weight.shape, weight.layer, weight.expert, weight.optional, weight.declared.transposed

    assert [facts(weight) for weight in own.weights.values()] == [facts(weight) for weight in built_in.weights.values()]
    assert own.parts() == built_in.parts()


DECLARED = sorted(path for model in DECLARATIONS for path in VLLM.glob(f"{model}/*.json"))


@pytest.mark.parametrize("reference", list(filter(has_a_layer_per_stage, DECLARED)), ids=str)
def test_every_rank_holds_what_real_vllm_holds(reference, files, tmp_path):
    expected = read_reference(reference)
    source = renamed(HF / expected["model"], tmp_path / "m")
    degrees = {"tp": expected["tp"], "pp": expected["pp"], "ep": expected.get("ep", 1)}
    plan = library.plan(source, to="vllm", architecture=files[expected["model"]], **degrees)
    library.convert(plan, tmp_path / "out")
    assert ranks(tmp_path / "out") == expected["ranks"]


def test_a_declared_name_stands_in_for_the_configs(tmp_path):
    source = renamed(HF / "qwen2", tmp_path / "m")
    library.convert(library.plan(source, to="vllm", tp=2, architecture="qwen2"), tmp_path / "out")
    assert ranks(tmp_path / "out") == read_reference(VLLM / "qwen2" / "tp2.json")["ranks"]


@pytest.mark.parametrize("model", ["qwen2", "gpt_neox", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("target", ["megatron", "megatron-dist"])
def test_megatron_gets_the_files_of_the_built_in_model(model, target, files, tmp_path):
    to = ("--to", target, "--tp", 2)
    source = renamed(HF / model, tmp_path / "m")
    own = reshard("convert", source, tmp_path / "own", *to, "--architecture", files[model])
    built_in = reshard("convert", HF / model, tmp_path / "built-in", *to)
    assert (own.code, built_in.code) == (0, 0), own.err + built_in.err
    assert without_config(tmp_path / "own") == without_config(tmp_path / "built-in") != {}
    back = reshard("convert", tmp_path / "own", tmp_path / "back", "--to", "hf", "--model", source, "--architecture", files[model])
    assert back.code == 0, back.err
    assert reshard("verify", tmp_path / "back", HF / model).code == 0


@pytest.mark.parametrize(
    "case",
    [DCP / "fsdp2", DCP / "fsdp2-tied", FSDP / "verl", FSDP / "tp", FSDP / "fsdp1-local", FIXTURES / "deepspeed" / "z3-bf16",
     FIXTURES / "deepspeed_parallel" / "autotp2-z1", FIXTURES / "dcp_safetensors" / "tp"],
    ids=lambda case: f"{case.parent.name}-{case.name}",
)  # fmt: skip
def test_a_training_checkpoint_becomes_what_it_becomes_for_the_built_in_model(case, tmp_path):
    folder = renamed(case / "model", tmp_path / "model")
    built_in = json.loads((case / "model" / "config.json").read_text())["model_type"]
    declaration = tmp_path / "my.yaml"
    declaration.write_text(alone(built_in))
    target = ("--to", "vllm", "--tp", 1 if case.name == "fsdp1-local" else 2, "--dtype", "bf16")  # its 23 features are odd
    own = reshard("convert", case / "checkpoint", tmp_path / "own", *target, "--model", folder, "--architecture", declaration)
    expected = reshard("convert", case / "checkpoint", tmp_path / "expected", *target, "--model", case / "model")
    assert (own.code, expected.code) == (0, 0), own.err + expected.err
    assert without_config(tmp_path / "own") == without_config(tmp_path / "expected") != {}


def test_every_command_takes_the_declaration(files, tmp_path):
    source, option = renamed(HF / "gpt_neox", tmp_path / "m"), ("--architecture", files["gpt_neox"])
    target = ("--to", "vllm", "--tp", 4)
    assert reshard("convert", source, tmp_path / "out", *target, *option).code == 0
    shown = reshard("inspect", tmp_path / "out", *option)
    assert shown.code == 0 and f"mymodel, declared by {files['gpt_neox']}" in shown.out
    assert reshard("inspect", tmp_path / "out", *option, "--json").document["architecture_known"] is True
    assert reshard("verify", source, tmp_path / "out", *option).code == 0
    assert reshard("verify", HF / "gpt_neox", source, *option).code == 0
    printed = {reshard("fingerprint", folder, *option).out.split()[0] for folder in (source, tmp_path / "out")}
    assert printed == {reshard("fingerprint", HF / "gpt_neox").out.split()[0]}
    assert reshard("roundtrip", source, *target, *option, "--materialize").code == 0
    for words in (("plan", "--to", "vllm"), ("estimate",)):
        own, built_in = (
            reshard(words[0], folder, *words[1:], *which, "--json") for folder, which in ((source, option), (HF / "gpt_neox", ()))
        )
        said = own.out.replace("mymodel", "gpt_neox").replace(str(source), str(HF / "gpt_neox"))
        assert (own.code, said.replace('    "reshard.architecture.yaml",\n', "")) == (0, built_in.out)
    assert reshard("convert", tmp_path / "out", tmp_path / "tp2", "--to", "vllm", "--tp", 2, *option).code == 0
    assert ranks(tmp_path / "tp2") == read_reference(VLLM / "gpt_neox" / "tp2.json")["ranks"]
    # What was written has the declaration beside it.
    assert reshard("inspect", tmp_path / "out").code == reshard("verify", source, tmp_path / "out").code == 0
    refused = reshard("convert", source, tmp_path / "no", *target)
    assert refused.code == 6 and "reshard architectures --start CKPT > my.yaml" in refused.err


def test_a_view_of_one_rank(files, tmp_path):
    source = renamed(HF / "qwen2", tmp_path / "m")
    opened = library.open(source, architecture=files["qwen2"])
    held = opened.view(to="vllm", tp=2, rank=1)
    expected = library.open(HF / "qwen2").view(to="vllm", tp=2, rank=1)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert held.keys() == expected.keys() and np.array_equal(held[name].words(), expected[name].words())


def test_a_declaration_needs_a_config_to_take_its_numbers_from(files, tmp_path):
    (tmp_path / "m").mkdir()
    shutil.copy(HF / "qwen2" / "model.safetensors", tmp_path / "m")
    with pytest.raises(
        RequestError, match=r"`architecture=` names mymodel, and there is no config\.json, nor one in the parent directory.*`model=DIR`"
    ):
        library.open(tmp_path / "m", architecture=files["qwen2"])
    # Where only one of two has a config, it speaks for both.
    assert reshard("verify", tmp_path / "m", HF / "qwen2", "--architecture", files["qwen2"]).code == 0
    assert reshard("verify", tmp_path / "m", tmp_path / "m", "--architecture", files["qwen2"]).code == 2


def test_a_declaration_of_another_model_is_refused(files, tmp_path):
    with pytest.raises(CheckpointError, match=r"no such weight.*mymodel model needs"):
        library.plan(HF / "qwen3", to="vllm", architecture=files["qwen2"])
    text = files["qwen2"].read_text() + "dimensions: {head_dim: {default: 2 * hidden / heads}}\n"
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"its shape is \[\d+, 256\], the config says \[\d+, 256\]|its shape is .*the config says"):
        library.plan(HF / "qwen2", to="vllm", architecture=tmp_path / "wrong.yaml")


# ---- what only a declaration can say ----

OWN = """language: 2
model_type: mymodel
extends: qwen2
like: qwen2
dimensions: {rank: adapter_rank}
weights:
  model.layers.*.self_attn.gate.weight: {role: my.gate, split: {heads: heads}, shape: [heads, hidden]}
  model.layers.*.self_attn.group.weight: {role: my.group, split: {heads: kv_heads, copies: true}, shape: [kv_heads * 2, rank]}
  model.layers.*.adapter.down.weight: {role: my.down, split: row, shape: [rank, hidden]}
  model.layers.*.adapter.down.bias: {role: my.down, split: row, shape: [rank]}
  model.layers.*.adapter.up.weight: {role: my.up, split: column, shape: [hidden, rank]}
  model.layers.*.adapter.scale: {role: my.scale, split: replicate, shape: [rank, 1, 2]}
  model.table.weight: {role: my.table, split: vocabulary, shape: [rank, 4]}
vocabulary_multiple: 16
"""
ROWS = {"self_attn.gate.weight": (8, 256), "self_attn.group.weight": (4, 6), "adapter.down.weight": (6, 256), "adapter.down.bias": (6,),
        "adapter.up.weight": (256, 6), "adapter.scale": (6, 1, 2)}  # fmt: skip


@pytest.fixture
def adapted(tmp_path):
    """qwen2 with more weights, and the arrays of those."""
    source = renamed(HF / "qwen2", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "adapter_rank": 6}))
    rng = np.random.default_rng(6)
    arrays = {f"model.layers.0.{name}": rng.standard_normal(shape, np.float32) for name, shape in ROWS.items()}
    arrays["model.table.weight"] = rng.standard_normal((6, 4), np.float32)
    safetensors.torch.save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, source / "adapter.safetensors")
    weights = {
        **dict.fromkeys(stored(source / "model.safetensors"), "model.safetensors"),
        **dict.fromkeys(arrays, "adapter.safetensors"),
    }
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    (tmp_path / "own.yaml").write_text(OWN)
    return source, tmp_path / "own.yaml", arrays


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_new_roles_are_split_as_the_declaration_says(adapted, tp, tmp_path):
    source, declaration, arrays = adapted
    library.convert(library.plan(source, to="vllm", tp=tp, architecture=declaration), tmp_path / "out")
    assert library.verify(library.open(source, architecture=declaration), library.open(tmp_path / "out", architecture=declaration)).equal
    for rank in range(tp):
        loaded = safetensors.torch.load_file(tmp_path / "out" / f"model-rank-{rank}-part-0.safetensors")
        held = {name: tensor.float().numpy() for name, tensor in loaded.items()}
        layer = "model.layers.0."

        def rows(name, parts, number):
            return np.array_split(arrays[name], parts, axis=0)[number]

        assert np.array_equal(held[layer + "self_attn.gate.weight"], rows(layer + "self_attn.gate.weight", tp, rank))
        groups = min(tp, 2)  # two KV heads: four ranks share them in pairs
        assert np.array_equal(held[layer + "self_attn.group.weight"], rows(layer + "self_attn.group.weight", groups, rank * groups // tp))
        assert np.array_equal(held[layer + "adapter.down.weight"], np.split(arrays[layer + "adapter.down.weight"], tp, axis=1)[rank])
        assert np.array_equal(held[layer + "adapter.down.bias"], arrays[layer + "adapter.down.bias"])
        assert np.array_equal(held[layer + "adapter.up.weight"], rows(layer + "adapter.up.weight", tp, rank))
        assert np.array_equal(held[layer + "adapter.scale"], arrays[layer + "adapter.scale"])
        table = np.zeros((16, 4), np.float32)
        table[:6] = arrays["model.table.weight"]
        assert np.array_equal(held["model.table.weight"], np.split(table, tp)[rank])
        # 250 rows up to a multiple of 16 are 256, as they are up to vLLM's own 64.
        assert held["lm_head.weight"].shape[0] == 256 // tp


def test_megatron_has_no_place_for_a_new_role(adapted, tmp_path):
    source, declaration, _ = adapted
    refused = reshard("convert", source, tmp_path / "out", "--to", "megatron", "--architecture", declaration)
    assert refused.code == 6 and "my." in refused.err, refused.err


def test_megatron_settings_are_not_guessed_without_like(tmp_path):
    source = renamed(HF / "qwen3", tmp_path / "m")
    (tmp_path / "alone.yaml").write_text(alone("qwen3"))
    with pytest.raises(RequestError, match=r"hich of Megatron's norms, positions and routers a mymodel model has.*`like:`"):
        library.plan(source, to="megatron", architecture=tmp_path / "alone.yaml")


def test_vllm_notes_that_the_class_was_not_compared_without_like(files, tmp_path):
    source = renamed(HF / "qwen3", tmp_path / "m")
    (tmp_path / "alone.yaml").write_text(alone("qwen3"))
    plan = library.plan(source, to="vllm", architecture=tmp_path / "alone.yaml")
    assert any("class for mymodel was not compared" in note for note in plan.layout.notes)
    like = library.plan(renamed(HF / "qwen2", tmp_path / "n"), to="vllm", architecture=files["qwen2"])
    assert not any("not compared" in note for note in like.layout.notes)


# ---- one more model is one file ----

MADE_UP = """# Rimu is made up: names that no other model has, a fused qkv by query group, an adapter with a role of its own, experts.
language: 2
model_type: rimu
dimensions:
  vocab: words
  hidden: width
  layers: depth
  heads: eyes
  kv_heads: ears
  head_dim: {default: hidden / heads}
  experts: birds
  expert_intermediate: wings
  rank: twigs
weights:
  rimu.words.weight: embedding
  rimu.blocks.*.before.weight: attention.norm
  rimu.blocks.*.look.weight: {fuses: [attention.q, attention.k, attention.v], interleaved_by: kv_heads}
  rimu.blocks.*.say.weight: attention.o
  rimu.blocks.*.twig.weight: {role: rimu.twig, split: column, shape: [hidden, rank]}
  rimu.blocks.*.between.weight: mlp.norm
  rimu.blocks.*.choose.weight: router
  rimu.blocks.*.birds.*.gate.weight: expert.gate
  rimu.blocks.*.birds.*.up.weight: expert.up
  rimu.blocks.*.birds.*.down.weight: {role: expert.down, transposed: true}
  rimu.after.weight: final_norm
  rimu.speak.weight: head
sparse_layers: all
"""
MADE_UP_CONFIG = {
    "model_type": "rimu", "words": 50, "width": 16, "depth": 3, "eyes": 4, "ears": 2, "birds": 4, "wings": 12, "twigs": 6,
    "torch_dtype": "float32",
}  # fmt: skip


def made_up_weights():
    """Random weights of the made-up model, with the shapes worked out by hand."""
    rng = np.random.default_rng(13)
    shapes = {"rimu.words.weight": (50, 16)}
    for layer in range(3):
        block = {"before": (16,), "look": (16 + 2 * 8, 16), "say": (16, 16), "twig": (16, 6), "between": (16,), "choose": (4, 16)}
        block |= {f"birds.{bird}.{name}": shape for bird in range(4) for name, shape in
                  (("gate", (12, 16)), ("up", (12, 16)), ("down", (12, 16)))}  # fmt: skip
        shapes |= {f"rimu.blocks.{layer}.{name}.weight": shape for name, shape in block.items()}
    shapes |= {"rimu.after.weight": (16,), "rimu.speak.weight": (50, 16)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (4, 1), (2, 3)])
def test_a_made_up_model_needs_one_file(tp, pp, tmp_path):
    arrays = made_up_weights()
    source, declaration = tmp_path / "rimu", tmp_path / "rimu.yaml"
    source.mkdir()
    safetensors.numpy.save_file(arrays, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(MADE_UP_CONFIG))
    declaration.write_text(MADE_UP)
    declared = ("--architecture", declaration)
    for arguments in (
        ("convert", source, tmp_path / "served", "--to", "vllm", "--tp", tp, "--pp", pp, *declared),
        ("convert", tmp_path / "served", tmp_path / "back", "--to", "hf", *declared),
        ("verify", source, tmp_path / "served", *declared),
        ("verify", source, tmp_path / "back", *declared),
    ):
        result = reshard(*arguments)
        assert result.code == 0, result.err
    back = safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == arrays.keys() and all(np.array_equal(back[name], array) for name, array in arrays.items())


def test_a_rank_of_the_made_up_model_holds_its_query_groups(tmp_path):
    arrays, layer = made_up_weights(), "rimu.blocks.1."
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(MADE_UP_CONFIG))
    (tmp_path / "rimu.yaml").write_text(MADE_UP)
    view = library.open(tmp_path, architecture=tmp_path / "rimu.yaml").view(to="vllm", tp=2, rank=1)
    # Group 1: two query heads of 4 rows, one key head, one value head.
    held = {name: np.asarray(view[name].words()).view(np.float32).reshape(view[name].shape) for name in view if name.startswith(layer)}
    fused = next(array for name, array in held.items() if array.shape == (16, 16) and "say" not in name and "birds" not in name)
    assert np.array_equal(fused, arrays[layer + "look.weight"][16:])
    assert np.array_equal(held[layer + "say.weight"], arrays[layer + "say.weight"][:, 8:])


# ---- packages that bring models ----


@pytest.fixture
def package(files, tmp_path):
    """An environment in which an installed package declares models: mymodel as an object, theirs as a file, broken as neither."""
    folder = tmp_path / "site"
    (folder / "their_models-1.0.dist-info").mkdir(parents=True)
    (folder / "their_models-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: their-models\nVersion: 1.0\n")
    (folder / "their_models-1.0.dist-info" / "entry_points.txt").write_text(
        "[reshard.architectures]\nmymodel = their_models:MINE\ntheirs = their_models:FILE\nbroken = their_models:BROKEN\n"
        "llama = their_models:BROKEN\n"
    )
    (folder / "theirs.yaml").write_text("language: 2\nmodel_type: theirs\nextends: mymodel\nlike: mymodel\n")
    (folder / "their_models.py").write_text(
        "from pathlib import Path\nfrom reshard.models.lookup import read_architecture\n"
        f"FILE = Path({str(folder / 'theirs.yaml')!r})\nMINE = read_architecture({str(files['qwen2'])!r})\nBROKEN = 3\n"
    )
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_a_package_declares_models_by_an_entry_point(package, tmp_path):
    source = renamed(HF / "qwen2", tmp_path / "m")

    def run(*arguments):
        return subprocess.run(command(*arguments), env=package, capture_output=True, text=True, check=False)

    listed = json.loads(run("architectures", "--json").stdout)["architectures"]
    assert {"mymodel", "theirs", "broken", "qwen2"} <= set(listed) and listed == sorted(set(listed))
    for target, arguments in (("out", ()), ("theirs", ("--architecture", "theirs"))):
        made = run("convert", source, tmp_path / target, "--to", "vllm", "--tp", 2, *arguments)
        assert made.returncode == 0, made.stderr
        assert ranks(tmp_path / target) == read_reference(VLLM / "qwen2" / "tp2.json")["ranks"]
    assert "extends: mymodel" in run("architectures", "theirs").stdout
    broken = run("inspect", source, "--architecture", "broken")
    assert broken.returncode == 2 and "their_models:BROKEN: the entry point broken of the group" in broken.stderr
    # What is built in comes first.
    assert run("inspect", HF / "llama").returncode == 0


def test_the_metadata_of_packages_are_not_searched_for_what_is_built_in():
    code = "import sys, reshard; reshard.open(sys.argv[1]).model; from reshard.models.lookup import _entry_points as found; "
    code += "print(found.cache_info().misses)"
    found = subprocess.run([sys.executable, "-c", code, str(HF / "llama")], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "0"


def test_a_wrong_role_is_blamed_on_the_line_that_declares_it(tmp_path):
    """The roles of up_proj and down_proj are exchanged."""
    text = own_file("llama").replace("mlp.down_proj.weight: mlp.down", "mlp.down_proj.weight: mlp.up")
    text = text.replace("mlp.up_proj.weight: mlp.up", "mlp.up_proj.weight: mlp.down")
    (tmp_path / "my.yaml").write_text(text)
    line = next(number for number, each in enumerate(text.splitlines(), 1) if "up_proj.weight" in each)
    folder = shutil.copytree(HF / "llama", tmp_path / "llama")
    with pytest.raises(CheckpointError) as error:
        library.plan(folder, to="vllm", architecture=tmp_path / "my.yaml")
    message = str(error.value)
    assert f"my.yaml, line {line}, declares it as mlp.down: [hidden, intermediate]" in message
    assert "Correct the declaration" in message and "belongs to another model" not in message


def test_a_wrong_shape_of_a_built_in_model_is_still_blamed_on_the_config(tmp_path):
    folder = shutil.copytree(HF / "llama", tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] + 8}))
    with pytest.raises(CheckpointError, match="The config belongs to another model"):
        library.plan(folder, to="vllm")
