//! Streams of ids become text without loss, delay without bound, or broken characters (C5.5).

use crate::common::{FAMILIES, dir, tokenizer};
use proptest::prelude::*;
use std::sync::{Arc, LazyLock};
use twinfer_text::{IncrementalDetokenizer, TextError, Tokenizer};

static ALL: LazyLock<Vec<Arc<Tokenizer>>> = LazyLock::new(|| FAMILIES.map(tokenizer).into());

/// Pieces, and the rest.
fn stream(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special: bool) -> (Vec<String>, String) {
    let mut stream = IncrementalDetokenizer::new(Arc::clone(tokenizer), skip_special);
    let pieces = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    (pieces, stream.finish())
}

/// The token for a byte, in a byte-level vocabulary.
fn byte_token(tokenizer: &Tokenizer, byte: u8) -> u32 {
    (0..tokenizer.vocab_size())
        .find(|&id| tokenizer.token_bytes(id).unwrap() == [byte])
        .unwrap()
}

proptest! {
    #[test]
    fn pieces_join_to_the_full_text(family in 0..3usize, skip in any::<bool>(), ids in prop::collection::vec(0..512u32, 0..200)) {
        let tokenizer = &ALL[family];
        let (pieces, rest) = stream(tokenizer, &ids, skip);
        prop_assert_eq!(pieces.concat() + &rest, tokenizer.decode(&ids, skip).unwrap());
    }

    /// Bytes of every kind, as a model without a mask may emit them.
    #[test]
    fn arbitrary_bytes_join_and_are_held_for_four_tokens_at_most(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let tokenizer = &ALL[0];
        let ids: Vec<u32> = bytes.iter().map(|&b| byte_token(tokenizer, b)).collect();
        let mut stream = IncrementalDetokenizer::new(Arc::clone(tokenizer), false);
        let (mut text, mut waiting) = (String::new(), 0);
        for id in ids {
            let piece = stream.push(id).unwrap();
            waiting = if piece.is_empty() { waiting + 1 } else { 0 };
            prop_assert!(waiting < 4 && stream.held_bytes() < 4);
            text += &piece;
        }
        text += &stream.finish();
        prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn a_piece_of_valid_text_never_ends_inside_a_character(family in 0..3usize, text in "\\PC{0,40}") {
        let tokenizer = &ALL[family];
        let ids = tokenizer.encode(&text, false).unwrap();
        let (pieces, rest) = stream(tokenizer, &ids, false);
        prop_assert_eq!(rest, "");
        let broken = pieces.concat().matches('\u{fffd}').count();
        prop_assert_eq!(broken, text.matches('\u{fffd}').count());
    }

    #[test]
    fn decoding_equals_the_library(family in 0..3usize, skip in any::<bool>(), ids in prop::collection::vec(0..512u32, 0..60)) {
        static LIBRARY: LazyLock<Vec<tokenizers::Tokenizer>> = LazyLock::new(|| {
            FAMILIES.map(|f| tokenizers::Tokenizer::from_file(dir(f).join("tokenizer.json")).unwrap()).into()
        });
        prop_assert_eq!(ALL[family].decode(&ids, skip).unwrap(), LIBRARY[family].decode(&ids, skip).unwrap());
    }
}

#[test]
fn two_thousand_invalid_bytes_flow_out_as_they_come() {
    let tokenizer = &ALL[2];
    for byte in [0xff_u8, 0x80, 0xe4, 0xf0, 0xc0] {
        let ids = vec![byte_token(tokenizer, byte); 2000];
        let (pieces, rest) = stream(tokenizer, &ids, false);
        let late = pieces.iter().position(|p| !p.is_empty()).unwrap();
        assert!(late <= 1, "byte {byte:#x}: first text after {late} tokens");
        assert_eq!(
            (pieces.concat() + &rest)
                .chars()
                .filter(|&c| c == '\u{fffd}')
                .count(),
            2000
        );
    }
}

#[test]
fn a_real_replacement_character_and_a_bom_pass_at_once() {
    let tokenizer = &ALL[0];
    for text in ["\u{fffd}", "\u{feff}x", "a\u{fffd}b\u{fffd}"] {
        let ids = tokenizer.encode(text, false).unwrap();
        let (pieces, rest) = stream(tokenizer, &ids, false);
        assert_eq!((pieces.concat().as_str(), rest.as_str()), (text, ""));
    }
}

#[test]
fn text_held_back_behind_a_chain_of_split_characters_is_bounded() {
    // Each token completes a character and begins the next, so the text never ends cleanly.
    let dir = tempfile::tempdir().unwrap();
    let vocab = r#"{"¸ŃaaaaaaaaÄ": 0, "Ã": 1}"#;
    write_tokenizer(
        dir.path(),
        vocab,
        r#"{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}"#,
    );
    let tokenizer = Arc::new(Tokenizer::from_dir(dir.path()).unwrap());
    let mut stream = IncrementalDetokenizer::new(Arc::clone(&tokenizer), false);
    let mut ids = vec![1];
    ids.resize(500, 0);
    let mut text = String::new();
    for &id in &ids {
        text += &stream.push(id).unwrap();
        assert!(stream.held_bytes() <= 64, "{}", stream.held_bytes());
    }
    text += &stream.finish();
    assert_eq!(text, tokenizer.decode(&ids, false).unwrap());
}

#[test]
fn sentencepiece_decoders_work_too() {
    let dir = tempfile::tempdir().unwrap();
    let vocab = r#"{"▁Hello": 0, "▁wor": 1, "ld": 2, "<0xE4>": 3, "<0xB8>": 4, "<0xAD>": 5, "▁▁": 6, "<0xFF>": 7}"#;
    write_tokenizer(
        dir.path(),
        vocab,
        r#"{"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}"#,
    );
    let tokenizer = Arc::new(Tokenizer::from_dir(dir.path()).unwrap());
    let library = tokenizers::Tokenizer::from_file(dir.path().join("tokenizer.json")).unwrap();
    for ids in [
        &[0, 1, 2][..],
        &[6, 0],
        &[3, 4, 5, 2],
        &[1, 3, 4, 5],
        &[],
        &[6],
    ] {
        let text = library.decode(ids, false).unwrap();
        assert_eq!(tokenizer.decode(ids, false).unwrap(), text, "{ids:?}");
        let (pieces, rest) = stream(&tokenizer, ids, false);
        assert_eq!(pieces.concat() + &rest, text, "{ids:?}");
    }
    let (pieces, rest) = stream(&tokenizer, &[3, 4, 7, 3, 4, 5], false);
    assert_eq!(pieces.concat() + &rest, "\u{fffd}\u{fffd}中");
}

#[test]
fn ids_out_of_range_are_refused_everywhere_and_change_nothing() {
    for tokenizer in ALL.iter() {
        let limit = tokenizer.id_limit();
        for id in [limit, limit + 1, 1 << 31, u32::MAX] {
            let refused = |r: Result<(), TextError>| {
                assert!(
                    matches!(r, Err(TextError::UnknownToken { id: i, limit: l }) if (i, l) == (id, limit))
                );
            };
            refused(tokenizer.decode(&[0, id], false).map(drop));
            refused(tokenizer.check_ids(&[0, id]));
            refused(tokenizer.token_bytes(id).map(drop));
            refused(tokenizer.token_text(id).map(drop));
            let mut stream = IncrementalDetokenizer::new(Arc::clone(tokenizer), true);
            let start = byte_token(tokenizer, 0xe4);
            assert_eq!(stream.push(start).unwrap(), "");
            refused(stream.push(id).map(drop));
            assert_eq!(stream.finish(), "\u{fffd}");
        }
        assert!(tokenizer.check_ids(&[0, limit - 1]).is_ok());
    }
}

fn write_tokenizer(dir: &std::path::Path, vocab: &str, decoder: &str) {
    let text = format!(
        r#"{{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": {decoder}, "model": {{"type": "BPE", "vocab": {vocab}, "merges": []}}}}"#
    );
    std::fs::write(dir.join("tokenizer.json"), text).unwrap();
}
