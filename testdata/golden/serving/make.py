"""Reference answers for tests of a running server, made with transformers in float32.

    python make.py            # torch 2.15, transformers 5.24; some minutes on one core
    python make.py yarn       # yarn.json alone

greedy.json   50 prompts and their greedy tokens, for ../qwen3_moe and ../deepseek_v3. `gaps` is the
              distance of the best from the second best logit at each token.
yarn.json     logits of the first layer alone of those checkpoints (a server computes 16 000 positions in
              seconds then), at positions of one long prompt, under other RoPE settings.

Attention is written out below, a few hundred queries at a time: scores of 16 000 x 16 000 do not fit.
Everything else, RoPE above all, is what transformers does with the config.
"""
import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
MODELS = ("qwen3_moe", "deepseek_v3")
STEPS = 24
POSITIONS = (0, 1000, 4095, 4096, 4097, 16000)
DEEPSEEK = {"factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
QWEN = {"factor": 4.0, "original_max_position_embeddings": 4096}
# Name, checkpoint, the context that follows, changes of its config.json (null removes a field).
YARN = (
    ("type, mscale equal", "deepseek_v3", 163840, {
        "max_position_embeddings": 163840,
        "rope_scaling": {"type": "yarn", **DEEPSEEK, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("rope_type, mscale not equal, unextended length", "deepseek_v3", 163840, {
        "max_position_embeddings": 4096,
        "rope_scaling": {"rope_type": "yarn", **DEEPSEEK, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    ("rope_parameters, no mscale", "deepseek_v3", 163840, {
        "max_position_embeddings": 163840, "rope_scaling": None, "rope_theta": None,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **DEEPSEEK}}),
    ("no scaling", "deepseek_v3", 32768, {"max_position_embeddings": 32768, "rope_scaling": None}),
    ("rope_type, unextended length", "qwen3_moe", 16384, {
        "max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn", **QWEN}}),
    ("rope_parameters, attention_factor", "qwen3_moe", 16384, {
        "max_position_embeddings": 16384, "rope_theta": None,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0, "attention_factor": 1.25, **QWEN}}),
    ("no scaling", "qwen3_moe", 32768, {"max_position_embeddings": 32768}),
)


def attend(module, query, key, value, attention_mask, scaling, **_):
    """Causal attention, [1, heads, length, width] each."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = []
    for start in range(0, query.shape[2], 256):
        rows = query[:, :, start:start + 256]
        end = start + rows.shape[2]
        scores = rows @ key[:, :, :end].transpose(2, 3) * scaling
        later = torch.arange(end)[None, :] > torch.arange(start, end)[:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        out.append(weights @ value[:, :, :end])
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register("in_parts", attend)
AttentionMaskInterface.register("in_parts", lambda *_, **__: None)


def load(name, changes):
    config = json.loads((HERE.parent / name / "config.json").read_text())
    config.update(changes)
    config = {field: value for field, value in config.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        parsed = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        HERE.parent / name, config=parsed, dtype=torch.float32, attn_implementation="in_parts").eval()


def tokens(seed, count):
    """The same numbers as in the tests that read yarn.json."""
    state, out = seed, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        out.append((state >> 16) % 499)
    return out


def prompts():
    """Every length around the edges of blocks and chunks; some begin alike."""
    lengths = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 96, 127]
    plain = [tokens(number, lengths[number % len(lengths)]) for number in range(40)]
    alike = [tokens(100, 40)[:cut] + tokens(200 + number, 5) for number, cut in
             enumerate((16, 16, 32, 33, 40, 40, 31, 17, 8, 24))]
    return plain + alike


@torch.no_grad()
def greedy():
    out = {}
    for name in MODELS:
        model, answers = load(name, {}), []
        for prompt in prompts():
            ids, gaps = list(prompt), []
            for _ in range(STEPS):
                best = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
                gaps.append(round(float(best.values[0] - best.values[1]), 6))
                ids.append(int(best.indices[0]))
            answers.append({"prompt": prompt, "ids": ids[len(prompt):], "gaps": gaps})
        out[name] = answers
        print(name, min(min(answer["gaps"]) for answer in answers), flush=True)
    (HERE / "greedy.json").write_text(json.dumps(out, separators=(",", ":")) + "\n")


@torch.no_grad()
def yarn():
    ids = tokens(7, POSITIONS[-1] + 1)
    variants = []
    for name, checkpoint, context, changes in YARN:
        changes = {"num_hidden_layers": 1, **changes}
        if checkpoint == "deepseek_v3":
            changes["num_nextn_predict_layers"] = 0
        logits = load(checkpoint, changes)(torch.tensor([ids]), use_cache=False).logits[0]
        rows = [[round(float(x), 4) for x in logits[position]] for position in POSITIONS]
        variants.append({"name": name, "checkpoint": checkpoint, "context": context, "config": changes, "logits": rows})
        print(checkpoint, name, rows[-1][:3], flush=True)
    file = {"tokens": "state = 7; state = (state * 1103515245 + 12345) mod 2^31, (state >> 16) mod 499",
            "positions": POSITIONS, "variants": variants}
    (HERE / "yarn.json").write_text(json.dumps(file, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "yarn" not in sys.argv[1:]:
        greedy()
    yarn()
