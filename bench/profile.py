"""Where the time of whole steps goes: the tables of docs/benchmarks.md, "What limits the rows that fall short".

    cargo build --profile dist -p twinfer-engine --example steps
    python3 bench/profile.py target/dist/examples/steps MODELS [--page docs/benchmarks.md] [--only TEXT]

MODELS holds the models of `cargo xtask bench engine`. Each line is one workload under `perf record`: shares of the
samples of all threads in its last step or the last second and a half, whichever is longer, and the share of the floor in
that same run, as the example counts it. Tables are printed, and put into the page in the place of those that stand under
their headings. It takes about four minutes. --only runs the lines whose name has the text, and changes no page.
"""

import argparse
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
SECONDS = 1.5
# What a function is part of, by its path; the first that is found counts.
PARTS = [
    ("products", ("panels::tile::run_part", "panels::product")),
    ("attention", ("attention::",)),
    ("packing", ("panels::tile::run_pack",)),
    ("waiting", ("team::", "clock_gettime", "futex")),
]
NAMES = [name for name, _ in PARTS] + ["the rest"]
# Heading in the page, and the lines below it: name, model, workload, W8A8.
TABLES = [
    ("prefill in W8A8", [(f"{m}, {n} tokens", m, f"prefill-{n}", True) for m in MODELS for n in (512, 2048)]),
    ("decode of one sequence", [(m, m, "decode-1", True) for m in MODELS]),
    ("decode of many sequences", [(f"{m}, {n}", m, f"decode-{n}", True) for m in MODELS for n in (16, 32)]),
    ("bf16", [(f"SmolLM2, {w.replace('-', ' ')}", "SmolLM2", w, False) for w in ("prefill-512", "decode-1")]),
]


def part(symbol):
    for name, paths in PARTS:
        if any(path in symbol for path in paths):
            return name
    return "the rest"


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def profile(steps, model, workload, quantize):
    """Samples by part, and the percent of the floor."""
    with tempfile.NamedTemporaryFile() as data:
        command = [steps, model, "--only", workload, "--seconds", "1.6"]
        command += ["--quantize"] if quantize else []
        told = run(["perf", "record", "-q", "-F", "1500", "-o", data.name] + command).splitlines()[-1]
        lines = run(["perf", "script", "-i", data.name, "-G", "-F", "time,ip,sym"])
    numbers = re.search(r"([\d.]+) ms .* (\d+)% of the floor", told)
    if not numbers:
        sys.exit(f"no step and no floor in {told!r}")
    samples = []
    for line in lines.splitlines():
        words = line.split(None, 2)
        if len(words) == 3 and words[0].endswith(":"):
            samples.append((float(words[0][:-1]), words[2]))
    # The last of the work: what follows is the process that ends.
    end = max((time for time, symbol in samples if "twinfer_kernels" in symbol), default=None)
    if end is None:
        sys.exit(f"perf saw none of the functions of {steps}: is it built with its symbols?")
    begin = end - max(SECONDS, float(numbers.group(1)) / 1000)
    return Counter(part(symbol) for time, symbol in samples if begin < time <= end), numbers.group(2)


def table(heading, lines, args):
    rows = [f"| | {' | '.join(NAMES)} | share of the floor |", "| ---" + " | ---:" * (len(NAMES) + 1) + " |"]
    for name, model, work, quantize in lines:
        if args.only and args.only not in f"{heading}, {name}":
            continue
        counts, floor = profile(args.steps, f"{args.models}/{MODELS[model]}", work, quantize)
        shares = [f"{100 * counts[part] / counts.total():.0f} %" for part in NAMES]
        rows.append(f"| {name} | {' | '.join(shares)} | {floor} % |")
        print(f"{heading}: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def placed(page, heading, rows):
    """The page's lines with these rows instead of the first table below the heading."""
    titles = [at for at, line in enumerate(page) if line == f"### {heading}"]
    if len(titles) != 1:
        sys.exit(f"the page has {len(titles)} headings {heading!r}; one is needed")
    begin = next((at for at in range(titles[0] + 1, len(page)) if page[at].startswith(("|", "#"))), len(page))
    if begin == len(page) or page[begin].startswith("#"):
        sys.exit(f"no table stands under {heading!r}")
    end = next((at for at in range(begin, len(page)) if not page[at].startswith("|")), len(page))
    return page[:begin] + rows + page[end:]


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("steps")
    parser.add_argument("models")
    parser.add_argument("--page")
    parser.add_argument("--only")
    args = parser.parse_args()
    tables = [(heading, table(heading, lines, args)) for heading, lines in TABLES]
    for heading, rows in tables:
        if len(rows) > 2:
            print(f"### {heading}\n\n" + "\n".join(rows) + "\n")
    if args.page and not args.only:
        with open(args.page) as file:
            page = file.read().split("\n")
        for heading, rows in tables:
            page = placed(page, heading, rows)
        with open(args.page, "w") as file:
            file.write("\n".join(page))


main()
