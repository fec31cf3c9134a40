//! How long KV, blocks and connections live: leases, cancels, silence, idleness, restarts.

use crate::proxy::{Fault, Proxy};
use crate::support::{Decode, Fetch as _, Options, Prefill, eventually, prompt, redirect, seed};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use twinfer_engine::{HeldKv, KvGeometry, RequestId};
use twinfer_protocol::{ErrorKind, KvTransferParams};

/// KV that does not fit into the buffers of a connection: 4 layers of 64 blocks of 128 KiB.
const LARGE: KvGeometry = KvGeometry {
    layers: 4,
    width: 1024,
    value_bytes: 2,
    block_size: 64,
};
const LARGE_TOKENS: usize = 64 * 64;

fn large(options: Options) -> Options {
    Options {
        geometry: LARGE,
        blocks: 64,
        ..options
    }
}

fn all_blocks() -> Vec<u32> {
    (0..64).collect()
}

#[tokio::test]
async fn a_lease_that_nobody_uses_ends_in_time_and_no_earlier() {
    let options = Options {
        lease: Duration::from_millis(300),
        ..Options::default()
    };
    let prefill = Prefill::start(&options).await;
    let began = Instant::now();
    prefill.hold(&prompt(1, 9), &[0, 1, 2]).await;
    assert_eq!(prefill.freed(1).await, [0]);
    let kept = began.elapsed();
    assert!(kept >= options.lease, "{kept:?}");
    assert!(kept <= options.lease + Duration::from_secs(1), "{kept:?}");
    assert_eq!(prefill.exporter.stats().expired, 1);
    prefill.is_idle().await;
}

#[tokio::test]
async fn a_claim_keeps_its_lease_and_its_end_releases_it() {
    let options = Options {
        lease: Duration::from_millis(400),
        renew_every: Duration::from_millis(60),
        ..Options::default()
    };
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, 9);
    let params = prefill.hold(&prompt, &[0, 1, 2]).await;
    // A request that waits for blocks, three leases long.
    let claim = decode
        .importer
        .claim(decode.importer.check(&params).unwrap());
    sleep(options.lease * 3).await;
    assert_eq!(prefill.exporter.stats().leases, 1);
    let began = Instant::now();
    drop(claim);
    assert_eq!(prefill.freed(1).await, [0]);
    assert!(began.elapsed() < options.lease, "released, not expired");
    eventually("it is counted", || decode.importer.stats().releases == 1).await;
    assert_eq!(prefill.exporter.stats().expired, 0);
    prefill.is_idle().await;
}

#[tokio::test]
async fn every_way_out_without_a_read_releases_at_once() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, 9);
    // Fifty requests that decode refuses in a row.
    for _ in 0..50 {
        let params = prefill.hold(&prompt, &[0, 1, 2]).await;
        drop(
            decode
                .importer
                .claim(decode.importer.check(&params).unwrap()),
        );
        prefill.freed(1).await;
    }
    // A prompt of one token: nothing is read.
    let params = prefill.hold(&prompt, &[0, 1, 2]).await;
    let report = decode
        .importer
        .fetch(&params, &prompt, &[5, 6, 7], 0)
        .await
        .unwrap();
    assert_eq!((report.bytes, report.blocks), (0, 0));
    prefill.freed(1).await;
    prefill.is_idle().await;
    decode.is_idle().await;
    assert_eq!(
        (
            prefill.exporter.stats().expired,
            decode.importer.stats().releases_lost
        ),
        (0, 0)
    );
}

#[tokio::test]
async fn releases_that_wait_when_decode_stops_still_arrive() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let mut claims = Vec::new();
    for number in 0..20_u32 {
        let params = prefill
            .hold(
                &prompt(number, 9),
                &[number * 3, number * 3 + 1, number * 3 + 2],
            )
            .await;
        claims.push(
            decode
                .importer
                .claim(decode.importer.check(&params).unwrap()),
        );
    }
    drop(claims);
    decode.shut_down().await;
    assert_eq!(prefill.freed(20).await.len(), 20);
    prefill.is_idle().await;
}

/// Each side has its own `--kv-lease`.
#[tokio::test]
async fn a_claim_is_renewed_in_time_for_a_lease_shorter_than_decodes_own() {
    let options = Options {
        lease: Duration::from_millis(600),
        renew_every: Duration::from_secs(3600),
        ..Options::default()
    };
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    // The keeper has looked, and sleeps.
    sleep(Duration::from_millis(50)).await;
    let params = prefill.hold(&prompt(1, 9), &[0, 1, 2]).await;
    let claim = decode
        .importer
        .claim(decode.importer.check(&params).unwrap());
    sleep(options.lease * 3).await;
    assert_eq!(prefill.exporter.stats().leases, 1);
    drop(claim);
    assert_eq!(prefill.freed(1).await, [0]);
    assert_eq!(prefill.exporter.stats().expired, 0);
    prefill.is_idle().await;
}

#[tokio::test]
async fn peers_that_are_silent_do_not_delay_renewals_to_others() {
    const FETCHES: u32 = 64;
    let options = Options {
        lease: Duration::from_millis(900),
        blocks: FETCHES,
        ..Options::default()
    };
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, 2);
    let params = prefill.hold(&prompt, &[0]).await;
    let claim = |params: &KvTransferParams| {
        let handle = decode.importer.check(params).unwrap();
        decode.importer.claim(handle)
    };
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let elsewhere = redirect(&params, silent.local_addr().unwrap());
    let kept = claim(&params);
    // As many as may have a connection, each waiting for a word.
    let mut fetches = JoinSet::new();
    for block in 0..FETCHES {
        let (claim, prompt) = (claim(&elsewhere), prompt.clone());
        fetches.spawn(async move { claim.fetch(&prompt, &[block], 0..2).await });
    }
    sleep(options.lease * 2).await;
    assert_eq!(prefill.exporter.stats().expired, 0);
    fetches.shutdown().await;
    drop(kept);
    assert_eq!(prefill.freed(1).await, [0]);
    prefill.is_idle().await;
}

#[tokio::test]
async fn a_peer_that_is_silent_does_not_delay_releases_to_others() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, 9);
    let params = prefill.hold(&prompt, &[0, 1, 2]).await;
    let claim = |params: &KvTransferParams| {
        let handle = decode.importer.check(params).unwrap();
        decode.importer.claim(handle)
    };
    // Takes connections and never says a word.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let elsewhere = redirect(&params, silent.local_addr().unwrap());
    let lost: Vec<_> = (0..40).map(|_| claim(&elsewhere)).collect();
    drop(lost);
    // Those releases are on their way when the one that matters comes.
    sleep(Duration::from_millis(50)).await;
    let began = Instant::now();
    drop(claim(&params));
    prefill.freed(1).await;
    let took = began.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
    // One failure stands for all that waited for the same peer.
    eventually("the others are given up", || {
        decode.importer.stats().releases_lost >= 1
    })
    .await;
    prefill.is_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_read_frees_both_sides_at_once() {
    let options = large(Options::default());
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, LARGE_TOKENS);
    prefill
        .memory
        .fill(&all_blocks(), LARGE_TOKENS, seed(&prompt));
    for after in [100, 5_000, 200_000, 3_000_000] {
        let params = prefill.hold_filled(&prompt, &all_blocks()).await;
        let proxy = Proxy::start(prefill.addr(), vec![Fault::StallAfter(after)], Vec::new()).await;
        let params = redirect(&params, proxy.addr);
        {
            let targets = all_blocks();
            let fetch = decode
                .importer
                .fetch(&params, &prompt, &targets, LARGE_TOKENS as u32);
            assert!(
                timeout(Duration::from_millis(300), fetch).await.is_err(),
                "stalls after {after} bytes"
            );
        }
        assert_eq!(decode.memory.arena.borrowed_blocks(), 0);
        let began = Instant::now();
        prefill.freed(1).await;
        assert!(
            began.elapsed() < Duration::from_millis(900),
            "not by a timeout"
        );
        prefill.is_idle().await;
    }
    assert_eq!(decode.importer.stats().pulls, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_that_nobody_waits_for_is_given_back() {
    let options = large(Options::default());
    let prefill = Prefill::start(&options).await;
    let prompt = prompt(1, LARGE_TOKENS);
    for round in 0..20_u32 {
        let held = HeldKv {
            blocks: all_blocks(),
            tokens: LARGE_TOKENS as u32,
        };
        let register = prefill
            .exporter
            .register(RequestId(u64::from(round)), held, &prompt, None);
        let outcome = timeout(Duration::from_micros(u64::from(round) * 300), register).await;
        if let Ok(params) = outcome {
            prefill.release(&params.unwrap());
        }
        assert_eq!(prefill.freed(1).await, [u64::from(round)]);
        assert_eq!(
            prefill.memory.arena.borrowed_blocks(),
            0,
            "given back while it was read"
        );
    }
    prefill.is_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_outlives_its_lease() {
    let options = large(Options {
        lease: Duration::from_millis(300),
        ..Options::default()
    });
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, LARGE_TOKENS);
    let params = prefill.hold(&prompt, &all_blocks()).await;
    // 64 KiB per 10 ms, for the first stretch: longer than the lease, but never without progress.
    let slow = Fault::Slow(Duration::from_millis(10), 64);
    let proxy = Proxy::start(prefill.addr(), vec![slow], Vec::new()).await;
    let mut params = redirect(&params, proxy.addr);
    // Else it would be renewed.
    params.other.remove("remote_kv_lease_ms");
    let targets = all_blocks();
    let began = Instant::now();
    decode
        .importer
        .fetch(&params, &prompt, &targets, LARGE_TOKENS as u32)
        .await
        .unwrap();
    assert!(
        began.elapsed() > options.lease,
        "the test is about long reads"
    );
    assert!(decode.memory.holds(&targets, LARGE_TOKENS, seed(&prompt)));
    prefill.freed(1).await;
    prefill.is_idle().await;
}

#[tokio::test]
async fn a_peer_that_goes_silent_is_given_up_in_time() {
    let options = large(Options {
        timeout: Duration::from_millis(400),
        ..Options::default()
    });
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, LARGE_TOKENS);
    prefill
        .memory
        .fill(&all_blocks(), LARGE_TOKENS, seed(&prompt));
    for said in [500, 2_000_000, 30_000_000] {
        let params = prefill.hold_filled(&prompt, &all_blocks()).await;
        let proxy = Proxy::start(prefill.addr(), vec![Fault::StallAfter(said)], Vec::new()).await;
        let (params, targets) = (redirect(&params, proxy.addr), all_blocks());
        let fetch = decode
            .importer
            .fetch(&params, &prompt, &targets, LARGE_TOKENS as u32);
        let fetched = timeout(options.timeout + Duration::from_secs(2), fetch)
            .await
            .expect("in time");
        assert_eq!(fetched.unwrap_err().kind, ErrorKind::KvTransfer);
        prefill.freed(1).await;
        prefill.is_idle().await;
        decode.is_idle().await;
    }
}

#[tokio::test]
async fn a_trickle_is_cut_off_by_the_least_rate() {
    let options = Options {
        timeout: Duration::from_millis(400),
        ..Options::default()
    };
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, 60);
    let params = prefill.hold(&prompt, &(0..15).collect::<Vec<_>>()).await;
    let fault = Fault::TrickleAfter(1000, Duration::from_millis(20));
    let proxy = Proxy::start(prefill.addr(), vec![fault], Vec::new()).await;
    let began = Instant::now();
    let targets: Vec<u32> = (0..15).collect();
    let error = decode
        .importer
        .fetch(&redirect(&params, proxy.addr), &prompt, &targets, 60)
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::KvTransfer, "{error}");
    assert!(
        began.elapsed() < Duration::from_millis(1500),
        "{:?}",
        began.elapsed()
    );
    prefill.freed(1).await;
    prefill.is_idle().await;
}

#[tokio::test]
async fn a_reader_that_goes_silent_loses_its_pin() {
    let options = large(Options {
        timeout: Duration::from_millis(300),
        ..Options::default()
    });
    let (prefill, decode) = (
        Prefill::start(&options).await,
        Decode::start(&Options {
            timeout: Duration::from_secs(9),
            ..options.clone()
        }),
    );
    let prompt = prompt(1, LARGE_TOKENS);
    let params = prefill.hold(&prompt, &all_blocks()).await;
    // The proxy reads no further than its buffers: the server cannot send.
    let proxy = Proxy::start(
        prefill.addr(),
        vec![Fault::StallAfter(2_000_000)],
        Vec::new(),
    )
    .await;
    let claim = decode.importer.claim(
        decode
            .importer
            .check(&redirect(&params, proxy.addr))
            .unwrap(),
    );
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        claim
            .fetch(&prompt, &all_blocks(), 0..LARGE_TOKENS as u32)
            .await
    });
    eventually("it reads", || prefill.exporter.stats().readers == 1).await;
    eventually("its pin is taken away", || {
        prefill.exporter.stats().readers == 0
    })
    .await;
    assert_eq!(prefill.memory.arena.borrowed_blocks(), 0);
    assert_eq!(prefill.exporter.stats().failures.transfer, 1);
    assert_eq!(
        prefill.exporter.stats().leases,
        1,
        "the lease stays for another reader"
    );
    tasks.shutdown().await;
}

#[tokio::test]
async fn nobody_there_and_nobody_speaking_are_errors_in_time() {
    let options = Options {
        timeout: Duration::from_millis(500),
        ..Options::default()
    };
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, 9);
    let params = prefill.hold(&prompt, &[0, 1, 2]).await;
    let closed = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    let mute = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for (peer, longest) in [
        (closed, Duration::from_millis(500)),
        (mute.local_addr().unwrap(), Duration::from_millis(2500)),
    ] {
        let began = Instant::now();
        let error = decode
            .importer
            .fetch(&redirect(&params, peer), &prompt, &[5, 6, 7], 8)
            .await
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::KvTransfer, "{error}");
        assert!(
            error.message.contains(&peer.to_string()),
            "names the peer: {error}"
        );
        assert!(began.elapsed() < longest, "{:?}", began.elapsed());
    }
    assert_eq!(decode.importer.stats().failures.transfer, 2);
    decode.is_idle().await;
}

#[tokio::test]
async fn idle_connections_are_used_again_and_do_not_grow() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let proxy = Proxy::start(prefill.addr(), Vec::new(), Vec::new()).await;
    for round in 0..5_u32 {
        let prompt = prompt(round, 9);
        let params = redirect(&prefill.hold(&prompt, &[0, 1, 2]).await, proxy.addr);
        decode
            .importer
            .fetch(&params, &prompt, &[5, 6, 7], 8)
            .await
            .unwrap();
        prefill.freed(1).await;
        sleep(Duration::from_millis(50)).await;
        assert_eq!(
            (
                decode.importer.stats().connections,
                prefill.exporter.stats().connections
            ),
            (1, 1)
        );
    }
    assert_eq!(
        (
            proxy.connections.load(Relaxed),
            decode.importer.stats().redials
        ),
        (1, 0)
    );
}

#[tokio::test]
async fn an_idle_connection_that_died_unseen_is_replaced_once() {
    let options = Options {
        timeout: Duration::from_millis(500),
        ..Options::default()
    };
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let clean = Proxy::start(prefill.addr(), Vec::new(), Vec::new()).await;
    let warm = prompt(1, 9);
    let params = redirect(&prefill.hold(&warm, &[0, 1, 2]).await, clean.addr);
    decode
        .importer
        .fetch(&params, &warm, &[5, 6, 7], 8)
        .await
        .unwrap();
    prefill.freed(1).await;
    let said = clean.carried.load(Relaxed);
    // As a firewall that forgets idle connections: the second question is never answered.
    let proxy = Proxy::start(prefill.addr(), vec![Fault::StallAfter(said)], Vec::new()).await;
    for number in 2..4_u32 {
        let prompt = prompt(number, 9);
        let params = redirect(&prefill.hold(&prompt, &[0, 1, 2]).await, proxy.addr);
        decode
            .importer
            .fetch(&params, &prompt, &[5, 6, 7], 8)
            .await
            .unwrap();
        assert!(decode.memory.holds(&[5, 6, 7], 8, seed(&prompt)));
        eventually("it is read out", || prefill.exporter.stats().readers == 0).await;
    }
    assert_eq!(
        (
            proxy.connections.load(Relaxed),
            decode.importer.stats().redials
        ),
        (2, 1)
    );
    prefill.freed(2).await;
    prefill.is_idle().await;
}

#[tokio::test]
async fn a_restarted_instance_is_used_again_and_its_old_handles_are_refused() {
    let options = Options::default();
    let decode = Decode::start(&options);
    let first = Prefill::start(&options).await;
    let port = first.addr().port();
    let prompt = prompt(1, 9);
    let warm = first.hold(&prompt, &[0, 1, 2]).await;
    decode
        .importer
        .fetch(&warm, &prompt, &[5, 6, 7], 8)
        .await
        .unwrap();
    let old = first.hold(&prompt, &[3, 4, 5]).await;
    first.shut_down().await;
    let error = decode
        .importer
        .fetch(&old, &prompt, &[5, 6, 7], 8)
        .await
        .unwrap_err();
    assert_eq!(
        error.kind,
        ErrorKind::KvTransfer,
        "nobody is there: {error}"
    );

    let second = Prefill::start(&Options {
        port,
        epoch: 0xe2,
        ..options.clone()
    })
    .await;
    let new = second.hold(&prompt, &[3, 4, 5]).await;
    assert_ne!(old.remote_engine_id, new.remote_engine_id);
    let error = decode
        .importer
        .fetch(&old, &prompt, &[5, 6, 7], 8)
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::KvStale, "{error}");
    // Also with everything of the new one but the registration.
    let mixed = KvTransferParams {
        remote_request_id: old.remote_request_id.clone(),
        ..new.clone()
    };
    let error = decode
        .importer
        .fetch(&mixed, &prompt, &[5, 6, 7], 8)
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::KvStale, "{error}");
    assert_eq!(second.exporter.stats().bytes, 0);
    decode
        .importer
        .fetch(&new, &prompt, &[5, 6, 7], 8)
        .await
        .unwrap();
    assert!(decode.memory.holds(&[5, 6, 7], 8, seed(&prompt)));
    second.freed(1).await;
    second.is_idle().await;
    decode.is_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stops_ends_reads_and_lets_go_of_memory() {
    let options = large(Options::default());
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, LARGE_TOKENS);
    let params = prefill.hold(&prompt, &all_blocks()).await;
    let proxy = Proxy::start(
        prefill.addr(),
        vec![Fault::StallAfter(2_000_000)],
        Vec::new(),
    )
    .await;
    let claim = Arc::new(
        decode.importer.claim(
            decode
                .importer
                .check(&redirect(&params, proxy.addr))
                .unwrap(),
        ),
    );
    let mut tasks = JoinSet::new();
    let reads = Arc::clone(&claim);
    tasks.spawn(async move {
        reads
            .fetch(&prompt, &all_blocks(), 0..LARGE_TOKENS as u32)
            .await
    });
    eventually("it reads", || prefill.exporter.stats().readers == 1).await;
    prefill.shut_down().await;
    assert_eq!(
        (
            prefill.exporter.stats().readers,
            prefill.exporter.stats().connections
        ),
        (0, 0)
    );
    assert_eq!(prefill.memory.arena.borrowed_blocks(), 0);
    let error = tasks.join_next().await.unwrap().unwrap().unwrap_err();
    assert_eq!(error.kind, ErrorKind::KvTransfer, "{error}");
}
