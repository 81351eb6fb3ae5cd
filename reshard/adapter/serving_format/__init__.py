"""ServingFormat: a format that a serving engine loads rank by rank. Each rank's state dict lies in safetensors files of its own.

    engine.py            what one engine says of its files
    writing.py           from a model's content to the files of all ranks
    reading.py           from the files of all ranks to an Index
    learned.py           both by a layout that was learned from the engine's own loader
    weight_checker.py    how a live server of the engine tells the digests of what it holds

An engine gives its name, its rules and the names of its files. Everything else is the same for all engines.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reshard.adapter.serving_format.engine import LEARNING_OPTIONS, LIBRARY, ServingEngine

if TYPE_CHECKING:
    from reshard.adapter.format import Hints
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Layout, Target
    from reshard.storage.files import Files


class ServingFormat(ServingEngine):
    """A serving engine's own format: reading and writing are the same for all engines."""

    def read(self, files: Files, hints: Hints) -> Index:
        from reshard.adapter.serving_format import reading

        return reading.read(self, files, hints)

    def settled(self, content: Content, target: Target, companions: ModelFiles) -> Target:
        is_asked = any(target.options.get(name) for name in LEARNING_OPTIONS) or (content.model is None and os.environ.get(LIBRARY))
        if self.tracer is None or not is_asked:
            return target
        from reshard.adapter.serving_format import learned

        return learned.settled(self, content, target, companions)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        if path := target.options.get("layout"):
            from reshard.adapter.serving_format import learned

            return learned.lay_out(self, learned.read_layout(path), content, target, companions)
        from reshard.adapter.serving_format import writing

        return writing.lay_out(self, content, target, companions)
