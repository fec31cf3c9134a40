"""The official OpenAI client against a worker, and against a router over a prefill and a decode instance.

    python check_openai_sdk.py TWINFER_BINARY MODEL_DIR

Completions and chat, streamed and not, log-probabilities, stops, errors. Prints one line per check; exit code 1 if one fails.
"""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai

BINARY, MODEL = sys.argv[1:3]
FAILED = []


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(*arguments):
    return subprocess.Popen([BINARY, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_ready(port, process, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"process on port {port} ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise SystemExit(f"port {port} not ready after {seconds} s")


def check(name, condition, detail=""):
    print(f"{'ok  ' if condition else 'FAIL'} {name} {detail if not condition else ''}".rstrip())
    if not condition:
        FAILED.append(name)


def refused(name, kind, call, status, param=None, code=None):
    try:
        call()
    except kind as error:
        body = error.body if isinstance(error.body, dict) else {}
        check(name, error.status_code == status and isinstance(body.get("message"), str)
              and (param is None or body.get("param") == param) and (code is None or body.get("code") == code), repr(error))
    except Exception as error:  # any other class is the finding
        check(name, False, repr(error))
    else:
        check(name, False, "was accepted")


def suite(label, port):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    models = client.models.list().data
    check(f"{label}: models", len(models) == 1)
    model = models[0].id
    question = [{"role": "user", "content": "What is the capital of France?"}]

    plain = client.chat.completions.create(model=model, messages=question, temperature=0)
    text = plain.choices[0].message.content
    check(f"{label}: chat", "Paris" in text and plain.choices[0].finish_reason == "stop", text)
    check(f"{label}: chat usage", plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
          and plain.usage.completion_tokens > 0)
    check(f"{label}: created", abs(plain.created - time.time()) < 60)

    chunks = list(client.chat.completions.create(model=model, messages=question, temperature=0, stream=True,
                                                 stream_options={"include_usage": True}))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    check(f"{label}: chat stream text equals plain", streamed == text, streamed)
    check(f"{label}: chat stream role first", chunks[0].choices[0].delta.role == "assistant")
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    check(f"{label}: chat stream one finish reason, last", reasons[-1] == "stop" and not any(reasons[:-1]), reasons)
    check(f"{label}: chat stream one id", len({c.id for c in chunks}) == 1)
    check(f"{label}: chat stream usage chunk last", not chunks[-1].choices and chunks[-1].usage == plain.usage, chunks[-1])

    prompt = "Once upon a time there was a small fox"
    whole = client.completions.create(model=model, prompt=prompt, max_tokens=24, temperature=0)
    check(f"{label}: completion", whole.choices[0].text != "" and whole.usage.completion_tokens <= 24)
    parts = list(client.completions.create(model=model, prompt=prompt, max_tokens=24, temperature=0, stream=True))
    check(f"{label}: completion stream text equals plain",
          "".join(p.choices[0].text for p in parts if p.choices) == whole.choices[0].text)
    one = client.completions.create(model=model, prompt=prompt, max_tokens=1, temperature=0)
    check(f"{label}: max_tokens 1", one.usage.completion_tokens == 1 and one.choices[0].finish_reason == "length")

    seeded = [client.completions.create(model=model, prompt=prompt, max_tokens=16, temperature=1, seed=7).choices[0].text for _ in range(2)]
    other = client.completions.create(model=model, prompt=prompt, max_tokens=16, temperature=1, seed=8).choices[0].text
    check(f"{label}: seed repeats", seeded[0] == seeded[1])
    check(f"{label}: other seed differs", seeded[0] != other)

    stopped = client.completions.create(model=model, prompt=prompt, max_tokens=64, temperature=0, stop=["."])
    check(f"{label}: stop text is cut", "." not in stopped.choices[0].text and stopped.choices[0].finish_reason == "stop")

    probed = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3)
    entries = probed.choices[0].logprobs.content
    check(f"{label}: logprobs", len(entries) == probed.usage.completion_tokens and all(e.logprob <= 0 and len(e.top_logprobs) == 3 for e in entries))

    refused(f"{label}: unknown model", openai.NotFoundError,
            lambda: client.chat.completions.create(model="no-such-model", messages=question), 404, code="model_not_found")
    refused(f"{label}: temperature out of range", openai.BadRequestError,
            lambda: client.chat.completions.create(model=model, messages=question, temperature=-1), 400, param="temperature")
    refused(f"{label}: prompt too long", openai.BadRequestError,
            lambda: client.completions.create(model=model, prompt=[5] * 100_000, max_tokens=1), 400, code="context_length_exceeded")
    refused(f"{label}: bad messages", openai.BadRequestError,
            lambda: client.chat.completions.create(model=model, messages=[{"role": "nobody", "content": "x"}]), 400)
    again = client.chat.completions.create(model=model, messages=question, temperature=0)
    check(f"{label}: serves on after errors", again.choices[0].message.content == text)
    return {"chat": text, "completion": whole.choices[0].text, "seeded": seeded[0],
            "logprobs": [e.logprob for e in entries]}


def main():
    ports = {name: free_port() for name in ("both", "prefill", "decode", "router", "kv")}
    processes = []
    try:
        worker = start("serve", MODEL, "--served-model-name", "demo", "--port", ports["both"], "--threads", 1)
        processes.append(worker)
        wait_ready(ports["both"], worker)
        alone = suite("worker", ports["both"])
        for role in ("prefill", "decode"):
            extra = ["--kv-port", ports["kv"]] if role == "prefill" else []
            processes.append(start("serve", MODEL, "--served-model-name", "demo", "--role", role, "--port", ports[role], "--threads", 1, *extra))
            wait_ready(ports[role], processes[-1])
        processes.append(start("router", "--port", ports["router"], "--prefill", f"http://127.0.0.1:{ports['prefill']}",
                               "--decode", f"http://127.0.0.1:{ports['decode']}"))
        wait_ready(ports["router"], processes[-1])
        apart = suite("router", ports["router"])
        check("router answers equal the worker's", alone == apart, json.dumps([alone, apart]))
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    print(f"openai {openai.__version__} (python {sys.version.split()[0]}), {len(FAILED)} failed")
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
