//! Packed weights of two processes. A test target of its own: it starts itself as the other process.
#![cfg(test)]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;
use twinfer_engine::{Executor, KvMemory, LoadOptions, LoadedModel, SeqWork, Sharing, load};
use xxhash_rust::xxh3::xxh3_64;

/// Tells the child what to do: model, directory for sharing, whether to halt half way.
const MODEL: &str = "TWINFER_TEST_SHARED_MODEL";
const SHARE: &str = "TWINFER_TEST_SHARED_DIR";
const HALT: &str = "TWINFER_TEST_SHARED_HALT";
const QUANTIZE: &str = "TWINFER_TEST_SHARED_QUANTIZE";

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/golden")
        .join(name)
}

fn options(share: Option<&Path>) -> LoadOptions<'static> {
    LoadOptions {
        kv: KvMemory::Blocks(16),
        threads: 2,
        share: share.map(Path::to_owned),
        ..LoadOptions::default()
    }
}

/// Hash of all logits of a prompt.
fn answer(model: &mut LoadedModel) -> u64 {
    let tokens: Vec<u32> = (0..40).map(|i| i * 11 % 500).collect();
    let mut logits = Vec::new();
    let work = SeqWork {
        tokens: &tokens,
        start: 0,
        blocks: &[0, 1, 2],
        logits_from: Some(0),
    };
    model.executor.execute(&[work], &mut logits).unwrap();
    xxh3_64(bytemuck::cast_slice(&logits))
}

/// The other process; it ends with this value.
struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(model: &Path, share: &Path, halt: bool) -> Self {
        Self::with(model, share, halt, false)
    }

    fn with(model: &Path, share: &Path, halt: bool, quantize: bool) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "other_process",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(MODEL, model)
            .env(SHARE, share)
            .env(HALT, if halt { "1" } else { "0" })
            .env(QUANTIZE, if quantize { "1" } else { "0" })
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    /// The next line that begins with `word`, without it.
    fn line(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "no {word}");
            // The harness writes the test's name in front of its first line.
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    fn go_on(&mut self) {
        self.input.write_all(b"\n").unwrap();
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bytes of shared and of anonymous memory that a process pays for: what several map counts in parts.
fn memory(pid: u32) -> (u64, u64) {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        kib << 10
    };
    (field("Pss_Shmem:"), field("Pss_Anon:"))
}

/// Not a test of its own: what the other process runs.
#[test]
fn other_process() {
    let Some(model) = std::env::var_os(MODEL) else {
        return;
    };
    let share = PathBuf::from(std::env::var_os(SHARE).unwrap());
    let halt = AtomicBool::new(std::env::var(HALT).unwrap() == "1");
    let wait = |word: &str| {
        println!("{word}");
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
    };
    let progress = |done: u64, total: u64| {
        if done * 2 >= total && halt.swap(false, Ordering::Relaxed) {
            wait("half");
        }
    };
    println!("begin");
    let options = LoadOptions {
        progress: Some(&progress),
        quantize: std::env::var(QUANTIZE).unwrap() == "1",
        ..options(Some(&share))
    };
    let mut model = load(Path::new(&model), &options).unwrap();
    println!("sharing {:?}", model.sharing);
    println!("fingerprint {}", model.fingerprint.id);
    println!("answer {}", answer(&mut model));
    wait("done");
}

fn empty() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shared");
    (dir, path)
}

fn files(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

#[test]
fn a_second_process_maps_what_the_first_one_packed_and_answers_the_same() {
    for (name, quantize) in [
        ("qwen3_moe", true),
        ("llama", false),
        ("deepseek_v3", false),
        ("deepseek_v2_lite", true),
        ("w8a8/qwen3_moe_modelslim", false),
        ("w8a8/deepseek_v3_compressed", false),
        ("qwen2", true),
    ] {
        let (_keep, share) = empty();
        let model = golden(name);
        let mut own = load(
            &model,
            &LoadOptions {
                quantize,
                ..options(None)
            },
        )
        .unwrap();
        assert_eq!(own.sharing, Sharing::Off);
        let expected = answer(&mut own).to_string();
        let mut first = Other::with(&model, &share, false, quantize);
        assert_eq!(first.line("sharing "), "Packed", "{name}");
        let mut second = Other::with(&model, &share, false, quantize);
        assert_eq!(second.line("sharing "), "Mapped", "{name}");
        for other in [&mut first, &mut second] {
            assert_eq!(other.line("fingerprint "), own.fingerprint.id, "{name}");
            assert_eq!(other.line("answer "), expected, "{name}");
            other.line("done");
        }
        // The first may go; what the second has stays, and others still find it.
        first.kill();
        let mut third = load(
            &model,
            &LoadOptions {
                quantize,
                ..options(Some(&share))
            },
        )
        .unwrap();
        assert_eq!(third.sharing, Sharing::Mapped, "{name}");
        assert_eq!(answer(&mut third).to_string(), expected, "{name}");
        second.kill();
        assert_eq!(answer(&mut third).to_string(), expected, "{name}");
        // The last one to go leaves nothing.
        drop(third);
        assert!(files(&share) <= 1);
        let mut last = load(
            &model,
            &LoadOptions {
                quantize,
                ..options(Some(&share))
            },
        )
        .unwrap();
        assert_eq!(last.sharing, Sharing::Packed, "{name}");
        assert_eq!(answer(&mut last).to_string(), expected, "{name}");
        drop(last);
        assert_eq!(files(&share), 0, "{name}");
    }
}

#[test]
fn two_processes_pay_for_weights_once() {
    let (_keep, share) = empty();
    let dir = tempfile::tempdir().unwrap();
    large_model(dir.path());
    let mut first = Other::start(dir.path(), &share, false);
    first.line("done");
    let mut second = Other::start(dir.path(), &share, false);
    second.line("done");
    let weights = 2 * LARGE_VALUES as u64;
    let (one, two) = (memory(first.child.id()), memory(second.child.id()));
    let shared = one.0 + two.0;
    assert!(
        shared > weights * 2 / 5 && shared < weights * 11 / 10,
        "{shared} bytes for {weights} of weights"
    );
    // What each has besides is less than half of the weights.
    assert!(one.1 + two.1 < weights, "{one:?} {two:?}");
    first.kill();
    let (shared, _) = memory(second.child.id());
    assert!(shared > weights * 2 / 5, "they are still there: {shared}");
}

#[test]
fn a_packer_that_dies_half_way_leaves_nothing_and_another_packs() {
    let (_keep, share) = empty();
    let model = golden("qwen3");
    let expected = answer(&mut load(&model, &options(None)).unwrap()).to_string();
    let mut first = Other::start(&model, &share, true);
    first.line("half");
    let mut waiting = Other::start(&model, &share, false);
    waiting.line("begin");
    first.kill();
    assert_eq!(waiting.line("sharing "), "Packed");
    assert_eq!(waiting.line("answer "), expected);
    waiting.kill();
    // Its line is stale.
    assert_eq!(files(&share), 1);
    let mut third = load(&model, &options(Some(&share))).unwrap();
    assert_eq!(third.sharing, Sharing::Packed);
    assert_eq!(answer(&mut third).to_string(), expected);
}

#[test]
fn who_comes_while_another_packs_waits_for_it() {
    let (_keep, share) = empty();
    let model = golden("qwen3");
    let mut first = Other::start(&model, &share, true);
    first.line("half");
    let mut waiting = Other::start(&model, &share, false);
    waiting.line("begin");
    first.go_on();
    assert_eq!(first.line("sharing "), "Packed");
    assert_eq!(waiting.line("sharing "), "Mapped");
    assert_eq!(first.line("answer "), waiting.line("answer "));
}

#[test]
fn other_files_options_and_layouts_are_never_mapped() {
    let (_keep, share) = empty();
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(golden("llama")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let shared = |change: &dyn Fn(&mut LoadOptions<'_>)| {
        let mut options = options(Some(&share));
        change(&mut options);
        load(dir.path(), &options).unwrap()
    };
    let mut first = shared(&|_| {});
    assert_eq!(first.sharing, Sharing::Packed);
    assert_eq!(shared(&|_| {}).sharing, Sharing::Mapped);
    // What packing does not depend on.
    assert_eq!(
        shared(&|options| {
            options.block_size = 32;
            options.threads = 1;
            options.max_num_seqs = 3;
        })
        .sharing,
        Sharing::Mapped
    );
    assert_eq!(shared(&|o| o.quantize = true).sharing, Sharing::Packed);
    assert_eq!(
        shared(&|o| o.dtype = twinfer_config::Dtype::F32).sharing,
        Sharing::Packed
    );
    // One byte of one weight, file of the same size and time of modification.
    let file = dir.path().join("model.safetensors");
    let modified = std::fs::metadata(&file).unwrap().modified().unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let open = std::fs::File::options().write(true).open(&file).unwrap();
    open.set_modified(modified).unwrap();
    let mut changed = shared(&|_| {});
    assert_eq!(changed.sharing, Sharing::Packed);
    assert_ne!(changed.fingerprint.id, first.fingerprint.id);
    assert_ne!(answer(&mut changed), answer(&mut first));
}

#[test]
fn without_a_place_to_meet_weights_are_private_and_the_answer_is_the_same() {
    let model = golden("qwen3");
    let mut own = load(&model, &options(None)).unwrap();
    let mut alone = load(&model, &options(Some(Path::new("/proc/nowhere/at/all")))).unwrap();
    match &alone.sharing {
        Sharing::Private(reason) => assert!(reason.contains("/proc/nowhere"), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(answer(&mut alone), answer(&mut own));
}

const LARGE_VALUES: usize = 2 * 20_000 * 512;

/// A llama model of 40 MB, almost all of it embedding and head.
fn large_model(dir: &Path) {
    use safetensors::tensor::TensorView;
    let (vocab, hidden) = (20_000, 512);
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": false,
        "eos_token_id": 1,
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let layer = |part: &str| format!("model.layers.0.{part}.weight");
    let shapes = [
        ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
        ("lm_head.weight".to_owned(), vec![vocab, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
        (layer("input_layernorm"), vec![hidden]),
        (layer("post_attention_layernorm"), vec![hidden]),
        (layer("self_attn.q_proj"), vec![64, hidden]),
        (layer("self_attn.k_proj"), vec![64, hidden]),
        (layer("self_attn.v_proj"), vec![64, hidden]),
        (layer("self_attn.o_proj"), vec![hidden, 64]),
        (layer("mlp.gate_proj"), vec![64, hidden]),
        (layer("mlp.up_proj"), vec![64, hidden]),
        (layer("mlp.down_proj"), vec![hidden, 64]),
    ];
    let bytes = [0x80u8, 0x3c].repeat(vocab * hidden);
    let views = shapes.iter().map(|(name, shape)| {
        let count: usize = shape.iter().product();
        let view = TensorView::new(safetensors::Dtype::BF16, shape.clone(), &bytes[..2 * count]);
        (name.as_str(), view.unwrap())
    });
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
}
