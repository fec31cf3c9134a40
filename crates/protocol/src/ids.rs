use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A token of the model's vocabulary.
pub type TokenId = u32;
/// Index of a KV block in a rank's pool.
pub type BlockId = u32;

/// What an instance does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefill and decode in one instance (colocated).
    Both,
    /// Computes prompts and keeps their KV for a decode instance.
    Prefill,
    /// Reads a prompt's KV from a prefill instance and generates.
    Decode,
}

/// One incarnation of an instance: drawn at random at start, so that handles of an earlier process
/// at the same address are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Epoch(pub u64);

impl Role {
    /// Name in flags, files, labels and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    /// May this role be the prefill leg of a pair?
    pub const fn can_prefill(self) -> bool {
        matches!(self, Self::Both | Self::Prefill)
    }

    /// May this role be the decode leg of a pair?
    pub const fn can_decode(self) -> bool {
        matches!(self, Self::Both | Self::Decode)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "both" => Ok(Self::Both),
            "prefill" => Ok(Self::Prefill),
            "decode" => Ok(Self::Decode),
            other => Err(format!(
                "role is {other:?}; allowed are both, prefill, decode"
            )),
        }
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for Epoch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.len() != 16 {
            return Err(format!("epoch is {text:?}; it has 16 hexadecimal digits"));
        }
        u64::from_str_radix(text, 16)
            .map(Self)
            .map_err(|_| format!("epoch is {text:?}; it has 16 hexadecimal digits"))
    }
}

impl Serialize for Epoch {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Epoch {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}
