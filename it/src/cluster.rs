use crate::{Client, Metrics, Process, binary, demo_model, free_port, free_ports};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// One running instance or router.
#[derive(Debug)]
pub struct Instance {
    /// Process.
    pub process: Process,
    /// HTTP port.
    pub port: u16,
    /// KV port; 0 for a router.
    pub kv_port: u16,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
}

/// Prefill and decode instances behind a router.
#[derive(Debug)]
pub struct Cluster {
    /// Prefill instances.
    pub prefill: Vec<Instance>,
    /// Decode instances.
    pub decode: Vec<Instance>,
    /// Router.
    pub router: Instance,
}

/// Shape of a [`Cluster`].
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// Prefill instances.
    pub prefill: usize,
    /// Decode instances.
    pub decode: usize,
    /// Further arguments of every instance.
    pub serve: Vec<String>,
    /// Further arguments of prefill instances.
    pub serve_prefill: Vec<String>,
    /// Further arguments of decode instances.
    pub serve_decode: Vec<String>,
    /// Further arguments of the router.
    pub router: Vec<String>,
    /// Environment of all.
    pub environment: Vec<(String, String)>,
    /// Model directory.
    pub model: PathBuf,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self {
            prefill: 1,
            decode: 1,
            serve: Vec::new(),
            serve_prefill: Vec::new(),
            serve_decode: Vec::new(),
            router: Vec::new(),
            environment: vec![("TWINFER_PEER_KEY".to_owned(), "key-of-this-test".to_owned())],
            model: demo_model(),
        }
    }
}

impl Instance {
    /// Starts `twinfer serve` on free ports, one thread, model name `demo`; each rank of `--dp` has a KV port.
    pub fn serve(model: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let ranks = arguments.windows(2).find(|pair| pair[0] == "--dp");
        let ranks = ranks.and_then(|pair| pair[1].parse().ok()).unwrap_or(1);
        let (port, kv_port) = (free_port(), free_ports(ranks));
        let mut all: Vec<String> = vec!["serve".into(), model.display().to_string()];
        all.extend(["--served-model-name", "demo", "--threads", "1", "--port"].map(String::from));
        all.push(port.to_string());
        all.push("--kv-port".into());
        all.push(kv_port.to_string());
        // A later flag would be refused as given twice, so a test's own value replaces ours.
        for pair in arguments
            .windows(2)
            .filter(|pair| pair[0].starts_with("--"))
        {
            if let Some(at) = all.iter().position(|argument| argument == pair[0]) {
                all.drain(at..at + 2);
            }
        }
        all.extend(arguments.iter().map(|&argument| argument.to_owned()));
        Self::launch(all, environment, port, kv_port)
    }

    /// Starts `twinfer router` on a free port.
    pub fn router(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let port = free_port();
        let mut all: Vec<String> = vec!["router".into(), "--port".into(), port.to_string()];
        all.extend(arguments.iter().map(|&argument| argument.to_owned()));
        Self::launch(all, environment, port, 0)
    }

    fn launch(
        arguments: Vec<String>,
        environment: &[(&str, &str)],
        port: u16,
        kv_port: u16,
    ) -> Self {
        let environment: Vec<(String, String)> = environment
            .iter()
            .map(|&(k, v)| (k.to_owned(), v.to_owned()))
            .collect();
        let process = start(&arguments, &environment);
        Self {
            process,
            port,
            kv_port,
            arguments,
            environment,
        }
    }

    /// Starts the same command line again after the process has ended or been killed.
    pub fn restart(&mut self) {
        self.process.kill();
        self.process = start(&self.arguments, &self.environment);
    }

    /// `http://127.0.0.1:port`.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// A client of it.
    pub fn client(&self) -> Client {
        Client::new(format!("127.0.0.1:{}", self.port))
    }

    /// Its metrics.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn metrics(&self) -> Metrics {
        Metrics::of(&self.client())
            .await
            .unwrap_or_else(|e| panic!("{e}\n{}", self.process.output()))
    }

    /// Waits until `/ready` answers 200.
    ///
    /// # Panics
    /// When it ends, or is not ready within a minute.
    pub async fn ready(&mut self) {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.process.ended() {
                panic!("ended with {status}:\n{}", self.process.output());
            }
            if self
                .client()
                .get("/ready")
                .await
                .is_ok_and(|answer| answer.status == 200)
            {
                return;
            }
            assert!(
                Instant::now() < end,
                "not ready after a minute:\n{}",
                self.process.output()
            );
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    /// KV blocks in use and held, from the load report's metrics.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn kv_busy(&self) -> f64 {
        let metrics = self.metrics().await;
        metrics.sum("twinfer_kv_blocks", &["state=\"used\""])
            + metrics.sum("twinfer_kv_blocks", &["state=\"held\""])
    }

    /// Waits until no KV block is in use or held.
    ///
    /// # Panics
    /// When some still are after `limit`.
    pub async fn kv_idle(&self, limit: Duration) {
        let end = Instant::now() + limit;
        loop {
            let busy = self.kv_busy().await;
            if busy == 0.0 {
                return;
            }
            assert!(
                Instant::now() < end,
                "{busy} KV blocks still busy after {limit:?}:\n{}",
                self.process.output()
            );
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }
}

impl Cluster {
    /// Starts everything and waits until all is ready.
    pub async fn start(options: &ClusterOptions) -> Self {
        binary();
        let environment: Vec<(&str, &str)> = options
            .environment
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .collect();
        let serve = |role: &str, further: &[String]| {
            let mut arguments = vec!["--role", role];
            arguments.extend(options.serve.iter().map(String::as_str));
            arguments.extend(further.iter().map(String::as_str));
            Instance::serve(&options.model, &arguments, &environment)
        };
        let mut prefill: Vec<Instance> = (0..options.prefill)
            .map(|_| serve("prefill", &options.serve_prefill))
            .collect();
        let mut decode: Vec<Instance> = (0..options.decode)
            .map(|_| serve("decode", &options.serve_decode))
            .collect();
        for instance in prefill.iter_mut().chain(&mut decode) {
            instance.ready().await;
        }
        let urls = |instances: &[Instance]| {
            instances
                .iter()
                .map(Instance::url)
                .collect::<Vec<_>>()
                .join(",")
        };
        let (prefill_urls, decode_urls) = (urls(&prefill), urls(&decode));
        let mut arguments = vec![
            "--prefill",
            prefill_urls.as_str(),
            "--decode",
            decode_urls.as_str(),
        ];
        arguments.extend(options.router.iter().map(String::as_str));
        let mut router = Instance::router(&arguments, &environment);
        router.ready().await;
        Self {
            prefill,
            decode,
            router,
        }
    }

    /// A client of the router.
    pub fn client(&self) -> Client {
        self.router.client()
    }

    /// Waits until no instance has a KV block in use or held.
    pub async fn kv_idle(&self, limit: Duration) {
        for instance in self.prefill.iter().chain(&self.decode) {
            instance.kv_idle(limit).await;
        }
    }
}

fn start(arguments: &[String], environment: &[(String, String)]) -> Process {
    let environment: Vec<(&str, &str)> = environment
        .iter()
        .map(|(k, v)| (k.as_str(), v.as_str()))
        .collect();
    Process::start(arguments, &environment)
}
