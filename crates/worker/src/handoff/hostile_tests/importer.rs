//! Prefill instances that a decode instance must not believe.

use super::{EPOCH, GEOMETRY, PROMPT, arena, soon};
use crate::handoff::channel::Channel;
use crate::handoff::lease::HandleId;
use crate::handoff::peers::Peer;
use crate::handoff::seal::{Checksum, Seal, Sealed, token_hash, unit_checksum};
use crate::handoff::wire::{Refusal, Reply, Request, WireHandle};
use crate::handoff::{Importer, ImporterConfig, ReleaseOutcome, RemoteHandle};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::timeout;
use twinfer_protocol::{ApiError, Epoch, ErrorKind, Fingerprint};

const ID: HandleId = HandleId {
    generation: 3,
    nonce: 5,
};

/// A unit's valid rows: 4 tokens in block 0, 2 in block 1.
fn unit(layer: usize, block: usize) -> Vec<u8> {
    vec![(layer * 16 + block + 1) as u8; [32, 16][block]]
}

fn units() -> Vec<Vec<u8>> {
    [(0, 0), (0, 1), (1, 0), (1, 1)]
        .map(|(layer, block)| unit(layer, block))
        .to_vec()
}

fn checksums() -> Vec<Checksum> {
    units().iter().map(|unit| unit_checksum(unit)).collect()
}

fn seal() -> Seal {
    Sealed {
        epoch: Epoch(EPOCH),
        id: ID,
        geometry: GEOMETRY,
        tokens: 6,
        token_hash: &token_hash(&PROMPT),
        blocks: &[4, 6],
        checksums: &checksums(),
    }
    .seal()
}

fn header() -> Reply {
    Reply::Header {
        handle: WireHandle::new(EPOCH, ID),
        token_hash: token_hash(&PROMPT),
        tokens: 6,
        seal: seal().0,
        units: 4,
        payload: 96,
    }
}

fn welcome() -> Reply {
    Reply::Welcome {
        epoch: EPOCH,
        fingerprint: Fingerprint::default(),
    }
}

/// What a scripted exporter says after the handshake.
#[derive(Clone, Debug)]
enum Say {
    Reply(Reply),
    Raw(Vec<u8>),
}

/// A fetch from an exporter that greets with `greeting` and answers the pull with `answer`.
async fn fetch_from(greeting: Vec<Say>, answer: Vec<Say>) -> (Result<(), ApiError>, Importer) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut channel = Channel::export(stream, None, soon()).await.unwrap();
        for script in [greeting, answer] {
            if channel.receive::<Request>(soon()).await.is_err() {
                return;
            }
            for say in script {
                let said = match say {
                    Say::Reply(reply) => channel.send(&reply, soon()).await,
                    Say::Raw(bytes) => channel.send_raw(&bytes, soon()).await,
                };
                if said.is_err() {
                    return;
                }
            }
        }
        // Done, or the end of the connection.
        let _ = channel.receive::<Request>(soon()).await;
    });
    let (importer, _keeper) = Importer::new(ImporterConfig {
        fingerprint: Fingerprint::default(),
        key: None,
        peers: Vec::new(),
        timeout: Duration::from_millis(500),
        renew_every: Duration::from_secs(5),
        geometry: GEOMETRY,
        arena: arena(),
    })
    .unwrap();
    let handle = RemoteHandle {
        name: "p".into(),
        epoch: Epoch(EPOCH),
        id: ID,
        peer: Peer::parse(&format!("127.0.0.1:{port}")).unwrap(),
        tokens: 6,
        blocks: vec![4, 6],
        seal: seal(),
        lease: None,
    };
    let params = handle.to_params(4, None, &PROMPT);
    let claim = importer.claim(importer.check(&params).unwrap());
    let fetched = claim.fetch(&PROMPT, &[2, 1], 0..5).await;
    drop(claim);
    if fetched.is_ok() {
        let arena = &importer.shared.config.arena;
        for (block, id) in [(0, 2), (1, 1)] {
            let guard = arena.read(id).unwrap();
            for layer in 0..2 {
                let right = unit(layer, block);
                assert_eq!(guard.unit(layer).unwrap()[..right.len()], right);
            }
        }
    }
    assert_eq!(importer.shared.config.arena.borrowed_blocks(), 0);
    (fetched.map(|_| ()), importer)
}

/// A good greeting and this answer.
async fn answered(answer: Vec<Say>) -> Result<(), ApiError> {
    fetch_from(vec![Say::Reply(welcome())], answer).await.0
}

fn body() -> Vec<u8> {
    [checksums().as_flattened().to_vec(), units().concat()].concat()
}

#[tokio::test]
async fn the_scripted_exporter_is_right_when_it_does_no_harm() {
    let (fetched, importer) = fetch_from(
        vec![Say::Reply(welcome())],
        vec![Say::Reply(header()), Say::Raw(body())],
    )
    .await;
    assert_eq!(fetched, Ok(()));
    assert_eq!(importer.stats().bytes, 96);
}

#[tokio::test]
async fn announced_sizes_change_nothing_but_the_verdict() {
    let sizes: [(u64, u64); 7] = [
        (4 + (1 << 32), 96),
        (4, 96 + (1 << 32)),
        (u64::MAX, 96),
        (4, 1 << 63),
        (0, 0),
        (3, 96),
        (4, 95),
    ];
    for (units, payload) in sizes {
        let Reply::Header {
            handle,
            token_hash,
            tokens,
            seal,
            ..
        } = header()
        else {
            unreachable!()
        };
        let lie = Reply::Header {
            handle,
            token_hash,
            tokens,
            seal,
            units,
            payload,
        };
        let error = answered(vec![Say::Reply(lie), Say::Raw(body())])
            .await
            .unwrap_err();
        assert_eq!(
            error.kind,
            ErrorKind::KvCorrupt,
            "{units} {payload}: {error}"
        );
        assert!(error.message.contains(&units.to_string()), "{error}");
    }
}

#[tokio::test]
async fn a_header_for_something_else_is_refused() {
    type Change = fn(&mut WireHandle, &mut [u8; 32], &mut u32, &mut u128);
    let changes: [Change; 6] = [
        |handle, _, _, _| handle.epoch += 1,
        |handle, _, _, _| handle.generation += 1,
        |handle, _, _, _| handle.nonce += 1,
        |_, token_hash, _, _| token_hash[31] ^= 1,
        |_, _, tokens, _| *tokens = u32::MAX,
        |_, _, _, seal| *seal ^= 1,
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let Reply::Header {
            mut handle,
            mut token_hash,
            mut tokens,
            mut seal,
            units,
            payload,
        } = header()
        else {
            unreachable!()
        };
        change(&mut handle, &mut token_hash, &mut tokens, &mut seal);
        let lie = Reply::Header {
            handle,
            token_hash,
            tokens,
            seal,
            units,
            payload,
        };
        let error = answered(vec![Say::Reply(lie), Say::Raw(body())])
            .await
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::KvCorrupt, "{number}: {error}");
    }
}

#[tokio::test]
async fn bytes_that_do_not_fit_the_seal_are_refused() {
    let header = || Say::Reply(header());
    // Checksums that fit the payload, but not the seal.
    let other_unit = vec![9; 32];
    let mut other_checksums = checksums();
    other_checksums[0] = unit_checksum(&other_unit);
    let mut consistent = other_checksums.as_flattened().to_vec();
    consistent.extend([&other_unit[..], &units()[1..].concat()].concat());
    let error = answered(vec![header(), Say::Raw(consistent)])
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::KvCorrupt);
    assert!(error.message.contains("seal"), "{error}");
    // Layers exchanged.
    let mut exchanged = checksums().as_flattened().to_vec();
    for number in [2, 3, 0, 1] {
        exchanged.extend(&units()[number]);
    }
    let error = answered(vec![header(), Say::Raw(exchanged)])
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::KvCorrupt, "{error}");
    // One byte less, then nothing, or the end.
    let mut short = body();
    short.pop();
    let error = answered(vec![header(), Say::Raw(short)]).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::KvTransfer, "{error}");
}

#[tokio::test]
async fn a_connection_with_bytes_to_spare_is_not_used_again() {
    let surplus = [body(), vec![0; 7]].concat();
    let (fetched, importer) = fetch_from(
        vec![Say::Reply(welcome())],
        vec![Say::Reply(header()), Say::Raw(surplus)],
    )
    .await;
    assert_eq!(fetched, Ok(()), "what was asked for is right");
    // As soon as the rest has arrived.
    let gone = async {
        while importer.stats().connections > 0 {
            importer.shared.pool.sweep();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(2), gone)
        .await
        .expect("it is closed");
}

#[tokio::test]
async fn answers_out_of_order_and_foreign_frames_are_errors() {
    let refused = |reason, message: &str| {
        Say::Reply(Reply::Refused {
            reason,
            message: message.to_owned(),
        })
    };
    let answers = [
        (Say::Reply(welcome()), ErrorKind::KvTransfer),
        (
            Say::Reply(Reply::Renewed {
                alive: vec![true; 9000],
            }),
            ErrorKind::KvTransfer,
        ),
        (
            Say::Reply(Reply::Released {
                outcome: ReleaseOutcome::Freed,
            }),
            ErrorKind::KvTransfer,
        ),
        (Say::Raw(vec![0xff; 64]), ErrorKind::KvCorrupt),
        (Say::Raw(vec![0; 64]), ErrorKind::KvCorrupt),
        (
            Say::Raw([&16_u32.to_le_bytes()[..], &[7; 64]].concat()),
            ErrorKind::KvCorrupt,
        ),
        (refused(Refusal::Gone, "gone"), ErrorKind::KvStale),
        (refused(Refusal::Corrupt, "bad"), ErrorKind::KvCorrupt),
        (refused(Refusal::Mismatch, "other"), ErrorKind::KvMismatch),
        (refused(Refusal::Internal, "sorry"), ErrorKind::KvTransfer),
        (
            refused(Refusal::Busy, &"\u{1b}[31m\n".repeat(2000)),
            ErrorKind::KvTransfer,
        ),
    ];
    for (answer, kind) in answers {
        let error = answered(vec![answer.clone()]).await.unwrap_err();
        assert_eq!(error.kind, kind, "{answer:?}: {error}");
        assert!(
            error.message.len() < 500 && !error.message.contains('\u{1b}'),
            "{error}"
        );
    }
}

#[tokio::test]
async fn greetings_that_are_wrong_are_errors() {
    let greetings = [
        (Say::Reply(header()), ErrorKind::KvTransfer),
        (Say::Raw(vec![0xff; 64]), ErrorKind::KvCorrupt),
        (
            Say::Reply(Reply::Welcome {
                epoch: EPOCH + 1,
                fingerprint: Fingerprint::default(),
            }),
            ErrorKind::KvStale,
        ),
        (
            Say::Reply(Reply::Welcome {
                epoch: EPOCH,
                fingerprint: Fingerprint {
                    kv_dtype: "f32".into(),
                    ..Fingerprint::default()
                },
            }),
            ErrorKind::KvMismatch,
        ),
    ];
    for (greeting, kind) in greetings {
        let (fetched, _) = fetch_from(
            vec![greeting.clone()],
            vec![Say::Reply(header()), Say::Raw(body())],
        )
        .await;
        let error = fetched.unwrap_err();
        assert_eq!(error.kind, kind, "{greeting:?}: {error}");
    }
}
