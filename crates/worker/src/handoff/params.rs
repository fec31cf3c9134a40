//! Handles in `kv_transfer_params`: made by the exporter, checked by the importer before a connection
//! is thought of. Pure.
//!
//! The fields are those of vLLM's pull connectors (vLLM-Ascend MooncakeConnectorV1 0.20.2 and HEAD,
//! vLLM NixlConnector's `remote_num_tokens`), `remote_kv_seal` and
//! `remote_kv_lease_ms` of ours. Routers pass them on unread.

use crate::handoff::lease::HandleId;
use crate::handoff::peers::{Peer, PeerList, PeerListError};
use crate::handoff::seal::Seal;
use serde_json::{Map, Value, json};
use std::time::Duration;
use twinfer_protocol::{ApiError, BlockId, Epoch, ErrorKind, KvTransferParams, TokenId};

/// Longest `remote_engine_id`, in bytes.
const ENGINE_ID_CAP: usize = 512;

/// How long the KV is kept unless renewed, in milliseconds.
const LEASE: &str = "remote_kv_lease_ms";
/// A day: the longest `--kv-lease`.
const LONGEST_LEASE_MS: u64 = 86_400_000;

/// KV that a prefill instance holds for whoever shows this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteHandle {
    /// Name of the prefill instance.
    pub name: String,
    /// Its incarnation.
    pub epoch: Epoch,
    /// The registration there.
    pub id: HandleId,
    /// Where its KV channel listens.
    pub peer: Peer,
    /// Prompt tokens covered.
    pub tokens: u32,
    /// Blocks there, in order of position.
    pub blocks: Vec<BlockId>,
    /// Over all of it.
    pub seal: Seal,
    /// How long the KV is kept unless renewed, if the prefill instance says so.
    pub lease: Option<Duration>,
}

/// Judges handles where nothing is read.
#[derive(Debug)]
pub(crate) struct Judge {
    peers: PeerList,
    block_size: u32,
}

impl Judge {
    /// `entries` are those of `--pd-peers`; `keyed`: a peer key is set.
    pub(crate) fn new(
        entries: &[String],
        keyed: bool,
        block_size: u32,
    ) -> Result<Self, PeerListError> {
        Ok(Self {
            peers: PeerList::new(entries, keyed)?,
            block_size,
        })
    }

    /// As [`crate::handoff::Importer::check`].
    pub(crate) fn check(&self, params: &KvTransferParams) -> Result<RemoteHandle, ApiError> {
        RemoteHandle::from_params(
            params,
            Local {
                peers: &self.peers,
                block_size: self.block_size,
            },
        )
    }
}

/// What an importer knows when it judges a handle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local<'a> {
    pub(crate) peers: &'a PeerList,
    pub(crate) block_size: u32,
}

impl RemoteHandle {
    /// The handle as a prefill instance answers with it.
    pub(crate) fn to_params(
        &self,
        block_size: u32,
        last_token: Option<TokenId>,
        prompt: &[TokenId],
    ) -> KvTransferParams {
        let mut other = Map::new();
        // Parallel ranks of the prefill instance that hold parts of the KV: one holds all.
        other.insert("remote_pcp_size".into(), json!(1));
        other.insert("remote_dcp_size".into(), json!(1));
        other.insert("remote_ptp_size".into(), json!(1));
        other.insert("remote_multi_nodes_meta_mapping".into(), json!({}));
        other.insert("num_prompt_blocks".into(), json!(self.blocks.len()));
        other.insert("remote_kv_seal".into(), json!(self.seal.to_string()));
        if let Some(lease) = self.lease.and_then(|l| u64::try_from(l.as_millis()).ok()) {
            other.insert(LEASE.into(), json!(lease));
        }
        KvTransferParams {
            do_remote_decode: false,
            do_remote_prefill: true,
            remote_engine_id: Some(format!("{}-{}", self.name, self.epoch)),
            remote_request_id: Some(self.id.to_string()),
            remote_block_ids: Some(json!(self.blocks)),
            remote_host: Some(self.peer.host()),
            remote_port: Some(self.peer.port()),
            remote_block_size: Some(block_size),
            remote_num_tokens: Some(self.tokens),
            remote_prefill_cached_tokens: None,
            last_token_id: last_token,
            prompt_token_ids: Some(prompt.to_vec()),
            other,
        }
    }

    /// The handle in `params`, if it has the right shape and names a peer that may be dialled.
    ///
    /// Errors: [`ErrorKind::InvalidRequest`] for a field that is missing or of the wrong shape,
    /// [`ErrorKind::KvParamsForbidden`] for a peer that is not allowed, [`ErrorKind::KvMismatch`]
    /// for another block size. Each names the field.
    pub(crate) fn from_params(
        params: &KvTransferParams,
        local: Local<'_>,
    ) -> Result<Self, ApiError> {
        if !params.do_remote_prefill || params.do_remote_decode {
            return Err(invalid(
                "do_remote_prefill",
                "must be true, and do_remote_decode false, to read KV from a prefill instance",
            ));
        }
        let engine = needed("remote_engine_id", params.remote_engine_id.as_deref())?;
        let (name, epoch) = engine
            .rsplit_once('-')
            .filter(|(name, _)| !name.is_empty() && engine.len() <= ENGINE_ID_CAP)
            .and_then(|(name, epoch)| Some((name, epoch.parse::<Epoch>().ok()?)))
            .ok_or_else(|| invalid("remote_engine_id", "must be <name>-<16 hexadecimal digits>"))?;
        let id = needed("remote_request_id", params.remote_request_id.as_deref())?
            .parse::<HandleId>()
            .map_err(|_| {
                invalid(
                    "remote_request_id",
                    "is none that a prefill instance of twinfer gives out",
                )
            })?;
        let host = needed("remote_host", params.remote_host.as_deref())?;
        let port = needed("remote_port", params.remote_port)?;
        let peer = local.peers.allow(host, port)?;
        let block_size = needed("remote_block_size", params.remote_block_size)?;
        if block_size != local.block_size {
            return Err(field(
                ErrorKind::KvMismatch,
                "remote_block_size",
                &format!(
                    "is {block_size}; this instance has blocks of {} tokens",
                    local.block_size
                ),
            ));
        }
        let tokens = needed("remote_num_tokens", params.remote_num_tokens)?;
        if tokens == 0 {
            return Err(invalid("remote_num_tokens", "is 0; at least 1 is needed"));
        }
        // The list of the request was read in full already; it is only copied if its length fits.
        let ids = block_ids(needed(
            "remote_block_ids",
            params.remote_block_ids.as_ref(),
        )?)?;
        let expected = tokens.div_ceil(block_size.max(1));
        if ids.len() != expected as usize {
            return Err(invalid(
                "remote_block_ids",
                &format!(
                    "has {} ids; {tokens} tokens take {expected} blocks",
                    ids.len()
                ),
            ));
        }
        let blocks = ids
            .iter()
            .map(|id| id.as_u64().and_then(|id| BlockId::try_from(id).ok()))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| invalid("remote_block_ids", "must hold numbers from 0 to 4294967295"))?;
        let mut distinct = blocks.clone();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() != blocks.len() {
            return Err(invalid("remote_block_ids", "names a block twice"));
        }
        check_other(&params.other, blocks.len())?;
        let seal = params
            .other
            .get("remote_kv_seal")
            .and_then(Value::as_str)
            .and_then(|text| text.parse::<Seal>().ok())
            .ok_or_else(|| {
                invalid(
                    "remote_kv_seal",
                    "must be 32 hexadecimal digits, as twinfer's prefill instances send",
                )
            })?;
        let lease = match params.other.get(LEASE) {
            None | Some(Value::Null) => None,
            Some(value) => match value.as_u64() {
                Some(ms @ 1..=LONGEST_LEASE_MS) => Some(Duration::from_millis(ms)),
                _ => {
                    let what = format!("must be 1 to {LONGEST_LEASE_MS} milliseconds");
                    return Err(invalid(LEASE, &what));
                }
            },
        };
        Ok(Self {
            name: name.to_owned(),
            epoch,
            id,
            peer,
            tokens,
            blocks,
            seal,
            lease,
        })
    }
}

/// A list, or a list with one list: one KV-cache group.
fn block_ids(value: &Value) -> Result<&[Value], ApiError> {
    let list = match value.as_array().map(Vec::as_slice) {
        Some([Value::Array(group)]) => Some(group.as_slice()),
        other => other,
    };
    list.ok_or_else(|| {
        invalid(
            "remote_block_ids",
            "must be a list of block ids, or a list with one such list",
        )
    })
}

/// Fields of others that say something about the shape of the KV must say what ours says.
fn check_other(other: &Map<String, Value>, blocks: usize) -> Result<(), ApiError> {
    let expected = [
        ("remote_pcp_size", 1),
        ("remote_dcp_size", 1),
        ("remote_ptp_size", 1),
        ("num_prompt_blocks", blocks as u64),
    ];
    for (name, allowed) in expected {
        match other.get(name) {
            None | Some(Value::Null) => {}
            Some(value) if value.as_u64() == Some(allowed) => {}
            Some(_) => return Err(invalid(name, &format!("must be {allowed} if it is given"))),
        }
    }
    Ok(())
}

fn needed<T>(name: &str, value: Option<T>) -> Result<T, ApiError> {
    value.ok_or_else(|| invalid(name, "is missing"))
}

fn invalid(name: &str, what: &str) -> ApiError {
    field(ErrorKind::InvalidRequest, name, what)
}

fn field(kind: ErrorKind, name: &str, what: &str) -> ApiError {
    let name = format!("kv_transfer_params.{name}");
    ApiError::new(kind, format!("{name} {what}")).with_param(name)
}

#[cfg(test)]
#[path = "params_tests.rs"]
mod tests;
