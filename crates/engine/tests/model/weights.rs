//! Broken weight files and tensors: refused with the file or tensor at fault, in time, before weights
//! are read.

use crate::fixture::{INDEX, Model, NORM, Tensors, WEIGHTS, options, shard_name};
use safetensors::SafeTensors;
use serde_json::json;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use twinfer_engine::{LoadOptions, check, load};

// C6.1

#[test]
fn a_removed_shard_is_named() {
    let model = Model::copy();
    model.shard(4);
    fs::remove_file(model.path(&shard_name(1, 4))).unwrap();
    model.refused(&[INDEX, &shard_name(1, 4)]);
}

#[test]
fn all_removed_shards_are_named_at_once() {
    let model = Model::copy();
    model.shard(4);
    fs::remove_file(model.path(&shard_name(0, 4))).unwrap();
    fs::remove_file(model.path(&shard_name(3, 4))).unwrap();
    model.refused(&[&shard_name(0, 4), &shard_name(3, 4)]);
}

#[test]
fn a_renamed_shard_is_named_with_the_file_it_may_have_become() {
    let model = Model::copy();
    model.shard(4);
    fs::rename(
        model.path(&shard_name(2, 4)),
        model.path("model-3.safetensors"),
    )
    .unwrap();
    model.refused(&[&shard_name(2, 4), "model-3.safetensors"]);
}

#[test]
fn a_tensor_that_its_shard_lacks_is_named_with_the_shard() {
    let model = Model::copy();
    let map = model.shard(2);
    let file = map[NORM].clone();
    let bytes = fs::read(model.path(&file)).unwrap();
    let mut tensors: Tensors = SafeTensors::deserialize(&bytes)
        .unwrap()
        .tensors()
        .into_iter()
        .map(|(name, t)| (name, (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
        .collect();
    tensors.remove(NORM).unwrap();
    model.write(&file, &tensors);
    model.refused(&[NORM, &file]);
}

#[test]
fn a_tensor_in_another_shard_than_the_index_says_is_named() {
    let model = Model::copy();
    let mut map = model.shard(2);
    let right = map[NORM].clone();
    let wrong = if right == shard_name(0, 2) {
        shard_name(1, 2)
    } else {
        shard_name(0, 2)
    };
    map.insert(NORM.to_owned(), wrong.clone());
    model.index(&map);
    model.refused(&[NORM, &right, &wrong]);
}

#[test]
fn several_files_without_an_index_are_refused() {
    let model = Model::copy();
    model.shard(2);
    fs::remove_file(model.path(INDEX)).unwrap();
    model.refused(&[
        "2 weight files",
        &shard_name(0, 2),
        &shard_name(1, 2),
        INDEX,
    ]);
}

#[test]
fn a_whole_file_beside_an_index_of_others_is_refused() {
    let model = Model::copy();
    let whole = fs::read(model.path(WEIGHTS)).unwrap();
    model.shard(2);
    fs::write(model.path(WEIGHTS), whole).unwrap();
    model.refused(&[WEIGHTS, INDEX, "remove"]);
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let model = Model::copy();
    let map = model.shard(2);
    let tensors = Model::copy().tensors();
    for number in 0..2 {
        let mut shard: Tensors = tensors
            .iter()
            .filter(|(name, _)| map[*name] == shard_name(number, 2))
            .map(|(n, t)| (n.clone(), t.clone()))
            .collect();
        shard.insert(NORM.to_owned(), tensors[NORM].clone());
        model.write(&shard_name(number, 2), &shard);
    }
    model.refused(&[NORM, "both", &shard_name(0, 2), &shard_name(1, 2)]);
}

#[test]
fn a_broken_index_is_refused() {
    let model = Model::copy();
    model.shard(2);
    for text in [
        "",
        "<!DOCTYPE html>",
        "[]",
        "{}",
        r#"{"weight_map": []}"#,
        r#"{"weight_map": {}}"#,
    ] {
        fs::write(model.path(INDEX), text).unwrap();
        model.refused(&[INDEX]);
    }
}

#[test]
fn an_index_cannot_reach_files_outside_of_the_directory() {
    let model = Model::copy();
    let mut map = model.shard(2);
    for file in [
        "../model.safetensors",
        "/etc/passwd",
        "..",
        "a/b.safetensors",
        "",
    ] {
        map.insert(NORM.to_owned(), file.to_owned());
        model.index(&map);
        model.refused(&[INDEX, NORM, "same directory"]);
    }
    map.insert(NORM.to_owned(), 7.to_string());
    model.index(&map);
    model.refused(&["7"]);
}

#[test]
fn a_link_out_of_the_directory_is_refused_and_one_inside_is_followed() {
    let outside = Model::copy();
    let model = Model::copy();
    fs::remove_file(model.path(WEIGHTS)).unwrap();
    symlink(outside.path(WEIGHTS), model.path(WEIGHTS)).unwrap();
    model.refused(&[WEIGHTS, "link"]);

    fs::remove_file(model.path(WEIGHTS)).unwrap();
    fs::copy(outside.path(WEIGHTS), model.path("blob")).unwrap();
    symlink("blob", model.path(WEIGHTS)).unwrap();
    assert!(check(model.dir.path(), &options()).is_ok());

    let config = Model::copy();
    fs::remove_file(config.path("config.json")).unwrap();
    symlink("/etc/hostname", config.path("config.json")).unwrap();
    config.refused(&["config.json", "link"]);
}

#[test]
fn a_revision_names_a_snapshot_of_the_hubs_cache() {
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let dir = tempfile::tempdir().unwrap();
    let repository = dir.path();
    let error = |revision: &str| {
        let error = twinfer_engine::hub_revision(repository, revision).unwrap_err();
        error.to_string()
    };
    assert!(error("main").contains("snapshots"));
    let snapshot = repository.join("snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repository.join("refs/pr")).unwrap();
    fs::write(repository.join("refs/main"), commit).unwrap();
    fs::write(repository.join("refs/pr/1"), format!("{commit}\n")).unwrap();
    fs::write(repository.join("refs/bad"), "../../elsewhere").unwrap();
    for revision in ["main", "pr/1", commit] {
        let found = twinfer_engine::hub_revision(repository, revision).unwrap();
        assert_eq!(found, snapshot, "{revision}");
    }
    for revision in ["other", "bad", "../main", "", "/etc", "a b", ".."] {
        let text = error(revision);
        assert!(text.contains("model-revision"), "{text}");
    }
    assert!(error("other").contains(commit));
}

#[test]
fn the_hub_caches_own_links_are_followed() {
    let source = Model::copy();
    let hub = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (hub.path().join("blobs"), hub.path().join("snapshots/abc"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    for file in ["config.json", WEIGHTS] {
        fs::copy(source.path(file), blobs.join(file)).unwrap();
        symlink(format!("../../blobs/{file}"), snapshot.join(file)).unwrap();
    }
    assert!(check(&snapshot, &options()).is_ok());
}

#[test]
fn pickle_files_are_refused_with_the_reason() {
    let model = Model::copy();
    fs::rename(model.path(WEIGHTS), model.path("pytorch_model.bin")).unwrap();
    model.refused(&["pytorch_model.bin", "pickle", "safetensors"]);
}

#[test]
fn a_directory_without_weights_or_config_or_no_directory_is_named() {
    let model = Model::copy();
    fs::remove_file(model.path(WEIGHTS)).unwrap();
    model.refused(&["no weight files", WEIGHTS]);
    fs::remove_file(model.path("config.json")).unwrap();
    model.refused(&["config.json"]);
    let gone = check(&model.path("gone"), &options())
        .unwrap_err()
        .to_string();
    assert!(
        gone.contains("gone") && gone.contains("does not exist"),
        "{gone}"
    );
    fs::write(model.path("file"), "x").unwrap();
    let file = check(&model.path("file"), &options())
        .unwrap_err()
        .to_string();
    assert!(file.contains("neither a directory"), "{file}");
}

// C6.2

#[test]
fn a_file_truncated_by_one_byte_is_named_with_both_sizes() {
    let model = Model::copy();
    let size = model.size(WEIGHTS);
    fs::File::options()
        .write(true)
        .open(model.path(WEIGHTS))
        .unwrap()
        .set_len(size - 1)
        .unwrap();
    model.refused(&[
        WEIGHTS,
        "truncated",
        &size.to_string(),
        &(size - 1).to_string(),
    ]);
}

#[test]
fn a_file_with_bytes_too_many_is_named_with_both_sizes() {
    let model = Model::copy();
    let size = model.size(WEIGHTS);
    fs::File::options()
        .write(true)
        .open(model.path(WEIGHTS))
        .unwrap()
        .set_len(size + 1)
        .unwrap();
    model.refused(&[WEIGHTS, &size.to_string(), &(size + 1).to_string()]);
}

#[test]
fn a_file_truncated_in_its_header_is_named_with_both_sizes() {
    let model = Model::copy();
    fs::File::options()
        .write(true)
        .open(model.path(WEIGHTS))
        .unwrap()
        .set_len(100)
        .unwrap();
    model.refused(&[WEIGHTS, "header", "100"]);
    fs::File::options()
        .write(true)
        .open(model.path(WEIGHTS))
        .unwrap()
        .set_len(5)
        .unwrap();
    model.refused(&[WEIGHTS, "5 bytes"]);
}

#[test]
fn an_empty_file_is_named() {
    let model = Model::copy();
    fs::write(model.path(WEIGHTS), b"").unwrap();
    model.refused(&[WEIGHTS, "empty", "0 bytes"]);
}

#[test]
fn an_lfs_pointer_is_recognised_and_tells_the_expected_size() {
    let model = Model::copy();
    let text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345678\n";
    fs::write(model.path(WEIGHTS), text).unwrap();
    model.refused(&[WEIGHTS, "LFS", "12345678", &text.len().to_string()]);
}

#[test]
fn a_web_page_is_recognised() {
    for page in [
        "<!DOCTYPE html><html></html>",
        "\n  <html><body>Sign in</body></html>",
    ] {
        let model = Model::copy();
        fs::write(model.path(WEIGHTS), page).unwrap();
        model.refused(&[WEIGHTS, "web page", &page.len().to_string()]);
    }
}

#[test]
fn other_text_and_hostile_headers_are_refused() {
    let header = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let cases: [Vec<u8>; 8] = [
        b"{\"error\": \"Repository not found\"}".to_vec(),
        u64::MAX.to_le_bytes().to_vec(),
        (1u64 << 40).to_le_bytes().to_vec(),
        header("not json"),
        header(r#"{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}"#),
        header(r#"{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}"#),
        header(
            r#"{"a": {"dtype": "F32", "shape": [18446744073709551615, 2], "data_offsets": [0, 8]}}"#,
        ),
        header(r#"{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}"#),
    ];
    for bytes in cases {
        let model = Model::copy();
        fs::write(model.path(WEIGHTS), &bytes).unwrap();
        model.refused(&[WEIGHTS]);
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let model = Model::copy();
    fs::remove_file(model.path(WEIGHTS)).unwrap();
    fs::create_dir(model.path(WEIGHTS)).unwrap();
    model.refused(&[WEIGHTS]);
    fs::remove_dir(model.path(WEIGHTS)).unwrap();
    symlink("nowhere", model.path(WEIGHTS)).unwrap();
    model.refused(&[WEIGHTS]);
}

/// Loads while the file is changed by `change` after the first tensor was read.
fn changed_while_loading(change: impl Fn(&Path) + Sync) -> String {
    let model = Model::copy();
    let path = model.path(WEIGHTS);
    let calls = AtomicU64::new(0);
    let progress = |_done: u64, _total: u64| {
        if calls.fetch_add(1, Ordering::Relaxed) == 0 {
            change(&path);
        }
    };
    let start = Instant::now();
    let error = load(
        model.dir.path(),
        &LoadOptions {
            progress: Some(&progress),
            ..options()
        },
    )
    .unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(5));
    let text = error.to_string();
    assert!(text.contains(WEIGHTS) && text.contains("changed"), "{text}");
    text
}

#[test]
fn a_file_truncated_while_loading_is_named_with_both_sizes() {
    let size = Model::copy().size(WEIGHTS);
    let text = changed_while_loading(|path| {
        fs::File::options()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(30_000)
            .unwrap();
    });
    assert!(
        text.contains(&size.to_string()) && text.contains("30000"),
        "{text}"
    );
}

#[test]
fn a_file_overwritten_while_loading_is_noticed_even_at_equal_size() {
    changed_while_loading(|path| {
        use std::os::unix::fs::FileExt;
        let file = fs::File::options().write(true).open(path).unwrap();
        file.write_all_at(&[1, 2, 3, 4], 500_000).unwrap();
        // Clocks of file systems tick slower than this test runs.
        let later = std::time::SystemTime::now() + Duration::from_secs(1);
        file.set_modified(later).unwrap();
    });
}

// Tensors

#[test]
fn all_missing_tensors_are_listed_at_once() {
    let names = [
        "model.layers.1.mlp.experts.7.down_proj.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
        "model.layers.0.input_layernorm.weight",
        "lm_head.weight",
    ];
    let model = Model::copy();
    model.edit(|tensors| {
        names
            .iter()
            .for_each(|name| drop(tensors.remove(*name).unwrap()))
    });
    let error = model.refused(&names);
    assert!(
        error.to_string().contains("4 tensors are missing"),
        "{error}"
    );
}

#[test]
fn shapes_and_types_that_do_not_fit_are_listed_with_both() {
    let model = Model::copy();
    model.edit(|tensors| {
        tensors.get_mut(NORM).unwrap().1 = vec![1, 64];
        tensors.get_mut("lm_head.weight").unwrap().0 = safetensors::Dtype::F16;
    });
    model.refused(&[
        NORM,
        "[1, 64]",
        "[64]",
        "lm_head.weight",
        "F16",
        "BF16, F32",
    ]);
}

#[test]
fn an_expert_count_that_differs_from_the_files_is_noticed() {
    let model = Model::copy();
    model.configure("n_routed_experts", json!(32));
    model.refused(&[
        "model.layers.1.mlp.experts.16.gate_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "[32, 64]",
    ]);
    model.configure("n_routed_experts", json!(8));
    model.refused(&["model.layers.1.mlp.gate.weight", "[8, 64]"]);
}

#[test]
fn unknown_tensors_are_told_and_the_mtp_layer_is_not() {
    let model = Model::copy();
    assert_eq!(
        check(model.dir.path(), &options()).unwrap().warnings,
        [""; 0]
    );
    model.edit(|tensors| {
        let norm = tensors[NORM].clone();
        tensors.insert("model.layers.0.novelty.weight".to_owned(), norm);
    });
    let warnings = check(model.dir.path(), &options()).unwrap().warnings;
    assert!(
        warnings.len() == 1 && warnings[0].contains("model.layers.0.novelty.weight"),
        "{warnings:?}"
    );
}
