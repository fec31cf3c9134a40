"""Greedy tokens of the exported model by the training code, in float32, without cache: the independent
reference of the end-to-end tests.

    python reference.py MODEL_DIR OUT.json
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from model import CONFIG, Config, Model

LENGTHS = [1, 15, 16, 17, 32, 33, 63, 64, 65, 127, 128, 129, 300]
OUTPUT = 40


def prompt(length):
    """Token ids of a prompt: any fixed rule will do; ids below 6 are special."""
    return [6 + (i * i * 31 + i * 17 + length * 101) % (CONFIG["vocab_size"] - 6) for i in range(length)]


@torch.no_grad()
def main():
    model_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    model = Model(Config(CONFIG))
    weights = load_file(model_dir / "model.safetensors")
    model.load_state_dict({name: weights[name if name.startswith("lm_head") else "model." + name].float()
                           for name in model.state_dict()})
    model.eval()
    rows = []
    for length in LENGTHS:
        ids, output, gaps = prompt(length), [], []
        while len(output) < OUTPUT:
            # The training code's MTP layer needs two tokens; a padding behind the last one changes nothing before it.
            logits = model(torch.tensor([ids + output + [5]]))[0][0, length + len(output) - 1]
            best = logits.topk(2).values
            output.append(logits.argmax().item())
            gaps.append(round((best[0] - best[1]).item(), 6))
        rows.append({"prompt": ids, "output": output, "gaps": gaps})
    out.write_text("{\"cases\": [\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]}\n")


if __name__ == "__main__":
    main()
