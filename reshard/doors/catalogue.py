"""Catalogue: the virtual folders that are served, by the names under which clients ask for them.

ORG/NAME          a repository: one checkpoint in one format, or all steps of a run
main              its newest revision
step-100          a revision of a run, named as the step's folder
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from reshard.doors.folder import Folder
from reshard.engine.events import event
from reshard.errors import RequestError, ReshardError
from reshard.geometry.value import value

MAIN = "main"
"""The revision that clients ask for who name none."""
# Folders of a run that stay open, each with its index in memory; and how often the steps of a run are looked for, in seconds.
_MOST_OPEN, _PAUSE = 4, 15.0
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
"""A name of a repository."""


@value(eq=False)
class Revision:
    """A revision of a repository, opened."""

    repository: str
    """The name of the repository."""
    name: str
    """The name of the revision."""
    folder: Folder
    """Its files."""
    commit: str
    """What stands for its content: 40 hexadecimal digits."""


class Repository:
    """A checkpoint in one format, or the steps of a run. Threads may share it.

    name: ORG/NAME. steps: returns what opens each revision, the oldest first; one that is called `main` is no step of a run.

    Raises: RequestError for another name.
    """

    def __init__(self, name: str, steps: Callable[[], Mapping[str, Callable[[], Folder]]]) -> None:
        if not NAME.fullmatch(name) or name.count("--"):
            raise RequestError(
                f"{name!r} is not a name of a repository", why="Clients ask for ORG/NAME", do="Give a name such as `name=` local/step-1000"
            )
        self.name = name
        self._steps, self._known, self._looked = steps, dict(steps()), time.monotonic()
        self._open: OrderedDict[str, Revision] = OrderedDict()
        self._commits: dict[str, str] = {}
        self._lock = threading.RLock()

    @property
    def bucket(self) -> str:
        """The name of its bucket."""
        return self.name.rpartition("/")[2]

    @property
    def is_run(self) -> bool:
        """Whether its revisions are the steps of a run."""
        return MAIN not in self._known

    @property
    def revisions(self) -> tuple[str, ...]:
        """The names of the revisions, the oldest first. New steps of a run appear when they are complete."""
        with self._lock:
            if self.is_run and time.monotonic() - self._looked > _PAUSE:
                self._looked = time.monotonic()
                try:
                    self._known = dict(self._steps())
                except ReshardError as error:  # the disk of a run may be away for a while
                    event("hub-run", f"the run of {self.name} cannot be read now: {error}", repository=self.name)
            return tuple(self._known)

    def revision(self, name: str) -> Revision | None:
        """A revision by its name or its commit; None if there is none. Raises ReshardError if it cannot be opened."""
        known = self.revisions
        with self._lock:
            if name == MAIN and self.is_run and known:
                name = known[-1]
            name = next((label for label, commit in self._commits.items() if commit == name), name)
            if name not in self._known:
                return None
            if name not in self._open:
                folder = self._known[name]()
                self._commits[name] = folder.revision
                self._open[name] = Revision(self.name, name, folder, self._commits[name])
                while len(self._open) > _MOST_OPEN:
                    self._open.popitem(last=False)  # its threads end once nobody reads from it
            self._open.move_to_end(name)
            return self._open[name]

    def __repr__(self) -> str:
        return f"Repository({self.name!r}, {len(self._known)} revisions)"


class Catalogue:
    """What a server serves, and nothing else. Raises RequestError if two repositories have one name, or one bucket."""

    def __init__(self, repositories: Iterator[Repository]) -> None:
        self.by_name: dict[str, Repository] = {}
        """The repositories by their names."""
        self.by_bucket: dict[str, Repository] = {}
        """The repositories by the names of their buckets."""
        for repository in repositories:
            if repository.name in self.by_name or repository.bucket in self.by_bucket:
                raise RequestError(f"two checkpoints would be called {repository.name}", do="Name each of them with `name=`")
            self.by_name[repository.name] = self.by_bucket[repository.bucket] = repository
