//! Streams pass byte for byte however TCP cuts them (C3.1, C3.2).

use bytes::Bytes;
use proptest::prelude::*;
use twinfer_http::sse::{DONE, SseError, SseEvent, SseParser, error_events, json_event};
use twinfer_protocol::{ApiError, ErrorKind};

/// Events and tail of a stream that arrives in these pieces.
fn parse<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<SseEvent>, Bytes) {
    let mut parser = SseParser::new(1 << 20);
    let mut events = Vec::new();
    for piece in pieces {
        parser.push(Bytes::copy_from_slice(piece));
        while let Some(event) = parser.next_event().unwrap() {
            events.push(event);
        }
    }
    (events, parser.finish())
}

fn data(stream: &[u8]) -> Vec<String> {
    let (events, _) = parse([stream]);
    events
        .iter()
        .filter_map(|e| e.data().map(|d| String::from_utf8_lossy(&d).into_owned()))
        .collect()
}

/// 200 events with everything the format allows.
fn recorded() -> Vec<u8> {
    let mut out = b"\xef\xbb\xbf".to_vec();
    for i in 0..50 {
        out.extend(format!("data: {{\"text\": \"大模型🚀 {i}\"}}\n\n").as_bytes());
        out.extend(format!(": keep-alive {i}\r\n\r\n").as_bytes());
        out.extend(
            format!("event: delta\r\nid: {i}\r\ndata: [DONE]\r\ndata: zwei\r\n\r\n").as_bytes(),
        );
        out.extend(
            format!(": i=0 ids={i},1\ndata:{{\"text\": \"data: [DONE]\\n\\n\"}}\n\n").as_bytes(),
        );
    }
    out.extend(b"data: [DONE]\n\ndata: behind");
    out
}

#[test]
fn a_recorded_stream_cut_at_every_offset_gives_the_same_events() {
    let stream = recorded();
    let (events, tail) = parse([&stream[..]]);
    assert_eq!((events.len(), &tail[..]), (201, &b"data: behind"[..]));
    let joined: Vec<u8> = events
        .iter()
        .flat_map(|e| e.raw().to_vec())
        .chain(tail.to_vec())
        .collect();
    assert_eq!(joined, stream);
    assert_eq!(events.iter().filter(|e| e.is_done()).count(), 1);
    assert!(events[200].is_done());
    for cut in 1..stream.len() {
        let (a, b) = stream.split_at(cut);
        assert_eq!(
            parse([a, b]),
            (events.clone(), tail.clone()),
            "cut at {cut}"
        );
    }
    assert_eq!(parse(stream.chunks(1)), (events, tail));
}

#[test]
fn only_a_whole_event_ends_the_stream() {
    for (stream, done) in [
        (&b"data: [DONE]\n\n"[..], true),
        (b"data:[DONE]\r\n\r\n", true),
        (b": comment\nevent: x\ndata: [DONE]\nid: 1\n\n", true),
        (b"\xef\xbb\xbfdata: [DONE]\n\n", true),
        (b"data: [DONE]\ndata: \n\n", false),
        (b"data:  [DONE]\n\n", false),
        (b"data: \"[DONE]\"\n\n", false),
        (b"data: {\"text\":\"[DONE]\"}\n\n", false),
        (b"event: [DONE]\n\n", false),
        (b": data: [DONE]\n\n", false),
        (b"xdata: [DONE]\n\n", false),
        (b"\n", false),
    ] {
        let (events, _) = parse([stream]);
        assert_eq!(
            (events.len(), events[0].is_done()),
            (1, done),
            "{}",
            String::from_utf8_lossy(stream)
        );
    }
}

#[test]
fn fields_are_read_as_the_standard_says() {
    assert_eq!(
        data(b"data: YHOO\ndata: +2\ndata: 10\n\n"),
        ["YHOO\n+2\n10"]
    );
    assert_eq!(data(b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n"), ["first event", "second event", " third event"]);
    assert_eq!(data(b"data\n\ndata\ndata\n\ndata:\n"), ["", "\n"]);
    assert_eq!(data(b"data: a\rdata: b\r\rdata: c\r\r"), ["a\nb", "c"]);
    assert_eq!(data(b"\r\n\r\ndata: x\n\r\n"), ["x"]);
    let (events, _) = parse([&b"event: a\nevent: b\n: one\n:two\ndata: x\n\n"[..]]);
    assert_eq!(events[0].event(), Some(&b"b"[..]));
    assert_eq!(events[0].comments().collect::<Vec<_>>(), [b"one", b"two"]);
    // A byte order mark counts only at the start of the stream.
    assert_eq!(data(b"data: a\n\n\xef\xbb\xbfdata: b\n\n"), ["a"]);
}

#[test]
fn events_are_given_out_as_soon_as_they_are_whole() {
    for stream in [&b"data: x\n\n"[..], b"data: x\r\n\r\n", b"data: x\r\r"] {
        assert_eq!(parse([stream]).0.len(), 1);
    }
    // With CR LF, the last LF is waited for: it belongs to the event.
    let (events, tail) = parse([&b"data: x\r\n\r"[..]]);
    assert_eq!((events.len(), &tail[..]), (0, &b"data: x\r\n\r"[..]));
}

#[test]
fn events_without_an_end_are_refused_at_the_limit() {
    let mut parser = SseParser::new(100);
    let mut pushed = 0;
    let error = loop {
        parser.push(Bytes::from_static(b"data: xxxxxxxxxxxx\n"));
        pushed += 1;
        match parser.next_event() {
            Ok(event) => assert_eq!(event, None),
            Err(error) => break error,
        }
        assert!(parser.held() <= 100);
    };
    assert_eq!((error, pushed), (SseError::TooLarge { limit: 100 }, 6));
    let mut parser = SseParser::new(100);
    parser.push(Bytes::from(format!("data: {}\n\n", "x".repeat(200))));
    assert!(parser.next_event().is_err());
}

#[test]
fn a_whole_event_in_one_chunk_is_not_copied() {
    let chunk = Bytes::from(b"data: one\n\ndata: two\n\n".to_vec());
    let mut parser = SseParser::new(100);
    parser.push(chunk.clone());
    let first = parser.next_event().unwrap().unwrap();
    let second = parser.next_event().unwrap().unwrap();
    assert_eq!(first.raw().as_ptr(), chunk.as_ptr());
    assert_eq!(second.raw().as_ptr(), chunk[11..].as_ptr());
}

#[test]
fn what_is_written_is_read_back() {
    let mut stream = b": a comment\n".to_vec();
    stream.extend_from_slice(&json_event(
        &serde_json::json!({"text": "a\n\ndata: [DONE]"}),
    ));
    let error = ApiError::new(ErrorKind::DecodeUnreachable, "gone\n\nreally");
    stream.extend_from_slice(&error_events(&error));
    let (events, tail) = parse([&stream[..]]);
    assert_eq!((events.len(), tail.len()), (3, 0));
    assert_eq!(
        &*events[0].data().unwrap(),
        br#"{"text":"a\n\ndata: [DONE]"}"#
    );
    let body: twinfer_protocol::ErrorBody =
        serde_json::from_slice(&events[1].data().unwrap()).unwrap();
    assert_eq!(body, error.body());
    assert!(events[2].is_done() && events[2].raw() == &DONE);
}

proptest! {
    #[test]
    fn any_bytes_cut_anywhere_are_kept_and_cut_into_the_same_events(
        stream in prop::collection::vec(prop_oneof![4 => Just(b'\n'), 4 => Just(b'\r'), 2 => Just(b':'), 2 => Just(b'd'), 1 => any::<u8>()], 0..80),
        cuts in prop::collection::vec(0..80usize, 0..6),
    ) {
        let whole = parse([&stream[..]]);
        let joined: Vec<u8> = whole.0.iter().flat_map(|e| e.raw().to_vec()).chain(whole.1.to_vec()).collect();
        prop_assert_eq!(&joined, &stream);
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|&c| c <= stream.len()).collect();
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        prop_assert_eq!(parse(cuts.windows(2).map(|w| &stream[w[0]..w[1]])), whole);
        prop_assert_eq!(parse(stream.chunks(1)).0.len(), parse([&stream[..]]).0.len());
    }

    /// Against the standard's own description: lines first, then fields, dispatch at blank lines.
    #[test]
    fn data_equals_a_plain_reading(stream in "(data|data:|data: |:|id:|x| |\n|\r|\r\n|\n\n|y){0,30}") {
        let text = stream.replace("\r\n", "\n").replace('\r', "\n");
        let mut expected = Vec::new();
        let mut lines: Vec<&str> = Vec::new();
        let mut rest = text.as_str();
        while let Some((line, tail)) = rest.split_once('\n') {
            rest = tail;
            if !line.is_empty() {
                lines.push(line);
                continue;
            }
            let values = lines.drain(..).filter_map(|l| {
                let (name, value) = l.split_once(':').unwrap_or((l, ""));
                (name == "data").then(|| value.strip_prefix(' ').unwrap_or(value).to_owned())
            });
            let values: Vec<String> = values.collect();
            if !values.is_empty() {
                expected.push(values.join("\n"));
            }
        }
        // A CR at the very end may be half of a CR LF: the event behind it may still be open.
        let mut found = data(stream.as_bytes());
        if stream.ends_with('\r') && found.len() + 1 == expected.len() {
            found = data(format!("{stream}\n").as_bytes());
        }
        prop_assert_eq!(found, expected);
    }
}
