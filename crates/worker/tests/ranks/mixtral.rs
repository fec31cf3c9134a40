//! A model in Mixtral's form: the golden Qwen3-MoE's weights under Mixtral's names, without the norms that it has not.

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// Where it is; gone when dropped.
pub(crate) fn mixtral() -> TempDir {
    let golden = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/golden/qwen3_moe"
    );
    let golden = Path::new(golden);
    let to = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(golden.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["architectures"] = json!(["MixtralForCausalLM"]);
    config["model_type"] = json!("mixtral");
    config["num_local_experts"] = config["num_experts"].take();
    config["intermediate_size"] = config["moe_intermediate_size"].take();
    fs::write(to.path().join("config.json"), config.to_string()).unwrap();

    let bytes = fs::read(golden.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter().filter_map(|(name, tensor)| {
        if name.ends_with("q_norm.weight") || name.ends_with("k_norm.weight") {
            return None;
        }
        let name = name
            .replace(".mlp.", ".block_sparse_moe.")
            .replace("gate_proj", "w1")
            .replace("up_proj", "w3")
            .replace("down_proj", "w2");
        let shape = tensor.shape().to_vec();
        Some((
            name,
            TensorView::new(tensor.dtype(), shape, tensor.data()).unwrap(),
        ))
    });
    let bytes = safetensors::serialize(tensors, None).unwrap();
    fs::write(to.path().join("model.safetensors"), bytes).unwrap();
    to
}
