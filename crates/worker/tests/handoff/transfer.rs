//! What arrives is what was sealed, in every shape; and what a good transfer leaves behind.

use crate::support::{
    BLOCKS, Decode, Fetch as _, Memory, Options, Prefill, eventually, prompt, seed,
};
use proptest::prelude::*;
use std::collections::HashSet;
use std::time::Duration;
use twinfer_engine::{HeldKv, KvGeometry, RequestId};
use twinfer_protocol::{ErrorKind, Fingerprint, KvRelease, KvTransferParams};
use twinfer_worker::handoff::{
    BindError, Exporter, ExporterConfig, FetchReport, KvListener, ReleaseOutcome,
};

#[tokio::test]
async fn a_prompt_of_every_length_around_block_borders_arrives() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let block = options.geometry.block_size;
    for tokens in [
        2,
        block - 1,
        block,
        block + 1,
        2 * block,
        2 * block + 1,
        40,
        41,
    ] {
        let prompt = prompt(tokens as u32, tokens);
        let blocks: Vec<u32> = (0..tokens.div_ceil(block) as u32)
            .map(|n| BLOCKS - 1 - n)
            .collect();
        let params = prefill.hold(&prompt, &blocks).await;
        // Decode computes the last token itself, and has blocks for all.
        let wanted = tokens - 1;
        let targets: Vec<u32> = (0..blocks.len() as u32)
            .map(|n| (n * 7 + 3) % BLOCKS)
            .collect();
        let report = decode
            .importer
            .fetch(&params, &prompt, &targets, wanted as u32)
            .await
            .unwrap();
        assert_eq!(report.blocks as usize, wanted.div_ceil(block));
        assert!(
            decode.memory.holds(&targets, wanted, seed(&prompt)),
            "{tokens} tokens"
        );
        prefill.freed(1).await;
    }
    prefill.is_idle().await;
    decode.is_idle().await;
    let stats = prefill.exporter.stats();
    assert_eq!(
        (
            stats.pulls,
            stats.registered,
            stats.failures.total(),
            stats.expired
        ),
        (8, 8, 0, 0)
    );
    assert_eq!(stats.bytes, decode.importer.stats().bytes);
    assert_eq!(decode.importer.stats().pulls, 8);
    eventually("one pooled connection is left", || {
        decode.importer.stats().connections == 1
    })
    .await;
    decode.shut_down().await;
    prefill.shut_down().await;
}

/// Of a prompt whose beginning decode has in its cache only the rest travels, and no other block is touched.
#[tokio::test]
async fn a_rest_that_begins_at_any_block_arrives_alone() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let block = options.geometry.block_size;
    let tokens = 4 * block + 2;
    let all = [9, 3, 17, 5, 11];
    for first in 0..all.len() {
        let prompt = prompt(first as u32, tokens);
        let params = prefill.hold(&prompt, &[0, 1, 2, 3, 4]).await;
        decode.memory.fill(&all, tokens, seed(&[99]));
        decode.memory.fill(&all[..first], tokens, seed(&prompt));
        let importer = &decode.importer;
        let claim = importer.claim(importer.check(&params).unwrap());
        let before = importer.stats().bytes;
        let rest = (first * block) as u32..tokens as u32 - 1;
        let report = claim.fetch(&prompt, &all[first..], rest).await.unwrap();
        drop(claim);
        assert!(
            decode.memory.holds(&all, tokens - 1, seed(&prompt)),
            "from block {first} on"
        );
        let row = options.geometry.width * options.geometry.value_bytes;
        let bytes = ((tokens - first * block) * row * options.geometry.layers) as u64;
        assert_eq!((report.blocks as usize, report.bytes), (5 - first, bytes));
        assert_eq!(importer.stats().bytes - before, bytes);
        prefill.freed(1).await;
    }
    // What begins inside a block cannot be put there without what is before it.
    let prompt = prompt(9, tokens);
    let params = prefill.hold(&prompt, &[0, 1, 2, 3, 4]).await;
    let claim = decode
        .importer
        .claim(decode.importer.check(&params).unwrap());
    let fetched = claim.fetch(&prompt, &all, 2..8).await;
    assert_eq!(fetched.unwrap_err().kind, ErrorKind::Internal);
    drop(claim);
    prefill.freed(1).await;
    prefill.is_idle().await;
    decode.is_idle().await;
}

#[tokio::test]
async fn bytes_behind_the_last_token_neither_count_nor_travel() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, 5);
    let params = prefill.hold(&prompt, &[0, 1]).await;
    // The engine may already use the rest of the last block for something else.
    prefill.memory.arena.write(1).unwrap().unit_mut(2).unwrap()[10..].fill(0xee);
    decode
        .memory
        .arena
        .write(9)
        .unwrap()
        .unit_mut(2)
        .unwrap()
        .fill(0x11);
    let report = decode
        .importer
        .fetch(&params, &prompt, &[8, 9], 5)
        .await
        .unwrap();
    assert_eq!(report.bytes, 5 * 10 * 3);
    assert!(decode.memory.holds(&[8, 9], 5, seed(&prompt)));
    assert_eq!(
        decode.memory.arena.read(9).unwrap().unit(2).unwrap()[10..],
        [0x11; 30]
    );
}

#[tokio::test]
async fn concurrent_requests_get_their_own_kv_and_free_it() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let mut fetches = tokio::task::JoinSet::new();
    for number in 0..16_u32 {
        let prompt = prompt(number, 13);
        let blocks: Vec<u32> = (number * 4..number * 4 + 4).collect();
        let params = prefill.hold(&prompt, &blocks).await;
        let importer = decode.importer.clone();
        fetches.spawn(async move {
            let targets: Vec<u32> = blocks.iter().map(|block| BLOCKS - 1 - block).collect();
            let fetched = importer.fetch(&params, &prompt, &targets, 12).await;
            (fetched, targets, prompt)
        });
    }
    while let Some(fetched) = fetches.join_next().await {
        let (fetched, targets, prompt) = fetched.unwrap();
        fetched.unwrap();
        assert!(decode.memory.holds(&targets, 12, seed(&prompt)));
    }
    assert_eq!(prefill.freed(16).await, (0..16).collect::<Vec<_>>());
    prefill.is_idle().await;
    decode.is_idle().await;
    assert!(
        decode.importer.stats().connections <= 4,
        "idle connections are bounded"
    );
}

#[tokio::test]
async fn without_a_key_loopback_is_served() {
    let options = Options {
        key: None,
        ..Options::default()
    };
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, 9);
    let params = prefill.hold(&prompt, &[0, 1, 2]).await;
    decode
        .importer
        .fetch(&params, &prompt, &[5, 6, 7], 8)
        .await
        .unwrap();
    assert!(decode.memory.holds(&[5, 6, 7], 8, seed(&prompt)));
}

#[tokio::test]
async fn a_different_fingerprint_is_named_and_nothing_is_read() {
    let options = Options::default();
    let prefill = Prefill::start(&options).await;
    let other = Fingerprint {
        weights: "others".into(),
        ..options.fingerprint.clone()
    };
    let decode = Decode::start(&Options {
        fingerprint: other,
        ..options
    });
    let prompt = prompt(1, 9);
    let params = prefill.hold(&prompt, &[0, 1, 2]).await;
    let error = decode
        .importer
        .fetch(&params, &prompt, &[5, 6, 7], 8)
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::KvMismatch);
    assert!(
        error.message.contains("weights (ours others, theirs w)"),
        "{error}"
    );
    assert_eq!(prefill.exporter.stats().bytes, 0);
    eventually("the exporter counts it", || {
        prefill.exporter.stats().rejections.mismatch > 0
    })
    .await;
    decode.is_idle().await;
}

#[tokio::test]
async fn refused_parameters_open_no_connection() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, 9);
    let params = prefill.hold(&prompt, &[0, 1, 2]).await;
    let elsewhere = KvTransferParams {
        remote_host: Some("169.254.169.254".into()),
        ..params.clone()
    };
    let error = decode
        .importer
        .fetch(&elsewhere, &prompt, &[5, 6, 7], 8)
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::KvParamsForbidden);
    let misshapen = KvTransferParams {
        remote_num_tokens: Some(900),
        ..params
    };
    let error = decode
        .importer
        .fetch(&misshapen, &prompt, &[5, 6, 7], 8)
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidRequest);
    assert_eq!(
        (
            decode.importer.stats().connections,
            prefill.exporter.stats().connections
        ),
        (0, 0)
    );
}

#[tokio::test]
async fn blocks_that_cannot_be_filled_are_an_error_of_ours() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, 9);
    let params = prefill.hold(&prompt, &[0, 1, 2]).await;
    let claim = decode
        .importer
        .claim(decode.importer.check(&params).unwrap());
    let in_use = decode.memory.arena.read(6).unwrap();
    for targets in [&[5, 6, 7][..], &[5, 5, 7], &[5, BLOCKS, 7], &[5]] {
        let error = claim.fetch(&prompt, targets, 0..8).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Internal, "{targets:?}");
    }
    drop(in_use);
    claim.fetch(&prompt, &[5, 6, 7], 0..8).await.unwrap();
    drop(claim);
    decode.is_idle().await;
}

#[tokio::test]
async fn held_kv_of_an_impossible_shape_is_refused_and_given_back() {
    let options = Options::default();
    let prefill = Prefill::start(&options).await;
    let prompt = prompt(1, 9);
    let shapes = [
        (vec![0, 1], 9),
        (vec![], 0),
        (vec![0, 1, 2], 12),
        (vec![0, 1, BLOCKS], 9),
    ];
    for (request, (blocks, tokens)) in shapes.into_iter().enumerate() {
        let held = HeldKv { blocks, tokens };
        let error = prefill
            .exporter
            .register(RequestId(request as u64), held, &prompt, None)
            .await
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::Internal);
        assert_eq!(prefill.freed(1).await, [request as u64]);
    }
    prefill.is_idle().await;
}

#[tokio::test]
async fn the_release_route_is_idempotent_and_knows_its_epoch() {
    let options = Options::default();
    let prefill = Prefill::start(&options).await;
    let params = prefill.hold(&prompt(1, 9), &[0, 1, 2]).await;
    let release = KvRelease {
        remote_request_id: params.remote_request_id.clone().unwrap(),
        epoch: twinfer_protocol::Epoch(options.epoch),
    };
    let foreign = KvRelease {
        epoch: twinfer_protocol::Epoch(1),
        ..release.clone()
    };
    assert_eq!(prefill.exporter.release(&foreign), ReleaseOutcome::Unknown);
    let nonsense = KvRelease {
        remote_request_id: "cmpl-1".into(),
        ..release.clone()
    };
    assert_eq!(prefill.exporter.release(&nonsense), ReleaseOutcome::Unknown);
    assert_eq!(prefill.exporter.release(&release), ReleaseOutcome::Freed);
    assert_eq!(
        prefill.exporter.release(&release),
        ReleaseOutcome::AlreadyGone
    );
    assert_eq!(prefill.release(&params), ReleaseOutcome::AlreadyGone);
    assert_eq!(prefill.freed(1).await, [0]);
    prefill.is_idle().await;
}

#[tokio::test]
async fn addresses_that_would_be_open_or_unreachable_are_refused_at_start() {
    let bind = async |host: &str, advertise: Option<&str>, keyed: bool, port: u16| {
        KvListener::bind(host, port, advertise, keyed).await
    };
    let error = bind("0.0.0.0", Some("10.0.0.1"), false, 0)
        .await
        .unwrap_err();
    assert!(matches!(error, BindError::NeedsKey { .. }), "{error}");
    for wildcard in ["0.0.0.0", "::", "[::]"] {
        let error = bind(wildcard, None, true, 0).await.unwrap_err();
        assert!(matches!(error, BindError::NeedsAdvertise { .. }), "{error}");
        let error = bind(wildcard, Some("0.0.0.0"), true, 0).await.unwrap_err();
        assert!(matches!(error, BindError::BadAdvertise { .. }), "{error}");
    }
    let error = bind("a b", None, true, 0).await.unwrap_err();
    assert!(matches!(error, BindError::BadHost { .. }), "{error}");
    let open = bind("0.0.0.0", Some("node-7.example"), true, 0)
        .await
        .unwrap();
    assert!(
        open.addr().starts_with("node-7.example:"),
        "{}",
        open.addr()
    );
    let here = bind("localhost", None, false, 0).await.unwrap();
    let port: u16 = here.addr().rsplit_once(':').unwrap().1.parse().unwrap();
    let error = bind("localhost", None, false, port).await.unwrap_err();
    assert!(
        error.to_string().contains(&port.to_string()),
        "names the port in use: {error}"
    );
}

#[tokio::test]
async fn memory_of_another_shape_is_refused_at_start() {
    let options = Options::default();
    let config = ExporterConfig {
        name: "p".into(),
        epoch: twinfer_protocol::Epoch(1),
        fingerprint: Fingerprint::default(),
        key: None,
        lease: Duration::from_secs(30),
        timeout: Duration::from_secs(1),
        geometry: KvGeometry {
            width: 6,
            ..options.geometry
        },
        arena: Memory::new(&options).arena,
        wake: Box::new(|| {}),
    };
    let listener = KvListener::bind("localhost", 0, None, false).await.unwrap();
    let refused = Exporter::on(listener, config);
    assert!(matches!(refused, Err(BindError::Geometry { .. })));
}

fn shape() -> impl Strategy<Value = (KvGeometry, usize, usize)> {
    (
        1_usize..6,
        1_usize..40,
        prop_oneof![Just(2_usize), Just(4)],
        1_usize..20,
        1_usize..200,
    )
        .prop_flat_map(|(layers, width, value_bytes, block_size, tokens)| {
            let geometry = KvGeometry {
                layers,
                width,
                value_bytes,
                block_size,
            };
            (Just(geometry), Just(tokens), 0..=tokens)
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Any shape of KV, any number of tokens, any placement: what arrives is what was sealed, once.
    #[test]
    fn any_shape_arrives((geometry, tokens, wanted) in shape(), rotate in 0_u32..1000, key in any::<bool>()) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let blocks = tokens.div_ceil(geometry.block_size) as u32;
            let options = Options { geometry, blocks: blocks + 3, key: key.then_some("k"), ..Options::default() };
            let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
            let prompt = prompt(rotate, tokens);
            let place = |n: u32, by: u32| (n + by) % options.blocks;
            let sources: Vec<u32> = (0..blocks).map(|n| place(n, rotate)).collect();
            let targets: Vec<u32> = (0..blocks).rev().map(|n| place(n, rotate / 7)).collect();
            let params = prefill.hold(&prompt, &sources).await;
            let FetchReport { bytes, blocks: filled, .. } =
                decode.importer.fetch(&params, &prompt, &targets, wanted as u32).await.unwrap();
            assert_eq!(filled as usize, wanted.div_ceil(geometry.block_size));
            let rows = tokens.min(filled as usize * geometry.block_size);
            assert_eq!(bytes as usize, rows * geometry.width * geometry.value_bytes * geometry.layers);
            assert!(decode.memory.holds(&targets, wanted, seed(&prompt)));
            assert_eq!(prefill.freed(1).await, [0]);
            prefill.is_idle().await;
            decode.is_idle().await;
        });
    }

    /// Handles never repeat, whatever their number.
    #[test]
    fn handles_are_distinct(count in 1_usize..40) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let prefill = Prefill::start(&Options::default()).await;
            let mut seen = HashSet::new();
            for _ in 0..count {
                let params = prefill.hold(&prompt(1, 4), &[0]).await;
                assert!(seen.insert(params.remote_request_id.clone()));
                assert!(seen.insert(Some(params.other["remote_kv_seal"].to_string())));
                prefill.release(&params);
            }
        });
    }
}
