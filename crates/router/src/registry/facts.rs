//! What an instance says of itself.

use serde::Deserialize;
use serde_json::Value;
use twinfer_protocol::{Epoch, Fingerprint, InstanceCard, Limits};

/// Longest name of an instance or a model that is taken over, in bytes.
const MAX_NAME: usize = 256;
/// Most characters of a setting that a message repeats.
const MAX_VALUE: usize = 64;
/// Most models of one instance.
const MAX_MODELS: usize = 64;

/// A model that an instance serves.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Model {
    pub(crate) id: String,
    pub(crate) max_model_len: Option<u64>,
    /// Its entry in `/v1/models`, as the instance has it.
    pub(crate) entry: Value,
}

/// What an instance says of itself.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Facts {
    pub(crate) name: String,
    pub(crate) models: Vec<Model>,
    /// The native engine's fingerprint; other engines have none.
    pub(crate) fingerprint: Option<Fingerprint>,
    pub(crate) limits: Option<Limits>,
    /// Which process it is.
    pub(crate) epoch: Option<Epoch>,
    /// Has it the `/twinfer/*` routes?
    pub(crate) native: bool,
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<Value>,
}

impl Facts {
    /// From `/v1/models`, and the card of a native instance.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub(crate) fn read(
        models: &[u8],
        card: Option<&InstanceCard>,
        address: &str,
    ) -> Result<Self, String> {
        let list: ModelList = serde_json::from_slice(models)
            .map_err(|e| format!("/v1/models is not a list of models: {e}"))?;
        let models: Vec<Model> = list
            .data
            .into_iter()
            .take(MAX_MODELS)
            .filter_map(|entry| {
                let id = entry
                    .get("id")?
                    .as_str()
                    .filter(|id| id.len() <= MAX_NAME)?
                    .to_owned();
                let max_model_len = entry.get("max_model_len").and_then(Value::as_u64);
                Some(Model {
                    id,
                    max_model_len,
                    entry,
                })
            })
            .collect();
        if models.is_empty() {
            return Err("/v1/models names no model".to_owned());
        }
        // Names go into headers and labels.
        let sane = |name: &str| {
            !name.is_empty() && name.len() <= MAX_NAME && name.bytes().all(|b| b.is_ascii_graphic())
        };
        let name = card
            .map(|card| card.name.as_str())
            .filter(|name| sane(name))
            .unwrap_or(address)
            .to_owned();
        Ok(Self {
            name,
            models,
            fingerprint: card.map(|card| card.fingerprint.clone()),
            limits: card.map(|card| card.limits),
            epoch: card.map(|card| card.epoch),
            native: card.is_some(),
        })
    }

    /// May these two exchange KV? Both are native with equal fingerprints, or neither is native: other
    /// engines check each other.
    pub(crate) fn may_exchange(&self, other: &Self) -> bool {
        self.native == other.native && self.fingerprint == other.fingerprint
    }

    /// Do they serve a model of the same name?
    pub(crate) fn same_model(&self, other: &Self) -> bool {
        let names = |model: &Model| other.models.iter().any(|theirs| theirs.id == model.id);
        self.models.iter().any(names)
    }

    /// Why these two may not exchange KV; none if they may.
    pub(crate) fn difference(&self, other: &Self) -> Option<String> {
        if self.may_exchange(other) {
            return None;
        }
        let (Some(ours), Some(theirs)) = (&self.fingerprint, &other.fingerprint) else {
            return Some("one is native, the other is not".to_owned());
        };
        // Values of the others are hashes.
        let settings = [
            "num-speculative-tokens",
            "quantization",
            "kv_dtype",
            "block_size",
        ];
        let shown = |value: &str| -> String {
            let plain = value.chars().filter(|c| !c.is_control());
            plain.take(MAX_VALUE).collect()
        };
        let parts: Vec<String> = ours
            .differences(theirs)
            .iter()
            .map(|(name, a, b)| {
                if settings.contains(name) {
                    format!("{name} ({} and {})", shown(a), shown(b))
                } else {
                    (*name).to_owned()
                }
            })
            .collect();
        Some(format!("they differ in {}", parts.join(", ")))
    }

    /// Input and output together.
    pub(crate) fn max_model_len(&self) -> Option<u64> {
        let limits = self.limits.map(|limits| u64::from(limits.max_model_len));
        limits.or_else(|| self.models.first().and_then(|model| model.max_model_len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_names_the_setting_and_both_values() {
        let facts = |fingerprint| Facts {
            name: "i".into(),
            models: Vec::new(),
            fingerprint: Some(fingerprint),
            limits: None,
            epoch: None,
            native: true,
        };
        let plain = Fingerprint {
            id: "1".into(),
            weights: "aa".into(),
            block_size: 16,
            ..Fingerprint::default()
        };
        let drafts = Fingerprint {
            id: "2".into(),
            weights: "bb".into(),
            mtp: true,
            ..plain.clone()
        };
        let why = facts(plain.clone()).difference(&facts(drafts));
        assert_eq!(
            why.as_deref(),
            Some("they differ in num-speculative-tokens (0 and above 0)")
        );
        let wide = Fingerprint {
            id: "3".into(),
            block_size: 32,
            config: "cc".into(),
            ..plain.clone()
        };
        let why = facts(plain.clone()).difference(&facts(wide));
        assert_eq!(
            why.as_deref(),
            Some("they differ in config, block_size (16 and 32)")
        );
        assert_eq!(facts(plain.clone()).difference(&facts(plain)), None);
    }

    #[test]
    fn models_are_read_and_nonsense_is_named() {
        let list = br#"{"object":"list","data":[{"id":"m","max_model_len":8192,"owned_by":"vllm"},{"id":7}]}"#;
        let facts = Facts::read(list, None, "h:1").expect("facts");
        assert_eq!((facts.name.as_str(), facts.models.len()), ("h:1", 1));
        assert_eq!(facts.max_model_len(), Some(8192));
        assert_eq!(facts.models[0].entry["owned_by"], "vllm");
        for bad in [&b"[]"[..], b"{\"data\":[]}", b"<html>", b""] {
            assert!(Facts::read(bad, None, "h:1").is_err());
        }
    }
}
