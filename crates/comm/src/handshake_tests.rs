use super::*;
use proptest::prelude::*;

fn key(text: &str) -> Option<PeerKey> {
    PeerKey::new(text.as_bytes())
}

static PROTOCOL: Protocol = Protocol {
    magic: *b"twinfrXX",
    version: 7,
    label: b"a protocol of tests ",
};

fn hello(side: Side, keyed: bool, nonce: u8) -> Hello {
    Hello {
        protocol: &PROTOCOL,
        side,
        keyed,
        nonce: [nonce; 32],
    }
}

fn transcript() -> Transcript {
    Transcript {
        protocol: &PROTOCOL,
        dialer: hello(Side::Dialer, true, 1).encode(),
        listener: hello(Side::Listener, true, 2).encode(),
    }
}

#[test]
fn hmac_matches_rfc_4231() {
    // Test cases 2 and 6: a short key, and one longer than a block.
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let mut mac = hmac(b"Jefe");
    mac.update(b"what do ya want for nothing?");
    assert_eq!(
        hex(&mac.finalize().into_bytes()),
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    );
    let mut mac = hmac(&[0xaa; 131]);
    mac.update(b"Test Using Larger Than Block-Size Key - Hash Key First");
    assert_eq!(
        hex(&mac.finalize().into_bytes()),
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"
    );
}

#[test]
fn good_hellos_fit() {
    for keyed in [true, false] {
        let (dialer, listener) = (
            hello(Side::Dialer, keyed, 1),
            hello(Side::Listener, keyed, 2),
        );
        assert_eq!(dialer.check_peer(&listener.encode()), Ok(()));
        assert_eq!(listener.check_peer(&dialer.encode()), Ok(()));
    }
}

#[test]
fn hellos_that_do_not_fit_are_refused_by_name() {
    let ours = hello(Side::Listener, true, 2);
    let peer = hello(Side::Dialer, true, 1);
    let mut old = peer.encode();
    old[8] = 0;
    assert_eq!(
        ours.check_peer(&old),
        Err(HelloError::Version { theirs: 0, ours: 7 })
    );
    let mut http = [b' '; HELLO_LEN];
    http[..4].copy_from_slice(b"GET ");
    assert_eq!(ours.check_peer(&http), Err(HelloError::Magic));
    assert_eq!(
        ours.check_peer(&hello(Side::Listener, true, 1).encode()),
        Err(HelloError::Side)
    );
    assert_eq!(
        ours.check_peer(&hello(Side::Dialer, false, 1).encode()),
        Err(HelloError::PeerUnkeyed)
    );
    assert_eq!(
        hello(Side::Listener, false, 2).check_peer(&peer.encode()),
        Err(HelloError::PeerKeyed)
    );
    assert_eq!(
        ours.check_peer(&hello(Side::Dialer, true, 2).encode()),
        Err(HelloError::Reflected)
    );
}

#[test]
fn a_proof_is_good_for_one_side_one_key_and_one_conversation() {
    let transcript = transcript();
    let right = key("right");
    let proof = transcript.proof(right.as_ref(), Side::Dialer);
    assert_eq!(
        transcript.verify(right.as_ref(), Side::Dialer, &proof),
        Ok(())
    );
    assert_eq!(
        transcript.verify(right.as_ref(), Side::Listener, &proof),
        Err(HelloError::Proof),
        "reflected"
    );
    assert_eq!(
        transcript.verify(key("wrong").as_ref(), Side::Dialer, &proof),
        Err(HelloError::Proof)
    );
    assert_eq!(
        transcript.verify(None, Side::Dialer, &proof),
        Err(HelloError::Proof)
    );
    for at in 0..HELLO_LEN {
        let (mut dialer, mut listener) = (transcript, transcript);
        dialer.dialer[at] ^= 1;
        listener.listener[at] ^= 1;
        for replayed in [dialer, listener] {
            assert_eq!(
                replayed.verify(right.as_ref(), Side::Dialer, &proof),
                Err(HelloError::Proof)
            );
        }
    }
}

#[test]
fn directions_have_different_keys() {
    let transcript = transcript();
    let right = key("right");
    let tag = transcript
        .session(right.as_ref(), Side::Dialer)
        .tag(0, b"frame");
    assert!(
        transcript
            .session(right.as_ref(), Side::Dialer)
            .verify(0, b"frame", &tag)
    );
    assert!(
        !transcript
            .session(right.as_ref(), Side::Dialer)
            .verify(1, b"frame", &tag),
        "repeated"
    );
    assert!(
        !transcript
            .session(right.as_ref(), Side::Dialer)
            .verify(0, b"frame", &tag[..15]),
        "short"
    );
    assert!(
        !transcript
            .session(right.as_ref(), Side::Dialer)
            .verify(0, b"frame", &[]),
        "empty"
    );
    assert!(
        !transcript
            .session(right.as_ref(), Side::Listener)
            .verify(0, b"frame", &tag)
    );
}

#[test]
fn keys_are_never_printed_and_never_empty() {
    assert_eq!(format!("{:?}", key("secret").unwrap()), "PeerKey(..)");
    assert!(
        !format!(
            "{:?}",
            transcript().session(key("secret").as_ref(), Side::Dialer)
        )
        .contains("secret")
    );
    assert!(PeerKey::new(b"").is_none());
}

proptest! {
    /// No 48 bytes but a well-formed hello of the other side are accepted, and none panic.
    #[test]
    fn foreign_bytes_are_no_hello(bytes in any::<[u8; HELLO_LEN]>()) {
        prop_assert!(hello(Side::Listener, true, 2).check_peer(&bytes).is_err());
    }

    /// One changed byte anywhere but in the nonce is seen in the hello; one in the nonce in the proof.
    #[test]
    fn a_changed_hello_is_refused(at in 0..HELLO_LEN, flip in 1_u8..) {
        let mut bytes = hello(Side::Dialer, true, 1).encode();
        bytes[at] ^= flip;
        let accepted = hello(Side::Listener, true, 2).check_peer(&bytes).is_ok();
        prop_assert_eq!(accepted, (12..44).contains(&at));
    }
}
