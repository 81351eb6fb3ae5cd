"""Meta's and Mistral's own files. The oracles are transformers' and vLLM's conversions of what Meta's and Mistral's code saved."""

import json
import shutil

import pytest
import torch
from helpers.fixture_places import FIXTURES, HF, described
from safetensors.torch import load_file, save_file

import reshard
from reshard.errors import CheckpointError, IncompleteError, RequestError, UnsupportedError

FOLDER = FIXTURES / "consolidated"
TRUTH = json.loads((FOLDER / "truth.json").read_text())
META, MISTRAL = ("llama2-tp2", "llama3-tp2"), ("mistral", "mixtral")
CUTS = {"llama2-tp2": "columns", "llama3-tp2": "rows"}


def digests(source):
    opened = reshard.open(source)
    content = opened.content()
    found = ((name, described(tensor, opened.files)) for name, tensor in content.tensors.items())
    return {name: [of_tensor["shape"], of_tensor["sha256"]] for name, of_tensor in found}


def edited(case, folder, changes=(), params=()):
    """A copy of a case with other tensors in the first file, and other settings."""
    shutil.copytree(FOLDER / case, folder)
    about = {**json.loads((folder / "params.json").read_text()), **dict(params)}
    (folder / "params.json").write_text(json.dumps({key: value for key, value in about.items() if value is not None}))
    path = folder / "consolidated.00.pth"
    if changes:
        state = {**torch.load(path), **dict(changes)}
        torch.save({name: tensor for name, tensor in state.items() if tensor is not None}, path)
    return folder


@pytest.mark.parametrize("case", TRUTH)
def test_the_weights_are_those_of_the_published_conversion(case, tmp_path):
    assert digests(FOLDER / case) == TRUTH[case]
    for target, options in (("hf", {}), ("vllm", {"tp": 2})):
        reshard.convert(reshard.plan(FOLDER / case, to=target, **options), tmp_path / target)
        assert reshard.verify(FOLDER / case, tmp_path / target).equal
    assert {name: list(tensor.shape) for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items()} == {
        name: shape for name, (shape, _) in TRUTH[case].items()
    }


@pytest.mark.parametrize("case", META)
def test_what_is_written_are_the_files_that_metas_code_saved(case, tmp_path):
    """Also from the published model, with its own config."""
    reshard.convert(reshard.plan(FOLDER / case, to="hf"), tmp_path / "hf")
    for number, source in enumerate((FOLDER / case, tmp_path / "hf")):
        out = tmp_path / str(number)
        reshard.convert(reshard.plan(source, to="consolidated", tp=2, embedding_cut=CUTS[case]), out)
        assert sorted(path.name for path in out.glob("*.pth")) == ["consolidated.00.pth", "consolidated.01.pth"]
        for rank in range(2):
            ours, theirs = (torch.load(folder / f"consolidated.0{rank}.pth") for folder in (out, FOLDER / case))
            theirs.pop("rope.freqs", None)
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert reshard.verify(out, FOLDER / case).equal
        params = json.loads((out / "params.json").read_text())
        assert reshard.open(out).model.dimensions == reshard.open(FOLDER / case).model.dimensions
        # The size of the MLP by Meta's formula.
        assert params.get("ffn_dim_multiplier") == {"llama2-tp2": None, "llama3-tp2": 1.3}[case]
        size = int(params.get("ffn_dim_multiplier", 1) * int(8 * params["dim"] / 3))
        assert -(-size // params["multiple_of"]) * params["multiple_of"] == 4 * len(theirs["layers.0.feed_forward.w1.weight"]) // 2


@pytest.mark.parametrize("case", MISTRAL)
def test_what_is_written_is_the_file_that_mistrals_code_saved(case, tmp_path):
    reshard.convert(reshard.plan(FOLDER / case, to="hf"), tmp_path / "hf")
    reshard.convert(reshard.plan(tmp_path / "hf", to="consolidated"), tmp_path / "out")
    ours, theirs = (load_file(folder / "consolidated.safetensors") for folder in (tmp_path / "out", FOLDER / case))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert json.loads((tmp_path / "out" / "params.json").read_text()) == json.loads((FOLDER / case / "params.json").read_text())


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_of_any_number_are_read_back(tp, tmp_path):
    cut = {"embedding_cut": "columns"} if tp > 1 else {}
    source = HF / "llama"
    if tp > 2:
        with pytest.raises(RequestError, match=f"`tp={tp}` does not divide the 2 heads of layers.0.attention.wk.weight"):
            reshard.plan(source, to="consolidated", tp=tp, **cut)
        return
    reshard.convert(reshard.plan(source, to="consolidated", tp=tp, **cut), tmp_path / "out")
    assert reshard.verify(source, tmp_path / "out").equal
    # This fixture has wider heads, which Meta's params.json cannot state.
    assert any("Meta's code does not load" in note for note in reshard.plan(source, to="consolidated", tp=tp, **cut).layout.notes)


def test_one_file_without_params_is_a_state_dict_of_any_program(tmp_path):
    source = edited("llama2-tp2", tmp_path / "in")
    (source / "params.json").unlink()
    assert reshard.open(source).format == "consolidated"
    (source / "consolidated.01.pth").unlink()
    assert reshard.open(source).format == "pt"


def test_how_the_embedding_is_divided_is_not_guessed(tmp_path):
    with pytest.raises(RequestError, match="`embedding_cut=rows`"):
        reshard.plan(HF / "llama", to="consolidated", tp=2)


def test_a_config_in_the_folder_above_is_used(tmp_path):
    """As on the Hugging Face Hub, where Meta's files lie in original/."""
    reshard.convert(reshard.plan(FOLDER / "llama3-tp2", to="hf"), tmp_path / "hf")
    shutil.copytree(FOLDER / "llama3-tp2", tmp_path / "hf" / "original")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 77}))
    opened = reshard.open(tmp_path / "hf" / "original")
    assert opened.format == "consolidated" and opened.model_files.config["max_position_embeddings"] == 77
    assert reshard.verify(tmp_path / "hf", opened).equal


def test_a_stored_head_of_a_tied_model_is_compared_with_the_embedding(tmp_path):
    source = edited("mistral", tmp_path / "in")
    tensors = load_file(source / "consolidated.safetensors")
    (source / "params.json").write_text(json.dumps({**json.loads((source / "params.json").read_text()), "tied_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"it and lm_head\.weight disagree.*tie_word_embeddings"):
        reshard.convert(reshard.plan(source, to="hf"), tmp_path / "different")
    tensors["output.weight"] = tensors["tok_embeddings.weight"].clone()
    save_file(tensors, source / "consolidated.safetensors")
    reshard.convert(reshard.plan(source, to="hf"), tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize(
    ("case", "params", "question"),
    [
        ("llama3-tp2", {"use_scaled_rope": True}, "use_scaled_rope"),
        ("llama3-tp2", {"moe_args": {}}, "moe_args"),
        ("mistral", {"rope_theta": None}, "rope_theta"),
        ("mistral", {"quantization": {}}, "quantization"),
        ("mistral", {"sliding_window": [None, 8]}, "sliding windows"),
        ("mixtral", {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1}}, "settings of its experts"),
    ],
)
def test_what_params_do_not_tell_is_asked_for(case, params, question, tmp_path):
    source = edited(case, tmp_path / "in", params=params)
    assert reshard.open(source).index.tensors
    with pytest.raises(RequestError, match=rf"{question}.*`model=DIR`"):
        reshard.plan(source, to="hf")
    reshard.convert(reshard.plan(FOLDER / case, to="hf"), tmp_path / "model")
    reshard.convert(reshard.plan(source, to="hf", model=tmp_path / "model"), tmp_path / "out")
    assert reshard.verify(tmp_path / "model", tmp_path / "out").equal


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    missing = edited("llama2-tp2", tmp_path / "missing")
    (missing / "consolidated.00.pth").rename(missing / "consolidated.02.pth")
    with pytest.raises(IncompleteError, match=r"consolidated\.00\.pth"):
        reshard.open(missing)
    other = edited("llama2-tp2", tmp_path / "other", {"layers.1.feed_forward.w1.weight": torch.ones(30, 16, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=r"layers\.1\.feed_forward\.w1"):
        reshard.open(other)
    copies = edited("llama2-tp2", tmp_path / "copies", {"norm.weight": torch.ones(16, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        reshard.convert(reshard.plan(copies, to="hf"), tmp_path / "out")
    absent = edited("llama2-tp2", tmp_path / "absent", {"layers.0.attention.wo.weight": None})
    with pytest.raises(CheckpointError, match=r"layers\.0\.attention\.wo"):
        reshard.open(absent)
    unknown = edited("llama2-tp2", tmp_path / "unknown", {"layers.0.attention.wz.weight": torch.ones(2)})
    with pytest.raises(UnsupportedError, match="How 2 ranks divide it is not known"):
        reshard.open(unknown)
    embedding = edited("llama2-tp2", tmp_path / "embedding", {"tok_embeddings.weight": torch.ones(24, 5)})
    with pytest.raises(CheckpointError, match=r"\[24, 5\].*16 columns"):
        reshard.open(embedding)
    with pytest.raises(CheckpointError, match="head_dim is 8, and the tensors have 4"):
        reshard.open(edited("mistral", tmp_path / "size", params={"head_dim": 8}))
    with pytest.raises(CheckpointError, match="n_heads is 0; a positive number"):
        reshard.open(edited("mistral", tmp_path / "heads", params={"n_heads": 0}))
    twice = edited("mistral", tmp_path / "twice")
    shutil.copy(twice / "consolidated.safetensors", twice / "consolidated-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match="two files hold it"):
        reshard.open(twice)
    with pytest.raises(CheckpointError, match="it has no dim"):
        reshard.open(edited("mistral", tmp_path / "dim", params={"dim": None}))


def test_only_models_that_were_compared_are_written():
    with pytest.raises(UnsupportedError, match="known for llama, mistral, mixtral, and this is qwen2"):
        reshard.plan(HF / "qwen2", to="consolidated")
    with pytest.raises(RequestError, match="`tp=2` does not apply to Mistral's files"):
        reshard.plan(HF / "mistral", to="consolidated", tp=2)


def test_beside_published_files_the_published_ones_are_read(tmp_path):
    """As on the Hugging Face Hub: Mistral publishes both forms in one folder, each with an index."""
    reshard.convert(reshard.plan(FOLDER / "mistral", to="hf", max_shard_size="4KB"), tmp_path / "hf")
    shutil.copy(FOLDER / "mistral" / "consolidated.safetensors", tmp_path / "hf")
    shutil.copy(FOLDER / "mistral" / "params.json", tmp_path / "hf")
    names = load_file(FOLDER / "mistral" / "consolidated.safetensors")
    index = {"weight_map": dict.fromkeys(names, "consolidated.safetensors")}
    (tmp_path / "hf" / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    opened = reshard.open(tmp_path / "hf")
    assert opened.format == "hf" and any("consolidated.safetensors" in note for note in opened.index.facts.notes)
    assert reshard.verify(FOLDER / "mistral", opened).equal


def test_several_safetensors_files_are_read_together(tmp_path):
    source = edited("mistral", tmp_path / "in")
    tensors = load_file(source / "consolidated.safetensors")
    (source / "consolidated.safetensors").unlink()
    for number in (1, 2):
        part = dict(list(tensors.items())[number - 1 :: 2])
        save_file(part, source / f"consolidated-0000{number}-of-00002.safetensors")
    assert reshard.verify(FOLDER / "mistral", source).equal
    (source / "consolidated-00001-of-00002.safetensors").unlink()
    with pytest.raises(IncompleteError, match="consolidated-00001-of-00002"):
        reshard.open(source)
