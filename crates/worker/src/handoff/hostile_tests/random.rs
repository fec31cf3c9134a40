//! Whatever is said to a prefill instance, others' KV stays as it is.

use super::{EPOCH, PROMPT, Victim, soon};
use crate::handoff::seal::token_hash;
use crate::handoff::wire::{Request, WireGeometry, WireHandle};
use proptest::prelude::*;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use twinfer_protocol::Fingerprint;

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
        (
            handle(),
            any::<bool>(),
            number(),
            [number(), number()],
            number()
        )
            .prop_map(|(handle, right, tokens, [first, blocks], layers)| {
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
                    first,
                    blocks,
                    geometry,
                }
            }),
        handle().prop_map(|handle| Request::Done { handle }),
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
