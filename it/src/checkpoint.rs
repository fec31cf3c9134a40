use crate::{Client, Instance, Process, binary, demo_model, free_port, repository};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longest time until a broken directory is refused.
const REFUSED_WITHIN: Duration = Duration::from_secs(5);
const WEIGHTS: &str = "model.safetensors";

/// A tensor as stored.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// `BF16`, `F32`, ...
    pub dtype: String,
    /// Sizes, outermost first.
    pub shape: Vec<u64>,
    /// Values, little-endian.
    pub data: Vec<u8>,
}

/// Tensors of a file by name.
pub type Tensors = BTreeMap<String, Tensor>;

/// A copy of a model directory that a test may break; gone when dropped.
#[derive(Debug)]
pub struct Checkpoint {
    dir: TempDir,
}

impl Checkpoint {
    /// Of the bundled model.
    pub fn demo() -> Self {
        Self::of(&demo_model())
    }

    /// Of a tiny reference checkpoint, by its path below `testdata/golden`.
    pub fn golden(name: &str) -> Self {
        Self::of(&repository().join("testdata/golden").join(name))
    }

    /// Of any directory; what a reference computed (`golden.*`) stays behind.
    ///
    /// # Panics
    /// When it cannot be copied.
    pub fn of(model: &Path) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        for entry in fs::read_dir(model).expect("the model") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_owned();
            if path.is_file() && !name.to_string_lossy().starts_with("golden.") {
                fs::copy(&path, dir.path().join(name)).expect("a copy");
            }
        }
        Self { dir }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Tensors of the single weight file.
    ///
    /// # Panics
    /// When it is none.
    pub fn tensors(&self) -> Tensors {
        let bytes = fs::read(self.file(WEIGHTS)).expect("the weights");
        let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
        let header: Map<String, Value> =
            serde_json::from_slice(&bytes[8..8 + length]).expect("a header");
        let data = &bytes[8 + length..];
        let tensor = |entry: &Value| {
            let at = |k: usize| entry["data_offsets"][k].as_u64().expect("an offset") as usize;
            let shape = entry["shape"].as_array().expect("a shape");
            Tensor {
                dtype: entry["dtype"].as_str().expect("a type").to_owned(),
                shape: shape.iter().map(|n| n.as_u64().expect("a size")).collect(),
                data: data[at(0)..at(1)].to_vec(),
            }
        };
        header
            .iter()
            .filter(|(name, _)| *name != "__metadata__")
            .map(|(name, entry)| (name.clone(), tensor(entry)))
            .collect()
    }

    /// Writes tensors as a weight file of this name.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write<'a>(
        &self,
        file: &str,
        tensors: impl IntoIterator<Item = (&'a String, &'a Tensor)>,
    ) {
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, tensor) in tensors {
            let start = data.len();
            data.extend_from_slice(&tensor.data);
            let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()]});
            header.insert(name.clone(), entry);
        }
        let header = Value::Object(header).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(&data);
        fs::write(self.file(file), bytes).expect("written");
    }

    /// Changes the tensors of the single weight file.
    pub fn edit(&self, change: impl FnOnce(&mut Tensors)) {
        let mut tensors = self.tensors();
        change(&mut tensors);
        self.write(WEIGHTS, &tensors);
    }

    /// Cuts the weight file into shards with an index; returns the index's map.
    ///
    /// # Panics
    /// When the files cannot be written.
    pub fn shard(&self, count: usize) -> BTreeMap<String, String> {
        let tensors = self.tensors();
        let place = |number: usize| shard_name(number % count, count);
        let map: BTreeMap<String, String> = tensors.keys().cloned().zip((0..).map(place)).collect();
        for number in 0..count {
            let name = shard_name(number, count);
            self.write(
                &name,
                tensors.iter().filter(|(tensor, _)| map[*tensor] == name),
            );
        }
        fs::remove_file(self.file(WEIGHTS)).expect("removed");
        self.index(&map);
        map
    }

    /// Writes the index of shards.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn index(&self, map: &BTreeMap<String, String>) {
        let index = json!({"metadata": {}, "weight_map": map}).to_string();
        fs::write(self.file("model.safetensors.index.json"), index).expect("written");
    }

    /// Changes a JSON file.
    ///
    /// # Panics
    /// When it is none.
    pub fn change(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let text = fs::read_to_string(self.file(file)).expect("the file");
        let mut value: Value = serde_json::from_str(&text).expect("JSON");
        change(&mut value);
        fs::write(self.file(file), value.to_string()).expect("written");
    }

    /// Sets a field of config.json.
    pub fn configure(&self, field: &str, value: Value) {
        self.change("config.json", |config| config[field] = value);
    }

    /// Serves it, and waits until it is ready.
    pub async fn serve(&self, arguments: &[&str]) -> Instance {
        let mut instance = Instance::serve(self.path(), arguments, &[]);
        instance.ready().await;
        instance
    }

    /// Serving it ends by itself within 5 s with an error that contains all `words`; it is never ready.
    pub async fn refused(&self, arguments: &[&str], words: &[&str]) {
        refused(self.path(), arguments, &[], words).await;
    }
}

/// [`Checkpoint::refused`] of any path, in an environment.
///
/// # Panics
/// When it is ready, ends without error or too late, or a word is missing.
pub async fn refused(
    model: &Path,
    arguments: &[&str],
    environment: &[(&str, &str)],
    words: &[&str],
) {
    binary();
    let (port, model) = (free_port().to_string(), model.display().to_string());
    let mut all = vec!["serve", model.as_str(), "--port", port.as_str()];
    all.extend(arguments);
    let start = Instant::now();
    let mut process = Process::start(&all, environment);
    let client = Client::new(format!("127.0.0.1:{port}"));
    let status = loop {
        if let Some(status) = process.ended() {
            break status;
        }
        if let Ok(ready) = client.get("/ready").await {
            assert_ne!(ready.status, 200, "a broken model is never ready");
        }
        assert!(
            start.elapsed() < REFUSED_WITHIN,
            "still runs:\n{}",
            process.output()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let output = process.output();
    assert!(!status.success(), "{output}");
    assert!(!output.contains("panicked"), "{output}");
    for word in words {
        assert!(output.contains(word), "{word:?} is not named in:\n{output}");
    }
}

/// Name of a shard, counted from 0.
pub fn shard_name(number: usize, count: usize) -> String {
    format!("model-{:05}-of-{count:05}.safetensors", number + 1)
}
