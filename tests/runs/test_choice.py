"""--step and --part: folders with several checkpoints, as each trainer writes them, in every command and in Python."""

import shutil
import subprocess
import sys
from importlib import import_module

import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard
from runs.test_steps import DCP, DEEPSPEED, MEGATRON, VERL, aged, copy

import reshard as library
from reshard.opening.choice import Choice, SeveralCheckpoints
from reshard.opening.run_folders import RunFolder


def verl(tmp_path):
    """A run of verl: its tracker has the name of Megatron's, and the state of its data loader lies beside actor and critic."""
    run = tmp_path / "run"
    for step in (100, 200, 300):
        for part in ("actor", "critic"):
            copy(VERL, run / f"global_step_{step}" / part)
        (run / f"global_step_{step}" / "data.pt").write_bytes(b"the state of a data loader")
    (run / "latest_checkpointed_iteration.txt").write_text("300")
    return run


def trainer(tmp_path):
    for step in (100, 200):
        copy(HF / "llama", tmp_path / "cks" / f"checkpoint-{step}", seconds=1000)
    return tmp_path / "cks"


def models(tmp_path):
    for name in ("gpt2", "llama", "qwen3"):
        copy(HF / name, tmp_path / "three" / name)
    return tmp_path / "three"


# The commands that take a checkpoint, as a user would give them a run.
COMMANDS = [
    ("convert", "RUN", "OUT", "--to", "hf"),
    ("plan", "RUN", "--to", "hf"),
    ("verify", "RUN"),
    ("verify", "RUN", HF / "llama"),
    ("verify", HF / "llama", "RUN"),
    ("diff", "RUN", HF / "llama"),
    ("explain", "RUN", HF / "llama"),
    ("stats", "RUN"),
    ("cat", "RUN", "model.norm.weight"),
    ("export", "RUN", "*norm*", "-o", "OUT"),
    ("doctor", "RUN"),
    ("fingerprint", "RUN"),
    ("digests", "RUN", "--to", "vllm"),
    ("roundtrip", "RUN", "--to", "hf"),
    ("degrees", "RUN", "--tp", "1"),
    ("estimate", "RUN"),
    ("architectures", "--start", "RUN"),
    ("serve-check", "RUN"),
    ("cache", "get", "RUN", "--to", "vllm", "--cache", "OUT"),
]


def asked(words, run, out):
    return reshard(*({"RUN": run, "OUT": out}.get(word, word) if isinstance(word, str) else word for word in words))


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_without_a_choice_every_command_lists_the_checkpoints(words, tmp_path):
    done = asked(words, trainer(tmp_path), tmp_path / "out.npy")
    assert done.code == 2, done.err
    assert "2 checkpoints of 2 steps" in done.err and "checkpoint-100" in done.err and "checkpoint-200" in done.err
    assert "Add --step latest or --step 200" in done.err and "[ambiguous]" in done.err
    assert not done.out and not (tmp_path / "out.npy").exists()


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_with_a_step_every_command_takes_that_checkpoint(words, tmp_path):
    run = trainer(tmp_path)
    chosen = asked((*words, "--step", "100"), run, tmp_path / "out")
    direct = asked(words, run / "checkpoint-100", tmp_path / "other")
    assert chosen.code == direct.code, chosen.err
    assert "none is chosen" not in chosen.err
    assert len(chosen.out.splitlines()) == len(direct.out.splitlines())


def test_a_command_with_step_has_an_argument_in_which_it_chooses():
    main, place = import_module("reshard.cli.main"), import_module("reshard.cli.options").CheckpointPlace
    for name in main.COMMANDS:
        params = main.cli.get_command(None, name).params
        if any("--step" in param.opts for param in params):
            assert any(isinstance(param.type, place) for param in params), f"{name} takes --step and does not use it"


def test_delta_asks_for_the_paths_of_two_steps(tmp_path):
    run = trainer(tmp_path)
    done = reshard("delta", run, HF / "llama", tmp_path / "out")
    assert done.code == 2 and f"Give the path of one, such as {run}/checkpoint-200; --of RUN keeps all." in done.err, done.err
    assert "2 checkpoints of 2 steps" in done.err and "--step" not in done.err


def test_push_chooses_too(tmp_path):
    done = reshard("push", trainer(tmp_path), "http://127.0.0.1:9", "--step", "7")
    assert "--step 7: there is no such step. Steps: 200, 100; or --step latest" in done.err


def test_verls_run(tmp_path):
    run = verl(tmp_path)
    listed = reshard("inspect", run)
    assert listed.code == 0 and "6 checkpoints of 3 steps, 6 complete" in listed.out
    done = reshard("convert", run, tmp_path / "hf", "--to", "hf")
    assert done.code == 2 and "Add --step latest or --step 300 and --component actor or --component critic." in done.err
    done = reshard("convert", run, tmp_path / "hf", "--to", "hf", "--step", "latest")
    assert done.code == 2 and "Add --component actor or --component critic." in done.err
    done = reshard("convert", run, tmp_path / "hf", "--to", "hf", "--step", "latest", "--component", "actor")
    assert done.code == 0, done.err
    assert reshard("verify", run, tmp_path / "hf", "--step", 300, "--component", "actor").out.startswith("equal: ")


def test_a_step_of_verl_lists_actor_and_critic_and_no_data_loader(tmp_path):
    step = verl(tmp_path) / "global_step_300"
    document = reshard("inspect", step, "--json").document
    assert [(each["step"], each["part"], each["format"]) for each in document["steps"]] == [(300, "actor", "fsdp"), (300, "critic", "fsdp")]
    shutil.rmtree(step / "critic")
    assert reshard("inspect", step).out.startswith(f"{step}/actor: llama")


def test_a_folder_of_models(tmp_path):
    folder = models(tmp_path)
    listed = reshard("inspect", folder)
    assert listed.code == 0 and "3 checkpoints, 3 complete" in listed.out and "qwen3" in listed.out
    done = reshard("fingerprint", folder)
    assert done.code == 2 and "Add --component gpt2 or --component qwen3" in done.err
    assert reshard("fingerprint", folder, "--component", "llama").out.split()[0] == reshard("fingerprint", HF / "llama").out.split()[0]
    done = reshard("fingerprint", folder, "--component", "lama")
    assert "Did you mean llama?" in done.err and done.code == 2


def test_part_shares_the_work_and_component_names_a_checkpoint(tmp_path):
    run = verl(tmp_path)
    about = ("convert", run, tmp_path / "hf", "--to", "hf", "--step", "300", "--component", "actor")
    first, second = (reshard(*about, "--part", f"{part}/2") for part in (0, 1))
    assert first.code == second.code == 0, first.err + second.err
    assert "part 0/2" in first.out and "; complete" in second.out
    assert library.verify(run / "global_step_300" / "actor", tmp_path / "hf").equal
    for twice in (("--part", "0/2", "--part", "1/2"), ("--part", "critic")):
        assert "give one of them" in reshard(*about, *twice).err


OLD_NAME = "write --component NAME; 0.4 does not understand --part NAME"


def test_the_old_spelling_of_component_is_understood_with_a_warning(tmp_path):
    run, chosen = verl(tmp_path), ("--step", "300", "--part", "actor")
    done = reshard("fingerprint", run, *chosen)
    assert done.code == 0 and done.err.count(OLD_NAME) == 1
    new = reshard("fingerprint", run, "--step", "300", "--component", "actor")
    assert new.out == done.out and OLD_NAME not in new.err
    parts = [reshard("convert", run, tmp_path / "hf", "--to", "hf", *chosen, "--part", f"{part}/2") for part in (0, 1)]
    assert [done.code for done in parts] == [0, 0] and all(done.err.count(OLD_NAME) == 1 for done in parts)
    assert library.verify(run / "global_step_300" / "actor", tmp_path / "hf").equal


def test_megatrons_tracker_is_followed_without_a_choice(tmp_path):
    run = tmp_path / "run"
    for step in (2, 4):
        copy(MEGATRON / "iter_0000002", run / f"iter_{step:07}")
    (run / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.copytree(MEGATRON, tmp_path / "beside")
    model = ("--model", MEGATRON.parent / "model") if (MEGATRON.parent / "model").is_dir() else ()
    taken = reshard("fingerprint", run, *model)
    assert taken.code == 0, taken.err
    (run / "latest_checkpointed_iteration.txt").unlink()
    assert "Add --step latest or --step 4" in reshard("fingerprint", run, *model).err
    chosen = reshard("fingerprint", run, *model, "--step", "iter_0000004")
    assert chosen.out.split()[0] == taken.out.split()[0]


def test_the_step_to_add_is_a_complete_one(tmp_path):
    """The newest save was interrupted: the number that is offered opens."""
    for step in (100, 200, 300):
        copy(DCP, tmp_path / f"step-{step}", seconds=1000)
    (tmp_path / "step-300" / ".metadata").unlink()
    with pytest.raises(SeveralCheckpoints, match=r"Add `step='latest'` or `step=200`"):
        library.open(tmp_path)


def test_deepspeeds_latest_is_followed_without_a_choice(tmp_path):
    for step in (2, 4):
        copy(DEEPSPEED / "global_step2", tmp_path / f"global_step{step}")
    (tmp_path / "latest").write_text("global_step2")
    assert library.open(tmp_path).index.files[0].path.startswith("global_step2/")
    (tmp_path / "latest").unlink()
    with pytest.raises(SeveralCheckpoints):
        library.open(tmp_path)


# How trainers call the place of step 100 and of step 200, and a checkpoint to put there.
NAMES = {
    "torchtitan": (DCP, "outputs/checkpoint/step-{}"),
    "NeMo 2": (DCP, "m/checkpoints/model_name=0--val_loss=0.00-step={}-consumed_samples=8.0-last"),
    "Lightning, a folder": (DCP, "lightning_logs/version_0/checkpoints/epoch=0-step={}.ckpt"),
    "nanotron": (FIXTURES / "nanotron" / "llama-tp2-pp2" / "checkpoint", "checkpoints/{}"),
}


@pytest.mark.parametrize(("checkpoint", "pattern"), NAMES.values(), ids=NAMES)
def test_the_names_of_trainers(checkpoint, pattern, tmp_path):
    for step in (100, 200):
        copy(checkpoint, tmp_path / "run" / pattern.format(step), seconds=1000)
    if pattern.endswith("/{}"):
        (tmp_path / "run" / "checkpoints" / "latest.txt").write_text("100")
    found = RunFolder(tmp_path / "run").checkpoints()
    assert [step.number for step in found] == [100, 200]
    newest = 100 if pattern.endswith("/{}") else 200
    assert Choice("latest").path(str(tmp_path / "run")) == str(tmp_path / "run" / pattern.format(newest))


def test_lightning_writes_files(tmp_path):
    torch_file = next((FIXTURES / "torch_versions").rglob("*.pt"), None) or next(FIXTURES.glob("fsdp/full*/**/*.bin"))
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (10, 20):
        shutil.copy(torch_file, folder / f"epoch=0-step={step}.ckpt")
    aged(folder, 1000)
    listed = reshard("inspect", folder, "--json").document["steps"]
    assert [(each["step"], each["format"]) for each in listed] == [(10, "pt"), (20, "pt")]
    assert Choice(20).path(str(folder)) == str(folder / "epoch=0-step=20.ckpt")


def test_folders_of_digits_alone_are_no_steps(tmp_path):
    for name in ("0", "1"):
        copy(HF / "llama", tmp_path / name)
    assert [step.number for step in RunFolder(tmp_path).checkpoints()] == [None, None]


def test_python_chooses_as_the_command_line_does(tmp_path):
    run = verl(tmp_path)
    assert library.open(run, step="latest", part="actor").path == str(run / "global_step_300" / "actor")
    assert library.open(run, step=100, part="critic").path == str(run / "global_step_100" / "critic")
    with pytest.raises(SeveralCheckpoints, match="none is chosen") as several:
        library.open(run)
    assert len(several.value.steps) == 6
    with pytest.raises(library.RequestError, match=r"`step=7`: there is no such step\. Steps: 300, 200, 100"):
        library.open(run, step=7)


def test_only_complete_steps_are_the_latest(tmp_path):
    run = verl(tmp_path)
    (run / "latest_checkpointed_iteration.txt").write_text("200")
    assert Choice("latest", "actor").path(str(run)) == str(run / "global_step_200" / "actor")
    (run / "latest_checkpointed_iteration.txt").write_text("50")
    with pytest.raises(library.RequestError, match="no step is complete"):
        Choice("latest").path(str(run))


def test_a_choice_that_chooses_nothing_is_refused(tmp_path):
    done = reshard("verify", HF / "llama", HF / "gpt2", "--step", "3")
    assert done.code == 2 and "no step or model lies below this place" in done.err
    run = trainer(tmp_path)
    done = reshard("verify", run, HF / "llama", "--step", "100")
    assert done.code == 0 and done.out.startswith("equal: ")


def test_an_error_names_at_most_five_steps(tmp_path):
    for step in range(1, 13):
        (tmp_path / f"step-{step}").mkdir()
    with pytest.raises(library.RequestError, match="Steps: 12, 11, 10, 9, 8 and 7 more"):
        Choice(99).path(str(tmp_path))


def test_choosing_is_loaded_only_for_a_choice():
    words = ["-X", "importtime", "-m", "reshard", "convert", str(HF / "llama"), "x", "--to", "hf", "--dry-run"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert "reshard.opening.open" in done.stderr and "reshard.opening.choice" not in done.stderr


def final_model(tmp_path):
    """An HF Trainer's folder after every training: the final model, and the checkpoints of its steps in folders beside it."""
    run = trainer(tmp_path)
    copy(HF / "llama", tmp_path / "final", seconds=1000)
    for path in sorted((tmp_path / "final").iterdir()):
        shutil.move(path, run / path.name)
    data = bytearray((run / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (run / "model.safetensors").write_bytes(data)
    aged(run, 1000)
    return run


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_final_model_beside_steps_is_taken_only_if_it_is_chosen(words, tmp_path):
    run = final_model(tmp_path)
    done = asked(words, run, tmp_path / "out.npy")
    assert done.code == 2 and "3 checkpoints of 2 steps" in done.err and "[ambiguous]" in done.err, done.err
    assert "--component . is the model in the folder itself" in done.err
    chosen = asked((*words, "--component", "."), run, tmp_path / "out")
    for step in ("100", "200"):
        shutil.rmtree(run / f"checkpoint-{step}")
    direct = asked(words, run, tmp_path / "other")
    assert chosen.code == direct.code and "none is chosen" not in chosen.err, chosen.err
    assert len(chosen.out.splitlines()) == len(direct.out.splitlines())


def test_a_final_model_is_a_row_and_other_bytes_than_the_steps(tmp_path):
    run = final_model(tmp_path)
    steps = reshard("inspect", run, "--json").document["steps"]
    assert [(each["step"], each["part"], each["format"]) for each in steps] == [(None, ".", "hf"), (100, "", "hf"), (200, "", "hf")]
    prints = {of: reshard("fingerprint", run, *of).out.split()[0] for of in (("--component", "."), ("--step", "100"), ("--step", "latest"))}
    assert len({*prints.values()}) == 2 and prints["--step", "100"] == prints["--step", "latest"]
    assert library.fingerprint(f"{run}/.").root.startswith(prints["--component", "."])
    shutil.rmtree(run / "checkpoint-200")
    assert "Add --step latest or --step 100; --component . is" in reshard("fingerprint", run).err


def test_a_model_beside_the_save_of_its_optimizer_is_read_by_its_path(tmp_path):
    """transformers with DeepSpeed: checkpoint-100/ holds the model's files and global_step2/, and latest names that."""
    place = tmp_path / "checkpoint-100"
    copy(HF / "llama", place)
    shutil.copytree(DEEPSPEED, place, dirs_exist_ok=True)
    listed = reshard("inspect", place, "--json").document["steps"]
    assert [(each["part"], each["format"]) for each in listed] == [(".", "hf"), ("", "deepspeed")]
    assert reshard("convert", place, tmp_path / "out", "--to", "vllm", "--component", ".").code == 0
    assert reshard("verify", place, tmp_path / "out", "--component", ".").out.startswith("equal: 21 tensors")
    assert reshard("verify", place, tmp_path / "out", "--format", "hf").out.startswith("equal: 21 tensors")
    assert reshard("diff", place, tmp_path / "out", "--format", "hf", "--format", "vllm").code == 0
    assert "--format dcp fits neither" in reshard("explain", place, tmp_path / "out", "--format", "dcp").err
    assert reshard("verify", place, tmp_path / "out", "--step", "2").code != 0, "the other checkpoint has other weights"


def test_a_step_of_a_run_is_a_path(tmp_path):
    run = final_model(tmp_path)
    shutil.copy(run / "model.safetensors", run / "checkpoint-200")
    aged(run, 1000)
    for first, second, code in (("@100", "@100", 0), ("@100", "@200", 1), ("@latest", "@checkpoint-200", 0), ("@100", "@latest", 1)):
        for words in ("verify", "diff", "explain"):
            assert reshard(words, f"{run}{first}", f"{run}{second}").code == code, (words, first, second)
        assert library.verify(f"{run}{first}", f"{run}{second}").equal is (code == 0)
    assert reshard("diff", run, "--step", "100", "--step", "200").code == 1
    assert reshard("diff", run, "--step", "200", "--step", "latest").code == 0
    assert library.open(f"{run}@100").path == f"{run}/checkpoint-100"
    refused = reshard("fingerprint", f"{run}@100", "--step", "200")
    assert refused.code == 2 and "names a step, and so does --step 200" in refused.err
    assert "there is no such step. Steps: 200, 100" in reshard("fingerprint", f"{run}@7").err
    assert "no step or model lies below" in reshard("fingerprint", f"{HF / 'llama'}@7").err
    copy(HF / "gpt2", tmp_path / "cks@100")
    assert reshard("inspect", f"{run}@100").out.startswith(f"{tmp_path}/cks@100: gpt2"), "an existing path wins"
    assert "no file or directory" in reshard("inspect", f"{tmp_path}/nothing@100").err
    assert "no file or directory" in reshard("inspect", f"{run}@200/model.safetensors").err, "@ counts only after the last slash"


def test_what_has_no_meaning_for_a_list_of_checkpoints_is_refused(tmp_path):
    run = trainer(tmp_path)
    for option in (("--by", "rank"), ("--limit", 1), ("--tensor", "x"), ("--depth", 2), ("--sort", "bytes"), ("--vocab-size", 5)):
        done = reshard("inspect", run, *option)
        assert done.code == 2 and f"{option[0]} is for one checkpoint, and several lie here" in done.err and not done.out
    copy(HF / "llama", tmp_path / "one" / "checkpoint-7")
    done = reshard("inspect", tmp_path / "one", "--limit", 1)
    assert done.code == 2 and f"a run lies here. Give {tmp_path / 'one' / 'checkpoint-7'}, or leave" in done.err
    assert reshard("inspect", run, "--html", tmp_path / "page.html").code == 0
    assert "checkpoint-200" in (tmp_path / "page.html").read_text()
