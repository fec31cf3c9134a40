//! Settings of AISBench and the call of `vllm bench serve`, with the router's own address and name.

use crate::engines::render::{RenderedFile, View, shell};
use std::fmt::Write as _;

pub(super) fn files(view: &View<'_>, files: &mut Vec<RenderedFile>) {
    let Some(load) = &view.deployment.file.benchmark else {
        return;
    };
    let router = view.plan.router.as_ref();
    let endpoint = view
        .plan
        .instances
        .iter()
        .flat_map(|one| &one.endpoints)
        .next();
    let (host, port) = match (router, endpoint) {
        (Some(router), _) => (router.host.clone(), router.port.to_string()),
        (None, Some(endpoint)) => {
            let (host, port) = crate::engines::router::split(endpoint);
            (host.to_owned(), port.to_owned())
        }
        (None, None) => return,
    };
    let model = &view.plan.served_model_name;
    let path = &view.plan.model;
    let rate = load.rate.unwrap_or(0.0);
    let python = |text: &str| serde_json::Value::from(text).to_string();
    files.push(RenderedFile {
        path: "aisbench.py".to_owned(),
        executable: false,
        text: format!(
            "# Goes to ais_bench/benchmark/configs/models/vllm_api/.\n\
             from ais_bench.benchmark.models import VLLMCustomAPIChatStream\n\n\
             models = [\n    dict(\n        attr=\"service\",\n        type=VLLMCustomAPIChatStream,\n        abbr=\"vllm-api-stream-chat\",\n        \
             path={},\n        model={},\n        request_rate={rate},\n        retry=2,\n        host_ip={},\n        host_port={port},\n        \
             max_out_len={},\n        batch_size={},\n        trust_remote_code=True,\n        \
             generation_kwargs=dict(temperature=0, seed=1024, ignore_eos=False),\n    )\n]\n",
            python(path),
            python(model),
            python(&host),
            load.output,
            load.concurrency
        ),
    });
    let mut text = String::from(
        "#!/usr/bin/env bash\n# A load by vLLM's own client; warmup.sh first.\nset -euo pipefail\n\
         unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY all_proxy\n",
    );
    let _ = write!(
        text,
        "exec vllm bench serve --backend vllm --endpoint /v1/completions --host {} --port {port} \\\n  --model {} --tokenizer {} \\\n  \
         --dataset-name random --random-input-len {} --random-output-len {} --ignore-eos \\\n  --num-prompts {} --max-concurrency {}",
        shell::quoted(&host),
        shell::quoted(model),
        shell::quoted(path),
        load.input,
        load.output,
        load.requests,
        load.concurrency
    );
    if let Some(rate) = load.rate {
        let _ = write!(text, " --request-rate {rate}");
    }
    text.push('\n');
    files.push(RenderedFile {
        path: "vllm-bench.sh".to_owned(),
        executable: true,
        text,
    });
}
