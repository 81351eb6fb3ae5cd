"""Components of diffusers pipelines: the names, the index and the config that diffusers 0.42.1 writes (fixtures/diffusers), from what
trainers save."""

import hashlib
import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from helpers.reshard_command import reshard as run

import reshard
from reshard.errors import CheckpointError, RequestError, TargetError, UnsupportedError

FIXTURES = Path(__file__).resolve().parent.parent.parent / "fixtures" / "diffusers"
CLASSES = sorted(path.parent.name for path in FIXTURES.glob("*/truth.json"))
WAN = "WanTransformer3DModel"
SINGLE = "diffusion_pytorch_model.safetensors"


def truth_of(name):
    return json.loads((FIXTURES / name / "truth.json").read_text())


def weights(name, dtype=torch.float32):
    torch.manual_seed(len(name))
    return {key: torch.randn(math.prod(shape)).reshape(shape).to(dtype) for key, shape in truth_of(name)["shapes"].items()}


def component(folder, name, file=SINGLE, dtype=torch.float32):
    """A folder as save_pretrained writes it."""
    folder.mkdir(parents=True)
    safetensors.torch.save_file(weights(name, dtype), folder / file, metadata={"format": "pt"})
    (folder / "config.json").write_bytes((FIXTURES / name / "config.json").read_bytes())
    return folder


def trained(folder, name, prefix=""):
    """A step as a trainer saves it with torch.distributed.checkpoint."""
    dcp.save({"model": {prefix + key: tensor for key, tensor in weights(name).items()}}, checkpoint_id=str(folder), no_dist=True)
    return folder


def stored(folder):
    return {key: each for path in sorted(folder.glob("*.safetensors")) for key, each in safetensors.torch.load_file(path).items()}


def files(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(("reshard.", "config")))


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[key], each) and ours[key].dtype == each.dtype for key, each in theirs.items()
    )


@pytest.mark.parametrize("prefix", ["", "transformer.", "model.module."])
@pytest.mark.parametrize("name", CLASSES)
def test_a_trained_component_is_what_diffusers_saves(name, prefix, tmp_path):
    model, step = component(tmp_path / "model", name), trained(tmp_path / "step", name, prefix)
    plan = reshard.plan(step, to="hf", model=model, max_shard_size=40_000)
    reshard.convert(plan, tmp_path / "out")
    assert files(tmp_path / "out") == truth_of(name)["files"]
    assert (tmp_path / "out" / "config.json").read_bytes() == (FIXTURES / name / "config.json").read_bytes()
    if index := truth_of(name)["index"]:
        written = next((tmp_path / "out").glob("*.index.json")).read_bytes()
        assert hashlib.sha256(written).hexdigest() == index
    assert same(stored(tmp_path / "out"), weights(name))
    assert any(f"`{prefix}` is removed" in note for note in plan.layout.notes) == bool(prefix)
    assert reshard.verify(tmp_path / "out", model).equal


def test_files_hold_10_gb_unless_a_limit_is_given(tmp_path):
    model, step = component(tmp_path / "model", WAN), trained(tmp_path / "step", WAN)
    reshard.convert(reshard.plan(step, to="hf", model=model), tmp_path / "out")
    assert files(tmp_path / "out") == [SINGLE]
    header = safetensors.safe_open(tmp_path / "out" / SINGLE, "pt").metadata()
    assert header == {"format": "pt"}


def test_a_type_is_cast_and_the_config_stays(tmp_path):
    model = component(tmp_path / "model", WAN)
    reshard.convert(reshard.plan(model, to="hf", dtype="bf16", keep_dtype=["*norm*"]), tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (FIXTURES / WAN / "config.json").read_bytes()
    assert {each.dtype for key, each in stored(tmp_path / "out").items() if "norm" in key} == {torch.float32}
    assert stored(tmp_path / "out")["proj_out.weight"].dtype == torch.bfloat16


def variant(folder):
    """Two files of a variant and their index, as diffusers names them, beside the main weights."""
    component(folder, WAN)
    tensors = [*weights(WAN, torch.float16).items()]
    names = [f"diffusion_pytorch_model.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)]
    halves = dict(zip(names, (dict(tensors[:30]), dict(tensors[30:])), strict=True))
    for file, half in halves.items():
        safetensors.torch.save_file(half, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {key: file for file, half in halves.items() for key in half}}
    (folder / "diffusion_pytorch_model.safetensors.index.fp16.json").write_text(json.dumps(index))
    return folder


def test_variants_are_read_and_written_under_their_names(tmp_path):
    folder = variant(tmp_path / "model")
    (folder / SINGLE).unlink()
    assert reshard.open(folder).index.element_types["proj_out.bias"] == "F16"
    step = trained(tmp_path / "step", WAN, "transformer.")
    reshard.convert(reshard.plan(step, to="hf", model=folder, like=folder), tmp_path / "out")
    assert files(tmp_path / "out") == files(folder)
    assert same(stored(tmp_path / "out"), weights(WAN, torch.float16))


def test_beside_a_variant_the_main_weights_are_read(tmp_path):
    folder = component(tmp_path / "model", WAN)
    safetensors.torch.save_file(weights(WAN, torch.float16), folder / "diffusion_pytorch_model.fp16.safetensors")
    opened = reshard.open(folder)
    assert opened.index.element_types["proj_out.bias"] == "F32"
    assert any("diffusion_pytorch_model.fp16.safetensors" in note for note in opened.index.facts.notes)


def test_an_unknown_prefix_is_said(tmp_path):
    """The folder of the config has no weights, so nothing tells the names."""
    model, step = component(tmp_path / "model", WAN), trained(tmp_path / "step", WAN, "transformer.")
    (model / SINGLE).unlink()
    plan = reshard.plan(step, to="hf", model=model)
    assert any("all names of WanTransformer3DModel begin with `transformer.`" in note for note in plan.layout.notes)
    reshard.convert(reshard.plan(step, to="hf", model=model, strip_prefix="transformer."), tmp_path / "out")
    assert same(stored(tmp_path / "out"), weights(WAN))


@pytest.mark.parametrize("file", [False, True])
def test_a_prefix_of_the_chosen_model_is_removed(file, tmp_path):
    """Distillation of DiTs (Self-Forcing, CausVid) saves {"generator": ..., "critic": ..., "generator_ema": ...}; none is the main one."""
    model, own = component(tmp_path / "model", WAN), weights(WAN)
    roots = {
        root: {f"model.{key}": tensor + shift for key, tensor in own.items()} for shift, root in enumerate(("generator_ema", "critic"))
    }
    saved = {**roots, "optimizer": {"state": {}, "param_groups": []}} if file else {"model": own, "ema": roots["generator_ema"]}
    (torch.save if file else lambda value, path: dcp.save(value, checkpoint_id=path, no_dist=True))(saved, str(tmp_path / "step.pt"))
    if file:
        with pytest.raises(RequestError, match="several models: generator_ema, critic"):
            reshard.plan(tmp_path / "step.pt", to="hf", model=model)
    plan = reshard.plan(tmp_path / "step.pt", to="hf", model=model, root="generator_ema" if file else "ema")
    reshard.convert(plan, tmp_path / "out")
    assert same(stored(tmp_path / "out"), own)
    assert any("`model.` is removed" in note for note in plan.layout.notes)


def test_the_only_model_of_a_file_needs_no_usual_key(tmp_path):
    model = component(tmp_path / "model", WAN)
    torch.save({"params_ema": weights(WAN), "rng_states": {"cuda": torch.ones(2, 2)}, "epoch": 3}, tmp_path / "step.pt")
    reshard.convert(tmp_path / "step.pt", tmp_path / "out", to="hf", model=model)
    assert same(stored(tmp_path / "out"), weights(WAN))


def test_the_index_of_a_variant_is_not_left_as_weights(tmp_path):
    folder = variant(tmp_path / "model")
    (folder / SINGLE).unlink()
    assert reshard.convert(folder, tmp_path / "out", to="hf").left == ()


@pytest.mark.parametrize("prefix", ["", "dit."])
def test_a_weight_of_the_component_that_was_not_saved_is_named(prefix, tmp_path):
    model, step = component(tmp_path / "model", WAN), tmp_path / "step"
    saved = {prefix + key: tensor for key, tensor in weights(WAN).items() if key != "proj_out.bias"}
    dcp.save({"model": saved}, checkpoint_id=str(step), no_dist=True)
    with pytest.raises(CheckpointError, match=r"lacks 1 weight of WanTransformer3DModel, such as proj_out\.bias"):
        reshard.plan(step, to="hf", model=model)
    reshard.convert(reshard.plan(step, to="hf", model=model, include="*"), tmp_path / "out")
    assert stored(tmp_path / "out").keys() == weights(WAN).keys() - {"proj_out.bias"}, "without the prefix"


def test_names_of_another_repository_are_kept_and_said(tmp_path):
    model, step = component(tmp_path / "model", WAN), tmp_path / "step"
    saved = {f"double_blocks.{number}.weight": torch.ones(3) for number in range(4)} | {"proj_out.bias": torch.ones(3)}
    dcp.save({"model": saved}, checkpoint_id=str(step), no_dist=True)
    plan = reshard.plan(step, to="hf", model=model)
    assert any("weights of WanTransformer3DModel are not there under its names" in note for note in plan.layout.notes)
    reshard.convert(plan, tmp_path / "out")
    assert stored(tmp_path / "out").keys() == saved.keys()


def test_what_is_not_of_the_component_is_said(tmp_path):
    model, step = component(tmp_path / "model", WAN), tmp_path / "step"
    others = {"text_encoder.a": torch.ones(3)}
    dcp.save({"model": {f"transformer.{key}": each for key, each in weights(WAN).items()} | others}, checkpoint_id=str(step), no_dist=True)
    plan = reshard.plan(step, to="hf", model=model)
    assert any("not of WanTransformer3DModel: 1 tensor, such as text_encoder.a" in note for note in plan.layout.notes)


def test_commands_speak_of_components(tmp_path):
    folder = component(tmp_path / "model", WAN)
    assert not reshard.serve_check(folder).findings or {each.severity for each in reshard.serve_check(folder).findings} == {"info"}
    said = run("inspect", folder).out
    assert "WanTransformer3DModel" in said and "a component of a diffusers pipeline" in said
    assert "tokenizer" not in said and "architectures --start" not in said
    (folder / SINGLE).rename(folder / "model.safetensors")
    (finding,) = (each for each in reshard.serve_check(folder).findings if each.severity == "error")
    assert finding.id == "not-served" and SINGLE in finding.detail
    with pytest.raises(RequestError, match="a component of a diffusers pipeline"):
        reshard.plan(folder, to="vllm", tp=2)


def test_a_pipeline_names_its_components(tmp_path):
    pipeline = tmp_path / "pipeline"
    component(pipeline / "transformer", WAN)
    component(pipeline / "unet", "UNet2DConditionModel")
    (pipeline / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", "transformer": ["diffusers", WAN]}))
    step = trained(tmp_path / "step", WAN)
    with pytest.raises(RequestError, match=r"pipeline of diffusers.*transformer/"):
        reshard.plan(step, to="hf", model=pipeline)
    said = run("convert", pipeline, tmp_path / "out", "--to", "hf", "--component", "unet")
    assert said.code == 0 and files(tmp_path / "out") == [SINGLE]


def pipeline_of(folder, name=WAN):
    """A pipeline with a component of that class, a second one, and files of other kinds."""
    component(folder / "transformer", name)
    component(folder / "vae", "AutoencoderKL")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "DDIMScheduler"}')
    (folder / "assets").mkdir()
    (folder / "assets" / "large.bin").write_bytes(bytes(range(256)) * 1000)
    (folder / "assets" / "empty").touch()
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", "transformer": ["diffusers", name]}))
    return folder


def others(folder):
    """The files outside of the component."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {path: (folder / path).read_bytes() for path in paths if not path.startswith(("transformer/", ".git/"))}


@pytest.mark.parametrize("name", CLASSES)
def test_the_whole_pipeline_is_written_with_the_new_component(name, tmp_path):
    pipeline, step = pipeline_of(tmp_path / "pipeline", name), tmp_path / "step"
    new = {key: tensor + 1 for key, tensor in weights(name).items()}
    dcp.save({"model": {f"transformer.{key}": tensor for key, tensor in new.items()}}, checkpoint_id=str(step), no_dist=True)
    out = tmp_path / "out"
    result = reshard.convert(step, out, to="hf", model=pipeline, part="transformer", whole_pipeline=True)
    assert others(out) == others(pipeline) and not (out / ".git").exists()
    assert same(stored(out / "transformer"), new)
    assert (out / "transformer" / "config.json").read_bytes() == (pipeline / "transformer" / "config.json").read_bytes()
    assert result.path == str(out) and [*result.files] == [f"transformer/{SINGLE}"]
    assert any("copied from" in note for note in result.notes)
    assert reshard.verify(out / "transformer").equal


def test_the_command_chooses_the_component_of_the_model(tmp_path):
    pipeline, step, out = pipeline_of(tmp_path / "pipeline"), trained(tmp_path / "step", WAN), tmp_path / "out"
    asked = ("convert", step, out, "--to", "hf", "--whole-pipeline", "--component", "transformer", "--model", pipeline)
    assert run(*asked, "--dry-run").code == 0 and not out.exists()
    assert run(*asked).code == 0
    assert others(out) == others(pipeline)
    again = run(*asked, "--if-changed")
    assert again.code == 0 and "unchanged" in again.out
    assert "target-exists" in run(*asked).err
    wrong = run("convert", step, tmp_path / "other", "--to", "hf", "--component", "text_encoder", "--model", pipeline)
    assert wrong.code == 2 and not (tmp_path / "other").exists()


def test_parts_write_a_pipeline_once(tmp_path):
    pipeline, step, out = pipeline_of(tmp_path / "pipeline"), trained(tmp_path / "step", WAN), tmp_path / "out"
    plan = reshard.plan(step, to="hf", model=pipeline / "transformer", max_shard_size=40_000)
    first = reshard.convert_part(plan, out, "0/2", whole_pipeline=True)
    assert first.result is None and not (out / "model_index.json").exists()
    second = reshard.convert_part(plan, out, "1/2", whole_pipeline=True)
    assert second.result is not None and others(out) == others(pipeline)


def test_what_lies_in_the_place_of_a_pipeline_is_kept(tmp_path):
    pipeline, step, out = pipeline_of(tmp_path / "pipeline"), trained(tmp_path / "step", WAN), tmp_path / "out"
    asked = {"to": "hf", "model": pipeline / "transformer", "whole_pipeline": True}
    out.mkdir()
    (out / "model_index.json").write_text("{}")
    for given in ({}, {"resume": True}, {"if_changed": True}):
        with pytest.raises(TargetError, match=r"model_index\.json"):
            reshard.convert(step, out, **asked, **given)
    assert not (out / "transformer").exists()
    reshard.convert(step, out, **asked, overwrite=True)
    assert others(out) == others(pipeline)
    (tmp_path / "mine" / "assets").mkdir(parents=True)
    (tmp_path / "mine" / "assets" / "large.bin").write_bytes(b"mine")
    with pytest.raises(TargetError, match="large"):
        reshard.convert(step, tmp_path / "mine", **asked, overwrite=True)
    with pytest.raises(TargetError, match="contain each other"):
        reshard.convert(step, pipeline, **asked, overwrite=True)


def test_without_a_pipeline_nothing_is_written(tmp_path):
    model, step = component(tmp_path / "model", WAN), trained(tmp_path / "step", WAN)
    with pytest.raises(RequestError, match=r"no model_index\.json"):
        reshard.convert(step, tmp_path / "out", to="hf", model=model, whole_pipeline=True)
    pipeline = pipeline_of(tmp_path / "pipeline")
    (tmp_path / "secret").write_text("not of the pipeline")
    (pipeline / "assets" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsupportedError, match="leads out of the pipeline"):
        reshard.convert(step, tmp_path / "out", to="hf", model=pipeline / "transformer", whole_pipeline=True)
    with pytest.raises(UnsupportedError, match="local directory"):
        reshard.convert(step, "memory://bucket/out", to="hf", model=model, whole_pipeline=True)
    assert not (tmp_path / "out").exists()


def a_pipeline(folder):
    """Wan 2.2's parts: two transformers, a VAE, and parts without weights."""
    for name in ("transformer", "transformer_2"):
        component(folder / name, WAN)
    component(folder / "vae", "AutoencoderKL")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    named = {"transformer": WAN, "transformer_2": WAN, "vae": "AutoencoderKL", "scheduler": "FlowMatchEulerDiscreteScheduler"}
    index = {"_class_name": "WanPipeline", "_diffusers_version": "0.42.1", "boundary_ratio": 0.9, "image_encoder": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index | {name: ["diffusers", class_name] for name, class_name in named.items()}))
    return folder


def test_a_pipeline_is_inspected_and_checked_as_a_whole(tmp_path):
    folder = a_pipeline(tmp_path / "pipeline")
    said = run("inspect", folder).out
    assert "WanPipeline, a pipeline of diffusers with 4 components" in said and "FlowMatchEulerDiscreteScheduler" in said
    document = json.loads(run("inspect", folder, "--json").out)
    assert [step["part"] for step in document["steps"]] == ["transformer", "transformer_2", "vae"]
    parts = {part["name"]: part for part in document["pipeline"]["components"]}
    assert (parts["vae"]["class"], parts["vae"]["dtypes"], parts["scheduler"]["format"]) == ("AutoencoderKL", ["F32"], None)
    assert parts["transformer"]["parameters"] == sum(math.prod(shape) for shape in truth_of(WAN)["shapes"].values())
    report = reshard.doctor(folder, deep=True)
    assert report.healthy and report.tensors == sum(part["tensors"] for part in parts.values())
    served = [finding.detail for finding in reshard.serve_check(folder).findings if finding.id == "not-known"]
    assert any("SGLang" in text and "has a pipeline of its own for WanPipeline" in text for text in served)
    assert any("vLLM-Omni" in text for text in served)
    assert run("doctor", folder, "--component", "vae").code == 0, "one component is chosen as before"


def test_a_pipeline_with_code_of_its_own_names_a_file_and_a_class(tmp_path):
    folder = a_pipeline(tmp_path / "pipeline")
    index = json.loads((folder / "model_index.json").read_text()) | {"_class_name": ["pipeline", "OwnPipeline"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    assert reshard.doctor(folder).healthy
    assert "OwnPipeline, a pipeline of diffusers with 4 components" in run("inspect", folder).out


def test_where_the_index_and_the_folders_of_a_pipeline_disagree_is_said(tmp_path):
    folder = a_pipeline(tmp_path / "pipeline")
    (folder / "transformer_2" / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    (folder / "transformer" / SINGLE).unlink()
    (folder / "vae").rename(folder / "vae_old")
    findings = {(finding.id, finding.severity, finding.file): finding.detail for finding in reshard.doctor(folder).findings}
    assert "no file of its weights" in findings["missing-file", "error", "transformer/"]
    assert "AutoencoderKL" in findings["missing-file", "error", "vae/"]
    assert "FluxTransformer2DModel" in findings["unlike-pipeline", "warning", "transformer_2/"]
    assert "does not name the folder" in findings["unlike-pipeline", "warning", "vae_old/"]
    assert "vae_old/" in run("inspect", folder).out
    assert run("serve-check", folder).code == 1
    (folder / "vae_old" / SINGLE).write_bytes(b"12345678")
    assert any(finding.file == f"vae_old/{SINGLE}" and finding.severity == "error" for finding in reshard.doctor(folder).findings)
    (folder / "model_index.json").write_text("[]")
    assert run("doctor", folder).code == 3


def test_a_text_encoder_of_a_pipeline_needs_no_tokenizer_beside_it(tmp_path):
    folder = a_pipeline(tmp_path / "pipeline")
    (folder / "transformer_2" / "config.json").write_text('{"architectures": ["UMT5EncoderModel"], "model_type": "umt5"}')
    assert not any(finding.id == "missing-tokenizer" for finding in reshard.doctor(folder / "transformer_2").findings)
    (folder / "model_index.json").unlink()
    assert any(finding.id == "missing-tokenizer" for finding in reshard.doctor(folder / "transformer_2").findings)


def test_a_dry_run_names_the_copies_and_their_room_is_counted(tmp_path, monkeypatch):
    folder, step = a_pipeline(tmp_path / "pipeline"), trained(tmp_path / "step", WAN)
    asked = ("convert", step, tmp_path / "out", "--to", "hf", "--whole-pipeline", "--component", "transformer", "--model", folder)
    document = json.loads(run(*asked, "--dry-run", "--json").out)
    copied = {each["path"]: each["bytes"] for each in document["copied_files"]}
    assert copied.keys() == {str(path.relative_to(folder)) for path in folder.rglob("*.*") if path.is_file()} - {
        f"transformer/{name}" for name in ("config.json", SINGLE)
    }
    assert copied[f"vae/{SINGLE}"] == (folder / "vae" / SINGLE).stat().st_size and not (tmp_path / "out").exists()
    assert f"vae/{SINGLE}" in run(*asked, "--dry-run").out
    needed = sum(copied.values()) + sum(file["bytes"] for file in document["files"])
    for free, code in ((needed - 1, 5), (needed, 0)):
        monkeypatch.setattr("reshard.storage.staging._free_bytes", lambda _, free=free: free)
        assert run(*asked).code == code
        assert (tmp_path / "out").exists() == (code == 0)
