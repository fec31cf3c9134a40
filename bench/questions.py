"""Makes bench/questions.json: 200 questions of one turn from the demo model's corpus, drawn with a seed that neither its
training nor its evaluation uses. No question comes twice.

    python bench/questions.py
"""

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "models/demo/training"))
from corpus import conversation  # noqa: E402

SEED = 2_000_000
COUNT = 200


def main():
    draw, questions = random.Random(SEED), []
    while len(questions) < COUNT:
        turns = conversation(draw)
        if len(turns) == 1 and turns[0][0] not in questions:
            questions.append(turns[0][0])
    (HERE / "questions.json").write_text(json.dumps({"seed": SEED, "questions": questions}, indent=1) + "\n")


if __name__ == "__main__":
    main()
