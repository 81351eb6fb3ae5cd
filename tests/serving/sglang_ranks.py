"""What real SGLang ranks hold of models, asked by checks that run in another Python.

    python tests/serving/sglang_ranks.py QUESTIONS ANSWERS

QUESTIONS is a JSON list of {"name": model type, "folder": folder, "tp": 2, "sharded": whether the folder has ranks' files}. ANSWERS gets a
list with rank -> tensor -> dtype, shape and sha256 for each, or the error as a text.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures"))

import makers
from engine_ranks import RankFailed

if __name__ == "__main__":
    make = makers.load("sglang")
    make.arrange()
    answers: list[object] = []
    for question in json.loads(Path(sys.argv[1]).read_text()):
        try:
            answers.append(make.all_ranks(question["name"], Path(question["folder"]), question["tp"], sharded=question["sharded"]))
        except RankFailed as error:
            answers.append(str(error)[-1500:])
    Path(sys.argv[2]).write_text(json.dumps(answers))
