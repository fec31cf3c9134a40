use super::*;
use crate::ModelConfig;
use std::fs::File;
use std::io::Write;

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata")
        .join(name)
}

#[test]
fn a_config_from_gguf_gives_the_model_that_the_directory_gives() {
    for name in ["llama", "qwen2", "qwen3_moe"] {
        let gguf = Gguf::open(&testdata(&format!("gguf/{name}.gguf"))).unwrap();
        let ours = ModelConfig::parse(&gguf.config_json().unwrap()).unwrap();
        let text =
            std::fs::read_to_string(testdata(&format!("golden/{name}/config.json"))).unwrap();
        let reference = ModelConfig::parse(&text).unwrap();
        assert_eq!(ours.identity(), reference.identity(), "{name}");
        assert_eq!(ours.context, reference.context, "{name}");
    }
}

#[test]
fn a_file_cut_anywhere_is_refused_and_says_so() {
    let whole = std::fs::read(testdata("gguf/llama.gguf")).unwrap();
    let dir = std::env::temp_dir().join(format!("twinfer-gguf-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("cut.gguf");
    for length in (0..whole.len())
        .step_by(997)
        .chain([3, 4, 23, whole.len() - 1])
    {
        std::fs::write(&path, &whole[..length]).unwrap();
        let message = Gguf::open(&path).unwrap_err().to_string();
        assert!(message.contains("truncated"), "{length}: {message}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn absurd_numbers_are_refused_before_anything_is_allocated() {
    let dir = std::env::temp_dir().join(format!("twinfer-gguf-absurd-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("absurd.gguf");
    let header = |parts: &[&[u8]]| {
        let mut file = File::create(&path).unwrap();
        file.write_all(b"GGUF").unwrap();
        for part in parts {
            file.write_all(part).unwrap();
        }
        file.write_all(&[0; 64]).unwrap();
        drop(file);
        Gguf::open(&path).unwrap_err().to_string()
    };
    let (version, none, huge) = (
        3u32.to_le_bytes(),
        0u64.to_le_bytes(),
        u64::MAX.to_le_bytes(),
    );
    let one = 1u64.to_le_bytes();
    assert!(header(&[&9u32.to_le_bytes()]).contains("version 9"));
    assert!(header(&[&3u32.to_be_bytes()]).contains("big-endian"));
    assert!(header(&[&version, &huge, &none]).contains("tensors"));
    assert!(header(&[&version, &none, &huge]).contains("metadata keys"));
    assert!(header(&[&version, &none, &one, &huge]).contains("bytes"));
    std::fs::remove_dir_all(&dir).unwrap();
}
