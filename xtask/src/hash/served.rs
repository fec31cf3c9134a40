//! Cells of real processes.

use super::cells::{Matrix, Model, Served};
use super::{Output, Task};
use anyhow::{Context, Result, bail};
use serde_json::json;
use twinfer_it::{Client, Cluster, ClusterOptions, Instance};

/// What clients call the model.
const NAME: &str = "model";

pub(super) async fn run(
    matrix: &Matrix,
    model: &Model,
    tasks: &[Task],
    cell: &Served,
) -> Result<Vec<Output>> {
    let mut serve: Vec<String> = [
        "--max-model-len",
        "1024",
        "--max-num-batched-tokens",
        "256",
        "--served-model-name",
        NAME,
    ]
    .map(String::from)
    .to_vec();
    if model.quantize {
        serve.extend(["--quantization", "w8a8"].map(String::from));
    }
    if cell.drafts > 0 {
        serve.extend([
            "--num-speculative-tokens".to_owned(),
            cell.drafts.to_string(),
        ]);
    }
    let (prefill, decode) = (cell.prefill, cell.decode);
    let mut colocated = None;
    let mut cluster = None;
    let client = if prefill == 0 {
        let arguments: Vec<&str> = serve.iter().map(String::as_str).collect();
        let instance = colocated.insert(Instance::serve(&model.path, &arguments, &[]));
        instance.ready().await;
        instance.client()
    } else {
        cluster
            .insert(
                Cluster::start(&ClusterOptions {
                    prefill,
                    decode,
                    serve,
                    model: model.path.clone(),
                    ..ClusterOptions::default()
                })
                .await,
            )
            .client()
    };
    let mut outputs = vec![Output::new(); tasks.len()];
    let mut open = tokio::task::JoinSet::new();
    let mut next = 0;
    while next < tasks.len() || !open.is_empty() {
        while next < tasks.len() && open.len() < 16 {
            let (client, task) = (client.clone(), tasks[next].clone());
            let output = matrix.output;
            let place = next;
            open.spawn(async move {
                one(&client, &task, output)
                    .await
                    .map(|output| (place, output))
            });
            next += 1;
        }
        if let Some(done) = open.join_next().await {
            let (place, output) = done??;
            outputs[place] = output;
        }
    }
    if let Some(cluster) = &cluster {
        let (mut fetched, mut cached) = (0, 0);
        for instance in &cluster.decode {
            let metrics = instance.metrics().await;
            let from = |source: &str| {
                metrics.sum(
                    "vllm:prompt_tokens_by_source_total",
                    &[&format!("source=\"{source}\"")],
                ) as usize
            };
            fetched += from("external_kv_transfer");
            cached += from("local_cache_hit");
        }
        // A decode instance fetches what its own cache lacks, and computes the last token.
        let expected: usize = tasks.iter().map(|task| task.prompt.len() - 1).sum();
        if fetched + cached != expected || fetched <= cached {
            bail!(
                "{fetched} prompt tokens came by handoff and {cached} from the cache; expected {expected} in all, most of them by handoff"
            );
        }
    }
    Ok(outputs)
}

async fn one(client: &Client, task: &Task, output: u32) -> Result<Output> {
    let body = json!({"model": NAME, "prompt": task.prompt, "max_tokens": output, "temperature": task.temperature, "seed": task.seed,
        "ignore_eos": true, "logprobs": 0, "return_token_ids": true});
    let answer = client
        .post("/v1/completions", &body)
        .await
        .map_err(|e| anyhow::anyhow!("{e}"))?;
    if answer.status != 200 {
        bail!("status {}: {}", answer.status, answer.text());
    }
    let answer = answer.json();
    let choice = &answer["choices"][0];
    let tokens = choice["token_ids"]
        .as_array()
        .context("no token_ids in the answer")?;
    let logprobs = choice["logprobs"]["token_logprobs"]
        .as_array()
        .context("no token_logprobs in the answer")?;
    if tokens.len() != logprobs.len() {
        bail!(
            "{} tokens, {} log-probabilities",
            tokens.len(),
            logprobs.len()
        );
    }
    tokens
        .iter()
        .zip(logprobs)
        .map(|(token, logprob)| {
            let token = token.as_u64().context("a token id is no number")? as u32;
            let logprob = logprob.as_f64().context("a log-probability is no number")? as f32;
            Ok((token, logprob.to_bits()))
        })
        .collect()
}
