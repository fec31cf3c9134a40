//! `up` with processes that die, hang or refuse to end. This binary plays them too: started with
//! `serve` or `router` it behaves as its instance's name says.
#![expect(clippy::unwrap_used, reason = "a failed test ends here")]

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};
use twinfer_deploy::{
    Checks, Deployment, LogStyle, Plan, UpError, UpOptions, local_facts, resolve, up,
};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("serve" | "router") => play(&arguments),
        _ => run(&arguments),
    }
}

/// Runs the tests whose name contains the first argument, as the standard harness does.
fn run(arguments: &[String]) {
    type Test = (&'static str, fn());
    let tests: &[Test] = &[
        (
            "everything_becomes_ready_and_ends_cleanly",
            everything_becomes_ready_and_ends_cleanly,
        ),
        (
            "a_death_at_start_is_told_with_its_last_words",
            a_death_at_start_is_told_with_its_last_words,
        ),
        (
            "a_death_while_serving_ends_all",
            a_death_while_serving_ends_all,
        ),
        (
            "one_that_ignores_the_end_is_killed",
            one_that_ignores_the_end_is_killed,
        ),
        (
            "one_that_is_never_ready_is_named_with_its_reason",
            one_that_is_never_ready_is_named_with_its_reason,
        ),
        (
            "taken_ports_are_all_named_and_nothing_starts",
            taken_ports_are_all_named_and_nothing_starts,
        ),
        ("a_missing_program_is_named", a_missing_program_is_named),
        (
            "an_address_of_another_machine_is_refused",
            an_address_of_another_machine_is_refused,
        ),
    ];
    let filter = arguments[1..]
        .iter()
        .find(|argument| !argument.starts_with('-'));
    let chosen: Vec<&Test> = tests
        .iter()
        .filter(|(name, _)| filter.is_none_or(|filter| name.contains(filter.as_str())))
        .collect();
    if arguments.iter().any(|argument| argument == "--list") {
        chosen.iter().for_each(|(name, _)| println!("{name}: test"));
        return;
    }
    println!("\nrunning {} tests", chosen.len());
    for (name, test) in &chosen {
        // A panic ends this process with an exit code that the runner sees.
        test();
        println!("test {name} ... ok");
    }
    println!(
        "\ntest result: ok. {} passed; 0 failed; 0 ignored; 0 measured; {} filtered out",
        chosen.len(),
        tests.len() - chosen.len()
    );
}

struct Case {
    folder: tempfile::TempDir,
    plan: Plan,
}

impl Case {
    /// A prefill and a decode instance of these names, ports from `port` on.
    fn new(port: u16, prefill: &str, decode: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), "{}").unwrap();
        let text = format!(
            "model: {{path: {}}}\nnodes: [{{name: here, share-cores: true}}]\ninstances:\n  - {{name: {prefill}, role: prefill, \
             threads: 1, port: {port}, kv-port: {}}}\n  - {{name: {decode}, role: decode, threads: 1, port: {}, \
             drain-timeout: 1}}\nrouter: {{port: {}, drain-timeout: 1, drain-settle: 0}}\n",
            folder.path().display(),
            port + 1,
            port + 2,
            port + 3,
        );
        let deployment = Deployment::parse("case", &text, folder.path()).unwrap();
        let plan = resolve(&deployment, &local_facts(&deployment), Checks::default()).unwrap();
        Self { folder, plan }
    }

    fn options() -> UpOptions {
        UpOptions {
            program: std::env::current_exe().unwrap(),
            ready_timeout: Duration::from_secs(20),
            logs: LogStyle::Quiet,
            peer_key: Some("a key for this test".to_owned()),
            agent_key: None,
        }
    }

    /// Runs it; `then` is what to do when all is ready, and stops it by counting.
    fn up(
        &self,
        options: &UpOptions,
        then: impl AsyncFnOnce(&watch::Sender<u32>),
    ) -> Result<(), UpError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let (stop, stopped) = watch::channel(0);
            let (ready, is_ready) = oneshot::channel();
            let user = async {
                if is_ready.await.is_ok() {
                    then(&stop).await;
                }
                std::future::pending::<()>().await;
            };
            let limit = Duration::from_secs(40);
            tokio::select! {
                ended = tokio::time::timeout(limit, up(&self.plan, options, stopped, ready)) => ended.expect("it hangs"),
                () = user => unreachable!("it never ends"),
            }
        })
    }

    fn pid(&self, name: &str) -> Option<i32> {
        std::fs::read_to_string(self.folder.path().join(format!("{name}.pid")))
            .ok()?
            .parse()
            .ok()
    }

    /// No process is left and every port can be had again.
    fn nothing_is_left(&self) {
        for instance in &self.plan.instances {
            if let Some(pid) = self.pid(&instance.name) {
                assert!(
                    !Path::new(&format!("/proc/{pid}")).exists(),
                    "{} is an orphan",
                    instance.name
                );
            }
        }
        for port in self.plan.ports() {
            TcpListener::bind((port.host, port.number))
                .unwrap_or_else(|error| panic!("{port:?}: {error}"));
        }
    }
}

async fn stop_once(stop: &watch::Sender<u32>) {
    stop.send_modify(|count| *count += 1);
}

fn everything_becomes_ready_and_ends_cleanly() {
    let case = Case::new(21820, "good", "slow");
    case.up(&Case::options(), stop_once).unwrap();
    assert!(case.pid("good").is_some() && case.pid("slow").is_some());
    case.nothing_is_left();
}

fn a_death_at_start_is_told_with_its_last_words() {
    let case = Case::new(21824, "good", "dies");
    let start = Instant::now();
    let error = case.up(&Case::options(), stop_once).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(10));
    let UpError::Failed { message, log, code } = error else {
        panic!("{error:?}")
    };
    assert_eq!(code, Some(64));
    assert!(
        message.starts_with("dies ended with exit code 64 before everything was ready"),
        "{message}"
    );
    assert!(
        log.contains("last lines of dies:\n  the shard is missing"),
        "{log}"
    );
    case.nothing_is_left();
}

fn a_death_while_serving_ends_all() {
    for (port, victim) in [(21828, "good"), (21832, "fine")] {
        let case = Case::new(port, "good", "fine");
        let start = Instant::now();
        let error = case
            .up(&Case::options(), async |_: &watch::Sender<u32>| {
                let pid = rustix::process::Pid::from_raw(case.pid(victim).unwrap()).unwrap();
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            })
            .unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(10));
        let message = error.to_string();
        assert!(
            message.starts_with(&format!("{victim} ended with signal 9")),
            "{message}"
        );
        case.nothing_is_left();
    }
}

fn one_that_ignores_the_end_is_killed() {
    let case = Case::new(21836, "good", "stubborn");
    let error = case
        .up(&Case::options(), async |stop: &watch::Sender<u32>| {
            stop_once(stop).await;
            stop_once(stop).await;
        })
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "did not end in time and had to be killed: stubborn"
    );
    case.nothing_is_left();
}

fn one_that_is_never_ready_is_named_with_its_reason() {
    let case = Case::new(21840, "good", "never");
    let options = UpOptions {
        ready_timeout: Duration::from_secs(5),
        ..Case::options()
    };
    let message = case.up(&options, stop_once).unwrap_err().to_string();
    assert!(
        message == "not ready within 5 s: never (still loading); all were stopped",
        "{message}"
    );
    case.nothing_is_left();
}

fn taken_ports_are_all_named_and_nothing_starts() {
    let case = Case::new(21844, "good", "fine");
    let taken = [21845, 21847].map(|port| TcpListener::bind(("127.0.0.1", port)).unwrap());
    let error = case.up(&Case::options(), stop_once).unwrap_err();
    assert!(matches!(error, UpError::Ports(_)));
    assert_eq!(
        error.to_string(),
        "port 21845 on 127.0.0.1 (instance good, KV handoff) is in use\n\
         port 21847 on 127.0.0.1 (router, HTTP) is in use"
    );
    drop(taken);
    assert!(case.pid("good").is_none() && case.pid("fine").is_none());
    case.nothing_is_left();
}

fn a_missing_program_is_named() {
    let case = Case::new(21848, "good", "fine");
    let options = UpOptions {
        program: "/nowhere/twinfer".into(),
        ..Case::options()
    };
    let message = case.up(&options, stop_once).unwrap_err().to_string();
    assert!(
        message.contains("good could not be started: /nowhere/twinfer"),
        "{message}"
    );
}

fn an_address_of_another_machine_is_refused() {
    let mut case = Case::new(21852, "good", "fine");
    case.plan.instances[1].host = "192.0.2.1".to_owned();
    let error = case.up(&Case::options(), stop_once).unwrap_err();
    assert!(matches!(error, UpError::Place(_)));
    assert!(
        error
            .to_string()
            .contains("instance fine is on node here (192.0.2.1)"),
        "{error}"
    );
    assert!(case.pid("good").is_none());
}

/// A child: `/ready` as the name says, SIGTERM ends it with code 0.
fn play(arguments: &[String]) {
    let value = |flag: &str| {
        let at = arguments.iter().position(|argument| argument == flag);
        at.and_then(|at| arguments.get(at + 1)).cloned()
    };
    let name = value("--name").unwrap_or_else(|| "router".to_owned());
    if name != "router" {
        std::fs::write(
            Path::new(&arguments[2]).join(format!("{name}.pid")),
            std::process::id().to_string(),
        )
        .unwrap();
    }
    assert!(std::env::var("TWINFER_PEER_KEY").is_ok_and(|key| key == "a key for this test"));
    assert!(
        !arguments
            .iter()
            .any(|argument| argument.contains("a key for this test"))
    );
    let supervisor = std::env::var(twinfer_deploy::SUPERVISOR_ENV).unwrap();
    assert_eq!(supervisor, std::os::unix::process::parent_id().to_string());
    let port: u16 = value("--port").unwrap().parse().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let code = runtime.block_on(answer(&name, port));
    drop(runtime);
    if code != 0 {
        #[expect(clippy::disallowed_methods, reason = "the death is the test")]
        std::process::exit(code);
    }
}

/// Serves until SIGTERM; the exit code.
async fn answer(name: &str, port: u16) -> i32 {
    let mut term = signal(SignalKind::terminate()).unwrap();
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port))
        .await
        .unwrap();
    if name == "dies" {
        eprintln!("the shard is missing");
        return 64;
    }
    let ready_at = Instant::now()
        + if name == "slow" {
            Duration::from_millis(400)
        } else {
            Duration::ZERO
        };
    loop {
        tokio::select! {
            _ = term.recv() => if name != "stubborn" { return 0 },
            accepted = listener.accept() => {
                let (mut socket, _) = accepted.unwrap();
                let mut request = [0u8; 1024];
                let _ = socket.read(&mut request).await;
                let ready = name != "never" && Instant::now() >= ready_at;
                let (status, body) = match ready {
                    true => ("200 OK", "{}"),
                    false => (
                        "503 Service Unavailable",
                        r#"{"error":{"message":"still loading","type":"t","param":null,"code":"not_ready"}}"#,
                    ),
                };
                let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
                let _ = socket.write_all((head + body).as_bytes()).await;
            }
        }
    }
}
