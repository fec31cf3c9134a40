//! A copy of the tiny checkpoint that tests may break.

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use twinfer_engine::{Executor, KvMemory, LoadOptions, ModelError, SeqWork, check, load};

pub(crate) const WEIGHTS: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
pub(crate) const NORM: &str = "model.norm.weight";

/// A tensor as stored: type, shape, bytes.
pub(crate) type Tensor = (safetensors::Dtype, Vec<usize>, Vec<u8>);
pub(crate) type Tensors = BTreeMap<String, Tensor>;

/// The copy; gone when dropped.
pub(crate) struct Model {
    pub(crate) dir: TempDir,
}

impl Model {
    pub(crate) fn copy() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let golden =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/golden/deepseek_v3");
        for file in ["config.json", WEIGHTS] {
            fs::copy(golden.join(file), dir.path().join(file)).unwrap();
        }
        Self { dir }
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    pub(crate) fn size(&self, file: &str) -> u64 {
        fs::metadata(self.path(file)).unwrap().len()
    }

    pub(crate) fn tensors(&self) -> Tensors {
        let bytes = fs::read(self.path(WEIGHTS)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        file.tensors()
            .into_iter()
            .map(|(name, t)| (name, (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
            .collect()
    }

    pub(crate) fn write(&self, file: &str, tensors: &Tensors) {
        let views = tensors.iter().map(|(name, (dtype, shape, data))| {
            (
                name.clone(),
                TensorView::new(*dtype, shape.clone(), data).unwrap(),
            )
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        fs::write(self.path(file), bytes).unwrap();
    }

    /// Changes the tensors of the single file.
    pub(crate) fn edit(&self, change: impl FnOnce(&mut Tensors)) {
        let mut tensors = self.tensors();
        change(&mut tensors);
        self.write(WEIGHTS, &tensors);
    }

    pub(crate) fn configure(&self, field: &str, value: Value) {
        let text = fs::read_to_string(self.path("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config[field] = value;
        fs::write(self.path("config.json"), config.to_string()).unwrap();
    }

    pub(crate) fn index(&self, map: &BTreeMap<String, String>) {
        fs::write(
            self.path(INDEX),
            json!({"metadata": {}, "weight_map": map}).to_string(),
        )
        .unwrap();
    }

    /// Cuts the file into `count` shards with an index; returns the map.
    pub(crate) fn shard(&self, count: usize) -> BTreeMap<String, String> {
        let mut shards: Vec<Tensors> = vec![Tensors::new(); count];
        let mut map = BTreeMap::new();
        for (number, (name, tensor)) in self.tensors().into_iter().enumerate() {
            map.insert(name.clone(), shard_name(number % count, count));
            shards[number % count].insert(name, tensor);
        }
        for (number, tensors) in shards.iter().enumerate() {
            self.write(&shard_name(number, count), tensors);
        }
        fs::remove_file(self.path(WEIGHTS)).unwrap();
        self.index(&map);
        map
    }

    /// Refused within 5 s; the message holds all words.
    pub(crate) fn refused(&self, words: &[&str]) -> ModelError {
        let start = Instant::now();
        let error = check(self.dir.path(), &options()).expect_err("a broken model is refused");
        assert!(start.elapsed() < Duration::from_secs(5));
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "{word:?} is not named in: {text}");
        }
        error
    }

    /// Logits behind a short prompt.
    pub(crate) fn logits(&self) -> Vec<f32> {
        let mut executor = load(self.dir.path(), &options()).unwrap().executor;
        let mut logits = Vec::new();
        let work = SeqWork {
            tokens: &[500, 1, 2, 3],
            start: 0,
            blocks: &[0],
            logits_from: Some(3),
        };
        executor.execute(&[work], &mut logits).unwrap();
        logits
    }
}

pub(crate) fn options() -> LoadOptions<'static> {
    LoadOptions {
        kv: KvMemory::Blocks(4),
        ..LoadOptions::default()
    }
}

pub(crate) fn shard_name(number: usize, count: usize) -> String {
    format!("model-{:05}-of-{count:05}.safetensors", number + 1)
}
