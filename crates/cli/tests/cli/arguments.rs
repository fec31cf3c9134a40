use crate::{model, run, stderr, stdout, twinfer};
use std::process::Stdio;

/// Arguments, exit code, what standard error says.
#[test]
fn wrong_arguments_and_files_have_their_exit_codes_and_are_named() {
    let model = model().display().to_string();
    let model = model.as_str();
    let cases: &[(&[&str], i32, &str)] = &[
        (&[], 2, "Usage: twinfer <COMMAND>"),
        (&["frobnicate"], 2, "frobnicate"),
        (&["plan"], 2, "<FILE>"),
        (
            &["plan", "/nowhere/d.yaml"],
            64,
            "/nowhere/d.yaml: No such file",
        ),
        (&["plan", "/"], 64, "/: "),
        (&["plan", "/dev/zero"], 64, "/dev/zero: "),
        (&["up", "/nowhere/d.yaml"], 64, "/nowhere/d.yaml"),
        (
            &["up", "d.yaml", "--ready-timeout=-1"],
            2,
            "--ready-timeout",
        ),
        (&["serve"], 2, "<MODEL>"),
        (&["serve", "/nowhere", "--port", "21898"], 64, "/nowhere"),
        (
            &["serve", model, "--port", "70000"],
            2,
            "allowed: a port from 1 to 65535",
        ),
        (
            &["serve", model, "--port", "1", "--port", "2"],
            2,
            "cannot be used multiple times",
        ),
        (
            &["serve", model, "--role", "prefil"],
            2,
            "allowed are both, prefill, decode",
        ),
        (
            &["serve", model, "--dtype", "fp8"],
            2,
            "[possible values: bf16, f32]",
        ),
        (
            &["serve", model, "--kv-port", "abc"],
            2,
            "'abc' for '--kv-port <KV_PORT>': allowed: a port from 1 to 65535",
        ),
        (
            &["serve", model, "--threads", "3", "--cpus", "0"],
            2,
            "--threads is 3, but --cpus names 1 core",
        ),
        (
            &["serve", model, "--port", "0", "--threads", "1025"],
            64,
            "threads is 1025; 1 to 1024 are allowed",
        ),
        (
            &["serve", model, "--threads", "many"],
            2,
            "allowed: whole numbers from 1 to 1024",
        ),
        (&["serve", model, "--cpus", "0-"], 2, "--cpus: "),
        (&["serve", model, "--api-key", "hunter2"], 2, "--api-key"),
        (
            &["serve", model, "--port", "0", "--peer-key-file", "/nowhere"],
            64,
            "--peer-key-file: /nowhere",
        ),
        (
            &[
                "router",
                "--worker",
                "http://127.0.0.1:1",
                "--api-key-file",
                "/nowhere",
            ],
            64,
            "--api-key-file: /nowhere",
        ),
        (&["router"], 64, "no instance is given"),
        (
            &["serve", model, "--port", "0", "--host", "a b"],
            64,
            "host is \"a b\"; it is not a host name",
        ),
        (
            &["router", "--worker", "http://127.0.0.1:1", "--host", "a b"],
            64,
            "host is \"a b\"; it is not a host name",
        ),
        (
            &["fake", "--port", "0", "--host", "a b"],
            64,
            "host is \"a b\"; it is not a host name",
        ),
        (
            &[
                "serve",
                model,
                "--role",
                "prefill",
                "--port",
                "0",
                "--kv-host",
                "a b",
            ],
            64,
            "kv-host (host if not given) is \"a b\"; it is not a host name",
        ),
        (
            &["router", "--port", "abc"],
            2,
            "allowed: a port from 1 to 65535",
        ),
        (
            &["machine", "--threads", "4000"],
            2,
            "--threads is 4000; allowed: 1 to ",
        ),
        (&["machine", "--threads", "1,x"], 2, "'x' for '--threads"),
        (
            &["serve", model, "--max-model-len", "many"],
            2,
            "allowed: whole numbers from 2 to the model's context length",
        ),
        (
            &["generate", model, "--prompts", "-", "--block-size", "0"],
            2,
            "whole numbers from 1 to 4096",
        ),
        (&["router", "--worker", "localhost:1"], 64, "localhost:1"),
        (
            &["router", "--decode", "http://127.0.0.1:1", "--decode", ""],
            64,
            "--decode",
        ),
        (&["generate", model], 2, "--prompts"),
        (
            &["generate", model, "--prompts", "/nowhere/p"],
            64,
            "/nowhere/p",
        ),
        (
            &["generate", model, "--prompts", "/dev/null"],
            64,
            "no prompt",
        ),
        (&["demo", "--port", "65533"], 2, "65533"),
        (&["demo", "--json"], 2, "--print-plan"),
        (
            &["demo", "--print-plan", "--once"],
            2,
            "cannot be used with",
        ),
        (&["demo", "--once", "--model", "/nowhere"], 64, "/nowhere"),
        (
            &["serve", model, "--max-num-seqs", "-1"],
            2,
            "allowed: whole numbers from 1 to 65536",
        ),
        (
            &["serve", model, "--seed", "-1"],
            2,
            "allowed: whole numbers from 0",
        ),
        (
            &["serve", model, "--drain-settle", "-1"],
            2,
            "seconds from 0 to 86400",
        ),
        (
            &["serve", model, "--max-body-bytes", "1023"],
            2,
            "from 1024 to 1073741824",
        ),
        (
            &["router", "--drain-timeout", "nan"],
            2,
            "seconds from 0 to 86400",
        ),
        (
            &["router", "--max-body-bytes", "1073741825"],
            2,
            "from 1024 to 1073741824",
        ),
        (
            &["serve", model, "--max-model-len", "1"],
            64,
            "max-model-len is 1; at least 2",
        ),
        (
            &[
                "serve",
                model,
                "--port",
                "21897",
                "--max-model-len",
                "999999",
            ],
            64,
            "allowed: 2 to ",
        ),
        (
            &["fake", "--token-time", "nan"],
            2,
            "seconds from 0 to 86400",
        ),
        (&["fake", "--ttft", "-1"], 2, "seconds from 0 to 86400"),
        (
            &["machine", "--threads", "0"],
            2,
            "1 to the number of cores",
        ),
        (&["machine", "--seconds", "nan"], 2, "--seconds"),
        (
            &["fake", "--role", "x"],
            2,
            "allowed are both, prefill, decode",
        ),
    ];
    for (arguments, code, expected) in cases {
        let output = run(twinfer().args(*arguments));
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(*code), "{arguments:?}: {text}");
        assert!(
            text.contains(expected),
            "{arguments:?}: no {expected:?} in\n{text}"
        );
        assert!(
            !text.contains("panicked") && !text.contains("twinfer: internal error"),
            "{arguments:?}: {text}"
        );
        assert!(
            output.stdout.is_empty(),
            "{arguments:?}: {}",
            stdout(&output)
        );
    }
}

#[test]
fn arguments_that_are_no_text_are_refused_without_a_panic() {
    use std::os::unix::ffi::OsStrExt;
    let odd = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    for command in ["plan", "serve", "up", "init", "demo", "machine", "router"] {
        let mut command_line = twinfer();
        command_line.arg(command).arg(odd);
        if command == "serve" {
            command_line.args(["--port", "0"]);
        }
        let output = run(&mut command_line);
        assert!(
            matches!(output.status.code(), Some(2 | 64)),
            "{command}: {output:?}"
        );
    }
}

#[test]
fn help_explains_exit_codes_and_has_examples() {
    let output = run(twinfer().arg("--help"));
    assert_eq!(output.status.code(), Some(0));
    let text = stdout(&output);
    for expected in [
        "Exit codes:",
        "64  wrong configuration",
        "69  unavailable",
        "70  internal error",
    ] {
        assert!(text.contains(expected), "{text}");
    }
    for command in [
        "serve", "generate", "router", "demo", "up", "plan", "fake", "machine", "init",
    ] {
        let output = run(twinfer().args([command, "--help"]));
        assert_eq!(output.status.code(), Some(0));
        let text = stdout(&output);
        assert!(
            text.contains("Example") && text.contains(&format!("twinfer {command}")),
            "{command}:\n{text}"
        );
    }
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    for arguments in [
        &["init"][..],
        &["--help"],
        &["reference", "flags"],
        &["reference", "schema"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = twinfer()
            .args(arguments)
            .stdout(writer)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {output:?}");
        assert!(output.stderr.is_empty(), "{arguments:?}: {output:?}");
    }
}

/// A supervisor that has died before its child could ask for the signal.
#[test]
fn a_child_of_a_dead_supervisor_does_not_start() {
    let output = run(twinfer().arg("init").env("TWINFER_SUPERVISOR_PID", "1"));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.is_empty());
    let output = run(twinfer().arg("init").env("TWINFER_SUPERVISOR_PID", "x"));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn the_machine_reports_every_rate() {
    let output =
        run(twinfer().args(["machine", "--json", "--seconds", "0.01", "--threads", "1,2"]));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(
        rows.iter()
            .map(|row| row["threads"].as_u64().unwrap())
            .collect::<Vec<_>>(),
        [1, 2]
    );
    for row in rows {
        for rate in ["read", "int8", "bf16", "f32"] {
            assert!(
                row[rate]["giga_per_second"].as_f64().unwrap() > 0.0,
                "{row}"
            );
        }
    }
}
