use super::*;
use proptest::prelude::*;
use twinfer_comm::handshake::{HELLO_LEN, Side, Transcript};

fn codec() -> FrameCodec {
    let transcript = Transcript {
        protocol: &PROTOCOL,
        dialer: [1; HELLO_LEN],
        listener: [2; HELLO_LEN],
    };
    FrameCodec::new(transcript.session(None, Side::Dialer))
}

fn handle() -> impl Strategy<Value = WireHandle> {
    any::<(u64, u64, u64)>().prop_map(|(epoch, generation, nonce)| WireHandle {
        epoch,
        generation,
        nonce,
    })
}

fn fingerprint() -> impl Strategy<Value = Fingerprint> {
    (".{0,64}", ".{0,64}", ".{0,64}", any::<u32>(), any::<u32>()).prop_map(
        |(a, b, c, block_size, kv_layout)| Fingerprint {
            id: a.clone(),
            config: b.clone(),
            weights: c.clone(),
            tokenizer: a,
            quantization: b,
            kv_dtype: c,
            block_size,
            kv_layout,
            numerics: String::new(),
            mtp: false,
        },
    )
}

fn request() -> impl Strategy<Value = Request> {
    let geometry =
        any::<(u32, u32, u32, u32)>().prop_map(|(layers, width, value_bytes, block_size)| {
            WireGeometry {
                layers,
                width,
                value_bytes,
                block_size,
            }
        });
    prop_oneof![
        fingerprint().prop_map(|fingerprint| Request::Open { fingerprint }),
        (handle(), any::<[u8; 32]>(), any::<[u32; 3]>(), geometry).prop_map(
            |(handle, token_hash, [tokens, first, blocks], geometry)| Request::Pull {
                handle,
                token_hash,
                tokens,
                first,
                blocks,
                geometry
            }
        ),
        handle().prop_map(|handle| Request::Done { handle }),
        handle().prop_map(|handle| Request::Release { handle }),
        proptest::collection::vec(handle(), 0..=RENEW_CAP)
            .prop_map(|handles| Request::Renew { handles }),
    ]
}

#[test]
fn an_untrusted_length_is_refused_before_anything_is_read() {
    assert_eq!(FrameCodec::rest_len([0; 4]), Err(FrameError::Length(0)));
    assert_eq!(
        FrameCodec::rest_len([0xff; 4]),
        Err(FrameError::Length(u32::MAX))
    );
    // The start of a 64-bit length of 2^63, and of an HTTP request.
    assert!(FrameCodec::rest_len(*b"GET ").is_err());
    let cap = FRAME_CAP as u32;
    assert_eq!(
        FrameCodec::rest_len(cap.to_le_bytes()),
        Ok(FRAME_CAP + TAG_LEN)
    );
    assert_eq!(
        FrameCodec::rest_len((cap + 1).to_le_bytes()),
        Err(FrameError::Length(cap + 1))
    );
}

#[test]
fn the_largest_renewal_fits_a_frame_and_a_larger_message_is_not_sent() {
    let worst = WireHandle {
        epoch: u64::MAX,
        generation: u64::MAX,
        nonce: u64::MAX,
    };
    assert!(
        codec()
            .encode(&Request::Renew {
                handles: vec![worst; RENEW_CAP]
            })
            .is_ok()
    );
    assert!(
        codec()
            .encode(&Request::Renew {
                handles: vec![worst; 4 * RENEW_CAP]
            })
            .is_err()
    );
}

#[test]
fn a_frame_is_good_once_and_in_order() {
    let (mut ours, mut theirs) = (codec(), codec());
    let message = Reply::Released {
        outcome: ReleaseOutcome::Freed,
    };
    let first = ours.encode(&message).unwrap();
    let second = ours.encode(&message).unwrap();
    assert_eq!(
        theirs.decode::<Reply>(&second),
        Err(FrameError::Tag),
        "out of order"
    );
    assert_eq!(theirs.decode::<Reply>(&first), Ok(message.clone()));
    assert_eq!(
        theirs.decode::<Reply>(&first),
        Err(FrameError::Tag),
        "repeated"
    );
    assert_eq!(theirs.decode::<Reply>(&second), Ok(message));
}

#[test]
fn bytes_behind_a_message_are_refused() {
    let mut ours = codec();
    let mut body = postcard::to_stdvec(&Reply::Released {
        outcome: ReleaseOutcome::Freed,
    })
    .unwrap();
    body.push(0);
    let mut frame = (body.len() as u32).to_le_bytes().to_vec();
    frame.extend(body);
    let tag = ours.key.tag(0, &frame);
    frame.extend(tag);
    assert_eq!(ours.decode::<Reply>(&frame), Err(FrameError::Body));
}

#[test]
fn a_difference_names_the_part() {
    let ours = Fingerprint {
        weights: "aa".into(),
        block_size: 16,
        ..Fingerprint::default()
    };
    assert_eq!(difference(&ours, &ours.clone()), None);
    let theirs = Fingerprint {
        block_size: 32,
        ..ours.clone()
    };
    assert_eq!(
        difference(&ours, &theirs).unwrap(),
        "block_size (ours 16, theirs 32)"
    );
    let theirs = Fingerprint {
        weights: "\u{1b}[2J".repeat(200),
        ..ours.clone()
    };
    let named = difference(&ours, &theirs).unwrap();
    assert!(
        named.starts_with("weights (ours aa, theirs ?[2J") && named.len() < 400,
        "{named}"
    );
    let theirs = Fingerprint {
        weights: "with the layer".into(),
        mtp: true,
        ..ours.clone()
    };
    assert_eq!(
        difference(&ours, &theirs).unwrap(),
        "num-speculative-tokens (ours 0, theirs above 0)"
    );
    let theirs = Fingerprint {
        id: "other".into(),
        ..ours.clone()
    };
    assert_eq!(
        difference(&ours, &theirs).unwrap(),
        "id (ours , theirs other)"
    );
}

proptest! {
    #[test]
    fn requests_come_back_as_they_went(requests in proptest::collection::vec(request(), 1..4)) {
        let (mut ours, mut theirs) = (codec(), codec());
        for request in requests {
            let frame = ours.encode(&request).unwrap();
            let rest = FrameCodec::rest_len(frame[..4].try_into().unwrap());
            prop_assert_eq!(rest, Ok(frame.len() - 4));
            prop_assert_eq!(theirs.decode::<Request>(&frame), Ok(request));
        }
    }

    /// One flipped bit or a cut anywhere is refused.
    #[test]
    fn a_damaged_frame_is_refused(request in request(), place in any::<prop::sample::Index>(), bit in 0_u8..8) {
        let frame = codec().encode(&request).unwrap();
        let at = place.index(frame.len());
        prop_assert!(codec().decode::<Request>(&frame[..at]).is_err());
        let mut flipped = frame;
        flipped[at] ^= 1 << bit;
        prop_assert!(codec().decode::<Request>(&flipped).is_err());
    }

    /// Foreign bytes are refused, with and without a good tag, and never panic.
    #[test]
    fn foreign_bytes_are_no_message(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(codec().decode::<Request>(&body).is_err());
        let mut frame = (body.len() as u32).to_le_bytes().to_vec();
        frame.extend(&body);
        let tag = codec().key.tag(0, &frame);
        frame.extend(tag);
        if let Ok(request) = codec().decode::<Request>(&frame) {
            // By chance well-formed: then it is what those bytes say. Numbers have longer forms too,
            // so only the message is compared.
            let again = codec().encode(&request).unwrap();
            prop_assert_eq!(codec().decode::<Request>(&again), Ok(request));
        }
        let _ = codec().decode::<Reply>(&frame);
    }
}

/// Messages that look otherwise are another version: a peer would misread them.
#[test]
fn messages_of_this_version_have_these_bytes() {
    let handle = WireHandle {
        epoch: 1,
        generation: 2,
        nonce: 3,
    };
    let text = |name: &str| name.to_owned();
    let fingerprint = Fingerprint {
        id: text("i"),
        mtp: true,
        ..Fingerprint::default()
    };
    let geometry = WireGeometry {
        layers: 1,
        width: 2,
        value_bytes: 3,
        block_size: 4,
    };
    let token_hash = [9; 32];
    let requests = [
        Request::Open {
            fingerprint: fingerprint.clone(),
        },
        Request::Pull {
            handle,
            token_hash,
            tokens: 5,
            first: 6,
            blocks: 7,
            geometry,
        },
        Request::Done { handle },
        Request::Release { handle },
        Request::Renew {
            handles: vec![handle],
        },
    ];
    let replies = [
        Reply::Welcome {
            epoch: 1,
            fingerprint,
        },
        Reply::Header {
            handle,
            token_hash,
            tokens: 5,
            seal: 6,
            units: 7,
            payload: 8,
        },
        Reply::Released {
            outcome: ReleaseOutcome::Unknown,
        },
        Reply::Renewed { alive: vec![true] },
        Reply::Refused {
            reason: Refusal::Internal,
            message: text("m"),
        },
    ];
    let mut bytes = Vec::new();
    for request in &requests {
        bytes.extend(postcard::to_allocvec(request).unwrap());
    }
    for reply in &replies {
        bytes.extend(postcard::to_allocvec(reply).unwrap());
    }
    assert_eq!(
        (
            PROTOCOL.version,
            bytes.len(),
            xxhash_rust::xxh3::xxh3_64(&bytes)
        ),
        (4, 250, 1_231_454_375_660_805_924),
        "raise PROTOCOL.version with every change of these bytes"
    );
}
