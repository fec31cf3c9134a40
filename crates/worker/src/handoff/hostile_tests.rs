//! Peers that hold the key and speak the protocol, and mean harm or are wrong.

use crate::handoff::channel::{Channel, ChannelError, HANDSHAKE_TIME};
use crate::handoff::lease::HandleId;
use crate::handoff::peers::Peer;
use crate::handoff::seal::{Checksum, Seal, Sealed, token_hash, unit_checksum};
use crate::handoff::wire::{Refusal, Reply, Request, WireGeometry, WireHandle};
use crate::handoff::{
    Exporter, ExporterConfig, Importer, ImporterConfig, ReleaseOutcome, RemoteHandle,
};
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use twinfer_engine::{HeldKv, KvGeometry, RequestId};
use twinfer_protocol::{ApiError, Epoch, ErrorKind, Fingerprint, KvTransferParams};
use twinfer_sys::BlockArena;

const GEOMETRY: KvGeometry = KvGeometry {
    layers: 2,
    width: 4,
    value_bytes: 2,
    block_size: 4,
};
const EPOCH: u64 = 77;
const PROMPT: [u32; 6] = [1, 2, 3, 4, 5, 6];
const ID: HandleId = HandleId {
    generation: 3,
    nonce: 5,
};

fn soon() -> Instant {
    Instant::now() + HANDSHAKE_TIME
}

fn arena() -> Arc<BlockArena> {
    Arc::new(BlockArena::new(8, 2, 32).unwrap())
}

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
        peer: Peer {
            host: "127.0.0.1".into(),
            port,
        },
        tokens: 6,
        blocks: vec![4, 6],
        seal: seal(),
    };
    let params = handle.to_params(4, None, &PROMPT);
    let fetched = importer.fetch(&params, &PROMPT, &[2, 1], 5).await;
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

/// A real exporter with one handle, and a proved connection to it.
struct Victim {
    exporter: Exporter,
    params: KvTransferParams,
    arena: Arc<BlockArena>,
    tasks: JoinSet<()>,
}

impl Victim {
    async fn start() -> Self {
        let arena = arena();
        for block in [4, 6] {
            let mut guard = arena.write(block).unwrap();
            (0..2).for_each(|layer| guard.unit_mut(layer).unwrap().fill(block as u8));
        }
        let (exporter, server) = Exporter::bind(ExporterConfig {
            name: "p".into(),
            epoch: Epoch(EPOCH),
            fingerprint: Fingerprint::default(),
            host: "127.0.0.1".into(),
            port: 0,
            advertise_host: None,
            key: None,
            lease: Duration::from_secs(30),
            timeout: Duration::from_millis(300),
            geometry: GEOMETRY,
            arena: Arc::clone(&arena),
            wake: Box::new(|| {}),
        })
        .await
        .unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(server.run(CancellationToken::new()));
        let held = HeldKv {
            blocks: vec![4, 6],
            tokens: 6,
        };
        let params = exporter
            .register(RequestId(1), held, &PROMPT, None)
            .await
            .unwrap();
        Self {
            exporter,
            params,
            arena,
            tasks,
        }
    }

    async fn dial(&self) -> Channel {
        let stream = TcpStream::connect(self.exporter.addr()).await.unwrap();
        Channel::import(stream, None, soon()).await.unwrap()
    }

    async fn open(&self) -> Channel {
        let mut channel = self.dial().await;
        channel
            .send(
                &Request::Open {
                    fingerprint: Fingerprint::default(),
                },
                soon(),
            )
            .await
            .unwrap();
        assert!(matches!(
            channel.receive(soon()).await.unwrap(),
            Reply::Welcome { epoch: EPOCH, .. }
        ));
        channel
    }

    fn handle(&self) -> WireHandle {
        let id = self
            .params
            .remote_request_id
            .as_deref()
            .unwrap()
            .parse()
            .unwrap();
        WireHandle::new(EPOCH, id)
    }

    fn pull(&self) -> Request {
        Request::Pull {
            handle: self.handle(),
            token_hash: token_hash(&PROMPT),
            tokens: 6,
            blocks: 2,
            geometry: WireGeometry::new(GEOMETRY).unwrap(),
        }
    }

    /// Nothing was freed, nothing is pinned or borrowed.
    async fn is_unharmed(&self) {
        let calm = async {
            while self.exporter.stats().readers > 0 || self.arena.borrowed_blocks() > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(Duration::from_secs(3), calm)
            .await
            .expect("no pin is left");
        assert_eq!(self.exporter.stats().leases, 1);
        assert!(self.exporter.take_freed().is_empty());
        // And it serves.
        let mut channel = self.open().await;
        channel.send(&self.pull(), soon()).await.unwrap();
        assert!(matches!(
            channel.receive(soon()).await.unwrap(),
            Reply::Header {
                units: 4,
                payload: 96,
                ..
            }
        ));
        assert_eq!(self.tasks.len(), 1);
    }
}

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
    } = victim.pull()
    else {
        unreachable!()
    };
    let mut other_hash = token_hash;
    other_hash[0] ^= 1;
    let pull = |handle, token_hash, tokens, blocks, geometry| Request::Pull {
        handle,
        token_hash,
        tokens,
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
        release: true,
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
        Some(Request::Done {
            handle: other,
            release: true,
        }),
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

fn message() -> impl Strategy<Value = Request> {
    let handle = || {
        (0_u64..3, 0_u64..3, any::<bool>()).prop_map(|(epoch, generation, nonce)| WireHandle {
            epoch: EPOCH - 1 + epoch,
            generation,
            nonce: u64::from(nonce),
        })
    };
    let number = || prop_oneof![0_u32..8, Just(u32::MAX)];
    prop_oneof![
        Just(Request::Open {
            fingerprint: Fingerprint::default()
        }),
        (handle(), any::<bool>(), number(), number(), number()).prop_map(
            |(handle, right, tokens, blocks, layers)| {
                let token_hash = if right { token_hash(&PROMPT) } else { [0; 32] };
                let geometry = WireGeometry {
                    layers,
                    width: 4,
                    value_bytes: 2,
                    block_size: 4,
                };
                Request::Pull {
                    handle,
                    token_hash,
                    tokens,
                    blocks,
                    geometry,
                }
            }
        ),
        (handle(), any::<bool>()).prop_map(|(handle, release)| Request::Done { handle, release }),
        handle().prop_map(|handle| Request::Release { handle }),
        proptest::collection::vec(handle(), 0..4).prop_map(|handles| Request::Renew { handles }),
    ]
}

/// Either a message or bytes.
fn said() -> impl Strategy<Value = Result<Request, Vec<u8>>> {
    prop_oneof![
        8 => message().prop_map(Ok),
        1 => proptest::collection::vec(any::<u8>(), 1..40).prop_map(Err),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever proved peers say who do not have the handle: nothing is freed, pinned or broken.
    #[test]
    fn any_conversation_leaves_other_peoples_kv_alone(says in proptest::collection::vec(said(), 1..12), open in any::<bool>()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let victim = Victim::start().await;
            let mut channel = if open { victim.open().await } else { victim.dial().await };
            for say in says {
                let sent = match say {
                    Ok(request) => channel.send(&request, soon()).await,
                    Err(bytes) => channel.send_raw(&bytes, soon()).await,
                };
                if sent.is_err() {
                    break;
                }
            }
            drop(channel);
            victim.is_unharmed().await;
        });
    }

    /// Any bytes to the port: closed, nothing harmed.
    #[test]
    fn any_bytes_leave_everything_alone(bytes in proptest::collection::vec(any::<u8>(), 0..300), magic in any::<bool>()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let victim = Victim::start().await;
            let mut stream = TcpStream::connect(victim.exporter.addr()).await.unwrap();
            let start: &[u8] = if magic { b"twinfrKV\x01\0\x01\0" } else { &[] };
            let _ = stream.write_all(&[start, &bytes].concat()).await;
            drop(stream);
            victim.is_unharmed().await;
        });
    }
}
