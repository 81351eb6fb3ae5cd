"""Which of several checkpoints is meant: a place and a choice of step and part become the path of one checkpoint.

RUN, step="latest"               RUN/global_step_300, if it holds one checkpoint
RUN, step=300, part="actor"      RUN/global_step_300/actor
KEPT, step=300                   KEPT/step-100+KEPT/step-200+KEPT/step-300, if step 300 is a delta (opening/chains.py)
RUN@300                          the same as RUN, step=300
MODELS, part="llama"             MODELS/llama
RUN, part="."                    RUN/., the model in the folder itself, beside steps
RUN                              RUN itself if a format claims it, such as Megatron with its tracker; else its only checkpoint
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from reshard.errors import RequestError, SystemRefusal, choices, nearest, some
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.opening.chains import source_of
from reshard.opening.run_folders import HERE, LATEST, RunFolder, Step
from reshard.storage.system_calls import is_url
from reshard.storage.trees import chain_of


class SeveralCheckpoints(RequestError):
    """A folder holds several checkpoints, and none is chosen. `steps` has them."""

    id = "ambiguous"

    def __init__(self, root: str, steps: Sequence[Step]) -> None:
        self.root, self.steps = root, tuple(steps)
        numbers = {step.number for step in steps if step.number is not None}
        of_steps = f" of {plural(len(numbers), 'step')}" if numbers else ""
        super().__init__(f"{plural(len(steps), 'checkpoint')}{of_steps} lie here, and none is chosen", where=root, do=_what_to_add(steps))


def _what_to_add(steps: Sequence[Step]) -> str:
    """The keywords that would choose one of these checkpoints."""
    numbers = sorted({step.number for step in steps if step.number is not None})
    parts = sorted({step.part for step in steps if step.part not in ("", HERE)})
    is_here = any(step.part == HERE for step in steps)
    offered = sorted({step.number for step in steps if step.number is not None and step.complete}) or numbers
    named = [f"`step={LATEST!r}` or `step={offered[-1]}`"] if len(numbers) > 1 or (numbers and is_here) else []
    if len(parts) > 1 or not named:
        last = f" or `part={parts[-1]}`" if len(parts) > 1 else ""
        named += [f"`part={parts[0]}`{last}"] if parts else ["the path of one"]
    return f"Add {' and '.join(named)}" + (f"; `part={HERE}` is the model in the folder itself" if is_here else "")


class NothingToChoose(RequestError):
    """A step or a part is chosen, and the folder holds no checkpoints of steps or models."""


@value
class Choice:
    """What the user says about which checkpoint of a folder is meant."""

    step: int | str | None = None
    """The number of a step, the name of its folder, or "latest" for the newest complete one."""
    part: str | None = None
    """Where in the step's folder it lies, such as actor, or one of the folders above; in a folder of models, the model."""

    @classmethod
    def of(cls, run: str, named: str | None, step: int | str | None, part: str | None) -> Choice:
        """The choice in a run. named: the step of RUN@STEP. Raises RequestError if both name a step."""
        if named is not None and step is not None:
            raise RequestError(f"{run}@{named} names a step, and so does `step={step}`", do="Give one of them")
        return cls(step if named is None else named, part)

    def __bool__(self) -> bool:
        return self.step is not None or self.part is not None

    def path(self, root: str) -> str:
        """The path of the chosen checkpoint of a folder; of a step that is a delta, BASE+DELTA.

        Raises: NothingToChoose if the folder holds no steps and no models; RequestError if there is no such step or part;
        SeveralCheckpoints if several fit; what `source_of` raises.
        """
        checkpoints = every = RunFolder(root).checkpoints() if len(chain_of(root)) == 1 else []
        if not checkpoints:
            verb = "choose" if len(self._words()) > 1 else "chooses"
            raise NothingToChoose(
                f"{' and '.join(self._words())} {verb} a checkpoint, and no step or model lies below this place",
                where=root,
                do="Leave it out, or give the folder of the run",
            )
        for chosen in (self._of_part, self._of_step):
            checkpoints = chosen(root, checkpoints)
        if len(checkpoints) > 1:
            raise SeveralCheckpoints(root, checkpoints)
        return source_of(checkpoints[0], every)

    def _words(self) -> list[str]:
        return [f"`{name}={given}`" for name, given in (("step", self.step), ("part", self.part)) if given is not None]

    def _of_part(self, root: str, checkpoints: list[Step]) -> list[Step]:
        if self.part is None:
            return checkpoints
        wanted = "/" + self.part.strip("/")
        below = {step.path: "/" + step.path[len(root.rstrip("/")) :].strip("/") for step in checkpoints}
        exact = [step for step in checkpoints if below[step.path].endswith(wanted)]
        fitting = exact or [step for step in checkpoints if f"{wanted}/" in below[step.path] + "/"]
        if not fitting:
            parts = sorted({step.part for step in checkpoints if step.part})
            do = choices(self.part, parts) if parts else "Leave it out: its checkpoints have no parts"
            raise RequestError(f"`part={self.part}`: no checkpoint has this name", where=root, do=do, id="not-found")
        return fitting

    def _of_step(self, root: str, checkpoints: list[Step]) -> list[Step]:
        if self.step is None:
            return checkpoints
        if self.step == LATEST:
            complete = [step.order for step in checkpoints if step.complete and step.number is not None]
            if not complete:
                raise RequestError(
                    f"`step={LATEST!r}`: no step is complete",
                    where=root,
                    why=some([f"{step.name} ({step.completeness.reason})" for step in checkpoints if step.number is not None]),
                    do="Choose one by its number, such as `step=100`, to open it as it is",
                    id="not-found",
                )
            fitting = [step for step in checkpoints if step.complete and step.order == max(complete)]
        else:
            fitting = [step for step in checkpoints if str(self.step) in (str(step.number), step.name)]
        if not fitting:
            numbers = sorted({step.number for step in checkpoints if step.number is not None})
            steps = f"Steps: {some([*map(str, reversed(numbers))])}; or `step={LATEST!r}`"
            known = steps if numbers else "Leave it out: no step is here"
            near = f"Did you mean `step={LATEST!r}`? " if nearest(str(self.step), [LATEST]) else ""
            raise RequestError(f"`step={self.step!r}`: there is no such step", where=root, do=near + known, id="not-found")
        return fitting


def component_of(model: str | os.PathLike[str] | None, part: str | None) -> str | None:
    """The folder of a component of the diffusers pipeline that `model=` names; None if it names no pipeline, or that has none of this
    name."""
    if model is None or part is None or part in ("", HERE):
        return None
    from reshard.adapter.model_files import CONFIG, PIPELINE
    from reshard.storage.tar import open_files

    files = open_files(model)
    is_there = not files.is_file and files.size(PIPELINE) is not None and files.size(f"{part}/{CONFIG}") is not None
    return f"{os.fspath(model).rstrip('/')}/{part}" if is_there else None


def only_checkpoint(root: str) -> str | None:
    """The path of the only checkpoint below a folder that is none itself; None if there is none below, or the folder itself is chosen.

    Raises: SeveralCheckpoints if there are several.
    """
    if root.endswith(f"/{HERE}") or (not is_url(root) and not os.path.isdir(root)):
        return None
    try:
        checkpoints = [step for step in RunFolder(root).checkpoints() if step.format is not None]
    except SystemRefusal:
        raise
    except RequestError:  # too many folders: whoever opens it says what is wrong
        return None
    if len(checkpoints) > 1:
        raise SeveralCheckpoints(root, checkpoints)
    return checkpoints[0].path if checkpoints else None
