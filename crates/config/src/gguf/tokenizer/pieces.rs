//! Tokenizers of SentencePiece with scores and byte tokens (`tokenizer.ggml.model` = llama), as a BPE with
//! merges.
//!
//! SentencePiece joins the neighbours whose joined text has the best score, the leftmost first. A BPE joins the pair
//! of the best rank. Every way to cut a piece into two others becomes a pair, ranked by the piece's score as
//! `transformers` ranks them (`generate_merges`): ids are equal but where two neighbouring joins to the
//! same text overlap, which no vocabulary of single scores was seen to bring about.

use super::super::{Gguf, GgufError, MetaValue};
use super::{Common, special_tokens};
use serde_json::{Value, json};
use std::collections::HashMap;

const SCORES: &str = "tokenizer.ggml.scores";
/// Work and memory for a piece grow with the square of its length.
const MAX_PIECE: usize = 256;
const MAX_MERGES: usize = 1 << 22;
/// Stands for a blank.
const MARK: &str = "\u{2581}";

impl Gguf {
    pub(super) fn pieces_json(&self, common: &Common<'_>) -> Result<Value, GgufError> {
        let tokens = &common.tokens;
        let ids: HashMap<&str, usize> = tokens
            .iter()
            .enumerate()
            .map(|(id, token)| (*token, id))
            .collect();
        if let Some(byte) = (0..=u8::MAX).find(|byte| !ids.contains_key(byte_token(*byte).as_str()))
        {
            return Err(self.bad(format!(
                "tokenizer.ggml.tokens lacks {}; allowed: a token for each of the 256 bytes",
                byte_token(byte)
            )));
        }
        if self.flag_if("tokenizer.ggml.remove_extra_whitespaces")? == Some(true) {
            return Err(self.bad(
                "tokenizer.ggml.remove_extra_whitespaces is true; allowed: false".to_owned(),
            ));
        }
        let prefix = self
            .flag_if("tokenizer.ggml.add_space_prefix")?
            .unwrap_or(true);
        let merges = self.merges_of(tokens, &ids)?;
        let mut normalizers =
            vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": MARK})];
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": MARK}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix {
            normalizers.insert(0, json!({"type": "Prepend", "prepend": MARK}));
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": special_tokens(common),
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": null,
            "post_processor": self.post_processor(true, tokens)?,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
                "ignore_merges": false, "vocab": common.vocab, "merges": merges,
            },
        }))
    }

    /// All pairs of tokens that make a token, the best first.
    fn merges_of(
        &self,
        tokens: &[&str],
        ids: &HashMap<&str, usize>,
    ) -> Result<Vec<[String; 2]>, GgufError> {
        struct Pair<'a> {
            score: f64,
            left: &'a str,
            right: &'a str,
        }
        let scores = self.scores(tokens.len())?;
        let mut pairs = Vec::new();
        for (token, score) in tokens.iter().zip(scores) {
            if token.len() > MAX_PIECE {
                return Err(self.bad(format!(
                    "tokenizer.ggml.tokens has a token of {} bytes; allowed: up to {MAX_PIECE}",
                    token.len()
                )));
            }
            // The longest left part first, which is the order within one score.
            for (at, _) in token
                .char_indices()
                .skip(1)
                .collect::<Vec<_>>()
                .into_iter()
                .rev()
            {
                let (left, right) = token.split_at(at);
                if ids.contains_key(left) && ids.contains_key(right) {
                    pairs.push(Pair { score, left, right });
                }
            }
            if pairs.len() > MAX_MERGES {
                return Err(self.bad(format!(
                    "tokenizer.ggml.tokens holds more than {MAX_MERGES} pairs of tokens that make a token"
                )));
            }
        }
        let length = |text: &str| text.chars().count();
        pairs.sort_by(|a, b| {
            b.score
                .total_cmp(&a.score)
                .then_with(|| length(b.left).cmp(&length(a.left)))
                .then_with(|| length(b.right).cmp(&length(a.right)))
        });
        Ok(pairs
            .iter()
            .map(|pair| [pair.left.to_owned(), pair.right.to_owned()])
            .collect())
    }

    fn scores(&self, tokens: usize) -> Result<Vec<f64>, GgufError> {
        let scores = self
            .list(SCORES)?
            .iter()
            .map(|value| match value {
                // Zero has a sign, which orders nothing here.
                MetaValue::Float(score) if score.is_finite() => Ok(*score + 0.0),
                other => {
                    Err(self.bad(format!("{SCORES} holds {other:?}; allowed: finite numbers")))
                }
            })
            .collect::<Result<Vec<_>, _>>()?;
        if scores.len() != tokens {
            return Err(self.bad(format!(
                "{SCORES} has {} values, tokenizer.ggml.tokens {tokens}",
                scores.len()
            )));
        }
        Ok(scores)
    }
}

fn byte_token(byte: u8) -> String {
    format!("<0x{byte:02X}>")
}
