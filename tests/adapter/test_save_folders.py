"""Which one of several saves is meant, as frameworks with and without a tracker file tell it."""

import re

import pytest

from reshard.adapter.save_folders import step_of, the_one_save
from reshard.errors import CheckpointError, RequestError
from reshard.storage.files import LocalFiles


@pytest.fixture
def run(tmp_path):
    """A function that makes a run's folder of these saves, with a tracker file of this text; returns its files and saves."""

    def made(*saves, **trackers):
        for save in saves:
            (tmp_path / save).mkdir()
        for name, text in trackers.items():
            (tmp_path / name).write_text(text)
        files = LocalFiles(tmp_path)
        return files, [path for path in files.list() if path.endswith("/")]

    return made


def test_the_only_save_needs_no_tracker(run):
    assert the_one_save(*run("step-10")) == "step-10/"
    assert the_one_save(LocalFiles("."), []) is None


def test_the_tracker_names_the_save(run):
    files, saves = run("global_step9", "global_step10", latest="global_step9\n")
    assert the_one_save(files, saves, tracker="latest") == "global_step9/"


def test_the_tracker_names_the_save_by_its_number(run):
    files, saves = run("iter_0000009", "iter_0000010", latest="9")
    assert the_one_save(files, saves, tracker="latest", folder_name=lambda text: f"iter_{int(text):07d}") == "iter_0000009/"


def test_a_save_that_the_tracker_names_and_that_is_gone(run):
    files, saves = run("global_step9", latest="global_step10")
    with pytest.raises(CheckpointError, match=r"latest: it names the save 'global_step10', and global_step10 is not there.*global_step9"):
        the_one_save(files, saves, tracker="latest")
    with pytest.raises(CheckpointError, match="holds no save"):
        the_one_save(*run("global_step10")[:1], ["global_step9/"], tracker="latest")


def test_a_tracker_does_not_lead_outside(run):
    files, saves = run("a", latest="../a")
    with pytest.raises(CheckpointError, match="outside"):
        the_one_save(files, saves, tracker="latest")


def test_of_several_saves_the_newest_is_proposed(run):
    files, saves = run("step-9", "step-10")
    with pytest.raises(RequestError, match=r"2 saves lie here: step-10, step-9\. Give one of them, such as .*/step-10\."):
        the_one_save(files, saves)
    with pytest.raises(RequestError, match="no file latest"):
        the_one_save(files, saves, tracker="latest")


@pytest.mark.parametrize(
    "root, step",
    [("runs/global_step_20", 20), ("step-20/actor", 20), ("checkpoint-7/", 7), ("iter_0000010", 10), ("step-1/a/b", None), ("run", None)],
)
def test_the_step_of_a_folder(root, step):
    assert step_of(root) == step and (step is None or re.search(str(step), root))
