//! What an instance says of itself.

use serde::Deserialize;
use serde_json::Value;
use twinfer_protocol::{Fingerprint, InstanceCard, Limits};

/// Longest name of an instance or a model that is taken over, in bytes.
const MAX_NAME: usize = 256;
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
            native: card.is_some(),
        })
    }

    /// May these two exchange KV? Both are native with equal fingerprints, or neither is native: other
    /// engines check each other.
    pub(crate) fn may_exchange(&self, other: &Self) -> bool {
        self.native == other.native && self.fingerprint == other.fingerprint
    }

    /// Why these two may not exchange KV; none if they may.
    pub(crate) fn difference(&self, other: &Self) -> Option<String> {
        if self.may_exchange(other) {
            return None;
        }
        let (Some(ours), Some(theirs)) = (&self.fingerprint, &other.fingerprint) else {
            return Some("one is native, the other is not".to_owned());
        };
        let parts: Vec<&str> = ours
            .parts()
            .iter()
            .zip(theirs.parts())
            .filter(|((_, a), (_, b))| a != b)
            .map(|((name, _), _)| *name)
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
