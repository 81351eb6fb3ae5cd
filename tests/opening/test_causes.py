"""What lies there is read or refused with its cause: forms in which people have checkpoints, made by torch itself."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard
from helpers.slime_deltas import folder_of, load_folder
from safetensors.torch import load_file, save_file

import reshard as library
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.opening.run_folders import find_steps

LLAMA = HF / "llama"
DCP, MODEL = FIXTURES / "dcp" / "fsdp2" / "checkpoint", FIXTURES / "dcp" / "fsdp2" / "model"


def llama():
    return load_file(LLAMA / "model.safetensors")


def with_config(folder):
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(LLAMA / "config.json", folder)
    return folder


def assert_is_llama(source, out, *more):
    done = reshard("convert", source, out, "--to", "hf", *more)
    assert done.code == 0, done.err
    stored, expected = load_file(out / "model.safetensors"), llama()
    assert stored.keys() == expected.keys()
    assert all(stored[name].dtype == expected[name].dtype and torch.equal(stored[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "prefix",
    [
        "_forward_module.",
        "_forward_module.model.",
        "module._forward_module._orig_mod.",
        "pretrained_model.",
        "_orig_mod.pretrained_model.module.",
        "module.module.pretrained_model.",
        "my.",
        "net.inner.",
    ],
)
def test_wrappers_in_front_are_stripped_in_any_mixture_and_other_prefixes_by_the_advice(prefix, tmp_path):
    folder = with_config(tmp_path / "ckpt")
    save_file({prefix + name: value for name, value in llama().items()}, folder / "model.safetensors")
    if not prefix.startswith(("my", "net")):
        assert_is_llama(folder, tmp_path / "out")
        return
    done = reshard("convert", folder, tmp_path / "out", "--to", "vllm")
    assert done.code == 3 and f"Remove the prefix with --strip-prefix '{prefix}'." in done.err, done.err
    assert_is_llama(folder, tmp_path / "out", "--strip-prefix", prefix)


def test_a_wrapper_beside_a_head_of_its_own_is_stripped(tmp_path):
    stored = {f"pretrained_model.{name}": value for name, value in llama().items()} | {"v_head.summary.weight": torch.ones(1, 64)}
    save_file(stored, with_config(tmp_path / "ckpt") / "model.safetensors")
    names = {tensor.name for tensor in library.open(tmp_path / "ckpt").index.tensors}
    assert "model.norm.weight" in names and "v_head.summary.weight" in names
    clash = stored | {"model.norm.weight": torch.ones(64)}
    save_file(clash, tmp_path / "ckpt" / "model.safetensors")
    with pytest.raises(CheckpointError, match="have the same name once the parts that wrappers add are removed"):
        library.open(tmp_path / "ckpt")


class Tree(torch.nn.Module):
    """The modules of a model, without code: what a pickle of a model of any class holds."""


def module_of(tensors):
    root = Tree()
    for name, value in tensors.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            if part not in place._modules:
                place.add_module(part, Tree())
            place = place._modules[part]
        place.register_parameter(last, torch.nn.Parameter(value, requires_grad=False))
    root.register_buffer("cache", torch.ones(3), persistent=False)
    return root


@pytest.mark.parametrize("around", [lambda module: module, lambda module: {"epoch": 3, "model": module}], ids=["alone", "in a dict"])
def test_a_pickled_module_is_its_state_dict(around, tmp_path):
    module = module_of(llama())
    torch.save(around(module), with_config(tmp_path / "ckpt") / "last.pt")
    assert_is_llama(tmp_path / "ckpt", tmp_path / "out")
    assert {tensor.name for tensor in library.open(tmp_path / "ckpt").index.tensors} == module.state_dict().keys()
    opened = library.open(tmp_path / "ckpt")
    assert "cache" not in opened, "a buffer that is not persistent is not in a state dict"


def composer(folder, *, link):
    names = list(llama())
    state = {
        "model": {f"model.{name}": value for name, value in llama().items()},
        "optimizers": {
            "AdamW": {
                "state": {
                    f"model.{name}": {"step": torch.tensor(4.0), "exp_avg": llama()[name].float(), "exp_avg_sq": llama()[name].float()}
                    for name in names
                },
                "param_groups": [{"lr": 0.5, "params": [f"model.{name}" for name in names]}],
            }
        },
        "run_name": "run",
    }
    torch.save({"state": state, "rng": []}, with_config(folder) / "ep0-ba4-rank0.pt")
    if link:
        (folder / "latest-rank0.pt").symlink_to("ep0-ba4-rank0.pt")


@pytest.mark.parametrize("link", [True, False])
def test_composers_file_is_read_alone_and_in_its_folder(link, tmp_path):
    composer(tmp_path / "ckpt", link=link)
    assert_is_llama(tmp_path / "ckpt", tmp_path / "out")
    assert_is_llama(tmp_path / "ckpt" / "ep0-ba4-rank0.pt", tmp_path / "alone", "--model", LLAMA)
    plan = library.plan(tmp_path / "ckpt", to="dcp", optimizer=True)
    assert len(plan.content.states) == 3 * len(llama()) and plan.content.param_groups()[0].settings["lr"] == 0.5
    composer(tmp_path / "two", link=False)
    shutil.copy(tmp_path / "two" / "ep0-ba4-rank0.pt", tmp_path / "two" / "ep0-ba8-rank0.pt")
    steps = find_steps(tmp_path / "two", quiet=0)
    assert [(step.number, Path(step.path).name) for step in steps] == [(4, "ep0-ba4-rank0.pt"), (8, "ep0-ba8-rank0.pt")]
    assert_is_llama(tmp_path / "two", tmp_path / "newest", "--model", LLAMA, "--step", "8")
    done = reshard("convert", tmp_path / "two", tmp_path / "none", "--to", "hf")
    assert done.code == 2 and "2 checkpoints of 2 steps lie here" in done.err, "two files are two saves, unless one is a link to the other"


def test_weights_without_elements_were_not_gathered(tmp_path):
    folder = with_config(tmp_path / "ckpt")
    save_file({name: torch.empty(0) for name in llama()}, folder / "model.safetensors")
    for words in (("convert", folder, tmp_path / "out", "--to", "hf"), ("inspect", folder), ("fingerprint", folder)):
        done = reshard(*words)
        assert done.code == 3 and "saved under ZeRO-3 without gathering" in done.err and "global_step*" in done.err, done.err
    shown = reshard("doctor", folder)
    assert shown.code == 1 and "saved under ZeRO-3 without gathering" in shown.out and "global_step*" in shown.out
    assert "Give the config" not in shown.out
    kept = {name: value if value.ndim == 1 else torch.empty(0) for name, value in llama().items()}
    save_file(kept, folder / "model.safetensors")
    done = reshard("convert", folder, tmp_path / "out", "--to", "hf")
    assert done.code == 3 and "shape is [0], the config says [250, 32]: saved under ZeRO-3 without gathering" in done.err
    save_file(llama() | {"model.norm.weight": torch.ones(63)}, folder / "model.safetensors")
    done = reshard("convert", folder, tmp_path / "out", "--to", "hf")
    assert done.code == 3 and "ZeRO-3" not in done.err


def test_programs_and_meta_tensors_are_called_so(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(4, 3))
    torch.jit.script(module).save(tmp_path / "jit.pt")
    torch.export.save(torch.export.export(module, (torch.zeros(2, 4),)), tmp_path / "program.pt2")
    shutil.copy(tmp_path / "program.pt2", tmp_path / "program.pt")
    torch.save({name: value.to("meta") for name, value in module.state_dict().items()}, tmp_path / "meta.pt")
    for name, text, error in (
        ("jit.pt", "a TorchScript archive, not a checkpoint. Load it with torch, and save its state_dict", CheckpointError),
        ("program.pt2", "this file is a program of torch.export", UnsupportedError),
        ("program.pt", "a program of torch.export, not a checkpoint", CheckpointError),
        ("meta.pt", "so no values were saved; so do 1 other tensor", UnsupportedError),
    ):
        with pytest.raises(error, match=text.replace(".", r"\.")):
            library.plan(tmp_path / name, to="hf")


def test_the_twin_that_a_header_names_is_read(tmp_path):
    folder = with_config(tmp_path / "ckpt")
    stored = llama() | {"lm_head.weight": llama()["model.embed_tokens.weight"].clone()}
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    shutil.copytree(folder, tmp_path / "truth")
    twin = {name: value for name, value in stored.items() if name != "lm_head.weight"}
    save_file(twin, folder / "model.safetensors", {"format": "pt", "lm_head.weight": "model.embed_tokens.weight"})
    assert library.verify(folder, tmp_path / "truth").equal
    for to in ("hf", "vllm"):
        library.convert(library.plan(folder, to=to), tmp_path / to)
        assert library.verify(tmp_path / to, tmp_path / "truth").equal
    save_file(twin, folder / "model.safetensors", {"format": "pt", "lm_head.weight": "nothing"})
    with pytest.raises(CheckpointError, match="no such weight"):
        library.plan(folder, to="hf")


def test_of_a_hubs_cache_the_snapshot_of_main_is_taken(tmp_path):
    cache = tmp_path / "hub" / "models--org--tiny"
    for name in ("0ld", "new"):
        shutil.copytree(LLAMA, cache / "snapshots" / name)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("new")
    (cache / "snapshots" / "0ld" / "model.safetensors").unlink()
    (cache / "snapshots" / "0ld" / "model.safetensors").symlink_to("../../blobs/gone")
    for place in (tmp_path / "hub", cache):
        assert library.open(place).path == str(cache / "snapshots" / "new")
    (cache / "refs" / "main").write_text("0ld")
    with pytest.raises(CheckpointError, match="not there"):
        library.open(cache)


def test_two_models_of_accelerate_are_named_with_the_option_that_chooses(tmp_path):
    for number in (0, 1):
        shutil.copytree(DCP, tmp_path / "ckpt" / f"pytorch_model_fsdp_{number}")
        shutil.copytree(DCP, tmp_path / "ckpt" / f"optimizer_{number}")
    done = reshard("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "hf", "--model", MODEL)
    assert done.code == 2 and "2 models lie here: pytorch_model_fsdp_0, pytorch_model_fsdp_1" in done.err, done.err
    assert "with --component pytorch_model_fsdp_0" in done.err
    chosen = ("--component", "pytorch_model_fsdp_1")
    assert reshard("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "hf", "--model", MODEL, *chosen).code == 0


@pytest.mark.parametrize("inner", ["{}", "{}/{}"])
def test_weights_and_optimizer_beside_each_other_are_one_checkpoint(inner, tmp_path):
    """NeMo RL: policy/weights and policy/optimizer, later policy/weights/model and policy/optimizer/optim; a data loader's state above."""
    from torch.distributed.checkpoint import FileSystemWriter, save

    step = tmp_path / "step_10"
    state = {f"optim.state.{name}.exp_avg": value.float() + 1 for name, value in llama().items()}
    for place, content in (
        (step / "policy" / inner.format("weights", "model"), {f"model.{name}": value for name, value in llama().items()}),
        (step / "policy" / inner.format("optimizer", "optim"), state),
    ):
        save(content, storage_writer=FileSystemWriter(place), no_dist=True)
    torch.save({"position": 7}, step / "train_dataloader.pt")
    for place in (step, step / "policy"):
        opened = library.open(place, model=LLAMA)
        assert opened.index.facts.step == 10
        assert {tensor.kind for tensor in opened.index.tensors} == {"weight", "moment1"}
        assert_is_llama(place, tmp_path / "out" / place.name, "--model", LLAMA)
    shutil.rmtree(step / "policy" / "weights")
    with pytest.raises(RequestError, match="No tensor is left to work on"):
        library.plan(step, to="hf", model=LLAMA)


def test_an_optimizer_beside_a_hugging_face_folder_is_not_denied(tmp_path):
    shutil.copytree(LLAMA, tmp_path / "ckpt", copy_function=shutil.copyfile)
    denied = reshard("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "dcp", "--optimizer")
    assert denied.code == 2 and "the checkpoint has no optimizer state" in denied.err
    torch.save({"scaler": 3}, tmp_path / "ckpt" / "optimizer.pt")
    done = reshard("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "dcp", "--optimizer")
    assert done.code == 2 and "optimizer.pt lies beside the weights; it is not read here" in done.err
    assert "has no optimizer state" not in done.err
    done = reshard("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "universal")
    assert done.code == 2 and "optimizer.pt lies beside" in done.err and "has none" not in done.err, done.err


def neox(folder, *, tp, change=lambda layer, name, rank, value: value):
    """The layer files of GPT-NeoX: numbered layers, split over tensor-parallel ranks by its modules."""
    stored, config = load_file(HF / "gpt_neox" / "model.safetensors"), json.loads((HF / "gpt_neox" / "config.json").read_text())
    layers, place = config["num_hidden_layers"], folder / "global_step10"
    place.mkdir(parents=True)
    shutil.copy(HF / "gpt_neox" / "config.json", folder)
    (folder / "latest").write_text("global_step10")
    files = {0: {"word_embeddings.weight": "gpt_neox.embed_in.weight"}, layers + 4: {"final_linear.weight": "embed_out.weight"}}
    files[layers + 3] = {f"norm.{last}": f"gpt_neox.final_layer_norm.{last}" for last in ("weight", "bias")}
    for layer in range(layers):
        front = f"gpt_neox.layers.{layer}."
        files[layer + 2] = {name.removeprefix(front): name for name in stored if name.startswith(front)}
    axes = {"query_key_value": 0, "dense_h_to_4h": 0, "word_embeddings": 0, "final_linear": 0, "attention.dense.weight": 1}
    axes["dense_4h_to_h.weight"] = 1
    for rank in range(tp):
        for number, names in files.items():
            content = {}
            for inner, name in names.items():
                axis = next((axis for part, axis in axes.items() if part in inner), None)
                value = stored[name] if axis is None else stored[name].chunk(tp, axis)[rank]
                content[inner] = change(number, inner, rank, value).clone()
            if 2 <= number < layers + 2:
                content["attention.rotary_emb.inv_freq"] = torch.arange(2.0)
            torch.save(content, place / f"layer_{number:02}-model_{rank:02}-model_states.pt")
        model = {"module": None, "buffer_names": [], "optimizer": None, "param_shapes": None, "dp_world_size": 1, "mp_world_size": tp}
        model |= {"global_steps": 10, "ds_config": {}, "ds_version": "0.16.9", "iteration": 10}
        torch.save(model, place / f"mp_rank_{rank:02}_model_states.pt")
    return folder


@pytest.mark.parametrize("tp", [1, 2])
def test_the_layers_of_gpt_neox_have_the_published_names(tp, tmp_path):
    folder = neox(tmp_path / "ckpt", tp=tp)
    assert library.verify(folder, HF / "gpt_neox").equal
    library.convert(library.plan(folder, to="hf"), tmp_path / "out")
    assert load_folder(tmp_path / "out") == load_folder(HF / "gpt_neox")


def test_a_replicated_bias_of_gpt_neox_that_differs_between_ranks_is_refused(tmp_path):
    """Older versions held summands there."""

    def change(layer, name, rank, value):
        return value + rank if name == "attention.dense.bias" and layer == 2 else value

    folder = neox(tmp_path / "ckpt", tp=2, change=change)
    with pytest.raises(CheckpointError, match=r"layers\.0\.attention\.dense\.bias"):
        library.convert(library.plan(folder, to="hf"), tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()


def five_layers(folder):
    stored, config = load_folder(LLAMA), json.loads((LLAMA / "config.json").read_text())
    more = {name.replace("layers.1.", f"layers.{i}."): value for name, value in stored.items() if "layers.1." in name for i in (2, 3, 4)}
    folder_of(folder, stored | more, LLAMA)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    return folder


def test_uneven_stages_are_written_and_the_variable_is_not_ignored(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    source = five_layers(tmp_path / "five")

    def layers_of(name, out):
        stored = load_file(out / f"model-pp-{name}-tp-0-part-0.safetensors")
        return sorted({int(key.split(".")[2]) for key in stored if ".layers." in key})

    done = reshard("convert", source, tmp_path / "uneven", "--to", "vllm", "--pp", 2, "--pp-layers", "2,3")
    assert done.code == 0 and "start vLLM with VLLM_PP_LAYER_PARTITION=2,3" in done.out
    assert [layers_of(stage, tmp_path / "uneven") for stage in (0, 1)] == [[0, 1], [2, 3, 4]]
    assert library.verify(source, tmp_path / "uneven").equal
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,3")
    done = reshard("convert", source, tmp_path / "even", "--to", "vllm", "--pp", 2)
    assert done.code == 0 and "VLLM_PP_LAYER_PARTITION=2,3 is set here, and the stages have 3,2 layers" in done.out
    assert "--pp-layers 2,3 writes those" in done.out
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,2")
    assert "PARTITION" not in reshard("convert", source, tmp_path / "same", "--to", "vllm", "--pp", 2).out
    for words in (("--pp", 2, "--pp-layers", "2,2"), ("--pp", 2, "--pp-layers", "5,0"), ("--pp-layers", "2,3")):
        done = reshard("convert", source, tmp_path / "no", "--to", "vllm", *words)
        assert done.code == 2 and "the model has 5 layers" in done.err and not (tmp_path / "no").exists()


@pytest.mark.parametrize("words", [
    "diff BASE DELTA", "verify BASE DELTA", "diff DELTA BASE", "convert DELTA OUT --to hf", "fingerprint DELTA", "stats DELTA",
    "serve-check DELTA", "roundtrip DELTA --to hf", "digests DELTA --to vllm", "explain DELTA BASE", "degrees DELTA --to vllm --tp 2",
    "convert BASE DELTA OUT --to hf --average",
])  # fmt: skip
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "moved"])
def test_a_delta_alone_names_what_to_give(words, is_kept, tmp_path):
    """A delta beside its base, as in a kept run, names this base; one that was moved names the base that it was made of."""
    base = tmp_path / "kept" / "step-100"
    shutil.copytree(FIXTURES / "delta" / "step-100", base)
    delta = tmp_path / "kept" / "step-200" if is_kept else tmp_path / "mine"
    assert reshard("delta", base, FIXTURES / "delta" / "step-200", delta).code == 0
    places = {"BASE": base, "DELTA": delta, "OUT": tmp_path / "out"}
    result = reshard(*(places.get(word, word) for word in words.split()))
    assert result.code == 2 and f"{delta}: it is a delta" in result.err and f"{base}+{delta}" in result.err, result.err
    assert reshard("fingerprint", f"{base}+{delta}").code == 0
    assert reshard("inspect", delta).code == 0 and reshard("doctor", delta).code == 0
