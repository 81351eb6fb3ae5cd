"""A trainer with a LoRA adapter: what each target rank holds after an update is the merged weights, computed here by plain numpy."""

import hashlib
import json

import numpy as np
import pytest
import torch
from helpers.weight_servers import server, vllm
from live.in_memory import updated
from live.test_quantized import by_columns, copies
from live.test_transfers import HF, assert_equal, by_rows, hellos, of_rank, stored
from safetensors.torch import save_file

import reshard
from reshard.canonical.content import Selection
from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.dtypes import from_safetensors
from reshard.live.agreement import agreed_plan
from reshard.live.memory.describe import describe
from reshard.live.memory.description import RankDescription

CONFIG = json.loads((HF / "llama" / "config.json").read_text())
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 10, "target_modules": [*MODULES], "task_type": "CAUSAL_LM"}
RANK = 4


def words_of(tensor, dtype):
    """A torch tensor as words of an element type."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy().view(dtype.word)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(tensors of the trainer under PEFT's names, folder with the merged weights)."""
    torch.manual_seed(1)
    tensors, merged = {}, {}
    bf16, f32 = (from_safetensors(name, where="") for name in ("BF16", "F32"))
    for name, (dtype, words) in stored(HF / "llama").items():
        base = torch.from_numpy(words.view(np.int16).copy()).view(torch.bfloat16)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if name.split(".")[-2] not in MODULES:
            tensors[f"{module}.weight"], merged[name] = (dtype, words), base
            continue
        a, b = torch.randn(RANK, words.shape[1]), torch.randn(words.shape[0], RANK).to(torch.bfloat16)
        tensors[f"{module}.base_layer.weight"] = dtype, words
        tensors[f"{module}.lora_A.default.weight"] = f32, words_of(a, f32)
        tensors[f"{module}.lora_B.default.weight"] = bf16, words_of(b, bf16)
        rows, columns, delta = b.float().numpy(), a.numpy(), np.zeros(words.shape, np.float32)
        for k in range(RANK):
            delta = delta + rows[:, k : k + 1] * columns[k]
        merged[name] = torch.from_numpy(base.float().numpy() + delta * np.float32(2.5)).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("merged")
    save_file(merged, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return tensors, folder


def with_settings(said, settings=SETTINGS):
    return [RankDescription(each.rank, each.boxes, adapter=settings) for each in said]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("held", "ranks"),
    [(by_rows, 1), (by_rows, 2), (by_rows, 3), (by_columns, 2), (copies, 2)],
    ids=["1 rank", "rows of 2", "rows of 3", "columns of 2", "copies of 2"],
)
def test_ranks_hold_the_merged_weights(held, ranks, tp, trained, tmp_path):
    tensors, folder = trained
    said, arrays = held(tensors, ranks)
    plan = agreed_plan(with_settings(said), hellos({**CONFIG, "dtype": "bfloat16"}, tp))
    reshard.convert(reshard.plan(folder, to="vllm", tp=tp), tmp_path / "out")
    staged, nbytes = updated(plan, arrays)
    for rank in range(tp):
        assert_equal(staged[rank], of_rank(tmp_path / "out", rank))
    assert nbytes == plan.nbytes == sum(plan.report.bytes_out) == sum(plan.report.bytes_in)


@pytest.fixture
def saved(trained, tmp_path):
    """A function that saves what the trainer holds, with some tensors exchanged, as torch.save does in step-300; returns the folder."""

    def save(**changed):
        folder = tmp_path / f"{len([*tmp_path.iterdir()])}" / "step-300"
        folder.mkdir(parents=True)
        held = {name: tensor_of(*tensor) for name, tensor in {**trained[0], **changed}.items()}
        torch.save(held, folder / "model.pt")
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "adapter_config.json").write_text(json.dumps(SETTINGS))
        return folder

    return save


def tensor_of(dtype, words):
    """Words as a torch tensor."""
    signed = torch.from_numpy(words.view(f"<i{words.itemsize}").copy())
    return signed.view({"BF16": torch.bfloat16, "F32": torch.float32}[dtype.name])


def held_after_update(tensors, tp):
    """What a server answers about its weights after an update by a trainer of two ranks that hold these tensors: by plain hashes."""
    said, arrays = by_rows(tensors, 2)
    staged, _ = updated(agreed_plan(with_settings(said), hellos({**CONFIG, "dtype": "bfloat16"}, tp)), arrays)
    return {
        f"dp0:pp0:pcp0:tp{rank}:{name}": hashlib.sha256(words.tobytes()).hexdigest()
        for rank, held in enumerate(staged)
        for name, words in held.items()
    }


def verified(folder, digests, version, **options):
    with server(vllm(digests, **{"/weight_info": (200, json.dumps({"weight_version": version}).encode(), {})})) as (address, _):
        return reshard.verify(folder, address, **options)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_server_holds_the_merged_weights_of_the_step_that_was_sent(tp, trained, saved):
    result = verified(saved(), held_after_update(trained[0], tp), "7")
    assert result.equal and result.matching == result.parameters and any("merged into its weights" in note for note in result.notes)
    assert any("the server's version is 7, a number that may count updates" in note and "step 300" in note for note in result.notes)


def test_a_server_of_an_older_step_of_another_base_or_never_updated_holds_other_weights(trained, saved):
    def with_other_words(part):
        return {name: (dtype, words ^ np.uint8(1).astype(words.dtype)) for name, (dtype, words) in trained[0].items() if part in name}

    older = verified(saved(), held_after_update({**trained[0], **with_other_words("lora_B")}, 2), "step-200")
    assert older.equal is False and {row.kind for row in older.differences} == {"values", "version"}
    assert "the server's version is step-200, and this checkpoint is of step 300" in [row.detail for row in older.differences]
    base = "layers.1.mlp.down_proj.base_layer"
    other = verified(saved(**with_other_words(base)), held_after_update(trained[0], 2), "8")
    assert {row.name.split(":")[-1] for row in other.differences} == {"model.layers.1.mlp.down_proj.weight"}
    started = verified(saved(), reshard.digests(HF / "llama", to="vllm", tp=2), "default")
    assert started.equal is False and "no update has set a version since the server started" in started.notes
    assert any("the server holds it without the LoRA adapter" in note for note in started.notes)
    assert not any("without the LoRA adapter" in note for note in other.notes + older.notes)


def test_the_base_alone_is_compared_where_the_adapter_is_left_out(saved):
    selection = Selection(exclude=("*lora_*",))
    digests = reshard.digests(HF / "llama", to="vllm", tp=2)
    assert verified(saved(), digests, "default", selection=selection).equal


def test_without_the_scale_of_the_adapter_nothing_is_said(trained, saved):
    folder = saved()
    (folder / "adapter_config.json").unlink()
    with pytest.raises(RequestError, match="nothing tells its lora_alpha") as caught:
        verified(folder, held_after_update(trained[0], 1), "1")
    assert "adapter_config.json" in caught.value.do and "exclude='*lora_*'" in caught.value.do


def test_only_changed_values_of_an_adapter_travel(trained, tmp_path):
    tensors, folder = trained
    said, arrays = by_rows(tensors, 2)
    plan = agreed_plan(with_settings(said), hellos({**CONFIG, "dtype": "bfloat16"}, 2))
    reshard.convert(reshard.plan(folder, to="vllm", tp=2), tmp_path / "out")
    before = [{name: words ^ (".lora_B." in name) for name, words in held.items()} for held in arrays]
    staged, nbytes = updated(plan, before, arrays)
    for rank in range(2):
        assert_equal(staged[rank], of_rank(tmp_path / "out", rank))
    assert nbytes < plan.nbytes / 4


def test_the_base_alone_is_never_sent(trained):
    """Without the adapter's settings nothing tells its scale; and another scale gives other weights."""
    said, arrays = by_rows(trained[0], 2)
    with pytest.raises(RequestError, match="has a LoRA adapter of 28 tensors, and nothing tells its settings") as caught:
        agreed_plan(said, hellos(CONFIG, 2))
    assert "lora_A" in caught.value.where and "peft_config" in caught.value.do
    plans = [agreed_plan(with_settings(said, {**SETTINGS, "lora_alpha": alpha}), hellos(CONFIG, 1)) for alpha in (10, 12)]
    one, other = (updated(plan, arrays)[0][0] for plan in plans)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert not np.array_equal(one[name], other[name])


def test_an_adapter_that_no_live_update_merges_is_refused(trained):
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {name: tensor for name, tensor in trained[0].items() if ".lora_" not in name or name.startswith(f"{module}.")}
    dtype = from_safetensors("F32", where="")
    tensors[f"{module}.lora_magnitude_vector.default.weight"] = (
        dtype,
        np.ones(tensors[f"{module}.lora_B.default.weight"][1].shape[0], dtype.word),
    )
    with pytest.raises((UnsupportedError, RequestError), match=r"q_proj\.weight: 1 tensor .* a live update does not know"):
        agreed_plan(with_settings(by_rows(tensors, 2)[0], {**SETTINGS, "use_dora": True}), hellos(CONFIG, 2))


def test_a_peft_model_tells_its_settings():
    class Settings:
        def to_dict(self):
            return {"peft_type": "LORA", "lora_alpha": 10, "target_modules": {"q_proj", "k_proj"}}

    model = torch.nn.Linear(2, 2)
    assert describe(model, rank=0).adapter is None
    model.peft_config = {"default": Settings()}
    assert describe(model, rank=0).adapter == {"peft_type": "LORA", "lora_alpha": 10, "target_modules": ["k_proj", "q_proj"]}
    model.peft_config = {"default": Settings(), "other": Settings()}
    assert describe(model, rank=0).adapter is None, "two adapters: which one is meant is not guessed"
