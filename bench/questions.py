"""Makes bench/questions.json: 200 questions that the demo model has not been trained on.

    python bench/questions.py

The corpus is drawn from closed lists, so another seed alone gives texts that training has met: capitals, opposites and short
sums all occur in it. Held out is what training's stream does not contain: the stream is drawn again as `train.py` draws
it, with its seed (1000), packed into the same steps and to the end, until it has given the tokens that
`models/demo/training.json` counts. A question is taken only if no user turn of that stream, of the tokenizer's corpus
(seed 1) or of the evaluation (seeds 10**6 and 10**6 + 1) is the same text. Training further by `--from` starts with the seed again.
An interrupted run goes on with 1000 + its step; which steps those were is recorded nowhere, so what is held out is held out of the
unbroken stream. Lists of numbers and of words are so many that no stream of another seed is likely to have one of ours.

Training leaves out some sums and differences and nearly all longer lists, but of the stories that its generator can ask for hardly one (two were
found in five million draws). So stories are asked for about the animals that the corpus knows from other skills only, by their sound or
their young: no seed gives such a text.
The three skills come in training's proportions, and no question comes twice. Needs tokenizers; takes minutes.
"""

import json
import random
import sys
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / "models/demo"
sys.path.insert(0, str(DEMO / "training"))
import corpus  # noqa: E402
from corpus import SKILLS, conversations  # noqa: E402

SEED = 2_000_000
COUNT = 200
# As `train.py` has them: first seed, conversations encoded together, rows of a step and their length.
TRAINING, TOGETHER, ROWS, LENGTH = 1000, 256, 8, 512
# The tokenizer's corpus and, of the evaluation, more than it takes: seed and conversations.
OTHERS = [(1, 20_000), (10**6, 2_000), (10**6 + 1, 2_000)]
# Skills that have texts which training leaves out.
HELD_OUT = {"arithmetic", "sequence", "story"}
# Animals of no story.
OTHER_ANIMALS = [animal for animal in {**corpus.SOUNDS, **corpus.YOUNG} if animal not in corpus.ANIMALS]


def render(turns):
    return "<|begin|>" + "".join(f"<|user|>{u}<|assistant|>{a}<|end|>" for u, a in turns)


def trained_on():
    """Every user turn that training met."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    report = json.loads((DEMO / "training.json").read_text())
    wanted = report["step"] * ROWS * (LENGTH + 1)
    seen, source, tokens = set(), conversations(TRAINING), 0
    while tokens < wanted:
        drawn = list(islice(source, TOGETHER))
        tokens += sum(len(encoding.ids) for encoding in tokenizer.encode_batch([render(turns) for turns in drawn]))
        seen.update(user for turns in drawn for user, _ in turns)
    for seed, count in OTHERS:
        seen.update(user for turns in islice(conversations(seed), count) for user, _ in turns)
    return seen


def main():
    seen, draw, questions = trained_on(), random.Random(SEED), []
    skills = [(skill, weight) for skill, weight in SKILLS if skill.__name__ in HELD_OUT]
    total = sum(weight for _, weight in skills)
    rest = COUNT
    for skill, weight in skills:
        share = round(COUNT * weight / total) if skill is not skills[-1][0] else rest
        rest -= share
        # The last skill: nothing else is drawn from the other animals.
        if skill is corpus.story:
            corpus.ANIMALS = OTHER_ANIMALS
        mine, draws = [], 0
        while len(mine) < share:
            draws += 1
            if draws > 1_000_000:
                sys.exit(f"{skill.__name__}: only {len(mine)} of {share} questions are held out")
            question = skill(draw)[0]
            if question not in seen and question not in mine:
                mine.append(question)
        print(f"{skill.__name__}: {share} questions of {draws} drawn")
        questions += mine
    draw.shuffle(questions)
    assert not seen.intersection(questions)
    (HERE / "questions.json").write_text(json.dumps({"seed": SEED, "questions": questions}, indent=1) + "\n")
    print(f"held out of {len(seen)} texts")


if __name__ == "__main__":
    main()
