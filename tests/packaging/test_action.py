"""action.yml and .pre-commit-hooks.yaml: their steps are run in a shell as a runner runs them, with this environment's reshard."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.fixture_places import HF

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = ACTION["runs"]["steps"]


@pytest.fixture
def runner(tmp_path):
    """Runs the step that checks, with inputs, in a folder of its own: the process, the outputs, the summary."""
    place = tmp_path / "temp" / "reshard" / "bin"
    place.mkdir(parents=True)
    (place / "reshard").symlink_to(Path(sys.executable).with_name("reshard"))

    def run(**inputs):
        values = {name: about.get("default", "") for name, about in ACTION["inputs"].items()} | inputs
        (step,) = [step for step in STEPS if step.get("id") == "check"]
        given = {name: values[expression.removeprefix("${{ inputs.").removesuffix(" }}")] for name, expression in step["env"].items()}
        files = {name: tmp_path / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for file in files.values():
            file.write_text("")
        env = {**os.environ, **given, "RUNNER_TEMP": str(tmp_path / "temp"), **{name: str(path) for name, path in files.items()}}
        command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        outputs = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
        return done, outputs, files["GITHUB_STEP_SUMMARY"].read_text()

    return run


def test_a_healthy_checkpoint_passes_and_leaves_a_page(runner, tmp_path):
    done, outputs, summary = runner(checkpoints=f"{HF / 'llama'}\n")
    assert done.returncode == 0 and outputs == {"exit-code": "0", "page": "reshard.html"}
    assert (
        "1 warning; 21 tensors" in done.stdout
        and "1 warning; 21 tensors" in summary
        and "</html>" in (tmp_path / "reshard.html").read_text()
    )


def test_a_finding_fails_the_step_and_its_page_is_kept(runner, tmp_path):
    damaged = shutil.copytree(HF / "llama", tmp_path / "damaged model")
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    done, outputs, _ = runner(checkpoints=str(damaged), options="--format=hf")
    assert done.returncode == int(outputs["exit-code"]) != 0


def test_verify_takes_two_lines(runner, tmp_path):
    done, outputs, summary = runner(command="verify", checkpoints=f"{HF / 'llama'}\n{HF / 'llama'}", page="")
    assert done.returncode == 0 and outputs == {"exit-code": "0"} and "equal: 21 tensors" in summary
    done, outputs, _ = runner(command="verify", checkpoints=f"{HF / 'llama'}\n{HF / 'qwen3'}", page="")
    assert done.returncode == 1 and outputs["exit-code"] == "1"


@pytest.mark.parametrize(
    "inputs", [{"command": "clean"}, {"checkpoints": "$(touch escaped)"}, {"checkpoints": "--html", "page": "escaped"}]
)
def test_an_input_is_never_a_command_or_an_option(runner, tmp_path, inputs):
    done, _, _ = runner(**{"checkpoints": str(HF / "llama"), **inputs})
    assert done.returncode == 2 and not (tmp_path / "escaped").exists()


def test_no_step_puts_an_input_into_a_script():
    assert not [step["name"] for step in STEPS if "${{" in step.get("run", "")]


def test_the_hook_is_a_command_of_reshard():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    program, command = hook["entry"].split()
    assert program == "reshard" and hook["language"] == "python" and not hook["pass_filenames"]
    done = subprocess.run([Path(sys.executable).with_name("reshard"), command, HF / "llama"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
