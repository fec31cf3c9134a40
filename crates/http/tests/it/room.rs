use crate::support::LONG;
use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::HeaderMap;
use http::header::CONTENT_LENGTH;
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;
use tokio::sync::mpsc::{self, Sender};
use tokio::time::timeout;
use twinfer_http::{BodyRoom, RoomShare};
use twinfer_protocol::{ApiError, ErrorKind};

/// Longest body, in pieces of 64 KiB.
const LIMIT: usize = 16;
const PIECE: usize = 64 << 10;

fn body() -> (Sender<Bytes>, Body) {
    let (sender, mut receiver) = mpsc::channel(64);
    let pieces =
        stream::poll_fn(move |cx| receiver.poll_recv(cx).map(|p| p.map(Ok::<_, Infallible>)));
    (sender, Body::from_stream(pieces))
}

fn pieces(count: usize) -> Bytes {
    vec![7; count * PIECE].into()
}

fn room(bodies: u32, time: Duration) -> BodyRoom {
    BodyRoom::new(bodies, (LIMIT * PIECE) as u64, time)
}

async fn whole(room: &BodyRoom, count: usize) -> Result<(Bytes, RoomShare), ApiError> {
    let (sender, body) = body();
    sender.send(pieces(count)).await.unwrap();
    drop(sender);
    timeout(LONG, room.read(&HeaderMap::new(), body))
        .await
        .unwrap()
}

#[tokio::test]
async fn a_length_that_is_only_promised_takes_no_room() {
    let room = room(2, LONG);
    let mut promised = HeaderMap::new();
    promised.insert(CONTENT_LENGTH, (LIMIT * PIECE).into());
    let (senders, bodies): (Vec<_>, Vec<_>) = (0..10).map(|_| body()).unzip();
    let mut silent: Vec<_> = bodies
        .into_iter()
        .map(|body| Box::pin(room.read(&promised, body)))
        .collect();
    poll_fn(|cx| {
        assert!(
            silent
                .iter_mut()
                .all(|read| read.as_mut().poll(cx).is_pending())
        );
        Poll::Ready(())
    })
    .await;
    assert_eq!(whole(&room, LIMIT).await.unwrap().0.len(), LIMIT * PIECE);
    drop((silent, senders));
}

#[tokio::test]
async fn bodies_that_are_served_take_room_until_they_are_dropped() {
    let room = room(2, Duration::from_millis(100));
    let held = [
        whole(&room, LIMIT).await.unwrap(),
        whole(&room, LIMIT).await.unwrap(),
    ];
    let refused = whole(&room, 2).await.map(|_| ()).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Overloaded);
    assert!(whole(&room, 1).await.is_ok(), "a small one needs no room");
    drop(held);
    assert!(whole(&room, LIMIT).await.is_ok());
}

#[tokio::test]
async fn bodies_that_are_half_read_do_not_wait_for_each_other_in_a_circle() {
    let room = room(2, LONG);
    let headers = HeaderMap::new();
    let (senders, bodies): (Vec<_>, Vec<_>) = (0..4).map(|_| body()).unzip();
    let mut reads: Vec<_> = bodies
        .into_iter()
        .map(|body| Box::pin(room.read(&headers, body)))
        .collect();
    // All begin, and together have more than there is room for.
    for sender in &senders {
        sender.send(pieces(LIMIT / 2)).await.unwrap();
    }
    poll_fn(|cx| {
        assert!(
            reads
                .iter_mut()
                .all(|read| read.as_mut().poll(cx).is_pending())
        );
        Poll::Ready(())
    })
    .await;
    for sender in senders {
        sender.send(pieces(LIMIT / 2)).await.unwrap();
    }
    let all =
        pin!(futures_util::future::join_all(reads.into_iter().map(
            |read| async { read.await.map(|(bytes, _)| bytes.len()) }
        )));
    for read in timeout(LONG, all).await.unwrap() {
        assert_eq!(read.unwrap(), LIMIT * PIECE);
    }
}
