use crate::{model, run, stderr, stdout, twinfer};
use serde_json::Value;
use std::path::Path;

/// What `init` prints can be planned as it is.
#[test]
fn the_printed_file_can_be_planned() {
    let folder = tempfile::tempdir().unwrap();
    let init = run(twinfer().arg("init"));
    assert_eq!(init.status.code(), Some(0));
    let file = folder.path().join("deploy.yaml");
    std::fs::write(
        &file,
        stdout(&init)
            .replace("models/demo", &model().display().to_string())
            .replace("share-cores: false", "share-cores: true"),
    )
    .unwrap();
    let first = run(twinfer().arg("plan").arg(&file));
    assert_eq!(first.status.code(), Some(0), "{}", stderr(&first));
    let second = run(twinfer().arg("plan").arg(&file));
    assert_eq!(stdout(&first), stdout(&second));
    let json = run(twinfer().arg("plan").arg(&file).arg("--json"));
    let plan: Value = serde_json::from_slice(&json.stdout).unwrap();
    let roles: Vec<&str> = plan["instances"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|one| one["role"].as_str())
        .collect();
    assert_eq!(roles, ["prefill", "decode"]);
}

/// What no instance could start with is refused at its line, with the least that is needed.
#[test]
fn kv_memory_below_one_block_is_refused_with_the_least() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("deploy.yaml");
    let plan = |memory: &str| {
        let model = model().display().to_string();
        let text = format!(
            "model: {{path: \"{model}\"}}\nnodes: [{{name: n, share-cores: true}}]\ninstances: [{{name: a, role: both, \
             kv-cache-memory: {memory}}}]\n"
        );
        std::fs::write(&file, text).unwrap();
        run(twinfer().arg("plan").arg(&file))
    };
    let refused = plan("1B");
    assert_eq!(refused.status.code(), Some(64), "{refused:?}");
    let text = stderr(&refused);
    assert!(
        text.contains("instances[0].kv-cache-memory is \"1B\""),
        "{text}"
    );
    let least = text.split("at least ").nth(1).unwrap();
    let least = least.split(' ').next().unwrap();
    assert_eq!(plan(&format!("{least}B")).status.code(), Some(0), "{least}");
}

/// What the model's config contradicts is told before anything starts, at its key.
#[test]
fn plan_holds_flags_against_the_model_and_the_processor() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("deploy.yaml");
    let plan = |key: &str| {
        let model = model().display().to_string();
        let text = format!(
            "model: {{path: \"{model}\"}}\nnodes: [{{name: n, share-cores: true}}]\ninstances: [{{name: a, role: both, \
             {key}}}]\n"
        );
        std::fs::write(&file, text).unwrap();
        let output = run(twinfer().arg("plan").arg(&file));
        (output.status.code(), stderr(&output))
    };
    let (code, text) = plan("max-model-len: 4000000");
    assert_eq!(code, Some(64), "{text}");
    assert!(
        text.contains("instances[0].max-model-len is 4000000")
            && text.contains("the model's own limit"),
        "{text}"
    );
    let (code, text) = plan("isa: avx9");
    assert_eq!(code, Some(64), "{text}");
    assert!(
        text.contains("instances[0].isa is \"avx9\"") && text.contains("portable"),
        "{text}"
    );
    assert_eq!(plan("max-model-len: 128").0, Some(0));
}

/// A plan of a model that the native engine refuses was made, and the refusal came only at the start.
#[test]
fn plan_reads_the_config_and_refuses_deepseek_v4_with_the_engines_that_serve_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("deploy.yaml");
    std::fs::write(
        &file,
        "model: {path: .}\nnodes: [{name: n, share-cores: true}]\ninstances: [{name: a, role: both, count: 2}]\n",
    )
    .unwrap();
    let plan = |config: &str| {
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        let output = run(twinfer().arg("plan").arg(&file));
        (output.status.code(), stderr(&output))
    };
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/configs");
    let text = std::fs::read_to_string(config.join("deepseek_v4.json")).unwrap();
    let (code, refusal) = plan(&text);
    assert_eq!(code, Some(64), "{refusal}");
    for part in [
        "deploy.yaml:1:",
        "DeepseekV4ForCausalLM",
        "vllm, vllm-ascend",
    ] {
        assert!(refusal.contains(part), "{part}: {refusal}");
    }
    assert_eq!(refusal.matches("model.path is").count(), 1, "{refusal}");
    // Read in full: a field of it that is wrong is named.
    let (code, refusal) = plan(&text.replace("\"compress_ratios\"", "\"ratios\""));
    assert_eq!(code, Some(64), "{refusal}");
    assert!(refusal.contains("compress_ratios"), "{refusal}");
}

/// Mistakes of shape, of several values together and of single flags, each at its line.
#[test]
fn a_wrong_file_exits_64_and_shows_every_mistake_with_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("deploy.yaml");
    let plan = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let output = run(twinfer().arg("plan").arg(&file));
        assert_eq!(output.status.code(), Some(64), "{output:?}");
        assert!(output.stdout.is_empty());
        stderr(&output)
    };
    let shape = plan(
        "model: {path: m}\nname: n\ninstances: [{name: a, role: both, kv_port: abc, block-size: 0, drain-settle: -1, prot: 1}]\n",
    );
    for expected in [
        "deploy.yaml:3:44: instances[0].kv-port is \"abc\"",
        "instances[0].block-size is 0",
        "an integer from 1 to 4096",
        "instances[0].drain-settle is -1",
        "a number from 0 to 86400",
        "unknown key `prot`",
        "did you mean `port`?",
    ] {
        assert!(shape.contains(expected), "no {expected:?} in\n{shape}");
    }
    let engine = plan("model: {path: m}\nengine: vlm\ninstances: [{name: a, role: both}]\n");
    let expected = "deploy.yaml:2:9: engine \"vlm\" is no template; allowed: native, vllm, ";
    assert!(engine.contains(expected), "no {expected:?} in\n{engine}");
    let together = plan(
        "model: {path: /nowhere}\nnodes: [{name: n, share-cores: true}]\ninstances:\n  - {name: a, role: both, port: 9000, kv-cache-memory: zzz}\n  - {name: b, \
         role: both, port: 9000}\n",
    );
    for expected in [
        "deploy.yaml:1:15: model.path: /nowhere: No such file or directory",
        "deploy.yaml:4:56: instances[0].kv-cache-memory is \"zzz\"",
        "deploy.yaml:5:33: port 9000 on node n is given to instance b (HTTP) and to instance a (HTTP) (line 4)",
    ] {
        assert!(
            together.contains(expected),
            "no {expected:?} in\n{together}"
        );
    }
}

#[test]
fn prompts_of_text_and_json_lines_give_the_same_answers() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("prompts.txt");
    std::fs::write(
        &text,
        "What is the capital of France?\n\nWhich day comes after Monday?\n",
    )
    .unwrap();
    let generate = |arguments: &[&str]| {
        run(twinfer()
            .arg("generate")
            .arg(model())
            .args(["--threads", "1"])
            .args(arguments))
    };
    let prompts = text.display().to_string();
    // More than any context has room for: said, not just done.
    let arguments = ["--chat", "--max-tokens", "99999", "--prompts", &prompts];
    let output = generate(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let said = stderr(&output);
    assert!(
        said.contains("--max-tokens is 99999") && said.contains("behind 2 of 2 prompts"),
        "{said}"
    );
    assert_eq!(
        stdout(&output),
        "The capital of France is Paris.\nTuesday comes after Monday.\n"
    );

    let lines = folder.path().join("prompts.jsonl");
    std::fs::write(
        &lines,
        "{\"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]}\n{\"prompt\": [10, 11, 12], \"max_tokens\": 3, \"n\": 2, \
         \"ignore_eos\": true, \"logprobs\": 0}\n",
    )
    .unwrap();
    let output = generate(&["--prompts", &lines.display().to_string()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let results: Vec<Value> = stdout(&output)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(results.len(), 3);
    assert_eq!(results[0]["text"], "The capital of France is Paris.");
    assert_eq!(results[0]["finish_reason"], "stop");
    assert_eq!(
        (results[2]["line"].as_u64(), results[2]["choice"].as_u64()),
        (Some(2), Some(1))
    );
    for result in &results[1..] {
        assert_eq!(result["finish_reason"], "length");
        assert_eq!(result["completion_tokens"], 3);
        assert_eq!(result["token_ids"].as_array().unwrap().len(), 3);
        assert_eq!(result["token_logprobs"].as_array().unwrap().len(), 3);
    }
    // Greedy choices of one prompt are the same.
    assert_eq!(results[1]["token_ids"], results[2]["token_ids"]);
}

/// As over HTTP: an echoed prompt stands before the output, in text, ids and log-probabilities.
#[test]
fn prompts_are_echoed_and_scored() {
    let folder = tempfile::tempdir().unwrap();
    let lines = folder.path().join("p.jsonl");
    std::fs::write(
        &lines,
        "{\"prompt\": [10, 11, 12], \"max_tokens\": 2, \"ignore_eos\": true, \"echo\": true, \"logprobs\": 1}\n\
         {\"prompt\": [10, 11, 12], \"max_tokens\": 2, \"ignore_eos\": true, \"prompt_logprobs\": 2}\n\
         {\"prompt\": \"What is\", \"max_tokens\": 0, \"echo\": true}\n",
    )
    .unwrap();
    let output = run(twinfer()
        .arg("generate")
        .arg(model())
        .args(["--threads", "1", "--prompts"])
        .arg(&lines));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let results: Vec<Value> = stdout(&output)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let [echoed, scored, only] = &results[..] else {
        panic!("{results:?}")
    };
    let list = |value: &Value| value.as_array().unwrap().clone();
    let (ids, plain) = (list(&echoed["token_ids"]), list(&scored["token_ids"]));
    assert_eq!(ids[..3], [10, 11, 12].map(Value::from));
    assert_eq!(ids[3..], plain);
    let text = echoed["text"].as_str().unwrap();
    let output = scored["text"].as_str().unwrap();
    assert!(
        text.ends_with(output) && text.len() > output.len(),
        "{text:?} {output:?}"
    );
    let logprobs = list(&echoed["token_logprobs"]);
    assert_eq!((logprobs.len(), &logprobs[0]), (5, &Value::Null));
    assert!(logprobs[1..].iter().all(|p| p.as_f64().unwrap() <= 0.0));
    let prompt = list(&scored["prompt_logprobs"]);
    assert_eq!((prompt.len(), &prompt[0]), (3, &Value::Null));
    let second = &prompt[1]["11"];
    assert_eq!(second["logprob"], logprobs[1]);
    assert!(second["rank"].as_u64().unwrap() >= 1 && second["decoded_token"].is_string());
    assert_eq!(only["text"], "What is");
    assert_eq!(only["completion_tokens"], 0);
}

#[test]
fn a_wrong_prompt_is_named_by_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let lines = folder.path().join("p.jsonl");
    let refused = |line: &str| {
        std::fs::write(&lines, format!("\"fine\"\n{line}\n")).unwrap();
        let output = run(twinfer()
            .arg("generate")
            .arg(model())
            .arg("--prompts")
            .arg(&lines));
        assert_eq!(output.status.code(), Some(64), "{line}: {output:?}");
        assert!(output.stdout.is_empty());
        let text = stderr(&output);
        assert!(text.contains("p.jsonl: line 2: "), "{line}: {text}");
        text
    };
    refused("{");
    refused("7");
    refused("{}");
    assert!(refused("{\"prompt\": \"a\", \"max_tokens\": 999999}").contains("999999"));
    assert!(refused("{\"prompt\": [99999]}").contains("99999"));
    assert!(refused("{\"prompt\": \"a\", \"temperature\": -1}").contains("temperature"));
    assert!(refused("{\"prompt\": \"a\", \"guided_json\": {}}").contains("guided_json"));
}
