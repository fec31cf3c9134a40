"""Where the time of whole steps goes: the tables of docs/benchmarks.md, "What limits the rows that fall short".

    cargo build --profile dist -p twinfer-engine --example steps
    python3 bench/profile.py target/dist/examples/steps MODELS

MODELS holds the models of `cargo xtask bench engine`. Each line is one workload under `perf record`: shares of the
samples of all threads in the last second and a half, when weights have long been read, and the share of the floor in
that same run, as the example counts it.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter

MODELS = {
    "SmolLM2": "smollm2-hf",
    "Qwen3-MoE shape": "qwen3moe-bench-hf",
    "DeepSeek shape": "deepseek2-bench-hf",
}
W8A8 = ["prefill-512", "prefill-2048", "decode-1", "decode-16", "decode-32"]
BF16 = ["prefill-512", "decode-1"]
SECONDS = 1.5
# What a function is part of, by its path; the first that is found counts.
PARTS = [
    ("products", ("panels::tile::run_part", "panels::product")),
    ("attention", ("attention::",)),
    ("packing", ("panels::tile::run_pack",)),
    ("waiting", ("team::", "clock_gettime", "futex")),
]


def part(symbol):
    for name, paths in PARTS:
        if any(path in symbol for path in paths):
            return name
    return "the rest"


def profile(steps, model, workload, quantize):
    """Percent of the samples by part, and the example's own line."""
    with tempfile.NamedTemporaryFile() as data:
        command = [steps, model, "--only", workload, "--seconds", "1.6"]
        command += ["--quantize"] if quantize else []
        record = ["perf", "record", "-q", "-F", "1500", "-o", data.name]
        told = subprocess.run(record + command, check=True, capture_output=True, text=True)
        script = ["perf", "script", "-i", data.name, "-G", "-F", "time,ip,sym"]
        lines = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    samples = []
    for line in lines.splitlines():
        words = line.split(None, 2)
        if len(words) == 3 and words[0].endswith(":"):
            samples.append((float(words[0][:-1]), words[2]))
    begin = max(time for time, _ in samples) - SECONDS
    counts = Counter(part(symbol) for time, symbol in samples if time > begin)
    return counts, told.stdout.splitlines()[-1]


def main():
    steps, models = sys.argv[1:]
    names = [name for name, _ in PARTS] + ["the rest"]
    print("| | " + " | ".join(names) + " | of the floor |")
    print("| --- |" + " ---: |" * (len(names) + 1))
    runs = [(name, work, True) for name in MODELS for work in W8A8]
    runs += [("SmolLM2", work, False) for work in BF16]
    for name, work, quantize in runs:
        counts, told = profile(steps, f"{models}/{MODELS[name]}", work, quantize)
        total = counts.total()
        shares = [f"{100 * counts[part] / total:.0f} %" for part in names]
        floor = re.search(r"(\d+)% of the floor", told).group(1)
        kind = "" if quantize else ", bf16"
        print(f"| {name}{kind}, {work} | " + " | ".join(shares) + f" | {floor} % |", flush=True)


main()
