//! A copy of the tiny checkpoint that tests may break.

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
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
    /// Name of its weight file.
    weights: String,
}

impl Model {
    pub(crate) fn copy() -> Self {
        Self::of("deepseek_v3")
    }

    /// Of a checkpoint with one weight file, by its path below testdata/golden.
    pub(crate) fn of(checkpoint: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let golden = crate::support::testdata("golden").join(checkpoint);
        let mut weights = Vec::new();
        for entry in fs::read_dir(golden).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if name.starts_with("golden.") {
                continue;
            }
            if name.ends_with(".safetensors") {
                weights.push(name.to_owned());
            }
            if name == "config.json" || name.starts_with("quant") || name.ends_with("tensors") {
                fs::copy(&path, dir.path().join(name)).unwrap();
            }
        }
        assert_eq!(weights.len(), 1, "{weights:?}");
        Self {
            dir,
            weights: weights.remove(0),
        }
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    pub(crate) fn size(&self, file: &str) -> u64 {
        fs::metadata(self.path(file)).unwrap().len()
    }

    pub(crate) fn tensors(&self) -> Tensors {
        let bytes = fs::read(self.path(&self.weights)).unwrap();
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
        self.write(&self.weights, &tensors);
    }

    /// Gives all matrices of the layers' MLPs the inner size `wide` in place of `inner`, in a file with a hole for
    /// the values.
    pub(crate) fn widen(&self, field: &str, inner: usize, wide: usize) {
        let mut header = serde_json::Map::new();
        let mut end = 0;
        for (name, (dtype, mut shape, _)) in self.tensors() {
            if name.contains(".mlp.") {
                for size in shape.iter_mut().filter(|size| **size == inner) {
                    *size = wide;
                }
            }
            let begin = end;
            end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
            let info = json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]});
            header.insert(name, info);
        }
        let header = Value::Object(header).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        fs::write(self.path(&self.weights), &bytes).unwrap();
        let file = fs::File::options()
            .write(true)
            .open(self.path(&self.weights));
        file.unwrap().set_len((bytes.len() + end) as u64).unwrap();
        self.configure(field, json!(wide));
    }

    pub(crate) fn configure(&self, field: &str, value: Value) {
        self.change("config.json", |config| config[field] = value);
    }

    /// Changes a JSON file.
    pub(crate) fn change(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let text = fs::read_to_string(self.path(file)).unwrap();
        let mut value: Value = serde_json::from_str(&text).unwrap();
        change(&mut value);
        fs::write(self.path(file), value.to_string()).unwrap();
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

    /// Refused within 5 s and before any weight is read; the message holds all words.
    pub(crate) fn refused(&self, words: &[&str]) -> ModelError {
        let start = Instant::now();
        let error = check(self.dir.path(), &options()).expect_err("a broken model is refused");
        assert!(start.elapsed() < Duration::from_secs(5));
        named(error, words)
    }

    /// As [`Model::refused`], where only the weights' values show what is wrong.
    pub(crate) fn refused_when_read(
        &self,
        options: &LoadOptions<'_>,
        words: &[&str],
    ) -> ModelError {
        let error = load(self.dir.path(), options).expect_err("a broken model is refused");
        named(error, words)
    }

    /// What must be equal for KV to be exchanged.
    pub(crate) fn fingerprint(&self) -> String {
        let loaded = load(self.dir.path(), &options()).unwrap();
        loaded.fingerprint.id
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

/// The message holds all words.
fn named(error: ModelError, words: &[&str]) -> ModelError {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is not named in: {text}");
    }
    error
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
