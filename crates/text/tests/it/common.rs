use std::path::{Path, PathBuf};
use std::sync::Arc;
use twinfer_text::Tokenizer;

pub(crate) const FAMILIES: [&str; 3] = ["deepseek", "llama3", "qwen"];

pub(crate) fn dir(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/tokenizers")
        .join(family)
}

pub(crate) fn tokenizer(family: &str) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_dir(&dir(family)).unwrap())
}
