//! Topologies on nodes that are namespaces, started by `up` and agents from a deployment file as a user would.

use anyhow::{Context, Result, anyhow, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use twinfer_it::{
    Client, Instance, Nodes, Process, chat_body, completion_body, demo_model, enter_namespaces,
    repository,
};

/// For a deployment to be ready, and for a client of it.
const LIMIT: Duration = Duration::from_secs(120);
/// What a failure may take: contract 4 of the architecture page.
pub(crate) const ADMISSION: Duration = Duration::from_secs(2);
pub(crate) const EXIT: Duration = Duration::from_secs(10);
/// Processes that were told to end have ended after this.
const GONE: Duration = Duration::from_secs(15);
/// The key between all processes.
const KEY: [(&str, &str); 1] = [("TWINFER_PEER_KEY", "key-of-this-topology")];

/// Which one.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// `ep16`: two nodes by eight ranks; `hybrid32`: four nodes by eight ranks.
    #[arg(value_enum)]
    name: Name,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Name {
    Ep16,
    Hybrid32,
}

impl Name {
    fn nodes(self) -> usize {
        match self {
            Self::Ep16 => 2,
            Self::Hybrid32 => 4,
        }
    }

    fn file(self) -> PathBuf {
        let folder = match self {
            Self::Ep16 => "seed-000-ep16",
            Self::Hybrid32 => "seed-004-hybrid",
        };
        repository()
            .join("examples")
            .join(folder)
            .join("native.yaml")
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    enter_namespaces().context("cannot make namespaces")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let count = args.name.nodes();
        let ranks = 8 * count;
        let nodes = Nodes::new(count).context("cannot make nodes")?;
        // One rank, for what all must answer.
        let mut alone = Instance::serve(&demo_model(), &["--max-model-len", "1024"], &[]);
        let mut running = Running::start(&nodes, count, &args.name.file()).await?;
        println!(
            "{count} nodes, {ranks} ranks: ready {:.1} s after `up`",
            running.started.elapsed().as_secs_f64()
        );
        alone.ready().await;
        places(&nodes, count, ranks)?;
        requests(&running.client, &alone.client(), ranks).await?;
        drop(alone);
        running.stop(&nodes).await?;
        println!("drained by SIGTERM: exit code 0, no process left on any node");
        let mut running = Running::start(&nodes, count, &args.name.file()).await?;
        let rank = ranks as u32 - 5;
        let outcome = running.lose(&nodes, rank, &Fault::Kill).await?;
        println!("rank {rank} killed under load: {outcome}");
        Ok(())
    })
}

/// Ranks are on the nodes that the plan says, and know their numbers.
fn places(nodes: &Nodes, count: usize, ranks: usize) -> Result<()> {
    for rank in 0..ranks {
        let process = nodes.rank(rank as u32);
        let process = process.with_context(|| format!("rank {rank} does not run"))?;
        let node = rank / (ranks / count);
        ensure!(
            nodes.processes(node).contains_key(&process),
            "rank {rank} is not on node {node}"
        );
        let environment = std::fs::read(format!("/proc/{process}/environ"))?;
        let environment = String::from_utf8_lossy(&environment).into_owned();
        for expected in [
            format!("WORLD_SIZE={ranks}"),
            format!("LOCAL_RANK={}", rank % (ranks / count)),
            format!("MASTER_ADDR={}", Nodes::rank_host(0)),
        ] {
            ensure!(
                environment.split('\0').any(|variable| variable == expected),
                "rank {rank} has no {expected}"
            );
        }
    }
    println!(
        "ranks 0 to {} are on their nodes, with their five variables",
        ranks - 1
    );
    Ok(())
}

/// What a user asks of it.
async fn requests(client: &Client, alone: &Client, ranks: usize) -> Result<()> {
    let text = |error: String| anyhow!(error);
    // JSON, and the same streamed.
    let body = chat_body("Where does the fox live?");
    let answer = client.post("/v1/chat/completions", &body).await;
    let answer = answer.map_err(text)?;
    ensure!(answer.status == 200, "{}", answer.text());
    let whole = answer.json()["choices"][0]["message"]["content"].clone();
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let answer = client.post("/v1/chat/completions", &streamed).await;
    let (events, done) = answer.map_err(text)?.events();
    let pieces: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    ensure!(
        done && whole == json!(pieces),
        "streamed {pieces:?}, whole {whole}"
    );
    println!("JSON and SSE: equal");
    // A client that leaves, and a request after it.
    let mut long = completion_body("Once upon a time", 900);
    long["ignore_eos"] = json!(true);
    long["stream"] = json!(true);
    let mut left = client
        .stream("/v1/completions", &long)
        .await
        .map_err(text)?;
    left.piece().await.map_err(text)?;
    drop(left);
    let first = ask(client, &question(0)).await?;
    println!("cancel, and a request after a cancel: answered");
    // Beyond the context.
    let prompt: Vec<u32> = (0..1100).map(|i| 6 + i % 200).collect();
    let answer = client
        .post("/v1/completions", &completion_body(prompt, 8))
        .await;
    let answer = answer.map_err(text)?;
    ensure!(
        answer.status == 400 && answer.text().contains("1024"),
        "{} {}",
        answer.status,
        answer.text()
    );
    println!("context limit: 400, the limit is named");
    ensure!(first == ask(alone, &question(0)).await?, "another answer");
    let got = ask_all(client, 64).await?;
    let expected = ask_all(alone, 64).await?;
    for (number, (got, expected)) in got.iter().zip(&expected).enumerate() {
        ensure!(
            got == expected,
            "request {number}: {got}, one rank: {expected}"
        );
    }
    println!("64 requests at once over {ranks} ranks: ids of all equal those of one rank");
    Ok(())
}

fn question(number: usize) -> Value {
    let prompts = [
        "Once upon a time",
        "宫保鸡丁怎么做",
        "The",
        "1 2 3 4 5 6 7 8 9",
        "A patient fox found a green rope and",
    ];
    let mut body = completion_body(prompts[number % prompts.len()], 8 + number as u32 % 40);
    body["return_token_ids"] = json!(true);
    body["seed"] = json!(number);
    body["temperature"] = json!(if number.is_multiple_of(2) { 0.0 } else { 0.9 });
    body
}

async fn ask(client: &Client, body: &Value) -> Result<Value> {
    let answer = client.post("/v1/completions", body).await;
    let answer = answer.map_err(|error| anyhow!(error))?;
    ensure!(answer.status == 200, "{}", answer.text());
    Ok(answer.json()["choices"][0]["token_ids"].clone())
}

async fn ask_all(client: &Client, count: usize) -> Result<Vec<Value>> {
    let mut asked = JoinSet::new();
    for number in 0..count {
        let client = client.clone();
        asked.spawn(async move { (number, ask(&client, &question(number)).await) });
    }
    let mut answers = asked.join_all().await;
    answers.sort_by_key(|(number, _)| *number);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// What happens to a rank.
pub(crate) enum Fault {
    Kill,
    Stop,
    /// The rank's node loses the network that ranks use.
    Cut(usize),
}

/// A deployment that runs: `up` on the first node, agents on the others.
pub(crate) struct Running {
    up: Process,
    agents: Vec<Process>,
    count: usize,
    pub(crate) client: Client,
    /// Of the instance, without the router.
    instance: Client,
    started: Instant,
}

impl Running {
    /// Starts `file` and returns when it is ready.
    pub(crate) async fn start(nodes: &Nodes, count: usize, file: &Path) -> Result<Self> {
        let mut agents = Vec::new();
        for node in 1..count {
            let host = Nodes::host(node);
            let mut agent = nodes.start(node, &["agent", "--host", &host], &KEY);
            let end = Instant::now() + LIMIT;
            while !agent.output().contains(":8900") {
                ensure!(
                    agent.ended().is_none() && Instant::now() < end,
                    "agent of node {node}: {}",
                    agent.output()
                );
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            agents.push(agent);
        }
        let started = Instant::now();
        let up = nodes.start(0, &["up", &file.display().to_string()], &KEY);
        let mut running = Self {
            up,
            agents,
            count,
            client: Client::new(format!("{}:8000", Nodes::host(0))),
            instance: Client::new(format!("{}:8100", Nodes::host(0))),
            started,
        };
        let end = Instant::now() + LIMIT;
        loop {
            let answer = running.client.get("/ready").await;
            if answer.is_ok_and(|answer| answer.status == 200) {
                return Ok(running);
            }
            ensure!(
                running.up.ended().is_none() && Instant::now() < end,
                "not ready: {}",
                running.up.output()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Ends it as a user does.
    async fn stop(&mut self, nodes: &Nodes) -> Result<()> {
        self.up.signal(Signal::TERM)?;
        let status = self.up.wait(LIMIT).await;
        ensure!(status.success(), "{status}: {}", self.up.output());
        self.nothing_left(nodes).await
    }

    /// Nothing but agents runs, and no file is shared; then the agents end.
    async fn nothing_left(&mut self, nodes: &Nodes) -> Result<()> {
        let end = Instant::now() + GONE;
        for node in 0..self.count {
            loop {
                let left = nodes.processes(node);
                let left: Vec<_> = left
                    .into_iter()
                    .filter(|(_, line)| !line.contains("twinfer agent"))
                    .collect();
                let files = nodes.shared_files(node);
                if left.is_empty() && files.is_empty() {
                    break;
                }
                ensure!(
                    Instant::now() < end,
                    "left on node {node}: {left:?}, files {files:?}"
                );
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        self.agents.clear();
        Ok(())
    }

    /// Loses a rank under load. What contract 4 says must come true; what was seen is told.
    pub(crate) async fn lose(&mut self, nodes: &Nodes, rank: u32, fault: &Fault) -> Result<String> {
        let process = nodes.rank(rank).context("the rank does not run")?;
        let mut body = completion_body("Once upon a time", 900);
        body["ignore_eos"] = json!(true);
        body["stream"] = json!(true);
        let mut streams = JoinSet::new();
        for _ in 0..8 {
            let stream = self.client.stream("/v1/completions", &body).await;
            let mut stream = stream.map_err(|error| anyhow!(error))?;
            stream.piece().await.map_err(|error| anyhow!(error))?;
            streams.spawn(async move {
                let mut text = String::new();
                while let Ok(Some(piece)) = stream.piece().await {
                    text.push_str(&String::from_utf8_lossy(&piece));
                }
                (text, Instant::now())
            });
        }
        let begin = Instant::now();
        match fault {
            Fault::Kill => signal(process, Signal::KILL)?,
            Fault::Stop => signal(process, Signal::STOP)?,
            Fault::Cut(node) => nodes.cut(*node, true)?,
        }
        let mut closed = None;
        while closed.is_none() {
            // Asked itself: the router would wait for it.
            let answer = self.instance.get("/ready").await;
            if !answer.is_ok_and(|answer| answer.status == 200) {
                closed = Some(begin.elapsed());
            }
            ensure!(
                begin.elapsed() < EXIT,
                "admission is still open: {}",
                self.up.output()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let mut last = begin;
        while let Some(ended) = streams.join_next().await {
            let (text, when) = ended?;
            last = last.max(when);
            let named = [format!("rank {rank} "), format!("rank {rank}:")];
            ensure!(
                text.contains("\"error\"") && named.iter().any(|name| text.contains(name)),
                "a stream ended without an error that names the rank: {}",
                text.lines().rev().take(5).collect::<Vec<_>>().join("; ")
            );
        }
        let status = self.up.wait(LIMIT).await;
        let exit = begin.elapsed();
        let output = self.up.output();
        if let Fault::Cut(node) = fault {
            nodes.cut(*node, false)?;
        }
        ensure!(!status.success(), "`up` ended with {status}");
        let closed = closed.unwrap_or_default();
        let late = format!("admission closed after {closed:?}, ended after {exit:?}: {output}");
        // A stalled rank is one that was silent for 1.5 s; then the time begins.
        let stall = match fault {
            Fault::Kill => Duration::ZERO,
            Fault::Stop | Fault::Cut(_) => Duration::from_millis(1900),
        };
        ensure!(closed <= ADMISSION + stall && exit <= EXIT, "{late}");
        let receipt = output
            .lines()
            .find(|line| line.contains("a rank was lost"))
            .with_context(|| format!("no receipt: {output}"))?;
        let words: Vec<&str> = receipt.split_whitespace().collect();
        let has = |name: &str| words.iter().find_map(|word| word.strip_prefix(name));
        ensure!(
            has("rank=") == Some(rank.to_string().as_str()) && has("step=").is_some(),
            "the receipt names another rank: {output}"
        );
        let (step, phase) = (
            has("step=").unwrap_or_default(),
            has("phase=").unwrap_or_default(),
        );
        let told = format!(
            "admission closed after {:.2} s, streams ended with an error after {:.2} s, `up` after {:.2} s; receipt: \
             rank {rank}, step {step}, {phase}; nothing left",
            closed.as_secs_f64(),
            last.duration_since(begin).as_secs_f64(),
            exit.as_secs_f64(),
        );
        self.nothing_left(nodes).await?;
        Ok(told)
    }
}

fn signal(process: u32, signal: Signal) -> Result<()> {
    let pid = i32::try_from(process).ok().and_then(Pid::from_raw);
    Ok(kill_process(pid.context("no process")?, signal)?)
}
