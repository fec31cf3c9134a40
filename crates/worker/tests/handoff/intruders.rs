//! What strangers may send to the KV port: all of it is closed and counted, none of it disturbs peers.

use crate::proxy::{Fault, Proxy};
use crate::support::{Decode, Fetch as _, Options, Prefill, eventually, prompt, redirect, seed};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use twinfer_protocol::ErrorKind;
use twinfer_worker::handoff::RejectionCounts;

/// Of the KV channel's protocol.
const VERSION: u16 = 4;

/// A well-formed hello of an importer that has a key.
fn hello(version: u16) -> Vec<u8> {
    let mut hello = b"twinfrKV".to_vec();
    hello.extend(version.to_le_bytes());
    hello.extend([1, 1]);
    hello.extend([0x5a; 32]);
    hello.extend([0; 4]);
    hello
}

/// Sends and reads until the server closes; what it said.
async fn say(prefill: &Prefill, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(prefill.addr()).await.unwrap();
    // It may close before it has read everything.
    let _ = stream.write_all(bytes).await;
    let mut heard = Vec::new();
    let closed = timeout(Duration::from_secs(4), stream.read_to_end(&mut heard)).await;
    assert!(closed.is_ok(), "not closed in time");
    heard
}

async fn works(prefill: &Prefill, decode: &Decode, number: u32) {
    let prompt = prompt(number, 9);
    let params = prefill.hold(&prompt, &[0, 1, 2]).await;
    decode
        .importer
        .fetch(&params, &prompt, &[5, 6, 7], 8)
        .await
        .unwrap();
    assert!(decode.memory.holds(&[5, 6, 7], 8, seed(&prompt)));
    prefill.freed(1).await;
}

#[tokio::test]
async fn foreign_protocols_are_closed_without_a_word() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let mut length = (1_u64 << 63).to_le_bytes().to_vec();
    length.extend([0; 64]);
    let mut big_endian = (1_u64 << 63).to_be_bytes().to_vec();
    big_endian.extend([0; 64]);
    let pickle = b"\x80\x04\x95\x22\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x08touch /x\x85R.".repeat(3);
    let random: Vec<u8> = (0..500_u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let http =
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9223372036854775807\r\n\r\n"
            .to_vec();
    let strangers = [length, big_endian, pickle, random, http];
    for bytes in &strangers {
        assert!(
            say(&prefill, bytes).await.is_empty(),
            "said something to {bytes:?}"
        );
    }
    let rejections = prefill.exporter.stats().rejections;
    assert_eq!(
        rejections,
        RejectionCounts {
            protocol: strangers.len() as u64,
            ..RejectionCounts::default()
        }
    );
    works(&prefill, &decode, 1).await;
}

#[tokio::test]
async fn another_version_is_told_ours_and_closed() {
    let options = Options::default();
    let prefill = Prefill::start(&options).await;
    for version in [0, VERSION - 1, VERSION + 1, 0xffff] {
        let heard = say(&prefill, &hello(version)).await;
        assert_eq!((heard.len(), &heard[..10]), (48, &hello(VERSION)[..10]));
    }
    assert_eq!(prefill.exporter.stats().rejections.version, 4);
}

/// An exporter of a release whose messages look otherwise ends the request, with both versions named.
#[tokio::test]
async fn a_prefill_instance_of_another_version_is_refused_by_name() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, 9);
    let params = prefill.hold(&prompt, &[0, 1, 2]).await;
    for version in [VERSION - 1, VERSION + 1] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let elsewhere = redirect(&params, listener.local_addr().unwrap());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut theirs = [0; 48];
            stream.read_exact(&mut theirs).await.unwrap();
            let mut ours = hello(version);
            ours[10] = 2;
            stream.write_all(&ours).await.unwrap();
            // Nothing else is said to it.
            assert_eq!(stream.read(&mut theirs).await.unwrap_or(0), 0);
        });
        let fetched = decode
            .importer
            .fetch(&elsewhere, &prompt, &[5, 6, 7], 8)
            .await;
        let error = fetched.unwrap_err();
        assert_eq!(error.kind, ErrorKind::KvMismatch, "{error}");
        let named = format!("speaks version {version} of the protocol, not {VERSION}");
        assert!(error.message.contains(&named), "{error}");
        tasks.join_next().await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_wrong_proof_gets_no_proof() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let mut bytes = hello(VERSION);
    bytes.extend([7; 32]);
    bytes.extend([0xff; 4096]);
    // Its hello and a refusal, the same for everybody, where a proof would stand.
    let refusal = b"twinfrKV: peer key not accepted.";
    let (first, second) = (say(&prefill, &bytes).await, say(&prefill, &bytes).await);
    for heard in [&first, &second] {
        assert_eq!(heard.len(), 48 + 32);
        assert_eq!(&heard[48..], refusal);
    }
    assert_ne!(first[..48], second[..48], "a nonce of its own");
    assert_eq!(prefill.exporter.stats().rejections.key, 2);
    works(&prefill, &decode, 1).await;
}

#[tokio::test]
async fn half_a_message_and_silence_is_closed() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let (nothing, half_hello, no_proof) =
        (Vec::new(), hello(VERSION)[..20].to_vec(), hello(VERSION));
    let began = Instant::now();
    tokio::join!(
        say(&prefill, &nothing),
        say(&prefill, &half_hello),
        say(&prefill, &no_proof),
        works(&prefill, &decode, 1)
    );
    assert!(
        began.elapsed() >= Duration::from_secs(1),
        "a slow peer has its time"
    );
    assert_eq!(prefill.exporter.stats().rejections.silent, 3);
    eventually("only the pooled connection is left", || {
        prefill.exporter.stats().connections == 1
    })
    .await;
}

#[tokio::test]
async fn keys_that_differ_are_named_by_the_importer() {
    let options = Options::default();
    let prefill = Prefill::start(&options).await;
    let open = Prefill::start(&Options {
        key: None,
        ..options.clone()
    })
    .await;
    let prompt = prompt(1, 9);
    for (server, key, word) in [
        (&prefill, Some("another key"), "the two have different keys"),
        (&prefill, None, "has a peer key, and this side has none"),
        (
            &open,
            Some("the peers' key"),
            "has no peer key, and this side has one",
        ),
    ] {
        let decode = Decode::start(&Options {
            key,
            ..options.clone()
        });
        let params = server.hold(&prompt, &[0, 1, 2]).await;
        let error = decode
            .importer
            .fetch(&params, &prompt, &[5, 6, 7], 8)
            .await
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::KvMismatch);
        assert!(error.message.contains(word), "{error}");
        assert!(error.message.contains("lease"), "{error}");
        for key in ["the peers' key", "another key"] {
            assert!(!error.message.contains(key), "{error}");
        }
        assert_eq!(decode.importer.stats().failures.mismatch, 1);
        eventually("it is counted", || {
            server.exporter.stats().rejections.key > 0
        })
        .await;
        assert_eq!(server.exporter.stats().bytes, 0);
        decode.is_idle().await;
        // Its own release is refused too; the router, which made the handle, holds the right key.
        eventually("its release is refused", || {
            decode.importer.stats().releases_lost == 1
        })
        .await;
        assert_eq!(server.exporter.stats().leases, 1);
        server.release(&params);
        server.freed(1).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_silent_connections_do_not_keep_peers_out() {
    let options = Options::default();
    let prefill = Arc::new(Prefill::start(&options).await);
    let decode = Decode::start(&options);
    let mut strangers = JoinSet::new();
    for number in 0..1000_u32 {
        let addr = prefill.addr();
        strangers.spawn(async move {
            let mut stream = TcpStream::connect(addr).await.unwrap();
            // Every third begins well.
            let bytes = if number % 3 == 0 {
                hello(VERSION)
            } else {
                Vec::new()
            };
            let _ = stream.write_all(&bytes).await;
            let mut heard = Vec::new();
            timeout(Duration::from_secs(5), stream.read_to_end(&mut heard))
                .await
                .expect("closed in time")
                .ok();
        });
        if number % 50 == 0 {
            works(&prefill, &decode, number).await;
            assert!(
                prefill.exporter.stats().connections <= 64 + 4 + 60,
                "{:?}",
                prefill.exporter.stats()
            );
        }
    }
    works(&prefill, &decode, 1001).await;
    while let Some(stranger) = strangers.join_next().await {
        stranger.unwrap();
    }
    // A connection is closed before it is counted.
    eventually("all strangers are counted", || {
        let rejections = prefill.exporter.stats().rejections;
        rejections.evicted + rejections.silent == 1000
    })
    .await;
    assert_eq!(prefill.exporter.stats().pulls, 21);
    prefill.is_idle().await;
    eventually("only peers are left", || {
        prefill.exporter.stats().connections <= 4
    })
    .await;
}

#[tokio::test]
async fn proved_connections_are_bounded_and_idle_ones_make_place() {
    let options = Options {
        blocks: 4,
        ..Options::default()
    };
    let prefill = Prefill::start(&options).await;
    // Each decode instance keeps its one connection.
    let mut all = Vec::new();
    for number in 0..260_u32 {
        let decode = Decode::start(&options);
        let prompt = prompt(number, 4);
        let params = prefill.hold(&prompt, &[0]).await;
        decode
            .importer
            .fetch(&params, &prompt, &[0], 3)
            .await
            .unwrap();
        prefill.freed(1).await;
        all.push((decode, prompt));
    }
    eventually("the oldest are closed", || {
        prefill.exporter.stats().connections <= 256
    })
    .await;
    // Those that lost their connection dial again, as if nothing had been.
    for (decode, prompt) in &all[..8] {
        let params = prefill.hold(prompt, &[0]).await;
        decode
            .importer
            .fetch(&params, prompt, &[0], 3)
            .await
            .unwrap();
        prefill.freed(1).await;
    }
    assert_eq!(prefill.exporter.stats().rejections.total(), 0);
    prefill.is_idle().await;
}

#[tokio::test]
async fn readers_that_take_all_places_keep_them() {
    let options = Options {
        blocks: 4,
        timeout: Duration::from_secs(5),
        ..Options::default()
    };
    let prefill = Prefill::start(&options).await;
    let prompt = prompt(1, 4);
    prefill.memory.fill(&[0], 4, seed(&prompt));
    // The answer is never read out: 256 readers that hold their places.
    let stall = vec![Fault::StallAfter(200); 256];
    let proxy = Proxy::start(prefill.addr(), stall, Vec::new()).await;
    let mut decodes = Vec::new();
    let mut readers = JoinSet::new();
    for number in 1..=256 {
        let decode = Decode::start(&options);
        let params = redirect(&prefill.hold_filled(&prompt, &[0]).await, proxy.addr);
        let (importer, prompt) = (decode.importer.clone(), prompt.clone());
        readers.spawn(async move { importer.fetch(&params, &prompt, &[0], 3).await });
        decodes.push(decode);
        // Few at a time: too many at once would drive each other out before they have proved themselves.
        if number % 32 == 0 {
            eventually("readers take places", || {
                prefill.exporter.stats().readers == number
            })
            .await;
        }
    }
    let decode = Decode::start(&options);
    let params = prefill.hold_filled(&prompt, &[0]).await;
    let error = decode
        .importer
        .fetch(&params, &prompt, &[0], 3)
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::KvTransfer);
    assert!(error.message.contains("taken"), "{error}");
    assert!(prefill.exporter.stats().rejections.busy >= 1);
    assert_eq!(prefill.exporter.stats().readers, 256);
    readers.shutdown().await;
    eventually("they are gone", || prefill.exporter.stats().readers == 0).await;
}
