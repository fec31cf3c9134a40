use super::*;
use tokio::net::TcpListener;

impl Channel {
    /// Sends bytes that are no frame.
    pub(crate) async fn send_raw(
        &mut self,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<(), ChannelError> {
        write_all(&self.stream, bytes, deadline).await
    }
}

/// Both ends of a connection after the handshake.
async fn pair(key: Option<&PeerKey>) -> (Channel, Channel) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let deadline = Instant::now() + HANDSHAKE_TIME;
    let dial = async {
        let stream = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        Channel::import(stream, key, deadline).await.unwrap()
    };
    let accept = async {
        let (stream, _) = listener.accept().await.unwrap();
        Channel::export(stream, key, deadline).await.unwrap()
    };
    tokio::join!(dial, accept)
}

#[tokio::test]
async fn units_of_any_sizes_arrive_in_order() {
    let (mut importer, mut exporter) = pair(PeerKey::new(b"k").as_ref()).await;
    let sent: Vec<Vec<u8>> = (0..SLICES)
        .map(|n| vec![n as u8; (n * n * 37) % 9000])
        .collect();
    let mut received: Vec<Vec<u8>> = sent.iter().map(|unit| vec![0xff; unit.len()]).collect();
    let pace = Pace::new(Duration::from_secs(5), 1 << 20);
    let mut out: Vec<IoSlice<'_>> = sent.iter().map(|unit| IoSlice::new(unit)).collect();
    let mut into: Vec<IoSliceMut<'_>> = received
        .iter_mut()
        .map(|unit| IoSliceMut::new(unit))
        .collect();
    let (wrote, read) = tokio::join!(
        exporter.write_units(&mut out, &pace),
        importer.read_units(&mut into, &pace)
    );
    wrote.unwrap();
    read.unwrap();
    assert_eq!(sent, received);
    // Frames go on behind units.
    exporter
        .send(&7_u32, Instant::now() + HANDSHAKE_TIME)
        .await
        .unwrap();
    assert_eq!(
        importer
            .receive::<u32>(Instant::now() + HANDSHAKE_TIME)
            .await
            .unwrap(),
        7
    );
}

#[tokio::test]
async fn an_idle_connection_is_quiet_until_its_peer_speaks_or_goes() {
    let (importer, mut exporter) = pair(None).await;
    assert!(importer.is_quiet());
    let (waiting, exporter_speaks) = pair(None).await;
    assert!(waiting.is_quiet());
    exporter
        .send_raw(b"x", Instant::now() + HANDSHAKE_TIME)
        .await
        .unwrap();
    drop(exporter_speaks);
    for channel in [&importer, &waiting] {
        channel.stream.readable().await.unwrap();
        assert!(!channel.is_quiet());
    }
}

#[tokio::test]
async fn a_transfer_has_a_last_moment_by_its_size() {
    let stall = Duration::from_secs(10);
    let before = Instant::now();
    let pace = Pace::new(stall, 100 << 20);
    let after = Instant::now();
    let last = Duration::from_secs(110);
    assert_eq!(pace.next(before), before + stall);
    let late = pace.next(before + Duration::from_secs(105));
    assert!((before + last..=after + last).contains(&late));
    // No size is too large for a clock.
    assert_eq!(Pace::new(stall, u64::MAX).next(before), before + stall);
}
