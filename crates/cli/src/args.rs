//! What can be typed.

use crate::exit;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use std::net::IpAddr;
use std::path::PathBuf;
use twinfer_config::{FakeConfig, GenerateConfig, LogFormat, RouterConfig, ServeConfig};

/// Serves Mixture-of-Experts language models with prefill and decode together or apart.
#[derive(Debug, Parser)]
#[command(
    name = "twinfer",
    version,
    propagate_version = true,
    arg_required_else_help = true
)]
#[command(after_help = exit::HELP, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The command line. A negative number behind a flag is its value, so that the flag can say what is
/// allowed.
pub(crate) fn command() -> clap::Command {
    Cli::command().mut_subcommands(|command| {
        command.mut_args(|arg| {
            let takes_value = arg.get_action().takes_values() && !arg.is_positional();
            if takes_value {
                arg.allow_negative_numbers(true)
            } else {
                arg
            }
        })
    })
}

/// A command.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a model: one instance of the native engine.
    #[command(after_help = "\
Examples:
  twinfer serve models/demo
  twinfer serve models/demo --role prefill --port 8100 --kv-port 8101
  twinfer serve models/demo --role decode --port 8200 --pd-peers 127.0.0.1:8101
  twinfer serve models/demo --dp 2
  curl -s http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
    -d '{\"model\": \"demo\", \"prompt\": \"Once upon a time\", \"max_tokens\": 20}'

GET /ready answers 200 once everything is up. SIGTERM or Ctrl-C drains; a second one ends at once.
Keys: TWINFER_API_KEY (clients) and TWINFER_PEER_KEY (other instances and routers), or files of mode 0600.")]
    Serve(Box<ServeArgs>),

    /// Route requests to instances: prefill and decode apart, or together.
    #[command(after_help = "\
Examples:
  twinfer router --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
  twinfer router --prefill http://a:8100,http://b:8100 --decode http://c:8200 --policy round-robin
  twinfer router --worker http://127.0.0.1:8001 http://127.0.0.1:8002

GET /ready answers 200 once requests can be served. SIGTERM or Ctrl-C drains; a second one ends at once.
Keys: TWINFER_API_KEY (clients) and TWINFER_PEER_KEY (instances), or files of mode 0600.")]
    Router(Box<RouterArgs>),

    /// Show what would be started: names, cores or devices, ranks, ports, command lines.
    #[command(after_help = "\
Examples:
  twinfer plan deploy.yaml
  twinfer plan deploy.yaml --format json | jq '.instances[].command'
  twinfer plan diff old.yaml new.yaml

With an engine by template (vllm, vllm-ascend, deepinfer, omniinfer, or a template file) the plan also states ports by node,
limits of each pair, memory of a device, and what the deployment is not; a finding of severity E stops it (see `twinfer lint`).
Exit code 64 when the file is wrong; every mistake is shown with its line.")]
    Plan(PlanArgs),

    /// Check a deployment file against the rules of its engine.
    #[command(after_help = "\
Examples:
  twinfer lint deploy.yaml
  twinfer lint deploy.yaml --allow 13 --format json
  twinfer lint --explain 13

Findings are E (plan and render refuse), W (likely not meant) and I (worth knowing), each with what was found, what is allowed
and the nearest valid value. Exit code 64 when one is E and not allowed.")]
    Lint(LintArgs),

    /// Write the files that start a deployment: scripts, containers, units, manifests, tables, benchmark settings.
    #[command(after_help = "\
Examples:
  twinfer render deploy.yaml --out rendered
  twinfer render deploy.yaml --out rendered --force --folder /srv/twinfer

For engines by template; `twinfer up` starts the native one. For every node: a script per process, start.sh that starts and
watches them, docker.sh, compose.yaml, systemd units; beside them kubernetes.yaml, the router's script, rank table or its
generator's call, warm-up and benchmark settings, and plan.json.")]
    Render(RenderArgs),

    /// Check the nodes of a deployment with their own tools, before anything starts.
    #[command(after_help = "\
Examples:
  twinfer check deploy.yaml
  twinfer check deploy.yaml --user root --record recorded
  twinfer check deploy.yaml --replay recorded --format json

For engines by template. Runs ip, ss, npu-smi and hccn_tool on every node, all nodes at the same time, each command within 20 s:
on this machine directly, on others over ssh (keys of an agent; no passwords). Nothing is changed on a node. Interface, ports,
device files, hccn.conf, processes on devices; link, health, address, TLS switch, neighbour and gateway of each device, Super Pod
IDs, and pings between all devices of different nodes. TIMEOUT, EMPTY, UNKNOWN and PARTIAL are failures; exit code 1 then.")]
    Check(CheckArgs),

    /// Make a deployment file of the scripts that start vLLM today.
    #[command(after_help = "\
Examples:
  twinfer import run.sh > deploy.yaml
  twinfer import node1.sh node2.sh launch.sh > deploy.yaml

Understands `export` lines with `vllm serve`, run_dp_template.sh with its launch_online_dp.py lines (`# on HOST` above a line
names its node), and `docker run`. Lines that are not understood are listed on standard error, and the exit code is 2.")]
    Import(ImportArgs),

    /// Name the known failures that logs show: cause, evidence, remedy.
    #[command(after_help = "\
Examples:
  twinfer diagnose logs/*.log
  twinfer diagnose prefill.log --format json

Exit code 0 when a cause was found, 1 when none is known.")]
    Diagnose(DiagnoseArgs),

    /// Start a deployment, here and on nodes with an agent, supervise it, stop it with Ctrl-C.
    #[command(after_help = "\
Examples:
  twinfer up deploy.yaml
  twinfer up deploy.yaml --log-format json 2> up.log

Every port is checked before anything starts. Instances and router are child processes; their log lines go to standard
error with the name in front. When one ends, all are stopped and the exit code is not 0. Ctrl-C or SIGTERM drains the
router, then the instances; a second one ends them at once.

Processes trust each other by the key in TWINFER_PEER_KEY; without one every start draws its own.")]
    Up(UpArgs),

    /// On further nodes of a deployment: start there what `up` asks for.
    #[command(after_help = "\
Example:
  TWINFER_PEER_KEY=... twinfer agent --host 10.0.0.2

It starts `twinfer serve` of this binary and nothing else, for whoever proves the key, and ends all of it when the
connection to `up` ends. What it started ends with it, too, however it ends.")]
    Agent(AgentArgs),

    /// Show it: start the bundled model as one prefill and one decode instance, ask it a few questions.
    #[command(after_help = "\
Examples:
  twinfer demo
  twinfer demo --port 9000
  twinfer demo --once && echo all answers are right

Uses four ports on loopback: PORT for the router, then one each for prefill, its KV handoff, and decode. With --once the
exit code is 0 only if every answer is right, and every prompt but its last token came by handoff.")]
    Demo(DemoArgs),

    /// Run prompts from a file through the native engine, without HTTP.
    #[command(after_help = "\
Examples:
  twinfer generate models/demo --prompts questions.txt --chat
  echo '{\"prompt\": \"Once upon a time\", \"max_tokens\": 20, \"logprobs\": 1}' | twinfer generate models/demo --prompts - --input jsonl

Results come in the order of the prompts. Seeds, stops and all other fields of a JSON line mean what they mean over HTTP,
and the token ids are the same.")]
    Generate(GenerateArgs),

    /// Play an instance: answer as vLLM or twinfer do, with scripted times and faults.
    #[command(after_help = "\
Example: rehearse a router
  twinfer fake --role prefill --port 8100 --ttft 0.2
  twinfer fake --role decode --port 8200 --token-time 0.02 --fault 3=cut:100
  twinfer router --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200")]
    Fake(FakeArgs),

    /// Measure what this machine can do at best: read bandwidth and arithmetic peaks.
    #[command(after_help = "\
Examples:
  twinfer machine
  twinfer machine --threads 1,8 --json

Stop other work first: these are the best rates, and a busy machine hides them.")]
    Machine(MachineArgs),

    /// Print an annotated deployment file.
    #[command(after_help = "Example:\n  twinfer init > deploy.yaml")]
    Init,

    /// Be one rank of an instance that `serve --dp` started.
    #[command(hide = true)]
    Rank,

    /// Print the reference pages made from the flags and config structs.
    #[command(hide = true)]
    Reference(ReferenceArgs),
}

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// All of them.
    #[command(flatten)]
    pub(crate) config: ServeConfig,
}

/// Arguments of `router`.
#[derive(Debug, Args)]
pub(crate) struct RouterArgs {
    /// All of them.
    #[command(flatten)]
    pub(crate) config: RouterConfig,
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct PlanArgs {
    /// Deployment file.
    #[arg(value_name = "FILE", required = true)]
    pub(crate) file: Option<PathBuf>,

    /// Form of the output.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: Format,

    /// The same as `--format json`.
    #[arg(long, conflicts_with = "format")]
    pub(crate) json: bool,

    /// What is common to commands that read deployments by template.
    #[command(flatten)]
    pub(crate) engines: EngineArgs,

    #[command(subcommand)]
    pub(crate) command: Option<PlanCommand>,
}

/// What else `plan` does.
#[derive(Debug, Subcommand)]
pub(crate) enum PlanCommand {
    /// Show what two plans differ in, a line per value.
    Diff {
        /// Deployment file.
        #[arg(value_name = "OLD")]
        old: PathBuf,
        /// Deployment file.
        #[arg(value_name = "NEW")]
        new: PathBuf,
    },
}

/// Form of an output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Lines for people.
    #[default]
    Table,
    /// JSON.
    Json,
}

/// Arguments of all commands that read deployments by template.
#[derive(Debug, Default, Args)]
pub(crate) struct EngineArgs {
    /// File of mode 0600 with private values (addresses, interfaces, ports, pods) that are merged over the deployment;
    /// nodes and instances by their names. Engines by template only.
    #[arg(long, value_name = "FILE")]
    pub(crate) private: Option<PathBuf>,

    /// Rule whose findings are permitted; the plan records it. Engines by template only.
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub(crate) allow: Vec<u16>,
}

/// Arguments of `lint`.
#[derive(Debug, Args)]
pub(crate) struct LintArgs {
    /// Deployment file.
    #[arg(value_name = "FILE", required_unless_present = "explain")]
    pub(crate) file: Option<PathBuf>,

    /// Explain a rule.
    #[arg(long, value_name = "N", conflicts_with = "file")]
    pub(crate) explain: Option<u16>,

    /// Form of the output.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: Format,

    /// What is common to commands that read deployments by template.
    #[command(flatten)]
    pub(crate) engines: EngineArgs,
}

/// Arguments of `render`.
#[derive(Debug, Args)]
pub(crate) struct RenderArgs {
    /// Deployment file.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,

    /// Folder that the files are written to; absent or empty.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,

    /// Write over files of the folder.
    #[arg(long)]
    pub(crate) force: bool,

    /// Folder on the nodes that the files are copied to; /opt/twinfer/NAME if absent.
    #[arg(long, value_name = "DIR")]
    pub(crate) folder: Option<String>,

    /// What is common to commands that read deployments by template.
    #[command(flatten)]
    pub(crate) engines: EngineArgs,
}

/// Arguments of `check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Deployment file.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,

    /// User of ssh.
    #[arg(long, value_name = "NAME", conflicts_with = "replay")]
    pub(crate) user: Option<String>,

    /// Write what every command gave into this folder.
    #[arg(long, value_name = "DIR", conflicts_with = "replay")]
    pub(crate) record: Option<PathBuf>,

    /// Run nothing; read such a folder.
    #[arg(long, value_name = "DIR")]
    pub(crate) replay: Option<PathBuf>,

    /// Form of the output.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: Format,

    /// What is common to commands that read deployments by template.
    #[command(flatten)]
    pub(crate) engines: EngineArgs,
}

/// Arguments of `import`.
#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// Scripts of all nodes.
    #[arg(value_name = "SCRIPT", required = true)]
    pub(crate) scripts: Vec<PathBuf>,
}

/// Arguments of `diagnose`.
#[derive(Debug, Args)]
pub(crate) struct DiagnoseArgs {
    /// Logs.
    #[arg(value_name = "LOG", required = true)]
    pub(crate) logs: Vec<PathBuf>,

    /// Form of the output.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: Format,
}

/// Arguments of `up`.
#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Deployment file.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,

    /// Seconds until every process must be ready.
    #[arg(long, default_value_t = 600.0, value_parser = seconds)]
    pub(crate) ready_timeout: f64,

    /// File of mode 0600 that holds the key between the processes, and to agents of other nodes; else the environment
    /// variable TWINFER_PEER_KEY; else, without agents, each start draws one.
    #[arg(long, value_name = "FILE")]
    pub(crate) peer_key_file: Option<PathBuf>,

    /// Form of log lines.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) log_format: LogFormat,
}

/// Arguments of `agent`.
#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// Address to listen on: that at which `up` reaches this node. Anything but loopback needs a peer key.
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,

    /// Port to listen on; 0 picks a free one. The address and port are printed.
    #[arg(long, default_value_t = 8900)]
    pub(crate) port: u16,

    /// File of mode 0600 that holds the key which `up` must prove, and which the processes get; else the environment
    /// variable TWINFER_PEER_KEY.
    #[arg(long, value_name = "FILE")]
    pub(crate) peer_key_file: Option<PathBuf>,

    /// Form of log lines.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) log_format: LogFormat,
}

/// Arguments of `demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Port of the router; the three after it are used too.
    #[arg(long, default_value_t = 8000, value_parser = clap::value_parser!(u16).range(1..=65532))]
    pub(crate) port: u16,

    /// Model directory, instead of the bundled model.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,

    /// End after the questions; the exit code says whether all was right.
    #[arg(long)]
    pub(crate) once: bool,

    /// Show the log lines of the processes.
    #[arg(long)]
    pub(crate) logs: bool,

    /// Print the plan and end.
    #[arg(long, conflicts_with_all = ["once", "logs"])]
    pub(crate) print_plan: bool,

    /// Print the plan as JSON.
    #[arg(long, requires = "print_plan")]
    pub(crate) json: bool,
}

/// Arguments of `generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// All of them.
    #[command(flatten)]
    pub(crate) config: GenerateConfig,
}

/// Arguments of `fake`.
#[derive(Debug, Args)]
pub(crate) struct FakeArgs {
    /// All of them.
    #[command(flatten)]
    pub(crate) config: FakeConfig,
}

/// Arguments of `machine`.
#[derive(Debug, Args)]
pub(crate) struct MachineArgs {
    /// Numbers of threads to measure with; 1, 2, 4 and so on up to all cores if absent.
    #[arg(long, value_delimiter = ',', value_parser = threads)]
    pub(crate) threads: Vec<usize>,

    /// Seconds for each measurement.
    #[arg(long, default_value_t = 0.5, value_parser = seconds)]
    pub(crate) seconds: f64,

    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `reference`.
#[derive(Debug, Args)]
pub(crate) struct ReferenceArgs {
    /// Page.
    #[arg(value_enum)]
    pub(crate) page: Page,
}

/// A page of the reference.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Page {
    /// docs/reference/flags.md
    Flags,
    /// docs/reference/deploy.schema.json
    Schema,
    /// docs/reference/deploy.example.yaml
    Example,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 86_400.0 => Ok(value),
        _ => Err("allowed: a number of seconds above 0 and up to 86400".to_owned()),
    }
}

fn threads(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(value) if value > 0 => Ok(value),
        _ => Err("allowed: 1 to the number of cores".to_owned()),
    }
}
