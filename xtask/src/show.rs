//! `show ISSUE.k`: runs exactly line k of the issue's "Shown by" list and prints the evidence.

use crate::run::{BUILD, SHORT, TESTS, capture, cargo, check};
use crate::{bench, cases, hash, memory, soak, split};
use anyhow::{Context, Result, bail};
use std::net::TcpListener;
use std::process::Command;
use std::time::Instant;
use twinfer_it::{binary, demo_model, repository};
use twinfer_kernels::Isa;

/// A line of an issue's "Shown by" list.
struct Line {
    about: &'static str,
    run: fn() -> Result<()>,
}

const SLICE: &[Line] = &[
    Line {
        about: "fresh clone: the demo answers right, all tests pass in ten minutes",
        run: fresh_clone,
    },
    Line {
        about: "the demo with its KV port blocked exits 1 and names the reason",
        run: blocked_port,
    },
    Line {
        about: "golden parity of deepseek_v3, tokenizers and chat templates",
        run: golden,
    },
    Line {
        about: "one hash over every way to deploy",
        run: hash_matrix,
    },
    Line {
        about: "the OpenAI Python SDK against worker and router",
        run: openai_sdk,
    },
    Line {
        about: "transcripts of the public proxies, replayed",
        run: transcripts,
    },
    Line {
        about: "cases",
        run: slice_cases,
    },
    Line {
        about: "soak: every gauge back at its value after warm-up",
        run: slice_soak,
    },
];

const ENGINE: &[Line] = &[
    Line {
        about: "golden checkpoints, tokenizers, templates, sampling vectors",
        run: engine_golden,
    },
    Line {
        about: "one hash per model over every way to run it",
        run: || hash::run(&hash::Args::of("engine")),
    },
    Line {
        about: "integers equal on every instruction set, logits within a class",
        run: instruction_sets,
    },
    Line {
        about: "a dense model cut into experts is the dense model",
        run: split::run,
    },
    Line {
        about: "speed and memory beside the peers",
        run: engine_bench,
    },
    Line {
        about: "cases",
        run: || cases::run("engine"),
    },
];

const RANKS: &[Line] = &[
    Line {
        about: "one hash per model over every number and place of ranks",
        run: ranks_hash,
    },
    Line {
        about: "memory per rank; moves of experts as bytes on the wire",
        run: memory::run,
    },
    Line {
        about: "sixteen ranks on two nodes, thirty-two on four",
        run: topologies,
    },
    Line {
        about: "every number of requests over N ranks",
        run: || {
            processes_named(
                "dp",
                &["any_number_of_requests_gets_the_answers_of_one_rank"],
            )
        },
    },
    Line {
        about: "killed, stopped and cut ranks under load",
        run: || chore(&["faults", "ranks", "--rounds", "20"]),
    },
    Line {
        about: "roles with and without hybrid policies, pull with ranks on both sides",
        run: || {
            processes_named(
                "dp_handoff",
                &[
                    "policies_of_phases_change_no_answer_of_either_role",
                    "any_shape_of_ranks_gives_the_answers_of_one_and_kv_comes_by_handoff",
                ],
            )
        },
    },
    Line {
        about: "cases and soak",
        run: || {
            cases::run("ranks")?;
            chore(&["soak", "--ranks", "4", "--http", "--seconds", "600"])
        },
    },
];

pub(crate) fn run(what: &str) -> Result<()> {
    let (issue, number) = match what.split_once('.') {
        Some((issue, number)) => (issue, Some(number)),
        None => (what, None),
    };
    let lines = match issue {
        "slice" => SLICE,
        "engine" => ENGINE,
        "ranks" => RANKS,
        other => bail!("no issue {other:?}; there are slice, engine, ranks"),
    };
    let chosen: Vec<usize> = match number {
        None => (1..=lines.len()).collect(),
        Some(number) => {
            let k: usize = number
                .parse()
                .with_context(|| format!("{number:?} is no line of {issue}"))?;
            if !(1..=lines.len()).contains(&k) {
                bail!("{issue} has lines 1 to {}", lines.len());
            }
            vec![k]
        }
    };
    let mut failed = Vec::new();
    for k in chosen {
        let line = &lines[k - 1];
        println!("== {issue}.{k}: {}", line.about);
        let start = Instant::now();
        match (line.run)() {
            Ok(()) => println!(
                "== {issue}.{k}: ok ({:.0} s)",
                start.elapsed().as_secs_f64()
            ),
            Err(error) => {
                println!("== {issue}.{k}: FAILED: {error:#}");
                failed.push(format!("{issue}.{k}"));
            }
        }
    }
    if !failed.is_empty() {
        bail!("not shown: {}", failed.join(", "));
    }
    Ok(())
}

fn fresh_clone() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let clone = folder.path().join("twinfer");
    check(
        Command::new("git")
            .args(["clone", "--quiet"])
            .arg(repository())
            .arg(&clone),
        SHORT,
    )?;
    let in_clone = |arguments: &[&str]| {
        let mut command = cargo();
        command
            .current_dir(&clone)
            .env("CARGO_TARGET_DIR", clone.join("target"))
            .args(arguments);
        command
    };
    check(&mut in_clone(&["build", "--release"]), BUILD)?;
    let start = Instant::now();
    check(
        &mut in_clone(&["run", "--release", "--", "demo", "--once"]),
        SHORT,
    )?;
    let seconds = start.elapsed().as_secs_f64();
    println!("demo --once: {seconds:.1} s after the build");
    if seconds > 60.0 {
        bail!("demo --once took {seconds:.1} s; a minute is allowed");
    }
    check(
        &mut in_clone(&["test", "--release", "--workspace", "--no-run"]),
        BUILD,
    )?;
    let start = Instant::now();
    let (code, output) = capture(&mut in_clone(&["test", "--release", "--workspace"]), TESTS)?;
    let seconds = start.elapsed().as_secs_f64();
    for line in output
        .lines()
        .filter(|line| line.starts_with("test result:") || line.contains("FAILED"))
    {
        println!("{line}");
    }
    println!("cargo test --release --workspace: {seconds:.0} s after the build");
    if code != Some(0) {
        bail!("cargo test --release --workspace failed");
    }
    if output
        .lines()
        .any(|line| line.starts_with("test result:") && !line.contains(" 0 ignored"))
    {
        bail!("a test is ignored");
    }
    if seconds > 600.0 {
        bail!("the tests took {seconds:.0} s; ten minutes are allowed");
    }
    Ok(())
}

fn blocked_port() -> Result<()> {
    let (code, plan) = capture(
        Command::new(binary()).args(["demo", "--print-plan", "--json"]),
        SHORT,
    )?;
    if code != Some(0) {
        bail!("demo --print-plan failed: {plan}");
    }
    let plan: serde_json::Value =
        serde_json::from_str(&plan).context("demo --print-plan --json")?;
    let port = plan["instances"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|instance| instance["role"] == "prefill")
        .and_then(|instance| instance["kv_port"].as_u64())
        .context("the plan names no KV port of a prefill instance")?;
    let blocker = TcpListener::bind(("127.0.0.1", u16::try_from(port)?))
        .with_context(|| format!("port {port}"))?;
    let (code, output) = capture(Command::new(binary()).args(["demo", "--once"]), SHORT)?;
    drop(blocker);
    println!("exit {code:?}\n{output}");
    if code != Some(1) {
        bail!("exit code {code:?}; expected 1");
    }
    if !output.contains(&port.to_string()) || !output.contains("in use") {
        bail!("the message does not say that port {port} is in use");
    }
    Ok(())
}

fn golden() -> Result<()> {
    tests_named(&[("twinfer-engine", "golden"), ("twinfer-text", "golden")])
}

fn engine_golden() -> Result<()> {
    tests_named(&[
        ("twinfer-engine", "golden"),
        ("twinfer-engine", "single_projections_equal_the_reference"),
        ("twinfer-engine", "fp8_is_decoded_exactly"),
        ("twinfer-engine", "gguf"),
        ("twinfer-config", "golden"),
        ("twinfer-text", "golden"),
        ("twinfer-engine", "sampler"),
    ])
}

fn instruction_sets() -> Result<()> {
    // The tests run on those that the processor has.
    for name in ["avx512", "avx2", "portable"] {
        Isa::detect(Some(name)).map_err(anyhow::Error::msg)?;
    }
    tests_named(&[
        // These run on every instruction set of the machine against one definition.
        (
            "twinfer-kernels",
            "quantised_activations_are_those_of_the_definition",
        ),
        (
            "twinfer-kernels",
            "integers_and_sums_of_checkpoint_rows_are_exact",
        ),
        ("twinfer-kernels", "bits_of_the_definition"),
        ("twinfer-engine", "every_instruction_set"),
    ])
}

fn engine_bench() -> Result<()> {
    let peers = std::env::var_os("TWINFER_PEERS").context(
        "TWINFER_PEERS must name the folder with the peers; docs/benchmarks.md says what it holds",
    )?;
    bench::run(&bench::Args {
        peers: Some(peers.into()),
        ..bench::Args::of("engine")
    })
}

/// Runs the tests of packages whose names contain a word; none of that name is a failure.
fn tests_named(tests: &[(&str, &str)]) -> Result<()> {
    for (package, filter) in tests {
        let (code, output) = capture(
            cargo().args([
                "test",
                "--release",
                "-p",
                package,
                filter,
                "--",
                "--nocapture",
            ]),
            BUILD,
        )?;
        println!("{output}");
        if code != Some(0) {
            bail!("tests of {package} named {filter} failed");
        }
        if !output
            .lines()
            .any(|line| line.starts_with("test ") && line.contains(filter))
        {
            bail!("{package} has no test named {filter}");
        }
    }
    Ok(())
}

/// Runs tests of a file of those with real processes, by their whole names; one that is not there is a failure.
fn processes_named(file: &str, tests: &[&str]) -> Result<()> {
    for test in tests {
        let (code, output) = capture(
            cargo().args([
                "test",
                "--release",
                "-p",
                "twinfer-it",
                "--test",
                file,
                "--",
                "--exact",
                test,
                "--nocapture",
            ]),
            BUILD,
        )?;
        println!("{output}");
        if code != Some(0) || !output.contains(&format!("test {test} ... ok")) {
            bail!("{test} failed");
        }
    }
    Ok(())
}

fn hash_matrix() -> Result<()> {
    hash::run(&hash::Args::of("slice"))
}

fn ranks_hash() -> Result<()> {
    hash::run(&hash::Args::of("ranks"))?;
    missing("cells of nodes with a /dev/shm of their own")
}

fn topologies() -> Result<()> {
    chore(&["topo", "ep16"])?;
    chore(&["topo", "hybrid32"])
}

/// A chore as a process of its own, since it begins anew in namespaces.
fn chore(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    check(command.args(arguments), TESTS)
}

/// A line, or what is left of it, that cannot be shown.
fn missing(what: &str) -> Result<()> {
    bail!("not there yet: {what}")
}

fn openai_sdk() -> Result<()> {
    let venv = repository().join("target/openai-sdk");
    let python = venv.join("bin/python");
    if !python.exists() {
        check(
            Command::new("python3").args(["-m", "venv"]).arg(&venv),
            SHORT,
        )?;
    }
    check(
        Command::new(&python).args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "openai==3.57.0",
        ]),
        SHORT,
    )?;
    check(
        Command::new(&python)
            .arg(repository().join("it/sdk/check_openai_sdk.py"))
            .arg(binary())
            .arg(demo_model()),
        SHORT,
    )
}

fn transcripts() -> Result<()> {
    let (code, output) = capture(
        cargo().args([
            "test",
            "--release",
            "-p",
            "twinfer-it",
            "--test",
            "transcripts",
            "--",
            "--nocapture",
        ]),
        BUILD,
    )?;
    println!("{output}");
    if code != Some(0) {
        bail!("transcripts differ");
    }
    Ok(())
}

fn slice_cases() -> Result<()> {
    cases::run("slice")
}

fn slice_soak() -> Result<()> {
    soak::run(&soak::Args {
        streams: 64,
        disconnect: 0.2,
        seconds: 60,
        ranks: None,
        http: false,
        steps: 0,
    })
}
