//! Decode instances that a prefill instance must not believe.

use super::{Victim, soon};
use crate::handoff::channel::{Channel, ChannelError, HANDSHAKE_TIME};
use crate::handoff::wire::{Refusal, Reply, Request, WireGeometry, WireHandle};
use std::time::Duration;
use tokio::time::Instant;
use twinfer_protocol::Fingerprint;

/// The next thing said is a refusal for this reason.
async fn refused(channel: &mut Channel, reason: Refusal) -> String {
    match channel.receive::<Reply>(soon()).await.unwrap() {
        Reply::Refused {
            reason: theirs,
            message,
        } if theirs == reason => message,
        other => panic!("{reason:?} expected, not {other:?}"),
    }
}

async fn closed(channel: &mut Channel) {
    let end = channel.receive::<Reply>(soon()).await;
    assert!(
        matches!(end, Err(ChannelError::Closed | ChannelError::Io(_))),
        "{end:?}"
    );
}

#[tokio::test]
async fn pulls_that_ask_for_what_is_not_theirs_are_refused() {
    let victim = Victim::start().await;
    let Request::Pull {
        handle,
        token_hash,
        tokens,
        blocks,
        geometry,
        ..
    } = victim.pull()
    else {
        unreachable!()
    };
    let mut other_hash = token_hash;
    other_hash[0] ^= 1;
    let part = |first, blocks| Request::Pull {
        handle,
        token_hash,
        tokens,
        first,
        blocks,
        geometry,
    };
    let pull = |handle, token_hash, tokens, blocks, geometry| Request::Pull {
        handle,
        token_hash,
        tokens,
        first: 0,
        blocks,
        geometry,
    };
    let cases = [
        (
            pull(
                WireHandle { epoch: 1, ..handle },
                token_hash,
                tokens,
                blocks,
                geometry,
            ),
            Refusal::Gone,
        ),
        (
            pull(
                WireHandle { nonce: 1, ..handle },
                token_hash,
                tokens,
                blocks,
                geometry,
            ),
            Refusal::Gone,
        ),
        (
            pull(
                WireHandle {
                    generation: 2,
                    ..handle
                },
                token_hash,
                tokens,
                blocks,
                geometry,
            ),
            Refusal::Gone,
        ),
        (
            pull(
                WireHandle {
                    generation: 0,
                    ..handle
                },
                token_hash,
                tokens,
                blocks,
                geometry,
            ),
            Refusal::Gone,
        ),
        (
            pull(handle, other_hash, tokens, blocks, geometry),
            Refusal::Corrupt,
        ),
        (
            pull(handle, token_hash, u32::MAX, blocks, geometry),
            Refusal::Corrupt,
        ),
        (
            pull(handle, token_hash, 5, blocks, geometry),
            Refusal::Corrupt,
        ),
        (
            pull(handle, token_hash, tokens, 0, geometry),
            Refusal::Protocol,
        ),
        (
            pull(handle, token_hash, tokens, 3, geometry),
            Refusal::Protocol,
        ),
        (
            pull(handle, token_hash, tokens, u32::MAX, geometry),
            Refusal::Protocol,
        ),
        (part(1, 2), Refusal::Protocol),
        (part(2, 0), Refusal::Protocol),
        (part(2, 1), Refusal::Protocol),
        (part(u32::MAX, 1), Refusal::Protocol),
        (part(u32::MAX, u32::MAX), Refusal::Protocol),
        (
            pull(
                handle,
                token_hash,
                tokens,
                blocks,
                WireGeometry {
                    layers: 3,
                    ..geometry
                },
            ),
            Refusal::Mismatch,
        ),
        (
            pull(
                handle,
                token_hash,
                tokens,
                blocks,
                WireGeometry {
                    width: u32::MAX,
                    ..geometry
                },
            ),
            Refusal::Mismatch,
        ),
        (
            pull(
                handle,
                token_hash,
                tokens,
                blocks,
                WireGeometry {
                    block_size: 0,
                    ..geometry
                },
            ),
            Refusal::Mismatch,
        ),
    ];
    for (request, reason) in cases {
        let mut channel = victim.open().await;
        channel.send(&request, soon()).await.unwrap();
        refused(&mut channel, reason).await;
        match reason {
            Refusal::Gone => {
                // A late handle is no reason to part.
                channel
                    .send(
                        &Request::Renew {
                            handles: vec![handle],
                        },
                        soon(),
                    )
                    .await
                    .unwrap();
                assert_eq!(
                    channel.receive::<Reply>(soon()).await.unwrap(),
                    Reply::Renewed { alive: vec![true] }
                );
            }
            _ => closed(&mut channel).await,
        }
    }
    assert_eq!(victim.exporter.stats().bytes, 0);
    victim.is_unharmed().await;
}

#[tokio::test]
async fn messages_out_of_order_are_refused() {
    let victim = Victim::start().await;
    let open = Request::Open {
        fingerprint: Fingerprint::default(),
    };
    let done = Request::Done {
        handle: victim.handle(),
    };
    let flood = Request::Renew {
        handles: vec![
            WireHandle {
                epoch: 0,
                generation: 0,
                nonce: 0
            };
            300
        ],
    };
    for request in [
        &done,
        &victim.pull(),
        &Request::Release {
            handle: victim.handle(),
        },
    ] {
        let mut channel = victim.dial().await;
        channel.send(request, soon()).await.unwrap();
        refused(&mut channel, Refusal::Protocol).await;
        closed(&mut channel).await;
    }
    for request in [&open, &done, &flood] {
        let mut channel = victim.open().await;
        channel.send(request, soon()).await.unwrap();
        refused(&mut channel, Refusal::Protocol).await;
        closed(&mut channel).await;
    }
    assert_eq!(victim.exporter.stats().rejections.protocol, 6);
    victim.is_unharmed().await;
}

#[tokio::test]
async fn a_transfer_that_is_not_acknowledged_frees_nothing() {
    let victim = Victim::start().await;
    let other = WireHandle {
        generation: 9,
        ..victim.handle()
    };
    let endings = [
        Some(victim.pull()),
        Some(Request::Done { handle: other }),
        Some(Request::Release {
            handle: victim.handle(),
        }),
        None,
    ];
    for ending in endings {
        let mut channel = victim.open().await;
        channel.send(&victim.pull(), soon()).await.unwrap();
        assert!(matches!(
            channel.receive(soon()).await.unwrap(),
            Reply::Header { .. }
        ));
        // Checksums and units are left unread; the end comes at once or after a silence.
        if let Some(request) = ending {
            channel.send(&request, soon()).await.unwrap();
        } else {
            drop(channel);
        }
        victim.is_unharmed().await;
    }
    // No word at all.
    let mut channel = victim.open().await;
    channel.send(&victim.pull(), soon()).await.unwrap();
    victim.is_unharmed().await;
    assert_eq!(victim.exporter.stats().pulls, 0);
}

#[tokio::test]
async fn damaged_frames_of_a_proved_peer_are_closed_and_counted() {
    let victim = Victim::start().await;
    let frames: [&[u8]; 5] = [
        &[0; 4],
        &[0xff; 4],
        &[0, 64, 0, 1],
        b"GET / HTTP/1.1\r\n\r\n",
        &[5, 0, 0, 0, 1, 2, 3, 4, 5],
    ];
    for (number, frame) in frames.iter().enumerate() {
        let mut channel = victim.open().await;
        channel
            .send_raw(&[*frame, &[0; 32]].concat(), soon())
            .await
            .unwrap();
        closed(&mut channel).await;
        assert_eq!(
            victim.exporter.stats().rejections.protocol,
            number as u64 + 1
        );
    }
    victim.is_unharmed().await;
}

#[tokio::test]
async fn half_a_frame_of_a_proved_peer_is_not_waited_for_long() {
    let victim = Victim::start().await;
    let mut channel = victim.open().await;
    channel.send_raw(&[30, 0, 0, 0, 1], soon()).await.unwrap();
    let began = Instant::now();
    let end = channel
        .receive::<Reply>(Instant::now() + 2 * HANDSHAKE_TIME)
        .await;
    assert!(
        matches!(end, Err(ChannelError::Closed | ChannelError::Io(_))),
        "{end:?}"
    );
    assert!(began.elapsed() < HANDSHAKE_TIME + Duration::from_secs(1));
    victim.is_unharmed().await;
}
