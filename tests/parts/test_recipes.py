"""The scripts of docs/recipes/many-machines.md: the Slurm script runs as written, and the Kubernetes Job is valid and consistent."""

import os
import re
import shutil
import stat
import subprocess
import sys

import pytest
import yaml
from helpers.doc_pages import ROOT
from helpers.fixture_places import DCP
from helpers.reshard_command import reshard as run
from helpers.reshard_command import result_tree

PAGE = (ROOT / "docs" / "recipes" / "many-machines.md").read_text()
BLOCKS = dict(re.findall(r"```(bash|yaml)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A folder with the source and the plan of the page, and a command `reshard` on the path."""
    shutil.copytree(DCP / "fsdp2" / "checkpoint", tmp_path / "step-1000")
    monkeypatch.chdir(tmp_path)
    options = ("--to", "vllm", "--tp", 2, "--model", DCP / "fsdp2" / "model")
    assert run("plan", "step-1000", *options, "--plan-out", "plan.reshard").code == 0
    assert run("convert", "step-1000", "one", *options).code == 0
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "reshard"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m reshard "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


def test_the_slurm_array_runs_as_written(room, monkeypatch):
    script = BLOCKS["bash"]
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    first, last = map(int, re.search(r"--array=(\d+)-(\d+)", script).groups())
    for name, value in (("MIN", first), ("MAX", last), ("COUNT", last - first + 1)):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
    running = []
    for task in range(first, last + 1):
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(task), "SLURM_CPUS_PER_TASK": "2"}
        running.append(subprocess.Popen(["bash", "-eu", "-c", script], env=environment, stdout=-1, stderr=-1, text=True))
    found = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0] * len(running), found
    assert result_tree(room / "out") == result_tree(room / "one")


def test_the_job_of_kubernetes_is_valid_and_counts_its_parts(room, monkeypatch):
    job = yaml.safe_load(BLOCKS["yaml"])
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job") and set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    assert set(spec) == {"completionMode", "completions", "parallelism", "backoffLimitPerIndex", "template"}
    # backoffLimitPerIndex needs an Indexed Job whose pods are not restarted in place.
    pod = spec["template"]["spec"]
    assert (
        spec["completionMode"] == "Indexed" and pod["restartPolicy"] == "Never" and set(pod) == {"restartPolicy", "containers", "volumes"}
    )
    (container,) = pod["containers"]
    assert set(container) == {"name", "image", "command", "args", "resources", "volumeMounts"}
    words = [*container["command"], *container["args"]]
    assert all(isinstance(word, str) for word in words) and words[words.index("--parts") + 1] == str(spec["completions"])
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]
    here = [word.removeprefix("/shared/") for word in words[1:]]
    for index in range(spec["completions"]):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        found = run(*here)
        assert found.code == 0, found.err
    assert result_tree(room / "out") == result_tree(room / "one")


def test_torchrun_names_the_part(room):
    pytest.importorskip("torch", reason="torchrun comes with torch")
    line = re.search(r"\$ torchrun (.*)", PAGE)[1]
    command = [sys.executable, "-m", "torch.distributed.run", *line.split()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]
    assert result_tree(room / "out") == result_tree(room / "one")
